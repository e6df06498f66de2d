//! Probes on a process of our own: what a probe costs on this machine, and whether a process under seccomp survives one.
//!
//! From Linux 6.11 a return probe, and from 6.18 a probe on a 5-byte nop, makes the probed process enter the kernel by a
//! system call of its own (`uretprobe`, `uprobe`). Kernels before 6.14 ask the process's seccomp filter about it, and a
//! filter that does not know it kills the process. Whether this kernel does is tried out, since distributions carry the
//! fix back.

mod child;

use std::time::Duration;

use serde::Serialize;
use tracer_abi::{Target, call, programs};

use super::{
    Options, ProbeError, attach,
    kernel::Kernel,
    process::{self, Found},
    uprobe::{Links, Place},
};
use child::{Child, Site};

/// Which probes a process under a seccomp filter survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Seccomp {
    pub returns: bool,
    pub nop5: bool,
}

/// What one of our probes costs the probed thread, by what its instruction is: in ns of CPU time per call, with
/// everything that is recorded of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClassCost {
    /// `nop5`, `emulated` or `stepped`.
    pub placement: &'static str,
    pub entry_ns: f64,
    /// With a return probe.
    pub pair_ns: f64,
}

/// What [`run`] found out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    pub costs: Vec<ClassCost>,
    pub seccomp: Seccomp,
    /// Probes of a library share a link: they come and go together.
    pub batches: bool,
}

/// Calls in a batch; the median of the batches counts.
const BATCHES: usize = 5;
const WARM_UP_CALLS: u32 = 200;
/// Enough for the kernel to rewrite a nop, which it does at the first hit.
const SECCOMP_CALLS: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(5);

/// Loads the kernel side, probes a process of our own, and takes everything away again. Takes less than a second.
///
/// # Errors
/// As [`super::Session::start`]; or the process cannot be made or probed.
pub fn run() -> Result<Outcome, ProbeError> {
    let options = Options { sample_hz: 0, sched: false, ..Options::default() };
    let mut kernel = Kernel::load(&options)?;
    Ok(Outcome {
        costs: costs(&mut kernel)?,
        seccomp: seccomp(&mut kernel)?,
        batches: kernel.uprobes.in_batches(),
    })
}

/// Tries probes on a process under a filter that allows nothing but what it needs.
pub(crate) fn seccomp(kernel: &mut Kernel) -> Result<Seccomp, ProbeError> {
    let mut survives = |site, program| {
        let mut child = Child::start(true)?;
        // Without a probe it must live, or its end would say nothing of probes.
        child.call(site, 1, PATIENCE)?;
        let links = attach_one(kernel, &child.found, site, program)?;
        let result = child.call(site, SECCOMP_CALLS, PATIENCE);
        links.detach();
        Ok::<_, ProbeError>(result.is_ok())
    };
    Ok(Seccomp {
        returns: survives(Site::Emulated, programs::CALL_RETURN)?,
        nop5: survives(Site::Nop5, programs::CALL_ENTRY)?,
    })
}

fn costs(kernel: &mut Kernel) -> Result<Vec<ClassCost>, ProbeError> {
    let mut child = Child::start(false)?;
    let target = Target { start_ticks: child.found.id.start_ticks, flags: 0, epoch: 0 };
    kernel
        .targets
        .insert(child.found.id.tgid, bytemuck::cast::<Target, [u64; 2]>(target), 0)
        .map_err(|source| ProbeError::Map { name: tracer_abi::maps::TARGETS, source })?;
    Site::ALL.into_iter().map(|site| cost(kernel, &mut child, site)).collect()
}

fn cost(kernel: &mut Kernel, child: &mut Child, site: Site) -> Result<ClassCost, ProbeError> {
    let found = child.found.clone();
    let mut measure = |kernel: &mut Kernel| -> Result<f64, ProbeError> {
        child.call(site, WARM_UP_CALLS, PATIENCE)?;
        let mut batches = Vec::with_capacity(BATCHES);
        for _ in 0..BATCHES {
            let ns = child.call(site, site.calls(), PATIENCE)?;
            batches.push(ns as f64 / f64::from(site.calls()));
            while kernel.vital.next().is_some() {}
        }
        batches.sort_by(f64::total_cmp);
        Ok(batches[BATCHES / 2])
    };
    let bare = measure(kernel)?;
    let entry = attach_one(kernel, &found, site, programs::CALL_ENTRY)?;
    let entry_ns = measure(kernel)? - bare;
    entry.detach();
    let mut pair = attach_one(kernel, &found, site, programs::CALL_RETURN)?;
    pair.append(attach_one(kernel, &found, site, programs::CALL_ENTRY)?);
    let pair_ns = measure(kernel)? - bare;
    pair.detach();
    Ok(ClassCost { placement: site.placement(), entry_ns: entry_ns.max(0.0), pair_ns: pair_ns.max(0.0) })
}

/// Probes a site of our own program in the child. An entry that stands alone says so in its cookie.
fn attach_one(
    kernel: &mut Kernel,
    found: &Found,
    site: Site,
    program: &'static str,
) -> Result<Links, ProbeError> {
    let address = site.address();
    let mappings = process::mappings(found.id.tgid)?;
    let file = mappings.iter().find(|file| (file.begin..file.end).contains(&address));
    let gone = || ProbeError::ProcessGone { pid: found.id.tgid };
    let file = file.ok_or_else(gone)?;
    let source = |source| ProbeError::Process { pid: found.id.tgid, source };
    let (_, path) = attach::open(found.id, file).map_err(source)?;
    let place = Place { offset: address - file.begin + file.offset, cookie: call::cookie(0, true) };
    kernel.attach(program, found.id, &path, &[place])
}

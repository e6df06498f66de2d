//! What a probe costs at least: an eBPF program that only returns, attached through perf_event_open as aya does it.

use std::ffi::CString;
use std::io::Error;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_TYPE_KPROBE: u64 = 2;
/// `r0 = 0` and `exit` (Documentation/bpf/standardization/instruction-set.rst).
const PROGRAM: [u64; 2] = [0xb7, 0x95];

const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
const PERF_EVENT_IOC_SET_BPF: libc::c_ulong = 0x4004_2408;

/// A uprobe to attach: where, and whether at the return, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// In bytes, in the file.
    pub(crate) offset: u64,
    pub(crate) with_return: bool,
}

/// Empty probes in one process. Dropping them takes them away.
pub(crate) struct Empty {
    events: Vec<OwnedFd>,
}

impl Empty {
    /// Attaches empty programs in a process, in the order in which the tracer attaches its own.
    pub(crate) fn attach(pid: u32, file: &Path, places: &[Place]) -> Result<Self> {
        let program = load()?;
        let kind = pmu("type")?.parse().context("the number of the uprobe PMU")?;
        let bit = pmu("format/retprobe")?;
        let bit: u32 =
            bit.strip_prefix("config:").and_then(|bit| bit.parse().ok()).with_context(|| bit.clone())?;
        let mut events = Vec::new();
        for place in places {
            if place.with_return {
                events.push(attach_one(&program, kind, 1 << bit, pid, file, place.offset)?);
            }
            events.push(attach_one(&program, kind, 0, pid, file, place.offset)?);
        }
        Ok(Self { events })
    }
}

impl Drop for Empty {
    fn drop(&mut self) {
        // The kernel waits about 0.1 s for each; the waits overlap.
        std::thread::scope(|scope| {
            for event in self.events.drain(..) {
                scope.spawn(move || drop(event));
            }
        });
    }
}

fn load() -> Result<OwnedFd> {
    // union bpf_attr for BPF_PROG_LOAD: prog_type and insn_cnt (32 bits each), insns, license; the rest is zero.
    let attributes: [u64; 6] = [
        BPF_PROG_TYPE_KPROBE | (PROGRAM.len() as u64) << 32,
        PROGRAM.as_ptr() as u64,
        c"GPL".as_ptr() as u64,
        0,
        0,
        0,
    ];
    // SAFETY: the attributes, and what they point to, are valid and as long as said.
    let fd =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, attributes.as_ptr(), size_of_val(&attributes)) };
    owned(fd).context("loading an empty eBPF program (needs root)")
}

fn attach_one(
    program: &OwnedFd,
    kind: u64,
    config: u64,
    pid: u32,
    file: &Path,
    offset: u64,
) -> Result<OwnedFd> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    // struct perf_event_attr up to config2: type and size (32 bits each), config, sample_period, sample_type,
    // read_format, flags, wakeup_events and bp_type, uprobe_path, probe_offset.
    const BYTES: u64 = 72;
    let attributes: [u64; 9] = [kind | BYTES << 32, config, 0, 0, 0, 0, 0, path.as_ptr() as u64, offset];
    // SAFETY: the attributes, and the path that they point to, are valid and as long as said.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attributes.as_ptr(),
            pid.cast_signed(),
            -1,
            -1,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    let what = || format!("probing {}+{offset:#x} in process {pid} with an empty program", file.display());
    let event = owned(fd).with_context(what)?;
    // SAFETY: both descriptors are open; the operations take a number.
    let failed = unsafe {
        libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_SET_BPF, program.as_raw_fd()) != 0
            || libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_ENABLE, 0) != 0
    };
    ensure!(!failed, "{}: {}", what(), Error::last_os_error());
    Ok(event)
}

fn owned(fd: libc::c_long) -> std::io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(Error::other)?;
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pmu(name: &str) -> Result<String> {
    let path = Path::new("/sys/bus/event_source/devices/uprobe").join(name);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

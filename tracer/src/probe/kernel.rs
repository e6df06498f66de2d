//! Loads the programs and attaches those that serve all targets at once.

use std::path::Path;

use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{HashMap, MapData, PerCpuArray, RingBuf},
    programs::{
        BtfTracePoint, PerfEvent, ProgramError,
        perf_event::{PerfEventConfig, PerfEventLink, PerfEventScope, SamplePolicy, SoftwareEvent},
        tp_btf::BtfTracePointLink,
    },
};
use tracer_abi::{Offsets, Target, globals, maps, programs};

use super::{
    ProbeError, btf, object,
    unwind::Unwinder,
    uprobe::{Links, Place, Uprobes},
};
use crate::event::ProcessId;

/// What to record.
#[derive(Clone, Debug)]
pub struct Options {
    /// On-CPU samples per second and CPU; 0: none.
    pub sample_hz: u64,
    /// User stacks are walked by tables where files have them; else by frame pointers alone.
    pub tables: bool,
    /// Off-CPU intervals and who ended them.
    pub sched: bool,
    /// Off-CPU intervals shorter than this many ns are not recorded.
    pub min_off_cpu_ns: u64,
    /// HTTP requests and the tokens that are sent for them, from sockets.
    pub sockets: bool,
    pub http: crate::http::Config,
    /// By system calls even where the kernel has hooks for sockets.
    pub socket_syscalls: bool,
    /// Children of targets become targets.
    pub follow: bool,
    /// Returns of functions are probed, where that is safe.
    pub returns: bool,
    /// Messages of the kernel-side programs go to the log.
    pub log_kernel: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sample_hz: 99,
            tables: true,
            sched: true,
            min_off_cpu_ns: 0,
            sockets: true,
            http: crate::http::Config::default(),
            socket_syscalls: false,
            follow: true,
            returns: true,
            log_kernel: false,
        }
    }
}

/// A kind of event that this machine cannot record; the rest still works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// `sched`, `samples` or `process`.
    pub what: &'static str,
    pub consequence: &'static str,
    pub why: String,
}

/// The loaded programs and their maps.
pub(crate) struct Kernel {
    ebpf: Ebpf,
    pub(crate) uprobes: Uprobes,
    pub(crate) vital: RingBuf<MapData>,
    pub(crate) bulk: RingBuf<MapData>,
    pub(crate) targets: HashMap<MapData, u32, [u64; 2]>,
    pub(crate) open_calls: HashMap<MapData, u32, [u64; CALLS_WORDS]>,
    pub(crate) sleepers: HashMap<MapData, u32, [u64; SCHED_WORDS]>,
    pub(crate) counters: PerCpuArray<MapData, u64>,
    pub(crate) hits: PerCpuArray<MapData, u64>,
    pub(crate) ports: HashMap<MapData, u16, u32>,
    pub(crate) unwinder: Unwinder,
    pub(crate) missing: Vec<Missing>,
    links: Vec<GlobalLink>,
    wire: Option<BtfTracePointLink>,
    wire_failed: bool,
    logger: Option<aya_log::EbpfLogger<&'static dyn log::Log>>,
}

pub(crate) const SCHED_WORDS: usize = size_of::<tracer_abi::Sched>() / 8;
pub(crate) const CALLS_WORDS: usize = size_of::<tracer_abi::call::ThreadCalls>() / 8;

impl Kernel {
    /// Loads everything; attaches the scheduler, process and sampling programs where the machine has them.
    pub(crate) fn load(options: &Options) -> Result<Self, ProbeError> {
        let object = object::bytes()?;
        check_privileges()?;
        let path = Path::new(btf::VMLINUX);
        let offsets = btf::offsets(path)?;
        let period_ns = 1_000_000_000u64.checked_div(options.sample_hz).unwrap_or(0);
        let level = if options.log_kernel { aya_log::Level::Debug as u8 } else { 0 };
        let mut ebpf = EbpfLoader::new()
            .override_global(globals::OFFSETS, bytemuck::bytes_of(&offsets), true)
            .override_global(globals::SAMPLE_PERIOD_NS, &period_ns, true)
            .override_global(globals::MIN_OFF_CPU_NS, &options.min_off_cpu_ns, true)
            .override_global(aya_log::LEVEL, &level, true)
            .load(object)?;
        // Before any map is taken: these programs use them, too.
        let uprobes = Uprobes::load(&mut ebpf)?;
        let logger = if options.log_kernel { logger(&mut ebpf) } else { None };
        let mut kernel = Self {
            uprobes,
            vital: take(&mut ebpf, maps::VITAL)?,
            bulk: take(&mut ebpf, maps::BULK)?,
            targets: take(&mut ebpf, maps::TARGETS)?,
            open_calls: take(&mut ebpf, maps::OPEN)?,
            sleepers: take(&mut ebpf, maps::SLEEPERS)?,
            counters: take(&mut ebpf, maps::COUNTERS)?,
            hits: take(&mut ebpf, maps::HITS)?,
            ports: take(&mut ebpf, maps::PORTS)?,
            unwinder: Unwinder::start(&mut ebpf, options.tables)?,
            missing: Vec::new(),
            links: Vec::new(),
            wire: None,
            wire_failed: false,
            logger,
            ebpf,
        };
        if offsets.task_utask == 0 {
            kernel.missing.push(Missing {
                what: "pending returns",
                consequence: "stacks end at functions that are probed on return",
                why: "this kernel's types do not say where it keeps them".into(),
            });
        }
        kernel.attach_global(options, &offsets)?;
        Ok(kernel)
    }

    fn attach_global(&mut self, options: &Options, offsets: &Offsets) -> Result<(), ProbeError> {
        let btf = Btf::from_sys_fs()
            .map_err(|error| ProbeError::BadBtf { path: btf::VMLINUX.into(), what: error.to_string() })?;
        for (name, tracepoint) in [
            (programs::PROCESS_FORK, "sched_process_fork"),
            (programs::PROCESS_EXEC, "sched_process_exec"),
            (programs::PROCESS_EXIT, "sched_process_exit"),
        ] {
            let consequence = "children, program changes and exits of targets are not followed";
            self.tracepoint("process", consequence, name, tracepoint, &btf);
        }
        if options.sched {
            let consequence = "no off-CPU time: waiting for a CPU or a lock cannot be told from running";
            // Waking first: a switch-in without its wake-up would look like an unseen wake-up.
            self.tracepoint("sched", consequence, programs::SCHED_WAKING, "sched_waking", &btf);
            self.tracepoint("sched", consequence, programs::SCHED_SWITCH, "sched_switch", &btf);
        }
        if options.sockets {
            self.attach_sockets(&btf, offsets, options.socket_syscalls);
        }
        if options.sample_hz > 0
            && let Err(why) = self.attach_samples(options.sample_hz)
        {
            let consequence = "no on-CPU stacks: the flame graph will be empty";
            self.missing.push(Missing { what: "samples", consequence, why });
        }
        Ok(())
    }

    fn attach_sockets(&mut self, btf: &Btf, offsets: &Offsets, by_syscalls: bool) {
        let described = ![offsets.tcp_write_seq, offsets.tcp_snd_nxt, offsets.sock_num].contains(&0);
        let hooks = [
            (programs::SOCKET_STATE, "inet_sock_set_state"),
            (programs::SOCKET_SEND, "sock_send_length"),
            (programs::SOCKET_RECV, "sock_recv_length"),
        ];
        if described && !by_syscalls && self.try_tracepoints(&hooks, btf).is_ok() {
            let consequence = "when a request reached the machine is not known, only when it was read";
            self.tracepoint("arrivals", consequence, programs::SOCKET_READY, "sk_data_ready", btf);
            // Kernels may be without io_uring: then there is nothing to tell apart.
            let _no_rings = self.try_tracepoint(programs::SOCKET_RING, "io_uring_create", btf);
            return;
        }
        let calls = [(programs::SYSCALL_ENTER, "sys_enter"), (programs::SYSCALL_EXIT, "sys_exit")];
        let missing = match self.try_tracepoints(&calls, btf) {
            Ok(()) => Missing {
                what: "arrivals",
                consequence: "when a request reached the machine and when held bytes left it are not known, and every \
                              system call costs a little",
                why: "sockets are followed by system calls (the kernel has no hooks below them before 6.3)"
                    .into(),
            },
            Err(why) => {
                Missing { what: "sockets", consequence: "requests and tokens are known from marks only", why }
            }
        };
        self.wire_failed = true;
        self.missing.push(missing);
    }

    /// Attaches all of them, or none.
    fn try_tracepoints(&mut self, programs: &[(&'static str, &str)], btf: &Btf) -> Result<(), String> {
        let before = self.links.len();
        for (name, tracepoint) in programs {
            if let Err(why) = self.try_tracepoint(name, tracepoint, btf) {
                self.links.truncate(before);
                return Err(why);
            }
        }
        Ok(())
    }

    fn tracepoint(
        &mut self,
        what: &'static str,
        consequence: &'static str,
        name: &'static str,
        tracepoint: &str,
        btf: &Btf,
    ) {
        if let Err(why) = self.try_tracepoint(name, tracepoint, btf) {
            self.missing.push(Missing { what, consequence, why });
        }
    }

    fn try_tracepoint(&mut self, name: &'static str, tracepoint: &str, btf: &Btf) -> Result<(), String> {
        let program = self.ebpf.program_mut(name).ok_or_else(|| format!("no program `{name}`"))?;
        let program: &mut BtfTracePoint = program.try_into().map_err(chain)?;
        program.load(tracepoint, btf).map_err(chain)?;
        let link = program.attach().map_err(chain)?;
        self.links.push(GlobalLink::Tracepoint(program.take_link(link).map_err(chain)?));
        Ok(())
    }

    fn attach_samples(&mut self, hz: u64) -> Result<(), String> {
        let cpus = aya::util::online_cpus().map_err(|(path, error)| format!("{path}: {error}"))?;
        let name = programs::SAMPLE;
        let program = self.ebpf.program_mut(name).ok_or_else(|| format!("no program `{name}`"))?;
        let program: &mut PerfEvent = program.try_into().map_err(chain)?;
        program.load().map_err(chain)?;
        for cpu in cpus {
            let link = program
                .attach(
                    PerfEventConfig::Software(SoftwareEvent::CpuClock),
                    PerfEventScope::AllProcessesOneCpu { cpu },
                    SamplePolicy::Frequency(hz),
                    false,
                )
                .map_err(chain)?;
            self.links.push(GlobalLink::Samples(program.take_link(link).map_err(chain)?));
        }
        Ok(())
    }

    /// Follows held bytes onto the wire, or no longer. Where the kernel cannot, when they left stays unknown.
    pub(crate) fn set_wire(&mut self, wanted: bool) {
        if wanted == self.wire.is_some() || self.wire_failed {
            return;
        }
        if !wanted {
            self.wire = None;
            return;
        }
        match self.try_wire() {
            Ok(link) => self.wire = Some(link),
            Err(why) => {
                tracing::debug!("held bytes are not followed onto the wire: {why}");
                self.wire_failed = true;
            }
        }
    }

    fn try_wire(&mut self) -> Result<BtfTracePointLink, String> {
        let name = programs::SOCKET_WIRE;
        let program = self.ebpf.program_mut(name).ok_or_else(|| format!("no program `{name}`"))?;
        let program: &mut BtfTracePoint = program.try_into().map_err(chain)?;
        // Reading the kernel's types takes long for a place between two drains: once, and only where bytes are held.
        if program.fd().is_err() {
            let btf = Btf::from_sys_fs().map_err(chain)?;
            program.load("tcp_probe", &btf).map_err(chain)?;
        }
        let link = program.attach().map_err(chain)?;
        program.take_link(link).map_err(chain)
    }

    /// Probes places of one file in one process with one of the uprobe programs, all or none.
    pub(crate) fn attach(
        &mut self,
        name: &'static str,
        process: ProcessId,
        path: &Path,
        places: &[Place],
    ) -> Result<Links, ProbeError> {
        self.uprobes.attach(&mut self.ebpf, name, process, path, places)
    }

    /// How often a target has executed another program, as the kernel side counts; `None` of one that is no target.
    pub(crate) fn epoch(&self, process: ProcessId) -> Option<u32> {
        let target: Target = bytemuck::cast(self.targets.get(&process.tgid, 0).ok()?);
        (target.start_ticks == process.start_ticks).then_some(target.epoch)
    }

    /// Passes on what the kernel-side programs logged.
    pub(crate) fn flush_log(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }

    /// Detaches everything that serves all targets: what is left in the maps then stays as it is.
    pub(crate) fn detach_global(&mut self) {
        self.links.clear();
        self.wire = None;
    }
}

/// Keeps a program attached while it lives.
#[expect(dead_code, reason = "held for its drop only")]
enum GlobalLink {
    Tracepoint(BtfTracePointLink),
    Samples(PerfEventLink),
}

fn logger(ebpf: &mut Ebpf) -> Option<aya_log::EbpfLogger<&'static dyn log::Log>> {
    match aya_log::EbpfLogger::init(ebpf) {
        Ok(logger) => Some(logger),
        Err(error) => {
            tracing::warn!("messages of the kernel-side programs are not available: {error}");
            None
        }
    }
}

fn take<T>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, ProbeError>
where
    T: TryFrom<aya::maps::Map, Error = aya::maps::MapError>,
{
    let map = ebpf.take_map(name).ok_or(ProbeError::Absent { what: "map", name })?;
    T::try_from(map).map_err(|source| ProbeError::Map { name, source })
}

/// An error with its causes, on one line. What the verifier said goes to the log: it is long, and for us.
fn chain(error: impl std::error::Error + 'static) -> String {
    if let Some(ProgramError::LoadError { io_error, verifier_log }) =
        (&error as &dyn std::error::Error).downcast_ref()
    {
        tracing::debug!("verifier: {verifier_log}");
        return format!("the kernel refuses the program: {io_error} (TRACER_LOG=debug shows why)");
    }
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

const CAPABILITIES: [(u32, &str); 3] =
    [(39, "CAP_BPF"), (38, "CAP_PERFMON"), (CAP_SYS_PTRACE, "CAP_SYS_PTRACE")];
const CAP_SYS_PTRACE: u32 = 19;
/// Includes CAP_BPF and CAP_PERFMON.
const CAP_SYS_ADMIN: u32 = 21;

/// Whether the process may load and attach; asks before trying, since the kernel's own answer is a bare EPERM.
///
/// # Errors
/// Names the capabilities that are missing.
pub fn check_privileges() -> Result<(), ProbeError> {
    let status = procfs::process::Process::myself().and_then(|process| process.status());
    let Ok(status) = status else { return Ok(()) };
    let has = |capability: u32| status.capeff >> capability & 1 == 1;
    let missing: Vec<&str> = CAPABILITIES
        .iter()
        .filter(|(number, _)| !has(*number) && (*number == CAP_SYS_PTRACE || !has(CAP_SYS_ADMIN)))
        .map(|(_, name)| *name)
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(ProbeError::Privileges { missing: missing.join(", ") }) }
}

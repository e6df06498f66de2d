//! The event ABI: what the kernel-side programs write and user space reads, and the payloads of marks.
//!
//! In: nothing. Out: plain structs of fixed-width integers. This crate must never allocate, do I/O or depend on
//! anything that the bpf target cannot build. An event has the same name here, in the kernel programs
//! (`src/programs/<name>.rs`) and in `tracer::event::<name>`.
//!
//! Rules of the ABI: explicit padding only (`bytemuck::Pod` rejects hidden padding), no `bool`, `enum` or `usize`;
//! every record begins with a [`Header`] whose `kind` is decoded through `TryFrom`: an unknown kind is counted by
//! the reader, never undefined behaviour. Times are nanoseconds of CLOCK_MONOTONIC unless the name says otherwise.
#![cfg_attr(not(test), no_std)]

pub mod call;
pub mod call_stack;
pub mod counter;
pub mod header;
pub mod mark;
pub mod nvtx;
pub mod offsets;
pub mod open;
pub mod process;
pub mod sample;
pub mod sched;
pub mod shape;
pub mod socket;
pub mod stack;
pub mod tensor;
pub mod unwind;

pub use call::Call;
pub use call_stack::CallStack;
pub use counter::Counter;
pub use header::{Header, Kind, UnknownKind};
pub use mark::MarkRecord;
pub use offsets::Offsets;
pub use open::Open;
pub use process::Process;
pub use sample::Sample;
pub use sched::Sched;
pub use socket::Socket;

/// Names of maps that user space opens.
pub mod maps {
    /// Ring for `call`, `call_stack`, `mark`, `socket`, `open` and `process` records: shed last.
    pub const VITAL: &str = "VITAL";
    /// Ring for `sched` and `sample` records: shed first.
    pub const BULK: &str = "BULK";
    /// `tgid → Target`: the processes that are traced.
    pub const TARGETS: &str = "TARGETS";
    /// `tid → call::ThreadCalls`: calls that have begun and not returned.
    pub const OPEN: &str = "OPEN";
    /// Per-CPU array of u64, indexed by [`crate::Counter`].
    pub const COUNTERS: &str = "COUNTERS";
    /// `tid → Sched`: threads that are off the CPU (`off_ns` is 0 while they run).
    pub const SLEEPERS: &str = "SLEEPERS";
    /// Per-CPU array of u64, indexed by point id: hits of each probe point.
    pub const HITS: &str = "HITS";
    /// Local ports (u16) on which the arrival of bytes is noted.
    pub const PORTS: &str = "PORTS";
    /// `tgid → unwind::Space`: the processes whose stacks can be walked.
    pub const SPACES: &str = "SPACES";
    /// Array of [`crate::unwind::Mapping`].
    pub const MAPPINGS: &str = "MAPPINGS";
    /// Array of u64: [`crate::unwind::page`].
    pub const PAGES: &str = "PAGES";
    /// Array of chunks, each an array of [`crate::unwind::CHUNK_ROWS`] rows.
    pub const ROWS: &str = "ROWS";
    /// Array of [`crate::unwind::Rule`].
    pub const RULES: &str = "RULES";
    /// Array of [`crate::unwind::PythonOffsets`].
    pub const PYTHONS: &str = "PYTHONS";
    /// `tid → unwind::PythonThread`.
    pub const PYTHON_THREADS: &str = "PYTHON_THREADS";
}

/// Globals that user space sets before loading.
pub mod globals {
    /// [`crate::Offsets`].
    pub const OFFSETS: &str = "OFFSETS";
    /// u64: CPU time that one sample stands for, in ns.
    pub const SAMPLE_PERIOD_NS: &str = "SAMPLE_PERIOD_NS";
    /// u64: off-CPU intervals shorter than this many ns are not recorded.
    pub const MIN_OFF_CPU_NS: &str = "MIN_OFF_CPU_NS";
}

/// Most probe points of one recording (entries of [`maps::HITS`]).
pub const MAX_POINTS: u32 = 4096;
/// Most processes traced at once.
pub const MAX_TARGETS: u32 = 1024;
/// Most threads of targets that are followed at once.
pub const MAX_THREADS: u32 = 8192;

/// Names of the kernel-side programs.
pub mod programs {
    /// uprobe: a probe point is entered.
    pub const CALL_ENTRY: &str = "call_entry";
    /// uretprobe: a probe point returns.
    pub const CALL_RETURN: &str = "call_return";
    /// uprobe: a mark.
    pub const MARK: &str = "mark";
    /// uprobe and uretprobe: a function of NVTX.
    pub const NVTX: &str = "nvtx";
    pub const NVTX_RETURN: &str = "nvtx_return";
    /// tp_btf/sched_switch.
    pub const SCHED_SWITCH: &str = "sched_switch";
    /// tp_btf/sched_waking.
    pub const SCHED_WAKING: &str = "sched_waking";
    /// tp_btf/sock_send_length.
    pub const SOCKET_SEND: &str = "socket_send";
    /// tp_btf/sock_recv_length.
    pub const SOCKET_RECV: &str = "socket_recv";
    /// tp_btf/inet_sock_set_state.
    pub const SOCKET_STATE: &str = "socket_state";
    /// tp_btf/sk_data_ready.
    pub const SOCKET_READY: &str = "socket_ready";
    /// tp_btf/tcp_probe: attached while bytes are held.
    pub const SOCKET_WIRE: &str = "socket_wire";
    /// tp_btf/io_uring_create.
    pub const SOCKET_RING: &str = "socket_ring";
    /// tp_btf/sys_enter and sys_exit: in place of the socket programs on kernels before 6.3.
    pub const SYSCALL_ENTER: &str = "syscall_enter";
    pub const SYSCALL_EXIT: &str = "syscall_exit";
    /// uprobe: the shape of an engine's input.
    pub const SHAPE: &str = "shape";
    /// uprobe and uretprobe: a question to an engine or its context, and the answer.
    pub const TENSOR: &str = "tensor";
    pub const TENSOR_RETURN: &str = "tensor_return";
    /// uprobe: a function that opens files.
    pub const FILE_OPEN: &str = "file_open";
    /// perf_event: on-CPU sampling.
    pub const SAMPLE: &str = "sample";
    /// tp_btf/sched_process_fork.
    pub const PROCESS_FORK: &str = "process_fork";
    /// tp_btf/sched_process_exec.
    pub const PROCESS_EXEC: &str = "process_exec";
    /// tp_btf/sched_process_exit.
    pub const PROCESS_EXIT: &str = "process_exit";
}

/// Value of the `TARGETS` map: one traced process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Target {
    /// Start of the process in USER_HZ ticks since boot (CLOCK_BOOTTIME), as field 22 of `/proc/PID/stat`: with the
    /// tgid it names a process for life.
    pub start_ticks: u64,
    /// `TARGET_*` bits.
    pub flags: u32,
    /// How often it has executed another program since it became a target.
    pub epoch: u32,
}

/// Children that this process forks become targets too.
pub const TARGET_FOLLOW: u32 = 1;
/// The process has an io_uring: what it does on a socket may be no part of the system call that it is in.
pub const TARGET_RING: u32 = 2;

const _: () = assert!(size_of::<Target>() == 16);

//! Decoded events: what the probes saw, one neutral type per kind, with the names of `tracer_abi`.
//!
//! In: records of the kernel rings, host clock brackets, mappings, readings of GPUs. Out: [`Event`]s in time order. Everything after
//! this (capture, timeline, clock, pictures) knows events only by these types, whether they come live from the kernel
//! or from a capture. This folder does no I/O and never resolves a name.
//!
//! Times ending in `_ns` are CLOCK_MONOTONIC unless the name says otherwise (`_raw_ns`: CLOCK_MONOTONIC_RAW).

pub mod engine;
pub mod gpu;
pub mod http;
pub mod mark;
pub mod record;
pub mod sorter;
pub mod stack;
pub mod xid;

pub use engine::{EngineFile, EngineSeen};
pub use engines::Role;
pub use gpu::{GpuProcess, GpuSample};
pub use http::{HttpBegin, HttpEnd, HttpFinish, HttpSend, HttpWire};
pub use mark::Mark;
pub use xid::Xid;

/// A process for life: a pid alone may be reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    pub tgid: u32,
    /// Start in USER_HZ ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_ticks: u64,
}

/// When, who, where: common to all kernel events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// When the record was written.
    pub time_ns: u64,
    pub process: ProcessId,
    pub tid: u32,
    pub cpu: u32,
}

/// Anything that a capture holds in its raw tables.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Call(Call),
    Mark(MarkEvent),
    Sched(Sched),
    Sample(Sample),
    Process(Process),
    HttpBegin(HttpBegin),
    HttpSend(HttpSend),
    HttpWire(HttpWire),
    HttpEnd(HttpEnd),
    HostClock(HostClock),
    Mapping(Mapping),
    Code(Code),
    Stack(Stack),
    Point(Point),
    Gpu(GpuSample),
    GpuProcess(GpuProcess),
    Xid(Xid),
    EngineFile(EngineFile),
}

impl Event {
    /// CLOCK_MONOTONIC ns by which events are ordered; definitions (points, stacks) come before what uses them.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        match self {
            Self::Call(e) => e.origin.time_ns,
            Self::Mark(e) => e.origin.time_ns,
            Self::Sched(e) => e.origin.time_ns,
            Self::Sample(e) => e.origin.time_ns,
            Self::Process(e) => e.origin.time_ns,
            Self::HttpBegin(e) => e.origin.time_ns,
            Self::HttpSend(e) => e.origin.time_ns,
            Self::HttpWire(e) => e.origin.time_ns,
            Self::HttpEnd(e) => e.origin.time_ns,
            Self::HostClock(e) => e.monotonic_ns,
            Self::Mapping(e) => e.time_ns,
            Self::Code(e) => e.time_ns,
            Self::Stack(e) => e.time_ns,
            Self::Point(e) => e.time_ns,
            Self::Gpu(e) => e.time_ns,
            Self::GpuProcess(e) => e.time_ns,
            Self::Xid(e) => e.time_ns,
            Self::EngineFile(e) => e.time_ns,
        }
    }

    /// Whether it comes from a stand-in: everything derived from it is simulated.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        match self {
            Self::Point(point) => point.simulated,
            Self::Gpu(sample) => sample.simulated,
            _ => false,
        }
    }
}

/// How a probed call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallEnd {
    Returned,
    /// The point has no return probe; `end_ns` is 0.
    EntryOnly,
    /// Left without a return (longjmp, exception); `end_ns` is when that was noticed.
    Unwound,
    /// Still running when the recording stopped; `end_ns` is that time.
    Open,
    /// Its thread exited inside; `end_ns` is that time.
    Exited,
}

/// One call of a probe point. See `tracer_abi::Call`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub origin: Origin,
    /// Number of the probe point in this capture ([`Point::id`]).
    pub point: u32,
    pub parent_point: Option<u32>,
    pub depth: u32,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub end: CallEnd,
    pub sp: u64,
    pub args: [u64; 6],
    pub ret: u64,
    /// Where it comes from, as far as that was looked at: of steps. A thread's stack at a place is walked once a second at
    /// most, so that of a caller far up another one may be meant.
    pub stack: Option<StackId>,
}

/// A mark as it came from the kernel, decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct MarkEvent {
    pub origin: Origin,
    pub mark: Mark,
}

/// One off-CPU interval of a thread. See `tracer_abi::Sched`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sched {
    /// `time_ns` is the switch-in.
    pub origin: Origin,
    pub off_ns: u64,
    /// When it was woken; `None` when it was preempted and stayed runnable (or the wake-up was not seen).
    pub wake_ns: Option<u64>,
    pub waker_tgid: u32,
    pub waker_tid: u32,
    pub prev_state: u32,
    /// Number of the system call that it was in (x86-64); `None`: in none.
    pub syscall: Option<u32>,
    pub preempted: bool,
    /// Still off the CPU when the recording stopped; `origin.time_ns` is that time.
    pub open: bool,
    pub stack: Option<StackId>,
}

impl Sched {
    /// Time between being runnable and running, in ns; `None` if the wake-up was not seen.
    #[must_use]
    pub fn runqueue_ns(&self) -> Option<u64> {
        if self.preempted {
            return Some(self.origin.time_ns.saturating_sub(self.off_ns));
        }
        self.wake_ns.map(|wake| self.origin.time_ns.saturating_sub(wake))
    }

    /// Whether it slept in a futex: for a lock, a condition, or an interpreter's lock.
    #[must_use]
    pub fn in_futex(&self) -> bool {
        // futex, futex_waitv, futex_wait
        matches!(self.syscall, Some(202 | 449 | 455))
    }
}

/// One on-CPU sample. See `tracer_abi::Sample`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub origin: Origin,
    /// CPU time that the sample stands for.
    pub period_ns: u64,
    pub kernel_mode: bool,
    pub stack: Option<StackId>,
}

/// What happened to a process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProcessAction {
    /// Became a target when the recording began (user space, from /proc).
    Found,
    Fork,
    Exec,
    Exit,
}

/// Life of a process (`tid == tgid`) or thread. See `tracer_abi::Process`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub origin: Origin,
    pub action: ProcessAction,
    pub parent_tgid: u32,
    pub parent_tid: u32,
    /// Thread name (`comm`), lossy UTF-8.
    pub comm: String,
}

/// The host's clocks read close together: MONOTONIC_RAW, MONOTONIC, MONOTONIC_RAW, then REALTIME and BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostClock {
    pub raw_before_ns: u64,
    pub monotonic_ns: u64,
    pub raw_after_ns: u64,
    /// CLOCK_REALTIME ns since the epoch, once a second; else `None`.
    pub realtime_ns: Option<u64>,
    /// CLOCK_BOOTTIME ns, once a second; else `None`.
    pub boottime_ns: Option<u64>,
}

/// An executable mapping of a target process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Number of the mapping in this capture.
    pub id: u32,
    /// When it was first seen.
    pub time_ns: u64,
    pub process: ProcessId,
    /// Address range [begin, end) and file offset of `begin`.
    pub begin: u64,
    pub end: u64,
    pub offset: u64,
    pub inode: u64,
    /// Path as the process sees it, `[vdso]` and the like, or empty for memory that is no file's.
    pub path: String,
    /// GNU build-id, empty when the file has none.
    pub build_id: Vec<u8>,
}

/// Number of a stack in this capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u64);

/// A function that an interpreter runs, stored once per capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Number of the function in this capture.
    pub id: u32,
    /// When it was first seen.
    pub time_ns: u64,
    pub process: ProcessId,
    /// `Class.method`, as the interpreter qualifies it.
    pub function: String,
    pub file: String,
    pub first_line: u32,
}

/// One frame of a user stack: machine code, or a function that an interpreter runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// [`Mapping::id`]; `None` when no known mapping held the address.
    pub mapping: Option<u32>,
    /// [`Code::id`] of a function that an interpreter runs; `mapping` is `None` then.
    pub code: Option<u32>,
    /// File offset in the mapping's file; the address where there is no file; the line in the code's file.
    pub offset: u64,
}

/// A stack, stored once per capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    pub id: StackId,
    /// When it was first seen.
    pub time_ns: u64,
    pub process: ProcessId,
    /// Kernel addresses, leaf first.
    pub kernel: Vec<u64>,
    /// User frames, leaf first.
    pub user: Vec<Frame>,
    /// Why the user part does not reach the thread's first function; `None` when it does.
    pub cut: Option<StackCut>,
    /// Steps that went by frame pointers, for want of a table. There a function that keeps none hides its caller.
    pub frame_pointer_steps: u32,
}

/// Why a stack is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StackCut {
    /// As many frames as fit.
    Depth,
    /// The next code is in no mapping that was known when the walk came there.
    Unmapped,
    /// The code's table was still being built.
    TablePending,
    /// There is no table for the code, and no frame pointer.
    FramePointers,
    /// The stack, or all of the user part, could not be read.
    Unreadable,
    /// The code keeps its frame in a way that tables cannot say.
    Unsupported,
    /// The stack was switched, or is damaged: the next frame would not be above the last.
    NoProgress,
    /// A register that the next frame needs was lost on the way.
    RegisterLost,
    /// The thread had no registers of user space.
    NoRegisters,
    /// An exception's handler was being entered: what the stack held of its frames was overwritten.
    Exception,
}

impl StackCut {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Depth,
        Self::Unmapped,
        Self::TablePending,
        Self::FramePointers,
        Self::Unreadable,
        Self::Unsupported,
        Self::NoProgress,
        Self::RegisterLost,
        Self::NoRegisters,
        Self::Exception,
    ];

    /// Its name in the ledger.
    #[must_use]
    pub const fn counter(self) -> &'static str {
        match self {
            Self::Depth => "stack_cut_depth",
            Self::Unmapped => "stack_cut_unmapped",
            Self::TablePending => "stack_cut_table_pending",
            Self::FramePointers => "stack_cut_frame_pointers",
            Self::Unreadable => "stack_cut_unreadable",
            Self::Unsupported => "stack_cut_unsupported",
            Self::NoProgress => "stack_cut_no_progress",
            Self::RegisterLost => "stack_cut_register_lost",
            Self::NoRegisters => "stack_cut_no_registers",
            Self::Exception => "stack_cut_exception",
        }
    }

    /// For people.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Depth => "too deep",
            Self::Unmapped => "code that was not known",
            Self::TablePending => "table not ready",
            Self::FramePointers => "no frame pointer",
            Self::Unreadable => "unreadable",
            Self::Unsupported => "unsupported frame",
            Self::NoProgress => "stack switched",
            Self::RegisterLost => "register lost",
            Self::NoRegisters => "no user registers",
            Self::Exception => "exception being handled",
        }
    }
}

/// A probe point that was attached in a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    pub id: u32,
    pub time_ns: u64,
    pub process: ProcessId,
    /// Engine profile, point name and role as the profile names them.
    pub engine: String,
    pub name: String,
    pub role: Role,
    pub library: String,
    /// Version of the library, as far as its profile says how to find it; else empty.
    pub version: String,
    pub build_id: Vec<u8>,
    /// File offset of the probed instruction.
    pub offset: u64,
    /// `nop5`, `emulated` or `stepped`.
    pub placement: String,
    pub has_return: bool,
    /// Index of the argument that is the stream, if any.
    pub stream_arg: Option<u8>,
    /// The library is a stand-in: everything derived from it is simulated.
    pub simulated: bool,
}

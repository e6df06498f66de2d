//! The derived tables: rows of the timeline, names of stacks, off-CPU intervals, the ledger.

use std::sync::Arc;

use super::column::{columns, via, words};
use super::raw::Table;
use crate::clock::{ClockQuality, Knot, Quality, SeriesKey};
use crate::event::{CallEnd, ProcessId, Sched, StackId};
use crate::symbol::{FrameKind, SymbolFrame};
use crate::timeline::DriverEvent;
use crate::timeline::budget::{Blocked, Budget, Label};
use crate::timeline::rows::{
    Engine, GpuTime, Hazard, HazardKind, Iteration, Join, Layer, Phase, Request, Source, Step, Token,
};
use crate::timeline::shares::Share;
use crate::timeline::tables::LedgerRow;
use tracer_abi::mark::Slot;

words!(Source { Mark = "mark", Nvtx = "nvtx", Socket = "socket" });
words!(Join { None = "none", Mark = "mark", Count = "count", Inferred = "inferred" });
words!(HazardKind {
    SharedStream = "shared_stream",
    CapturedStep = "captured_step",
    EarlyOutput = "early_output",
});
words!(FrameKind { Kernel = "kernel", User = "user", Python = "python" });

pub(crate) struct MaybeGpu {
    gpu_begin_ns: Option<u64>,
    gpu_end_ns: Option<u64>,
    gpu_span_ns: Option<u64>,
    gpu_bound_ns: Option<u64>,
}

columns!(MaybeGpu {
    gpu_begin_ns: Option<u64>,
    gpu_end_ns: Option<u64>,
    gpu_span_ns: Option<u64>,
    gpu_bound_ns: Option<u64>,
});
via!(
    Option<GpuTime> => MaybeGpu,
    |gpu: &Option<GpuTime>| MaybeGpu {
        gpu_begin_ns: gpu.map(|gpu| gpu.begin_ns),
        gpu_end_ns: gpu.map(|gpu| gpu.end_ns),
        gpu_span_ns: gpu.map(|gpu| gpu.span_ns),
        gpu_bound_ns: gpu.map(|gpu| gpu.bound_ns),
    },
    |gpu: MaybeGpu| {
        let times = gpu.gpu_begin_ns.zip(gpu.gpu_end_ns).zip(gpu.gpu_span_ns.zip(gpu.gpu_bound_ns));
        times.map(|((begin_ns, end_ns), (span_ns, bound_ns))| GpuTime { begin_ns, end_ns, span_ns, bound_ns })
    }
);

/// All null where the engine is not known; the fingerprint also where its file could not be read.
pub(crate) struct MaybeEngine {
    engine_path: Option<String>,
    engine_bytes: Option<u64>,
    engine_modified_ns: Option<u64>,
    engine_fingerprint: Option<Vec<u8>>,
}

columns!(MaybeEngine {
    engine_path: Option<String>,
    engine_bytes: Option<u64>,
    engine_modified_ns: Option<u64>,
    engine_fingerprint: Option<Vec<u8>>,
});
via!(
    Option<Arc<Engine>> => MaybeEngine,
    |engine: &Option<Arc<Engine>>| {
        let engine = engine.as_deref();
        MaybeEngine {
            engine_path: engine.map(|engine| engine.path.clone()),
            engine_bytes: engine.map(|engine| engine.bytes),
            engine_modified_ns: engine.map(|engine| engine.modified_ns),
            engine_fingerprint: engine.map(|engine| engine.fingerprint.clone()).filter(|sum| !sum.is_empty()),
        }
    },
    |engine: MaybeEngine| engine.engine_path.map(|path| Arc::new(Engine {
        path,
        bytes: engine.engine_bytes.unwrap_or(0),
        modified_ns: engine.engine_modified_ns.unwrap_or(0),
        fingerprint: engine.engine_fingerprint.unwrap_or_default(),
    }))
);

columns!(Step {
    id: u64,
    process: ProcessId,
    tid: u32,
    point: u32,
    rank: u32,
    batch_id: Option<u64>,
    iteration: Option<u64>,
    stream: u64,
    begin_ns: u64,
    end_ns: u64,
    end as "ended": CallEnd,
    observed_end_ns: Option<u64>,
    device_uuid: Option<[u8; 16]>,
    gpu: Option<GpuTime>,
    sampled: bool,
    engine: Option<Arc<Engine>>,
    engine_version: String,
    nvtx_request: String,
    nvtx_range: String,
    input_shapes: String,
    output_shapes: String,
    data_types: String,
    quantization: String,
    slots: Vec<Slot>,
});

columns!(Layer {
    step: u64,
    number: u32,
    parent: Option<u32>,
    depth: u16,
    name: String,
    gpu_begin_ns: Option<u64>,
    gpu_end_ns: Option<u64>,
    gpu_span_ns: u64,
    gpu_self_ns: u64,
    gpu_bound_ns: Option<u64>,
});

columns!(Phase {
    process: ProcessId,
    tid: u32,
    source: Source,
    request: Option<u64>,
    request_id: String,
    name: String,
    domain: String,
    payload: String,
    is_mark: bool,
    begin_ns: u64,
    end_ns: Option<u64>,
});

columns!(Hazard {
    kind: HazardKind,
    process: ProcessId,
    time_ns: u64,
    step: u64,
    other_step: Option<u64>,
    request: Option<u64>,
    other_request: Option<u64>,
    stream: u64,
    tid: u32,
    stack: Option<StackId>,
    other_tid: u32,
    other_stack: Option<StackId>,
});

columns!(Iteration {
    id: u64,
    process: ProcessId,
    batch_id: u64,
    begin_ns: u64,
    end_ns: u64,
    steps: u32,
    slowest_rank: u32,
    requests: u32,
    prefill_requests: u32,
    tokens: u64,
});

columns!(Request {
    id: u64,
    process: ProcessId,
    program_request: u64,
    request_id: String,
    trace_id: Option<[u8; 16]>,
    span_id: Option<[u8; 8]>,
    tenant_id: String,
    model: String,
    model_version: String,
    engine_hash: String,
    adapters: String,
    kv_cache_strategy: String,
    prompt_tokens: Option<u32>,
    received_ns: u64,
    arrived_ns: Option<u64>,
    read_ns: Option<u64>,
    source: Source,
    end_ns: Option<u64>,
    finish_reason: u32,
    declared_tokens: Option<u32>,
    tokens: u32,
    ttft_ns: Option<u64>,
    tpot_ns: Option<f64>,
});

columns!(Token {
    request: u64,
    choice: u32,
    index: u32,
    process: ProcessId,
    tid: u32,
    delivered_ns: u64,
    written_ns: Option<u64>,
    wire_ns: Option<u64>,
    latency_ns: Option<u64>,
    source: Source,
    iteration: Option<u64>,
    step: Option<u64>,
    join as "joined_by": Join,
    prefill: bool,
});

/// What kind of identifier a row of `request_ids` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdKind {
    /// The program's own number.
    Program,
    /// X-Request-ID or the like.
    Request,
    /// W3C trace id and span id, 32 and 16 hexadecimal digits.
    Trace,
    Span,
    Tenant,
}

words!(IdKind {
    Program = "program",
    Request = "request_id",
    Trace = "trace_id",
    Span = "span_id",
    Tenant = "tenant_id",
});

/// One name of a request. Names may repeat (retries) and never are the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId {
    /// [`Request::id`].
    pub request: u64,
    pub source: Source,
    pub kind: IdKind,
    pub value: String,
}

columns!(RequestId { request: u64, source: Source, kind: IdKind, value: String });

impl RequestId {
    /// All names of a request that are known.
    pub(crate) fn all(request: &Request) -> impl Iterator<Item = Self> {
        let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let names = [
            (IdKind::Program, Some(request.program_request.to_string())),
            (IdKind::Request, text(&request.request_id)),
            (IdKind::Trace, request.trace_id.map(|id| crate::hex::hex(&id))),
            (IdKind::Span, request.span_id.map(|id| crate::hex::hex(&id))),
            (IdKind::Tenant, text(&request.tenant_id)),
        ];
        let (request, source) = (request.id, request.source);
        names
            .into_iter()
            .filter_map(move |(kind, value)| value.map(|value| Self { request, source, kind, value }))
    }
}

/// Why a thread was off the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OffReason {
    /// Another thread took the CPU; it stayed runnable.
    Preempted,
    /// It waited and could be woken by a signal (lock, socket, timer, …).
    Sleeping,
    /// It waited and could not (most often a disk).
    Uninterruptible,
    /// Stopped, traced, and the like.
    Other,
}

impl OffReason {
    /// Name in tables and traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Preempted => "preempted",
            Self::Sleeping => "sleeping",
            Self::Uninterruptible => "uninterruptible",
            Self::Other => "other",
        }
    }
}

words!(OffReason {
    Preempted = "preempted",
    Sleeping = "sleeping",
    Uninterruptible = "uninterruptible",
    Other = "other",
});

/// One interval in which a thread was off the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffCpu {
    pub process: ProcessId,
    pub tid: u32,
    /// CLOCK_MONOTONIC ns of the switch-out and the switch-in.
    pub begin_ns: u64,
    pub end_ns: u64,
    pub reason: OffReason,
    /// From the switch-out to the wake-up; `None` when that was not seen.
    pub blocked_ns: Option<u64>,
    /// From being runnable to running; `None` when the wake-up was not seen.
    pub runqueue_ns: Option<u64>,
    pub waker_tgid: u32,
    pub waker_tid: u32,
    /// Still off the CPU when the recording stopped.
    pub open: bool,
    /// Where it went off the CPU.
    pub stack: Option<StackId>,
}

columns!(OffCpu {
    process: ProcessId,
    tid: u32,
    begin_ns: u64,
    end_ns: u64,
    reason: OffReason,
    blocked_ns: Option<u64>,
    runqueue_ns: Option<u64>,
    waker_tgid: u32,
    waker_tid: u32,
    open: bool,
    stack: Option<StackId>,
});

impl From<&Sched> for OffCpu {
    fn from(sched: &Sched) -> Self {
        // Values of the kernel's task states, stable since its first tracepoints.
        const INTERRUPTIBLE: u32 = 1;
        const UNINTERRUPTIBLE: u32 = 2;
        let reason = match sched.prev_state {
            _ if sched.preempted => OffReason::Preempted,
            state if state & INTERRUPTIBLE != 0 => OffReason::Sleeping,
            state if state & UNINTERRUPTIBLE != 0 => OffReason::Uninterruptible,
            _ => OffReason::Other,
        };
        // A thread that still sleeps has been blocked until now, as far as is known.
        let woken = sched.wake_ns.or(sched.open.then_some(sched.origin.time_ns));
        let blocked = woken.map(|wake_ns| wake_ns.saturating_sub(sched.off_ns));
        Self {
            process: sched.origin.process,
            tid: sched.origin.tid,
            begin_ns: sched.off_ns,
            end_ns: sched.origin.time_ns,
            reason,
            blocked_ns: if sched.preempted { Some(0) } else { blocked },
            runqueue_ns: sched.runqueue_ns(),
            waker_tgid: sched.waker_tgid,
            waker_tid: sched.waker_tid,
            open: sched.open,
            stack: sched.stack,
        }
    }
}

/// One point of the curve that maps a device's clock to the host's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockKnot {
    pub series: SeriesKey,
    pub knot: Knot,
}

columns!(SeriesKey { process: ProcessId, device_uuid: [u8; 16], context: u64, epoch: u32 });
columns!(Knot {
    segment: u32,
    chain: u32,
    device_ns: i64,
    host_raw_ns: i64,
    bound_ns: f64,
    precision_ns: f64,
    width_ns: f64,
    quantum_ns: f64,
});
columns!(ClockKnot { series: SeriesKey, knot: Knot });

columns!(Quality {
    bursts: u64,
    bursts_rejected: u64,
    segments: u32,
    median_bound_ns: u64,
    p99_bound_ns: u64,
    precision_ns: u64,
    drift_ppm: f64,
    quantum_ns: u64,
    causality_samples: u64,
    causality_violations: u64,
});
columns!(ClockQuality { series: SeriesKey, quality: Quality });

columns!(DriverEvent {
    process: ProcessId,
    function: String,
    code: u32,
    count: u64,
    first_ns: u64,
    last_ns: u64,
});

words!(Blocked {
    Futex = "futex",
    Poll = "poll",
    SocketRead = "socket_read",
    SocketWrite = "socket_write",
    Pipe = "pipe",
    Sleep = "sleep",
    Disk = "disk",
    Memory = "memory",
    Gpu = "gpu_driver",
    Child = "child",
    Other = "other",
});

columns!(Share {
    step: u64,
    request: Option<u64>,
    prefill: bool,
    tokens: u32,
    step_ns: u64,
    gpu_ns: Option<u64>,
});

columns!(Budget {
    request: u64,
    choice: u32,
    index: u32,
    latency_ns: u64,
    parts_ns: [u64; Label::PARTS.len()],
    nagle_hold_ns: u64,
    blocked as "blocked_on": Option<Blocked>,
    blocked_stack: Option<StackId>,
    bound_ns: u64,
    vague: bool,
});

columns!(SymbolFrame {
    stack: StackId,
    position: u32,
    kind: FrameKind,
    function: Option<String>,
    module: String,
    offset as "file_offset": u64,
    inlined: bool,
});

macro_rules! tables {
    ($($type:ty = $name:literal;)*) => {
        /// Names of the derived tables.
        pub const DERIVED_TABLES: &[&str] = &[$($name),*];
        $(
            impl Table for $type {
                const NAME: &'static str = $name;
            }
        )*
    };
}

tables! {
    Step = "steps";
    Iteration = "iterations";
    Request = "requests";
    RequestId = "request_ids";
    Token = "tokens";
    Layer = "layers";
    Phase = "phases";
    Hazard = "hazards";
    OffCpu = "offcpu";
    ClockKnot = "clock";
    ClockQuality = "clock_quality";
    DriverEvent = "driver_events";
    Budget = "budgets";
    Share = "shares";
    SymbolFrame = "frames";
    LedgerRow = "ledger";
}

/// Name, in the ledger, of how many rows a raw table has.
pub(crate) fn captured(table: &str) -> String {
    format!("captured_{table}")
}

/// Name, in the ledger, of how many bytes of a raw table are lost at its torn end.
pub(crate) fn torn_bytes(table: &str) -> String {
    format!("torn_bytes_{table}")
}

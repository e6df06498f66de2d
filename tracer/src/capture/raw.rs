//! The raw tables: one per kind of event, with every field, so that reading back gives the same events.
//!
//! Each kind of mark has its own table, so that no column is empty for most rows. To see all marks as one table,
//! ask for the union: `SELECT * FROM read_parquet('mark_*.parquet', union_by_name = true)`.

use tracer_abi::mark::{ClockReading, Slot};

use super::column::{Columns, Item, columns, via, words};
use crate::event::mark::{self, AttrValue, Mark};
use crate::event::{
    Call, CallEnd, Code, EngineFile, EngineSeen, Event, Frame, GpuProcess, GpuSample, HostClock, HttpBegin,
    HttpEnd, HttpFinish, HttpSend, HttpWire, Mapping, MarkEvent, Origin, Point, Process, ProcessAction,
    ProcessId, Role, Sample, Sched, Stack, StackCut, StackId, Xid,
};
use crate::timeline::tables::LedgerRow;

/// Rows that make a file of their own.
pub(crate) trait Table: Columns + 'static {
    /// File name without its extension.
    const NAME: &'static str;
}

/// A table of events.
pub(crate) trait EventTable: Table {
    /// Among events of the same time, a table of lower rank comes first: definitions before what uses them.
    const RANK: u8;

    fn into_event(self) -> Event;
}

columns!(ProcessId { tgid: u32, start_ticks: u64 });
columns!(Origin { time_ns: u64, process: ProcessId, tid: u32, cpu: u32 });

words!(CallEnd {
    Returned = "returned",
    EntryOnly = "entry_only",
    Unwound = "unwound",
    Open = "open",
    Exited = "exited",
});
words!(ProcessAction { Found = "found", Fork = "fork", Exec = "exec", Exit = "exit" });
words!(StackCut {
    Depth = "depth",
    Unmapped = "unmapped",
    TablePending = "table_pending",
    FramePointers = "frame_pointers",
    Unreadable = "unreadable",
    Unsupported = "unsupported",
    NoProgress = "no_progress",
    RegisterLost = "register_lost",
    NoRegisters = "no_registers",
    Exception = "exception",
});
words!(Role {
    Step = "step",
    Launch = "launch",
    GraphLaunch = "graph_launch",
    Wait = "wait",
    Copy = "copy",
    EventRecord = "event_record",
    Sync = "sync",
    CaptureBegin = "capture_begin",
    CaptureEnd = "capture_end",
    StreamEnd = "stream_end",
    ContextEnd = "context_end",
    Loader = "loader",
    Mark = "mark",
    Open = "open",
    Shape = "shape",
    AskedShape = "asked_shape",
    DataType = "data_type",
    CreatesContext = "creates_context",
    Nvtx = "nvtx",
    Other = "other",
});

via!(StackId => u64, |id: &StackId| id.0, StackId);
via!(Option<StackId> => Option<u64>, |id: &Option<StackId>| id.map(|id| id.0), |id| id.map(StackId));

/// Arguments have a column each, so that they are read without unpacking a list.
pub(crate) struct Args {
    arg0: u64,
    arg1: u64,
    arg2: u64,
    arg3: u64,
    arg4: u64,
    arg5: u64,
}

columns!(Args { arg0: u64, arg1: u64, arg2: u64, arg3: u64, arg4: u64, arg5: u64 });
via!(
    [u64; 6] => Args,
    |&[arg0, arg1, arg2, arg3, arg4, arg5]: &[u64; 6]| Args { arg0, arg1, arg2, arg3, arg4, arg5 },
    |a| [a.arg0, a.arg1, a.arg2, a.arg3, a.arg4, a.arg5]
);

columns!(Call {
    origin: Origin,
    point: u32,
    parent_point: Option<u32>,
    depth: u32,
    begin_ns: u64,
    end_ns: u64,
    // Not `end`, which is a word of SQL; so with the others.
    end as "ended": CallEnd,
    sp: u64,
    args: [u64; 6],
    ret: u64,
    stack: Option<StackId>,
});

columns!(Sched {
    origin: Origin,
    off_ns: u64,
    wake_ns: Option<u64>,
    waker_tgid: u32,
    waker_tid: u32,
    prev_state: u32,
    syscall: Option<u32>,
    preempted: bool,
    open: bool,
    stack: Option<StackId>,
});

columns!(Sample { origin: Origin, period_ns: u64, kernel_mode: bool, stack: Option<StackId> });

columns!(Process { origin: Origin, action: ProcessAction, parent_tgid: u32, parent_tid: u32, comm: String });

words!(HttpFinish { Done = "done", Cut = "cut", Lost = "lost" });

columns!(HttpBegin {
    origin: Origin,
    exchange: u64,
    connection: u64,
    local_port: u16,
    method: String,
    path: String,
    request_id: String,
    trace_id: Option<[u8; 16]>,
    span_id: Option<[u8; 8]>,
    arrived_ns: Option<u64>,
    read_ns: u64,
    head_cut: bool,
});
columns!(HttpSend {
    origin: Origin,
    exchange: u64,
    choice: u32,
    first_token: u32,
    tokens: u32,
    events: u32,
    bytes: u64,
    held_bytes: u32,
});
columns!(HttpWire { origin: Origin, exchange: u64, sent_ns: u64 });
columns!(HttpEnd {
    origin: Origin,
    exchange: u64,
    status: u16,
    finish: HttpFinish,
    streamed: bool,
    encoded: bool,
    events: u32,
    tokens: u32,
    refused_writes: u32,
});

columns!(HostClock {
    raw_before_ns: u64,
    monotonic_ns: u64,
    raw_after_ns: u64,
    realtime_ns: Option<u64>,
    boottime_ns: Option<u64>,
});

columns!(Mapping {
    id: u32,
    time_ns: u64,
    process: ProcessId,
    begin as "begin_address": u64,
    end as "end_address": u64,
    offset as "file_offset": u64,
    inode: u64,
    path: String,
    build_id: Vec<u8>,
});

columns!(Code { id: u32, time_ns: u64, process: ProcessId, function: String, file: String, first_line: u32 });

columns!(Frame { mapping: Option<u32>, code: Option<u32>, offset as "file_offset": u64 });
impl Item for Frame {
    const STRUCT: bool = true;
}

columns!(Stack {
    id: StackId,
    time_ns: u64,
    process: ProcessId,
    kernel: Vec<u64>,
    user: Vec<Frame>,
    cut: Option<StackCut>,
    frame_pointer_steps: u32,
});

columns!(Point {
    id: u32,
    time_ns: u64,
    process: ProcessId,
    engine: String,
    name: String,
    role: Role,
    library: String,
    version: String,
    build_id: Vec<u8>,
    offset as "file_offset": u64,
    placement: String,
    has_return: bool,
    stream_arg: Option<u8>,
    simulated: bool,
});

columns!(GpuSample {
    time_ns: u64,
    bound_ns: u64,
    device_uuid: [u8; 16],
    device_index: u32,
    device_name: String,
    pci: String,
    gpu_percent: Option<u32>,
    memory_percent: Option<u32>,
    memory_used_bytes: Option<u64>,
    memory_total_bytes: Option<u64>,
    sm_clock_mhz: Option<u32>,
    memory_clock_mhz: Option<u32>,
    power_mw: Option<u32>,
    temperature_c: Option<u32>,
    throttle_reasons: Option<u64>,
    simulated: bool,
});

columns!(GpuProcess {
    time_ns: u64,
    bound_ns: u64,
    device_uuid: [u8; 16],
    process: ProcessId,
    memory_used_bytes: Option<u64>,
    sm_percent: Option<u32>,
    memory_percent: Option<u32>,
});

words!(EngineSeen { Opened = "opened", Open = "open", Mapped = "mapped" });
columns!(EngineFile {
    time_ns: u64,
    process: ProcessId,
    seen: EngineSeen,
    path: String,
    bytes: u64,
    modified_ns: u64,
    fingerprint: Vec<u8>,
    problem: String,
});
columns!(Xid { time_ns: u64, kernel_log_ns: u64, pci: String, xid: u32, message: String });

/// A mark of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Marked<M> {
    pub origin: Origin,
    pub mark: M,
}

/// Builder of the columns of [`Marked`].
pub(crate) struct MarkedBuilder<M: Columns> {
    origin: <Origin as Columns>::Builder,
    mark: M::Builder,
}

impl<M: Columns> Default for MarkedBuilder<M> {
    fn default() -> Self {
        Self { origin: Default::default(), mark: Default::default() }
    }
}

impl<M: Columns> MarkedBuilder<M> {
    /// Appends a row from its two parts, sparing a copy of the mark.
    pub(crate) fn push(&mut self, origin: &Origin, mark: &M) {
        origin.push(&mut self.origin);
        mark.push(&mut self.mark);
    }
}

/// Reader of the columns of [`Marked`].
pub(crate) struct MarkedReader<M: Columns> {
    origin: <Origin as Columns>::Reader,
    mark: M::Reader,
}

impl<M: Columns> Columns for Marked<M> {
    type Builder = MarkedBuilder<M>;
    type Reader = MarkedReader<M>;

    fn fields(name: &str, out: &mut Vec<arrow::datatypes::Field>) {
        Origin::fields(name, out);
        M::fields(name, out);
    }

    fn push(&self, builder: &mut Self::Builder) {
        builder.push(&self.origin, &self.mark);
    }

    fn finish(
        builder: &mut Self::Builder,
        out: &mut Vec<arrow::array::ArrayRef>,
    ) -> Result<(), arrow::error::ArrowError> {
        Origin::finish(&mut builder.origin, out)?;
        M::finish(&mut builder.mark, out)
    }

    fn open(
        name: &str,
        source: super::column::Source<'_>,
    ) -> Result<Self::Reader, super::column::ColumnError> {
        Ok(MarkedReader { origin: Origin::open(name, source)?, mark: M::open(name, source)? })
    }

    fn get(reader: &Self::Reader, row: usize) -> Result<Self, super::column::ColumnError> {
        Ok(Self { origin: Origin::get(&reader.origin, row)?, mark: M::get(&reader.mark, row)? })
    }
}

columns!(Slot {
    request: u64,
    sample_offset: u32,
    generation_step: u32,
    tokens: u32,
    choice: u16,
    phase: u8,
    flags: u8,
});
impl Item for Slot {
    const STRUCT: bool = true;
}

/// A clock reading without its padding; `elapsed_ms` keeps the bits of the driver's float.
pub(crate) struct Reading {
    h0_raw_ns: u64,
    h1_raw_ns: u64,
    elapsed_ms: f32,
}

columns!(Reading { h0_raw_ns: u64, h1_raw_ns: u64, elapsed_ms: f32 });
via!(
    ClockReading => Reading,
    |r: &ClockReading| Reading {
        h0_raw_ns: r.h0_raw_ns,
        h1_raw_ns: r.h1_raw_ns,
        elapsed_ms: f32::from_bits(r.elapsed_ms_bits),
    },
    |r: Reading| ClockReading {
        h0_raw_ns: r.h0_raw_ns,
        h1_raw_ns: r.h1_raw_ns,
        elapsed_ms_bits: r.elapsed_ms.to_bits(),
        ..ClockReading::default()
    }
);
impl Item for ClockReading {
    const STRUCT: bool = true;
}

columns!(mark::RequestBegin {
    request: u64,
    received_ns: Option<u64>,
    trace_id: Option<[u8; 16]>,
    span_id: Option<[u8; 8]>,
    trace_flags: u32,
    prompt_tokens: Option<u32>,
    request_id: String,
    tenant_id: String,
    model: String,
    model_version: String,
    engine_hash: String,
    adapters: String,
    kv_cache_strategy: String,
});
columns!(mark::RequestEnd { request: u64, output_tokens: u32, finish_reason: u32 });
columns!(mark::Batch { batch_id: u64, rank: u32, slot_count: u32, first_slot: u32, slots: Vec<Slot> });
columns!(mark::Token { request: u64, choice: u32, index: u32, stack: Option<StackId> });
columns!(mark::Phase { request: u64, begins: bool, name: String });

/// Exactly one of `number` and `text` is not null.
pub(crate) struct AttrCells {
    number: Option<f64>,
    text: Option<String>,
}

columns!(AttrCells { number: Option<f64>, text: Option<String> });
via!(
    AttrValue => AttrCells,
    |value: &AttrValue| match value {
        AttrValue::Number(number) => AttrCells { number: Some(*number), text: None },
        AttrValue::String(text) => AttrCells { number: None, text: Some(text.clone()) },
    },
    |cells: AttrCells| match (cells.number, cells.text) {
        (Some(number), _) => AttrValue::Number(number),
        (None, text) => AttrValue::String(text.unwrap_or_default()),
    }
);
columns!(mark::Attr { request: u64, choice: u32, key: String, value: AttrValue });

columns!(mark::GpuSpan {
    device_uuid: [u8; 16],
    context: u64,
    stream: u64,
    sequence: u64,
    enqueue_begin_ns: u64,
    enqueue_end_ns: u64,
    // `tid` is the thread of the mark; this one is the thread that enqueued, as the traced process numbers it.
    tid as "enqueue_tid": u32,
    epoch: u32,
    base: u32,
    begin_ms: f32,
    span_ms: f32,
    sampled: bool,
});
words!(mark::NvtxAction {
    Push = "push",
    Pop = "pop",
    Start = "start",
    End = "end",
    Mark = "mark",
    Started = "started",
});
columns!(mark::Nvtx { action: mark::NvtxAction, range: u64, name: String, domain: String, payload: String });
columns!(mark::GpuLayer { begin_ms: f32, end_ms: f32, parent: Option<u32>, depth: u16, name: String });
impl Item for mark::GpuLayer {
    const STRUCT: bool = true;
}
columns!(mark::GpuLayers { sequence: u64, total: u32, first: u32, cut: bool, layers: Vec<mark::GpuLayer> });
columns!(mark::Shape { object: u64, name: String, dims: String, asked: bool });
columns!(mark::DataType { object: u64, name: String, data_type: String });
columns!(mark::Made { maker: u64, made: u64 });
columns!(mark::NvtxState {
    clients: u32,
    refused: u32,
    sample_every: u32,
    reported: u64,
    limited: u64,
    names_lost: u64,
    sampled: u64,
    skipped_pool: u64,
});
columns!(mark::ClockBurst {
    device_uuid: [u8; 16],
    context: u64,
    epoch: u32,
    base: u32,
    rebase_ms: Option<f32>,
    readings: Vec<ClockReading>,
});
columns!(mark::InjectState {
    active: bool,
    reason: String,
    steps: u64,
    timed: u64,
    skipped_capturing: u64,
    skipped_pool: u64,
    skipped_error: u64,
    abandoned: u64,
});

macro_rules! event_tables {
    ($($type:ty = $name:literal, rank $rank:literal, |$row:ident| $event:expr;)*) => {$(
        impl Table for $type {
            const NAME: &'static str = $name;
        }
        impl EventTable for $type {
            const RANK: u8 = $rank;

            fn into_event(self) -> Event {
                let $row = self;
                $event
            }
        }
    )*};
}

fn mark_event<M>(row: Marked<M>, wrap: impl FnOnce(M) -> Mark) -> Event {
    Event::Mark(MarkEvent { origin: row.origin, mark: wrap(row.mark) })
}

event_tables! {
    HostClock = "clock_host", rank 0, |row| Event::HostClock(row);
    Process = "processes", rank 1, |row| Event::Process(row);
    Mapping = "mappings", rank 2, |row| Event::Mapping(row);
    Code = "code", rank 3, |row| Event::Code(row);
    Point = "points", rank 3, |row| Event::Point(row);
    Stack = "stacks", rank 4, |row| Event::Stack(row);
    Marked<mark::RequestBegin> = "mark_request_begin", rank 5, |row| mark_event(row, |begin| Mark::RequestBegin(begin.into()));
    Marked<mark::ClockBurst> = "clock_bursts", rank 6, |row| mark_event(row, Mark::ClockBurst);
    Marked<mark::InjectState> = "mark_inject_state", rank 7, |row| mark_event(row, Mark::InjectState);
    Marked<mark::Attr> = "mark_attr", rank 8, |row| mark_event(row, Mark::Attr);
    Marked<mark::Phase> = "mark_phase", rank 9, |row| mark_event(row, Mark::Phase);
    Marked<mark::Batch> = "mark_batch", rank 10, |row| mark_event(row, Mark::Batch);
    Call = "calls", rank 11, |row| Event::Call(row);
    Marked<mark::GpuSpan> = "mark_gpu_span", rank 12, |row| mark_event(row, Mark::GpuSpan);
    Marked<mark::Token> = "mark_token", rank 13, |row| mark_event(row, Mark::Token);
    Marked<mark::RequestEnd> = "mark_request_end", rank 14, |row| mark_event(row, Mark::RequestEnd);
    HttpBegin = "http_begin", rank 17, |row| Event::HttpBegin(row);
    HttpSend = "http_send", rank 18, |row| Event::HttpSend(row);
    HttpWire = "http_wire", rank 19, |row| Event::HttpWire(row);
    HttpEnd = "http_end", rank 20, |row| Event::HttpEnd(row);
    Sched = "sched", rank 15, |row| Event::Sched(row);
    Sample = "samples", rank 16, |row| Event::Sample(row);
    GpuSample = "gpu_samples", rank 21, |row| Event::Gpu(row);
    GpuProcess = "gpu_process_samples", rank 22, |row| Event::GpuProcess(row);
    Xid = "xids", rank 23, |row| Event::Xid(row);
    EngineFile = "engine_files", rank 24, |row| Event::EngineFile(row);
    Marked<mark::NvtxState> = "mark_nvtx_state", rank 25, |row| mark_event(row, Mark::NvtxState);
    Marked<mark::GpuLayers> = "mark_gpu_layers", rank 26, |row| mark_event(row, Mark::GpuLayers);
    Marked<mark::Shape> = "mark_shape", rank 28, |row| mark_event(row, Mark::Shape);
    Marked<mark::DataType> = "mark_data_type", rank 29, |row| mark_event(row, Mark::DataType);
    Marked<mark::Made> = "mark_made", rank 30, |row| mark_event(row, Mark::Made);
    Marked<mark::Nvtx> = "mark_nvtx", rank 27, |row| mark_event(row, Mark::Nvtx);
}

/// Calls `$do!(field, Type)` for every raw table of events.
macro_rules! for_each_event_table {
    ($do:ident) => {
        $do! {
            clock_host: HostClock,
            processes: Process,
            mappings: Mapping,
            code: Code,
            points: Point,
            stacks: Stack,
            request_begins: Marked<mark::RequestBegin>,
            clock_bursts: Marked<mark::ClockBurst>,
            inject_states: Marked<mark::InjectState>,
            attrs: Marked<mark::Attr>,
            phases: Marked<mark::Phase>,
            batches: Marked<mark::Batch>,
            calls: Call,
            gpu_spans: Marked<mark::GpuSpan>,
            tokens: Marked<mark::Token>,
            request_ends: Marked<mark::RequestEnd>,
            http_begins: HttpBegin,
            http_sends: HttpSend,
            http_wires: HttpWire,
            http_ends: HttpEnd,
            sched: Sched,
            samples: Sample,
            gpu_samples: GpuSample,
            gpu_processes: GpuProcess,
            xids: Xid,
            engine_files: EngineFile,
            nvtx_states: Marked<mark::NvtxState>,
            gpu_layers: Marked<mark::GpuLayers>,
            nvtx: Marked<mark::Nvtx>,
            shapes: Marked<mark::Shape>,
            data_types: Marked<mark::DataType>,
            made: Marked<mark::Made>,
        }
    };
}

pub(crate) use for_each_event_table;

/// A line of the ledger at a time: written when it changed, so that a torn capture still knows its losses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    pub time_ns: u64,
    pub row: LedgerRow,
}

pub(crate) struct MaybeProcess {
    tgid: Option<u32>,
    start_ticks: Option<u64>,
}

columns!(MaybeProcess { tgid: Option<u32>, start_ticks: Option<u64> });
via!(
    Option<ProcessId> => MaybeProcess,
    |id: &Option<ProcessId>| MaybeProcess { tgid: id.map(|id| id.tgid), start_ticks: id.map(|id| id.start_ticks) },
    |id: MaybeProcess| id.tgid.zip(id.start_ticks).map(|(tgid, start_ticks)| ProcessId { tgid, start_ticks })
);
columns!(LedgerRow { process: Option<ProcessId>, name: String, count: u64, loss: bool });
columns!(Counter { time_ns: u64, row: LedgerRow });

impl Table for Counter {
    const NAME: &'static str = "counters";
}

//! `mark`: what a program tells about its requests, and what the injected library tells about the GPU.
//!
//! A mark is a call of the probe site `tracer:mark` (a USDT probe whose first instruction is a 5-byte nop) with
//! `rdi` = address and `rsi` = bytes of a payload on the caller's stack. A payload is a [`MarkHeader`], the fixed part
//! of its kind, and a tail. Readers accept a payload longer than they know (a newer writer) and ignore the rest.
//!
//! `rdx` = the kind and `rcx` = the payload's first 64 bits after the header (the request; of a batch, its batch id) are
//! for tracers that do not know payloads, such as bpftrace.

use bytemuck::{Pod, Zeroable};

use crate::Header;

/// Version of the payloads below.
pub const VERSION: u16 = 1;
/// Longest payload in bytes; a batch of more slots is split over several marks.
pub const MAX_BYTES: usize = 4096;
/// Longest string (identifier, name, key, value) in a payload, in bytes; writers truncate at a character boundary.
pub const MAX_STRING_BYTES: usize = 256;
/// Most slots in one batch mark.
pub const MAX_SLOTS: usize = 128;
/// Most readings in one clock burst.
pub const MAX_READINGS: usize = 64;
/// USDT provider and name of the probe site.
pub const PROVIDER: &str = "tracer";
pub const PROBE: &str = "mark";

/// Record of the vital ring: a mark as the kernel saw it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct MarkRecord {
    pub header: Header,
    /// Bytes of the payload that follow.
    pub payload_bytes: u32,
    /// [`crate::CallStack::key`] of where it comes from, or [`crate::call_stack::NO_STACK`].
    pub stack: u32,
    pub payload: [u8; MAX_BYTES],
}

/// Bytes of a [`MarkRecord`] before the payload.
pub const FIXED_BYTES: usize = 48;

const _: () = assert!(size_of::<MarkRecord>() == FIXED_BYTES + MAX_BYTES);

/// What a mark says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum MarkKind {
    RequestBegin = 1,
    RequestEnd = 2,
    Batch = 3,
    Token = 4,
    Phase = 5,
    Attr = 6,
    Nvtx = 7,
    Shape = 8,
    DataType = 9,
    Made = 10,
    GpuSpan = 16,
    ClockBurst = 17,
    InjectState = 18,
    GpuLayers = 19,
    NvtxState = 20,
}

impl TryFrom<u16> for MarkKind {
    type Error = crate::UnknownKind;

    fn try_from(value: u16) -> Result<Self, crate::UnknownKind> {
        Ok(match value {
            1 => Self::RequestBegin,
            2 => Self::RequestEnd,
            3 => Self::Batch,
            4 => Self::Token,
            5 => Self::Phase,
            6 => Self::Attr,
            7 => Self::Nvtx,
            8 => Self::Shape,
            9 => Self::DataType,
            10 => Self::Made,
            16 => Self::GpuSpan,
            17 => Self::ClockBurst,
            18 => Self::InjectState,
            19 => Self::GpuLayers,
            20 => Self::NvtxState,
            other => return Err(crate::UnknownKind(other)),
        })
    }
}

/// Beginning of every payload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct MarkHeader {
    /// [`VERSION`] of the writer.
    pub version: u16,
    /// [`MarkKind`] as a number.
    pub kind: u16,
    /// Bytes of the whole payload, this header included.
    pub size: u32,
}

/// The program took a request in. Tail: the strings whose lengths are below, in that order (UTF-8).
///
/// What becomes known later is said by an [`Attr`] whose key is one of [`REQUEST_KEYS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RequestBegin {
    pub header: MarkHeader,
    /// The program's own number for the request, unique in the process while the request lives.
    pub request: u64,
    /// CLOCK_MONOTONIC ns at which the program received the request; 0: when this mark was made.
    pub received_ns: u64,
    /// W3C trace context; all zero when unknown.
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub trace_flags: u32,
    /// Tokens of the prompt; 0 when unknown.
    pub prompt_tokens: u32,
    pub request_id_bytes: u16,
    pub tenant_id_bytes: u16,
    pub model_bytes: u16,
    pub model_version_bytes: u16,
    /// Digest of the engine file, as the program knows it (hexadecimal).
    pub engine_hash_bytes: u16,
    /// Names of the adapters (LoRA), separated by commas.
    pub adapters_bytes: u16,
    /// How the request's KV cache is kept, in the program's own words (`paged`, `prefix`, `offloaded`, …).
    pub kv_cache_strategy_bytes: u16,
    pub _pad: u16,
}

/// Keys of [`Attr`]s that set what [`RequestBegin`] left open; the last value counts. `prompt_tokens` is a number.
pub const REQUEST_KEYS: [&str; 7] =
    ["tenant_id", "model", "model_version", "engine_hash", "adapters", "kv_cache_strategy", "prompt_tokens"];

/// `RequestEnd::finish_reason`.
pub const FINISH_UNKNOWN: u32 = 0;
pub const FINISH_STOP: u32 = 1;
pub const FINISH_LENGTH: u32 = 2;
/// The client went away or cancelled.
pub const FINISH_CANCELLED: u32 = 3;
pub const FINISH_ERROR: u32 = 4;

/// The program is done with a request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RequestEnd {
    pub header: MarkHeader,
    pub request: u64,
    /// Tokens that were generated for it, over all choices.
    pub output_tokens: u32,
    /// `FINISH_*`.
    pub finish_reason: u32,
}

/// Slot phase: the request's prompt is processed.
pub const PREFILL: u8 = 0;
/// Slot phase: one more token is generated.
pub const DECODE: u8 = 1;
/// Slot flag: this step yields no token for the slot (a chunk of a longer prefill).
pub const SLOT_NO_TOKEN: u8 = 1;

/// The next step of this thread serves these requests. Tail: `slots` × [`Slot`].
///
/// One batch mark per step; the steps of several ranks (threads, processes) of one iteration carry the same
/// `batch_id`. A batch of more than [`MAX_SLOTS`] is split: `first_slot` says where each part begins.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Batch {
    pub header: MarkHeader,
    /// Number of the iteration, unique in the process.
    pub batch_id: u64,
    /// Tensor- or pipeline-parallel rank of the step.
    pub rank: u32,
    /// Slots of the whole batch.
    pub slot_count: u32,
    /// Index in the batch of the first slot of this mark.
    pub first_slot: u32,
    /// Slots in this mark.
    pub slots: u32,
}

/// One request in a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Slot {
    pub request: u64,
    /// Position of the request in the batch's tensors (never to be confused with `batch_id`).
    pub sample_offset: u32,
    /// Index of the token that this step generates (0 for the prefill); meaningless with [`SLOT_NO_TOKEN`].
    pub generation_step: u32,
    /// Tokens that the step processes for this request (prompt tokens in a prefill, 1 in a plain decode).
    pub tokens: u32,
    pub choice: u16,
    /// [`PREFILL`] or [`DECODE`].
    pub phase: u8,
    /// `SLOT_*` bits.
    pub flags: u8,
}

/// The program hands a generated token to its client.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Token {
    pub header: MarkHeader,
    pub request: u64,
    pub choice: u32,
    /// Index of the token in its choice, from 0.
    pub index: u32,
}

/// `Phase::action`.
pub const PHASE_BEGIN: u16 = 0;
pub const PHASE_END: u16 = 1;

/// A named part of a request's life begins or ends. Tail: name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Phase {
    pub header: MarkHeader,
    pub request: u64,
    /// `PHASE_*`.
    pub action: u16,
    pub name_bytes: u16,
    pub _pad: u32,
}

/// `Attr::value_kind`: `number` holds the value.
pub const ATTR_NUMBER: u16 = 0;
/// `Attr::value_kind`: the tail holds the value.
pub const ATTR_STRING: u16 = 1;

/// A fact about a request. Tail: key, then the value when it is a string.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Attr {
    pub header: MarkHeader,
    pub request: u64,
    pub number: f64,
    pub choice: u32,
    pub value_kind: u16,
    pub key_bytes: u16,
    pub value_bytes: u16,
    pub _pad: [u16; 3],
}

/// `Nvtx::action`: a range of the thread begins or ends; ranges of a thread and domain nest.
pub const NVTX_PUSH: u16 = 0;
pub const NVTX_POP: u16 = 1;
/// `Nvtx::action`: a range of the process begins or ends, possibly on different threads; `range` names it.
pub const NVTX_START: u16 = 2;
pub const NVTX_END: u16 = 3;
/// `Nvtx::action`: something happened.
pub const NVTX_MARK: u16 = 4;
/// `Nvtx::action`: the range that this thread began last by [`NVTX_START`] with `range` 0 got its number.
pub const NVTX_STARTED: u16 = 5;

/// `Nvtx::payload_kind`: none, or how to read `payload` (the numbers of `nvtxPayloadType_t`).
pub const NVTX_PAYLOAD_NONE: u16 = 0;
pub const NVTX_PAYLOAD_U64: u16 = 1;
pub const NVTX_PAYLOAD_I64: u16 = 2;
pub const NVTX_PAYLOAD_F64: u16 = 3;
pub const NVTX_PAYLOAD_U32: u16 = 4;
pub const NVTX_PAYLOAD_I32: u16 = 5;
pub const NVTX_PAYLOAD_F32: u16 = 6;

/// Longest name of a range, mark or domain of NVTX, in bytes; longer ones are cut.
pub const MAX_NVTX_BYTES: usize = 160;

/// The program made a range or a mark by NVTX. Tail: name, domain.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Nvtx {
    pub header: MarkHeader,
    /// Number of the range where `NVTX_START` and `NVTX_END` have one. Of nested ranges: the handle of their domain, where
    /// its name is not known. Else 0.
    pub range: u64,
    /// Bits of the payload, as `payload_kind` says.
    pub payload: u64,
    /// `NVTX_*` action.
    pub action: u16,
    pub payload_kind: u16,
    pub name_bytes: u16,
    pub domain_bytes: u16,
}

/// Most dimensions of a tensor (`nvinfer1::Dims::MAX_DIMS`).
pub const MAX_DIMS: usize = 8;

/// The program set the shape of an engine's input, or asked for that of a tensor. Tail: the tensor's name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Shape {
    pub header: MarkHeader,
    /// The execution context, as the steps that it runs have it.
    pub object: u64,
    pub dims: [i64; MAX_DIMS],
    /// Dimensions that count.
    pub count: u32,
    pub name_bytes: u16,
    /// 1: it was asked for.
    pub asked: u16,
}

/// The program asked an engine for the data type of a tensor. Tail: the tensor's name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct DataType {
    pub header: MarkHeader,
    /// The engine.
    pub object: u64,
    /// `nvinfer1::DataType`.
    pub data_type: u32,
    pub name_bytes: u32,
}

/// An engine made an execution context.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Made {
    pub header: MarkHeader,
    /// The engine, as [`DataType`] has it.
    pub maker: u64,
    /// The context, as steps have it.
    pub made: u64,
}

/// The injected library measured a step on the GPU: two events around it on its own stream.
///
/// Device times are raw: milliseconds as f32 bits, as `cuEventElapsedTime` gave them. Joined to its step by `tid`
/// and the host interval, which lies around the engine's own function.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct GpuSpan {
    pub header: MarkHeader,
    pub device_uuid: [u8; 16],
    /// CUcontext and CUstream handles, as numbers.
    pub context: u64,
    pub stream: u64,
    /// Counts the timed steps of the process.
    pub sequence: u64,
    /// CLOCK_MONOTONIC ns before the begin event was recorded and after the end event was recorded.
    pub enqueue_begin_ns: u64,
    pub enqueue_end_ns: u64,
    /// Thread that enqueued, as gettid() in the traced process's own pid namespace.
    pub tid: u32,
    /// The clock series that this belongs to; a new context or a lost base begins a new epoch.
    pub epoch: u32,
    /// The base event that `begin_ms_bits` counts from.
    pub base: u32,
    /// f32 bits: elapsed(base event, begin event).
    pub begin_ms_bits: u32,
    /// f32 bits: elapsed(begin event, end event).
    pub span_ms_bits: u32,
    /// `SPAN_*` bits.
    pub flags: u32,
}

/// `GpuSpan::flags`: events were recorded between its layers, too, so that the step took longer than it would have.
pub const SPAN_SAMPLED: u32 = 1;

/// The injected library compared the clocks. Tail: `readings` × [`ClockReading`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ClockBurst {
    pub header: MarkHeader,
    pub device_uuid: [u8; 16],
    pub context: u64,
    pub epoch: u32,
    /// The base event that the readings count from; bases of an epoch are numbered 0, 1, 2, …
    pub base: u32,
    /// f32 bits: elapsed(previous base event, this base event), in the first burst of a base > 0; else NaN bits.
    pub rebase_ms_bits: u32,
    pub readings: u32,
}

/// One bracket of a burst: the event was recorded, and completed, between the two host times.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ClockReading {
    /// CLOCK_MONOTONIC_RAW ns before the record and after the completion was seen.
    pub h0_raw_ns: u64,
    pub h1_raw_ns: u64,
    /// f32 bits: elapsed(base event, this event).
    pub elapsed_ms_bits: u32,
    pub _pad: u32,
}

/// `InjectState::state`.
pub const INJECT_ACTIVE: u32 = 1;
pub const INJECT_DISABLED: u32 = 2;

/// The injected library reports itself, once a second while it is active and when it turns itself off. Tail: reason.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct InjectState {
    pub header: MarkHeader,
    /// `INJECT_*`.
    pub state: u32,
    pub reason_bytes: u32,
    /// Steps that passed through since the program started, while active.
    pub steps: u64,
    /// Of those: timed; skipped because the stream was capturing; because the event pool was empty; because a driver
    /// call failed; given up because the events never completed.
    pub timed: u64,
    pub skipped_capturing: u64,
    pub skipped_pool: u64,
    pub skipped_error: u64,
    pub abandoned: u64,
}

/// Ranges of one step at most.
pub const MAX_LAYERS: usize = 1024;
/// `GpuLayer::parent`: no other range encloses it.
pub const NO_LAYER: u32 = u32::MAX;
/// `GpuLayers::flags`: the step had more ranges than [`MAX_LAYERS`], or events for them failed: the rest is missing.
pub const LAYERS_CUT: u32 = 1;

/// The NVTX ranges inside a sampled step, each between two events on the step's stream. Comes before the step's
/// [`GpuSpan`]. Tail: `layers` × [`GpuLayer`], then their names one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct GpuLayers {
    pub header: MarkHeader,
    /// [`GpuSpan::sequence`] of the step.
    pub sequence: u64,
    /// Ranges of the step, over all marks.
    pub total: u32,
    /// Number of the first range of this mark; ranges are in order of their begin.
    pub first: u32,
    /// Ranges in this mark.
    pub layers: u32,
    /// `LAYERS_*` bits.
    pub flags: u32,
}

/// One range inside a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct GpuLayer {
    /// f32 bits: elapsed(begin event of the step, event at the range's begin or end).
    pub begin_ms_bits: u32,
    pub end_ms_bits: u32,
    /// Number of the range that encloses this one, or [`NO_LAYER`].
    pub parent: u32,
    pub depth: u16,
    pub name_bytes: u16,
}

/// What became of NVTX in this process; once a second while a tracer listens. Counts are since the program started.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct NvtxState {
    pub header: MarkHeader,
    /// Users of NVTX in the process (each library with its headers is one), and those whose tables were not understood.
    pub clients: u32,
    pub refused: u32,
    /// One step in so many is sampled; 0: none.
    pub sample_every: u32,
    pub _pad: u32,
    /// Ranges and marks that were reported, and those that were not because there were too many at a time.
    pub reported: u64,
    pub limited: u64,
    /// Names that were not kept because there were too many.
    pub names_lost: u64,
    /// Steps that were sampled; those that should have been but for want of events.
    pub sampled: u64,
    pub skipped_pool: u64,
}

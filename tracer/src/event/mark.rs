//! Marks, decoded from their payloads (`tracer_abi::mark` documents every field).

mod decode;

use tracer_abi::mark::{ClockReading, Slot};

use super::StackId;

pub use decode::MarkError;
pub(crate) use decode::clean;

/// What a program, or the injected library, said.
#[derive(Clone, Debug, PartialEq)]
pub enum Mark {
    /// Boxed: there is one a request, and it is larger than all that comes often.
    RequestBegin(Box<RequestBegin>),
    RequestEnd(RequestEnd),
    Batch(Batch),
    Token(Token),
    Phase(Phase),
    Attr(Attr),
    Nvtx(Nvtx),
    Shape(Shape),
    DataType(DataType),
    Made(Made),
    GpuSpan(GpuSpan),
    GpuLayers(GpuLayers),
    ClockBurst(ClockBurst),
    InjectState(InjectState),
    NvtxState(NvtxState),
}

impl Mark {
    /// Name of the kind in tables and messages.
    #[must_use]
    pub const fn kind_name(&self) -> &'static str {
        match self {
            Self::RequestBegin(_) => "request_begin",
            Self::RequestEnd(_) => "request_end",
            Self::Batch(_) => "batch",
            Self::Token(_) => "token",
            Self::Phase(_) => "phase",
            Self::Attr(_) => "attr",
            Self::Nvtx(_) => "nvtx",
            Self::Shape(_) => "shape",
            Self::DataType(_) => "data_type",
            Self::Made(_) => "made",
            Self::GpuSpan(_) => "gpu_span",
            Self::GpuLayers(_) => "gpu_layers",
            Self::ClockBurst(_) => "clock_burst",
            Self::InjectState(_) => "inject_state",
            Self::NvtxState(_) => "nvtx_state",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestBegin {
    pub request: u64,
    /// CLOCK_MONOTONIC ns; `None`: when the mark was made.
    pub received_ns: Option<u64>,
    /// `None` when all zero.
    pub trace_id: Option<[u8; 16]>,
    pub span_id: Option<[u8; 8]>,
    pub trace_flags: u32,
    pub prompt_tokens: Option<u32>,
    pub request_id: String,
    pub tenant_id: String,
    pub model: String,
    pub model_version: String,
    /// Digest of the engine file, as the program knows it.
    pub engine_hash: String,
    /// Separated by commas.
    pub adapters: String,
    pub kv_cache_strategy: String,
}

impl RequestBegin {
    /// Takes a fact in that the program told later; one that is not of [`tracer_abi::mark::REQUEST_KEYS`], or not of
    /// its type, changes nothing.
    pub fn learn(&mut self, attr: Attr) {
        let (field, text) = match (attr.key.as_str(), attr.value) {
            ("prompt_tokens", AttrValue::Number(count)) => {
                if count.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(&count) {
                    self.prompt_tokens = Some(count as u32);
                }
                return;
            }
            ("tenant_id", AttrValue::String(text)) => (&mut self.tenant_id, text),
            ("model", AttrValue::String(text)) => (&mut self.model, text),
            ("model_version", AttrValue::String(text)) => (&mut self.model_version, text),
            ("engine_hash", AttrValue::String(text)) => (&mut self.engine_hash, text),
            ("adapters", AttrValue::String(text)) => (&mut self.adapters, text),
            ("kv_cache_strategy", AttrValue::String(text)) => (&mut self.kv_cache_strategy, text),
            _ => return,
        };
        *field = text;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestEnd {
    pub request: u64,
    pub output_tokens: u32,
    /// `tracer_abi::mark::FINISH_*`.
    pub finish_reason: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub batch_id: u64,
    pub rank: u32,
    pub slot_count: u32,
    pub first_slot: u32,
    pub slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    pub request: u64,
    pub choice: u32,
    pub index: u32,
    /// Where the mark comes from; as [`crate::event::Call::stack`].
    pub stack: Option<StackId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub request: u64,
    pub begins: bool,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Attr {
    pub request: u64,
    pub choice: u32,
    pub key: String,
    pub value: AttrValue,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttrValue {
    Number(f64),
    String(String),
}

/// What a call of NVTX did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NvtxAction {
    /// A range of the thread begins or ends; those of a domain nest.
    Push,
    Pop,
    /// A range of the process begins or ends.
    Start,
    End,
    Mark,
    /// The last start of this thread without a number got it.
    Started,
}

/// A call of NVTX outside of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvtx {
    pub action: NvtxAction,
    /// Number of a range that starts and ends; 0: none.
    pub range: u64,
    pub name: String,
    /// Empty: the default one.
    pub domain: String,
    /// The number that came with it, as text; empty: none.
    pub payload: String,
}

/// The shape of an engine's input as the program set it, or of a tensor as it asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The execution context, as the steps that it runs have it.
    pub object: u64,
    pub name: String,
    /// `4x128`; a dimension that is still open is `-1`.
    pub dims: String,
    pub asked: bool,
}

/// The data type of a tensor, as an engine said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataType {
    /// The engine.
    pub object: u64,
    pub name: String,
    /// `fp16`; of a type that this version does not know, its number.
    pub data_type: String,
}

/// An engine made an execution context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// The engine, as [`DataType`] has it.
    pub maker: u64,
    /// The context, as the steps that it runs have it.
    pub made: u64,
}

/// The ranges inside a sampled step, or a part of them.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuLayers {
    /// [`GpuSpan::sequence`] of the step.
    pub sequence: u64,
    /// Ranges of the step, over all parts.
    pub total: u32,
    /// Number of the first range of this part.
    pub first: u32,
    /// Further ranges are missing.
    pub cut: bool,
    pub layers: Vec<GpuLayer>,
}

/// One of them; raw device readings, from the step's begin event.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuLayer {
    pub begin_ms: f32,
    pub end_ms: f32,
    /// Number of the range around it.
    pub parent: Option<u32>,
    pub depth: u16,
    pub name: String,
}

/// See `tracer_abi::mark::NvtxState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvtxState {
    pub clients: u32,
    pub refused: u32,
    pub sample_every: u32,
    pub reported: u64,
    pub limited: u64,
    pub names_lost: u64,
    pub sampled: u64,
    pub skipped_pool: u64,
}

/// Raw device readings; mapped to the host clock by `clock`, never before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuSpan {
    pub device_uuid: [u8; 16],
    pub context: u64,
    pub stream: u64,
    pub sequence: u64,
    pub enqueue_begin_ns: u64,
    pub enqueue_end_ns: u64,
    /// In the traced process's own pid namespace.
    pub tid: u32,
    pub epoch: u32,
    pub base: u32,
    pub begin_ms: f32,
    pub span_ms: f32,
    /// Its layers were timed, too: it took longer than it would have.
    pub sampled: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ClockBurst {
    pub device_uuid: [u8; 16],
    pub context: u64,
    pub epoch: u32,
    pub base: u32,
    /// elapsed(previous base event, this base event), in the first burst of a base > 0.
    pub rebase_ms: Option<f32>,
    pub readings: Vec<ClockReading>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InjectState {
    pub active: bool,
    pub reason: String,
    pub steps: u64,
    pub timed: u64,
    pub skipped_capturing: u64,
    pub skipped_pool: u64,
    pub skipped_error: u64,
    pub abandoned: u64,
}

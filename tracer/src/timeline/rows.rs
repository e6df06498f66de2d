//! What the timeline yields: finished steps, iterations, requests and tokens. One struct per derived table.

use std::sync::Arc;

use crate::event::{CallEnd, ProcessId, StackId};
use tracer_abi::mark::Slot;

/// Begin and end of a step on its GPU, on CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuTime {
    pub begin_ns: u64,
    /// `begin_ns + span_ns`.
    pub end_ns: u64,
    /// gpu_span: elapsed(begin event, end event), at the host's rate. Includes launch gaps; never "GPU busy".
    pub span_ns: u64,
    /// `begin_ns` and `end_ns` are right within this many ns.
    pub bound_ns: u64,
}

impl GpuTime {
    /// The bound exceeds the span: where in its step it ran is not known.
    #[must_use]
    pub fn is_vague(&self) -> bool {
        self.bound_ns > self.span_ns
    }
}

/// One execution of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Number of the step in this capture, in order of `begin_ns`.
    pub id: u64,
    pub process: ProcessId,
    pub tid: u32,
    /// Probe point (`Point::id`) of the call.
    pub point: u32,
    pub rank: u32,
    /// The program's batch id; `None`: no batch mark preceded the step (counted as `step_without_batch`).
    pub batch_id: Option<u64>,
    /// [`Iteration::id`]; `None` as above.
    pub iteration: Option<u64>,
    pub stream: u64,
    /// The enqueue call on the host.
    pub begin_ns: u64,
    pub end_ns: u64,
    pub end: CallEnd,
    /// Return of the first wait for the step's stream by the same thread after the enqueue (host-observed completion).
    pub observed_end_ns: Option<u64>,
    pub device_uuid: Option<[u8; 16]>,
    /// `None`: host-observed only.
    pub gpu: Option<GpuTime>,
    /// Events were recorded between its layers, too: it took longer than it would have, and is in no statistics of
    /// latencies.
    pub sampled: bool,
    /// The engine's file; `None`: not known, or the process has opened several.
    pub engine: Option<Arc<Engine>>,
    /// Version of the engine's library, as it says; empty: not known.
    pub engine_version: String,
    /// The request and the innermost other range of NVTX around the step on its thread; empty: none.
    pub nvtx_request: String,
    pub nvtx_range: String,
    /// Shapes that the program had set for its inputs, `name:4x128` by name, with spaces in between; empty: not known.
    pub input_shapes: String,
    /// Likewise of tensors that it had asked the context for and not set: outputs, as far as it asks.
    pub output_shapes: String,
    /// Data types that the step's engine had told of its tensors, `name:fp16`; empty: not known.
    pub data_types: String,
    /// What the data types imply: the narrowest of them that is for computing with, or `unknown`.
    pub quantization: String,
    pub slots: Vec<Slot>,
}

/// What identifies an engine's file. See [`crate::event::EngineFile`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engine {
    pub path: String,
    pub bytes: u64,
    pub modified_ns: u64,
    /// Empty: it could not be read.
    pub fingerprint: Vec<u8>,
}

/// One layer of a sampled step: an NVTX range inside its enqueue, between two events on the step's stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// [`Step::id`].
    pub step: u64,
    /// Number in the step, in order of begin.
    pub number: u32,
    /// Number of the layer around it.
    pub parent: Option<u32>,
    pub depth: u16,
    pub name: String,
    /// CLOCK_MONOTONIC ns; `None`: the clock could not map the step.
    pub gpu_begin_ns: Option<u64>,
    pub gpu_end_ns: Option<u64>,
    /// elapsed(begin event, end event): all that ran on the step's stream meanwhile.
    pub gpu_span_ns: u64,
    /// The same without the layers inside it.
    pub gpu_self_ns: u64,
    /// `gpu_begin_ns` and `gpu_end_ns` are right within this many ns.
    pub gpu_bound_ns: Option<u64>,
}

/// A named part of what a program does, or (`is_mark`) something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub process: ProcessId,
    /// The thread that it began on.
    pub tid: u32,
    pub source: Source,
    /// [`Request::id`], for phase marks.
    pub request: Option<u64>,
    /// The request that a range around it on its thread names; empty: none.
    pub request_id: String,
    pub name: String,
    /// NVTX domain; empty: the default one, or a mark of ours.
    pub domain: String,
    /// The number that came with it, as text; empty: none.
    pub payload: String,
    pub is_mark: bool,
    pub begin_ns: u64,
    /// `None`: its thread or the recording ended first.
    pub end_ns: Option<u64>,
}

impl Step {
    /// When the step was complete: GPU end, else the return of the first host wait; `None` when neither was seen.
    #[must_use]
    pub fn completion_ns(&self) -> Option<u64> {
        self.gpu.map(|gpu| gpu.end_ns).or(self.observed_end_ns)
    }

    /// Enqueue begins → completion, in ns.
    #[must_use]
    pub fn duration_ns(&self) -> Option<u64> {
        self.completion_ns()?.checked_sub(self.begin_ns)
    }
}

/// The steps of all ranks that share a batch id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iteration {
    pub id: u64,
    pub process: ProcessId,
    pub batch_id: u64,
    /// First enqueue and last completion (gpu end, else observed end, else enqueue end) of its steps.
    pub begin_ns: u64,
    pub end_ns: u64,
    pub steps: u32,
    /// Rank whose step completed last.
    pub slowest_rank: u32,
    pub requests: u32,
    pub prefill_requests: u32,
    /// Tokens processed (prompt tokens of prefills + one per decode slot).
    pub tokens: u64,
}

/// Where a request or token time came from, in order of trust.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    Mark,
    /// Ranges of NVTX called `request:ID`; they tell of no tokens.
    Nvtx,
    /// HTTP on the server's sockets: a token was delivered when it was handed to the kernel.
    Socket,
}

impl Source {
    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mark => "mark",
            Self::Nvtx => "nvtx",
            Self::Socket => "socket",
        }
    }
}

/// How it is known which step generated a token, in order of trust.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Join {
    /// It is not.
    #[default]
    None,
    /// The program said so.
    Mark,
    /// By counting: one token a step.
    Count,
    /// The likeliest: by counting where nothing tells which of several engines it was, and where steps and tokens are not
    /// one to one, the latest step that had ended before the token was delivered.
    Inferred,
}

impl Join {
    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mark => "mark",
            Self::Count => "count",
            Self::Inferred => "inferred",
        }
    }
}

/// What a client asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Our key in this capture. External ids may repeat and are never the key.
    pub id: u64,
    pub process: ProcessId,
    /// The program's own number.
    pub program_request: u64,
    /// X-Request-ID or the like; empty when unknown.
    pub request_id: String,
    pub trace_id: Option<[u8; 16]>,
    pub span_id: Option<[u8; 8]>,
    /// These are empty when unknown.
    pub tenant_id: String,
    pub model: String,
    pub model_version: String,
    /// Digest of the engine file, as the program knows it.
    pub engine_hash: String,
    /// Names separated by commas.
    pub adapters: String,
    pub kv_cache_strategy: String,
    pub prompt_tokens: Option<u32>,
    /// Origin of TTFT; `source` says where it came from.
    pub received_ns: u64,
    /// When its first byte reached the socket, and was read from it, where its socket was followed: the time between
    /// is event-loop lag.
    pub arrived_ns: Option<u64>,
    pub read_ns: Option<u64>,
    pub source: Source,
    /// Request end; `None`: still running when the recording stopped.
    pub end_ns: Option<u64>,
    /// `tracer_abi::mark::FINISH_*`.
    pub finish_reason: u32,
    /// As the program declared at the end.
    pub declared_tokens: Option<u32>,
    /// Delivered tokens that were seen.
    pub tokens: u32,
    /// received → token 0 of choice 0.
    pub ttft_ns: Option<u64>,
    /// Mean gap after the first token: (last − first) / (n − 1); `None` for n < 2.
    pub tpot_ns: Option<f64>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// [`Request::id`].
    pub request: u64,
    pub choice: u32,
    pub index: u32,
    /// The thread that delivered it.
    pub process: ProcessId,
    pub tid: u32,
    /// When it was delivered; see `source`.
    pub delivered_ns: u64,
    /// When it was handed to the kernel, where its socket was followed.
    pub written_ns: Option<u64>,
    /// When its last byte was put on the wire, where that was not at once: held by Nagle's algorithm or a full window.
    pub wire_ns: Option<u64>,
    /// TTFT for index 0 (since the request was received), else ITL (since the token before it, index − 1).
    /// `None` when that one was not seen.
    pub latency_ns: Option<u64>,
    pub source: Source,
    /// The iteration that generated it; `None`: unmatched, counted as `token_without_step`.
    pub iteration: Option<u64>,
    /// The step of that iteration that ended last.
    pub step: Option<u64>,
    pub join: Join,
    pub prefill: bool,
}

impl Token {
    /// How long it was held after it was written, in ns; `None`: it was not, or that was not seen.
    #[must_use]
    pub fn held_ns(&self) -> Option<u64> {
        self.wire_ns?.checked_sub(self.written_ns.unwrap_or(self.delivered_ns))
    }
}

/// What was not ordered as it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HazardKind {
    /// Two threads gave one stream a step each, of different requests, and nothing waited in between.
    SharedStream,
    /// A step was enqueued while its stream was capturing: it went into a graph, and did not run.
    CapturedStep,
    /// A token was delivered before the step that generates it was complete.
    EarlyOutput,
}

impl HazardKind {
    pub const ALL: [Self; 3] = [Self::SharedStream, Self::CapturedStep, Self::EarlyOutput];

    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SharedStream => "shared_stream",
            Self::CapturedStep => "captured_step",
            Self::EarlyOutput => "early_output",
        }
    }

    /// Of how many there are, in the ledger.
    #[must_use]
    pub const fn counter(self) -> &'static str {
        match self {
            Self::SharedStream => "hazard_shared_stream",
            Self::CapturedStep => "hazard_captured_step",
            Self::EarlyOutput => "hazard_early_output",
        }
    }
}

/// One case of it: two calls, of which the second should not have been made when it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hazard {
    pub kind: HazardKind,
    pub process: ProcessId,
    /// When the second call was made.
    pub time_ns: u64,
    /// [`Step::id`]: the step of the second call; of early output the step that generates the token.
    pub step: u64,
    /// The step of the first call, of a shared stream.
    pub other_step: Option<u64>,
    /// [`Request::id`] of the (first) request that the second call was for, and of that of the first.
    pub request: Option<u64>,
    pub other_request: Option<u64>,
    pub stream: u64,
    /// Who made the second call, and where: enqueued the step, or delivered the token.
    pub tid: u32,
    pub stack: Option<StackId>,
    /// Who made the first one, and where: enqueued a step, or began the capture.
    pub other_tid: u32,
    pub other_stack: Option<StackId>,
}

/// A thing that could not be joined, each kind counted separately in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unmatched {
    /// A step that no batch mark preceded.
    StepWithoutBatch,
    /// A batch mark that no step followed.
    BatchWithoutStep,
    /// A delivered token whose step is not known.
    TokenWithoutStep,
    /// A token that was generated but whose delivery was not seen. Tokens of a choice are numbered from 0 without
    /// gaps, so a missing number below the last delivered one always counts. Beyond it: up to the number that the
    /// program declared at the request's end (or, where it declared none, up to the last one that a step generated),
    /// unless the request was cancelled, failed, or was still running when the recording stopped.
    TokenNotDelivered,
    /// A batch or token of before the first step that was seen of its process: nothing is missing.
    BeforeFirstStep,
    /// A second delivery of the same (request, choice, index).
    TokenRepeated,
    /// A request whose begin was not seen: it has no row; its tokens have, under a request id of their own.
    UnknownRequest,
    /// A GPU span whose step was not seen.
    GpuSpanWithoutStep,
    /// A step of a process with an active injected library that got no GPU span.
    StepWithoutGpuSpan,
    /// A GPU span that the clock could not map.
    GpuSpanUnaligned,
    /// An HTTP exchange with tokens in a program that marks tokens, of which no marked request is known to be.
    ExchangeWithoutRequest,
    /// A marked token that is not in the response of its request, though all of that was seen.
    MarkWithoutWrite,
    /// A token in such a response that no mark tells of.
    WriteWithoutMark,
    /// A token whose mark and write are more than [`super::pair::FAR_NS`] apart.
    MarkFarFromWrite,
    /// A sampled step of which layers are missing: too many, or events failed.
    LayersCut,
    /// Open state dropped to stay in bounds.
    Evicted,
}

impl Unmatched {
    pub const ALL: [Self; 16] = [
        Self::StepWithoutBatch,
        Self::BatchWithoutStep,
        Self::TokenWithoutStep,
        Self::TokenNotDelivered,
        Self::BeforeFirstStep,
        Self::TokenRepeated,
        Self::UnknownRequest,
        Self::GpuSpanWithoutStep,
        Self::StepWithoutGpuSpan,
        Self::GpuSpanUnaligned,
        Self::ExchangeWithoutRequest,
        Self::MarkWithoutWrite,
        Self::WriteWithoutMark,
        Self::MarkFarFromWrite,
        Self::LayersCut,
        Self::Evicted,
    ];

    /// Name in the ledger.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StepWithoutBatch => "step_without_batch",
            Self::BatchWithoutStep => "batch_without_step",
            Self::TokenWithoutStep => "token_without_step",
            Self::TokenNotDelivered => "token_not_delivered",
            Self::BeforeFirstStep => "before_first_step",
            Self::TokenRepeated => "token_repeated",
            Self::UnknownRequest => "unknown_request",
            Self::GpuSpanWithoutStep => "gpu_span_without_step",
            Self::StepWithoutGpuSpan => "step_without_gpu_span",
            Self::GpuSpanUnaligned => "gpu_span_unaligned",
            Self::ExchangeWithoutRequest => "exchange_without_request",
            Self::MarkWithoutWrite => "mark_without_write",
            Self::WriteWithoutMark => "write_without_mark",
            Self::MarkFarFromWrite => "mark_far_from_write",
            Self::LayersCut => "layers_cut",
            Self::Evicted => "evicted",
        }
    }

    /// Whether a count above zero means that a sample is missing from a distribution of latencies.
    ///
    /// The others leave a sample without its cause or its owner.
    #[must_use]
    pub const fn is_loss(self) -> bool {
        match self {
            Self::BatchWithoutStep
            | Self::TokenNotDelivered
            | Self::GpuSpanWithoutStep
            | Self::StepWithoutGpuSpan
            | Self::GpuSpanUnaligned
            | Self::Evicted => true,
            Self::StepWithoutBatch
            | Self::TokenWithoutStep
            | Self::BeforeFirstStep
            | Self::TokenRepeated
            | Self::LayersCut
            | Self::UnknownRequest
            | Self::ExchangeWithoutRequest
            | Self::MarkWithoutWrite
            | Self::WriteWithoutMark
            | Self::MarkFarFromWrite => false,
        }
    }
}

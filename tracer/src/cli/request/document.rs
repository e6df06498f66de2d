//! One request as JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Life, Piece, finish};
use crate::cli::budget;
use crate::cli::units::{date_time, rfc3339};
use crate::clock::WallClock;
use crate::hex::hex;
use crate::timeline::rows::{GpuTime, Step};
use crate::timeline::tables::Tables;

/// `tracer request --json`.
#[derive(Serialize)]
pub(super) struct Document<'a> {
    schema: &'static str,
    simulated_gpu: bool,
    requests: Vec<RequestDocument<'a>>,
}

#[derive(Serialize)]
struct RequestDocument<'a> {
    id: u64,
    request_id: &'a str,
    trace_id: Option<String>,
    span_id: Option<String>,
    tenant_id: &'a str,
    model: &'a str,
    model_version: &'a str,
    engine_hash: &'a str,
    /// Separated by commas.
    adapters: &'a str,
    kv_cache_strategy: &'a str,
    pid: u32,
    prompt_tokens: Option<u32>,
    source: &'static str,
    /// CLOCK_MONOTONIC; `_at` is UTC, `null` when not known.
    received_ns: u64,
    received_at: Option<String>,
    /// Its first bytes reached the socket, and were read.
    arrived_ns: Option<u64>,
    read_ns: Option<u64>,
    end_ns: Option<u64>,
    end_at: Option<String>,
    finish: &'static str,
    tokens_seen: u32,
    tokens_declared: Option<u32>,
    ttft_ns: Option<u64>,
    tpot_ns: Option<f64>,
    engines: Vec<EngineDocument<'a>>,
    phases: Vec<PhaseDocument<'a>>,
    /// Those of the first of each kind in the capture that concern it.
    hazards: Vec<HazardDocument>,
    tokens: Vec<TokenDocument>,
}

/// An engine of its tokens' steps.
#[derive(Serialize)]
struct EngineDocument<'a> {
    path: &'a str,
    bytes: u64,
    modified_at: Option<String>,
    fingerprint: Option<String>,
}

#[derive(Serialize)]
struct PhaseDocument<'a> {
    name: &'a str,
    domain: &'a str,
    source: &'static str,
    is_mark: bool,
    /// CLOCK_MONOTONIC.
    begin_ns: u64,
    end_ns: Option<u64>,
}

#[derive(Serialize)]
struct HazardDocument {
    kind: &'static str,
    /// CLOCK_MONOTONIC.
    time_ns: u64,
    step: u64,
    other_step: Option<u64>,
    stream: u64,
    tid: u32,
    other_tid: u32,
}

#[derive(Serialize)]
struct TokenDocument {
    choice: u32,
    index: u32,
    /// CLOCK_MONOTONIC.
    delivered_ns: u64,
    delivered_at: Option<String>,
    /// When it was handed to the kernel, where its socket was followed.
    written_ns: Option<u64>,
    /// When it was on the wire, where that was not at once.
    wire_ns: Option<u64>,
    /// How its step is known.
    joined_by: &'static str,
    latency_ns: Option<u64>,
    iteration: Option<u64>,
    step: Option<u64>,
    step_begin_ns: Option<u64>,
    step_begin_at: Option<String>,
    step_duration_ns: Option<u64>,
    /// Of the step; `null` where it was only observed by the host.
    gpu: Option<GpuDocument>,
    /// Its step's layers were timed, so that it took longer than it would have.
    sampled: bool,
    /// Of its step's inputs; empty: not known.
    input_shapes: String,
    output_shapes: String,
    data_types: String,
    quantization: Option<String>,
    batch: Option<u64>,
    prefill: bool,
    /// Where the latency went, ns by part; they sum to it.
    parts: BTreeMap<&'static str, u64>,
    blocked_on: Option<&'static str>,
}

/// A step's time on its GPU.
#[derive(Serialize)]
struct GpuDocument {
    /// CLOCK_MONOTONIC.
    begin_ns: u64,
    begin_at: Option<String>,
    end_ns: u64,
    end_at: Option<String>,
    span_ns: u64,
    /// What begin and end are right within.
    bound_ns: u64,
    /// The bound exceeds the span.
    is_vague: bool,
}

/// UTC of a time of CLOCK_MONOTONIC.
fn utc(wall: &WallClock, monotonic_ns: u64) -> Option<String> {
    wall.realtime_ns(monotonic_ns).and_then(rfc3339)
}

impl GpuDocument {
    fn new(gpu: GpuTime, wall: &WallClock) -> Self {
        let GpuTime { begin_ns, end_ns, span_ns, bound_ns } = gpu;
        let (begin_at, end_at) = (utc(wall, begin_ns), utc(wall, end_ns));
        Self { begin_ns, begin_at, end_ns, end_at, span_ns, bound_ns, is_vague: gpu.is_vague() }
    }
}

impl<'a> Document<'a> {
    pub(super) fn new(tables: &Tables, lives: &'a [Life<'a>]) -> Self {
        Self {
            schema: "tracer.request/1",
            simulated_gpu: tables.meta.simulated,
            requests: lives.iter().map(|life| RequestDocument::new(life, &tables.wall)).collect(),
        }
    }
}

impl<'a> RequestDocument<'a> {
    fn new(life: &'a Life<'a>, wall: &WallClock) -> Self {
        let request = life.request;
        Self {
            id: request.id,
            request_id: &request.request_id,
            trace_id: request.trace_id.map(|id| hex(&id)),
            span_id: request.span_id.map(|id| hex(&id)),
            tenant_id: &request.tenant_id,
            model: &request.model,
            model_version: &request.model_version,
            engine_hash: &request.engine_hash,
            adapters: &request.adapters,
            kv_cache_strategy: &request.kv_cache_strategy,
            pid: request.process.tgid,
            prompt_tokens: request.prompt_tokens,
            source: request.source.name(),
            received_ns: request.received_ns,
            received_at: utc(wall, request.received_ns),
            arrived_ns: request.arrived_ns,
            read_ns: request.read_ns,
            end_ns: request.end_ns,
            end_at: request.end_ns.and_then(|ns| utc(wall, ns)),
            finish: finish(request),
            tokens_seen: request.tokens,
            tokens_declared: request.declared_tokens,
            ttft_ns: request.ttft_ns,
            tpot_ns: request.tpot_ns,
            engines: life
                .engines
                .iter()
                .map(|engine| EngineDocument {
                    path: &engine.path,
                    bytes: engine.bytes,
                    modified_at: date_time(engine.modified_ns),
                    fingerprint: Some(hex(&engine.fingerprint)).filter(|sum| !sum.is_empty()),
                })
                .collect(),
            phases: life
                .phases
                .iter()
                .map(|phase| PhaseDocument {
                    name: &phase.name,
                    domain: &phase.domain,
                    source: phase.source.name(),
                    is_mark: phase.is_mark,
                    begin_ns: phase.begin_ns,
                    end_ns: phase.end_ns,
                })
                .collect(),
            hazards: life
                .hazards
                .iter()
                .map(|hazard| HazardDocument {
                    kind: hazard.kind.name(),
                    time_ns: hazard.time_ns,
                    step: hazard.step,
                    other_step: hazard.other_step,
                    stream: hazard.stream,
                    tid: hazard.tid,
                    other_tid: hazard.other_tid,
                })
                .collect(),
            tokens: life.tokens.iter().map(|piece| TokenDocument::new(piece, wall)).collect(),
        }
    }
}

impl TokenDocument {
    fn new(piece: &Piece, wall: &WallClock) -> Self {
        let Piece { token, step, batch, budget } = piece;
        Self {
            choice: token.choice,
            index: token.index,
            delivered_ns: token.delivered_ns,
            delivered_at: utc(wall, token.delivered_ns),
            written_ns: token.written_ns,
            wire_ns: token.wire_ns,
            joined_by: token.join.name(),
            latency_ns: token.latency_ns,
            iteration: token.iteration,
            step: token.step,
            step_begin_ns: step.map(|step| step.begin_ns),
            step_begin_at: step.and_then(|step| utc(wall, step.begin_ns)),
            step_duration_ns: step.and_then(Step::duration_ns),
            gpu: piece.gpu().map(|gpu| GpuDocument::new(gpu, wall)),
            sampled: step.is_some_and(|step| step.sampled),
            input_shapes: step.map(|step| step.input_shapes.clone()).unwrap_or_default(),
            output_shapes: step.map(|step| step.output_shapes.clone()).unwrap_or_default(),
            data_types: step.map(|step| step.data_types.clone()).unwrap_or_default(),
            quantization: step.map(|step| step.quantization.clone()),
            batch: *batch,
            prefill: token.prefill,
            parts: budget.map(budget::parts).unwrap_or_default(),
            blocked_on: budget.and_then(|budget| budget.blocked).map(|on| on.name()),
        }
    }
}

//! What a report says, before it is text or JSON.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;

use super::engine::Engines;
use super::hazards::Hazards;
use super::layers::{self, Layers, PhaseLine};
use super::{gpu::Gpus, sockets::Sockets, why::Why};

use crate::cli::budget;
use crate::cli::units::{date_time, rfc3339};
use crate::clock::{ClockQuality, WallClock};
use crate::event::ProcessId;
use crate::hex::hex;
use crate::latency::{Latencies, Latency};
use crate::timeline::GPU_TIMES_OFF;
use crate::timeline::budget::ByToken;
use crate::timeline::coverage::{self, Coverage};
use crate::timeline::rows::{Request, Source, Step, Token, Unmatched};
use crate::timeline::tables::{LedgerRow, Meta, Tables};

/// Share of the samples beyond a quantile that, if lost, makes it doubtful.
const DOUBT: f64 = 0.1;

/// `tracer report`, as printed with `--json`. Times are ns; `_ns` without more are durations.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) schema: &'static str,
    pub(crate) recording: Recording,
    /// Work that was not ordered as it must be; `null`: none was found.
    pub(crate) hazards: Option<Hazards>,
    /// Slow tokens against usual ones: gaps, then first tokens.
    pub(crate) why_slow: Vec<Why>,
    pub(crate) gpu_times: GpuTimes,
    /// Of the devices, where times are injected.
    pub(crate) clocks: Vec<ClockLine>,
    pub(crate) latencies: Vec<LatencyRow>,
    pub(crate) gpus: Gpus,
    /// Which engines the steps ran.
    pub(crate) engines: Engines,
    /// Of sampled steps; `null` where none was.
    pub(crate) layers: Option<Layers>,
    /// From phase marks and NVTX, by name.
    pub(crate) phases: Vec<PhaseLine>,
    pub(crate) counts: Counts,
    /// Gaps between tokens: of each step the slowest token. Then the slowest first tokens of requests.
    pub(crate) slowest_tokens: Vec<SlowToken>,
    pub(crate) slowest_first_tokens: Vec<SlowToken>,
    /// What sockets tell of; `null` where nothing was seen on any.
    pub(crate) sockets: Option<Sockets>,
    /// Probe points by process.
    pub(crate) coverage: Vec<Coverage>,
    pub(crate) ledger: Vec<LedgerLine>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Recording {
    pub(crate) tracer_version: String,
    pub(crate) host: String,
    pub(crate) target: String,
    pub(crate) engines: Vec<String>,
    /// UTC; `null` when not known.
    pub(crate) started_at: Option<String>,
    /// CLOCK_MONOTONIC.
    pub(crate) started_ns: u64,
    pub(crate) duration_ns: u64,
    pub(crate) simulated_gpu: bool,
    pub(crate) complete: bool,
    /// GPU times were mapped anew for this report (`--reclock`); the capture has others.
    pub(crate) reclocked: bool,
}

/// Where completion times come from.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GpuTimes {
    /// `injected` (CUDA events), `host-observed` (host waits), `partly injected`, or `none`.
    pub(crate) source: &'static str,
    pub(crate) steps_injected: u64,
    pub(crate) steps_host_observed: u64,
    /// Of the injected ones: what they are right within.
    pub(crate) median_bound_ns: Option<u64>,
    pub(crate) max_bound_ns: Option<u64>,
}

/// How well a device's clock is known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClockLine {
    pub(crate) tgid: u32,
    pub(crate) device_uuid: String,
    pub(crate) context: u64,
    /// A new one begins where the context or the driver's events were lost.
    pub(crate) epoch: u32,
    pub(crate) bursts: u64,
    /// Bursts that contradicted themselves.
    pub(crate) bursts_rejected: u64,
    /// Uninterrupted stretches.
    pub(crate) segments: u32,
    /// What times are right within, at the bursts.
    pub(crate) median_bound_ns: u64,
    pub(crate) p99_bound_ns: u64,
    /// Median standard deviation that the filter claims; no error.
    pub(crate) precision_ns: u64,
    /// Rate by which the device is faster than CLOCK_MONOTONIC_RAW.
    pub(crate) drift_ppm: f64,
    pub(crate) quantum_ns: u64,
    /// Launches and waits that were compared with GPU times, and those that contradict them.
    pub(crate) causality_samples: u64,
    pub(crate) causality_violations: u64,
}

/// One row of the latency table; a quantile is `null` where fewer than ten samples lie beyond it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LatencyRow {
    pub(crate) name: &'static str,
    pub(crate) origin: &'static str,
    pub(crate) n: u64,
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p90_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) p999_ns: Option<u64>,
    pub(crate) max_ns: Option<u64>,
    pub(crate) mean_ns: Option<f64>,
    /// Samples that are known to be lost, at most.
    pub(crate) lost: u64,
    /// From this quantile on, the loss could have moved them; `null`: none.
    pub(crate) doubtful_from: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    pub(crate) requests_running: u64,
    pub(crate) requests_cancelled: u64,
    pub(crate) requests_failed: u64,
    /// Requests that began before the recording.
    pub(crate) requests_unknown: u64,
    pub(crate) tokens: u64,
    pub(crate) steps: u64,
    pub(crate) iterations: u64,
    pub(crate) processes: u64,
    pub(crate) mean_batch: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct SlowToken {
    /// Key of the request in this capture.
    pub(crate) request: u64,
    /// As the client named it; `null`: its begin was not seen.
    pub(crate) request_id: Option<String>,
    pub(crate) trace_id: Option<String>,
    pub(crate) choice: u32,
    pub(crate) index: u32,
    /// `ttft` or `itl`.
    pub(crate) latency: &'static str,
    pub(crate) latency_ns: u64,
    /// Other tokens of the same step that took at least half as long.
    pub(crate) others: u64,
    /// CLOCK_MONOTONIC.
    pub(crate) delivered_ns: u64,
    /// UTC; `null` when not known.
    pub(crate) delivered_at: Option<String>,
    pub(crate) step: Option<u64>,
    pub(crate) step_begin_at: Option<String>,
    pub(crate) batch: Option<u64>,
    pub(crate) prefill: bool,
    pub(crate) step_duration_ns: Option<u64>,
    /// Of the step's GPU time: how long, and what its begin and end are right within.
    pub(crate) gpu_span_ns: Option<u64>,
    pub(crate) gpu_bound_ns: Option<u64>,
    /// The bound exceeds the span: where in the step it ran is not known.
    pub(crate) gpu_is_vague: bool,
    /// Where the latency went, ns by part; they sum to it.
    pub(crate) parts: BTreeMap<&'static str, u64>,
    pub(crate) blocked_on: Option<&'static str>,
    /// The longest part, and its share.
    pub(crate) waited_for: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct LedgerLine {
    pub(crate) name: String,
    pub(crate) count: u64,
    pub(crate) loss: bool,
    /// By process, where it was counted so.
    pub(crate) processes: Vec<(u32, u64)>,
}

impl Summary {
    /// With the `slowest` tokens of the longest latency, and why those from `slow_ns` on were slow.
    pub(crate) fn new(tables: &Tables, slowest: usize, slow_ns: Option<u64>) -> Self {
        let latencies = Latencies::of(tables);
        let gpu_times = GpuTimes::new(&tables.steps);
        let source = tables.source();
        let row = |latency| LatencyRow {
            origin: origin(latency, gpu_times.source, source),
            ..latency_row(latency, &latencies, &tables.ledger)
        };
        let slow = Slow::new(tables);
        let sockets = Sockets::new(tables);
        Self {
            schema: "tracer.report/1",
            recording: Recording::new(&tables.meta),
            hazards: Hazards::new(tables),
            why_slow: Why::all(tables, slow_ns),
            latencies: Latency::ALL.into_iter().map(row).collect(),
            gpu_times,
            clocks: tables.clocks.iter().map(ClockLine::new).collect(),
            gpus: Gpus::new(tables),
            engines: Engines::new(tables),
            layers: Some(Layers::new(tables)).filter(|layers| layers.steps_sampled > 0),
            phases: layers::phases(tables),
            counts: Counts::new(tables),
            slowest_tokens: slow.tokens(false, slowest),
            slowest_first_tokens: slow.tokens(true, slowest),
            sockets,
            coverage: coverage::of(&tables.points, &tables.ledger),
            ledger: ledger(&tables.ledger),
        }
    }

    /// Whether anything is known to be missing.
    pub(crate) fn has_loss(&self) -> bool {
        self.ledger.iter().any(|line| line.loss && line.count > 0)
    }
}

impl Recording {
    fn new(meta: &Meta) -> Self {
        Self {
            tracer_version: meta.tracer_version.clone(),
            host: meta.host.clone(),
            target: meta.target.clone(),
            engines: meta.engines.clone(),
            started_at: date_time(meta.started_realtime_ns),
            started_ns: meta.started_ns,
            duration_ns: meta.ended_ns.saturating_sub(meta.started_ns),
            simulated_gpu: meta.simulated,
            complete: meta.complete,
            reclocked: false,
        }
    }
}

impl GpuTimes {
    fn new(steps: &[Step]) -> Self {
        let mut bounds: Vec<u64> = steps.iter().filter_map(|step| Some(step.gpu?.bound_ns)).collect();
        bounds.sort_unstable();
        let injected = bounds.len() as u64;
        let observed =
            steps.iter().filter(|step| step.gpu.is_none() && step.observed_end_ns.is_some()).count() as u64;
        let source = match (injected, observed) {
            (0, 0) => "none",
            (0, _) => "host-observed",
            (_, 0) => "injected",
            _ => "partly injected",
        };
        Self {
            source,
            steps_injected: injected,
            steps_host_observed: observed,
            median_bound_ns: bounds.get(bounds.len() / 2).copied(),
            max_bound_ns: bounds.last().copied(),
        }
    }
}

impl ClockLine {
    fn new(clock: &ClockQuality) -> Self {
        let ClockQuality { series, quality } = clock;
        Self {
            tgid: series.process.tgid,
            device_uuid: hex(&series.device_uuid),
            context: series.context,
            epoch: series.epoch,
            bursts: quality.bursts,
            bursts_rejected: quality.bursts_rejected,
            segments: quality.segments,
            median_bound_ns: quality.median_bound_ns,
            p99_bound_ns: quality.p99_bound_ns,
            precision_ns: quality.precision_ns,
            drift_ppm: quality.drift_ppm,
            quantum_ns: quality.quantum_ns,
            causality_samples: quality.causality_samples,
            causality_violations: quality.causality_violations,
        }
    }
}

impl Counts {
    fn new(tables: &Tables) -> Self {
        use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR};
        let of = |condition: &dyn Fn(&Request) -> bool| {
            tables.requests.iter().filter(|request| condition(request)).count() as u64
        };
        let tokens = tables.tokens.len() as u64;
        let seconds = tables.meta.ended_ns.saturating_sub(tables.meta.started_ns) as f64 / 1e9;
        let batches = tables.iterations.len() as f64;
        let slots: f64 = tables.iterations.iter().map(|iteration| f64::from(iteration.requests)).sum();
        let unknown = tables.ledger.iter().filter(|row| row.name == Unmatched::UnknownRequest.name());
        Self {
            requests: tables.requests.len() as u64,
            requests_running: of(&|request| request.end_ns.is_none()),
            requests_cancelled: of(&|request| request.finish_reason == FINISH_CANCELLED),
            requests_failed: of(&|request| request.finish_reason == FINISH_ERROR),
            requests_unknown: unknown.map(|row| row.count).sum(),
            tokens,
            steps: tables.steps.len() as u64,
            iterations: tables.iterations.len() as u64,
            processes: processes(tables),
            mean_batch: (batches > 0.0).then(|| slots / batches),
            tokens_per_second: (seconds > 0.0).then(|| tokens as f64 / seconds),
        }
    }
}

fn processes(tables: &Tables) -> u64 {
    let steps = tables.steps.iter().map(|step| step.process);
    let requests = tables.requests.iter().map(|request| request.process);
    steps.chain(requests).collect::<BTreeSet<ProcessId>>().len() as u64
}

/// What this recording measured a latency by.
fn origin(latency: Latency, gpu_times: &str, source: Option<Source>) -> &'static str {
    match (latency, gpu_times) {
        (Latency::Step, "injected") => "enqueue → GPU end (injected)",
        (Latency::Step, "host-observed") => "enqueue → host wait returns (probes)",
        (Latency::GpuSpan, "host-observed" | "none") => "host-observed only: no GPU times",
        _ => latency.origin(source),
    }
}

fn latency_row(latency: Latency, latencies: &Latencies, ledger: &[LedgerRow]) -> LatencyRow {
    let distribution = latencies.get(latency);
    let quantile = |q| distribution.quantile(q).value();
    let n = distribution.count();
    let lost =
        ledger.iter().filter(|row| row.loss && concerns(&row.name, latency)).map(|row| row.count).sum();
    let is_doubtful = |q: &f64| lost as f64 > DOUBT * n as f64 * (1.0 - q);
    LatencyRow {
        name: latency.name(),
        origin: "",
        n,
        p50_ns: quantile(0.5),
        p90_ns: quantile(0.9),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        max_ns: distribution.max(),
        mean_ns: distribution.mean(),
        lost,
        doubtful_from: [0.5, 0.9, 0.99, 0.999, 1.0].into_iter().find(|q| lost > 0 && is_doubtful(q)),
    }
}

/// Whether a loss that the ledger names may have cost samples of this latency. What is not known may have.
fn concerns(name: &str, latency: Latency) -> bool {
    const BULK: [&str; 3] = ["bulk_dropped", "sleepers_full", "user_stack_failed"];
    let of_steps = matches!(latency, Latency::Step | Latency::GpuSpan);
    match Unmatched::ALL.into_iter().find(|kind| kind.name() == name) {
        Some(Unmatched::TokenNotDelivered) => !of_steps,
        Some(Unmatched::BatchWithoutStep) => of_steps,
        Some(Unmatched::GpuSpanWithoutStep | Unmatched::StepWithoutGpuSpan | Unmatched::GpuSpanUnaligned) => {
            latency == Latency::GpuSpan
        }
        _ if name.starts_with(GPU_TIMES_OFF) => latency == Latency::GpuSpan,
        // Bytes are no samples; the report says that the end is missing. No latency comes from NVML or the kernel log.
        _ => {
            let beside = ["torn_bytes", "nvml_", "kmsg_"];
            !BULK.contains(&name) && !beside.iter().any(|prefix| name.starts_with(prefix))
        }
    }
}

/// Finds slow tokens and what they waited for.
struct Slow<'a> {
    tokens: &'a [Token],
    steps: HashMap<u64, &'a Step>,
    /// Requests served, by step.
    batches: HashMap<u64, u64>,
    requests: HashMap<u64, &'a Request>,
    budgets: ByToken<'a>,
    wall: &'a WallClock,
}

impl<'a> Slow<'a> {
    fn new(tables: &'a Tables) -> Self {
        Self {
            tokens: &tables.tokens,
            steps: tables.steps.iter().map(|step| (step.id, step)).collect(),
            batches: tables.batches(),
            requests: tables.requests.iter().map(|request| (request.id, request)).collect(),
            budgets: ByToken::new(&tables.budgets),
            wall: &tables.wall,
        }
    }

    /// The slowest first or later tokens, one of each step; the others of a step are counted.
    fn tokens(&self, first: bool, most: usize) -> Vec<SlowToken> {
        // What made a sampled step slow is the tracer.
        let is_sampled = |token: &Token| {
            token.step.and_then(|step| self.steps.get(&step)).is_some_and(|step| step.sampled)
        };
        let those = self.tokens.iter().filter(|token| (token.index == 0) == first && !is_sampled(token));
        let mut tokens: Vec<(u64, &Token)> =
            those.filter_map(|token| Some((token.latency_ns?, token))).collect();
        tokens.sort_by_key(|(ns, token)| (std::cmp::Reverse(*ns), token.request, token.choice, token.index));
        let mut slow: Vec<SlowToken> = Vec::new();
        let mut of_step: HashMap<u64, usize> = HashMap::new();
        for (latency_ns, token) in tokens {
            let listed = token.step.and_then(|step| of_step.get(&step)).and_then(|i| slow.get_mut(*i));
            if let Some(slowest) = listed {
                slowest.others += u64::from(latency_ns >= slowest.latency_ns / 2);
            } else if slow.len() < most {
                of_step.extend(token.step.map(|step| (step, slow.len())));
                slow.push(self.describe(latency_ns, token));
            }
        }
        slow
    }

    fn describe(&self, latency_ns: u64, token: &Token) -> SlowToken {
        let step = token.step.and_then(|id| self.steps.get(&id)).copied();
        let request = self.requests.get(&token.request);
        let budget = self.budgets.of(token);
        let gpu = step.and_then(|step| step.gpu);
        let at = |ns| self.wall.realtime_ns(ns).and_then(rfc3339);
        SlowToken {
            request: token.request,
            request_id: request.map(|request| request.request_id.clone()),
            trace_id: request.and_then(|request| request.trace_id).map(|id| hex(&id)),
            choice: token.choice,
            index: token.index,
            latency: if token.index == 0 { Latency::Ttft.name() } else { Latency::Itl.name() },
            latency_ns,
            others: 0,
            delivered_ns: token.delivered_ns,
            delivered_at: at(token.delivered_ns),
            step: token.step,
            step_begin_at: step.and_then(|step| at(step.begin_ns)),
            batch: token.step.and_then(|step| self.batches.get(&step)).copied(),
            prefill: token.prefill,
            step_duration_ns: step.and_then(Step::duration_ns),
            gpu_span_ns: gpu.map(|gpu| gpu.span_ns),
            gpu_bound_ns: gpu.map(|gpu| gpu.bound_ns),
            gpu_is_vague: gpu.is_some_and(|gpu| gpu.is_vague()),
            parts: budget.map(budget::parts).unwrap_or_default(),
            blocked_on: budget.and_then(|budget| budget.blocked).map(|on| on.name()),
            waited_for: budget.map(budget::longest).unwrap_or_default(),
        }
    }
}

/// By name, losses first, each in order of its count.
fn ledger(rows: &[LedgerRow]) -> Vec<LedgerLine> {
    let mut lines: BTreeMap<&str, LedgerLine> = BTreeMap::new();
    for row in rows {
        let line = lines.entry(&row.name).or_insert_with(|| LedgerLine {
            name: row.name.clone(),
            count: 0,
            loss: false,
            processes: Vec::new(),
        });
        line.count += row.count;
        line.loss |= row.loss;
        if let Some(process) = row.process {
            line.processes.push((process.tgid, row.count));
        }
    }
    let mut lines: Vec<LedgerLine> = lines.into_values().collect();
    lines.sort_by_key(|line| (!line.loss, std::cmp::Reverse(line.count)));
    lines
}

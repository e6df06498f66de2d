//! Distributions of latencies.
//!
//! In: latencies in ns, or finished rows. Out: honest quantiles (one is given only where at least ten samples lie
//! beyond it), the exact maximum and mean, log-spaced counts for pictures, and what slow tokens have in
//! common. Pure.

mod contrast;
mod distribution;
mod shift;

pub use contrast::{Contrast, Contrasts, Frequent, Group, Grown, TooFew};
pub use distribution::{Bin, Distribution, Quantile};
pub use shift::{Change, Shift};

use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR};

use crate::timeline::rows::{Request, Source, Step, Token};
use crate::timeline::tables::Tables;

/// What a latency is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Latency {
    /// Request received → first token delivered.
    Ttft,
    /// Gap between two tokens of a choice.
    Itl,
    /// Mean gap after the first token, of a request.
    Tpot,
    /// Enqueue begins → completion.
    Step,
    /// Begin event → end event of a step on its stream.
    GpuSpan,
    /// Request received → done; not of cancelled or failed requests.
    E2e,
}

impl Latency {
    pub const ALL: [Self; 6] = [Self::Ttft, Self::Itl, Self::Tpot, Self::Step, Self::GpuSpan, Self::E2e];

    /// Name in tables, files and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Itl => "itl",
            Self::Tpot => "tpot",
            Self::Step => "step",
            Self::GpuSpan => "gpu_span",
            Self::E2e => "e2e",
        }
    }

    /// Whether a token's latency is such a one. The first token of a further choice is neither: it has no origin.
    #[must_use]
    pub const fn is_of(self, token: &Token) -> bool {
        match self {
            Self::Ttft => token.choice == 0 && token.index == 0,
            Self::Itl => token.index > 0,
            Self::Tpot | Self::Step | Self::GpuSpan | Self::E2e => false,
        }
    }

    /// From what to what it is measured, and by what.
    #[must_use]
    pub const fn origin(self, source: Option<Source>) -> &'static str {
        match (self, source) {
            (Self::Ttft, Some(Source::Mark)) => "request received → token 0 (marks)",
            (Self::Itl, Some(Source::Mark)) => "token → next token (marks)",
            (Self::Tpot, Some(Source::Mark)) => "mean gap of a request (marks)",
            (Self::E2e, Some(Source::Mark)) => "request received → done (marks)",
            (Self::Ttft, Some(Source::Socket)) => "arrived → token 0 written (sockets)",
            (Self::Itl, Some(Source::Socket)) => "token written → next one (sockets)",
            (Self::Tpot, Some(Source::Socket)) => "mean gap of a request (sockets)",
            (Self::E2e, Some(Source::Socket)) => "arrived → answer done (sockets)",
            (Self::Ttft, None) => "request → token 0 (several sources)",
            (Self::Itl, None) => "token → next token (several sources)",
            (Self::Tpot, None) => "mean gap of a request (several sources)",
            (Self::E2e, None) => "request → done (several sources)",
            (Self::Step, _) => "enqueue → GPU end, else host wait",
            (Self::GpuSpan, _) => "begin → end event (injected)",
            (Self::E2e, Some(Source::Nvtx)) => "range begins → ends (NVTX)",
            (_, Some(Source::Nvtx)) => "no tokens: NVTX tells of none",
        }
    }
}

/// One distribution of each latency.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    ttft: Distribution,
    itl: Distribution,
    tpot: Distribution,
    step: Distribution,
    gpu_span: Distribution,
    e2e: Distribution,
}

impl Latencies {
    /// Of a recording: of all but sampled steps, which took longer than they would have, and the tokens that they
    /// generated.
    #[must_use]
    pub fn of(tables: &Tables) -> Self {
        let mut latencies = Self::default();
        tables.plain_tokens().for_each(|token| latencies.add_token(token));
        tables.steps.iter().filter(|step| !step.sampled).for_each(|step| latencies.add_step(step));
        tables.requests.iter().for_each(|request| latencies.add_request(request));
        latencies
    }

    #[must_use]
    pub fn get(&self, latency: Latency) -> &Distribution {
        match latency {
            Latency::Ttft => &self.ttft,
            Latency::Itl => &self.itl,
            Latency::Tpot => &self.tpot,
            Latency::Step => &self.step,
            Latency::GpuSpan => &self.gpu_span,
            Latency::E2e => &self.e2e,
        }
    }

    pub fn add_token(&mut self, token: &Token) {
        let Some(ns) = token.latency_ns else { return };
        if Latency::Ttft.is_of(token) {
            self.ttft.record(ns);
        } else if Latency::Itl.is_of(token) {
            self.itl.record(ns);
        }
    }

    pub fn add_step(&mut self, step: &Step) {
        if let Some(ns) = step.duration_ns() {
            self.step.record(ns);
        }
        if let Some(gpu) = step.gpu {
            self.gpu_span.record(gpu.span_ns);
        }
    }

    pub fn add_request(&mut self, request: &Request) {
        if let Some(ns) = request.tpot_ns {
            self.tpot.record(ns.round() as u64);
        }
        let cut_short = matches!(request.finish_reason, FINISH_CANCELLED | FINISH_ERROR);
        let e2e = request.end_ns.and_then(|end| end.checked_sub(request.received_ns));
        if let Some(ns) = e2e.filter(|_| !cut_short) {
            self.e2e.record(ns);
        }
    }
}

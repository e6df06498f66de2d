//! A recording's derived tables in memory: where capture reading and reporting meet.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::DriverEvent;
use super::budget::Budget;
use super::rows::{Hazard, Iteration, Layer, Phase, Request, Source, Step, Token};
use crate::clock::{ClockQuality, WallClock};
use crate::event::{EngineFile, GpuProcess, GpuSample, HttpEnd, HttpWire, Point, ProcessId, Xid};

/// Everything that `report` and `request` print comes from here.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    pub meta: Meta,
    pub steps: Vec<Step>,
    pub iterations: Vec<Iteration>,
    pub requests: Vec<Request>,
    pub tokens: Vec<Token>,
    /// Of the tokens whose latency is known, in their order.
    pub budgets: Vec<Budget>,
    pub layers: Vec<Layer>,
    pub phases: Vec<Phase>,
    /// The first of each kind.
    pub hazards: Vec<Hazard>,
    pub engine_files: Vec<EngineFile>,
    pub points: Vec<Point>,
    pub http_wires: Vec<HttpWire>,
    pub http_ends: Vec<HttpEnd>,
    /// Of the devices; none where no library was injected.
    pub clocks: Vec<ClockQuality>,
    /// CLOCK_REALTIME at the times of the other tables.
    pub wall: WallClock,
    pub gpu_samples: Vec<GpuSample>,
    pub gpu_processes: Vec<GpuProcess>,
    pub xids: Vec<Xid>,
    pub driver_events: Vec<DriverEvent>,
    pub ledger: Vec<LedgerRow>,
}

impl Tables {
    /// Requests that each step served: those of its batch, where marks tell; else those that got a token of it.
    #[must_use]
    pub fn batches(&self) -> HashMap<u64, u64> {
        let mut served: HashMap<u64, BTreeSet<u64>> = HashMap::new();
        for token in &self.tokens {
            if let Some(step) = token.step {
                served.entry(step).or_default().insert(token.request);
            }
        }
        let of_step = |step: &Step| match step.slots.len() {
            0 => served.get(&step.id).map(|requests| (step.id, requests.len() as u64)),
            slots => Some((step.id, slots as u64)),
        };
        self.steps.iter().filter_map(of_step).collect()
    }

    /// Tokens that took as long as they would have anyway: not of sampled steps, whose layers were timed.
    pub fn plain_tokens(&self) -> impl Iterator<Item = &Token> {
        let sampled: HashSet<u64> =
            self.steps.iter().filter(|step| step.sampled).map(|step| step.id).collect();
        self.tokens.iter().filter(move |token| token.step.is_none_or(|step| !sampled.contains(&step)))
    }

    /// Where requests and their tokens come from; `None`: from several places.
    #[must_use]
    pub fn source(&self) -> Option<Source> {
        let mut sources = self.requests.iter().map(|request| request.source);
        let first = sources.next().unwrap_or(Source::Mark);
        sources.all(|source| source == first).then_some(first)
    }
}

/// What, when and how was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Version of the tracer that recorded.
    pub tracer_version: String,
    pub host: String,
    /// What was traced, as the user named it (`pid 4711`, `comm server`, a command line).
    pub target: String,
    /// Names of the engines whose probe points were attached, sorted.
    pub engines: Vec<String>,
    /// CLOCK_REALTIME ns since the epoch at the start of the recording; 0 when unknown.
    pub started_realtime_ns: u64,
    /// CLOCK_MONOTONIC ns of the start and the end of the recording.
    pub started_ns: u64,
    pub ended_ns: u64,
    /// A traced library was a stand-in: all GPU times are simulated.
    pub simulated: bool,
    /// The recording was finished by the recorder itself (false: recovered after a crash).
    pub complete: bool,
    /// What could not be recorded, and why.
    pub not_recorded: BTreeMap<String, String>,
}

/// One line of the ledger: what was produced, dropped, refused or left unmatched.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerRow {
    /// `None`: of the whole recording.
    pub process: Option<ProcessId>,
    /// `tracer_abi::Counter::name`, `rows::Unmatched::name`, `MarkError::name`, …
    pub name: String,
    pub count: u64,
    /// A count above zero means that something is missing from the capture.
    pub loss: bool,
}

//! Hazards: work that was not ordered as it must be, found from streams, waits and captures.
//!
//! A hazard is claimed only where nothing that is seen could have ordered the two calls: any wait in between that may
//! concern the stream does, whoever made it, and so does a poll that found work done, where polls are probed. Where GPU
//! times are known they decide, with their bound. What is not seen (locks, host functions on a stream, polls that are not
//! probed) can make a claim wrong: see `docs/hazards.md`.
//!
//! Steps are numbered when they are released. So what was found waits as a [`Case`] until its steps are.

use std::collections::{BTreeMap, HashMap};

use super::rows::{GpuTime, Hazard, HazardKind, Unmatched};
use super::step::StepKey;
use super::tables::LedgerRow;
use super::{Clock, Timeline};
use crate::event::{Call, CallEnd, Origin, ProcessId, Role, StackId};

/// Most streams that are followed, and cases whose steps are not final.
const MAX_STREAMS: usize = 4096;
const MAX_CASES: usize = 4096;
/// Most rows of each kind; all are counted.
const MAX_ROWS: u64 = 1_000;
/// A wait that held its thread for less proves nothing: it may have been interrupted (ns).
const BLOCKED_NS: u64 = 1_000_000;
/// The default streams: null, `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`. Which one null means, the program's build
/// decides; the last is another one for each thread.
const LAST_DEFAULT_STREAM: u64 = 2;

/// Name, in the ledger, of how many steps could have been told to share a stream.
pub const STEPS_CHECKED: &str = "hazards_steps_checked";
/// Name, in the ledger, of the tokens of which it could have been told that they were early.
pub const TOKENS_CHECKED: &str = "hazards_tokens_checked";

/// Whom a step serves, as far as the program says.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    /// Of its batch.
    pub(super) requests: Vec<u64>,
    /// The range of NVTX around it.
    pub(super) name: String,
}

impl Served {
    fn is_known(&self) -> bool {
        !self.requests.is_empty() || !self.name.is_empty()
    }

    /// Whether the two steps are certainly for different requests.
    fn differs(&self, other: &Self) -> bool {
        if self.requests.is_empty() && other.requests.is_empty() {
            return self.is_known() && other.is_known() && self.name != other.name;
        }
        !self.requests.is_empty()
            && !other.requests.is_empty()
            && self.requests.iter().all(|request| !other.requests.contains(request))
    }

    fn first(&self) -> Option<u64> {
        self.requests.first().copied()
    }
}

/// A step was enqueued.
#[derive(Clone, Debug)]
pub(super) struct Enqueued {
    pub(super) key: StepKey,
    pub(super) end_ns: u64,
    pub(super) stream: u64,
    pub(super) stack: Option<StackId>,
    pub(super) served: Served,
}

/// What is known of a step once it is final.
#[derive(Clone, Copy, Debug)]
pub(super) struct Final {
    pub(super) id: u64,
    /// It was timed on the GPU, so it was not captured.
    pub(super) is_timed: bool,
    pub(super) gpu: Option<GpuTime>,
}

impl Final {
    /// Before this time the step was certainly not complete.
    fn incomplete_until_ns(&self) -> Option<u64> {
        self.gpu.map(|gpu| gpu.end_ns.saturating_sub(gpu.bound_ns))
    }
}

/// A final step, as its iteration keeps it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ran {
    pub(super) step: u64,
    pub(super) process: ProcessId,
    pub(super) stream: u64,
    pub(super) tid: u32,
    pub(super) stack: Option<StackId>,
    /// Before this time it was certainly not complete; `None`: nothing tells.
    pub(super) incomplete_until_ns: Option<u64>,
}

/// A token was delivered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivered {
    pub(super) time_ns: u64,
    pub(super) request: u64,
    pub(super) tid: u32,
    pub(super) stack: Option<StackId>,
}

#[derive(Debug, Default)]
struct Stream {
    /// The last step that it was given.
    last: Option<Last>,
    capture: Option<Capture>,
}

#[derive(Debug)]
struct Last {
    step: Enqueued,
    /// When the first wait returned that may have covered it.
    synced_ns: Option<u64>,
    /// When the first wait for its very stream began.
    waited_from_ns: Option<u64>,
    done: Option<Final>,
}

/// What a stream is given in `from_ns..until_ns` goes into a graph.
#[derive(Clone, Copy, Debug)]
struct Capture {
    from_ns: u64,
    until_ns: Option<u64>,
    tid: u32,
    stack: Option<StackId>,
}

/// A hazard whose steps are not final.
#[derive(Debug)]
struct Case {
    hazard: Hazard,
    step: StepKey,
    other: Option<StepKey>,
    step_done: Option<Final>,
    other_done: Option<Final>,
    /// Of a captured step: it serves a request, as far as is known.
    serves: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Hazards {
    streams: BTreeMap<(ProcessId, u64), Stream>,
    cases: Vec<Case>,
    /// Steps that a wait proves to have run for long.
    incomplete: HashMap<StepKey, u64>,
    /// When the first wait began that was seen of a process: waits before it may not be seen.
    first_wait_ns: BTreeMap<ProcessId, u64>,
    counts: BTreeMap<(ProcessId, &'static str), u64>,
    rows: BTreeMap<HazardKind, u64>,
    found: Vec<Hazard>,
}

impl Hazards {
    /// Returns how many open things were given up to stay in bounds.
    #[must_use]
    pub(super) fn enqueued(&mut self, step: Enqueued) -> u64 {
        let (began_ns, process, tid) = step.key;
        if is_default(step.stream) {
            return 0;
        }
        let (stream, sees_waits) = (
            self.streams.entry((process, step.stream)).or_default(),
            self.first_wait_ns.get(&process).copied().unwrap_or(u64::MAX),
        );
        let captured = stream.capture.filter(|capture| {
            capture.from_ns <= began_ns && capture.until_ns.is_none_or(|until| began_ns < until)
        });
        let hazard = |kind, other_tid, other_stack| Hazard {
            kind,
            process,
            time_ns: began_ns,
            step: 0,
            other_step: None,
            request: step.served.first(),
            other_request: None,
            stream: step.stream,
            tid,
            stack: step.stack,
            other_tid,
            other_stack,
        };
        if let Some(capture) = captured {
            self.cases.push(Case {
                hazard: hazard(HazardKind::CapturedStep, capture.tid, capture.stack),
                step: step.key,
                other: None,
                step_done: None,
                other_done: None,
                serves: step.served.is_known(),
            });
            return self.stay_in_bounds();
        }
        if let Some(last) = stream.last.take() {
            if last.waited_from_ns.is_some_and(|from_ns| from_ns > began_ns) {
                // The wait was for this step, too.
                self.incomplete.remove(&last.step.key);
            }
            let is_seen = sees_waits <= last.step.key.0 && last.step.served.is_known();
            if is_seen && step.served.is_known() {
                *self.counts.entry((process, STEPS_CHECKED)).or_default() += 1;
            }
            let is_synced = last.synced_ns.is_some_and(|synced_ns| synced_ns <= began_ns);
            let (_, _, other_tid) = last.step.key;
            if is_seen && !is_synced && other_tid != tid && step.served.differs(&last.step.served) {
                self.cases.push(Case {
                    hazard: Hazard {
                        other_request: last.step.served.first(),
                        ..hazard(HazardKind::SharedStream, other_tid, last.step.stack)
                    },
                    step: step.key,
                    other: Some(last.step.key),
                    step_done: None,
                    other_done: last.done,
                    serves: true,
                });
            }
        }
        stream.last = Some(Last { step, synced_ns: None, waited_from_ns: None, done: None });
        self.stay_in_bounds()
    }

    /// A wait for a stream returned, or (`None`) for something else, which may have been any stream.
    pub(super) fn waited(&mut self, call: &Call, stream: Option<u64>) {
        let process = call.origin.process;
        self.first_wait_ns.entry(process).or_insert(call.begin_ns);
        let of = stream.filter(|stream| !is_default(*stream));
        for ((_, handle), stream) in self.streams.range_mut((process, 0)..=(process, u64::MAX)) {
            if of.is_some_and(|of| of != *handle) {
                continue;
            }
            if of.is_some() {
                // While a stream captures, nobody can wait for it.
                stream.capture = None;
            }
            let Some(last) = stream.last.as_mut().filter(|last| last.step.end_ns <= call.end_ns) else {
                continue;
            };
            if of.is_some() && last.waited_from_ns.is_none() {
                last.waited_from_ns = Some(call.begin_ns);
                let after = call.begin_ns >= last.step.end_ns;
                let blocked = call.end_ns.saturating_sub(call.begin_ns) >= BLOCKED_NS;
                if after && blocked && last.done.is_none() {
                    let until_ns = (call.end_ns - BLOCKED_NS).min(last.synced_ns.unwrap_or(u64::MAX));
                    self.incomplete.insert(last.step.key, until_ns);
                }
            }
            last.synced_ns.get_or_insert(call.end_ns);
        }
    }

    /// A poll found work done, or one stream was made to wait for another: which, is not known.
    pub(super) fn ordered(&mut self, call: &Call) {
        let process = call.origin.process;
        for (_, stream) in self.streams.range_mut((process, 0)..=(process, u64::MAX)) {
            if let Some(last) = stream.last.as_mut().filter(|last| last.step.end_ns <= call.end_ns) {
                last.synced_ns.get_or_insert(call.end_ns);
            }
        }
    }

    /// A capture of a stream began.
    #[must_use]
    pub(super) fn capture_began(&mut self, call: &Call, stream: u64) -> u64 {
        if is_default(stream) {
            return 0;
        }
        let (tid, stack) = (call.origin.tid, call.stack);
        let capture = Capture { from_ns: call.end_ns, until_ns: None, tid, stack };
        self.streams.entry((call.origin.process, stream)).or_default().capture = Some(capture);
        self.stay_in_bounds()
    }

    pub(super) fn capture_ended(&mut self, call: &Call, stream: u64) {
        if let Some(stream) = self.streams.get_mut(&(call.origin.process, stream))
            && let Some(capture) = &mut stream.capture
        {
            capture.until_ns.get_or_insert(call.begin_ns);
        }
    }

    /// A thread launched a graph: what it captured itself before was meant to be.
    pub(super) fn launched(&mut self, call: &Call) {
        let (process, tid) = (call.origin.process, call.origin.tid);
        self.cases.retain(|case| {
            let Hazard { kind, process: of, tid: enqueued, other_tid: captured, .. } = case.hazard;
            (kind, of, enqueued, captured) != (HazardKind::CapturedStep, process, tid, tid)
        });
    }

    pub(super) fn stream_ended(&mut self, process: ProcessId, stream: u64) {
        self.streams.remove(&(process, stream));
    }

    /// A context of the process ends, with all its streams, or the process itself.
    pub(super) fn context_ended(&mut self, process: ProcessId) {
        self.streams.retain(|(of, _), _| *of != process);
    }

    /// A step is final. Returns before when it was certainly not complete.
    pub(super) fn released(&mut self, key: StepKey, stream: u64, done: Final) -> Option<u64> {
        if let Some(Stream { last: Some(last), .. }) = self.streams.get_mut(&(key.1, stream))
            && last.step.key == key
        {
            last.done = Some(done);
        }
        for case in &mut self.cases {
            if case.step == key {
                case.step_done = Some(done);
            }
            if case.other == Some(key) {
                case.other_done = Some(done);
            }
        }
        let is_final =
            |case: &mut Case| case.step_done.is_some() && (case.other.is_none() || case.other_done.is_some());
        let finals: Vec<Case> = self.cases.extract_if(.., is_final).collect();
        for hazard in finals.iter().filter_map(Case::hazard) {
            self.claim(hazard);
        }
        let by_wait = self.incomplete.remove(&key);
        done.incomplete_until_ns().or(by_wait)
    }

    /// A token was delivered that the steps of one iteration generated.
    pub(super) fn delivered(&mut self, token: Delivered, steps: &[Ran], slowest: u64) {
        let Some(ran) = steps.iter().find(|ran| ran.step == slowest) else { return };
        // Output may come from any of them: it was early only if it was before all of them were complete.
        let until =
            steps.iter().map(|ran| ran.incomplete_until_ns).reduce(|one, other| Some(one?.min(other?)));
        let Some(until_ns) = until.flatten() else { return };
        *self.counts.entry((ran.process, TOKENS_CHECKED)).or_default() += 1;
        if token.time_ns < until_ns {
            self.claim(Hazard {
                kind: HazardKind::EarlyOutput,
                process: ran.process,
                time_ns: token.time_ns,
                step: ran.step,
                other_step: None,
                request: Some(token.request),
                other_request: None,
                stream: ran.stream,
                tid: token.tid,
                stack: token.stack,
                other_tid: ran.tid,
                other_stack: ran.stack,
            });
        }
    }

    fn claim(&mut self, hazard: Hazard) {
        *self.counts.entry((hazard.process, hazard.kind.counter())).or_default() += 1;
        let rows = self.rows.entry(hazard.kind).or_default();
        if *rows < MAX_ROWS {
            *rows += 1;
            self.found.push(hazard);
        }
    }

    /// The hazards that became certain since the last call.
    pub(super) fn take(&mut self) -> Vec<Hazard> {
        std::mem::take(&mut self.found)
    }

    pub(super) fn ledger(&self) -> impl Iterator<Item = LedgerRow> {
        self.counts.iter().map(|(&(process, name), &count)| LedgerRow {
            process: Some(process),
            name: name.to_owned(),
            count,
            loss: false,
        })
    }

    fn stay_in_bounds(&mut self) -> u64 {
        let mut given_up = 0;
        while self.streams.len() > MAX_STREAMS {
            self.streams.pop_first();
            given_up += 1;
        }
        let cases = self.cases.len().saturating_sub(MAX_CASES);
        self.cases.drain(..cases);
        given_up + cases as u64
    }
}

impl Case {
    /// What it comes to, now that its steps are final.
    fn hazard(&self) -> Option<Hazard> {
        let step = self.step_done?;
        let Hazard { kind, tid, other_tid, time_ns, .. } = self.hazard;
        let is_one = match kind {
            // Where the first step was complete by then, something may have told so.
            HazardKind::SharedStream => {
                self.other_done?.incomplete_until_ns().is_none_or(|until_ns| time_ns < until_ns)
            }
            // A thread that captures a step for nobody warms up.
            HazardKind::CapturedStep => !step.is_timed && (tid != other_tid || self.serves),
            HazardKind::EarlyOutput => false,
        };
        let other_step = self.other_done.map(|done| done.id);
        is_one.then_some(Hazard { step: step.id, other_step, ..self.hazard })
    }
}

impl<C: Clock> Timeline<C> {
    /// A call that orders streams, or decides what a step on one means.
    pub(super) fn stream_call(&mut self, call: &Call, role: Role, stream_arg: Option<u8>) {
        if call.end != CallEnd::Returned {
            return;
        }
        let process = call.origin.process;
        let given_up = match (role, argument(call, stream_arg)) {
            // Whatever it says, the capture is over.
            (Role::CaptureEnd, Some(stream)) => {
                self.hazards.capture_ended(call, stream);
                0
            }
            _ if !succeeded(call) => 0,
            (Role::CaptureBegin, Some(stream)) => self.hazards.capture_began(call, stream),
            (Role::StreamEnd, Some(stream)) => {
                self.hazards.stream_ended(process, stream);
                0
            }
            (Role::ContextEnd, _) => {
                self.hazards.context_ended(process);
                0
            }
            (Role::GraphLaunch, _) => {
                self.hazards.launched(call);
                0
            }
            (Role::Sync, _) => {
                self.hazards.ordered(call);
                0
            }
            _ => 0,
        };
        self.given_up(call.origin, given_up);
    }

    pub(super) fn given_up(&mut self, origin: Origin, count: u64) {
        self.counts.add(Unmatched::Evicted, origin, count, || "streams and hazards".to_owned());
    }
}

/// An argument of a call.
pub(super) fn argument(call: &Call, index: Option<u8>) -> Option<u64> {
    index.and_then(|index| call.args.get(usize::from(index))).copied()
}

/// CUDA's functions return 0 when they did what they say.
pub(super) fn succeeded(call: &Call) -> bool {
    call.ret.cast_signed() as i32 == 0
}

fn is_default(stream: u64) -> bool {
    stream <= LAST_DEFAULT_STREAM
}

#[cfg(test)]
mod tests;

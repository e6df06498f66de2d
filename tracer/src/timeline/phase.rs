//! Phases: named parts of what a program does, from phase marks and from NVTX; and requests that only NVTX names.
//!
//! A range called `request:ID` is a request, the ranges inside it on its thread are its phases, and steps that begin
//! inside it are its steps. Where a process makes marks, or marks or a socket tell of a request of the same name, the
//! range makes no request of its own.

use std::collections::{BTreeMap, BTreeSet};

use super::rows::{Phase, Request, Source, Unmatched};
use super::{Clock, Timeline};
use crate::event::mark::{self, Nvtx, NvtxAction};
use crate::event::{Origin, ProcessId};

/// What a range that names a request begins with.
const REQUEST: &str = "request:";
/// Ranges that a thread is in; deeper ones are not kept.
const MAX_DEPTH: usize = 64;
/// Ranges of a process that have started and not ended; phases of a process that have begun and not ended.
const MAX_STARTED: usize = 4096;

/// A range that is open.
#[derive(Clone, Debug)]
pub(super) struct OpenRange {
    origin: Origin,
    name: String,
    domain: String,
    /// Handle of a domain whose name is not known.
    handle: u64,
    payload: String,
}

impl OpenRange {
    fn new(origin: Origin, nvtx: Nvtx) -> Self {
        Self { origin, name: nvtx.name, domain: nvtx.domain, handle: nvtx.range, payload: nvtx.payload }
    }

    /// The request that it names.
    fn request_id(&self) -> Option<&str> {
        request_id(&self.name, &self.payload)
    }
}

/// The request that a range of this name and payload is: `request:ID`, or `request` with a number.
pub(crate) fn request_id<'a>(name: &'a str, payload: &'a str) -> Option<&'a str> {
    let id = match name.strip_prefix(REQUEST) {
        Some(id) => id.trim(),
        None if name == "request" => payload,
        None => return None,
    };
    Some(id).filter(|id| !id.is_empty())
}

/// The ranges that a thread is in, outermost first.
#[derive(Default)]
pub(super) struct Ranges {
    open: Vec<OpenRange>,
    /// Those that are deeper than are kept.
    deeper: usize,
    /// Began without a number, which is still to come.
    starting: Option<OpenRange>,
}

impl Ranges {
    /// The request that the thread works for, and the innermost range that names none.
    pub(super) fn current(&self) -> (Option<&str>, Option<&str>) {
        let request = self.open.iter().rev().find_map(OpenRange::request_id);
        let phase = self.open.iter().rev().find(|range| range.request_id().is_none());
        (request, phase.map(|range| range.name.as_str()))
    }

    fn is_empty(&self) -> bool {
        self.open.is_empty() && self.starting.is_none()
    }
}

/// A request that NVTX names, until it is known whether others tell of it, too.
struct Named {
    origin: Origin,
    request_id: String,
    end_ns: Option<u64>,
}

/// Ranges and phases that are open, and requests that NVTX names.
#[derive(Default)]
pub(super) struct Phases {
    /// By process and number.
    started: BTreeMap<(ProcessId, u64), OpenRange>,
    /// By process, request and name.
    marked: BTreeMap<(ProcessId, u64, String), (Origin, u64)>,
    named: BTreeMap<(u64, u64), Named>,
    next_named: u64,
    /// Processes whose marks name requests.
    marking: BTreeSet<ProcessId>,
}

impl Phases {
    pub(super) fn marks_requests(&mut self, process: ProcessId) {
        self.marking.insert(process);
    }
}

impl<C: Clock> Timeline<C> {
    pub(super) fn phase(&mut self, origin: Origin, mark: mark::Phase) {
        let request = self.request_of(origin, mark.request);
        let key = (origin.process, request, mark.name);
        if mark.begins {
            if self.phases.marked.len() >= MAX_STARTED {
                self.counts.add(Unmatched::Evicted, origin, 1, || "open phase".to_owned());
                return;
            }
            self.phases.marked.insert(key, (origin, request));
        } else if let Some((begin, request)) = self.phases.marked.remove(&key) {
            self.out.phases.push(phase_row(begin, request, key.2, Some(origin.time_ns)));
        }
    }

    pub(super) fn nvtx(&mut self, origin: Origin, nvtx: Nvtx) {
        let program = self.programs.entry(origin.process).or_default();
        let ranges = &mut program.thread(origin.tid).ranges;
        match nvtx.action {
            NvtxAction::Push if ranges.open.len() < MAX_DEPTH => {
                ranges.open.push(OpenRange::new(origin, nvtx));
            }
            NvtxAction::Push => {
                ranges.deeper += 1;
                self.counts.add(Unmatched::Evicted, origin, 1, || format!("nested range {}", nvtx.name));
            }
            NvtxAction::Pop if ranges.deeper > 0 => ranges.deeper -= 1,
            NvtxAction::Pop => {
                // One that began before the recording has nothing to end.
                if let Some(at) = ranges
                    .open
                    .iter()
                    .rposition(|range| (&range.domain, range.handle) == (&nvtx.domain, nvtx.range))
                {
                    let range = ranges.open.remove(at);
                    let request = range.request_id().or(ranges.current().0).map(str::to_owned);
                    self.close_range(range, request, Some(origin));
                }
            }
            NvtxAction::Start if nvtx.range == 0 => {
                ranges.starting = Some(OpenRange::new(origin, nvtx));
            }
            NvtxAction::Started => {
                if let Some(range) = ranges.starting.take() {
                    self.start_range(nvtx.range, range);
                }
            }
            NvtxAction::Start => self.start_range(nvtx.range, OpenRange::new(origin, nvtx)),
            NvtxAction::End => {
                if let Some(range) = self.phases.started.remove(&(origin.process, nvtx.range)) {
                    let request = range.request_id().map(str::to_owned);
                    self.close_range(range, request, Some(origin));
                }
            }
            NvtxAction::Mark => {
                let request = ranges.current().0.map(str::to_owned);
                let mut row = range_row(OpenRange::new(origin, nvtx), request, Some(origin.time_ns));
                row.is_mark = true;
                self.out.phases.push(row);
            }
        }
    }

    fn start_range(&mut self, number: u64, range: OpenRange) {
        let origin = range.origin;
        if self.phases.started.len() >= MAX_STARTED {
            self.phases.started.pop_first();
            self.counts.add(Unmatched::Evicted, origin, 1, || "started range".to_owned());
        }
        self.phases.started.insert((origin.process, number), range);
    }

    /// A range ends, or the recording does before it.
    fn close_range(&mut self, range: OpenRange, request: Option<String>, end: Option<Origin>) {
        let end_ns = end.map(|end| end.time_ns);
        if let Some(request_id) = range.request_id() {
            let request_id = request_id.to_owned();
            // Later than an exchange of the same name becomes final.
            let patience = self.config.hold_ns + self.config.order_ns + self.config.linger_ns;
            let due_ns = end_ns.map_or(u64::MAX, |end_ns| end_ns.saturating_add(patience));
            let named = Named { origin: range.origin, request_id, end_ns };
            self.phases.named.insert((due_ns, self.phases.next_named), named);
            self.phases.next_named += 1;
        } else {
            self.out.phases.push(range_row(range, request, end_ns));
        }
        while self.phases.named.len() > self.config.max_open {
            let Some((_, named)) = self.phases.named.pop_first() else { break };
            self.counts.add(Unmatched::Evicted, named.origin, 1, || "request of a range".to_owned());
        }
    }

    /// A thread has ended: so have its ranges, without being told.
    pub(super) fn close_ranges(&mut self, mut ranges: Ranges) {
        while let Some(range) = ranges.open.pop() {
            let request = range.request_id().or(ranges.current().0).map(str::to_owned);
            self.close_range(range, request, None);
        }
    }

    /// The recording is over.
    pub(super) fn close_all_phases(&mut self) {
        let threads = self.programs.values_mut().flat_map(|program| program.threads.values_mut());
        let open: Vec<Ranges> = threads
            .map(|thread| std::mem::take(&mut thread.ranges))
            .filter(|ranges| !ranges.is_empty())
            .collect();
        open.into_iter().for_each(|ranges| self.close_ranges(ranges));
        for (_, range) in std::mem::take(&mut self.phases.started) {
            let request = range.request_id().map(str::to_owned);
            self.close_range(range, request, None);
        }
        for ((_, _, name), (begin, request)) in std::mem::take(&mut self.phases.marked) {
            self.out.phases.push(phase_row(begin, request, name, None));
        }
    }

    /// Requests that nothing but NVTX told of, and that are due.
    pub(super) fn release_named(&mut self, now_ns: u64) {
        while let Some((&key, _)) =
            self.phases.named.first_key_value().filter(|((due_ns, _), _)| *due_ns <= now_ns)
        {
            let Some(Named { origin, request_id, end_ns }) = self.phases.named.remove(&key) else { return };
            if self.phases.marking.contains(&origin.process) || self.exchanges.is_named(&request_id) {
                continue;
            }
            let id = self.requests.next_id();
            self.out.requests.push(Request {
                id,
                process: origin.process,
                program_request: key.1,
                request_id,
                trace_id: None,
                span_id: None,
                tenant_id: String::new(),
                model: String::new(),
                model_version: String::new(),
                engine_hash: String::new(),
                adapters: String::new(),
                kv_cache_strategy: String::new(),
                prompt_tokens: None,
                received_ns: origin.time_ns,
                arrived_ns: None,
                read_ns: None,
                source: Source::Nvtx,
                end_ns,
                finish_reason: tracer_abi::mark::FINISH_UNKNOWN,
                declared_tokens: None,
                tokens: 0,
                ttft_ns: None,
                tpot_ns: None,
            });
        }
    }
}

fn range_row(range: OpenRange, request: Option<String>, end_ns: Option<u64>) -> Phase {
    Phase {
        process: range.origin.process,
        tid: range.origin.tid,
        source: Source::Nvtx,
        request: None,
        request_id: request.unwrap_or_default(),
        name: range.name,
        domain: range.domain,
        payload: range.payload,
        is_mark: false,
        begin_ns: range.origin.time_ns,
        end_ns,
    }
}

fn phase_row(begin: Origin, request: u64, name: String, end_ns: Option<u64>) -> Phase {
    Phase {
        process: begin.process,
        tid: begin.tid,
        source: Source::Mark,
        request: Some(request),
        request_id: String::new(),
        name,
        domain: String::new(),
        payload: String::new(),
        is_mark: false,
        begin_ns: begin.time_ns,
        end_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::{Phase, Request, Source};
    use super::super::testing::{EnqueueClock, PROCESS, RANK_TID, STEP, begin, call, mark, points};
    use super::super::{Config, Timeline};
    use super::*;
    use crate::event::Mark;
    use crate::event::{Event, HttpBegin, HttpEnd, HttpFinish, HttpSend};

    fn nvtx(tid: u32, time_ns: u64, action: NvtxAction, range: u64, name: &str) -> Event {
        let (name, none) = (name.to_owned(), String::new);
        mark(tid, time_ns, Mark::Nvtx(Nvtx { action, range, name, domain: none(), payload: none() }))
    }

    fn push(tid: u32, time_ns: u64, name: &str) -> Event {
        nvtx(tid, time_ns, NvtxAction::Push, 0, name)
    }

    fn pop(tid: u32, time_ns: u64) -> Event {
        nvtx(tid, time_ns, NvtxAction::Pop, 0, "")
    }

    fn rows(events: &[Event]) -> super::super::Output {
        let mut timeline = Timeline::new(Config::default(), EnqueueClock);
        points().iter().chain(events).for_each(|event| timeline.feed(event));
        timeline.finish();
        timeline.drain()
    }

    fn spans(phases: &[Phase]) -> Vec<(&str, &str, u64, Option<u64>)> {
        let mut spans: Vec<_> =
            phases.iter().map(|p| (p.name.as_str(), p.request_id.as_str(), p.begin_ns, p.end_ns)).collect();
        spans.sort_unstable_by_key(|span| span.2);
        spans
    }

    #[test]
    fn a_range_that_names_a_request_is_one_with_its_phases_and_steps() {
        let events = [
            push(RANK_TID, 100, "request:a"),
            push(RANK_TID, 110, "prefill"),
            call(STEP, RANK_TID, 120, 130, [0, 7]),
            pop(RANK_TID, 140),
            call(STEP, RANK_TID, 150, 160, [0, 7]),
            pop(RANK_TID, 170),
            call(STEP, RANK_TID, 180, 190, [0, 7]),
            push(RANK_TID, 200, "never ends"),
        ];
        let out = rows(&events);
        let requests: Vec<(&str, u64, Option<u64>, Source)> =
            out.requests.iter().map(|r| (r.request_id.as_str(), r.received_ns, r.end_ns, r.source)).collect();
        assert_eq!(requests, [("a", 100, Some(170), Source::Nvtx)]);
        assert_eq!(spans(&out.phases), [("prefill", "a", 110, Some(140)), ("never ends", "", 200, None)]);
        let steps: Vec<(&str, &str)> =
            out.steps.iter().map(|step| (step.nvtx_request.as_str(), step.nvtx_range.as_str())).collect();
        assert_eq!(steps, [("a", "prefill"), ("a", ""), ("", "")]);
    }

    #[test]
    fn ranges_of_other_threads_and_lost_ends_do_no_harm() {
        let events = [
            pop(RANK_TID, 90),
            push(RANK_TID, 100, "one"),
            push(RANK_TID + 1, 105, "two"),
            pop(RANK_TID, 110),
            pop(RANK_TID, 115),
            nvtx(RANK_TID, 120, NvtxAction::End, 77, ""),
            nvtx(RANK_TID, 130, NvtxAction::Start, 5, "crosses threads"),
            nvtx(RANK_TID + 1, 140, NvtxAction::End, 5, ""),
            // As the probe of a shared library sees it: the number comes with the return.
            nvtx(RANK_TID, 150, NvtxAction::Start, 0, "numbered later"),
            nvtx(RANK_TID, 151, NvtxAction::Started, 9, ""),
            nvtx(RANK_TID, 160, NvtxAction::End, 9, ""),
        ];
        assert_eq!(
            spans(&rows(&events).phases),
            [
                ("one", "", 100, Some(110)),
                ("two", "", 105, None),
                ("crosses threads", "", 130, Some(140)),
                ("numbered later", "", 150, Some(160)),
            ]
        );
    }

    #[test]
    fn marks_and_sockets_tell_more_of_a_request_than_its_range() {
        // A program that makes marks: its ranges are phases at most.
        let marked = [begin(RANK_TID, 50, 1), push(RANK_TID, 100, "request:other"), pop(RANK_TID, 200)];
        let ids = |requests: &[Request]| -> Vec<(String, Source)> {
            requests.iter().map(|request| (request.request_id.clone(), request.source)).collect()
        };
        assert_eq!(ids(&rows(&marked).requests), [("req-1".to_owned(), Source::Mark)]);
        // A socket that told of the same name knows its tokens.
        let origin = super::super::testing::origin;
        let exchange = HttpBegin {
            origin: origin(RANK_TID, 60),
            exchange: 3,
            connection: 1,
            local_port: 80,
            method: "POST".into(),
            path: "/".into(),
            request_id: "same".into(),
            trace_id: None,
            span_id: None,
            arrived_ns: None,
            read_ns: 60,
            head_cut: false,
        };
        let send = HttpSend {
            origin: origin(RANK_TID, 150),
            exchange: 3,
            choice: 0,
            first_token: 0,
            tokens: 1,
            events: 1,
            bytes: 9,
            held_bytes: 0,
        };
        let end = HttpEnd {
            origin: origin(RANK_TID, 210),
            exchange: 3,
            status: 200,
            finish: HttpFinish::Done,
            streamed: true,
            encoded: false,
            events: 1,
            tokens: 1,
            refused_writes: 0,
        };
        let both = [
            Event::HttpBegin(exchange),
            push(RANK_TID, 100, "request:same"),
            Event::HttpSend(send),
            pop(RANK_TID, 200),
            Event::HttpEnd(end),
            push(RANK_TID, 220, "request:only here"),
            pop(RANK_TID, 230),
        ];
        let mut found = ids(&rows(&both).requests);
        found.sort();
        assert_eq!(found, [("only here".to_owned(), Source::Nvtx), ("same".to_owned(), Source::Socket)]);
    }

    #[test]
    fn a_phase_mark_is_a_phase_of_its_request() {
        let said = |time_ns, begins| {
            mark(RANK_TID, time_ns, Mark::Phase(mark::Phase { request: 1, begins, name: "tokenise".into() }))
        };
        let out = rows(&[begin(RANK_TID, 50, 1), said(60, true), said(75, false), said(80, true)]);
        let tokenise: Vec<_> =
            out.phases.iter().map(|p| (p.request, p.source, p.begin_ns, p.end_ns)).collect();
        let of = Some(out.requests[0].id);
        assert_eq!(tokenise, [(of, Source::Mark, 60, Some(75)), (of, Source::Mark, 80, None)]);
        assert_eq!(out.phases[0].process, PROCESS);
    }

    #[test]
    fn names_of_requests() {
        assert_eq!(request_id("request:abc", ""), Some("abc"));
        assert_eq!(request_id("request: abc ", "7"), Some("abc"));
        assert_eq!(request_id("request", "42"), Some("42"));
        for (name, payload) in [("request", ""), ("request:", "7"), ("requests", "7"), ("prefill", "7")] {
            assert_eq!(request_id(name, payload), None, "{name}");
        }
    }

    proptest::proptest! {
        /// Whatever a program pushes and pops: every range ends once, and never before it began.
        #[test]
        fn every_range_is_one_phase(actions in proptest::collection::vec((0u32..3, proptest::prelude::any::<bool>()), 0..120)) {
            let mut events = Vec::new();
            let mut time_ns = 100;
            for (tid, pushes) in &actions {
                time_ns += 1;
                events.push(if *pushes { push(*tid, time_ns, "r") } else { pop(*tid, time_ns) });
            }
            let out = rows(&events);
            let pushed = actions.iter().filter(|(_, pushes)| *pushes).count();
            // Those nested too deeply are counted, not kept.
            proptest::prop_assert!(out.phases.len() <= pushed && out.phases.len() >= pushed.min(MAX_DEPTH));
            for phase in &out.phases {
                proptest::prop_assert!(phase.end_ns.is_none_or(|end| end > phase.begin_ns));
            }
        }
    }
}

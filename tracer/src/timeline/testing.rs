//! A synthetic server whose history is known: events as the probes would have seen them, and what must come out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tracer_abi::mark::{DECODE, FINISH_CANCELLED, FINISH_LENGTH, MAX_SLOTS, PREFILL, Slot};

use super::Clock;
use super::rows::GpuTime;
use crate::event::mark::{Batch, GpuSpan, InjectState, RequestBegin, RequestEnd, Token};
use crate::event::{Call, CallEnd, Event, Mark, MarkEvent, Origin, Point, ProcessId, Role};

pub(crate) const PROCESS: ProcessId = ProcessId { tgid: 10, start_ticks: 77 };
pub(crate) const STEP: u32 = 1;
pub(crate) const WAIT: u32 = 2;
pub(crate) const OTHER: u32 = 3;
pub(crate) const RANK_TID: u32 = 100;
pub(crate) const HTTP_TID: u32 = 200;

/// Small, fast, seeded: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Maps a span to `begin_ms` ns after the end of its enqueue: exact, no device needed.
#[derive(Default)]
pub(crate) struct EnqueueClock;

impl Clock for EnqueueClock {
    fn map(&mut self, _process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        let begin_ns = span.enqueue_end_ns + span.begin_ms as u64;
        let span_ns = span.span_ms as u64;
        Some(GpuTime { begin_ns, end_ns: begin_ns + span_ns, span_ns, bound_ns: 1 })
    }
}

pub(crate) fn point(id: u32, role: Role, stream_arg: Option<u8>) -> Event {
    Event::Point(Point {
        id,
        time_ns: 1,
        process: PROCESS,
        engine: "test".into(),
        name: format!("point{id}"),
        role,
        library: String::new(),
        version: String::new(),
        build_id: Vec::new(),
        offset: 0,
        placement: "nop5".into(),
        has_return: true,
        stream_arg,
        simulated: true,
    })
}

pub(crate) fn points() -> Vec<Event> {
    vec![point(STEP, Role::Step, Some(1)), point(WAIT, Role::Wait, Some(0)), point(OTHER, Role::Other, None)]
}

pub(crate) fn origin(tid: u32, time_ns: u64) -> Origin {
    Origin { time_ns, process: PROCESS, tid, cpu: 0 }
}

pub(crate) fn mark(tid: u32, time_ns: u64, mark: Mark) -> Event {
    Event::Mark(MarkEvent { origin: origin(tid, time_ns), mark })
}

pub(crate) fn call(point: u32, tid: u32, begin_ns: u64, end_ns: u64, args: [u64; 2]) -> Event {
    Event::Call(Call {
        origin: origin(tid, end_ns),
        point,
        parent_point: None,
        depth: 0,
        begin_ns,
        end_ns,
        end: CallEnd::Returned,
        sp: 0,
        args: [args[0], args[1], 0, 0, 0, 0],
        ret: 1,
        stack: None,
    })
}

pub(crate) fn begin(tid: u32, time_ns: u64, request: u64) -> Event {
    let request_id = format!("req-{request}");
    mark(
        tid,
        time_ns,
        Mark::RequestBegin(Box::new(RequestBegin { request, request_id, ..RequestBegin::default() })),
    )
}

pub(crate) fn end(tid: u32, time_ns: u64, request: u64, output_tokens: u32, finish_reason: u32) -> Event {
    mark(tid, time_ns, Mark::RequestEnd(RequestEnd { request, output_tokens, finish_reason }))
}

pub(crate) fn token(tid: u32, time_ns: u64, request: u64, index: u32) -> Event {
    mark(tid, time_ns, Mark::Token(Token { request, choice: 0, index, stack: None }))
}

pub(crate) fn slot(request: u64, generation_step: u32) -> Slot {
    let (phase, tokens) = if generation_step == 0 { (PREFILL, 16) } else { (DECODE, 1) };
    Slot { request, sample_offset: 0, generation_step, tokens, choice: 0, phase, flags: 0 }
}

pub(crate) fn batch(tid: u32, time_ns: u64, batch_id: u64, slots: &[Slot]) -> Event {
    let slot_count = slots.len() as u32;
    mark(
        tid,
        time_ns,
        Mark::Batch(Batch { batch_id, rank: 0, slot_count, first_slot: 0, slots: slots.to_vec() }),
    )
}

pub(crate) fn injected(time_ns: u64) -> Event {
    let state = InjectState {
        active: true,
        reason: String::new(),
        steps: 0,
        timed: 0,
        skipped_capturing: 0,
        skipped_pool: 0,
        skipped_error: 0,
        abandoned: 0,
    };
    mark(HTTP_TID, time_ns, Mark::InjectState(state))
}

pub(crate) fn span(tid: u32, time_ns: u64, enqueue: (u64, u64), span_ns: u32) -> Event {
    let span = GpuSpan {
        device_uuid: *b"SIMGPU0000000000",
        context: 1,
        stream: 7,
        sequence: 0,
        enqueue_begin_ns: enqueue.0,
        enqueue_end_ns: enqueue.1,
        tid,
        epoch: 0,
        base: 0,
        begin_ms: 3.0,
        span_ms: span_ns as f32,
        sampled: false,
    };
    mark(HTTP_TID, time_ns, Mark::GpuSpan(span))
}

/// What the server is asked to do.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) max_batch: usize,
    /// Output tokens of each request, and whether its client leaves one token before the end.
    pub(crate) requests: Vec<(u32, bool)>,
    /// Percent of the tokens and of the batches whose marks are withheld.
    pub(crate) withheld_tokens: u64,
    pub(crate) withheld_batches: u64,
    pub(crate) spans: bool,
    /// Stretches the time between events, which is 1 to 3 µs at 1.
    pub(crate) scale: u64,
}

/// A token that was generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrueToken {
    pub(crate) delivered_ns: u64,
    pub(crate) batch_id: u64,
    pub(crate) marked: bool,
    /// The batch mark of its iteration was made.
    pub(crate) batch_marked: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TrueStep {
    pub(crate) batch_id: u64,
    pub(crate) tid: u32,
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) observed_end_ns: u64,
    pub(crate) gpu_end_ns: u64,
    pub(crate) marked: bool,
}

/// Events in order of time, and what they mean.
#[derive(Default)]
pub(crate) struct History {
    pub(crate) events: Vec<Event>,
    /// By (request id, index).
    pub(crate) tokens: BTreeMap<(String, u32), TrueToken>,
    pub(crate) steps: Vec<TrueStep>,
    /// Received, end and delivered tokens by request id.
    pub(crate) requests: BTreeMap<String, (u64, u64, u32)>,
}

struct Running {
    id: String,
    number: u64,
    generated: u32,
    planned: u32,
    leaves: bool,
    received_ns: u64,
}

struct Server<'a> {
    plan: &'a Plan,
    random: Random,
    now: u64,
    batch_id: u64,
    history: History,
    /// Numbers that requests may have; given back when they end.
    free: BTreeSet<u64>,
    /// Made when the iteration after this one ends, as a harvest by polling would.
    spans: Vec<Event>,
}

/// Runs the server over its plan.
pub(crate) fn run(plan: &Plan) -> History {
    let mut server = Server {
        plan,
        random: Random(plan.seed),
        now: 1_000_000,
        batch_id: 0,
        history: History { events: points(), ..History::default() },
        free: (1..=plan.requests.len() as u64 + 1).collect(),
        spans: Vec::new(),
    };
    if plan.spans {
        server.history.events.push(injected(10));
    }
    let mut waiting: VecDeque<(usize, (u32, bool))> = plan.requests.iter().copied().enumerate().collect();
    let mut running: Vec<Running> = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        while running.len() < plan.max_batch
            && (running.is_empty() || server.random.below(plan.max_batch as u64 + 2) > 0)
        {
            let Some((i, (planned, leaves))) = waiting.pop_front() else { break };
            running.push(server.receive(i, planned, leaves));
        }
        server.iterate(&mut running);
    }
    let spans = std::mem::take(&mut server.spans);
    server.history.events.extend(spans);
    server.history.events.sort_by_key(Event::time_ns);
    server.history
}

impl Server<'_> {
    fn tick(&mut self) -> u64 {
        self.now += (1_000 + self.random.below(2_000)) * self.plan.scale;
        self.now
    }

    fn receive(&mut self, i: usize, planned: u32, leaves: bool) -> Running {
        let number = self.free.pop_first().unwrap();
        let (received_ns, marked_ns) = (self.tick(), self.tick());
        let id = format!("req-{i}");
        let begin = RequestBegin {
            request: number,
            received_ns: Some(received_ns),
            request_id: id.clone(),
            ..RequestBegin::default()
        };
        self.history.events.push(mark(HTTP_TID + i as u32, marked_ns, Mark::RequestBegin(begin.into())));
        Running { id, number, generated: 0, planned, leaves, received_ns }
    }

    fn iterate(&mut self, running: &mut Vec<Running>) {
        self.batch_id += 1;
        let marked = self.random.below(100) >= self.plan.withheld_batches;
        let slots: Vec<Slot> = running.iter().map(|r| slot(r.number, r.generated)).collect();
        let spans = std::mem::take(&mut self.spans);
        let ends: Vec<u64> = (0..self.plan.ranks).map(|rank| self.rank(rank, &slots, marked)).collect();
        self.now = ends.into_iter().max().unwrap();
        self.history.events.extend(spans);
        self.deliver(running, marked);
    }

    /// One rank's step. Returns when its thread saw it end. All ranks begin at the same time.
    fn rank(&mut self, rank: u32, slots: &[Slot], marked: bool) -> u64 {
        let start = self.now;
        let tid = RANK_TID + rank;
        for (i, part) in slots.chunks(MAX_SLOTS).enumerate() {
            let time_ns = self.tick();
            let part = Batch {
                batch_id: self.batch_id,
                rank,
                slot_count: slots.len() as u32,
                first_slot: (i * MAX_SLOTS) as u32,
                slots: part.to_vec(),
            };
            if marked {
                self.history.events.push(mark(tid, time_ns, Mark::Batch(part)));
            }
        }
        let enqueue = (self.tick(), 0);
        let (begin_ns, end_ns) = (self.tick(), self.tick());
        let enqueue = (enqueue.0, self.tick());
        self.history.events.push(call(STEP, tid, begin_ns, end_ns, [0, 7]));
        let wait_ns = self.tick();
        let span_ns = 10_000 + self.random.below(50_000) as u32;
        let gpu_end_ns = enqueue.1 + 3 + u64::from(span_ns);
        self.now = self.now.max(gpu_end_ns);
        let observed_end_ns = self.tick();
        self.history.events.push(call(WAIT, tid, wait_ns, observed_end_ns, [7, 0]));
        if self.plan.spans {
            let mut event = span(tid, observed_end_ns + 7 + u64::from(rank), enqueue, span_ns);
            if let Event::Mark(mark) = &mut event {
                mark.origin.tid = tid;
            }
            self.spans.push(event);
        }
        let batch_id = self.batch_id;
        self.history.steps.push(TrueStep {
            batch_id,
            tid,
            begin_ns,
            end_ns,
            observed_end_ns,
            gpu_end_ns,
            marked,
        });
        std::mem::replace(&mut self.now, start)
    }

    fn deliver(&mut self, running: &mut Vec<Running>, batch_marked: bool) {
        for r in running.iter_mut() {
            let index = r.generated;
            r.generated += 1;
            // The client left: the token is generated and never written.
            if r.leaves && r.generated == r.planned {
                continue;
            }
            let delivered_ns = self.tick();
            let marked = self.random.below(100) >= self.plan.withheld_tokens;
            let truth = TrueToken { delivered_ns, batch_id: self.batch_id, marked, batch_marked };
            self.history.tokens.insert((r.id.clone(), index), truth);
            if marked {
                self.history.events.push(token(HTTP_TID, delivered_ns, r.number, index));
            }
        }
        let ended: Vec<Running> = running.extract_if(.., |r| r.generated == r.planned).collect();
        for r in ended {
            let time_ns = self.tick();
            let reason = if r.leaves { FINISH_CANCELLED } else { FINISH_LENGTH };
            self.history.events.push(end(HTTP_TID, time_ns, r.number, r.planned, reason));
            let delivered = r.planned - u32::from(r.leaves);
            self.history.requests.insert(r.id, (r.received_ns, time_ns, delivered));
            self.free.insert(r.number);
        }
    }
}

//! Events → finished steps, iterations, requests and tokens.
//!
//! In: [`Event`]s, at most slightly out of order (`Config::slack_ns`), live or from a capture. Out: rows
//! ([`rows`]) as they become final, and a count of everything that could not be joined. Every decision is a function
//! of event times alone: two interleavings of the same events give the same rows in the same order. Open state is
//! bounded; what is dropped to stay in bounds is counted. This folder does no I/O and reads no clock.
//!
//! How things are joined:
//! - a **batch** mark belongs to the next step that begins after it on its thread;
//! - a **GPU span** belongs to the step whose enqueue lies within the span's host interval;
//! - a **wait** that returns after an enqueue, by the same thread and for the same stream, is the host-observed end;
//! - an **iteration** is the steps of one process with one batch id;
//! - **layers** belong to the step of their GPU span; an **engine file** to the steps of a process that opened no other;
//! - **ranges** of NVTX are phases, those called `request:ID` requests; see [`phase`];
//! - a **hazard** is two calls that were not ordered as they must be (see [`hazard`]);
//! - a **fact** told by an attr mark is the request's where its key is one of [`REQUEST_KEYS`];
//! - an **HTTP exchange** is a request where no marks tell of it (see [`exchange`], and [`join`] for its tokens' steps),
//!   else it adds to what they tell (see [`pair`]);
//! - a **token** belongs to the iteration whose batch has the slot (request, choice, generation step = index).

pub mod budget;
mod counts;
pub mod coverage;
mod driver;
mod engine;
mod exchange;
pub mod hazard;
mod iteration;
mod join;
mod layer;
mod order;
pub mod pair;
mod phase;
mod request;
pub mod rows;
pub mod shares;
mod step;
pub mod tables;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod wakes;

use std::collections::{BTreeMap, HashMap};

use tracer_abi::mark::REQUEST_KEYS;

use crate::event::mark::GpuSpan;
use crate::event::{Event, Mark, Origin, Point, ProcessAction, ProcessId, Role};
use counts::Counts;
pub use counts::{Example, GPU_TIMES_OFF};
use driver::DriverEvents;
pub use driver::{DriverEvent, driver_error};
use engine::{Engines, Tensors};
use exchange::Exchanges;
use hazard::Hazards;
use iteration::{IterationKey, OpenIteration};
use order::{Input, Order};
use phase::Phases;
pub(crate) use phase::request_id;
use request::Requests;
use rows::{GpuTime, Hazard, HazardKind, Iteration, Layer, Phase, Request, Step, Token, Unmatched};
use step::{OpenStep, Program, StepKey};
use tables::LedgerRow;

/// Something that the host saw of a span on a GPU; CLOCK_MONOTONIC ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// When the call that launched the span began: the span begins later.
    LaunchBegan(u64),
    /// When a wait that covers the span returned: the span ends earlier.
    WaitReturned(u64),
}

/// Where the timeline learns when a GPU span was.
pub trait Clock {
    /// Learns from an event; a clock that was fitted beforehand has nothing to learn.
    fn observe(&mut self, _event: &Event) {}

    /// The span on CLOCK_MONOTONIC, with its bound; `None` when it cannot be mapped.
    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime>;

    /// Learns what the host saw of a span: a map of clocks must agree with it.
    fn witness(&mut self, _process: ProcessId, _span: &GpuSpan, _witness: Witness) {}
}

/// A clock that maps nothing: all times are host-observed.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoClock;

impl Clock for NoClock {
    fn map(&mut self, _process: ProcessId, _span: &GpuSpan) -> Option<GpuTime> {
        None
    }
}

/// Windows and bounds of a [`Timeline`]; all times in ns of event time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Events may come this much later than newer ones and still be taken in order.
    pub slack_ns: u64,
    /// A step is released this long after it began at the earliest, so that steps are numbered in order of their
    /// begin; only an enqueue longer than this gets a later number.
    pub order_ns: u64,
    /// Longest wait for a step's GPU span, host wait, and the other ranks of its iteration.
    pub hold_ns: u64,
    /// How long a request that ended stays open for marks that come after its end.
    pub linger_ns: u64,
    /// Most open steps, iterations, requests, and events held for ordering (each).
    pub max_open: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slack_ns: 100_000_000,
            order_ns: 250_000_000,
            hold_ns: 5_000_000_000,
            linger_ns: 1_000_000_000,
            max_open: 1 << 16,
        }
    }
}

/// Rows that became final since the last drain. Steps are in order of their id; tokens and requests in the order in
/// which they became final.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    pub steps: Vec<Step>,
    pub iterations: Vec<Iteration>,
    pub requests: Vec<Request>,
    pub tokens: Vec<Token>,
    /// In order of their step.
    pub layers: Vec<Layer>,
    pub phases: Vec<Phase>,
    /// The first of each kind; the ledger has how many there are.
    pub hazards: Vec<Hazard>,
}

/// What the timeline needs to know of a probe point.
#[derive(Clone, Debug)]
struct PointInfo {
    role: Role,
    stream_arg: Option<u8>,
    version: String,
}

/// Joins events into rows; see the module.
pub struct Timeline<C = NoClock> {
    config: Config,
    clock: C,
    order: Order,
    /// Time of the event in hand; everything due before it has been released.
    now_ns: u64,
    /// Time of the earliest event.
    first_ns: u64,
    /// The recording is over: nothing else will come.
    finishing: bool,
    points: HashMap<u32, PointInfo>,
    has_waits: bool,
    programs: BTreeMap<ProcessId, Program>,
    steps: BTreeMap<StepKey, OpenStep>,
    next_step: u64,
    iterations: BTreeMap<IterationKey, OpenIteration>,
    next_iteration_key: u64,
    next_iteration: u64,
    requests: Requests,
    exchanges: Exchanges,
    driver: DriverEvents,
    phases: Phases,
    engines: Engines,
    tensors: Tensors,
    hazards: Hazards,
    counts: Counts,
    out: Output,
}

impl<C: Clock> Timeline<C> {
    /// An empty timeline.
    #[must_use]
    pub fn new(config: Config, clock: C) -> Self {
        Self {
            config,
            clock,
            order: Order::new(config.slack_ns, config.max_open),
            now_ns: 0,
            first_ns: u64::MAX,
            finishing: false,
            points: HashMap::new(),
            has_waits: false,
            programs: BTreeMap::new(),
            steps: BTreeMap::new(),
            next_step: 0,
            iterations: BTreeMap::new(),
            next_iteration_key: 0,
            next_iteration: 0,
            requests: Requests::default(),
            exchanges: Exchanges::default(),
            driver: DriverEvents::default(),
            phases: Phases::default(),
            engines: Engines::default(),
            tensors: Tensors::default(),
            hazards: Hazards::default(),
            counts: Counts::default(),
            out: Output::default(),
        }
    }

    /// Takes one event in. Events of kinds that the timeline does not join only move its time on.
    pub fn feed(&mut self, event: &Event) {
        self.first_ns = self.first_ns.min(event.time_ns());
        self.clock.observe(event);
        if let Event::Call(call) = event {
            self.driver.call(call);
        }
        match event {
            Event::Point(point) => self.point(point),
            Event::Call(call) if self.wants(call.point) => self.order.push(Input::Call(*call)),
            Event::EngineFile(file) => self.engines.opened(file),
            Event::Mark(mark) if concerns_requests_or_steps(&mark.mark) => {
                self.order.push(Input::Mark(mark.clone()));
            }
            Event::Sched(sched) if sched.wake_ns.is_some() && sched.waker_tid != 0 => {
                self.order.push(Input::Wake(*sched));
            }
            Event::HttpBegin(begin) => self.order.push(Input::HttpBegin(begin.clone())),
            Event::HttpSend(send) => self.order.push(Input::HttpSend(*send)),
            Event::HttpWire(wire) => self.order.push(Input::HttpWire(*wire)),
            Event::HttpEnd(end) => self.order.push(Input::HttpEnd(*end)),
            Event::Process(process)
                if process.action == ProcessAction::Exit
                    && process.origin.tid == process.origin.process.tgid =>
            {
                self.order.push(Input::Exit(process.origin));
            }
            _ => {}
        }
        self.order.advance(event.time_ns());
        while let Some(input) = self.order.pop() {
            self.process(input);
        }
        self.release_until(self.order.released_ns());
    }

    /// The recording is over: everything open becomes final, in the state that it is in.
    pub fn finish(&mut self) {
        self.order.close();
        while let Some(input) = self.order.pop() {
            self.process(input);
        }
        self.finishing = true;
        self.forget_all_pending();
        self.close_all_phases();
        self.release_until(u64::MAX);
        let running: Vec<u64> = self.requests.open_ids().collect();
        for id in running {
            self.close_request(id);
        }
        let running: Vec<u64> = self.exchanges.open_ids().collect();
        for id in running {
            self.close_exchange(id);
        }
        self.release_named(u64::MAX);
    }

    /// The rows that became final since the last call.
    #[must_use]
    pub fn drain(&mut self) -> Output {
        Output { hazards: self.hazards.take(), ..std::mem::take(&mut self.out) }
    }

    /// How many things of a kind could not be joined so far, over all processes.
    #[must_use]
    pub fn unmatched(&self, kind: Unmatched) -> u64 {
        self.counts.total(kind)
    }

    /// What could not be joined, and hazards, per process and kind.
    #[must_use]
    pub fn ledger(&self) -> Vec<LedgerRow> {
        self.counts.ledger().into_iter().chain(self.hazards.ledger()).collect()
    }

    /// The first few cases of each kind of unmatched thing.
    #[must_use]
    pub fn examples(&self) -> &[Example] {
        self.counts.examples()
    }

    /// What the CUDA driver answered that matters, so far.
    #[must_use]
    pub fn driver_events(&self) -> Vec<DriverEvent> {
        self.driver.rows()
    }

    /// The clock, with what it learned.
    pub fn clock(&mut self) -> &mut C {
        &mut self.clock
    }

    fn point(&mut self, point: &Point) {
        self.has_waits |= point.role == Role::Wait;
        self.driver.point(point);
        let info =
            PointInfo { role: point.role, stream_arg: point.stream_arg, version: point.version.clone() };
        self.points.insert(point.id, info);
    }

    /// Whether calls of the point are joined. A point that is not yet defined may turn out to be a step.
    fn wants(&self, point: u32) -> bool {
        self.points.get(&point).is_none_or(|info| {
            matches!(
                info.role,
                Role::Step
                    | Role::Wait
                    | Role::GraphLaunch
                    | Role::Sync
                    | Role::CaptureBegin
                    | Role::CaptureEnd
                    | Role::StreamEnd
                    | Role::ContextEnd
            )
        })
    }

    fn process(&mut self, input: Input) {
        self.release_until(input.time_ns());
        match input {
            Input::Call(call) => {
                match self.points.get(&call.point).map(|info| (info.role, info.stream_arg)) {
                    Some((Role::Step, stream_arg)) => {
                        self.exchanges.wakes.step(&call);
                        self.step_call(&call, stream_arg);
                    }
                    Some((Role::Wait, stream_arg)) => self.wait_call(&call, stream_arg),
                    Some((role, stream_arg)) => self.stream_call(&call, role, stream_arg),
                    None => {}
                }
            }
            Input::Mark(event) => self.mark(event.origin, event.mark),
            Input::Wake(sched) => self.exchanges.wakes.woken(&sched),
            Input::HttpBegin(begin) => self.http_begin(begin),
            Input::HttpSend(send) => self.http_send(send),
            Input::HttpWire(wire) => self.http_wire(wire),
            Input::HttpEnd(end) => self.http_end(end),
            Input::Exit(origin) => {
                self.forget_thread(origin.process, origin.tid);
                if origin.tid == origin.process.tgid {
                    self.exchanges.wakes.forget(origin.process);
                    self.hazards.context_ended(origin.process);
                    let due = origin.time_ns.saturating_add(self.config.linger_ns);
                    self.requests.process_exited(origin.process, due);
                }
            }
        }
        self.stay_in_bounds();
    }

    fn mark(&mut self, origin: Origin, mark: Mark) {
        match mark {
            Mark::RequestBegin(begin) => self.request_begin(origin, *begin),
            Mark::RequestEnd(end) => self.request_end(origin, end),
            Mark::Token(token) => self.token(origin, token),
            Mark::Batch(batch) => self.batch(origin, batch),
            Mark::GpuSpan(span) => self.gpu_span(origin, span),
            Mark::GpuLayers(layers) => self.gpu_layers(origin, layers),
            Mark::InjectState(state) => self.inject_state(origin, &state),
            Mark::Attr(attr) => self.attr(origin, attr),
            Mark::Phase(phase) => self.phase(origin, phase),
            Mark::Nvtx(nvtx) => self.nvtx(origin, nvtx),
            Mark::Shape(shape) => self.tensors.shape(origin.process, shape),
            Mark::DataType(data_type) => self.tensors.data_type(origin.process, data_type),
            Mark::Made(made) => self.tensors.made(origin.process, made),
            Mark::ClockBurst(_) | Mark::NvtxState(_) => {}
        }
    }

    /// Releases everything that is due at `now_ns`. Each kind leaves in an order that does not depend on how often
    /// this is called: steps by begin, iterations by creation, requests by deadline.
    fn release_until(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        self.release_steps();
        self.close_iterations();
        while let Some(id) = self.requests.due(self.now_ns) {
            self.close_request(id);
        }
        self.release_waiting();
        while let Some(id) = self.exchanges.due(self.now_ns) {
            self.close_exchange(id);
        }
        if !self.finishing {
            self.release_named(self.now_ns);
        }
    }

    /// Drops the oldest open things beyond the bound.
    fn stay_in_bounds(&mut self) {
        while self.steps.len() > self.config.max_open {
            self.evict_step();
        }
        while self.iterations.len() > self.config.max_open {
            self.evict_iteration();
        }
        while self.requests.len() > self.config.max_open {
            self.evict_request();
        }
        while self.exchanges.len() > self.config.max_open {
            self.evict_exchange();
        }
    }
}

/// Whether the timeline tells of a line of the ledger, so that deriving anew replaces it.
#[must_use]
pub fn is_own_line(name: &str) -> bool {
    Unmatched::ALL.iter().any(|kind| kind.name() == name)
        || HazardKind::ALL.iter().any(|kind| kind.counter() == name)
        || [hazard::STEPS_CHECKED, hazard::TOKENS_CHECKED].contains(&name)
        || name.starts_with(GPU_TIMES_OFF)
}

/// Marks that the timeline joins; of the facts about requests only those that are columns of theirs.
fn concerns_requests_or_steps(mark: &Mark) -> bool {
    match mark {
        Mark::ClockBurst(_) | Mark::NvtxState(_) => false,
        Mark::Attr(attr) => REQUEST_KEYS.contains(&attr.key.as_str()),
        _ => true,
    }
}

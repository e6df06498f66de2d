//! Requests and their tokens.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR};

use super::iteration::{IterationKey, Waiting};
use super::pair::Names;
use super::rows::{Join, Request, Source, Token, Unmatched};
use super::{Clock, Timeline};
use crate::event::mark;
use crate::event::{Origin, ProcessId};

/// Most generated tokens of one choice that wait for their delivery.
const MAX_GENERATED: usize = 1 << 16;
/// Most separate runs of delivered tokens of one choice.
const MAX_RUNS: usize = 1 << 12;
/// Most choices of one request.
const MAX_CHOICES: usize = 1 << 12;

/// Which iteration generated a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Open(IterationKey),
    /// Row ids of the iteration and of its step that ended last.
    Closed {
        iteration: u64,
        step: u64,
    },
    /// Its batch had no step; `is_old`: because the recording of steps had not begun.
    Nowhere {
        is_old: bool,
    },
}

/// A token that a batch's slot says is generated.
#[derive(Clone, Copy)]
pub(super) struct Generated {
    pub(super) place: Place,
    pub(super) prefill: bool,
}

/// A run of delivered tokens without a gap.
#[derive(Clone, Copy)]
struct Run {
    last: u32,
    last_ns: u64,
}

/// One choice of a request.
#[derive(Default)]
struct Choice {
    /// Generated and not delivered.
    generated: BTreeMap<u32, Generated>,
    /// Delivered, by first index of the run.
    delivered: BTreeMap<u32, Run>,
    delivered_count: u64,
    /// Lowest index seen in a slot or a delivery.
    first: Option<u32>,
    /// Lowest index of a slot.
    first_slot: Option<u32>,
    /// One past the highest index of a slot, of a delivery.
    generated_until: u64,
    delivered_until: u64,
    /// Index and time of the first delivery.
    first_delivery: Option<(u32, u64)>,
}

impl Choice {
    fn run_of(&self, index: u32) -> Option<(u32, Run)> {
        let (&first, &run) = self.delivered.range(..=index).next_back()?;
        (run.last >= index).then_some((first, run))
    }

    /// False when the oldest was dropped to make room.
    fn generated(&mut self, index: u32, generated: Generated) -> bool {
        self.first = Some(self.first.map_or(index, |first| first.min(index)));
        self.first_slot = Some(self.first_slot.map_or(index, |first| first.min(index)));
        self.generated_until = self.generated_until.max(u64::from(index) + 1);
        if self.run_of(index).is_none() {
            self.generated.insert(index, generated);
        }
        let is_full = self.generated.len() > MAX_GENERATED;
        if is_full {
            self.generated.pop_first();
        }
        !is_full
    }

    /// Time of the token before this one; `Err` when this one was delivered before.
    fn deliver(&mut self, index: u32, time_ns: u64) -> Result<Option<u64>, ()> {
        if self.run_of(index).is_some() {
            return Err(());
        }
        self.first = Some(self.first.map_or(index, |first| first.min(index)));
        self.delivered_until = self.delivered_until.max(u64::from(index) + 1);
        self.delivered_count += 1;
        self.first_delivery.get_or_insert((index, time_ns));
        let before = index.checked_sub(1).and_then(|before| self.run_of(before));
        let after = index.checked_add(1).and_then(|after| self.delivered.remove(&after));
        let run = after.unwrap_or(Run { last: index, last_ns: time_ns });
        self.delivered.insert(before.map_or(index, |(first, _)| first), run);
        if self.delivered.len() > MAX_RUNS {
            self.delivered.pop_first();
        }
        Ok(before.map(|(_, run)| run.last_ns))
    }

    /// Mean gap between the first and the last delivered token, in ns per index.
    fn tpot_ns(&self) -> Option<f64> {
        let (first, first_ns) = self.first_delivery?;
        let run = self.delivered.last_key_value()?.1;
        let gaps = run.last.checked_sub(first).filter(|&gaps| gaps > 0)?;
        Some(run.last_ns.checked_sub(first_ns)? as f64 / f64::from(gaps))
    }
}

/// A request that may still get marks.
struct OpenRequest {
    /// Of the mark by which it became known.
    origin: Origin,
    number: u64,
    /// Begin mark and time of receipt; `None`: not seen.
    begin: Option<(mark::RequestBegin, u64)>,
    end: Option<(u64, mark::RequestEnd)>,
    choices: BTreeMap<u32, Choice>,
    ttft_ns: Option<u64>,
    /// Of its bytes: when they reached the socket, and were read.
    arrived_ns: Option<u64>,
    read_ns: Option<u64>,
    /// When it closes, once it has ended.
    due_ns: Option<u64>,
}

impl OpenRequest {
    fn new(origin: Origin, number: u64, begin: Option<(mark::RequestBegin, u64)>) -> Self {
        Self {
            origin,
            number,
            begin,
            end: None,
            choices: BTreeMap::new(),
            ttft_ns: None,
            arrived_ns: None,
            read_ns: None,
            due_ns: None,
        }
    }

    fn delivered(&self) -> u64 {
        self.choices.values().map(|choice| choice.delivered_count).sum()
    }

    /// Tokens that were generated but whose delivery was not seen: see [`Unmatched::TokenNotDelivered`].
    fn not_delivered(&self) -> u64 {
        let cut_short = |reason| matches!(reason, FINISH_CANCELLED | FINISH_ERROR);
        let ended = self.end.map(|(_, end)| end).filter(|end| !cut_short(end.finish_reason));
        let declared = match (ended, &self.begin) {
            (Some(end), Some(_)) => u64::from(end.output_tokens),
            _ => 0,
        };
        let known = |choice: &Choice| {
            let first = if self.begin.is_some() { 0 } else { u64::from(choice.first.unwrap_or(0)) };
            let by_slots = ended.is_some() && declared == 0;
            let until = choice.delivered_until.max(if by_slots { choice.generated_until } else { 0 });
            until.saturating_sub(first)
        };
        let known: u64 = self.choices.values().map(known).sum();
        known.max(declared).saturating_sub(self.delivered())
    }
}

/// Open requests: by id, in order of their appearance.
#[derive(Default)]
pub(super) struct Requests {
    open: BTreeMap<u64, OpenRequest>,
    /// Who has the program's number now.
    numbers: HashMap<(ProcessId, u64), u64>,
    closing: BTreeSet<(u64, u64)>,
    next: u64,
}

impl Requests {
    /// A number for another request.
    pub(super) fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn open_ids(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }

    fn insert(&mut self, process: ProcessId, request: OpenRequest) -> u64 {
        let id = self.next_id();
        self.numbers.insert((process, request.number), id);
        self.open.insert(id, request);
        id
    }

    fn remove(&mut self, id: u64) -> Option<OpenRequest> {
        let request = self.open.remove(&id)?;
        let number = (request.origin.process, request.number);
        if self.numbers.get(&number) == Some(&id) {
            self.numbers.remove(&number);
        }
        if let Some(due_ns) = request.due_ns {
            self.closing.remove(&(due_ns, id));
        }
        Some(request)
    }

    fn close_at(&mut self, id: u64, due_ns: u64) {
        if let Some(request) = self.open.get_mut(&id).filter(|request| request.due_ns.is_none()) {
            request.due_ns = Some(due_ns);
            self.closing.insert((due_ns, id));
        }
    }

    /// The next request that is due to close.
    pub(super) fn due(&self, now_ns: u64) -> Option<u64> {
        self.closing.first().filter(|(due_ns, _)| *due_ns <= now_ns).map(|(_, id)| *id)
    }

    /// The process is gone: its requests will get no more marks.
    pub(super) fn process_exited(&mut self, process: ProcessId, due_ns: u64) {
        let of_process = self.open.iter().filter(|(_, request)| request.origin.process == process);
        let ids: Vec<u64> = of_process.map(|(id, _)| *id).collect();
        for id in ids {
            self.close_at(id, due_ns);
        }
    }

    /// A slot says that this token is generated; false when something was dropped to stay in bounds. Requests that
    /// have closed since are left alone.
    pub(super) fn generated(&mut self, request: u64, choice: u32, index: u32, generated: Generated) -> bool {
        let Some(request) = self.open.get_mut(&request) else { return true };
        let has_room = request.choices.len() < MAX_CHOICES || request.choices.contains_key(&choice);
        has_room && request.choices.entry(choice).or_default().generated(index, generated)
    }

    /// An iteration is final: tokens that it generated and that are delivered later are its own, or nobody's.
    pub(super) fn iteration_closed(
        &mut self,
        key: IterationKey,
        (request, choice, index): (u64, u32, u32),
        place: Place,
    ) {
        let choice = self.open.get_mut(&request).and_then(|request| request.choices.get_mut(&choice));
        let generated = choice.and_then(|choice| choice.generated.get_mut(&index));
        if let Some(generated) = generated.filter(|generated| generated.place == Place::Open(key)) {
            generated.place = place;
        }
    }
}

impl<C: Clock> Timeline<C> {
    /// The request that has this number in the process; a new one, counted, when its begin was not seen.
    pub(super) fn request_of(&mut self, origin: Origin, number: u64) -> u64 {
        if let Some(&id) = self.requests.numbers.get(&(origin.process, number)) {
            return id;
        }
        self.counts.add(Unmatched::UnknownRequest, origin, 1, || format!("request {number}"));
        self.requests.insert(origin.process, OpenRequest::new(origin, number, None))
    }

    pub(super) fn request_begin(&mut self, origin: Origin, begin: mark::RequestBegin) {
        let number = begin.request;
        self.exchanges.told(&begin.request_id);
        self.phases.marks_requests(origin.process);
        if let Some(&before) = self.requests.numbers.get(&(origin.process, number)) {
            self.close_request(before);
        }
        // A receipt after the mark that tells of it is on another clock.
        let received_ns = begin.received_ns.filter(|&ns| ns <= origin.time_ns).unwrap_or(origin.time_ns);
        let names = Names::new(&begin.request_id, begin.trace_id);
        let request = OpenRequest::new(origin, number, Some((begin, received_ns)));
        let id = self.requests.insert(origin.process, request);
        let exchange = self.exchanges.pair(origin.process, &names, id);
        if let Some((exchange, request)) = exchange.zip(self.requests.open.get_mut(&id)) {
            (request.arrived_ns, request.read_ns) = (exchange.arrived_ns, Some(exchange.read_ns));
        }
    }

    /// A fact of a request that its begin could not tell yet.
    pub(super) fn attr(&mut self, origin: Origin, attr: mark::Attr) {
        let id = self.requests.numbers.get(&(origin.process, attr.request));
        let open = id.and_then(|id| self.requests.open.get_mut(id));
        if let Some((begin, _)) = open.and_then(|request| request.begin.as_mut()) {
            begin.learn(attr);
        }
    }

    pub(super) fn request_end(&mut self, origin: Origin, end: mark::RequestEnd) {
        let id = self.request_of(origin, end.request);
        if let Some(request) = self.requests.open.get_mut(&id) {
            request.end.get_or_insert((origin.time_ns, end));
        }
        self.requests.close_at(id, origin.time_ns.saturating_add(self.config.linger_ns));
    }

    pub(super) fn token(&mut self, origin: Origin, mark: mark::Token) {
        self.exchanges.pairs.marks(origin.process);
        let id = self.request_of(origin, mark.request);
        let mark::Token { choice, index, stack, .. } = mark;
        let Some(request) = self.requests.open.get_mut(&id) else { return };
        let name = || format!("request {} choice {choice} token {index}", mark.request);
        if request.choices.len() >= MAX_CHOICES && !request.choices.contains_key(&choice) {
            self.counts.add(Unmatched::Evicted, origin, 1, name);
            return;
        }
        let tokens = request.choices.entry(choice).or_default();
        let Ok(before_ns) = tokens.deliver(index, origin.time_ns) else {
            self.counts.add(Unmatched::TokenRepeated, origin, 1, name);
            return;
        };
        let generated = tokens.generated.remove(&index);
        let precedes_slots = tokens.first_slot.is_none_or(|first| index < first);
        let is_old = (request.begin.is_none() && precedes_slots)
            || self
                .programs
                .get(&origin.process)
                .is_none_or(|program| program.is_before_steps(origin.time_ns));
        let since_ns = if index == 0 { request.begin.as_ref().map(|(_, ns)| *ns) } else { before_ns };
        let latency_ns = since_ns.and_then(|since| origin.time_ns.checked_sub(since));
        if (choice, index) == (0, 0) {
            request.ttft_ns = latency_ns;
        }
        let mut token = Token {
            request: id,
            choice,
            index,
            process: origin.process,
            tid: origin.tid,
            delivered_ns: origin.time_ns,
            written_ns: None,
            wire_ns: None,
            latency_ns,
            source: Source::Mark,
            iteration: None,
            step: None,
            join: Join::None,
            prefill: generated.is_some_and(|generated| generated.prefill),
        };
        match generated.map(|generated| generated.place) {
            Some(Place::Open(key)) => match self.iterations.get_mut(&key) {
                Some(iteration) => iteration.push_token(Waiting { origin, token, stack }),
                None => self.token_without_step(origin, token, is_old),
            },
            Some(Place::Closed { iteration, step }) => {
                (token.iteration, token.step, token.join) = (Some(iteration), Some(step), Join::Mark);
                self.marked_token(origin, token);
            }
            Some(Place::Nowhere { is_old }) => self.token_without_step(origin, token, is_old),
            None => self.token_without_step(origin, token, is_old),
        }
    }

    /// `is_old`: its step was there before the recording of steps began.
    pub(super) fn token_without_step(&mut self, origin: Origin, token: Token, is_old: bool) {
        let Token { request, choice, index, .. } = token;
        let kind = if is_old { Unmatched::BeforeFirstStep } else { Unmatched::TokenWithoutStep };
        self.counts.add(kind, origin, 1, || format!("request {request} choice {choice} token {index}"));
        self.marked_token(origin, Token { prefill: false, ..token });
    }

    pub(super) fn evict_request(&mut self) {
        let Some((&id, request)) = self.requests.open.first_key_value() else { return };
        self.counts.add(Unmatched::Evicted, request.origin, 1, || format!("open request {}", request.number));
        self.close_request(id);
    }

    /// The request is final: counts what was not delivered, and yields its row if its begin was seen.
    pub(super) fn close_request(&mut self, id: u64) {
        let Some(request) = self.requests.remove(id) else { return };
        let number = request.number;
        self.counts.add(Unmatched::TokenNotDelivered, request.origin, request.not_delivered(), || {
            format!("tokens of request {number}")
        });
        let delivered = request.delivered();
        let Some((begin, received_ns)) = request.begin else { return };
        let end = request.end;
        self.out.requests.push(Request {
            id,
            process: request.origin.process,
            program_request: number,
            request_id: begin.request_id,
            trace_id: begin.trace_id,
            span_id: begin.span_id,
            tenant_id: begin.tenant_id,
            model: begin.model,
            model_version: begin.model_version,
            engine_hash: begin.engine_hash,
            adapters: begin.adapters,
            kv_cache_strategy: begin.kv_cache_strategy,
            prompt_tokens: begin.prompt_tokens,
            received_ns,
            arrived_ns: request.arrived_ns,
            read_ns: request.read_ns,
            source: Source::Mark,
            end_ns: end.map(|(end_ns, _)| end_ns),
            finish_reason: end.map_or(tracer_abi::mark::FINISH_UNKNOWN, |(_, end)| end.finish_reason),
            declared_tokens: end.map(|(_, end)| end.output_tokens),
            tokens: u32::try_from(delivered).unwrap_or(u32::MAX),
            ttft_ns: request.ttft_ns,
            tpot_ns: request.choices.get(&0).and_then(Choice::tpot_ns),
        });
    }
}

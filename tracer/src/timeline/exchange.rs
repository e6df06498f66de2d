//! HTTP exchanges → requests and tokens, for programs that make no marks.
//!
//! Which step generated a token is told by counting: a request gets one token a step, so its token k is of step s₀+k,
//! where s₀ = min over k of (number of the latest step that had ended before token k was handed to the kernel) − k.
//! Delivery is never early, so the minimum is right as soon as any one token was prompt. Where that cannot be (the step
//! would lie before the request, as when a step yields several tokens), the latest ended step is taken, and says so.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::pair::{Marked, Pairs, TokenKey};
use super::rows::{Join, Request, Source, Step, Token, Unmatched};
use super::{Clock, Timeline};
use crate::event::{HttpBegin, HttpEnd, HttpFinish, HttpSend, HttpWire, Origin, ProcessId};

/// Most steps that are remembered to join tokens to.
const MAX_STEPS: usize = 1 << 16;
/// Most tokens of one exchange.
const MAX_TOKENS: usize = 1 << 20;
/// From this status on a response is an error (RFC 9110, section 15).
const FIRST_ERROR: u16 = 400;

#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) begin: HttpBegin,
    /// By the first token in each.
    pub(super) sends: BTreeMap<TokenKey, HttpSend>,
    pub(super) tokens: usize,
    /// Of sends that were held: when they were made → when their bytes were on the wire.
    pub(super) wires: HashMap<u64, u64>,
    pub(super) end: Option<HttpEnd>,
    /// The request that marks tell of, where they do.
    pub(super) marked: Option<(u64, Marked)>,
    /// When it closes, once it has ended.
    due_ns: u64,
}

/// A step that ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    ended_ns: u64,
    begin_ns: u64,
    step: u64,
    iteration: Option<u64>,
}

/// Open exchanges, and the steps that their tokens may be of.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    pub(super) open: BTreeMap<u64, Exchange>,
    pub(super) pairs: Pairs,
    closing: BTreeSet<(u64, u64)>,
    /// Per process, in order of their begin.
    steps: BTreeMap<ProcessId, VecDeque<Ended>>,
}

impl Exchanges {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn step(&mut self, step: &Step) {
        let Some(ended_ns) = step.completion_ns() else { return };
        let steps = self.steps.entry(step.process).or_default();
        if steps.len() == MAX_STEPS {
            steps.pop_front();
        }
        let ended = Ended { ended_ns, begin_ns: step.begin_ns, step: step.id, iteration: step.iteration };
        steps.push_back(ended);
    }

    pub(super) fn due(&self, now_ns: u64) -> Option<u64> {
        self.closing.first().filter(|(due_ns, _)| *due_ns <= now_ns).map(|(_, id)| *id)
    }

    pub(super) fn open_ids(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }

    /// The process whose steps serve a request: its own, or (where it has none) the one with most of them.
    fn steps_for(&self, process: ProcessId) -> Option<&VecDeque<Ended>> {
        self.steps.get(&process).or_else(|| self.steps.values().max_by_key(|steps| steps.len()))
    }
}

impl<C: Clock> Timeline<C> {
    pub(super) fn http_begin(&mut self, begin: HttpBegin) {
        let exchange = Exchange {
            sends: BTreeMap::new(),
            tokens: 0,
            wires: HashMap::new(),
            end: None,
            marked: None,
            due_ns: 0,
            begin,
        };
        self.exchanges.pairs.opened(&exchange.begin);
        self.exchanges.open.insert(exchange.begin.exchange, exchange);
    }

    pub(super) fn http_send(&mut self, send: HttpSend) {
        let Some(exchange) = self.exchanges.open.get_mut(&send.exchange) else { return };
        exchange.tokens = exchange.tokens.saturating_add(send.tokens as usize);
        if exchange.tokens > MAX_TOKENS {
            self.counts
                .add(Unmatched::Evicted, send.origin, send.tokens.into(), || "tokens of an exchange".into());
            return;
        }
        let first = (send.choice, send.first_token);
        exchange.sends.insert(first, send);
        self.release_departed(
            send.exchange,
            first..(send.choice, send.first_token.saturating_add(send.tokens)),
        );
    }

    pub(super) fn http_wire(&mut self, wire: HttpWire) {
        if let Some(exchange) = self.exchanges.open.get_mut(&wire.exchange) {
            exchange.wires.insert(wire.sent_ns, wire.origin.time_ns);
            self.release_departed(wire.exchange, ..);
        }
    }

    pub(super) fn http_end(&mut self, end: HttpEnd) {
        let Some(exchange) = self.exchanges.open.get_mut(&end.exchange) else { return };
        exchange.end = Some(end);
        // Until the steps before its end are final.
        let due_ns =
            end.origin.time_ns.saturating_add(self.config.hold_ns).saturating_add(self.config.order_ns);
        exchange.due_ns = due_ns;
        self.exchanges.closing.insert((due_ns, end.exchange));
    }

    pub(super) fn evict_exchange(&mut self) {
        let Some((&id, exchange)) = self.exchanges.open.first_key_value() else { return };
        self.counts.add(Unmatched::Evicted, exchange.begin.origin, 1, || format!("open exchange {id}"));
        self.close_exchange(id);
    }

    /// The exchange is final: yields its rows, unless marks tell of it or it is no request for tokens.
    pub(super) fn close_exchange(&mut self, id: u64) {
        let is_marked = self.settle(id);
        let Some(exchange) = self.exchanges.open.remove(&id) else { return };
        let Exchange { begin, sends, tokens, wires, end, due_ns, .. } = exchange;
        self.exchanges.closing.remove(&(due_ns, id));
        if is_marked || (tokens == 0 && begin.method != "POST") {
            return;
        }
        let request = self.requests.next_id();
        let received_ns = begin.arrived_ns.unwrap_or(begin.read_ns).min(begin.read_ns);
        let mut rows = self.tokens_of(request, received_ns, begin.origin, &sends);
        rows.iter_mut().for_each(|token| token.wire_ns = wires.get(&token.delivered_ns).copied());
        let first = rows.iter().find(|token| (token.choice, token.index) == (0, 0));
        let last = rows.iter().rev().find(|token| token.choice == 0);
        let tpot_ns = first
            .zip(last)
            .filter(|(_, last)| last.index > 0)
            .map(|(first, last)| (last.delivered_ns - first.delivered_ns) as f64 / f64::from(last.index));
        self.out.requests.push(Request {
            id: request,
            process: begin.origin.process,
            program_request: begin.exchange,
            request_id: begin.request_id,
            trace_id: begin.trace_id,
            span_id: begin.span_id,
            tenant_id: String::new(),
            model: String::new(),
            model_version: String::new(),
            engine_hash: String::new(),
            adapters: String::new(),
            kv_cache_strategy: String::new(),
            prompt_tokens: None,
            received_ns,
            arrived_ns: begin.arrived_ns,
            read_ns: Some(begin.read_ns),
            source: Source::Socket,
            end_ns: end.map(|end| end.origin.time_ns),
            finish_reason: end.map_or(tracer_abi::mark::FINISH_UNKNOWN, finish_reason),
            declared_tokens: None,
            tokens: u32::try_from(rows.len()).unwrap_or(u32::MAX),
            ttft_ns: first.and_then(|token| token.latency_ns),
            tpot_ns,
        });
        self.out.tokens.extend(rows);
    }

    fn tokens_of(
        &mut self,
        request: u64,
        received_ns: u64,
        origin: Origin,
        sends: &BTreeMap<TokenKey, HttpSend>,
    ) -> Vec<Token> {
        let mut choices: BTreeMap<u32, Vec<(u32, u64)>> = BTreeMap::new();
        for send in sends.values() {
            let indexes = (0..send.tokens).map(|n| send.first_token.saturating_add(n));
            choices.entry(send.choice).or_default().extend(indexes.map(|index| (index, send.origin.time_ns)));
        }
        let writers: HashMap<u64, u32> =
            sends.values().map(|send| (send.origin.time_ns, send.origin.tid)).collect();
        let steps = self.exchanges.steps_for(origin.process);
        let mut rows = Vec::new();
        let first_ns = steps.and_then(|steps| steps.front()).map(|step| step.ended_ns);
        let (mut without_step, mut before_steps) = (0, 0);
        for (choice, deliveries) in choices {
            let joined = steps.map(|steps| join(steps, received_ns, &deliveries)).unwrap_or_default();
            let mut before_ns = received_ns;
            for (number, (index, delivered_ns)) in deliveries.into_iter().enumerate() {
                let (step, join) = joined.get(number).copied().flatten().unzip();
                if step.is_none() {
                    let is_old = first_ns.is_some_and(|first| delivered_ns < first);
                    *(if is_old { &mut before_steps } else { &mut without_step }) += 1;
                }
                rows.push(Token {
                    request,
                    choice,
                    index,
                    process: origin.process,
                    tid: writers.get(&delivered_ns).copied().unwrap_or(origin.tid),
                    delivered_ns,
                    written_ns: Some(delivered_ns),
                    wire_ns: None,
                    latency_ns: delivered_ns.checked_sub(before_ns),
                    source: Source::Socket,
                    iteration: step.and_then(|step: Ended| step.iteration),
                    step: step.map(|step| step.step),
                    join: join.unwrap_or(Join::None),
                    prefill: index == 0,
                });
                before_ns = delivered_ns;
            }
        }
        let counts =
            [(Unmatched::TokenWithoutStep, without_step), (Unmatched::BeforeFirstStep, before_steps)];
        for (kind, count) in counts {
            self.counts.add(kind, origin, count, || format!("request {request}"));
        }
        rows.sort_by_key(|token| (token.delivered_ns, token.choice, token.index));
        rows
    }
}

fn finish_reason(end: HttpEnd) -> u32 {
    use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR, FINISH_UNKNOWN};
    match end.finish {
        _ if end.status >= FIRST_ERROR => FINISH_ERROR,
        HttpFinish::Cut => FINISH_CANCELLED,
        HttpFinish::Done | HttpFinish::Lost => FINISH_UNKNOWN,
    }
}

/// The step of each delivery (index, time), by counting; see the module.
fn join(steps: &VecDeque<Ended>, received_ns: u64, deliveries: &[(u32, u64)]) -> Vec<Option<(Ended, Join)>> {
    // Steps of one engine end in the order in which they begin, but for those of other streams.
    let ended_before = |time_ns: u64| steps.partition_point(|step| step.ended_ns <= time_ns).checked_sub(1);
    let latest: Vec<Option<usize>> = deliveries.iter().map(|(_, time_ns)| ended_before(*time_ns)).collect();
    let first = deliveries
        .iter()
        .zip(&latest)
        .map(|((index, _), latest)| Some((*latest)? as i64 - i64::from(*index)))
        .min()
        .flatten();
    let of_number = |number: i64| usize::try_from(number).ok().and_then(|number| steps.get(number)).copied();
    // A step that began before the request did is none of its own.
    let begins = first.and_then(of_number).filter(|step| step.begin_ns >= received_ns);
    deliveries
        .iter()
        .zip(latest)
        .map(|((index, _), latest)| match (first, begins) {
            (Some(first), Some(_)) => of_number(first + i64::from(*index)).map(|step| (step, Join::Count)),
            _ => latest
                .and_then(|number| steps.get(number).copied())
                .filter(|step| step.begin_ns >= received_ns)
                .map(|step| (step, Join::Time)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP_NS: u64 = 1_000;

    /// Steps one after the other, the first beginning at 10 000 ns.
    fn steps(count: u64) -> VecDeque<Ended> {
        let step = |number| Ended {
            begin_ns: 10_000 + number * STEP_NS,
            ended_ns: 10_000 + (number + 1) * STEP_NS,
            step: number,
            iteration: None,
        };
        (0..count).map(step).collect()
    }

    fn joined(
        steps: &VecDeque<Ended>,
        received_ns: u64,
        delays_ns: &[u64],
        first: u64,
    ) -> Vec<Option<(u64, Join)>> {
        let mut before = 0;
        let deliveries: Vec<(u32, u64)> = (0u32..)
            .zip(delays_ns)
            .map(|(index, delay)| {
                // A write cannot overtake the one before.
                before = before.max(10_000 + (first + u64::from(index) + 1) * STEP_NS + delay);
                (index, before)
            })
            .collect();
        join(steps, received_ns, &deliveries)
            .into_iter()
            .map(|one| one.map(|(step, join)| (step.step, join)))
            .collect()
    }

    proptest! {
        /// However late the others are, one prompt delivery makes all right.
        #[test]
        fn counting_finds_the_steps(
            first in 0u64..40,
            mut delays in prop::collection::vec(0u64..30_000, 1..50),
            prompt in any::<prop::sample::Index>(),
        ) {
            // Earlier delays must not push the prompt one back.
            let prompt = prompt.index(delays.len());
            for (index, delay) in delays.iter_mut().enumerate() {
                let until_prompt = (prompt.saturating_sub(index)) as u64 * STEP_NS;
                *delay = if index == prompt { 10 } else if index < prompt { (*delay).min(until_prompt) } else { *delay };
            }
            let steps = steps(200);
            let received_ns = 10_000 + first * STEP_NS;
            for (index, one) in (0u64..).zip(joined(&steps, received_ns, &delays, first)) {
                prop_assert_eq!(one, Some((first + index, Join::Count)));
            }
        }
    }

    #[test]
    fn several_tokens_a_step_are_not_counted_as_one_each() {
        let steps = steps(100);
        // Three tokens a step from step 10 on, delivered at once: counting would put token 0 far before the request.
        let received_ns = 10_000 + 10 * STEP_NS;
        let deliveries: Vec<(u32, u64)> =
            (0..30).map(|index| (index, 10_000 + (10 + u64::from(index) / 3 + 1) * STEP_NS + 5)).collect();
        let joined = join(&steps, received_ns, &deliveries);
        for (index, one) in (0u64..).zip(joined) {
            let (step, how) = one.unwrap();
            assert_eq!((step.step, how), (10 + index / 3, Join::Time));
        }
    }

    #[test]
    fn what_no_step_preceded_has_none() {
        assert_eq!(join(&steps(10), 0, &[(0, 5_000)])[0].map(|(step, _)| step.step), None);
        assert!(join(&VecDeque::new(), 0, &[(0, 5_000)])[0].is_none());
    }
}

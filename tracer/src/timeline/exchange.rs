//! HTTP exchanges → requests and tokens, for programs that make no marks. See [`super::join`] for the tokens' steps.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::join::{Ended, Joined, Steps};
use super::pair::{Marked, Pairs, TokenKey};
use super::rows::{Join, Request, Source, Token, Unmatched};
use super::wakes::{Votes, Wakes};
use super::{Clock, Timeline};
use crate::event::{HttpBegin, HttpEnd, HttpFinish, HttpSend, HttpWire, Origin};

/// Most names of requests that are remembered.
const MAX_NAMES: usize = 1 << 16;
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
    /// Of the threads that wrote its tokens.
    votes: Votes,
    /// When its last token was written.
    last_ns: u64,
    /// The request that marks tell of, where they do.
    pub(super) marked: Option<(u64, Marked)>,
    /// When it closes, once it has ended.
    due_ns: u64,
}

/// Open exchanges, and the steps that their tokens may be of.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    pub(super) open: BTreeMap<u64, Exchange>,
    pub(super) pairs: Pairs,
    closing: BTreeSet<(u64, u64)>,
    pub(super) steps: Steps,
    pub(super) wakes: Wakes,
    /// Names of requests that marks or exchanges told of.
    names: BTreeSet<String>,
}

impl Exchanges {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn due(&self, now_ns: u64) -> Option<u64> {
        self.closing.first().filter(|(due_ns, _)| *due_ns <= now_ns).map(|(_, id)| *id)
    }

    pub(super) fn open_ids(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }

    /// Marks or an exchange told of a request of this name.
    pub(super) fn told(&mut self, name: &str) {
        if !name.is_empty() && self.names.len() < MAX_NAMES {
            self.names.insert(name.to_owned());
        }
    }

    /// Whether marks or an exchange told of a request of this name.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}

impl<C: Clock> Timeline<C> {
    pub(super) fn http_begin(&mut self, begin: HttpBegin) {
        let exchange = Exchange {
            sends: BTreeMap::new(),
            tokens: 0,
            wires: HashMap::new(),
            end: None,
            votes: Votes::default(),
            last_ns: begin.read_ns,
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
        let since_ns = std::mem::replace(&mut exchange.last_ns, send.origin.time_ns);
        self.exchanges.wakes.vote(send.origin, since_ns, first, &mut exchange.votes);
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
        let Exchange { begin, sends, tokens, wires, end, due_ns, votes, .. } = exchange;
        self.exchanges.closing.remove(&(due_ns, id));
        if is_marked || (tokens == 0 && begin.method != "POST") {
            return;
        }
        self.exchanges.told(&begin.request_id);
        let request = self.requests.next_id();
        let received_ns = begin.arrived_ns.unwrap_or(begin.read_ns).min(begin.read_ns);
        let mut rows = self.tokens_of(request, received_ns, begin.origin, &sends, &votes);
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
        votes: &Votes,
    ) -> Vec<Token> {
        let mut choices: BTreeMap<u32, Vec<(u32, u64)>> = BTreeMap::new();
        for send in sends.values() {
            let indexes = (0..send.tokens).map(|n| send.first_token.saturating_add(n));
            choices.entry(send.choice).or_default().extend(indexes.map(|index| (index, send.origin.time_ns)));
        }
        let writers: HashMap<u64, u32> =
            sends.values().map(|send| (send.origin.time_ns, send.origin.tid)).collect();
        let Joined { tokens: joined, first_ns } =
            self.exchanges.steps.join(origin.process, received_ns, &choices, votes);
        let mut rows = Vec::new();
        let (mut without_step, mut before_steps) = (0, 0);
        for (choice, deliveries) in choices {
            let mut before_ns = received_ns;
            for (index, delivered_ns) in deliveries {
                let (step, join) = joined.get(&(choice, index)).copied().unzip();
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

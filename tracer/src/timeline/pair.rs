//! Requests that both marks and sockets tell of: the mark says what a token is, the socket when it left.
//!
//! A marked request and an HTTP exchange are a pair where they have a name in common (what the client called it, or its
//! trace); of several exchanges (another server in front, retries) it is that of the mark's own process, then the latest
//! that has not ended. A token of a pair is held until it is known when it was written and when it was on the wire, at
//! most [`Config::hold_ns`](super::Config::hold_ns). What one side tells of and the other does not is counted, where all
//! of the response was seen.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeBounds;

use super::exchange::{Exchange, Exchanges};
use super::rows::{Token, Unmatched};
use super::{Clock, Timeline};
use crate::event::{HttpBegin, HttpFinish, HttpSend, Origin, ProcessId};

/// A mark is made next to the write that it tells of. Further apart than this (ns), it was another write, or the program
/// had something else to do in between.
pub const FAR_NS: u64 = 10_000_000;

/// Most names of marked requests that are remembered.
const MAX_NAMES: usize = 1 << 16;

/// (Choice, index) of a token.
pub(super) type TokenKey = (u32, u32);

/// What a request is called by those outside.
pub(super) struct Names([Option<Name>; 2]);

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Name {
    Request(String),
    Trace([u8; 16]),
}

impl Names {
    pub(super) fn new(request_id: &str, trace_id: Option<[u8; 16]>) -> Self {
        let request_id = Some(request_id).filter(|id| !id.is_empty());
        Self([request_id.map(|id| Name::Request(id.to_owned())), trace_id.map(Name::Trace)])
    }

    fn of(begin: &HttpBegin) -> Self {
        Self::new(&begin.request_id, begin.trace_id)
    }

    fn iter(&self) -> impl Iterator<Item = &Name> {
        self.0.iter().flatten()
    }
}

/// Which exchanges marks tell of.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// Open exchanges by their names.
    open: BTreeMap<Name, BTreeSet<u64>>,
    /// Request → open exchange.
    exchanges: HashMap<u64, u64>,
    /// Processes whose marks tell of tokens, and names of requests that marks told of.
    marking: BTreeSet<ProcessId>,
    marked: BTreeSet<Name>,
    /// Tokens that are held, by when they leave at the latest.
    due: BTreeSet<(u64, u64, TokenKey)>,
}

/// The marked half of an exchange.
#[derive(Debug, Default)]
pub(super) struct Marked {
    /// Tokens for which it is not known yet when they left.
    waiting: BTreeMap<TokenKey, (Origin, Token)>,
    /// Tokens whose write was seen, and those that left without.
    written: u64,
    unwritten: u64,
}

impl Pairs {
    pub(super) fn marks(&mut self, process: ProcessId) {
        self.marking.insert(process);
    }

    pub(super) fn opened(&mut self, begin: &HttpBegin) {
        for name in Names::of(begin).iter() {
            self.open.entry(name.clone()).or_default().insert(begin.exchange);
        }
    }

    fn closed(&mut self, begin: &HttpBegin) {
        for name in Names::of(begin).iter() {
            if let Some(exchanges) = self.open.get_mut(name) {
                exchanges.remove(&begin.exchange);
                if exchanges.is_empty() {
                    self.open.remove(name);
                }
            }
        }
    }

    fn has_marked(&self, begin: &HttpBegin) -> bool {
        Names::of(begin).iter().any(|name| self.marked.contains(name))
    }
}

impl Exchanges {
    /// Finds the exchange of a request that marks tell of.
    pub(super) fn pair(&mut self, process: ProcessId, names: &Names, request: u64) -> Option<&HttpBegin> {
        let Self { open, pairs, .. } = self;
        for name in names.iter() {
            if pairs.marked.len() < MAX_NAMES {
                pairs.marked.insert(name.clone());
            }
        }
        let called = names.iter().find_map(|name| pairs.open.get(name))?;
        let is_free = |id: &&u64| open.get(id).is_some_and(|one| one.marked.is_none() && one.end.is_none());
        let key = |id: &&u64| {
            open.get(id).map(|one| (one.begin.origin.process == process, one.begin.read_ns, **id))
        };
        let id = *called.iter().filter(is_free).max_by_key(key)?;
        let exchange = open.get_mut(&id)?;
        exchange.marked = Some((request, Marked::default()));
        pairs.exchanges.insert(request, id);
        Some(&exchange.begin)
    }
}

impl Exchange {
    /// The write that a token was in.
    fn send_of(&self, (choice, index): TokenKey) -> Option<&HttpSend> {
        let (&(of, first), send) = self.sends.range(..=(choice, index)).next_back()?;
        (of == choice && index - first < send.tokens).then_some(send)
    }

    /// Whether a token is known to be on the wire.
    fn has_left(&self, key: TokenKey) -> bool {
        let send = self.send_of(key);
        send.is_some_and(|send| send.held_bytes == 0 || self.wires.contains_key(&send.origin.time_ns))
    }
}

impl<C: Clock> Timeline<C> {
    /// A token that marks tell of is known as far as they tell.
    pub(super) fn marked_token(&mut self, origin: Origin, token: Token) {
        let exchange = self.exchanges.pairs.exchanges.get(&token.request).copied();
        let Some((id, exchange)) = exchange.and_then(|id| Some((id, self.exchanges.open.get_mut(&id)?)))
        else {
            self.out.tokens.push(token);
            return;
        };
        let key = (token.choice, token.index);
        let due_ns = token.delivered_ns.saturating_add(self.config.hold_ns);
        if let Some((_, marked)) = &mut exchange.marked {
            marked.waiting.insert(key, (origin, token));
            self.exchanges.pairs.due.insert((due_ns, id, key));
        }
        self.release_departed(id, key..=key);
    }

    /// More is known of the departure of these tokens of an exchange.
    pub(super) fn release_departed(&mut self, id: u64, keys: impl RangeBounds<TokenKey>) {
        let Some(exchange) = self.exchanges.open.get(&id) else { return };
        let Some((_, marked)) = &exchange.marked else { return };
        let waiting = marked.waiting.range(keys).map(|(key, _)| *key);
        let departed: Vec<TokenKey> = waiting.filter(|key| exchange.has_left(*key)).collect();
        departed.into_iter().for_each(|key| self.release_token(id, key));
    }

    /// Tokens have waited for long enough.
    pub(super) fn release_waiting(&mut self) {
        while let Some(&(due_ns, id, key)) = self.exchanges.pairs.due.first() {
            if due_ns > self.now_ns {
                return;
            }
            self.release_token(id, key);
        }
    }

    /// Lets a token go with what is known of it.
    fn release_token(&mut self, id: u64, key: TokenKey) {
        let Some(exchange) = self.exchanges.open.get_mut(&id) else { return };
        let written_ns = exchange.send_of(key).map(|send| send.origin.time_ns);
        let Some((_, marked)) = &mut exchange.marked else { return };
        let Some((origin, mut token)) = marked.waiting.remove(&key) else { return };
        let due_ns = token.delivered_ns.saturating_add(self.config.hold_ns);
        self.exchanges.pairs.due.remove(&(due_ns, id, key));
        match written_ns {
            Some(written_ns) => {
                marked.written += 1;
                token.written_ns = Some(written_ns);
                token.wire_ns = exchange.wires.get(&written_ns).copied();
                if written_ns.abs_diff(token.delivered_ns) > FAR_NS {
                    let what = || format!("request {} choice {} token {}", token.request, key.0, key.1);
                    self.counts.add(Unmatched::MarkFarFromWrite, origin, 1, what);
                }
            }
            None => marked.unwritten += 1,
        }
        self.out.tokens.push(token);
    }

    /// The exchange is final: whether marks tell of it, so that it has no rows of its own. What they and the socket do not
    /// agree on is counted.
    pub(super) fn settle(&mut self, id: u64) -> bool {
        let Some(exchange) = self.exchanges.open.get(&id) else { return false };
        if let Some((_, marked)) = &exchange.marked {
            let keys: Vec<TokenKey> = marked.waiting.keys().copied().collect();
            keys.into_iter().for_each(|key| self.release_token(id, key));
        }
        let Some(exchange) = self.exchanges.open.get_mut(&id) else { return false };
        let (begin, tokens) = (&exchange.begin, exchange.tokens as u64);
        let origin = begin.origin;
        self.exchanges.pairs.closed(begin);
        let Some((request, marked)) = exchange.marked.take() else {
            let is_marking = self.exchanges.pairs.marking.contains(&origin.process);
            let is_other_tier = self.exchanges.pairs.has_marked(begin);
            if is_marking && !is_other_tier && tokens > 0 {
                self.counts.add(Unmatched::ExchangeWithoutRequest, origin, 1, || format!("exchange {id}"));
            }
            return is_marking || is_other_tier;
        };
        self.exchanges.pairs.exchanges.remove(&request);
        let is_whole =
            exchange.end.is_some_and(|end| end.finish == HttpFinish::Done && end.streamed && !end.encoded);
        if is_whole {
            let Marked { written, unwritten, .. } = marked;
            let what = || format!("request {request}");
            self.counts.add(Unmatched::MarkWithoutWrite, origin, unwritten, what);
            self.counts.add(Unmatched::WriteWithoutMark, origin, tokens.saturating_sub(written), what);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{HTTP_TID, PROCESS, begin, end, origin, token};
    use super::super::{Config, NoClock, Output};
    use super::*;
    use crate::event::{Event, HttpEnd, HttpWire};

    const OTHER: ProcessId = ProcessId { tgid: 99, start_ticks: 5 };

    fn opens(exchange: u64, name: &str, read_ns: u64) -> HttpBegin {
        HttpBegin {
            origin: origin(HTTP_TID, read_ns),
            exchange,
            method: "POST".into(),
            request_id: name.into(),
            arrived_ns: Some(read_ns - 3),
            read_ns,
            ..HttpBegin::default()
        }
    }

    fn sends(exchange: u64, time_ns: u64, first_token: u32, tokens: u32, held_bytes: u32) -> Event {
        let origin = origin(HTTP_TID, time_ns);
        let (choice, events, bytes) = (0, tokens, 100);
        Event::HttpSend(HttpSend { origin, exchange, choice, first_token, tokens, events, bytes, held_bytes })
    }

    fn ends(exchange: u64, time_ns: u64, finish: HttpFinish) -> Event {
        let origin = origin(HTTP_TID, time_ns);
        Event::HttpEnd(HttpEnd {
            origin,
            exchange,
            finish,
            streamed: true,
            status: 200,
            ..HttpEnd::default()
        })
    }

    fn play(events: &[Event]) -> (Output, BTreeMap<&'static str, u64>) {
        let mut timeline = Timeline::new(Config::default(), NoClock);
        events.iter().for_each(|event| timeline.feed(event));
        timeline.finish();
        let kinds = Unmatched::ALL.into_iter().map(|kind| (kind.name(), timeline.unmatched(kind)));
        let kinds = kinds
            .filter(|(name, count)| *count > 0 && !["token_without_step", "before_first_step"].contains(name))
            .collect();
        (timeline.drain(), kinds)
    }

    /// (index, written, on the wire) of all tokens.
    fn departures(out: &Output) -> Vec<(u32, Option<u64>, Option<u64>)> {
        let mut all: Vec<_> = out.tokens.iter().map(|one| (one.index, one.written_ns, one.wire_ns)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn marks_say_what_a_token_is_and_the_socket_when_it_left() {
        let wire = HttpWire { origin: origin(0, 900), exchange: 4, sent_ns: 215 };
        let (out, unmatched) = play(&[
            Event::HttpBegin(opens(4, "req-1", 100)),
            begin(HTTP_TID, 110, 1),
            token(HTTP_TID, 200, 1, 0),
            sends(4, 205, 0, 1, 0),
            // Two in one write, which is held.
            token(HTTP_TID, 210, 1, 1),
            token(HTTP_TID, 211, 1, 2),
            sends(4, 215, 1, 2, 250),
            Event::HttpWire(wire),
            end(HTTP_TID, 1_000, 1, 3, tracer_abi::mark::FINISH_STOP),
            ends(4, 1_001, HttpFinish::Done),
        ]);
        assert_eq!(
            departures(&out),
            [(0, Some(205), None), (1, Some(215), Some(900)), (2, Some(215), Some(900))]
        );
        assert_eq!(out.requests.len(), 1);
        assert_eq!((out.requests[0].arrived_ns, out.requests[0].read_ns), (Some(97), Some(100)));
        assert_eq!(unmatched, BTreeMap::new());
    }

    #[test]
    fn what_only_one_side_tells_of_is_counted_where_the_response_is_whole() {
        let events = |finish| {
            [
                Event::HttpBegin(opens(4, "req-1", 100)),
                begin(HTTP_TID, 110, 1),
                token(HTTP_TID, 200, 1, 0),
                sends(4, 205, 0, 1, 0),
                // Of token 1 no mark tells, of token 2 no write, and token 3 was written late.
                sends(4, 225, 1, 1, 0),
                token(HTTP_TID, 230, 1, 3),
                token(HTTP_TID, 240, 1, 2),
                sends(4, 250 + FAR_NS, 3, 1, 0),
                end(HTTP_TID, 260 + FAR_NS, 1, 4, tracer_abi::mark::FINISH_STOP),
                ends(4, 270 + FAR_NS, finish),
            ]
        };
        let (out, unmatched) = play(&events(HttpFinish::Done));
        assert_eq!(departures(&out), [(0, Some(205), None), (2, None, None), (3, Some(250 + FAR_NS), None)]);
        let expected = [
            ("mark_far_from_write", 1),
            ("mark_without_write", 1),
            ("token_not_delivered", 1),
            ("write_without_mark", 1),
        ];
        assert_eq!(unmatched, BTreeMap::from(expected));
        let (_, unmatched) = play(&events(HttpFinish::Cut));
        assert_eq!(
            unmatched.keys().copied().collect::<Vec<_>>(),
            ["mark_far_from_write", "token_not_delivered"]
        );
    }

    #[test]
    fn the_own_process_comes_first_and_another_server_in_front_is_no_second_request() {
        let mut front = opens(3, "req-1", 90);
        front.origin.process = OTHER;
        let (out, unmatched) = play(&[
            Event::HttpBegin(front),
            Event::HttpBegin(opens(4, "req-1", 95)),
            begin(HTTP_TID, 110, 1),
            token(HTTP_TID, 200, 1, 0),
            sends(4, 205, 0, 1, 0),
            sends(3, 215, 0, 1, 0),
            end(HTTP_TID, 220, 1, 1, tracer_abi::mark::FINISH_STOP),
            ends(4, 221, HttpFinish::Done),
            ends(3, 223, HttpFinish::Done),
            // Not marked, in a program that marks.
            Event::HttpBegin(opens(5, "other", 300)),
            sends(5, 305, 0, 1, 0),
            ends(5, 310, HttpFinish::Done),
        ]);
        assert_eq!(departures(&out), [(0, Some(205), None)]);
        assert_eq!((out.requests.len(), out.requests[0].process), (1, PROCESS));
        assert_eq!(unmatched, BTreeMap::from([("exchange_without_request", 1)]));
    }

    #[test]
    fn a_token_does_not_wait_longer_than_the_others_for_what_may_never_come() {
        let mut timeline = Timeline::new(Config::default(), NoClock);
        let late = 200 + Config::default().hold_ns + Config::default().slack_ns + 1;
        for event in [
            Event::HttpBegin(opens(4, "req-1", 100)),
            begin(HTTP_TID, 110, 1),
            token(HTTP_TID, 200, 1, 0),
            sends(4, 205, 0, 1, 99),
            begin(HTTP_TID, late, 2),
        ] {
            timeline.feed(&event);
        }
        assert_eq!(departures(&timeline.drain()), [(0, Some(205), None)]);
    }
}

//! Bytes on sockets → HTTP exchanges and the tokens of their responses.
//!
//! In: [`SocketIo`] in the order of each connection. Out: [`HttpBegin`], [`HttpSend`], [`HttpWire`], [`HttpEnd`]. The
//! kernel copies, this counts. It follows HTTP/1.1 on connections that begin with a request: keep-alive, pipelining,
//! heads and chunks split anywhere, bytes that were moved and not captured. Bodies are looked at and never kept. Open
//! state is bounded, and what is dropped is counted. This folder does no I/O, and trusts no byte.

mod connection;
mod framing;
mod head;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use crate::event::{
    Event,
    http::{SocketAction, SocketIo},
};
use connection::Connection;

/// Most connections that are followed at once; the oldest goes first.
const MAX_CONNECTIONS: usize = 1 << 15;

/// What could not be followed, by name in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections whose bytes are not HTTP/1.1 after all, or were lost: dropped until their next request.
    pub lost: u64,
    /// Heads of requests that were longer than what is captured.
    pub heads_cut: u64,
    /// Responses whose request was not seen.
    pub responses_without_request: u64,
    /// Compressed responses: their tokens are not seen.
    pub encoded: u64,
    /// Connections that became something else (WebSocket, CONNECT).
    pub upgraded: u64,
    /// Open exchanges dropped to stay in bounds.
    pub evicted: u64,
}

impl Counts {
    /// (Name, count, whether something is missing from the capture).
    #[must_use]
    pub fn lines(&self) -> [(&'static str, u64, bool); 6] {
        [
            ("http_lost", self.lost, true),
            ("http_heads_cut", self.heads_cut, false),
            ("http_responses_without_request", self.responses_without_request, false),
            ("http_encoded", self.encoded, false),
            ("http_upgraded", self.upgraded, false),
            ("http_evicted", self.evicted, true),
        ]
    }
}

/// Which headers name a request, in order of preference.
#[derive(Clone, Debug)]
pub struct Config {
    /// In lower case.
    pub id_headers: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        let names = ["x-request-id", "x-correlation-id", "request-id"];
        Self { id_headers: names.map(str::to_owned).to_vec() }
    }
}

/// All connections of a recording.
#[derive(Debug, Default)]
pub struct Http {
    config: Config,
    connections: HashMap<u64, Connection>,
    /// By age: when each was first seen.
    ages: BTreeMap<u64, u64>,
    next_age: u64,
    next_exchange: u64,
    counts: Counts,
}

impl Http {
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { config, ..Self::default() }
    }

    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Takes what happened on a connection; `out` receives what it means. Returns whether bytes are held back: handed
    /// to the kernel and not on the wire.
    pub fn feed(&mut self, io: &SocketIo, out: &mut Vec<Event>) -> bool {
        let known = self.connections.contains_key(&io.cookie);
        if !known && matches!(io.action, SocketAction::Recv { .. }) {
            self.insert(io.cookie, out, io);
        }
        let Some(connection) = self.connections.get_mut(&io.cookie) else { return false };
        let mut context =
            Context { config: &self.config, counts: &mut self.counts, next: &mut self.next_exchange, out };
        match io.action {
            SocketAction::Recv { bytes, arrived_ns } => {
                connection.received(io, bytes, arrived_ns, &mut context);
                false
            }
            SocketAction::Send { result, sent_until, wire_until } => {
                connection.sent(io, result, sent_until, wire_until, &mut context)
            }
            SocketAction::Wire { wire_until } => {
                connection.on_wire(io.origin, wire_until, &mut context);
                false
            }
            SocketAction::PeerClosed => false,
            SocketAction::Closed => {
                connection.closed(io.origin, &mut context);
                self.remove(io.cookie);
                false
            }
        }
    }

    fn insert(&mut self, cookie: u64, out: &mut Vec<Event>, io: &SocketIo) {
        if self.connections.len() >= MAX_CONNECTIONS
            && let Some((_, oldest)) = self.ages.pop_first()
            && let Some(mut connection) = self.connections.remove(&oldest)
        {
            let mut context = Context {
                config: &self.config,
                counts: &mut self.counts,
                next: &mut self.next_exchange,
                out,
            };
            context.counts.evicted += connection.open_exchanges();
            connection.closed(io.origin, &mut context);
        }
        self.ages.insert(self.next_age, cookie);
        self.connections.insert(cookie, Connection::new(cookie, self.next_age));
        self.next_age += 1;
    }

    fn remove(&mut self, cookie: u64) {
        if let Some(connection) = self.connections.remove(&cookie) {
            self.ages.remove(&connection.age);
        }
    }
}

/// What a connection needs of the whole.
struct Context<'a> {
    config: &'a Config,
    counts: &'a mut Counts,
    next: &'a mut u64,
    out: &'a mut Vec<Event>,
}

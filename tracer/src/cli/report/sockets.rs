//! What sockets tell beyond tokens: where a request waited before the program read it, and an answer before it left.

use serde::Serialize;

use crate::{
    event::HttpFinish,
    latency::Distribution,
    timeline::{rows::Source, tables::Tables},
};

/// Held bytes that left this long after they were handed over look like a delayed ACK: the kernel's shortest one is
/// 40 ms (TCP_DELACK_MIN, include/net/tcp.h), less what had passed of it.
const HELD_LONG_NS: u64 = 1_000_000;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Sockets {
    /// Exchanges that ended.
    pub(crate) exchanges: u64,
    /// The connection ended before the answer did.
    pub(crate) cut: u64,
    /// Exchanges in which the kernel refused writes, since the client read too slowly.
    pub(crate) slow_clients: u64,
    /// Bytes arrived → first byte read by the program.
    pub(crate) lag: Spread,
    /// What was not read, by what it was; only what there was.
    pub(crate) unread: Vec<Unread>,
    /// Of tokens that marks tell of and a write was seen of: between the two, either way.
    pub(crate) marks: Spread,
    /// Writes whose bytes were not sent at once: handed over → on the wire.
    pub(crate) held: Spread,
    /// Of these: held so long that the peer's delayed ACK is the likely cause.
    pub(crate) held_long: u64,
}

/// Something on sockets that was not read: its requests and tokens are not seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Unread {
    /// Name in the ledger.
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) count: u64,
}

/// Ledger rows of what is not read.
const UNREAD: [(&str, &str); 6] = [
    ("socket_tls", "encrypted connections (TLS)"),
    ("socket_http2", "HTTP/2 connections"),
    ("socket_io_uring", "reads and writes through an io_uring"),
    ("socket_unseen", "reads and writes that do not show their bytes (sendfile, splice, sendmmsg)"),
    ("http_encoded", "compressed responses"),
    ("http_upgraded", "connections that became something else (WebSocket, CONNECT)"),
];

/// Quantiles are `null` where fewer than ten samples lie beyond them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) n: u64,
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) max_ns: Option<u64>,
}

impl Spread {
    fn new(values: impl Iterator<Item = u64>) -> Self {
        let mut distribution = Distribution::new();
        values.for_each(|ns| distribution.record(ns));
        Self {
            n: distribution.count(),
            p50_ns: distribution.quantile(0.5).value(),
            p99_ns: distribution.quantile(0.99).value(),
            max_ns: distribution.max(),
        }
    }
}

impl Sockets {
    pub(crate) fn new(tables: &Tables) -> Option<Self> {
        let ends = &tables.http_ends;
        let count = |name| tables.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum();
        let unread = UNREAD.map(|(name, what)| Unread { name, what, count: count(name) });
        let unread: Vec<Unread> = unread.into_iter().filter(|unread| unread.count > 0).collect();
        if ends.is_empty()
            && unread.is_empty()
            && !tables.requests.iter().any(|request| request.source == Source::Socket)
        {
            return None;
        }
        let lag =
            tables.requests.iter().filter_map(|request| request.read_ns?.checked_sub(request.arrived_ns?));
        let marked = tables.tokens.iter().filter(|token| token.source == Source::Mark);
        let marks = marked.filter_map(|token| Some(token.written_ns?.abs_diff(token.delivered_ns)));
        let held = || tables.http_wires.iter().map(|wire| wire.origin.time_ns.saturating_sub(wire.sent_ns));
        Some(Self {
            exchanges: ends.len() as u64,
            cut: ends.iter().filter(|end| end.finish == HttpFinish::Cut).count() as u64,
            slow_clients: ends.iter().filter(|end| end.refused_writes > 0).count() as u64,
            unread,
            lag: Spread::new(lag),
            marks: Spread::new(marks),
            held: Spread::new(held()),
            held_long: held().filter(|ns| *ns >= HELD_LONG_NS).count() as u64,
        })
    }
}

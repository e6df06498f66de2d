//! HTTP exchanges as seen on sockets: what was asked, when tokens of the answer were handed to the kernel, how it ended.
//!
//! Identifiers come from the network: they are capped and cleaned before they get here. Nothing of a body does.

use super::Origin;

/// Bytes that moved over a TCP connection of a target: what the kernel-side program saw, before any parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketIo {
    /// Of a `State` or `Wire`: time only.
    pub origin: Origin,
    /// The kernel's name for the connection, unique until reboot.
    pub cookie: u64,
    pub action: SocketAction,
    /// The beginning of the bytes that were moved.
    pub bytes: Vec<u8>,
    pub local_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketAction {
    /// `result` bytes, or −errno; sequence numbers (modulo 2^32) behind the last byte handed over, and on the wire.
    Send { result: i64, sent_until: u32, wire_until: u32 },
    /// `arrived_ns`: when the first of them reached the socket.
    Recv { bytes: u64, arrived_ns: Option<u64> },
    /// The peer has closed its side.
    PeerClosed,
    /// The connection is over.
    Closed,
    /// Everything before this sequence number is on the wire.
    Wire { wire_until: u32 },
}

/// A request's head has been read by the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpBegin {
    pub origin: Origin,
    /// Key of the exchange in this recording.
    pub exchange: u64,
    pub connection: u64,
    pub local_port: u16,
    pub method: String,
    /// Without the query.
    pub path: String,
    /// X-Request-ID or the like; empty where there is none.
    pub request_id: String,
    /// Of `traceparent`.
    pub trace_id: Option<[u8; 16]>,
    pub span_id: Option<[u8; 8]>,
    /// When its first byte reached the socket; `None`: not seen, or not on an idle connection.
    pub arrived_ns: Option<u64>,
    /// When its first byte was read.
    pub read_ns: u64,
    /// The head was longer than what is captured of it: it may have had an id.
    pub head_cut: bool,
}

/// Bytes of one choice of a response were handed to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpSend {
    pub origin: Origin,
    pub exchange: u64,
    pub choice: u32,
    /// Index of the first token in here, counted per choice.
    pub first_token: u32,
    pub tokens: u32,
    /// Server-sent events (or lines), with or without tokens.
    pub events: u32,
    /// Bytes of the write.
    pub bytes: u64,
    /// Of these and earlier bytes: handed over and not on the wire when the call returned.
    pub held_bytes: u32,
}

/// Bytes that a send left behind have been put on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpWire {
    pub origin: Origin,
    pub exchange: u64,
    /// When they were handed over.
    pub sent_ns: u64,
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HttpFinish {
    /// The response is complete.
    #[default]
    Done,
    /// The connection ended before the response did.
    Cut,
    /// The bytes are not what their framing says: the rest of the connection was not followed.
    Lost,
}

/// The end of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpEnd {
    pub origin: Origin,
    pub exchange: u64,
    /// 0: none was seen.
    pub status: u16,
    pub finish: HttpFinish,
    /// The response came in pieces of its own (server-sent events, lines of JSON).
    pub streamed: bool,
    /// Compressed: its tokens cannot be told apart.
    pub encoded: bool,
    pub events: u32,
    pub tokens: u32,
    /// Writes that the kernel refused since its buffer was full: a slow client.
    pub refused_writes: u32,
}

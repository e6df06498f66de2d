//! One connection: requests in, responses out, in the same order.

use std::collections::VecDeque;

use super::{
    Context,
    framing::{Framing, Lost, Piece},
    head::{self, Format, Parsed},
    stream::{Seen, Stream},
};
use crate::event::{
    Event, Origin, ProcessId,
    http::{HttpBegin, HttpEnd, HttpFinish, HttpSend, HttpWire, SocketIo},
};

/// Most requests that wait for their response on one connection.
const MAX_PIPELINED: usize = 1024;
/// Most sends of a connection that wait for the wire.
const MAX_HELD: usize = 4096;
const EAGAIN: i64 = -11;
const EPIPE: i64 = -32;
const ECONNRESET: i64 = -104;

/// One direction.
#[derive(Debug)]
enum Side<B> {
    /// In a head, of which so much has come.
    Head(Vec<u8>),
    Body(B),
    /// Not understood: a request that begins where a read does is believed again.
    Lost,
}

#[derive(Debug)]
struct Outgoing {
    framing: Framing,
    stream: Stream,
}

/// A request whose response is not complete.
#[derive(Debug)]
struct Exchange {
    id: u64,
    is_head: bool,
    status: u16,
    streamed: bool,
    encoded: bool,
    events: u32,
    tokens: u32,
    /// Tokens per choice.
    choices: Vec<u32>,
    refused_writes: u32,
}

/// Bytes that were handed over and wait for the wire.
#[derive(Clone, Copy, Debug)]
struct Held {
    until: u32,
    exchange: u64,
    sent_ns: u64,
}

#[derive(Debug)]
pub(super) struct Connection {
    cookie: u64,
    pub(super) age: u64,
    /// Who read or wrote last.
    process: ProcessId,
    incoming: Side<Framing>,
    outgoing: Side<Outgoing>,
    /// Oldest first: the response of the first is being sent.
    exchanges: VecDeque<Exchange>,
    held: VecDeque<Held>,
    /// Of the head that is coming in: when its first byte arrived, and was read.
    arrived_ns: Option<u64>,
    read_ns: Option<u64>,
    /// No longer HTTP/1.1.
    is_foreign: bool,
}

/// Pieces of one write that belong to one choice.
struct Batch {
    choice: u32,
    tokens: u32,
}

impl Connection {
    pub(super) fn new(cookie: u64, age: u64) -> Self {
        Self {
            cookie,
            age,
            process: ProcessId::default(),
            incoming: Side::Head(Vec::new()),
            outgoing: Side::Head(Vec::new()),
            exchanges: VecDeque::new(),
            held: VecDeque::new(),
            arrived_ns: None,
            read_ns: None,
            is_foreign: false,
        }
    }

    pub(super) fn open_exchanges(&self) -> u64 {
        self.exchanges.len() as u64
    }

    /// `bytes` were read; of them those in `io` were captured.
    pub(super) fn received(
        &mut self,
        io: &SocketIo,
        bytes: u64,
        arrived_ns: Option<u64>,
        context: &mut Context<'_>,
    ) {
        if self.is_foreign {
            return;
        }
        self.process = io.origin.process;
        let mut piece = piece_of(io, bytes);
        if matches!(self.incoming, Side::Lost) && begins_request(piece.bytes) {
            self.incoming = Side::Head(Vec::new());
        }
        while !piece.is_empty() {
            match &mut self.incoming {
                Side::Lost => return,
                Side::Body(framing) => match framing.feed(&mut piece, |_| {}) {
                    Ok(true) => self.incoming = Side::Head(Vec::new()),
                    Ok(false) => {}
                    Err(Lost) => {
                        context.counts.lost += 1;
                        self.incoming = Side::Lost;
                    }
                },
                Side::Head(head) => {
                    if head.is_empty() {
                        // Lines before a head are tolerated (RFC 9112, section 2.2).
                        let blank =
                            piece.bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                        piece.bytes = &piece.bytes[blank..];
                        if piece.bytes.is_empty() {
                            if piece.gap > 0 {
                                self.incoming = Side::Lost;
                            }
                            return;
                        }
                        self.arrived_ns = arrived_ns;
                        self.read_ns = Some(io.origin.time_ns);
                    }
                    let before = head.len();
                    let room = head::MAX_BYTES.saturating_sub(before);
                    head.extend_from_slice(piece.bytes.get(..room).unwrap_or(piece.bytes));
                    match head::request(head, context.config) {
                        Parsed::Whole(request, length) => {
                            piece.bytes =
                                piece.bytes.get(length.saturating_sub(before)..).unwrap_or_default();
                            self.begin(io, request, false, context);
                        }
                        Parsed::Partial(request) if piece.gap > 0 || head.len() >= head::MAX_BYTES => {
                            // Its end was not captured; what follows is found again at the next request.
                            context.counts.heads_cut += 1;
                            self.begin(io, request, true, context);
                            self.incoming = Side::Lost;
                            return;
                        }
                        Parsed::Partial(_) => return,
                        Parsed::Bad => {
                            context.counts.lost += 1;
                            self.incoming = Side::Lost;
                            return;
                        }
                    }
                }
            }
        }
    }

    fn begin(&mut self, io: &SocketIo, request: head::Request, head_cut: bool, context: &mut Context<'_>) {
        let id = *context.next;
        *context.next += 1;
        if self.exchanges.len() >= MAX_PIPELINED {
            context.counts.evicted += 1;
            self.end_first(io.origin, HttpFinish::Lost, context);
        }
        let is_head = request.method == "HEAD";
        self.incoming = match request.framing {
            Framing::None => Side::Head(Vec::new()),
            framing => Side::Body(framing),
        };
        if request.is_upgrade {
            context.counts.upgraded += 1;
            self.is_foreign = true;
        }
        context.out.push(Event::HttpBegin(HttpBegin {
            origin: io.origin,
            exchange: id,
            connection: self.cookie,
            local_port: io.local_port,
            method: request.method,
            path: request.path,
            request_id: request.request_id,
            trace_id: request.trace_id,
            span_id: request.span_id,
            arrived_ns: self.arrived_ns.take().filter(|arrived| *arrived <= io.origin.time_ns),
            read_ns: self.read_ns.take().unwrap_or(io.origin.time_ns),
            head_cut,
        }));
        self.exchanges.push_back(Exchange {
            id,
            is_head,
            status: 0,
            streamed: false,
            encoded: false,
            events: 0,
            tokens: 0,
            choices: Vec::new(),
            refused_writes: 0,
        });
    }

    /// `result` bytes were handed to the kernel, or an error came back. Returns whether bytes are held.
    pub(super) fn sent(
        &mut self,
        io: &SocketIo,
        result: i64,
        sent_until: u32,
        wire_until: u32,
        context: &mut Context<'_>,
    ) -> bool {
        if self.is_foreign {
            return false;
        }
        self.process = io.origin.process;
        let Ok(bytes) = u64::try_from(result) else {
            match (result, self.exchanges.front_mut()) {
                (EAGAIN, Some(exchange)) => {
                    exchange.refused_writes = exchange.refused_writes.saturating_add(1);
                }
                // The peer was gone before its request was read: no change of state comes any more.
                (EPIPE | ECONNRESET, _) => self.closed(io.origin, context),
                _ => {}
            }
            return false;
        };
        let held_bytes = sent_until.wrapping_sub(wire_until);
        let mut exchange = None;
        let mut piece = piece_of(io, bytes);
        while !piece.is_empty() {
            if self.exchanges.is_empty() {
                // Of a request that was not seen: its response ends before the next request comes.
                context.counts.responses_without_request += u64::from(!matches!(self.outgoing, Side::Lost));
                self.outgoing = Side::Lost;
                return false;
            }
            exchange = self.exchanges.front().map(|exchange| exchange.id);
            if matches!(self.outgoing, Side::Lost) {
                if !piece.bytes.starts_with(b"HTTP/1.") {
                    return false;
                }
                self.outgoing = Side::Head(Vec::new());
            }
            let before = (piece.bytes.len() as u64) + piece.gap;
            let result = self.send_piece(&mut piece, io.origin, bytes, held_bytes, context);
            if result.is_err() {
                context.counts.lost += 1;
                self.outgoing = Side::Lost;
                self.end_first(io.origin, HttpFinish::Lost, context);
                return false;
            }
            if piece.bytes.len() as u64 + piece.gap == before {
                // Nothing more can be made of it.
                return false;
            }
        }
        self.hold(io.origin, exchange, sent_until, wire_until)
    }

    /// Takes a part of what was sent: a head, or as much of a body as there is.
    fn send_piece(
        &mut self,
        piece: &mut Piece<'_>,
        origin: Origin,
        bytes: u64,
        held_bytes: u32,
        context: &mut Context<'_>,
    ) -> Result<(), Lost> {
        let Some(exchange) = self.exchanges.front_mut() else { return Ok(()) };
        match &mut self.outgoing {
            Side::Lost => Ok(()),
            Side::Head(head) => {
                let before = head.len();
                let room = head::MAX_BYTES.saturating_sub(before);
                head.extend_from_slice(piece.bytes.get(..room).unwrap_or(piece.bytes));
                match head::response(head, exchange.is_head) {
                    Parsed::Whole(response, length) => {
                        piece.bytes = piece.bytes.get(length.saturating_sub(before)..).unwrap_or_default();
                        self.respond(&response, origin, context);
                        Ok(())
                    }
                    Parsed::Partial(_) if piece.gap == 0 && head.len() < head::MAX_BYTES => {
                        piece.bytes = &[];
                        Ok(())
                    }
                    Parsed::Partial(_) | Parsed::Bad => Err(Lost),
                }
            }
            Side::Body(Outgoing { framing, stream }) => {
                let mut batches: Vec<Batch> = Vec::new();
                let (mut events, mut is_done) = (0u32, false);
                let mut seen = |seen: Seen| {
                    events += 1;
                    is_done |= seen == Seen::End;
                    if let Seen::Token(choice) = seen {
                        match batches.iter_mut().find(|batch| batch.choice == choice) {
                            Some(batch) => batch.tokens += 1,
                            None => batches.push(Batch { choice, tokens: 1 }),
                        }
                    }
                };
                let is_over = framing.feed(piece, |part| stream.feed(part, &mut seen))?;
                exchange.report(origin, &batches, events, bytes, held_bytes, context);
                // Where only its end ends a body, it may not be seen: of a socket that is not TCP's no state tells.
                let is_last = is_done && *framing == Framing::UntilClose;
                if is_over || is_last {
                    self.outgoing = if is_last { Side::Lost } else { Side::Head(Vec::new()) };
                    self.end_first(origin, HttpFinish::Done, context);
                }
                Ok(())
            }
        }
    }

    /// The head of a response is complete.
    fn respond(&mut self, response: &head::Response, origin: Origin, context: &mut Context<'_>) {
        let Some(exchange) = self.exchanges.front_mut() else { return };
        if matches!(response.status, 100..=199) {
            if response.status == 101 {
                exchange.status = 101;
                context.counts.upgraded += 1;
                self.is_foreign = true;
                self.end_first(origin, HttpFinish::Done, context);
            }
            // The real one is still to come.
            self.outgoing = Side::Head(Vec::new());
            return;
        }
        exchange.status = response.status;
        exchange.streamed = response.format != Format::Whole;
        exchange.encoded = response.is_encoded;
        context.counts.encoded += u64::from(response.is_encoded);
        // Compressed pieces cannot be told apart.
        let format = if response.is_encoded { Format::Whole } else { response.format };
        if response.framing == Framing::None {
            self.outgoing = Side::Head(Vec::new());
            self.end_first(origin, HttpFinish::Done, context);
        } else {
            let outgoing = Outgoing { framing: response.framing.clone(), stream: Stream::new(format) };
            self.outgoing = Side::Body(outgoing);
        }
    }

    /// Remembers bytes (of this exchange, the last one in them) that are not on the wire yet; whether there are any.
    fn hold(&mut self, origin: Origin, exchange: Option<u64>, sent_until: u32, wire_until: u32) -> bool {
        let is_held = sent_until != wire_until;
        if is_held
            && self.held.len() < MAX_HELD
            && let Some(exchange) = exchange
        {
            self.held.push_back(Held { until: sent_until, exchange, sent_ns: origin.time_ns });
        }
        is_held
    }

    pub(super) fn on_wire(&mut self, origin: Origin, wire_until: u32, context: &mut Context<'_>) {
        let origin = Origin { process: self.process, tid: 0, ..origin };
        // Sequence numbers wrap: what is less than half of them behind has left.
        while let Some(held) = self.held.front().filter(|held| wire_until.wrapping_sub(held.until) < 1 << 31)
        {
            let Held { exchange, sent_ns, .. } = *held;
            context.out.push(Event::HttpWire(HttpWire { origin, exchange, sent_ns }));
            self.held.pop_front();
        }
    }

    pub(super) fn closed(&mut self, origin: Origin, context: &mut Context<'_>) {
        let origin = Origin { process: self.process, tid: 0, ..origin };
        let mut finish = match &self.outgoing {
            Side::Body(Outgoing { framing: Framing::UntilClose, .. }) => HttpFinish::Done,
            _ => HttpFinish::Cut,
        };
        while !self.exchanges.is_empty() {
            self.end_first(origin, finish, context);
            finish = HttpFinish::Cut;
        }
    }

    fn end_first(&mut self, origin: Origin, finish: HttpFinish, context: &mut Context<'_>) {
        let Some(exchange) = self.exchanges.pop_front() else { return };
        context.out.push(Event::HttpEnd(HttpEnd {
            origin,
            exchange: exchange.id,
            status: exchange.status,
            finish,
            streamed: exchange.streamed,
            encoded: exchange.encoded,
            events: exchange.events,
            tokens: exchange.tokens,
            refused_writes: exchange.refused_writes,
        }));
    }
}

impl Exchange {
    /// Tells of the pieces of one write.
    fn report(
        &mut self,
        origin: Origin,
        batches: &[Batch],
        events: u32,
        bytes: u64,
        held_bytes: u32,
        context: &mut Context<'_>,
    ) {
        self.events = self.events.saturating_add(events);
        for Batch { choice, tokens } in batches {
            let index = *choice as usize;
            if self.choices.len() <= index {
                self.choices.resize(index + 1, 0);
            }
            let first_token = self.choices[index];
            self.choices[index] = first_token.saturating_add(*tokens);
            self.tokens = self.tokens.saturating_add(*tokens);
            context.out.push(Event::HttpSend(HttpSend {
                origin,
                exchange: self.id,
                choice: *choice,
                first_token,
                tokens: *tokens,
                events,
                bytes,
                held_bytes,
            }));
        }
    }
}

fn piece_of(io: &SocketIo, moved: u64) -> Piece<'_> {
    let captured = io.bytes.len().min(usize::try_from(moved).unwrap_or(usize::MAX));
    Piece { bytes: &io.bytes[..captured], gap: moved - captured as u64 }
}

fn begins_request(bytes: &[u8]) -> bool {
    const METHODS: [&[u8]; 7] = [b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH "];
    METHODS.iter().any(|method| bytes.starts_with(method))
}

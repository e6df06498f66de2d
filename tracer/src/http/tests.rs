use proptest::prelude::*;

use super::*;
use crate::event::{HttpBegin, HttpEnd, HttpFinish, HttpSend, Origin, ProcessId};

const PROCESS: ProcessId = ProcessId { tgid: 7, start_ticks: 1 };
/// What is captured of a write and of a read.
const SEND: usize = tracer_abi::socket::SEND_BYTES;
const RECV: usize = tracer_abi::socket::RECV_BYTES;

/// A connection that is fed byte strings.
struct Wire {
    http: Http,
    time_ns: u64,
    sequence: u32,
    events: Vec<Event>,
}

impl Wire {
    fn new() -> Self {
        Self { http: Http::default(), time_ns: 1_000, sequence: 1, events: Vec::new() }
    }

    fn io(&mut self, action: SocketAction, bytes: &[u8]) {
        self.time_ns += 10;
        let origin = Origin { time_ns: self.time_ns, process: PROCESS, tid: 7, cpu: 0 };
        let io = SocketIo { origin, cookie: 99, action, bytes: bytes.to_vec(), local_port: 80 };
        self.http.feed(&io, &mut self.events);
    }

    fn read(&mut self, bytes: &[u8]) {
        let captured = &bytes[..bytes.len().min(RECV)];
        self.io(SocketAction::Recv { bytes: bytes.len() as u64, arrived_ns: Some(self.time_ns) }, captured);
    }

    fn write(&mut self, bytes: &[u8]) {
        self.sequence = self.sequence.wrapping_add(bytes.len() as u32);
        let action = SocketAction::Send {
            result: bytes.len() as i64,
            sent_until: self.sequence,
            wire_until: self.sequence,
        };
        self.io(action, &bytes[..bytes.len().min(SEND)]);
    }

    fn close(&mut self) {
        self.io(SocketAction::Closed, &[]);
    }

    fn begins(&self) -> Vec<&HttpBegin> {
        self.events.iter().filter_map(|e| if let Event::HttpBegin(e) = e { Some(e) } else { None }).collect()
    }

    fn sends(&self) -> Vec<&HttpSend> {
        self.events.iter().filter_map(|e| if let Event::HttpSend(e) = e { Some(e) } else { None }).collect()
    }

    fn ends(&self) -> Vec<&HttpEnd> {
        self.events.iter().filter_map(|e| if let Event::HttpEnd(e) = e { Some(e) } else { None }).collect()
    }

    fn tokens(&self) -> u32 {
        self.sends().iter().map(|send| send.tokens).sum()
    }
}

fn request(id: &str, body: &str) -> Vec<u8> {
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    format!(
        "POST /v1/chat/completions?key=secret HTTP/1.1\r\nHost: x\r\nX-Request-ID: {id}\r\ntraceparent: {trace}\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

const HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";

fn event(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
}

/// A whole streamed answer of so many tokens, with what surrounds them.
fn answer(tokens: usize) -> Vec<u8> {
    let mut bytes = HEAD.to_vec();
    bytes.extend(chunk(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
    ));
    for number in 0..tokens {
        bytes.extend(chunk(&event(&format!("word{number}"))));
    }
    bytes.extend(chunk(
        ": keep-alive\n\ndata: {\"choices\":[],\"usage\":{\"total_tokens\":9}}\n\ndata: [DONE]\n\n",
    ));
    bytes.extend(b"0\r\n\r\n");
    bytes
}

#[test]
fn a_streamed_answer() {
    let mut wire = Wire::new();
    wire.read(&request("abc", "{\"stream\":true}"));
    wire.write(HEAD);
    wire.write(&chunk(&event("Hello")));
    wire.write(&chunk(&(event(" big") + &event(" world"))));
    wire.write(&chunk("data: [DONE]\n\n"));
    wire.write(b"0\r\n\r\n");
    let begin = wire.begins()[0].clone();
    assert_eq!((begin.method.as_str(), begin.path.as_str()), ("POST", "/v1/chat/completions"));
    assert_eq!((begin.request_id.as_str(), begin.local_port), ("abc", 80));
    assert_eq!(begin.trace_id.map(|id| id[..2].to_vec()), Some(vec![0x4b, 0xf9]));
    assert_eq!((begin.arrived_ns, begin.read_ns), (Some(1_000), 1_010));
    let sends: Vec<_> = wire.sends().iter().map(|send| (send.first_token, send.tokens)).collect();
    assert_eq!(sends, [(0, 1), (1, 2)]);
    let end = wire.ends()[0];
    assert_eq!((end.status, end.finish, end.tokens, end.events), (200, HttpFinish::Done, 3, 4));
    assert!(end.streamed && !end.encoded);
}

#[test]
fn bodies_without_tokens_end_where_their_head_says() {
    let mut wire = Wire::new();
    wire.read(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n");
    wire.read(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    wire.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n");
    wire.read(&request("whole", "{}"));
    wire.write(b"HTTP/1.1 100 Continue\r\n\r\n");
    wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\nhello");
    assert_eq!(wire.ends().len(), 2);
    wire.write(b" world");
    let statuses: Vec<_> = wire.ends().iter().map(|end| (end.status, end.tokens, end.finish)).collect();
    assert_eq!(
        statuses,
        [(200, 0, HttpFinish::Done), (204, 0, HttpFinish::Done), (200, 0, HttpFinish::Done)]
    );
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let mut wire = Wire::new();
    let requests: Vec<u8> = ["a", "b", "c"].iter().flat_map(|id| request(id, "{}")).collect();
    wire.read(&requests);
    let answers: Vec<u8> = [3, 1, 2].iter().flat_map(|tokens| answer(*tokens)).collect();
    wire.write(&answers);
    let ids: Vec<_> = wire.begins().iter().map(|begin| begin.request_id.as_str()).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    let ends: Vec<_> = wire.ends().iter().map(|end| (end.exchange, end.tokens)).collect();
    assert_eq!(ends, [(0, 3), (1, 1), (2, 2)]);
}

#[test]
fn choices_are_counted_each() {
    let mut wire = Wire::new();
    wire.read(&request("n", "{}"));
    wire.write(HEAD);
    for (index, text) in [(0, "a"), (1, "b"), (1, "c"), (0, "")] {
        wire.write(&chunk(&format!("data: {{\"choices\":[{{\"index\":{index},\"text\":\"{text}\"}}]}}\n\n")));
    }
    let sends: Vec<_> = wire.sends().iter().map(|send| (send.choice, send.first_token)).collect();
    assert_eq!(sends, [(0, 0), (1, 0), (1, 1)]);
}

#[test]
fn lines_of_json_and_other_servers() {
    let mut wire = Wire::new();
    wire.read(&request("ollama", "{}"));
    wire.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    wire.write(&chunk("{\"message\":{\"content\":\"a\"},\"done\":false}\n"));
    wire.write(&chunk("{\"message\":{\"content\":\"\"},\"done\":true}\n"));
    wire.write(b"0\r\n\r\n");
    wire.read(&request("tgi", "{}"));
    wire.write(HEAD);
    wire.write(&chunk("data: {\"token\":{\"id\":5,\"text\":\"a\"}}\n\ndata: plain words\n\n"));
    let tokens: Vec<_> = wire.sends().iter().map(|send| (send.exchange, send.tokens)).collect();
    assert_eq!(tokens, [(0, 1), (1, 2)]);
}

#[test]
fn what_was_not_captured_is_skipped_and_not_invented() {
    let mut wire = Wire::new();
    wire.read(&request("long", &"x".repeat(64 << 10)));
    wire.write(HEAD);
    wire.write(&chunk(&event(&"w".repeat(10_000))));
    wire.write(&chunk(&event(&"w".repeat(60_000))));
    wire.write(&chunk(&event("short")));
    wire.write(b"0\r\n\r\n");
    assert_eq!((wire.tokens(), wire.ends()[0].finish), (3, HttpFinish::Done));
    // The connection goes on.
    wire.read(&request("next", "{}"));
    wire.write(&answer(2));
    assert_eq!((wire.begins()[1].request_id.as_str(), wire.ends()[1].tokens), ("next", 2));
    assert_eq!(wire.http.counts().lost, 0);
}

#[test]
fn a_head_beyond_the_capture_is_a_request_without_a_name_and_the_next_is_found() {
    let mut wire = Wire::new();
    let long = format!("GET / HTTP/1.1\r\nCookie: {}\r\nX-Request-ID: late\r\n\r\n", "c".repeat(1 << 20));
    wire.read(long.as_bytes());
    wire.write(&answer(1));
    wire.read(&request("next", "{}"));
    wire.write(&answer(1));
    let seen: Vec<_> =
        wire.begins().iter().map(|begin| (begin.request_id.as_str(), begin.head_cut)).collect();
    assert_eq!(seen, [("", true), ("next", false)]);
    assert_eq!(wire.ends().len(), 2);
}

#[test]
fn ends_of_connections() {
    let mut wire = Wire::new();
    wire.read(&request("gone", "{}"));
    wire.write(HEAD);
    wire.write(&chunk(&event("a")));
    wire.close();
    assert_eq!((wire.ends()[0].finish, wire.ends()[0].tokens), (HttpFinish::Cut, 1));
    assert_eq!(wire.ends()[0].origin.process, PROCESS);
    let mut wire = Wire::new();
    wire.read(&request("until close", "{}"));
    wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n");
    wire.write(event("a").as_bytes());
    wire.close();
    assert_eq!((wire.ends()[0].finish, wire.ends()[0].tokens), (HttpFinish::Done, 1));
}

#[test]
fn identifiers_are_capped_and_cleaned() {
    let mut wire = Wire::new();
    let id = format!("\x1b[31m../../etc/passwd{}", "x".repeat(1_500));
    wire.read(&request(&id, "{}"));
    // A control character is no header: the head is refused, not the id passed on.
    assert!(wire.begins().is_empty());
    assert_eq!(wire.http.counts().lost, 1);
    wire.read(&request(&"y".repeat(1_500), "{}"));
    assert_eq!(wire.begins()[0].request_id.len(), 256);
    wire.write(&answer(1));
    let mut bytes = b"GET / HTTP/1.1\r\nX-Request-ID: \xff\xfe ok\r\n\r\n".to_vec();
    wire.read(&bytes);
    assert!(wire.begins()[1].request_id.ends_with(" ok") && wire.begins()[1].request_id.is_char_boundary(0));
    bytes.clear();
}

#[test]
fn held_bytes_are_followed_onto_the_wire() {
    let mut wire = Wire::new();
    wire.read(&request("held", "{}"));
    wire.write(HEAD);
    let text = chunk(&event("a"));
    let until = wire.sequence.wrapping_add(text.len() as u32);
    let action =
        SocketAction::Send { result: text.len() as i64, sent_until: until, wire_until: wire.sequence };
    wire.io(action, &text);
    let sent_ns = wire.time_ns;
    assert_eq!(wire.sends()[0].held_bytes as usize, text.len());
    wire.io(SocketAction::Wire { wire_until: until.wrapping_sub(1) }, &[]);
    let wires = |wire: &Wire| {
        let of =
            |e: &Event| if let Event::HttpWire(e) = e { Some((e.sent_ns, e.origin.time_ns)) } else { None };
        wire.events.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(wires(&wire), []);
    wire.io(SocketAction::Wire { wire_until: until }, &[]);
    assert_eq!(wires(&wire), [(sent_ns, wire.time_ns)]);
}

#[test]
fn compressed_and_foreign_connections_are_said_to_be() {
    let mut wire = Wire::new();
    wire.read(&request("zip", "{}"));
    let head =
        String::from_utf8(HEAD.to_vec()).unwrap().replace("\r\n\r\n", "\r\nContent-Encoding: gzip\r\n\r\n");
    wire.write(head.as_bytes());
    wire.write(&chunk(&event("a")));
    wire.write(b"0\r\n\r\n");
    assert!(wire.ends()[0].encoded && wire.tokens() == 0);
    wire.read(b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n\r\n");
    wire.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n");
    wire.write(b"\x81\x05hello");
    assert_eq!((wire.http.counts().encoded, wire.http.counts().upgraded), (1, 1));
}

proptest! {
    /// However reads and writes are cut, the same is seen.
    #[test]
    fn cuts_make_no_difference(
        tokens in prop::collection::vec(0usize..12, 1..4),
        cuts in prop::collection::vec(1usize..200, 1..40),
    ) {
        let mut wire = Wire::new();
        let mut sizes = cuts.iter().copied().cycle();
        for (number, tokens) in tokens.iter().enumerate() {
            let request = request(&format!("r{number}"), "{\"a\":1}");
            let mut rest = request.as_slice();
            while !rest.is_empty() {
                let (part, next) = rest.split_at(sizes.next().unwrap().min(rest.len()));
                wire.read(part);
                rest = next;
            }
            let answer = answer(*tokens);
            let mut rest = answer.as_slice();
            while !rest.is_empty() {
                let (part, next) = rest.split_at(sizes.next().unwrap().min(rest.len()));
                wire.write(part);
                rest = next;
            }
        }
        let seen: Vec<_> = wire.ends().iter().map(|end| (end.tokens as usize, end.finish)).collect();
        let expected: Vec<_> = tokens.iter().map(|tokens| (*tokens, HttpFinish::Done)).collect();
        prop_assert_eq!(seen, expected);
        prop_assert_eq!(wire.begins().len(), tokens.len());
        prop_assert_eq!(wire.http.counts().lost, 0);
    }

    #[test]
    fn no_bytes_make_it_panic_or_invent_requests(
        moves in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..64), 0u64..10_000), 0..40),
    ) {
        let mut wire = Wire::new();
        wire.read(&request("first", "{}"));
        for (reads, bytes, more) in moves {
            let moved = bytes.len() as u64 + more;
            let action = if reads {
                SocketAction::Recv { bytes: moved, arrived_ns: None }
            } else {
                SocketAction::Send { result: moved as i64, sent_until: 5, wire_until: 3 }
            };
            wire.io(action, &bytes);
        }
        wire.close();
        prop_assert_eq!(wire.begins().len(), wire.ends().len());
    }
}

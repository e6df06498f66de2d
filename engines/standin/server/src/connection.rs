//! A client's connection, on a thread of its own: reads requests, hands them to the engine, writes their tokens.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::json;
use tracer_marks::{self as marks, AttrValue, FinishReason, RequestBegin};

use crate::clock::now_ns;
use crate::engine::{Job, Token};
use crate::http::{self, Head, Refused};
use crate::random::chance;
use crate::serve::Server;
use crate::truth::Record;

/// Largest body of a request, in bytes.
const MAX_BODY: usize = 4 << 20;
/// Most tokens that a request may ask for.
const MAX_TOKENS: u32 = 100_000;
/// A write that blocked for longer goes to the truth log, in ns.
const CLIENT_STALL_NS: u64 = 1_000_000;
/// First part of the hash that decides which token marks are withheld.
const TOKENS: u64 = 103;

/// Body of `POST /v1/completions`; what is not here is ignored.
#[derive(Debug, Deserialize)]
struct Completion {
    #[serde(default)]
    model: String,
    prompt: Prompt,
    #[serde(default = "default_max_tokens")]
    max_tokens: u32,
    #[serde(default)]
    stream: bool,
    /// The tenant.
    #[serde(default)]
    user: String,
    /// Not of the API that this server imitates: which version of the model shall answer.
    #[serde(default)]
    model_version: String,
}

const fn default_max_tokens() -> u32 {
    16
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// A word is a token.
    fn tokens(&self) -> u32 {
        let count = match self {
            Self::Text(text) => text.split_whitespace().count(),
            Self::Tokens(tokens) => tokens.len(),
        };
        u32::try_from(count).unwrap_or(u32::MAX).max(1)
    }
}

/// One client.
#[derive(Debug)]
pub(crate) struct Connection {
    server: Arc<Server>,
    stream: TcpStream,
    /// Bytes that were read and not used yet.
    input: Vec<u8>,
}

/// A request that is being answered.
struct Request {
    key: u64,
    id: String,
    tenant_id: String,
    model: String,
    model_version: String,
    created: u64,
    received_ns: u64,
    prompt_tokens: u32,
    streams: bool,
    /// Tells the engine that nobody waits any more.
    cancelled: Arc<AtomicBool>,
    /// Closed when the engine drops the job.
    tokens: Receiver<Token>,
}

impl Connection {
    pub(crate) fn new(server: Arc<Server>, stream: TcpStream) -> Self {
        Self { server, stream, input: Vec::new() }
    }

    /// Serves requests until the client goes away or something is wrong with the connection.
    pub(crate) fn run(mut self) {
        // An error means that the client is gone: nobody to tell.
        while matches!(self.serve_one(), Ok(true)) {}
    }

    /// Serves one request; `false`: the connection ends.
    fn serve_one(&mut self) -> io::Result<bool> {
        let head = loop {
            match Head::parse(&self.input) {
                Ok(Some((head, used))) => {
                    self.input.drain(..used);
                    break head;
                }
                Ok(None) if self.read()? => {}
                Ok(None) => return Ok(false),
                Err(refused) => return self.refuse(refused, None, true),
            }
        };
        let received_ns = now_ns();
        let id = head.request_id().map(str::to_owned);
        let body = match self.body(&head)? {
            Ok(body) => body,
            Err(refused) => return self.refuse(refused, id.as_deref(), true),
        };
        let keep = !head.closes();
        match (head.method.as_str(), head.path.as_str()) {
            ("POST", "/v1/completions") => match self.begin(&head, &body, received_ns) {
                Ok((request, job)) => Ok(self.answer(&request, job)? && keep),
                Err(refused) => self.refuse(refused, id.as_deref(), !keep),
            },
            ("GET", "/health") => self.respond(200, r#"{"status":"ok"}"#, keep),
            ("GET", "/stats") => {
                let stats = self.server.summary().to_string();
                self.respond(200, &stats, keep)
            }
            ("POST", "/shutdown") => {
                self.respond(200, r#"{"status":"stopping"}"#, false)?;
                self.server.ask_to_stop();
                Ok(false)
            }
            (_, "/v1/completions" | "/health" | "/stats" | "/shutdown") => {
                self.refuse(Refused(405, "not with this method"), id.as_deref(), !keep)
            }
            _ => self.refuse(Refused(404, "no such path"), id.as_deref(), !keep),
        }
    }

    /// Reads more input; `false`: there is no more.
    fn read(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 << 10];
        let n = self.stream.read(&mut buffer)?;
        self.input.extend_from_slice(&buffer[..n]);
        Ok(n > 0)
    }

    fn body(&mut self, head: &Head) -> io::Result<Result<Vec<u8>, Refused>> {
        let bytes = match head.body_bytes() {
            Ok(bytes) if bytes <= MAX_BODY => bytes,
            Ok(_) => return Ok(Err(Refused(413, "the body is too long"))),
            Err(refused) => return Ok(Err(refused)),
        };
        if self.input.len() < bytes
            && head.header("expect").is_some_and(|v| v.eq_ignore_ascii_case("100-continue"))
        {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        while self.input.len() < bytes {
            if !self.read()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(Ok(self.input.drain(..bytes).collect()))
    }

    fn respond(&mut self, status: u16, body: &str, keep: bool) -> io::Result<bool> {
        self.stream.write_all(http::response(status, None, body, !keep).as_bytes())?;
        Ok(keep)
    }

    fn refuse(&mut self, Refused(status, why): Refused, id: Option<&str>, close: bool) -> io::Result<bool> {
        let body =
            json!({"error": {"message": why, "type": "invalid_request_error", "code": status}}).to_string();
        self.stream.write_all(http::response(status, id, &body, close).as_bytes())?;
        Ok(!close)
    }

    /// Takes a request in: marks it and makes the engine's job.
    fn begin(&self, head: &Head, body: &[u8], received_ns: u64) -> Result<(Request, Job), Refused> {
        let completion: Completion = serde_json::from_slice(body).map_err(|_| {
            Refused(400, "the body must be JSON with `prompt` and, if wanted, `max_tokens` and `stream`")
        })?;
        if !(1..=MAX_TOKENS).contains(&completion.max_tokens) {
            return Err(Refused(400, "max_tokens must be from 1 to 100000"));
        }
        let server = &self.server;
        let key = server.next_key();
        let id = head.request_id().map_or_else(|| format!("req-{}-{key}", server.start_ns), str::to_owned);
        let context = head.trace_context().unwrap_or_default();
        let marked = !server.options.no_marks;
        let prompt_tokens = completion.prompt.tokens();
        if marked {
            marks::request_begin(&RequestBegin {
                request: key,
                received_ns: Some(received_ns),
                trace_id: context.trace_id,
                span_id: context.span_id,
                trace_flags: context.flags.into(),
                prompt_tokens,
                request_id: &id,
                tenant_id: &completion.user,
                model: &completion.model,
                model_version: &completion.model_version,
                ..RequestBegin::default()
            });
            marks::attr(key, 0, "max_tokens", AttrValue::Number(completion.max_tokens.into()));
            marks::phase_begin(key, "first_token");
        }
        let (send, tokens) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let (max_tokens, theirs) = (completion.max_tokens, Arc::clone(&cancelled));
        let job = Job { key, prompt_tokens, max_tokens, tokens: send, cancelled: theirs };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let request = Request {
            key,
            id,
            tenant_id: completion.user,
            model: completion.model,
            model_version: completion.model_version,
            created,
            received_ns,
            prompt_tokens,
            streams: completion.stream,
            cancelled,
            tokens,
        };
        Ok((request, job))
    }

    /// Answers a request; `false`: the connection ends.
    fn answer(&mut self, request: &Request, job: Job) -> io::Result<bool> {
        let server = Arc::clone(&self.server);
        let _active = server.count(request.received_ns);
        server.intake.push(Arc::new(job));
        let mut output_tokens = 0;
        let result = self.write_tokens(request, &mut output_tokens);
        let finish = match &result {
            Ok(true) => FinishReason::Length,
            Ok(false) => FinishReason::Error,
            Err(_) => FinishReason::Cancelled,
        };
        request.cancelled.store(true, Ordering::Relaxed);
        if !server.options.no_marks {
            marks::request_end(request.key, output_tokens, finish);
        }
        server.truth.push(|| Record::Request {
            key: request.key,
            id: request.id.clone(),
            tenant_id: request.tenant_id.clone(),
            model: request.model.clone(),
            model_version: request.model_version.clone(),
            received_ns: request.received_ns,
            end_ns: now_ns(),
            prompt_tokens: request.prompt_tokens,
            output_tokens,
            finish: match finish {
                FinishReason::Length => "length",
                FinishReason::Cancelled => "cancelled",
                _ => "error",
            },
        });
        result
    }

    /// Writes the tokens as the engine generates them; `false`: the engine stopped before the last.
    fn write_tokens(&mut self, request: &Request, written: &mut u32) -> io::Result<bool> {
        let mut whole = String::new();
        // Ends without the last token when the engine has stopped: it drops the job, and with it the sender.
        while let Ok(token) = self.next_token(request) {
            let text = format!(" t{}", token.index);
            let mut output = String::new();
            if request.streams {
                if token.index == 0 {
                    output.push_str(&http::stream_head(&request.id));
                }
                http::push_event(&mut output, &request.body(&text, token.last));
            }
            if token.last && request.streams {
                http::push_event(&mut output, "[DONE]");
                output.push_str(http::LAST_CHUNK);
            } else if token.last {
                whole.push_str(&text);
                output = http::response(200, Some(&request.id), &request.body(&whole, true), false);
            } else if !request.streams {
                whole.push_str(&text);
            }
            self.hand_over(request, token, output.as_bytes())?;
            *written += 1;
            if token.last {
                return Ok(true);
            }
        }
        if *written == 0 || !request.streams {
            self.refuse(Refused(503, "the server stops"), Some(&request.id), true)?;
        }
        Ok(false)
    }

    fn next_token(&self, request: &Request) -> Result<Token, std::sync::mpsc::RecvError> {
        let token = request.tokens.recv()?;
        if token.index == 0 && !self.server.options.no_marks {
            marks::phase_end(request.key, "first_token");
        }
        Ok(token)
    }

    /// Marks a token and writes it.
    fn hand_over(&mut self, request: &Request, token: Token, output: &[u8]) -> io::Result<()> {
        let (key, index) = (request.key, token.index);
        let options = &self.server.options;
        let withheld = chance(options.seed, &[TOKENS, key, index.into()]) * 100.0;
        let marked = !options.no_marks && withheld >= options.withhold_tokens;
        let stamp_ns = now_ns();
        if marked {
            marks::token(key, 0, index);
        }
        let result = self.write(output);
        let end_ns = now_ns();
        self.server.count_token(stamp_ns);
        let truth = &self.server.truth;
        truth.push(|| Record::Token {
            key,
            index,
            stamp_ns,
            written_ns: if result.is_ok() { end_ns } else { 0 },
            marked,
        });
        if let Ok(Some(begin_ns)) = result
            && end_ns - begin_ns >= CLIENT_STALL_NS
        {
            truth.push(|| Record::Stall {
                cause: "client",
                begin_ns,
                end_ns,
                batch_id: None,
                key: Some(key),
            });
        }
        result.map(|_| ())
    }

    /// Writes all; returns since when (CLOCK_MONOTONIC ns) it had to wait for room in the send buffer, if it had to.
    fn write(&mut self, bytes: &[u8]) -> io::Result<Option<u64>> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the descriptor is open and the buffer valid.
        let sent = unsafe { libc::send(self.stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
        let sent = match usize::try_from(sent) {
            Ok(sent) => sent,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == ErrorKind::WouldBlock => 0,
                error => return Err(error),
            },
        };
        if sent == bytes.len() {
            return Ok(None);
        }
        let begin_ns = now_ns();
        self.stream.write_all(&bytes[sent..])?;
        Ok(Some(begin_ns))
    }
}

impl Request {
    /// Body of a completion, or of a part of it.
    fn body(&self, text: &str, last: bool) -> String {
        let finish = if last { Some("length") } else { None };
        json!({
            "id": format!("cmpl-{}", self.key),
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}],
        })
        .to_string()
    }
}

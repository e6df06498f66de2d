//! Heads of requests and responses.

use super::{Config, framing::Framing};
use crate::event::mark::clean;

/// Most bytes of a head that are gathered, and most headers of it.
pub(super) const MAX_BYTES: usize = 1 << 16;
const MAX_HEADERS: usize = 128;
/// Longest texts that are kept, in bytes.
const MAX_ID: usize = 256;
const MAX_PATH: usize = 512;
const MAX_METHOD: usize = 16;

/// What of a request's head matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) request_id: String,
    pub(super) trace_id: Option<[u8; 16]>,
    pub(super) span_id: Option<[u8; 8]>,
    pub(super) framing: Framing,
    pub(super) is_upgrade: bool,
}

/// What of a response's head matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) framing: Framing,
    pub(super) format: Format,
    pub(super) is_encoded: bool,
}

/// How the pieces of a response are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// `text/event-stream`.
    Events,
    /// One JSON value a line.
    Lines,
    /// Not in pieces.
    Whole,
}

/// What parsing of a head came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parsed<T> {
    /// The head, and how many bytes it had.
    Whole(T, usize),
    /// Its end is still to come; what there is so far.
    Partial(T),
    /// Not a head.
    Bad,
}

pub(super) fn request(bytes: &[u8], config: &Config) -> Parsed<Request> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    let status = parsed.parse(bytes);
    let found = |parsed: &httparse::Request<'_, '_>| {
        let path = parsed.path.unwrap_or_default().split('?').next().unwrap_or_default();
        let trace = header(parsed.headers, "traceparent").and_then(traceparent);
        let id = config.id_headers.iter().find_map(|name| header(parsed.headers, name));
        Request {
            method: capped(parsed.method.unwrap_or_default().as_bytes(), MAX_METHOD),
            path: capped(path.as_bytes(), MAX_PATH),
            request_id: capped(id.unwrap_or_default(), MAX_ID),
            trace_id: trace.map(|(trace, _)| trace),
            span_id: trace.map(|(_, span)| span),
            framing: framing(parsed.headers).unwrap_or(Framing::None),
            is_upgrade: parsed.method == Some("CONNECT"),
        }
    };
    match status {
        Ok(httparse::Status::Complete(length)) => Parsed::Whole(found(&parsed), length),
        Ok(httparse::Status::Partial) => Parsed::Partial(found(&parsed)),
        Err(_) => Parsed::Bad,
    }
}

/// `answers_head`: to a HEAD request, which has no body whatever its headers say.
pub(super) fn response(bytes: &[u8], answers_head: bool) -> Parsed<Response> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut headers);
    let status = parsed.parse(bytes);
    let code = parsed.code.unwrap_or(0);
    let has_no_body = answers_head || matches!(code, 100..=199 | 204 | 304);
    let found = Response {
        status: code,
        framing: if has_no_body {
            Framing::None
        } else {
            framing(parsed.headers).unwrap_or(Framing::UntilClose)
        },
        format: format(header(parsed.headers, "content-type").unwrap_or_default()),
        is_encoded: header(parsed.headers, "content-encoding")
            .is_some_and(|encoding| !encoding.eq_ignore_ascii_case(b"identity")),
    };
    match status {
        Ok(httparse::Status::Complete(length)) => Parsed::Whole(found, length),
        Ok(httparse::Status::Partial) => Parsed::Partial(found),
        Err(_) => Parsed::Bad,
    }
}

fn header<'a>(headers: &[httparse::Header<'a>], name: &str) -> Option<&'a [u8]> {
    headers.iter().find(|header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
}

/// `None`: neither a length nor chunks.
fn framing(headers: &[httparse::Header<'_>]) -> Option<Framing> {
    let coding = header(headers, "transfer-encoding").and_then(|value| std::str::from_utf8(value).ok());
    if coding.is_some_and(|coding| {
        coding.rsplit(',').next().is_some_and(|last| last.trim().eq_ignore_ascii_case("chunked"))
    }) {
        return Some(Framing::chunked());
    }
    let length = header(headers, "content-length").and_then(|value| std::str::from_utf8(value).ok());
    length.and_then(|length| length.trim().parse().ok()).map(|length| match length {
        0 => Framing::None,
        length => Framing::Length(length),
    })
}

fn format(content_type: &[u8]) -> Format {
    let kind = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    if kind.eq_ignore_ascii_case(b"text/event-stream") {
        Format::Events
    } else if kind.eq_ignore_ascii_case(b"application/x-ndjson")
        || kind.eq_ignore_ascii_case(b"application/jsonl")
    {
        Format::Lines
    } else {
        Format::Whole
    }
}

/// W3C Trace Context: `00-<32 hex>-<16 hex>-<flags>`; all zeroes are no id.
fn traceparent(value: &[u8]) -> Option<([u8; 16], [u8; 8])> {
    let text = std::str::from_utf8(value).ok()?.trim();
    let mut parts = text.split('-');
    let version = parts.next().filter(|version| version.len() == 2 && *version != "ff")?;
    u8::from_str_radix(version, 16).ok()?;
    let (trace, span) = (hex(parts.next()?)?, hex(parts.next()?)?);
    (trace != [0; 16] && span != [0; 8]).then_some((trace, span))
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

fn capped(bytes: &[u8], most: usize) -> String {
    clean(bytes.get(..most).unwrap_or(bytes))
}

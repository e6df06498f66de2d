//! HTTP/1.1, as much as the server needs: request heads, response heads, chunks.

use std::fmt::Write as _;

/// Longest head of a request, in bytes.
pub(crate) const MAX_HEAD: usize = 16 << 10;

/// The head of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Without query.
    pub(crate) path: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

/// A head that is refused: status and reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) u16, pub(crate) &'static str);

impl Head {
    /// A head at the beginning of `bytes`, and how many bytes it takes; `None`: not all of it is there yet.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Refused> {
        let Some(end) = bytes.windows(4).take(MAX_HEAD).position(|window| window == b"\r\n\r\n") else {
            return if bytes.len() > MAX_HEAD { Err(Refused(431, "the head is too long")) } else { Ok(None) };
        };
        let text = std::str::from_utf8(&bytes[..end]).map_err(|_| Refused(400, "the head is not UTF-8"))?;
        let mut lines = text.split("\r\n");
        let mut words = lines.next().unwrap_or("").split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Refused(400, "bad request line"));
        };
        if version != "HTTP/1.1" {
            return Err(Refused(505, "only HTTP/1.1 is spoken here"));
        }
        let headers = lines
            .map(|line| {
                let (name, value) = line.split_once(':')?;
                Some((name.to_ascii_lowercase(), value.trim().to_owned()))
            })
            .collect::<Option<_>>()
            .ok_or(Refused(400, "bad header"))?;
        let path = target.split('?').next().unwrap_or("").to_owned();
        Ok(Some((Self { method: method.to_owned(), path, headers }, end + 4)))
    }

    /// The first header of this name (in lower case).
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// Whether the connection ends with the answer.
    pub(crate) fn closes(&self) -> bool {
        self.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    /// Bytes of the body.
    pub(crate) fn body_bytes(&self) -> Result<usize, Refused> {
        if self.header("transfer-encoding").is_some() {
            return Err(Refused(501, "bodies need a Content-Length"));
        }
        self.header("content-length")
            .map_or(Ok(0), |value| value.parse().map_err(|_| Refused(400, "bad Content-Length")))
    }

    /// The id that the client gave the request, if it is short and printable.
    pub(crate) fn request_id(&self) -> Option<&str> {
        let id = self.header("x-request-id")?;
        (!id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic())).then_some(id)
    }

    /// W3C trace context.
    pub(crate) fn trace_context(&self) -> Option<TraceContext> {
        TraceContext::parse(self.header("traceparent")?)
    }
}

/// What a `traceparent` header says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace_id: [u8; 16],
    pub(crate) span_id: [u8; 8],
    pub(crate) flags: u8,
}

impl TraceContext {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let (version, trace_id, span_id) = (parts.next()?, parts.next()?, parts.next()?);
        let [version] = hex::<1>(version)?;
        let context =
            Self { trace_id: hex(trace_id)?, span_id: hex(span_id)?, flags: hex::<1>(parts.next()?)?[0] };
        let complete = version != 0 || parts.next().is_none();
        (version != 0xff && complete && context.trace_id != [0; 16] && context.span_id != [0; 8])
            .then_some(context)
    }
}

/// Exactly `N` bytes in lower-case hexadecimal.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let text = text.as_bytes();
    if text.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}

/// A whole JSON response.
pub(crate) fn response(status: u16, request_id: Option<&str>, body: &str, close: bool) -> String {
    let mut text = format!("HTTP/1.1 {status} {}\r\n", reason(status));
    // Writing to a string does not fail.
    _ = write!(text, "content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    if let Some(id) = request_id {
        _ = write!(text, "x-request-id: {id}\r\n");
    }
    if close {
        text.push_str("connection: close\r\n");
    }
    text.push_str("\r\n");
    text.push_str(body);
    text
}

/// The head of a response whose body is a stream of events.
pub(crate) fn stream_head(request_id: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n\
         transfer-encoding: chunked\r\nx-request-id: {request_id}\r\n\r\n"
    )
}

/// Appends an event as a chunk.
pub(crate) fn push_event(text: &mut String, data: &str) {
    // "data: " and two newlines.
    _ = write!(text, "{:x}\r\ndata: {data}\n\n\r\n", data.len() + 8);
}

/// Ends a chunked body.
pub(crate) const LAST_CHUNK: &str = "0\r\n\r\n";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            _ = Head::parse(&bytes);
        }

        /// A head is found whatever follows it, and not before its last byte has come.
        #[test]
        fn heads_are_found(id in "[!-~]{1,128}", rest: Vec<u8>) {
            let text = format!("POST /v1/completions?x=1 HTTP/1.1\r\nX-Request-ID: {id}\r\nContent-Length: 7\r\n\r\n");
            let mut bytes = text.clone().into_bytes();
            prop_assert_eq!(Head::parse(&bytes[..bytes.len() - 1]), Ok(None));
            bytes.extend(rest);
            let (head, used) = Head::parse(&bytes).unwrap().unwrap();
            prop_assert_eq!(used, text.len());
            prop_assert_eq!((head.method.as_str(), head.path.as_str()), ("POST", "/v1/completions"));
            prop_assert_eq!(head.request_id(), Some(id.as_str()));
            prop_assert_eq!(head.body_bytes(), Ok(7));
        }

        #[test]
        fn trace_contexts_are_read(trace in 1u128.., span in 1u64.., flags: u8) {
            let context = TraceContext::parse(&format!("00-{trace:032x}-{span:016x}-{flags:02x}"));
            let expected = TraceContext { trace_id: trace.to_be_bytes(), span_id: span.to_be_bytes(), flags };
            prop_assert_eq!(context, Some(expected));
        }
    }

    #[test]
    fn bad_heads_are_refused() {
        let status = |text: &str| Head::parse(text.as_bytes()).unwrap_err().0;
        assert_eq!(status("GET /\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1 x\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.0\r\n\r\n"), 505);
        assert_eq!(status("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400);
        assert_eq!(Head::parse(&[b'x'; MAX_HEAD + 1]).unwrap_err().0, 431);
        for bad in [
            "",
            "00",
            "00-0-0-0",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }
}

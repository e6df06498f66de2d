//! HTTP on sockets in every shape that a program may read and write it, and what is no HTTP: this process is the target.

use std::{
    io::{IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::{Event, HttpBegin, HttpEnd, HttpFinish},
    probe::{Options, Session, process},
    timeline::tables::LedgerRow,
};

use crate::{Test, fixture::calls_only};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("http::bytes_one_at_a_time_and_vectored_writes", bytes_one_at_a_time_and_vectored_writes),
    ("http::by_system_calls", by_system_calls),
    ("http::peeking_counts_once", peeking_counts_once),
    ("http::ten_thousand_requests_on_one_connection", ten_thousand_requests_on_one_connection),
    ("http::reset_in_mid_stream", reset_in_mid_stream),
    ("http::written_by_another_thread_and_descriptor", written_by_another_thread_and_descriptor),
    ("http::long_heads_and_hostile_names", long_heads_and_hostile_names),
    ("http::sendfile", sendfile),
    ("http::what_is_no_http", what_is_no_http),
];

pub(crate) const HEAD: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

pub(crate) fn request(id: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nX-Request-ID: {id}\r\nContent-Length: 2\r\n\r\n{{}}")
}

pub(crate) fn chunk(text: &str) -> String {
    let data = format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n");
    format!("{:x}\r\n{data}\r\n", data.len())
}

/// What was seen.
pub(crate) struct Seen {
    pub(crate) begins: Vec<HttpBegin>,
    pub(crate) ends: Vec<HttpEnd>,
    pub(crate) ledger: Vec<LedgerRow>,
}

impl Seen {
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
    }

    /// The one request, and how it ended.
    pub(crate) fn only(&self) -> Result<(&HttpBegin, &HttpEnd)> {
        ensure!(self.begins.len() == 1 && self.ends.len() == 1, "{:?} {:?}", self.begins, self.ends);
        Ok((&self.begins[0], &self.ends[0]))
    }
}

/// Traces this process while a server and a client have one connection.
pub(crate) fn talk(
    server: impl FnOnce(TcpStream) -> Result<()> + Send + 'static,
    client: impl FnOnce(TcpStream) -> Result<()> + Send + 'static,
) -> Result<Seen> {
    talk_over(Options { sockets: true, ..calls_only() }, server, client)
}

fn talk_over(
    options: Options,
    server: impl FnOnce(TcpStream) -> Result<()> + Send + 'static,
    client: impl FnOnce(TcpStream) -> Result<()> + Send + 'static,
) -> Result<Seen> {
    let mut session = Session::start(options, Profiles::builtin())?;
    session.add(&process::find(std::process::id())?)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let (done, end) = mpsc::channel();
    let served = done.clone();
    std::thread::spawn(move || {
        let result = listener.accept().context("accept").and_then(|(stream, _)| server(stream));
        let _gone = served.send(result);
    });
    std::thread::spawn(move || {
        let result = TcpStream::connect(address).context("connect").and_then(|stream| {
            stream.set_nodelay(true)?;
            client(stream)
        });
        let _gone = done.send(result);
    });
    let mut events = Vec::new();
    let patience = Instant::now() + Duration::from_secs(30);
    let mut ended = 0;
    while ended < 2 {
        session.drain(&mut events);
        match end.recv_timeout(Duration::from_millis(2)) {
            Ok(result) => {
                result?;
                ended += 1;
            }
            Err(_) => ensure!(Instant::now() < patience, "the conversation does not end"),
        }
    }
    let ledger = session.stop(&mut events).ledger;
    let mut seen = Seen { begins: Vec::new(), ends: Vec::new(), ledger };
    for event in events {
        match event {
            Event::HttpBegin(begin) => seen.begins.push(begin),
            Event::HttpEnd(end) => seen.ends.push(end),
            _ => {}
        }
    }
    Ok(seen)
}

/// Reads until a request is complete; false at the end of the connection.
pub(crate) fn read_request(stream: &mut TcpStream) -> Result<bool> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while !bytes.ends_with(b"\r\n\r\n{}") {
        match stream.read(&mut buffer)? {
            0 => return Ok(false),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(true)
}

pub(crate) fn read_all(mut stream: TcpStream) -> Result<()> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    Ok(())
}

fn bytes_one_at_a_time_and_vectored_writes() -> Result<()> {
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            let (first, second) = (chunk("Hello"), chunk("world"));
            // An event split over parts, and two in one call.
            let parts = [HEAD, &first[..20], &first[20..], &second].map(|part| IoSlice::new(part.as_bytes()));
            let sent = stream.write_vectored(&parts)?;
            ensure!(sent == HEAD.len() + first.len() + second.len());
            for byte in chunk("slowly").bytes().chain(*b"0\r\n\r\n") {
                stream.write_all(&[byte])?;
            }
            Ok(())
        },
        |mut stream| {
            for byte in request("one-by-one").bytes() {
                stream.write_all(&[byte])?;
                std::thread::sleep(Duration::from_micros(200));
            }
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "one-by-one" && begin.path == "/v1/completions", "{begin:?}");
    ensure!((end.tokens, end.finish, end.status) == (3, HttpFinish::Done, 200), "{end:?}");
    Ok(())
}

/// As on a kernel without hooks for sockets.
fn by_system_calls() -> Result<()> {
    let seen = talk_over(
        Options { socket_syscalls: true, ..calls_only() },
        |mut stream| {
            let mut buffer = [0; 4096];
            ensure!(stream.peek(&mut buffer)? > 0);
            for _ in 0..50 {
                read_request(&mut stream)?;
                let (first, second) = (chunk("Hello"), chunk("world"));
                let parts = [HEAD, &first[..20], &first[20..], &second, "0\r\n\r\n"];
                let parts = parts.map(|part| IoSlice::new(part.as_bytes()));
                ensure!(stream.write_vectored(&parts)? > 0);
            }
            Ok(())
        },
        |mut stream| {
            let length = HEAD.len() + chunk("Hello").len() + chunk("world").len() + 5;
            for number in 0..50 {
                stream.write_all(request(&format!("s{number}")).as_bytes())?;
                stream.read_exact(&mut vec![0; length])?;
            }
            Ok(())
        },
    )?;
    let right =
        seen.begins.iter().enumerate().filter(|(n, begin)| begin.request_id == format!("s{n}")).count();
    ensure!(right == 50 && seen.begins.len() == 50, "{:?}", seen.begins);
    let ends: Vec<_> =
        seen.ends.iter().filter(|end| (end.tokens, end.finish) == (2, HttpFinish::Done)).collect();
    ensure!(ends.len() == 50 && seen.ends.len() == 50, "{:?}", seen.ends);
    Ok(())
}

fn peeking_counts_once() -> Result<()> {
    let seen = talk(
        |mut stream| {
            let mut buffer = [0; 4096];
            ensure!(stream.peek(&mut buffer)? > 0);
            read_request(&mut stream)?;
            stream.write_all(format!("{HEAD}{}0\r\n\r\n", chunk("a")).as_bytes())?;
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("peeked").as_bytes())?;
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "peeked" && end.tokens == 1, "{begin:?} {end:?}");
    Ok(())
}

fn ten_thousand_requests_on_one_connection() -> Result<()> {
    const REQUESTS: usize = 10_000;
    let seen = talk(
        |mut stream| {
            stream.set_nodelay(true)?;
            let answer = format!("{HEAD}{}0\r\n\r\n", chunk("a"));
            while read_request(&mut stream)? {
                stream.write_all(answer.as_bytes())?;
            }
            Ok(())
        },
        |mut stream| {
            let answer = format!("{HEAD}{}0\r\n\r\n", chunk("a"));
            let mut buffer = vec![0; answer.len()];
            for number in 0..REQUESTS {
                stream.write_all(request(&format!("r{number}")).as_bytes())?;
                stream.read_exact(&mut buffer)?;
            }
            Ok(())
        },
    )?;
    let right =
        seen.begins.iter().enumerate().filter(|(n, begin)| begin.request_id == format!("r{n}")).count();
    ensure!(right == REQUESTS && seen.begins.len() == REQUESTS, "{right} of {} ids", seen.begins.len());
    let tokens: u32 = seen.ends.iter().map(|end| end.tokens).sum();
    ensure!(tokens as usize == REQUESTS && seen.ends.len() == REQUESTS, "{tokens} tokens");
    ensure!(seen.count("http_lost") == 0 && seen.count("vital_dropped") == 0, "{:?}", seen.ledger);
    Ok(())
}

/// Closes a connection by RST.
pub(crate) fn close_with_reset(stream: TcpStream) -> Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the option is valid and as long as said.
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as u32,
        )
    };
    ensure!(set == 0);
    Ok(())
}

fn reset_in_mid_stream() -> Result<()> {
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            stream.write_all(HEAD.as_bytes())?;
            // Until the client is gone.
            while stream.write_all(chunk("a").as_bytes()).is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("reset").as_bytes())?;
            let (mut got, mut buffer) = (Vec::new(), [0; 512]);
            while !got.windows(5).any(|window| window == b"data:") {
                let n = stream.read(&mut buffer)?;
                ensure!(n > 0);
                got.extend_from_slice(&buffer[..n]);
            }
            close_with_reset(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "reset" && end.finish == HttpFinish::Cut && end.tokens > 0, "{end:?}");
    ensure!(end.origin.process.tgid == std::process::id(), "{end:?}");
    Ok(())
}

fn written_by_another_thread_and_descriptor() -> Result<()> {
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            let mut other = stream.try_clone()?;
            stream.write_all(HEAD.as_bytes())?;
            let thread = std::thread::spawn(move || -> Result<()> {
                other.write_all((chunk("a") + &chunk("b")).as_bytes())?;
                Ok(())
            });
            thread.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
            stream.write_all(b"0\r\n\r\n")?;
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("dup").as_bytes())?;
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "dup" && end.tokens == 2 && end.finish == HttpFinish::Done, "{end:?}");
    Ok(())
}

fn long_heads_and_hostile_names() -> Result<()> {
    let answer = || format!("{HEAD}{}0\r\n\r\n", chunk("a"));
    let seen = talk(
        move |mut stream| {
            for _ in 0..3 {
                read_request(&mut stream)?;
                stream.write_all(answer().as_bytes())?;
            }
            Ok(())
        },
        move |mut stream| {
            let mut buffer = vec![0; answer().len()];
            let cookie = "c".repeat(1 << 20);
            let long = format!(
                "POST / HTTP/1.1\r\nCookie: {cookie}\r\nX-Request-ID: far\r\nContent-Length: 2\r\n\r\n{{}}"
            );
            for text in [long, request(&"n".repeat(1_200)), request("../../etc/passwd%00\u{202e}")] {
                stream.write_all(text.as_bytes())?;
                stream.read_exact(&mut buffer)?;
            }
            Ok(())
        },
    )?;
    let names: Vec<_> = seen.begins.iter().map(|begin| (begin.request_id.as_str(), begin.head_cut)).collect();
    ensure!(names.len() == 3 && names[0] == ("", true), "{names:?}");
    ensure!(names[1].0.len() == 256 && names[2].0.starts_with("../../etc/passwd%00"), "{names:?}");
    ensure!(!names[2].0.contains('\u{202e}'), "a character that turns text around was kept: {names:?}");
    ensure!(seen.ends.iter().all(|end| end.tokens == 1), "{:?}", seen.ends);
    ensure!(seen.count("http_heads_cut") == 1, "{:?}", seen.ledger);
    Ok(())
}

fn sendfile() -> Result<()> {
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            let mut file = tempfile::tempfile()?;
            file.write_all(&[b'x'; 100_000])?;
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")?;
            let (mut offset, mut left) = (0, 100_000);
            while left > 0 {
                // SAFETY: both descriptors are open, and the offset is valid for reads and writes.
                let sent =
                    unsafe { libc::sendfile(stream.as_raw_fd(), file.as_raw_fd(), &raw mut offset, left) };
                left -= usize::try_from(sent).context("sendfile")?;
            }
            // And the connection goes on.
            read_request(&mut stream)?;
            stream.write_all(format!("{HEAD}{}0\r\n\r\n", chunk("a")).as_bytes())?;
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("file").as_bytes())?;
            let mut buffer = vec![0; 43 + 100_000];
            stream.read_exact(&mut buffer)?;
            stream.write_all(request("after").as_bytes())?;
            read_all(stream)
        },
    )?;
    let ends: Vec<_> = seen.ends.iter().map(|end| (end.tokens, end.finish)).collect();
    ensure!(ends == [(0, HttpFinish::Done), (1, HttpFinish::Done)], "{ends:?}");
    ensure!(seen.begins[1].request_id == "after", "{:?}", seen.begins);
    Ok(())
}

fn what_is_no_http() -> Result<()> {
    let seen = talk(
        |mut stream| {
            let mut buffer = [0; 512];
            ensure!(stream.read(&mut buffer)? > 0);
            stream.write_all(b"+PONG\r\n")?;
            ensure!(stream.read(&mut buffer)? > 0);
            Ok(())
        },
        |mut stream| {
            stream.write_all(b"*1\r\n$4\r\nPING\r\n")?;
            let mut buffer = [0; 64];
            ensure!(stream.read(&mut buffer)? > 0);
            // The beginning of a TLS handshake.
            stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3])?;
            Ok(())
        },
    )?;
    ensure!(seen.begins.is_empty() && seen.ends.is_empty(), "{:?}", seen.begins);
    ensure!(seen.count("socket_tls") == 1, "{:?}", seen.ledger);
    Ok(())
}

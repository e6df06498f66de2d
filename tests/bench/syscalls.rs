//! System calls of the traced process: on a connection whose requests are followed, and on what is no socket.

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context as _, Result, ensure};
use tracer_tests::stats;

use crate::worker::{thread_cpu_ns, timed};

/// A system call that is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Syscall {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) on_socket: bool,
    /// Calls in a batch: 5 to 20 ms with what is done between them.
    pub(crate) calls: u32,
    /// Makes so many; returns their ns of CPU time.
    run: fn(&mut Ends, u32) -> Result<u64>,
}

pub(crate) const WRITE: Syscall = Syscall {
    name: "tcp_write",
    what: "TCP write of a token",
    on_socket: true,
    calls: 1_000,
    run: Ends::write,
};
pub(crate) const READ: Syscall = Syscall {
    name: "tcp_read",
    what: "TCP read of a request",
    on_socket: true,
    calls: 1_000,
    run: Ends::read,
};
const PIPE: Syscall =
    Syscall { name: "pipe", what: "pipe write + read", on_socket: false, calls: 10_000, run: Ends::pipe };
const GETPPID: Syscall =
    Syscall { name: "getppid", what: "getppid", on_socket: false, calls: 50_000, run: Ends::getppid };

/// Everything that is measured.
pub(crate) const ALL: [Syscall; 4] = [WRITE, READ, PIPE, GETPPID];

/// Bytes of a streamed token: a chunk with one event.
pub(crate) const CHUNK_BYTES: usize = 250;
const REQUEST: &[u8] = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nX-Request-ID: bench-1\r\n\
    Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
const EMPTY_ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
const STREAM_END: &[u8] = b"0\r\n\r\n";

/// Both ends of a connection and of a pipe. One thread uses them all: nobody has to be woken, which costs more than what
/// is measured, and differs more.
pub(crate) struct Ends {
    server: TcpStream,
    client: TcpStream,
    pipe: (PipeReader, PipeWriter),
    chunk: Vec<u8>,
    buffer: [u8; 4096],
}

impl Ends {
    pub(crate) fn open() -> Result<Self> {
        let connect = || -> std::io::Result<_> {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let client = TcpStream::connect(listener.local_addr()?)?;
            let (server, _) = listener.accept()?;
            // As servers of streams do: each token leaves at once.
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            Ok((server, client))
        };
        let (server, client) = connect().context("cannot connect to a port of 127.0.0.1")?;
        let pipe = std::io::pipe().context("cannot make a pipe")?;
        Ok(Self { server, client, pipe, chunk: chunk(), buffer: [0; 4096] })
    }

    /// ns of CPU time of this thread in so many calls; `None`: there is no system call of this name here.
    pub(crate) fn measure(&mut self, name: &str, calls: u32) -> Result<Option<u64>> {
        let Some(syscall) = ALL.iter().find(|syscall| syscall.name == name) else { return Ok(None) };
        (syscall.run)(self, calls).with_context(|| format!("making {calls} calls of {name}")).map(Some)
    }

    /// One streamed response. The client has read a chunk before the next one is written: nothing is held back.
    fn write(&mut self, calls: u32) -> Result<u64> {
        self.request()?;
        self.answer(STREAM_HEAD)?;
        let mut ns = Vec::new();
        for _ in 0..calls {
            let (written, call_ns) = alone(|| self.server.write(&self.chunk))?;
            ns.push(call_ns);
            ensure!(written? == CHUNK_BYTES, "a chunk was not written as a whole");
            self.client.read_exact(&mut self.buffer[..CHUNK_BYTES])?;
        }
        self.answer(STREAM_END)?;
        total(&ns)
    }

    /// A request for each read; its answer is complete before the next one.
    fn read(&mut self, calls: u32) -> Result<u64> {
        let mut ns = Vec::new();
        for _ in 0..calls {
            ns.push(self.request()?);
            self.answer(EMPTY_ANSWER)?;
        }
        total(&ns)
    }

    /// Returns the ns that reading it took.
    fn request(&mut self) -> Result<f64> {
        self.client.write_all(REQUEST)?;
        let (read, ns) = alone(|| self.server.read(&mut self.buffer))?;
        ensure!(read? == REQUEST.len(), "a request was not read as a whole");
        Ok(ns)
    }

    fn answer(&mut self, bytes: &[u8]) -> Result<()> {
        self.server.write_all(bytes)?;
        self.client.read_exact(&mut self.buffer[..bytes.len()])?;
        Ok(())
    }

    fn pipe(&mut self, calls: u32) -> Result<u64> {
        let (reader, writer) = &mut self.pipe;
        let buffer = &mut self.buffer[..CHUNK_BYTES];
        let mut ns = Vec::new();
        for _ in 0..calls {
            let through = || writer.write_all(&self.chunk).and_then(|()| reader.read_exact(buffer));
            let (moved, call_ns) = alone(through)?;
            moved?;
            ns.push(call_ns);
        }
        total(&ns)
    }

    /// Too short to be timed alone.
    fn getppid(&mut self, calls: u32) -> Result<u64> {
        // SAFETY: a plain system call.
        timed(calls, || _ = unsafe { libc::syscall(libc::SYS_getppid) })
    }
}

/// What a call returns, and its ns of CPU time: without those of reading the clock, which is a system call, too.
fn alone<T>(call: impl FnOnce() -> T) -> Result<(T, f64)> {
    let begin_ns = thread_cpu_ns()?;
    let result = call();
    let end_ns = thread_cpu_ns()?;
    let clock_ns = thread_cpu_ns()? - end_ns;
    Ok((result, (end_ns - begin_ns) as f64 - clock_ns as f64))
}

/// As if all calls had been like the one in the middle: in some, the kernel does others' work (interrupts, segments of
/// other connections).
fn total(ns: &[f64]) -> Result<u64> {
    Ok((stats::median(ns).context("no calls")? * ns.len() as f64) as u64)
}

fn chunk() -> Vec<u8> {
    let event = |text: &str| format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n");
    // Two digits of its length, and two line ends.
    let event_bytes = CHUNK_BYTES - 6;
    let event = event(&"x".repeat(event_bytes - event("").len()));
    format!("{event_bytes:x}\r\n{event}\r\n").into_bytes()
}

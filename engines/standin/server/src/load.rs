//! The load generator: clients that send requests and measure what they get.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::options::Load;
use crate::random::Random;

/// A slow client stops reading for so long …
const PAUSE: Duration = Duration::from_millis(150);
/// … each time it has read so many tokens.
const TOKENS_BETWEEN_PAUSES: u32 = 4;
/// Receive buffer of a slow client, in bytes: small, so that the server feels the pause.
const SLOW_RECEIVE_BUFFER: libc::c_int = 2_048;

/// What the clients share.
struct Plan<'a> {
    options: &'a Load,
    address: SocketAddr,
    begin: Instant,
    next_request: AtomicU64,
    /// Time since `begin` at which the next request is due, when there is a rate, and what decides the ones after it.
    next_arrival: Mutex<(Duration, Random)>,
}

impl Plan<'_> {
    /// Number of the next request, when it is due; `None`: enough.
    fn next(&self) -> Option<u64> {
        if let Some(rate) = self.options.rate {
            let due = {
                let mut next = self.next_arrival.lock().unwrap_or_else(PoisonError::into_inner);
                let due = next.0;
                let gap = -(1.0 - next.1.unit()).ln() / rate.max(1e-6);
                next.0 += Duration::from_secs_f64(gap.min(3_600.0));
                due
            };
            if self.options.duration.is_some_and(|seconds| due.as_secs_f64() >= seconds) {
                return None;
            }
            std::thread::sleep(due.saturating_sub(self.begin.elapsed()));
        }
        if self.options.duration.is_some_and(|seconds| self.begin.elapsed().as_secs_f64() >= seconds) {
            return None;
        }
        let number = self.next_request.fetch_add(1, Ordering::Relaxed);
        self.options.requests.is_none_or(|most| number < most).then_some(number)
    }
}

/// What a client measured, in ns.
#[derive(Debug, Default)]
struct Measured {
    requests: u64,
    errors: u64,
    first_error: Option<String>,
    tokens: u64,
    ttft: Vec<u64>,
    itl: Vec<u64>,
}

impl Measured {
    fn add(mut self, other: Self) -> Self {
        self.requests += other.requests;
        self.errors += other.errors;
        self.first_error = self.first_error.or(other.first_error);
        self.tokens += other.tokens;
        self.ttft.extend(other.ttft);
        self.itl.extend(other.itl);
        self
    }
}

/// Sends requests as the options say; prints a JSON summary.
pub(crate) fn run(options: &Load) -> anyhow::Result<()> {
    let host = match (&options.url, options.port) {
        (Some(url), _) => url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/').to_owned(),
        (None, port) => format!("127.0.0.1:{}", port.unwrap_or_default()),
    };
    let address = host
        .to_socket_addrs()
        .with_context(|| format!("cannot use the server address {host:?}"))?
        .next()
        .with_context(|| format!("the server address {host:?} has no address"))?;
    let plan = Plan {
        options,
        address,
        begin: Instant::now(),
        next_request: AtomicU64::new(0),
        next_arrival: Mutex::new((Duration::ZERO, Random::new(options.seed))),
    };
    let slow_clients = (f64::from(options.concurrency) * options.slow_clients.clamp(0.0, 1.0)).round() as u32;
    let measured = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..options.concurrency)
            .map(|number| {
                let plan = &plan;
                scope.spawn(move || client(plan, number < slow_clients))
            })
            .collect();
        clients.into_iter().filter_map(|client| client.join().ok()).fold(Measured::default(), Measured::add)
    });
    println!("{}", summary(&measured, plan.begin.elapsed()));
    if measured.requests == 0 {
        bail!("no request was answered: {}", measured.first_error.as_deref().unwrap_or("none was sent"));
    }
    Ok(())
}

fn summary(measured: &Measured, took: Duration) -> Value {
    json!({
        "kind": "load",
        "requests": measured.requests,
        "errors": measured.errors,
        "first_error": measured.first_error,
        "tokens": measured.tokens,
        "seconds": took.as_secs_f64(),
        "ttft_ms": quantiles(measured.ttft.clone()),
        "itl_ms": quantiles(measured.itl.clone()),
    })
}

/// Quantiles in ms; null where fewer than ten values lie beyond.
fn quantiles(mut ns: Vec<u64>) -> Value {
    ns.sort_unstable();
    let ms = |ns: u64| ns as f64 / 1e6;
    let n = ns.len();
    // In percent, so that what decides is exact.
    let quantile = |percent: usize| {
        let enough = n * (100 - percent) >= 10 * 100;
        // The smallest value that at least this share of all does not exceed.
        let rank = (n * percent).div_ceil(100).max(1) - 1;
        ns.get(rank).filter(|_| enough).map(|&value| ms(value))
    };
    json!({
        "n": n,
        "p50": quantile(50),
        "p90": quantile(90),
        "p99": quantile(99),
        "max": ns.last().map(|&value| ms(value)),
    })
}

fn client(plan: &Plan<'_>, slow: bool) -> Measured {
    let mut measured = Measured::default();
    let mut connection = None;
    while let Some(number) = plan.next() {
        let result = ask(plan, number, slow, &mut connection, &mut measured);
        match result {
            Ok(()) => measured.requests += 1,
            Err(error) => {
                // The next request begins with a new connection.
                connection = None;
                measured.errors += 1;
                measured.first_error.get_or_insert_with(|| error.to_string());
                if error.kind() == io::ErrorKind::ConnectionRefused {
                    break;
                }
            }
        }
    }
    measured
}

/// Sends a request and reads its answer.
fn ask(
    plan: &Plan<'_>,
    number: u64,
    slow: bool,
    connection: &mut Option<BufReader<TcpStream>>,
    measured: &mut Measured,
) -> io::Result<()> {
    let options = plan.options;
    let mut random = Random::new(options.seed ^ (number + 1).wrapping_mul(0x5851_f42d_4c95_7f2d));
    let prompt_tokens = random.between(options.prompt_tokens.low, options.prompt_tokens.high);
    let max_tokens = random.between(options.output_tokens.low, options.output_tokens.high);
    let prompt = format!("{} ", options.prompt_word).repeat(prompt_tokens as usize);
    let mut body = json!({"model": "standin", "prompt": prompt, "max_tokens": max_tokens, "stream": true});
    if let Some(tenant) = number.checked_rem(options.tenants) {
        body["user"] = format!("tenant-{tenant}").into();
    }
    if let Some(version) = number.checked_rem(options.model_versions) {
        body["model_version"] = format!("v{}", version + 1).into();
    }
    let body = body.to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\nx-request-id: {}-{number:06}\r\n\
         traceparent: 00-{:016x}{:016x}-{:016x}-01\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        plan.address,
        options.id_prefix,
        random.next(),
        random.next() | 1,
        random.next() | 1,
        body.len(),
    );
    let stream = match connection {
        Some(stream) => stream,
        None => connection.insert(BufReader::new(connect(plan.address, slow)?)),
    };
    let begin = Instant::now();
    stream.get_mut().write_all(request.as_bytes())?;
    read_head(stream)?;
    let (mut tokens, mut last) = (0, begin);
    while let Some(chunk) = read_chunk(stream)? {
        if !chunk.starts_with(b"data: ") || chunk.starts_with(b"data: [DONE]") {
            continue;
        }
        let now = Instant::now();
        let gap = now.duration_since(last).as_nanos() as u64;
        if tokens == 0 {
            measured.ttft.push(gap)
        } else {
            measured.itl.push(gap)
        }
        last = now;
        tokens += 1;
        if slow && tokens % TOKENS_BETWEEN_PAUSES == 0 {
            std::thread::sleep(PAUSE);
        }
    }
    measured.tokens += u64::from(tokens);
    if tokens == max_tokens {
        return Ok(());
    }
    Err(io::Error::other(format!("{tokens} tokens came, {max_tokens} were asked for")))
}

fn connect(address: SocketAddr, slow: bool) -> io::Result<TcpStream> {
    if !slow {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        return Ok(stream);
    }
    connect_with_small_buffer(address)
}

/// The receive buffer must be set before the connection is made: it decides the window that is offered.
fn connect_with_small_buffer(address: SocketAddr) -> io::Result<TcpStream> {
    let SocketAddr::V4(address) = address else {
        return Err(io::Error::other("slow clients need an IPv4 address"));
    };
    // SAFETY: no preconditions.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let buffer = SLOW_RECEIVE_BUFFER;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    let name = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    };
    let name_size = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: the descriptor is open; option and address are valid and of the sizes that are passed.
    let code = unsafe {
        let value = (&raw const buffer).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, value, size);
        libc::connect(socket.as_raw_fd(), (&raw const name).cast(), name_size)
    };
    if code == 0 { Ok(TcpStream::from(socket)) } else { Err(io::Error::last_os_error()) }
}

/// Reads a response's head; an error unless it says 200.
fn read_head(stream: &mut BufReader<TcpStream>) -> io::Result<()> {
    let status = read_line(stream)?;
    if !status.starts_with("HTTP/1.1 200 ") {
        return Err(io::Error::other(format!("the server answered {status:?}")));
    }
    while !read_line(stream)?.is_empty() {}
    Ok(())
}

/// Reads a chunk; `None`: the body's end.
fn read_chunk(stream: &mut BufReader<TcpStream>) -> io::Result<Option<Vec<u8>>> {
    let line = read_line(stream)?;
    let bytes = usize::from_str_radix(&line, 16).ok().filter(|&bytes| bytes <= 1 << 20);
    let bytes = bytes.ok_or_else(|| io::Error::other(format!("bad chunk size {line:?}")))?;
    let mut chunk = vec![0; bytes];
    stream.read_exact(&mut chunk)?;
    read_line(stream)?;
    Ok((bytes > 0).then_some(chunk))
}

/// Reads a line, without its end.
fn read_line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    if stream.by_ref().take(4_096).read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_need_enough_values() {
        let value = quantiles((1..=100).map(|ms| ms * 1_000_000).collect());
        assert_eq!((value["p50"].as_f64(), value["p90"].as_f64()), (Some(50.0), Some(90.0)));
        assert_eq!((value["p99"].as_f64(), value["max"].as_f64()), (None, Some(100.0)));
        assert_eq!(quantiles(Vec::new())["n"], 0);
    }
}

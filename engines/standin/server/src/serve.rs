//! The server: starts everything, takes connections, stops on a signal.

use std::io::{PipeReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};

use crate::clock::{cpu_ns, now_ns};
use crate::connection::Connection;
use crate::engine::{self, Intake};
use crate::gpu::Gpu;
use crate::options::Serve;
use crate::truth::{Record, Truth};

/// How long requests that were interrupted have to end.
const GRACE: Duration = Duration::from_secs(3);

/// What all threads share.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) options: Arc<Serve>,
    pub(crate) truth: Truth,
    pub(crate) intake: Arc<Intake>,
    /// CLOCK_MONOTONIC ns.
    pub(crate) start_ns: u64,
    keys: AtomicU64,
    tokens: AtomicU64,
    requests: AtomicU64,
    /// CLOCK_MONOTONIC ns of the first request and of the last token; 0: none yet.
    first_ns: AtomicU64,
    last_ns: AtomicU64,
    /// Requests that are being answered.
    active: Mutex<u64>,
    fewer: Condvar,
}

impl Server {
    fn new(options: Arc<Serve>, truth: Truth) -> Self {
        Self {
            options,
            truth,
            intake: Arc::default(),
            start_ns: now_ns(),
            keys: AtomicU64::new(1),
            tokens: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            first_ns: AtomicU64::new(0),
            last_ns: AtomicU64::new(0),
            active: Mutex::new(0),
            fewer: Condvar::new(),
        }
    }

    /// A number for a new request.
    pub(crate) fn next_key(&self) -> u64 {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a request as active until the result is dropped.
    pub(crate) fn count(&self, received_ns: u64) -> Active<'_> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        _ = self.first_ns.compare_exchange(0, received_ns, Ordering::Relaxed, Ordering::Relaxed);
        *self.active.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Active(self)
    }

    pub(crate) fn count_token(&self, stamp_ns: u64) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        self.last_ns.fetch_max(stamp_ns, Ordering::Relaxed);
    }

    /// What was done so far. `seconds`: from the first request to the last token.
    pub(crate) fn summary(&self) -> Value {
        let window =
            self.last_ns.load(Ordering::Relaxed).saturating_sub(self.first_ns.load(Ordering::Relaxed));
        json!({
            "kind": "summary",
            "simulated_gpu": true,
            "requests": self.requests.load(Ordering::Relaxed),
            "tokens": self.tokens.load(Ordering::Relaxed),
            "steps": self.intake.steps.load(Ordering::Relaxed),
            "seconds": window as f64 / 1e9,
            "cpu_ns": cpu_ns(),
            "now_ns": now_ns(),
        })
    }

    /// Makes [`run`] return, as a signal from outside would.
    pub(crate) fn ask_to_stop(&self) {
        // SAFETY: no preconditions; this process handles the signal.
        unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
    }
}

/// A request is being answered.
pub(crate) struct Active<'a>(&'a Server);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        *self.0.active.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_all();
    }
}

/// Where [`on_signal`] writes; -1: nowhere yet.
static SIGNAL_PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_signal(_signal: libc::c_int) {
    // SAFETY: write is safe in a signal handler, and the byte is valid. A full pipe means that a signal came already.
    unsafe { libc::write(SIGNAL_PIPE.load(Ordering::Relaxed), [0u8].as_ptr().cast(), 1) };
}

/// Makes SIGINT and SIGTERM write to a pipe, whichever thread they reach; returns its other end.
fn catch_signals() -> anyhow::Result<PipeReader> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe for signals")?;
    SIGNAL_PIPE.store(writer.into_raw_fd(), Ordering::Relaxed);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: a zeroed action is valid; the handler does only what handlers may.
        let code = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut())
        };
        anyhow::ensure!(code == 0, "cannot handle signal {signal}: {}", std::io::Error::last_os_error());
    }
    Ok(reader)
}

/// Serves until a signal comes.
pub(crate) fn run(options: Serve) -> anyhow::Result<()> {
    if options.zero_gpu {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("STANDIN_CUDA_ZERO", "1") };
    }
    anyhow::ensure!(
        options.bug.is_none() || options.ranks == 1,
        "--bug is for a server of one rank: leave --ranks out"
    );
    let mut signals = catch_signals()?;
    let gpu = Gpu::new()?;
    let truth = Truth::create(options.truth.as_deref())?;
    let server = Arc::new(Server::new(Arc::new(options), truth));
    server.truth.push(|| Record::Server { pid: std::process::id(), start_ns: server.start_ns });
    let failed = {
        let server = Arc::clone(&server);
        move || server.ask_to_stop()
    };
    let (options, truth, intake) =
        (Arc::clone(&server.options), server.truth.clone(), Arc::clone(&server.intake));
    let engine = engine::start(gpu, options, truth, intake, failed)?;

    let port = server.options.port;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .with_context(|| format!("cannot listen on 127.0.0.1:{port}"))?;
    let address = listener.local_addr().context("the listener has no address")?;
    let accepting = Arc::clone(&server);
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(move || accept(&listener, &accepting))
        .context("cannot start the accepting thread")?;
    println!("listening on {address}");
    std::io::stdout().flush().context("cannot write to stdout")?;

    signals.read_exact(&mut [0]).context("cannot wait for signals")?;
    server.intake.stop();
    let result = engine.join().map_err(|_| anyhow!("the engine panicked"))?;
    let active = server.active.lock().unwrap_or_else(PoisonError::into_inner);
    drop(server.fewer.wait_timeout_while(active, GRACE, |active| *active > 0));
    server.truth.flush().context("cannot write the truth log")?;
    println!("{}", server.summary());
    result
}

/// Takes connections for as long as the process lives.
fn accept(listener: &TcpListener, server: &Arc<Server>) {
    for (number, stream) in (1u64..).zip(listener.incoming()) {
        let result = stream.and_then(|stream| {
            set_up(&stream, server.options.send_buffer)?;
            let connection = Connection::new(Arc::clone(server), stream);
            std::thread::Builder::new().name(format!("http-{number}")).spawn(move || connection.run())
        });
        if let Err(error) = result {
            eprintln!("connection: {error}");
        }
    }
}

fn set_up(stream: &TcpStream, send_buffer: u32) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    if send_buffer == 0 {
        return Ok(());
    }
    let bytes = libc::c_int::try_from(send_buffer).unwrap_or(libc::c_int::MAX);
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the descriptor is open, the option's value valid and of the size that is passed.
    let code = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const bytes).cast(),
            size,
        )
    };
    if code == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

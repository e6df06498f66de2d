//! The stand-in server and its load, as child processes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// Longest wait for anything that a server does.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);
/// Longer than any measurement, which ends the load; a bound in case that it does not.
const LOAD_SECONDS: &str = "120";
/// Tokens that are generated before a measurement begins.
const WARM_UP_TOKENS: u64 = 1_000;

/// A child that ends with its owner.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.spawn().map(Self).with_context(|| format!("cannot start {name}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only where it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the server has done so far.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Stats {
    pub(crate) tokens: u64,
    pub(crate) steps: u64,
    /// CPU time of the server.
    pub(crate) cpu_ns: u64,
    /// CLOCK_MONOTONIC.
    pub(crate) now_ns: u64,
}

/// What a server did in a window.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Window {
    pub(crate) steps_per_s: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) cpu_ns_per_token: f64,
}

impl Window {
    pub(crate) fn between(begin: Stats, end: Stats) -> Result<Self> {
        let tokens = end.tokens - begin.tokens;
        ensure!(tokens > 0, "the server generated no tokens");
        let seconds = (end.now_ns - begin.now_ns) as f64 / 1e9;
        Ok(Self {
            steps_per_s: (end.steps - begin.steps) as f64 / seconds,
            tokens_per_s: tokens as f64 / seconds,
            cpu_ns_per_token: (end.cpu_ns - begin.cpu_ns) as f64 / tokens as f64,
        })
    }
}

/// A server that takes requests.
pub(crate) struct Server {
    running: Running,
    program: PathBuf,
    port: u16,
    /// Its summary at the end goes here.
    _stdout: BufReader<ChildStdout>,
}

impl Server {
    /// Starts one, with the libraries that are staged in a folder, and maybe a library loaded before all others.
    pub(crate) fn start(libraries: &Path, preload: Option<&Path>, options: &[&str]) -> Result<Self> {
        let program = standin::built("standin-server", "standin-server")?;
        let mut command = Command::new(&program);
        command.args(["--port", "0"]).args(options).env("LD_LIBRARY_PATH", libraries).stdout(Stdio::piped());
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let mut running = Running::start(&mut command)?;
        let mut stdout = BufReader::new(running.0.stdout.take().context("no pipe from the server")?);
        let mut line = String::new();
        stdout.read_line(&mut line).context("cannot read what the server prints")?;
        let port = line.trim().strip_prefix("listening on 127.0.0.1:").and_then(|port| port.parse().ok());
        let port = port.with_context(|| format!("the server does not listen; it says {line:?}"))?;
        Ok(Self { running, program, port, _stdout: stdout })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running.0.id()
    }

    pub(crate) fn stats(&self) -> Result<Stats> {
        let ask = || -> std::io::Result<String> {
            let mut connection = TcpStream::connect(("127.0.0.1", self.port))?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.write_all(b"GET /stats HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            connection.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = ask().context("the server does not answer")?;
        let (_, body) = answer.split_once("\r\n\r\n").context("the server's answer has no body")?;
        serde_json::from_str(body).with_context(|| format!("the server's answer: {body:?}"))
    }

    /// What it does from now on for so long.
    pub(crate) fn watch(&self, window: Duration) -> Result<Window> {
        let begin = self.stats()?;
        std::thread::sleep(window);
        Window::between(begin, self.stats()?)
    }

    /// Starts clients that send one request after the other, and returns once the server is under way.
    pub(crate) fn load(&self, concurrency: u32) -> Result<Running> {
        let before = self.stats()?;
        let mut command = Command::new(&self.program);
        command.args(["load", "--port", &self.port.to_string(), "--duration", LOAD_SECONDS]);
        command.args(["--concurrency", &concurrency.to_string()]);
        command.args(["--prompt-tokens", "16-200", "--output-tokens", "100-200"]);
        let mut load = Running::start(command.stdout(Stdio::null()))?;
        self.wait_for("tokens", |stats| stats.tokens >= before.tokens + WARM_UP_TOKENS)?;
        if let Some(status) = load.0.try_wait()? {
            bail!("the load ended ({status})");
        }
        Ok(load)
    }

    /// Waits until the server generates nothing any more.
    pub(crate) fn wait_idle(&self) -> Result<()> {
        let mut last = None;
        self.wait_for("an idle server", |stats| {
            let same = last == Some((stats.tokens, stats.steps));
            last = Some((stats.tokens, stats.steps));
            same
        })
    }

    fn wait_for(&self, what: &str, mut there: impl FnMut(Stats) -> bool) -> Result<()> {
        let patience = Instant::now() + PATIENCE;
        while !there(self.stats()?) {
            ensure!(Instant::now() < patience, "no {what} within {} s", PATIENCE.as_secs());
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

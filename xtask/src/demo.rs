//! `cargo xtask demo`: the whole path on this machine, on a simulated GPU.
//!
//! Builds, starts the stand-in server under load with stalls of known cause, records it, and leaves a capture, a
//! report and pictures in a folder.

mod readings;

use crate::command::{built, cargo, display, root, run as run_command};
use crate::setup;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use readings::Readings;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// The load stops this long before the recording, so that the last requests end inside it.
const TAIL_SECONDS: u64 = 3;

#[derive(Args)]
pub(crate) struct Options {
    /// Length of the recording.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(5..=120))]
    seconds: u64,
    /// Where everything goes; an earlier demo there is replaced.
    #[arg(long, short, default_value = "demo")]
    output: PathBuf,
}

/// Runs the demo.
///
/// # Errors
/// A step failed; the message names the program and what it left behind.
pub(crate) fn run(options: &Options) -> Result<()> {
    setup::run()?;
    say("building (release)");
    run_command(cargo().args(["build", "--release", "--workspace"]).env("TRACER_EBPF", "require"))?;

    let begun = Instant::now();
    let demo = Demo::new(options)?;
    demo.record(options.seconds)?;
    demo.show()?;
    say(&format!("done, {} s after the build", begun.elapsed().as_secs()));
    Ok(())
}

struct Demo {
    tracer: PathBuf,
    server: PathBuf,
    folder: PathBuf,
}

impl Demo {
    /// Makes an empty folder with the stand-in libraries in it.
    fn new(options: &Options) -> Result<Self> {
        let folder = root().join(&options.output);
        for old in ["capture", "libraries"] {
            remove(&folder.join(old))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let release = built("release");
        let demo = Self { tracer: release.join("tracer"), server: release.join("standin-server"), folder };
        run_command(Command::new(release.join("standin-stage")).arg(demo.file("libraries")))?;
        Ok(demo)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Records the server while clients use it.
    fn record(&self, seconds: u64) -> Result<()> {
        say(&format!("recording a server on a simulated GPU for {seconds} s"));
        let mut record = Command::new(&self.tracer);
        record.arg("record").args(["--duration", &format!("{seconds}s"), "-o"]).arg(self.file("capture"));
        record.arg("--").arg(&self.server).args(["--port", "0"]);
        record.args(["--stall", "gpu:every:300", "--stall", "lock:every:410", "--stall", "cpu:every:530"]);
        record.arg("--truth").arg(self.file("truth.jsonl"));
        record.env("LD_LIBRARY_PATH", self.file("libraries"));
        let readings = self.file("gpu-readings");
        record.env("STANDIN_NVML_FILE", &readings);
        let _readings = Readings::start(readings, Duration::from_secs(seconds))?;
        record.stdout(Stdio::piped()).stderr(Stdio::piped());
        say(&format!("  {}", display(&record)));
        let mut recorder = Running::start(&mut record)?;
        let mut output = recorder.output()?;
        let messages = recorder.messages()?;
        let address = wait_for_address(&mut output)?;
        wait_for_probes(messages)?;
        // What comes after must be read for the programs to go on. Ends with the server, which has the pipe too.
        let rest =
            std::thread::spawn(move || output.map_while(Result::ok).for_each(|line| println!("{line}")));

        let mut load = Command::new(&self.server);
        load.args(["load", "--port", &address.port().to_string(), "--concurrency", "20"]);
        load.args(["--duration", &(seconds - TAIL_SECONDS).to_string()]);
        let summary = self.file("load.json");
        load.stdout(File::create(&summary).with_context(|| format!("cannot write {}", summary.display()))?);
        let mut load = Running::start(&mut load)?;

        recorder.finish()?;
        load.finish()?;
        // The recorder leaves its command running.
        shut_down(address)?;
        let _ = rest.join();
        Ok(())
    }

    /// Prints the report and draws the pictures.
    fn show(&self) -> Result<()> {
        let capture = self.file("capture");
        say("the report");
        run_command(Command::new(&self.tracer).arg("report").arg(&capture))?;
        let pictures: [(&str, &[&str], &str); 7] = [
            ("request", &["#1"], "request.svg"),
            ("flamegraph", &[], "flamegraph.svg"),
            ("flamegraph", &["--tokens"], "tokens.svg"),
            ("flamegraph", &["--slow"], "slow.svg"),
            ("heatmap", &[], "heatmap.svg"),
            ("heatmap", &["--by", "token"], "heatmap-by-token.svg"),
            ("histogram", &[], "histogram.svg"),
        ];
        for (command, arguments, file) in pictures {
            let mut draw = Command::new(&self.tracer);
            draw.arg(command).arg(&capture).args(arguments).arg("-o").arg(self.file(file));
            // A request is also told as text.
            run_command(draw.stdout(Stdio::null()))?;
        }
        say("the GPU was simulated; everything is in");
        for name in std::iter::once("capture").chain(pictures.map(|picture| picture.2)) {
            ensure!(self.file(name).exists(), "{} is not there", self.file(name).display());
            say(&format!("  {}", self.file(name).display()));
        }
        Ok(())
    }
}

/// A child process that does not outlive the demo.
struct Running {
    child: Child,
    line: String,
}

impl Running {
    fn start(command: &mut Command) -> Result<Self> {
        let line = display(command);
        let child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
        Ok(Self { child, line })
    }

    fn output(&mut self) -> Result<Lines<BufReader<ChildStdout>>> {
        let stdout = self.child.stdout.take().context("the output of the recorder is not a pipe")?;
        Ok(BufReader::new(stdout).lines())
    }

    fn messages(&mut self) -> Result<BufReader<ChildStderr>> {
        let stderr = self.child.stderr.take().context("the messages of the recorder are not a pipe")?;
        Ok(BufReader::new(stderr))
    }

    fn finish(&mut self) -> Result<()> {
        let status = self.child.wait().with_context(|| format!("cannot wait for `{}`", self.line))?;
        ensure!(status.success(), "`{}` failed ({status})", self.line);
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only where it has ended, which is what they are for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads on until the server says where it listens.
fn wait_for_address(output: &mut Lines<BufReader<ChildStdout>>) -> Result<SocketAddr> {
    for line in output {
        let line = line.context("cannot read what the server prints")?;
        println!("{line}");
        if let Some(address) = line.strip_prefix("listening on ") {
            return address.trim().parse().with_context(|| format!("`{line}` names no address"));
        }
    }
    bail!("the recorder ended before the server was ready; what it printed is above")
}

/// Passes messages on, in the background; returns when the recorder has probed the engine and the marks.
fn wait_for_probes(messages: BufReader<ChildStderr>) -> Result<()> {
    let (ready, probed) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in messages.lines().map_while(Result::ok) {
            eprintln!("{line}");
            if line.contains("probing") && !line.contains(" 0 ") {
                // Nobody waits any more after the first time.
                let _ = ready.send(());
            }
        }
    });
    probed
        .recv_timeout(Duration::from_secs(20))
        .context("the recorder did not find the server's engine; what it said is above")
}

/// Asks the server to end, and waits until it has closed the connection.
fn shut_down(address: SocketAddr) -> Result<()> {
    let ask = || -> std::io::Result<()> {
        let mut connection = TcpStream::connect(address)?;
        write!(
            connection,
            "POST /shutdown HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        connection.read_to_end(&mut Vec::new()).map(|_| ())
    };
    ask().with_context(|| format!("cannot shut down the server on {address}"))
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn say(text: &str) {
    eprintln!("demo: {text}");
}

//! Builds the fixture program and traces it.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{OnceLock, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use engines::Profiles;
use tracer::{
    event::{Call, CallEnd, Event, MarkEvent, Point, Process, Sched},
    probe::{Options, Session, process},
    timeline::tables::LedgerRow,
};

/// Longest that a fixture may take between two of its lines.
const PATIENCE: Duration = Duration::from_secs(30);

const PROFILE: &str = r#"
engine = "fixture"
title = "test fixture"
files = ["libfixture*.so"]

[[point]]
symbols = ["fixture_work", "fixture_recurse", "fixture_outer", "fixture_set_jump", "fixture_jump",
           "fixture_catch", "fixture_block"]
role = "other"
returns = "c"

[[point]]
symbols = ["fixture_throw"]
role = "other"
returns = "throws"
"#;

/// The built fixture.
pub(crate) struct Built {
    pub(crate) folder: tempfile::TempDir,
}

impl Built {
    pub(crate) fn get() -> Result<&'static Self> {
        static BUILT: OnceLock<std::result::Result<Built, String>> = OnceLock::new();
        BUILT
            .get_or_init(|| Self::build().map_err(|error| format!("{error:?}")))
            .as_ref()
            .map_err(anyhow::Error::msg)
    }

    fn build() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures");
        let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/marks/include");
        let marks = standin::built("libtracer_marks.so", "tracer-marks-c")?;
        std::fs::copy(&marks, folder.path().join("libtracer_marks.so"))?;
        let flags = ["-O2", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-g"];
        // The last one has its functions elsewhere, as another version of a library has.
        for (library, optimise) in
            [("libfixture.so", "-O2"), ("libfixture_late.so", "-O2"), ("libfixture_other.so", "-O0")]
        {
            let mut compiler = Command::new("g++");
            compiler.args(flags).args([optimise, "-shared", "-fPIC", "-o"]).arg(folder.path().join(library));
            compile(compiler.arg(sources.join("lib.cpp")))?;
        }
        let mut compiler = Command::new("g++");
        compiler
            .args(flags)
            .args(["-pthread", "-o"])
            .arg(folder.path().join("fixture"))
            .arg(sources.join("main.cpp"))
            .arg(format!("-I{}", header.display()))
            .arg(format!("-L{}", folder.path().display()))
            // Of the two kinds of path the one that comes before LD_LIBRARY_PATH: cargo names folders there that hold
            // another copy of the library.
            .args(["-lfixture", "-ltracer_marks", "-ldl", "-Wl,--disable-new-dtags,-rpath,$ORIGIN"]);
        compile(&mut compiler)?;
        std::fs::write(folder.path().join("fixture.toml"), PROFILE)?;
        Ok(Self { folder })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn profiles(&self) -> Result<Profiles> {
        let mut profiles = Profiles::builtin();
        profiles.load(&self.path("fixture.toml"))?;
        Ok(profiles)
    }
}

pub(crate) fn compile(compiler: &mut Command) -> Result<()> {
    let output = compiler.output().context("running g++ (apt-get install g++) or rustc")?;
    ensure!(output.status.success(), "the compiler: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// What a program prints, line by line.
pub(crate) fn lines(stdout: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// A fixture that runs.
pub(crate) struct Running {
    pub(crate) child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Running {
    /// Starts a mode and waits until it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Result<Self> {
        Self::start_command(Command::new(Built::get()?.path("fixture")).args(arguments))
    }

    pub(crate) fn start_command(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = lines(child.stdout.take().context("no stdout")?);
        let running = Self { child, stdin, lines };
        let line = running.lines.recv_timeout(PATIENCE).context("the fixture does not start")?;
        ensure!(line == "ready", "the fixture says {line:?}");
        Ok(running)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tell(&mut self) -> Result<()> {
        self.stdin.write_all(b"\n").context("the fixture is gone")
    }

    /// Next line, with nobody draining.
    pub(crate) fn wait_line(&self) -> Result<String> {
        self.lines.recv_timeout(PATIENCE).context("the fixture is silent")
    }

    /// Next line, with the rings drained meanwhile.
    pub(crate) fn line(&self, session: &mut Session, events: &mut Vec<Event>) -> Result<String> {
        let patience = Instant::now() + PATIENCE;
        loop {
            session.drain(events);
            match self.lines.recv_timeout(Duration::from_millis(2)) {
                Ok(line) => return Ok(line),
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < patience => {}
                Err(error) => bail!("the fixture is silent: {error}"),
            }
        }
    }

    /// Lets it end by itself and checks that it was not harmed.
    pub(crate) fn end(mut self) -> Result<()> {
        self.tell()?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the fixture ended with {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already gone in the good case.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// What a traced run left.
pub(crate) struct Trace {
    pub(crate) pid: u32,
    /// What the fixture said after "done".
    pub(crate) said: String,
    pub(crate) events: Vec<Event>,
    pub(crate) ledger: Vec<LedgerRow>,
}

/// Runs a mode from "ready" to "done" under the probes.
pub(crate) fn trace(arguments: &[&str], options: Options) -> Result<Trace> {
    trace_with(arguments, options, Built::get()?.profiles()?)
}

/// As [`trace`], with other profiles.
pub(crate) fn trace_with(arguments: &[&str], options: Options, profiles: Profiles) -> Result<Trace> {
    let mut running = Running::start(arguments)?;
    let mut session = Session::start(options, profiles)?;
    session.add(&process::find(running.pid())?)?;
    let mut events = Vec::new();
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    let said = line.strip_prefix("done ").with_context(|| format!("the fixture says {line:?}"))?.to_owned();
    let ledger = session.stop(&mut events).ledger;
    let pid = running.pid();
    running.end()?;
    Ok(Trace { pid, said, events, ledger })
}

/// No samples, no scheduler: calls and marks only.
pub(crate) fn calls_only() -> Options {
    Options { sample_hz: 0, sched: false, ..Options::default() }
}

impl Trace {
    pub(crate) fn points(&self) -> impl Iterator<Item = &Point> {
        self.events.iter().filter_map(|event| match event {
            Event::Point(point) => Some(point),
            _ => None,
        })
    }

    /// Calls of a function, in the order in which they ended.
    pub(crate) fn calls(&self, function: &str) -> Vec<Call> {
        let ids: Vec<u32> =
            self.points().filter(|point| point.name == function).map(|point| point.id).collect();
        self.events
            .iter()
            .filter_map(|event| match event {
                Event::Call(call) if ids.contains(&call.point) => Some(*call),
                _ => None,
            })
            .collect()
    }

    pub(crate) fn point(&self, function: &str) -> Result<u32> {
        let point = self.points().find(|point| point.name == function);
        Ok(point.with_context(|| format!("{function} is not probed"))?.id)
    }

    pub(crate) fn marks(&self) -> Vec<&MarkEvent> {
        self.events
            .iter()
            .filter_map(|event| if let Event::Mark(mark) = event { Some(mark) } else { None })
            .collect()
    }

    pub(crate) fn sched(&self) -> Vec<&Sched> {
        self.events
            .iter()
            .filter_map(|event| if let Event::Sched(sched) = event { Some(sched) } else { None })
            .collect()
    }

    pub(crate) fn processes(&self) -> Vec<&Process> {
        self.events
            .iter()
            .filter_map(|event| if let Event::Process(process) = event { Some(process) } else { None })
            .collect()
    }

    /// Sum of a ledger line over all processes.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
    }

    /// Nothing was lost anywhere.
    pub(crate) fn lossless(&self) -> Result<()> {
        let losses: Vec<_> = self.ledger.iter().filter(|row| row.loss && row.count > 0).collect();
        ensure!(losses.is_empty(), "lost: {losses:?}");
        Ok(())
    }
}

/// The numbers in what a fixture said.
pub(crate) fn numbers(said: &str) -> Result<Vec<u64>> {
    said.split_whitespace().map(|word| word.parse().with_context(|| format!("{said:?}"))).collect()
}

pub(crate) fn returned(calls: &[Call]) -> usize {
    calls.iter().filter(|call| call.end == CallEnd::Returned).count()
}

//! How long it takes to attach many probe points to many processes, and to end such a recording.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use engines::Profiles;
use serde::Serialize;
use tracer::{
    event::Event,
    probe::{Options, Session, process},
};
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::server::Running;

/// Functions of the library; each gets a probe at its entry and one at its return.
const FUNCTIONS: usize = 60;
const LIBRARY: &str = "libbench_points.so";
/// In ms.
const AIM: Aim = Aim::AtMost(500.0);

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) processes: usize,
    pub(crate) rounds: usize,
    /// No round begins after this long, however few there were.
    pub(crate) time: Duration,
}

#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    processes: usize,
    /// Probe points in all processes, those that every process has included.
    points: usize,
    attach_ms: Option<Estimate>,
    attach_aim: Aim,
    stop_ms: Option<Estimate>,
}

pub(crate) fn run(extent: Extent) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let library = build(folder.path())?;
    let profiles = profiles(folder.path())?;
    let waiting = (0..extent.processes).map(|_| Waiting::start(&library)).collect::<Result<Vec<_>>>()?;
    let (mut attaching, mut stopping) = (Vec::new(), Vec::new());
    let mut points = 0;
    let begin = Instant::now();
    for round in 0..extent.rounds {
        if round > 0 && begin.elapsed() > extent.time {
            break;
        }
        crate::progress(&format!("attaching: round {} of {}", round + 1, extent.rounds));
        let mut session = Session::start(Options::default(), profiles.clone())?;
        let found = waiting.iter().map(|waiting| process::find(waiting.0.0.id()));
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let attach = Instant::now();
        for process in &found {
            session.add(process)?;
        }
        attaching.push(ms(attach));
        let mut events = Vec::new();
        let stop = Instant::now();
        session.stop(&mut events);
        stopping.push(ms(stop));
        points = events.iter().filter(|event| matches!(event, Event::Point(_))).count();
        let wanted = FUNCTIONS * extent.processes;
        ensure!(points >= wanted, "{points} probe points attached of {wanted}");
    }
    Ok(Outcome {
        processes: extent.processes,
        points,
        attach_ms: stats::estimate(&attaching),
        attach_aim: AIM,
        stop_ms: stats::estimate(&stopping),
    })
}

fn ms(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

fn name(function: usize) -> String {
    format!("bench_point_{function}")
}

/// A library of functions that nobody calls.
fn build(folder: &Path) -> Result<PathBuf> {
    let (source, library) = (folder.join("points.c"), folder.join(LIBRARY));
    let mut text = String::new();
    for function in 0..FUNCTIONS {
        // Different bodies: a linker may fold equal ones into one.
        writeln!(text, "int {}(int x) {{ return x + {function}; }}", name(function))?;
    }
    fs::write(&source, text).with_context(|| format!("cannot write {}", source.display()))?;
    let mut compiler = Command::new("g++");
    compiler.args(["-x", "c", "-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    let output = compiler.output().context("cannot start g++ (apt-get install g++)")?;
    ensure!(output.status.success(), "g++: {}", String::from_utf8_lossy(&output.stderr));
    Ok(library)
}

fn profiles(folder: &Path) -> Result<Profiles> {
    let file = folder.join("points.toml");
    let names: Vec<String> = (0..FUNCTIONS).map(name).collect();
    let profile = format!(
        "engine = \"bench\"\ntitle = \"functions of the benchmark\"\nfiles = [\"{LIBRARY}\"]\n[[point]]\n\
         symbols = {names:?}\nrole = \"other\"\nreturns = \"c\"\n"
    );
    fs::write(&file, profile).with_context(|| format!("cannot write {}", file.display()))?;
    let mut profiles = Profiles::builtin();
    profiles.load(&file)?;
    Ok(profiles)
}

/// A small process that has loaded the library and waits.
struct Waiting(Running);

impl Waiting {
    fn start(library: &Path) -> Result<Self> {
        let mut command = Command::new("cat");
        command.env("LD_PRELOAD", library).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::start(&mut command)?;
        // When it answers, all its libraries are loaded.
        let stdin = running.0.stdin.as_mut().context("no pipe to cat")?;
        stdin.write_all(b"ready\n").context("cannot write to cat")?;
        let stdout = running.0.stdout.as_mut().context("no pipe from cat")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).context("cannot read from cat")?;
        ensure!(line == "ready\n", "cat says {line:?}");
        Ok(Self(running))
    }
}

impl Outcome {
    pub(crate) fn table(&self) -> Table {
        let title = format!(
            "Attaching to {} processes, {FUNCTIONS} functions each (entry + return; {} points with those of the loader)",
            self.processes, self.points
        );
        let mut header = vec!["what"];
        header.extend(judged("ms"));
        let mut table = Table::new(&title, &header);
        for (what, estimate, aim) in [
            ("attaching to all, one after the other", &self.attach_ms, Some(self.attach_aim)),
            ("ending the recording", &self.stop_ms, None),
        ] {
            let mut row = vec![what.to_owned()];
            row.extend(ratio(estimate.as_ref(), aim));
            table.rows.push(row);
        }
        table
    }
}

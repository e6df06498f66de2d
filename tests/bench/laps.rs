//! By how much a sample delays the program that it is of: a loop that always does the same, with and without samples.

use std::{
    io::BufRead as _,
    path::Path,
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use engines::Profiles;
use tracer::{
    event::Event,
    probe::{Session, process},
};
use tracer_tests::stats;

use crate::{
    affinity, clock,
    perf::Perf,
    stacks::{Deep, Way, options},
};

/// Samples per second: so many that their cost stands out of the noise.
const HZ: u64 = 4999;

/// Delay per sample, in ns. The program has a CPU of its own, where there are two; in every other round it is measured
/// without samples first.
pub(crate) fn delay(program: &Path, way: Way, round: usize, folder: &Path, window: Duration) -> Result<f64> {
    affinity::apart(|cpu| {
        let laps = Laps::start(program, cpu)?;
        let without = |laps: &Laps| laps.median(|| std::thread::sleep(window));
        let first = if round.is_multiple_of(2) { Some(without(&laps)?) } else { None };
        let with = match way.perf() {
            Some(_) => by_perf(&laps, way, folder, window),
            None => by_tracer(&laps, way, window),
        }?;
        let without = first.map_or_else(|| without(&laps), Ok)?;
        Ok((with - without) / (HZ as f64 * with / 1e9))
    })
}

fn by_tracer(laps: &Laps, way: Way, window: Duration) -> Result<f64> {
    let mut session = Session::start(options(way, HZ), Profiles::builtin())?;
    session.add(&process::find(laps.program.id())?)?;
    ensure!(session.wait_for_tables(Duration::from_secs(60)), "tables do not come");
    let mut events = Vec::new();
    session.drain(&mut events);
    events.clear();
    let (begin, until) = (laps.cpu_ns()?, Instant::now() + window);
    let with = laps.median(|| {
        while Instant::now() < until {
            session.drain(&mut events);
            std::thread::sleep(Duration::from_millis(2));
        }
    })?;
    let cpu_ns = laps.cpu_ns()? - begin;
    session.stop(&mut events);
    are_enough(events.iter().filter(|event| matches!(event, Event::Sample(_))).count() as f64, cpu_ns)?;
    Ok(with)
}

fn by_perf(laps: &Laps, way: Way, folder: &Path, window: Duration) -> Result<f64> {
    let perf = Perf::start(laps.program.id(), way, HZ, folder)?;
    let begin = laps.cpu_ns()?;
    let with = laps.median(|| std::thread::sleep(window))?;
    let cpu_ns = laps.cpu_ns()? - begin;
    let (_, samples) = perf.stop()?;
    are_enough(samples, cpu_ns)?;
    Ok(with)
}

/// The kernel takes far fewer than it was asked for where it finds that they take too long. On a busy machine it is late for some.
fn are_enough(samples: f64, cpu_ns: u64) -> Result<()> {
    let asked = HZ as f64 * cpu_ns as f64 / 1e9;
    ensure!(samples > 0.5 * asked, "{samples} samples, not {asked:.0}");
    Ok(())
}

/// The program, and how long each of its laps took, in ns.
struct Laps {
    program: Deep,
    lines: mpsc::Receiver<f64>,
}

impl Laps {
    fn start(program: &Path, cpu: usize) -> Result<Self> {
        let (program, stdout) = Deep::start(program, &["laps", &cpu.to_string()])?;
        let (sender, lines) = mpsc::channel();
        // It ends with the program.
        std::thread::spawn(move || {
            let laps = stdout.lines().map_while(Result::ok).map_while(|line| line.parse().ok());
            for lap in laps {
                if sender.send(lap).is_err() {
                    return;
                }
            }
        });
        Ok(Self { program, lines })
    }

    fn cpu_ns(&self) -> Result<u64> {
        clock::cpu_ns(clock::process_clock(self.program.id())?)
    }

    /// The median of those laps that were run wholly while `meanwhile` was.
    fn median(&self, meanwhile: impl FnOnce()) -> Result<f64> {
        self.lines.try_iter().for_each(drop);
        meanwhile();
        let laps: Vec<f64> = self.lines.try_iter().skip(1).collect();
        ensure!(laps.len() >= 5, "{} laps", laps.len());
        stats::median(&laps).context("no lap")
    }
}

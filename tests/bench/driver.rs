//! What a probe in NVIDIA's own driver library costs: where ours is placed, at the entry, and bpftrace's, which goes to
//! the entry.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use engines::{Point, Profiles};
use serde::Serialize;
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{RATIO, Table, ratio},
};

use crate::{
    affinity,
    bpftrace::{self, Bpftrace, Function},
    part::Part,
    probe,
    worker::{self, Worker},
};

/// In the cache of real libraries.
const LIBRARY: &str = "driver-550/libcuda.so.550.163.01";
/// Works without a GPU, and does next to nothing.
const FUNCTION: &str = "cuDriverGetVersion";
const AIM: Aim = Aim::AtMost(0.06);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unprobed,
    Placed,
    Entry,
    PlacedPair,
    EntryPair,
    Bpftrace,
}

impl State {
    const ALL: [Self; 6] =
        [Self::Unprobed, Self::Placed, Self::Entry, Self::PlacedPair, Self::EntryPair, Self::Bpftrace];

    /// Calls in a batch: 5 to 20 ms where probed.
    const fn calls(self) -> u32 {
        match self {
            Self::Unprobed => 200_000,
            Self::Placed | Self::PlacedPair => 20_000,
            Self::Entry | Self::EntryPair | Self::Bpftrace => 1_000,
        }
    }

    /// Where our probe goes, and what it is told of returns.
    const fn rule(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Placed => Some(("cheapest", "never")),
            Self::Entry => Some(("entry", "never")),
            Self::PlacedPair => Some(("cheapest", "c")),
            Self::EntryPair => Some(("entry", "c")),
            Self::Unprobed | Self::Bpftrace => None,
        }
    }
}

/// Costs in ns of CPU time per call; the unprobed call is subtracted.
#[derive(Debug, Serialize)]
struct Compared {
    what: &'static str,
    /// Of the first and of the second; `None` where it could not be had.
    ns: [Option<f64>; 2],
    ratio: Option<Estimate>,
    aim: Option<Aim>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    library: &'static str,
    function: &'static str,
    /// Bytes from the function's entry to our probe.
    placed_at: u64,
    /// What the kernel does with the instruction there, and with the one at the entry.
    placement: &'static str,
    entry_placement: &'static str,
    /// Version; `None` where it is not installed.
    bpftrace: Option<String>,
    unprobed_ns: f64,
    compared: Vec<Compared>,
}

/// Measures from another CPU than the traced process's.
pub(crate) fn run(libraries: Option<&Path>, rounds: usize) -> Result<Part<Outcome>> {
    let Some(libraries) = libraries else {
        return Ok(Part::LeftOut("no folder of real libraries was given (--real-libs)".into()));
    };
    let library = libraries.join(LIBRARY);
    // As the kernel will name it.
    let Ok(library) = library.canonicalize() else {
        return Ok(Part::LeftOut(format!(
            "{} is not there: cargo xtask test --real-libs",
            library.display()
        )));
    };
    affinity::apart(|cpu| Bench::new(cpu, library)?.measure(rounds)).map(Part::Measured)
}

struct Bench {
    worker: Worker,
    placed: Point,
    entry: Point,
    bpftrace: Option<String>,
    function: Function,
}

impl Bench {
    fn new(cpu: usize, library: PathBuf) -> Result<Self> {
        let bytes = std::fs::read(&library).with_context(|| format!("cannot read {}", library.display()))?;
        let point = |state| {
            let found = profiles(state)?.inspect(&library, &bytes).context("no profile is for the driver")?;
            let point = found.points.into_iter().find(|point| point.name == FUNCTION);
            point.with_context(|| format!("{FUNCTION} cannot be probed: {:?}", found.refusals))
        };
        let (placed, entry) = (point(State::Placed)?, point(State::Entry)?);
        let worker = Worker::start(cpu, Some(&library))?;
        let function = Function { library, name: FUNCTION, offset: entry.function_offset };
        Ok(Self { worker, placed, entry, bpftrace: bpftrace::version(), function })
    }

    fn measure(&mut self, rounds: usize) -> Result<Outcome> {
        let mut order = State::ALL;
        let mut measured = Vec::new();
        for round in 0..rounds {
            crate::progress(&format!("probe in the driver: round {} of {rounds}", round + 1));
            let mut row = [None; State::ALL.len()];
            for state in order {
                row[state as usize] = self.measure_in(state)?;
            }
            measured.push(Round(row));
            order.rotate_left(1);
        }
        let unprobed: Vec<f64> = measured.iter().filter_map(|round| round.0[0]).collect();
        let compare = |what, first, second, aim| Compared {
            what,
            ns: [first, second].map(|state| {
                stats::median(&measured.iter().filter_map(|round| round.cost(state)).collect::<Vec<_>>())
            }),
            ratio: stats::estimate(
                &measured.iter().filter_map(|round| round.ratio(first, second)).collect::<Vec<_>>(),
            ),
            aim,
        };
        Ok(Outcome {
            library: LIBRARY,
            function: FUNCTION,
            placed_at: self.placed.offset - self.placed.function_offset,
            placement: self.placed.placement.name(),
            entry_placement: self.entry.placement.name(),
            bpftrace: self.bpftrace.clone(),
            unprobed_ns: stats::median(&unprobed).context("no rounds")?,
            compared: vec![
                compare("entry only: placed ÷ bpftrace", State::Placed, State::Bpftrace, Some(AIM)),
                compare("entry only: placed ÷ ours at +0", State::Placed, State::Entry, None),
                compare("entry + return: placed ÷ ours at +0", State::PlacedPair, State::EntryPair, None),
            ],
        })
    }

    /// ns per call; `None` where bpftrace is not installed.
    fn measure_in(&mut self, state: State) -> Result<Option<f64>> {
        let calls = state.calls();
        let all =
            |worker: &mut Worker, meanwhile: &mut dyn FnMut()| worker.median(FUNCTION, calls, meanwhile);
        let ns = match state {
            State::Unprobed => all(&mut self.worker, &mut || ())?,
            State::Bpftrace if self.bpftrace.is_none() => return Ok(None),
            State::Bpftrace => {
                let bpftrace = Bpftrace::count(self.worker.pid(), &self.function)?;
                let ns = all(&mut self.worker, &mut || ())?;
                let counted = bpftrace.stop()?;
                ensure!(counted >= worker::counted(calls), "bpftrace counted only {counted} calls");
                ns
            }
            State::Placed | State::Entry | State::PlacedPair | State::EntryPair => {
                probe::with_ours(&mut self.worker, profiles(state)?, worker::total(calls), all)?
            }
        };
        Ok(Some(ns))
    }
}

/// Built-in profiles, but of the driver just one function, as this state wants it.
fn profiles(state: State) -> Result<Profiles> {
    let (place, returns) = state.rule().context("our probes are not in this state")?;
    let file = tempfile::NamedTempFile::new()?;
    let profile = format!(
        "engine = \"cuda\"\ntitle = \"CUDA driver\"\nfiles = [\"libcuda.so*\"]\n[[point]]\n\
         symbols = [\"{FUNCTION}\"]\nrole = \"other\"\nreturns = \"{returns}\"\nplace = \"{place}\"\n"
    );
    std::fs::write(file.path(), profile)?;
    let mut profiles = Profiles::builtin();
    profiles.load(file.path())?;
    Ok(profiles)
}

/// ns per call in each state.
struct Round([Option<f64>; State::ALL.len()]);

impl Round {
    fn cost(&self, state: State) -> Option<f64> {
        Some(self.0[state as usize]? - self.0[State::Unprobed as usize]?)
    }

    fn ratio(&self, first: State, second: State) -> Option<f64> {
        Some(self.cost(first)? / self.cost(second)?)
    }
}

impl Outcome {
    fn table(&self) -> Table {
        let title = format!(
            "Cost of a probe in NVIDIA's driver ({} of {}, unprobed {:.1} ns): CPU ns per call of the probe alone; ours \
             is placed at +{} ({}), the entry at +0 is {}; ours writes an event with arguments, {} only counts",
            self.function,
            self.library,
            self.unprobed_ns,
            self.placed_at,
            self.placement,
            self.entry_placement,
            self.bpftrace.as_deref().unwrap_or("bpftrace"),
        );
        let mut header = vec!["probe", "first", "second"];
        header.extend(RATIO);
        let mut table = Table::new(&title, &header);
        for compared in &self.compared {
            let mut row = vec![compared.what.to_owned()];
            row.extend(
                compared.ns.map(|ns| ns.map_or_else(|| "not installed".into(), |ns| format!("{ns:.0}"))),
            );
            row.extend(ratio(compared.ratio.as_ref(), compared.aim));
            table.rows.push(row);
        }
        table
    }
}

pub(crate) fn text(outcome: &Part<Outcome>) -> String {
    outcome.text("Cost of a probe in NVIDIA's driver", |outcome| outcome.table().to_string())
}

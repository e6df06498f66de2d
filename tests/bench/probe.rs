//! What our probes cost, against empty ones at the same instructions of the same process.

use anyhow::{Context as _, Result, ensure};
use engines::Profiles;
use serde::Serialize;
use tracer::probe::{Options, Session, process};
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{RATIO, Table, ratio},
};

use crate::{
    affinity,
    empty::{Empty, Place},
    worker::{self, SITES, Worker},
};

const AIM: Aim = Aim::AtMost(1.3);

/// What one site costs, in ns of CPU time per call, over all rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    what: &'static str,
    instruction: &'static str,
    /// What the kernel does with the instruction: `nop5`, `emulated`, `stepped`.
    placement: &'static str,
    unprobed_ns: f64,
    empty_ns: f64,
    ours_ns: f64,
    /// Cost of our probe ÷ cost of the empty one; the unprobed call is subtracted from both.
    ratio: Option<Estimate>,
    aim: Option<Aim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unprobed,
    Empty,
    Ours,
}

/// Measures from another CPU than the traced process's.
pub(crate) fn run(rounds: usize) -> Result<Vec<Cost>> {
    affinity::apart(|cpu| Bench::new(cpu)?.measure(rounds))
}

/// What was measured under a session, and what that saw.
pub(crate) struct Traced<T> {
    pub(crate) measured: T,
    pub(crate) events: usize,
    pub(crate) tokens: u64,
}

/// Measures while a process is traced, calling what drains the rings over and over. Nothing may be lost: a lost event is
/// cheaper.
pub(crate) fn with_session<T>(
    options: Options,
    profiles: Profiles,
    target: u32,
    measure: impl FnOnce(&mut dyn FnMut()) -> Result<T>,
) -> Result<Traced<T>> {
    let mut session = Session::start(options, profiles)?;
    session.add(&process::find(target)?)?;
    let mut batch = Vec::new();
    let mut events = 0;
    let mut drain = || {
        session.drain(&mut batch);
        events += batch.len();
        batch.clear();
    };
    let measured = measure(&mut drain)?;
    let stopped = session.stop(&mut batch);
    events += batch.len();
    let lost: Vec<_> = stopped.ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(lost.is_empty(), "events were lost, which makes probes cheaper: {lost:?}");
    Ok(Traced { measured, events, tokens: stopped.progress.tokens })
}

/// Measures calls of a process that has our probes, all of which must have left their events.
pub(crate) fn with_ours<T>(
    worker: &mut Worker,
    profiles: Profiles,
    calls: usize,
    measure: impl FnOnce(&mut Worker, &mut dyn FnMut()) -> Result<T>,
) -> Result<T> {
    // What is compared is a probe and its record: no samples, no scheduler.
    let options = Options { sample_hz: 0, sched: false, ..Options::default() };
    let traced = with_session(options, profiles, worker.pid(), |drain| measure(worker, drain))?;
    ensure!(traced.events >= calls, "{} events of {calls} calls", traced.events);
    Ok(traced.measured)
}

struct Bench {
    worker: Worker,
    profiles: Profiles,
    program: std::path::PathBuf,
    points: Vec<engines::Point>,
}

impl Bench {
    fn new(cpu: usize) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("bench.toml");
        std::fs::write(&file, worker::profile(&program)?)?;
        let mut profiles = Profiles::builtin();
        profiles.load(&file)?;
        let bytes = std::fs::read(&program)?;
        let library = profiles.inspect(&program, &bytes).context("no profile is for this program")?;
        let point = |name: &str| {
            let point = library.points.iter().find(|point| point.name == name);
            point.cloned().with_context(|| format!("`{name}` cannot be probed: {:?}", library.refusals))
        };
        let points = SITES.iter().map(|site| point(site.point)).collect::<Result<_>>()?;
        Ok(Self { worker: Worker::start(cpu, None)?, profiles, program, points })
    }

    fn measure(&mut self, rounds: usize) -> Result<Vec<Cost>> {
        let mut order = [State::Unprobed, State::Empty, State::Ours];
        // By site, a row of (unprobed, empty, ours) per round.
        let mut measured = vec![Vec::new(); SITES.len()];
        for round in 0..rounds {
            crate::progress(&format!("probe cost: round {} of {rounds}", round + 1));
            let mut row = vec![[0.0; 3]; SITES.len()];
            for state in order {
                for (site, ns) in self.measure_in(state)?.into_iter().enumerate() {
                    row[site][state as usize] = ns;
                }
            }
            measured.iter_mut().zip(row).for_each(|(rows, row)| rows.push(row));
            order.rotate_left(1);
        }
        Ok((0..SITES.len()).map(|site| self.cost(site, &measured[site])).collect())
    }

    /// ns per call of each site.
    fn measure_in(&mut self, state: State) -> Result<Vec<f64>> {
        match state {
            State::Unprobed => all(&mut self.worker, &mut || ()),
            State::Empty => {
                let places: Vec<Place> = self
                    .points
                    .iter()
                    .map(|point| Place { offset: point.offset, with_return: point.return_probe })
                    .collect();
                let _attached = Empty::attach(self.worker.pid(), &self.program, &places)?;
                all(&mut self.worker, &mut || ())
            }
            State::Ours => {
                let calls: u32 = SITES.iter().map(|site| site.calls).sum();
                with_ours(&mut self.worker, self.profiles.clone(), worker::total(calls), all)
            }
        }
    }

    fn cost(&self, site: usize, rounds: &[[f64; 3]]) -> Cost {
        let column = |state: State| {
            let column: Vec<f64> = rounds.iter().map(|round| round[state as usize]).collect();
            stats::median(&column).unwrap_or(f64::NAN)
        };
        let ratios: Vec<f64> =
            rounds.iter().map(|[unprobed, empty, ours]| (ours - unprobed) / (empty - unprobed)).collect();
        let point = &self.points[site];
        Cost {
            what: SITES[site].what,
            instruction: SITES[site].instruction,
            placement: point.placement.name(),
            unprobed_ns: column(State::Unprobed),
            empty_ns: column(State::Empty),
            ours_ns: column(State::Ours),
            ratio: stats::estimate(&ratios),
            aim: point.return_probe.then_some(AIM),
        }
    }
}

/// ns per call of each site, as things are.
fn all(worker: &mut Worker, meanwhile: &mut dyn FnMut()) -> Result<Vec<f64>> {
    SITES.iter().map(|site| worker.median(site.point, site.calls, meanwhile)).collect()
}

pub(crate) fn table(costs: &[Cost]) -> Table {
    let mut header = vec!["probe", "first instruction", "the kernel", "unprobed", "empty", "ours"];
    header.extend(RATIO);
    let mut table = Table::new(
        "Cost of a probe: CPU ns per call; ours (with its event, rings drained) ÷ an empty program at the same \
         instruction",
        &header,
    );
    for cost in costs {
        let mut row = vec![cost.what.to_owned(), cost.instruction.to_owned(), cost.placement.to_owned()];
        row.push(format!("{:.1}", cost.unprobed_ns));
        row.extend([cost.empty_ns, cost.ours_ns].map(|ns| format!("{ns:.0}")));
        row.extend(ratio(cost.ratio.as_ref(), cost.aim));
        table.rows.push(row);
    }
    table
}

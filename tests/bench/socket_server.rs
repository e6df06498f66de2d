//! What following sockets costs a server of many connections: tokens come from them alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use tracer::capture::Capture;
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::{
    recorder::Recorder,
    server::{Server, Window},
    throughput::{self, Pace},
};

const CONNECTIONS: u32 = 64;
const SPEED_AIM: Aim = Aim::AtLeast(0.99);
/// In ns of the server's CPU time per token.
const COST_AIM: Aim = Aim::AtMost(1_200.0);
/// The probes of a step remain: there is one step for as many tokens as there are connections.
const RECORDER_OPTIONS: [&str; 3] = ["--no-sched", "--sample-hz", "0"];

/// All connections are one batch, and prompts take no time: about 5,000 tokens/s where the GPU sets the pace.
fn server_options(pace: Pace) -> Vec<&'static str> {
    let mut options =
        vec!["--no-marks", "--max-batch", "64", "--prefill-chunk", "65536", "--send-buffer", "0"];
    options.extend(["--slot-us", "0", "--context-token-us", "0", "--prefill-token-us", "0"]);
    options.extend(["--host-us", "20", "--kernels", "2", "--step-us", "11500"]);
    if pace == Pace::Cpu {
        options.push("--zero-gpu");
    }
    options
}

/// One way of using the server: all windows, by round.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pace: Pace,
    /// Alone, recorded.
    windows: Vec<[Window; 2]>,
    speed_aim: Option<Aim>,
    cost_aim: Option<Aim>,
    /// What the ledgers of all recordings say was lost, by name.
    lost: BTreeMap<String, u64>,
}

/// Measures rounds of the server alone and recorded, in an order that changes from round to round.
pub(crate) fn run(pace: Pace, rounds: usize, window: Duration) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let libraries = folder.path().join("libraries");
    standin::stage(&libraries)?;
    let server = Server::start(&libraries, None, &server_options(pace))?;
    let bench = Bench { server, folder: folder.path().join("capture"), window };
    let mut outcome = Outcome {
        pace,
        windows: Vec::new(),
        speed_aim: (pace == Pace::Gpu).then_some(SPEED_AIM),
        cost_aim: (pace == Pace::Cpu).then_some(COST_AIM),
        lost: BTreeMap::new(),
    };
    for round in 0..rounds {
        crate::progress(&format!("sockets of a server {}: round {} of {rounds}", pace.text(), round + 1));
        let before = if round % 2 == 0 { Some(bench.loaded()?) } else { None };
        let (recorded, lost) = bench.recorded()?;
        let alone = before.map_or_else(|| bench.loaded(), Ok)?;
        outcome.windows.push([alone, recorded]);
        lost.into_iter().for_each(|(name, count)| *outcome.lost.entry(name).or_default() += count);
    }
    Ok(outcome)
}

struct Bench {
    server: Server,
    folder: PathBuf,
    window: Duration,
}

impl Bench {
    fn loaded(&self) -> Result<Window> {
        let load = self.server.load(CONNECTIONS)?;
        let window = self.server.watch(self.window)?;
        drop(load);
        self.server.wait_idle()?;
        Ok(window)
    }

    /// With what was lost. The load begins when the recording has: a connection is followed from its next request on.
    fn recorded(&self) -> Result<(Window, BTreeMap<String, u64>)> {
        let mut recorder = Recorder::start(self.server.pid(), &self.folder, &RECORDER_OPTIONS)?;
        recorder.wait_for_flush("clock_host")?;
        let before = self.server.stats()?;
        let window = self.loaded()?;
        let tokens = self.server.stats()?.tokens - before.tokens;
        let summary = recorder.stop()?;
        let lost = lost(&self.folder)?;
        throughput::remove(&self.folder)?;
        // The load ends in the middle of its responses: some tokens were generated and are never sent.
        ensure!(
            summary.tokens + lost.values().sum::<u64>() >= tokens / 5 * 4,
            "the recorder saw {} tokens of {tokens} on sockets and lost only {lost:?}",
            summary.tokens
        );
        Ok((window, lost))
    }
}

/// The losses in a capture's ledger, by name.
fn lost(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let rows = Capture::open(folder).and_then(|capture| capture.ledger()?.collect::<Result<Vec<_>, _>>());
    let rows = rows.with_context(|| format!("reading the ledger of {}", folder.display()))?;
    let mut lost = BTreeMap::new();
    for row in rows.into_iter().filter(|row| row.loss && row.count > 0) {
        *lost.entry(row.name).or_default() += row.count;
    }
    Ok(lost)
}

impl Outcome {
    fn median(&self, state: usize, figure: fn(&Window) -> f64) -> f64 {
        let values: Vec<f64> = self.windows.iter().map(|windows| figure(&windows[state])).collect();
        stats::median(&values).unwrap_or(f64::NAN)
    }

    /// Compares alone and recorded round by round.
    fn compare(&self, how: impl Fn(&Window, &Window) -> f64) -> Option<Estimate> {
        stats::estimate(
            &self.windows.iter().map(|[alone, recorded]| how(alone, recorded)).collect::<Vec<f64>>(),
        )
    }

    fn rows(&self) -> [Vec<String>; 3] {
        let row = |what: &str, figure: fn(&Window) -> f64, compared: Option<Estimate>, aim: Option<Aim>| {
            let mut row = vec![self.pace.text().to_owned(), what.to_owned()];
            row.extend([0, 1].map(|state| format!("{:.0}", self.median(state, figure))));
            row.extend(ratio(compared.as_ref(), aim));
            row
        };
        let speed = self.compare(|alone, recorded| recorded.tokens_per_s / alone.tokens_per_s);
        let cost = self.compare(|alone, recorded| recorded.cpu_ns_per_token - alone.cpu_ns_per_token);
        let total: u64 = self.lost.values().sum();
        let verdict = if total == 0 { "met" } else { "missed" };
        let lost = ["lost, by the ledger", "", &total.to_string(), "", "", "0", verdict];
        [
            row("tokens/s: with ÷ alone", |window| window.tokens_per_s, speed, self.speed_aim),
            row("CPU ns per token: with − alone", |window| window.cpu_ns_per_token, cost, self.cost_aim),
            [self.pace.text()].into_iter().chain(lost).map(str::to_owned).collect(),
        ]
    }
}

pub(crate) fn table(outcomes: &[Outcome]) -> Table {
    let title = format!(
        "Stand-in server on a simulated GPU, without marks, {CONNECTIONS} connections: recorded ({}), against alone",
        RECORDER_OPTIONS.join(" ")
    );
    let mut header = vec!["server", "figure", "alone", "with"];
    header.extend(judged("compared"));
    let mut table = Table::new(&title, &header);
    table.rows.extend(outcomes.iter().flat_map(Outcome::rows));
    table
}

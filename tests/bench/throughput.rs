//! What recording costs a server, and what it costs the recorder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{RATIO, Table, ratio},
};

use crate::{
    recorder::{Recorder, Use},
    server::{Server, Window},
};

const CONCURRENCY: u32 = 8;
const AIM: Aim = Aim::AtLeast(0.99);
/// Of the GPU times alone: recorded with them ÷ recorded without.
const AIM_GPU_TIMES: Aim = Aim::AtLeast(0.995);

/// How the server is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pace {
    /// By its simulated GPU: 1,000 steps/s at most.
    Gpu,
    /// By the CPU: the GPU takes no time.
    Cpu,
}

impl Pace {
    pub(crate) fn options(self) -> Vec<&'static str> {
        let mut options = vec!["--slot-us", "0", "--context-token-us", "0", "--prefill-token-us", "0"];
        options.extend(["--host-us", "20", "--kernels", "2", "--step-us", "900"]);
        if self == Self::Cpu {
            options.push("--zero-gpu");
        }
        options
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Gpu => "paced by its GPU",
            Self::Cpu => "CPU-bound (zero GPU time)",
        }
    }
}

/// What is there beside the server; `Alone` is what the others are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alone,
    Recorded,
    Loaded,
    Full,
}

impl State {
    const ALL: [Self; 4] = [Self::Alone, Self::Recorded, Self::Loaded, Self::Full];

    fn text(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Recorded => "recorded",
            Self::Loaded => "injected library, idle",
            Self::Full => "recorded, with GPU times",
        }
    }

    fn injected(self) -> bool {
        matches!(self, Self::Loaded | Self::Full)
    }

    /// The raw table that shows that everything is recorded.
    fn proof(self) -> Option<&'static str> {
        match self {
            Self::Alone | Self::Loaded => None,
            Self::Recorded => Some("calls"),
            Self::Full => Some("mark_gpu_span"),
        }
    }
}

/// A figure of a window, and its name.
#[derive(Clone, Copy)]
struct Figure {
    name: &'static str,
    of: fn(&Window) -> f64,
}

/// What the recorder used in a window, and all that it recorded.
#[derive(Clone, Copy, Debug, Serialize)]
struct RecorderUse {
    cpu_share: f64,
    peak_rss_bytes: u64,
    raw_bytes_per_s: f64,
    events_per_s: f64,
    cpu_ns_per_event: f64,
    lost: u64,
}

/// One way of using the server: all windows, by round.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pace: Pace,
    /// alone, recorded, with the injected library idle, recorded with GPU times.
    windows: Vec<[Window; 4]>,
    recorded: Vec<RecorderUse>,
    recorded_full: Vec<RecorderUse>,
}

/// Measures rounds of the four states next to each other, in an order that changes from round to round.
pub(crate) fn run(pace: Pace, rounds: usize, window: Duration) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let libraries = folder.path().join("libraries");
    standin::stage(&libraries)?;
    let inject = standin::built("libtracer_inject.so", "tracer-inject")?;
    let bench = Bench {
        plain: Server::start(&libraries, None, &pace.options())?,
        injected: Server::start(&libraries, Some(&inject), &pace.options())?,
        folder: folder.path().to_owned(),
        window,
    };
    let mut outcome = Outcome { pace, windows: Vec::new(), recorded: Vec::new(), recorded_full: Vec::new() };
    let mut order = State::ALL;
    for round in 0..rounds {
        crate::progress(&format!("server {}: round {} of {rounds}", pace.text(), round + 1));
        let mut windows = [None; 4];
        for state in order {
            let (window, usage) = bench.measure(state)?;
            windows[state as usize] = Some(window);
            match state {
                State::Recorded => outcome.recorded.extend(usage),
                State::Full => outcome.recorded_full.extend(usage),
                State::Alone | State::Loaded => {}
            }
        }
        if let [Some(alone), Some(recorded), Some(loaded), Some(full)] = windows {
            outcome.windows.push([alone, recorded, loaded, full]);
        }
        order.rotate_left(1);
    }
    Ok(outcome)
}

struct Bench {
    plain: Server,
    injected: Server,
    folder: PathBuf,
    window: Duration,
}

impl Bench {
    fn measure(&self, state: State) -> Result<(Window, Option<RecorderUse>)> {
        let server = if state.injected() { &self.injected } else { &self.plain };
        let load = server.load(CONCURRENCY)?;
        let result = match state.proof() {
            Some(proof) => {
                let (window, usage) = self.record(server, proof)?;
                (window, Some(usage))
            }
            None => (server.watch(self.window)?, None),
        };
        drop(load);
        server.wait_idle()?;
        Ok(result)
    }

    /// The window begins and ends when the recorder has just written, so that what it wrote belongs to it.
    fn record(&self, server: &Server, proof: &str) -> Result<(Window, RecorderUse)> {
        let folder = self.folder.join("capture");
        let mut recorder = Recorder::start(server.pid(), &folder, &[])?;
        recorder.wait_for_flush(proof)?;
        let begin = (server.stats()?, recorder.usage()?);
        std::thread::sleep(self.window.saturating_sub(Duration::from_millis(500)));
        recorder.wait_for_flush(proof)?;
        let end = (server.stats()?, recorder.usage()?);
        let summary = recorder.stop()?;
        remove(&folder)?;
        let tokens = end.0.tokens - begin.0.tokens;
        ensure!(
            summary.tokens + summary.dropped >= tokens,
            "the recorder saw {} tokens of {tokens} and lost only {} events",
            summary.tokens,
            summary.dropped
        );
        let seconds = (end.0.now_ns - begin.0.now_ns) as f64 / 1e9;
        let usage = RecorderUse::new(
            begin.1,
            end.1,
            seconds,
            summary.events as f64 / summary.seconds,
            summary.dropped,
        );
        Ok((Window::between(begin.0, end.0)?, usage))
    }
}

impl RecorderUse {
    fn new(begin: Use, end: Use, seconds: f64, events_per_s: f64, lost: u64) -> Self {
        let cpu_ns = (end.cpu_ns - begin.cpu_ns) as f64;
        Self {
            cpu_share: cpu_ns / 1e9 / seconds,
            peak_rss_bytes: end.peak_rss,
            raw_bytes_per_s: (end.raw_bytes - begin.raw_bytes) as f64 / seconds,
            events_per_s,
            cpu_ns_per_event: cpu_ns / seconds / events_per_s,
            lost,
        }
    }
}

pub(crate) fn remove(folder: &Path) -> Result<()> {
    std::fs::remove_dir_all(folder).map_err(|error| anyhow::anyhow!("{}: {error}", folder.display()))
}

impl Outcome {
    fn median(&self, state: State, figure: impl Fn(&Window) -> f64) -> f64 {
        let values: Vec<f64> = self.windows.iter().map(|windows| figure(&windows[state as usize])).collect();
        stats::median(&values).unwrap_or(f64::NAN)
    }

    /// With ÷ without, round by round.
    fn ratio(&self, state: State, without: State, figure: impl Fn(&Window) -> f64) -> Option<Estimate> {
        let pair =
            |windows: &[Window; 4]| figure(&windows[state as usize]) / figure(&windows[without as usize]);
        stats::estimate(&self.windows.iter().map(pair).collect::<Vec<f64>>())
    }

    /// Throughput and CPU time of the server.
    pub(crate) fn table(&self) -> Table {
        let mut header = vec!["server", "figure", "alone", "with"];
        header.extend(RATIO);
        let title = format!(
            "Stand-in server on a simulated GPU, {}: {:.0} steps/s, {CONCURRENCY} requests at a time; with ÷ alone",
            self.pace.text(),
            self.median(State::Alone, |window| window.steps_per_s)
        );
        let mut table = Table::new(&title, &header);
        let aim = (self.pace == Pace::Gpu).then_some(AIM);
        let mut row = |name: &str, [without, with]: [State; 2], figure: Figure, aim: Option<Aim>| {
            let mut row = vec![name.to_owned(), figure.name.to_owned()];
            row.extend([without, with].map(|state| format!("{:.0}", self.median(state, figure.of))));
            row.extend(ratio(self.ratio(with, without, figure.of).as_ref(), aim));
            table.rows.push(row);
        };
        let tokens = Figure { name: "tokens/s", of: |window| window.tokens_per_s };
        let cpu = Figure { name: "CPU ns per token", of: |window| window.cpu_ns_per_token };
        for state in [State::Recorded, State::Loaded, State::Full] {
            row(state.text(), [State::Alone, state], tokens, aim);
            row(state.text(), [State::Alone, state], cpu, None);
        }
        let gpu_times = aim.map(|_| AIM_GPU_TIMES);
        row("GPU times (recorded is “alone” here)", [State::Recorded, State::Full], tokens, gpu_times);
        table
    }

    /// One row for the recorder's own use in each recorded state.
    fn recorder_rows(&self) -> impl Iterator<Item = Vec<String>> {
        let states = [(State::Recorded, &self.recorded), (State::Full, &self.recorded_full)];
        states.into_iter().map(|(state, uses)| {
            let median = |figure: fn(&RecorderUse) -> f64| {
                stats::median(&uses.iter().map(figure).collect::<Vec<f64>>()).unwrap_or(f64::NAN)
            };
            let peak = uses.iter().map(|usage| usage.peak_rss_bytes).max().unwrap_or(0);
            let lost: u64 = uses.iter().map(|usage| usage.lost).sum();
            vec![
                format!("{}, {}", self.pace.text(), state.text()),
                format!("{:.1}", 100.0 * median(|usage| usage.cpu_share)),
                format!("{:.0}", median(|usage| usage.cpu_ns_per_event)),
                format!("{:.0}", peak as f64 / 1e6),
                format!("{:.0}", median(|usage| usage.events_per_s)),
                format!("{:.2}", median(|usage| usage.raw_bytes_per_s) / 1e6),
                lost.to_string(),
            ]
        })
    }
}

/// What the recorder used.
pub(crate) fn recorder_table(outcomes: &[Outcome]) -> Table {
    let mut table = Table::new(
        "The recorder itself (99 Hz samples and the scheduler recorded, as by default)",
        &[
            "server",
            "CPU, % of one",
            "CPU ns per event",
            "peak RSS MB",
            "events/s",
            "raw MB/s",
            "events lost",
        ],
    );
    table.rows.extend(outcomes.iter().flat_map(Outcome::recorder_rows));
    table
}

//! A flame graph of many samples, beside the tools that draw one of what `perf script` prints.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use tracer_tests::samples;
use tracer_tests::stats::{self, Aim, Estimate};
use tracer_tests::table::{Table, judged, ratio};

use crate::large::{Cost, cost};
use crate::part::Part;
use crate::progress;

const AIM_S: Aim = Aim::AtMost(1.0);

#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    samples: usize,
    ours: Vec<Cost>,
    /// Seconds of `inferno-collapse-perf | inferno-flamegraph`, by round.
    inferno_s: Part<Vec<f64>>,
}

const fn count(quick: bool) -> usize {
    if quick { 20_000 } else { 1_000_000 }
}

/// Prints the samples as `perf script` does.
pub(crate) fn script(quick: bool) -> Result<()> {
    Ok(samples::script(&mut BufWriter::with_capacity(1 << 16, std::io::stdout().lock()), count(quick))?)
}

/// In turns, `inferno` being the folder of its programs.
pub(crate) fn run(folder: &Path, tracer: &PathBuf, inferno: Option<&Path>, quick: bool) -> Result<Outcome> {
    let samples = count(quick);
    let (capture, picture) = (folder.join("samples"), folder.join("flames.svg"));
    progress("recording samples");
    samples::record(&capture, samples)?;
    let arguments =
        ["flamegraph", &capture.to_string_lossy(), "-o", &picture.to_string_lossy()].map(str::to_owned);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rounds = if quick { 2 } else { stats::MIN_PAIRS };
    let (mut ours, mut inferno_s) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(cost(tracer, &arguments).context("flamegraph")?);
        if let Some(inferno) = inferno {
            inferno_s.push(piped(inferno, &folder.join("inferno.svg"), quick)?);
        }
    }
    let inferno_s = match inferno {
        Some(_) => Part::Measured(inferno_s),
        None => Part::LeftOut("inferno's programs are not here (cargo install inferno)".to_owned()),
    };
    Ok(Outcome { samples, ours, inferno_s })
}

/// Seconds that inferno's programs take for the text, which is made while they read it.
fn piped(inferno: &Path, picture: &Path, quick: bool) -> Result<f64> {
    progress("inferno");
    let began = Instant::now();
    let mut text = Command::new(std::env::current_exe()?);
    let mut text =
        text.arg("--perf-script").args(quick.then_some("--quick")).stdout(Stdio::piped()).spawn()?;
    let mut collapse = Command::new(inferno.join("inferno-collapse-perf"));
    let collapse = collapse.stdin(text.stdout.take().context("no pipe")?).stdout(Stdio::piped());
    let mut collapse = collapse.stderr(Stdio::null()).spawn().context("running inferno-collapse-perf")?;
    let mut draw = Command::new(inferno.join("inferno-flamegraph"));
    let draw = draw.stdin(collapse.stdout.take().context("no pipe")?).stdout(File::create(picture)?);
    let mut draw = draw.spawn().context("running inferno-flamegraph")?;
    for (what, child) in [("text", &mut text), ("collapse", &mut collapse), ("flamegraph", &mut draw)] {
        ensure!(child.wait()?.success(), "{what} failed");
    }
    Ok(began.elapsed().as_secs_f64())
}

impl Outcome {
    pub(crate) fn table(&self) -> Table {
        let title = format!("A flame graph of {} samples: seconds", self.samples);
        let mut header = vec!["by"];
        header.extend(judged("median"));
        header.push("÷ tracer");
        let mut table = Table::new(&title, &header);
        let ours: Vec<f64> = self.ours.iter().map(|cost| cost.seconds).collect();
        let mut row = vec!["tracer flamegraph".to_owned()];
        row.extend(ratio(stats::estimate(&ours).as_ref(), Some(AIM_S)));
        row.push("1".to_owned());
        table.rows.push(row);
        let what = "inferno-collapse-perf | inferno-flamegraph";
        match &self.inferno_s {
            Part::Measured(theirs) => {
                let times: Vec<f64> = theirs.iter().zip(&ours).map(|(theirs, ours)| theirs / ours).collect();
                let mut row = vec![what.to_owned()];
                row.extend(ratio(stats::estimate(theirs).as_ref(), None));
                row.push(stats::estimate(&times).map_or_else(String::new, interval));
                table.rows.push(row);
            }
            Part::LeftOut(why) => table.rows.push(vec![format!("{what}: left out: {why}")]),
        }
        table
    }
}

fn interval(Estimate { median, low, high, .. }: Estimate) -> String {
    format!("{median:.1} ({low:.1} … {high:.1})")
}

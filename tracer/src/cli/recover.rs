//! `tracer recover`: finishes a capture whose recorder did not.

use std::{fmt::Display, io::Write, path::PathBuf, process::ExitCode};

use anyhow::Result;
use serde::Serialize;

use super::units::{count, duration};
use crate::capture::{self, Capture, Finished};
use crate::clock::ClockQuality;

/// Finish a capture whose recorder was killed, or derive an old one anew
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  tracer recover trace              then: tracer report trace
  tracer recover --reclock trace    GPU times of an old capture as this version maps them

A capture that is complete already is derived anew from what was recorded; nothing is lost by trying, and where it is \
interrupted it can be run again.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// Map GPU times of a complete capture anew, and say what that changed; `tracer report --reclock` only shows it
    #[arg(long)]
    reclock: bool,
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // Tables of another version may not be readable; nothing is known of its clocks then.
    let before = if args.reclock { clocks(args).ok() } else { None };
    let finished = capture::finish(&args.capture)?;
    let after = if args.reclock { Some(clocks(args)?) } else { None };
    let mut out = std::io::stdout();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &json(&finished, before.as_ref(), after.as_ref()))?;
        writeln!(out)?;
    } else {
        text(&finished, args, &mut out)?;
        let simulated = if finished.meta.simulated { " (simulated GPU)" } else { "" };
        if let Some(after) = after {
            let before = before.map_or("not readable".into(), |before| before.to_string());
            writeln!(out, "GPU times{simulated}, before: {before}")?;
            writeln!(out, "GPU times{simulated}, now:    {after}")?;
        }
        writeln!(out, "next: tracer report {}", args.capture.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How good the GPU times of a capture are.
#[derive(Serialize)]
struct Clocks {
    clocks: u64,
    segments: u64,
    /// The widest of the clocks' medians.
    median_bound_ns: u64,
    causality_violations: u64,
}

impl Clocks {
    fn new(clocks: &[ClockQuality]) -> Self {
        let all = || clocks.iter().map(|clock| &clock.quality);
        Self {
            clocks: clocks.len() as u64,
            segments: all().map(|quality| u64::from(quality.segments)).sum(),
            median_bound_ns: all().map(|quality| quality.median_bound_ns).max().unwrap_or(0),
            causality_violations: all().map(|quality| quality.causality_violations).sum(),
        }
    }
}

impl Display for Clocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { clocks, segments, median_bound_ns, causality_violations } = self;
        let (clocks, segments) = (count(*clocks), count(*segments));
        write!(
            f,
            "{clocks} clocks in {segments} segments, bound {} (median of ",
            duration(*median_bound_ns)
        )?;
        write!(f, "the worst), {} violations", count(*causality_violations))
    }
}

fn clocks(args: &Args) -> Result<Clocks> {
    let clocks = Capture::open(&args.capture)?.clock_quality()?.collect::<capture::Result<Vec<_>>>()?;
    Ok(Clocks::new(&clocks))
}

fn json(finished: &Finished, before: Option<&Clocks>, after: Option<&Clocks>) -> serde_json::Value {
    let torn: Vec<_> = finished
        .torn
        .iter()
        .map(|torn| serde_json::json!({ "table": torn.table, "rows": torn.rows, "lost_bytes": torn.bytes }))
        .collect();
    serde_json::json!({
        "schema": "tracer.recover/1",
        "recovered": finished.meta.recovered,
        "simulated": finished.meta.simulated,
        "rows": finished.rows,
        "torn": torn,
        "clocks_before": before,
        "clocks": after,
    })
}

fn text(finished: &Finished, args: &Args, out: &mut impl Write) -> Result<()> {
    let what = if finished.meta.recovered { "recovered; its end may be missing" } else { "complete" };
    writeln!(out, "{}: {what}", args.capture.display())?;
    for (table, rows) in finished.rows.iter().filter(|(_, rows)| **rows > 0) {
        writeln!(out, "{rows:>12} {table}")?;
    }
    for torn in &finished.torn {
        writeln!(out, "{}: {} bytes at its torn end were lost", torn.table, torn.bytes)?;
    }
    Ok(())
}

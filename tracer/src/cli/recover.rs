//! `tracer recover`: finishes a capture whose recorder did not.

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::Result;

use crate::capture::{self, Finished};

/// Finish a capture whose recorder was killed
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  tracer recover trace    then: tracer report trace

A capture that is complete already is derived anew from what was recorded; nothing is lost by trying.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let finished = capture::finish(&args.capture)?;
    let mut out = std::io::stdout();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &json(&finished))?;
        writeln!(out)?;
    } else {
        text(&finished, args, &mut out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn json(finished: &Finished) -> serde_json::Value {
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
    writeln!(out, "next: tracer report {}", args.capture.display())?;
    Ok(())
}

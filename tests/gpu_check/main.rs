//! Checks what GPU times rest on, on a real GPU: `cargo xtask gpu-check`.
//!
//! In: a GPU, by its driver. Out: a line for each thing that the clock assumes or claims, with what it should be and
//! what it is; the same as JSON, with the raw readings. The estimators are `tracer::clock`'s, as a recording uses them.

mod driver;
mod evaluate;
mod handshake;
mod line;
mod overhead;
mod record;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use driver::{Gpu, Unfit};
use line::{Line, Report};
use overhead::Overhead;

/// Exit code: there is no GPU here that could be checked.
const EXIT_UNFIT: u8 = 2;

/// Measures what GPU times rest on, on the GPU of this machine. `cargo xtask gpu-check` builds it and runs it.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 all aims met, 1 one was missed or something failed, 2 no GPU to check."
)]
struct Options {
    /// How long the clocks are compared
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Number of the GPU, as the driver counts
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Use the stand-in driver: shows that the check works, says nothing of any GPU
    #[arg(long)]
    simulated: bool,
    /// Write everything, the raw readings included, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            if error.is::<Unfit>() { ExitCode::from(EXIT_UNFIT) } else { ExitCode::FAILURE }
        }
    }
}

/// Whether no aim was missed.
fn run(options: &Options) -> Result<bool> {
    let gpu = Gpu::open(options.simulated, options.device)?;
    eprintln!("gpu-check: {}: about {} s", gpu.name, options.seconds);
    let overhead = Overhead::measure(&gpu).context("the cost of an event pair")?;
    let recording = record::record(&gpu, options.seconds).context("comparing the clocks")?;
    let lines: Vec<Line> = evaluate::lines(&recording).into_iter().chain(overhead.lines()).collect();
    let report = Report::new(&gpu, options.seconds, lines, &recording.bursts);
    print!("{}", report.text());
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(report.is_met())
}

//! `cargo xtask bench`: what tracing costs on this machine.

use crate::command::{cargo, run as run_command};
use crate::setup;
use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct Options {
    /// Few short measurements: shows that everything works, supports no claim.
    #[arg(long)]
    quick: bool,
    /// Write everything that was measured, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Sets up, builds (release) and measures.
///
/// # Errors
/// Set-up, build or a measurement failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    setup::run()?;
    // The programs and libraries that the benchmarks start; then the benchmarks, with the same features.
    run_command(cargo().args(["build", "--release", "--workspace"]).env("TRACER_EBPF", "require"))?;
    let mut bench = cargo();
    bench.args(["bench", "--workspace", "--bench", "cost", "--"]).env("TRACER_EBPF", "require");
    if options.quick {
        bench.arg("--quick");
    }
    if let Some(file) = &options.json {
        // The benchmarks run in a folder of cargo's choice.
        let file = std::path::absolute(file).with_context(|| format!("the path {}", file.display()))?;
        bench.arg("--json").arg(file);
    }
    run_command(&mut bench)
}

//! `cargo xtask gpu-check`: what GPU times rest on, on the GPU of this machine.

use crate::command::{built, cargo, display, run as run_command};
use anyhow::{Context, Result};
use clap::Args;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

#[derive(Args)]
pub(crate) struct Options {
    /// How long the clocks are compared.
    #[arg(long, default_value_t = 300)]
    seconds: u32,
    /// Number of the GPU, as the driver counts.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Use the stand-in driver: shows that the check works, says nothing of any GPU.
    #[arg(long)]
    simulated: bool,
    /// Write everything, the raw readings included, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Builds (release) and checks. The kernel-side program is not needed, so neither is what builds it.
///
/// # Errors
/// The build failed. The check's own exit code is this program's: 1 where an aim was missed, 2 where there is no GPU.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut build = cargo();
    // Libraries too: the stand-in is one.
    build.args(["build", "--release", "--workspace", "--lib", "--bin", "tracer-gpu-check"]);
    run_command(&mut build)?;
    let mut check = Command::new(built("release").join("tracer-gpu-check"));
    check.args(["--seconds", &options.seconds.to_string(), "--device", &options.device.to_string()]);
    if options.simulated {
        check.arg("--simulated");
    }
    if let Some(file) = &options.json {
        check.arg("--json").arg(file);
    }
    let line = display(&check);
    Err(check.exec()).with_context(|| format!("cannot start `{line}`"))
}

//! `cargo xtask bench`: what tracing costs on this machine, and how right its clocks are.

use crate::command::{built, cargo, root, run as run_command};
use crate::{real_libs, setup};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::process::Command;

#[derive(Args)]
pub(crate) struct Options {
    /// Few short measurements: shows that everything works, supports no claim.
    #[arg(long)]
    quick: bool,
    /// Instead: how right the clocks are on a simulated device; needs no root.
    #[arg(long)]
    clock: bool,
    /// Instead: what stacks cost only.
    #[arg(long, conflicts_with = "clock")]
    stacks: bool,
    /// Instead: only what following sockets costs.
    #[arg(long, conflicts_with = "clock")]
    sockets: bool,
    /// Instead: what a capture of ten million events takes to report and to show; needs no root.
    #[arg(long, conflicts_with_all = ["clock", "sockets"])]
    large: bool,
    /// Write everything that was measured, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Sets up, builds (release) and measures. The clocks and large captures need no set-up; of the rest, the benchmark leaves out, and says so,
/// what it has no library or peer for.
///
/// # Errors
/// Set-up, build or a measurement failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--release", "--workspace"]);
    let mut bench = Command::new(built("release").join("tracer-bench"));
    if options.clock {
        run_command(build.args(["--bin", "tracer-bench"]))?;
        bench.arg("--clock");
    } else if options.large {
        run_command(build.args(["--bin", "tracer-bench", "--bin", "tracer"]))?;
        bench.arg("--large");
        match inferno() {
            Ok(folder) => _ = bench.arg("--inferno").arg(folder),
            Err(error) => eprintln!("bench: nothing will be compared with inferno's programs: {error:#}"),
        }
    } else {
        setup::run()?;
        run_command(build.env("TRACER_EBPF", "require"))?;
    }
    if options.sockets {
        bench.arg("--sockets");
    } else if !options.clock && !options.large {
        for (what, brought) in [
            ("NVIDIA's driver", real_libs::fetch_driver()),
            ("bpftrace", setup::bring("bpftrace", "bpftrace")),
            ("perf", setup::bring("perf", "linux-perf")),
        ] {
            if let Err(error) = brought {
                eprintln!("bench: nothing will be compared with {what}: {error:#}");
            }
        }
        bench.arg("--real-libs").arg(real_libs::cache());
    }
    if options.stacks {
        bench.arg("--stacks");
    }
    if options.quick {
        bench.arg("--quick");
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(file);
    }
    run_command(&mut bench)
}

/// The folder of inferno's programs; installs them where they are missing.
fn inferno() -> Result<PathBuf> {
    const VERSION: &str = "0.12.8";
    let folder = root().join("target/inferno");
    let programs = folder.join("bin");
    if !programs.join("inferno-collapse-perf").exists() {
        eprintln!("bench: installing inferno {VERSION}");
        let mut install = cargo();
        install.args(["install", "--quiet", "--locked", "inferno", "--version", VERSION, "--root"]);
        run_command(install.arg(&folder))?;
    }
    Ok(programs)
}

//! `cargo xtask test`: every test there is.

use crate::command::{cargo, run as run_command};
use crate::{real_libs, real_servers, setup};
use anyhow::Result;
use clap::Args;
use std::process::Command;

#[derive(Args)]
pub(crate) struct Options {
    /// Fail where a test of the kernel tier would be skipped.
    #[arg(long)]
    require: bool,
    /// Run only tests whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Instead of the other tests: fetch NVIDIA's libraries and test the resolver and probes on them.
    #[arg(long, value_name = "WHICH", num_args = 0..=1, default_missing_value = "all", require_equals = true)]
    real_libs: Option<real_libs::Which>,
    /// Instead of the other tests: fetch FastAPI, uvicorn, Node and nginx, trace them, and test the Python package in
    /// them.
    #[arg(long, conflicts_with = "real_libs")]
    real_servers: bool,
    /// Instead of the other tests: fetch AIPerf (1.2 GB) and such servers, and compare what it measures with what is
    /// traced.
    #[arg(long, conflicts_with_all = ["real_libs", "real_servers"])]
    aiperf: bool,
}

/// Sets up, builds, and runs the plain tests and then the kernel tier.
///
/// # Errors
/// Set-up, build or a test failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(which) = options.real_libs {
        return real_libs::run(which, options.require);
    }
    if options.real_servers {
        return real_servers::run(options.require);
    }
    if options.aiperf {
        return real_servers::run_aiperf(options.require);
    }
    setup::run()?;
    // Marks of Python programs, and as bpftrace sees them; stacks as perf sees them; the page of `tracer view` in a browser.
    for (program, package) in
        [("python3", "python3"), ("bpftrace", "bpftrace"), ("perf", "linux-perf"), ("chromium", "chromium")]
    {
        if let Err(error) = setup::bring(program, package) {
            eprintln!("test: {error:#}");
        }
    }
    // The kernel tier and the stand-in's tests start programs and load libraries that no test links.
    step("build", cargo().args(["build", "--workspace"]), None)?;
    let mut tests = cargo();
    tests.args(["test", "--workspace"]);
    if options.require {
        tests.env("TRACER_REQUIRE", "1");
    }
    step("tests", &mut tests, options.filter.as_deref())?;
    step("kernel tier", &mut kernel_tier(options.require), options.filter.as_deref())
}

/// The tests against the running kernel.
pub(crate) fn kernel_tier(require: bool) -> Command {
    let mut command = cargo();
    // The whole workspace here too: of a part, cargo would build the dependencies anew, with fewer features.
    command.args(["test", "--workspace", "--test", "kernel"]);
    command.env("TRACER_EBPF", "require").env("TRACER_KERNEL_TIER", "1");
    if require {
        command.env("TRACER_REQUIRE", "1");
    }
    command
}

fn step(name: &str, command: &mut Command, filter: Option<&str>) -> Result<()> {
    eprintln!("test: {name}");
    if let Some(filter) = filter {
        command.args(["--", filter]);
    }
    run_command(command.env("TRACER_EBPF", "require"))
}

//! `cargo xtask test`: every test there is.

use crate::command::{cargo, run as run_command};
use crate::{real_libs, setup};
use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct Options {
    /// Fail where a test of the kernel tier would be skipped.
    #[arg(long)]
    require: bool,
    /// Run only tests whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Instead of the other tests: fetch NVIDIA's libraries and test the resolver on them.
    #[arg(long, value_name = "WHICH", num_args = 0..=1, default_missing_value = "all", require_equals = true)]
    real_libs: Option<real_libs::Which>,
}

/// Sets up, builds, and runs the plain tests and then the kernel tier.
///
/// # Errors
/// Set-up, build or a test failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(which) = options.real_libs {
        return real_libs::run(which);
    }
    setup::run()?;
    // The kernel tier and the stand-in's tests start programs and load libraries that no test links.
    step("build", &["build", "--workspace"], options)?;
    step("tests", &["test", "--workspace"], options)?;
    // The whole workspace here too: of a part, cargo would build the dependencies anew, with fewer features.
    step("kernel tier", &["test", "--workspace", "--test", "kernel"], options)
}

fn step(name: &str, arguments: &[&str], options: &Options) -> Result<()> {
    eprintln!("test: {name}");
    let mut command = cargo();
    command.args(arguments).env("TRACER_EBPF", "require");
    if name == "kernel tier" {
        command.env("TRACER_KERNEL_TIER", "1");
        if options.require {
            command.env("TRACER_REQUIRE", "1");
        }
    }
    if let Some(filter) = options.filter.as_ref().filter(|_| arguments[0] == "test") {
        command.args(["--", filter]);
    }
    run_command(&mut command)
}

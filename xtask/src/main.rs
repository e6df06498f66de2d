//! Development commands: `cargo xtask setup|test|demo|bench|gpu-check|fuzz`.

mod bench;
mod command;
mod demo;
mod fuzz;
mod gpu_check;
mod real_libs;
mod real_servers;
mod setup;
mod test;

use clap::{Parser, Subcommand};

/// Development commands of tracer.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Bring what is needed to build the kernel-side program and the stand-ins; does nothing where it is there.
    Setup,
    /// Set up, build everything and run every test, those against the running kernel included.
    Test(test::Options),
    /// Record a server on a simulated GPU under load, and leave a report and pictures in demo/.
    Demo(demo::Options),
    /// Measure what probes and recordings cost, as ratios within one run (needs root and an otherwise idle machine), or
    /// how right the clocks are.
    Bench(bench::Options),
    /// Check on a real GPU what GPU times rest on; needs a GPU and its driver, neither root nor CUDA.
    GpuCheck(gpu_check::Options),
    /// Fuzz the parsers of outside bytes.
    Fuzz(fuzz::Options),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Task::Setup => setup::run(),
        Task::Test(options) => test::run(&options),
        Task::Demo(options) => demo::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::GpuCheck(options) => gpu_check::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
    }
}

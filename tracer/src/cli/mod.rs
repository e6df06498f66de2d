//! The command line: one file per command.
//!
//! In: arguments. Out: text (or JSON) on stdout, messages on stderr, an exit code. A command parses, calls the
//! library and formats; anything worth testing lives below it.

mod budget;
mod doctor;
mod duration;
mod flamegraph;
mod heatmap;
mod histogram;
mod hold;
mod picture;
mod probes;
mod record;
mod recover;
mod report;
mod request;
mod stacks;
mod table;
mod target;
#[cfg(test)]
pub(crate) mod testing;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::probe::object;

/// Where did this token's time go? Latency of LLM servers per token, from the socket to the GPU, without restarting
/// or changing them.
#[derive(Debug, Parser)]
#[command(name = "tracer", version, long_version = long_version(), arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 recorded but nothing of an engine was seen."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    // Boxed: it is by far the largest.
    Record(Box<record::Args>),
    Report(report::Args),
    Request(request::Args),
    Flamegraph(flamegraph::Args),
    Heatmap(heatmap::Args),
    Histogram(histogram::Args),
    Recover(recover::Args),
    Probes(probes::Args),
    Doctor(doctor::Args),
    #[command(hide = true)]
    Hold(hold::Args),
}

/// Exit code: the recording went well and holds nothing of an engine.
pub const EXIT_NOTHING_SEEN: u8 = 3;

/// Runs the command line.
#[must_use]
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("TRACER_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,tracer=info,tracer_probes=debug"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let result = match cli.command {
        Command::Record(args) => record::run(&args),
        Command::Flamegraph(args) => flamegraph::run(&args),
        Command::Heatmap(args) => heatmap::run(&args),
        Command::Histogram(args) => histogram::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Probes(args) => probes::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Request(args) => request::run(&args),
        Command::Hold(args) => hold::run(&args),
    };
    result.unwrap_or_else(|error| {
        // A reader that closed the pipe (`| head`) wants no more, not even an error.
        if error.chain().any(|cause| {
            cause
                .downcast_ref::<std::io::Error>()
                .is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
        }) {
            return ExitCode::SUCCESS;
        }
        eprintln!("tracer: {error:#}");
        ExitCode::FAILURE
    })
}

fn long_version() -> &'static str {
    static TEXT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    TEXT.get_or_init(|| {
        let size = object::bytes().map_or(0, <[u8]>::len);
        format!("{}\nkernel-side program: {} ({size} bytes)", env!("CARGO_PKG_VERSION"), object::DESCRIPTION)
    })
}

//! `tracer flamegraph`: where time went, as SVG: on the CPU, off it, of tokens, of slow tokens against usual
//! ones, and on the GPU by layer.
//!
//! In: a capture and what of it is wanted. Out: weighted stacks, drawn and folded. Each way of weighting has a file.

mod attribution;
mod cpu;
mod layers;
mod off_cpu;
mod path;
mod select;
mod slow;
mod token_time;

use super::duration::parse as duration;
use super::picture::{open, subtitle, write};
use crate::capture::{Capture, Stacks, ThreadNames};
use crate::timeline::tables::Tables;
use anyhow::{Context, Result};
use flamegraphs::{FlameOptions, Folded, Header};
use select::Filters;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Draw where time went as a flame graph: CPU time, or with one of the modes, waiting, tokens, or slow tokens
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer flamegraph trace/ -o cpu.svg
  tracer flamegraph trace/ --off-cpu --thread scheduler
  tracer flamegraph trace/ --tokens --tenant acme --from 5s --to 10s
  tracer flamegraph trace/ --slow              slowest hundredth against the middle half
  tracer flamegraph trace/ --slow=50ms --phase prefill
  tracer flamegraph trace/ --gpu               layers of sampled steps
  tracer flamegraph trace/ --folded - -o cpu.svg | head

With --request, --tenant, --phase, --slower-than or --faster-than, CPU and off-CPU time are those that the selected
tokens waited for: of the threads that they waited for, while they did.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// File to write; `-` is stdout
    #[arg(long, short, default_value = "flamegraph.svg")]
    output: PathBuf,
    /// Also write the stacks in the folded format, for other tools; `-` is stdout
    #[arg(long, value_name = "FILE")]
    folded: Option<PathBuf>,
    /// How many requests are shown by name, those with most time
    #[arg(long, default_value_t = 12, value_name = "N")]
    requests: usize,
    /// Time off the CPU: by thread, what it waited for, its stack, and who woke it
    #[arg(long, group = "mode")]
    off_cpu: bool,
    /// Time of tokens: by request, phase, part of the latency, and stack
    #[arg(long, group = "mode")]
    tokens: bool,
    /// What slow tokens took longer for than the middle half; slow from DURATION [default: the slowest hundredth]
    #[arg(long, group = "mode", value_name = "DURATION", value_parser = duration, num_args = 0..=1, require_equals = true)]
    slow: Option<Option<Duration>>,
    /// GPU time of sampled steps, by engine and layer; of filters, only the window of time holds
    #[arg(long, group = "mode")]
    gpu: bool,
    #[command(flatten)]
    filters: Filters,
}

/// What all ways of weighting read.
struct Source<'a> {
    capture: &'a Capture,
    tables: &'a Tables,
    stacks: Stacks,
    threads: ThreadNames,
    filters: &'a Filters,
    /// Requests that are shown by name.
    named: usize,
}

/// A picture to draw: what its title says, its stacks, and how they are counted.
struct Weighted {
    title: String,
    facts: Vec<String>,
    count_name: &'static str,
    groups: usize,
    palette: flamegraphs::Palette,
    stacks: WeightedStacks,
}

enum WeightedStacks {
    /// ns.
    Sums(Folded<1>),
    /// ns of a usual token and of a slow one.
    Grown(Folded<2>),
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = open(&args.capture)?;
    let tables = capture.tables()?;
    let source = Source {
        capture: &capture,
        stacks: Stacks::read(&capture)?,
        threads: ThreadNames::read(&capture)?,
        tables: &tables,
        filters: &args.filters,
        named: args.requests,
    };
    let name = args.capture.display();
    let (weighted, hint) = if args.off_cpu {
        (off_cpu::weigh(&source)?, "was it recorded with --no-sched?")
    } else if args.tokens {
        (token_time::weigh(&source)?, "no token has a known latency")
    } else if let Some(slow) = args.slow {
        (slow::weigh(&source, slow)?, "no token has a known latency")
    } else if args.gpu {
        let hint =
            "layers need NVTX and GPU times: `tracer record -- CMD`, and an engine that names its layers";
        (layers::weigh(&source), hint)
    } else {
        (cpu::weigh(&source)?, "was it recorded with --sample-hz 0?")
    };
    let svg = draw(&source, &weighted).with_context(|| {
        let selected = if args.filters.is_all() { "" } else { "; or nothing was selected" };
        format!("cannot draw the flame graph of {name} ({hint}{selected})")
    })?;
    write(&args.output, "flame graph", &svg)?;
    if let Some(path) = &args.folded {
        let text = match &weighted.stacks {
            WeightedStacks::Sums(stacks) => stacks.text(),
            WeightedStacks::Grown(stacks) => stacks.text(),
        };
        write(path, "folded stacks", &text?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn draw(source: &Source, weighted: &Weighted) -> Result<String, flamegraphs::Error> {
    let title: Vec<String> = std::iter::once(weighted.title.clone()).chain(source.filters.words()).collect();
    let options = FlameOptions {
        header: Header {
            title: title.join(" · "),
            subtitle: subtitle(source.tables, &weighted.facts),
            simulated: source.tables.meta.simulated,
        },
        count_name: weighted.count_name.to_owned(),
        factor: 1e-3,
        groups: weighted.groups,
        palette: weighted.palette,
    };
    match &weighted.stacks {
        WeightedStacks::Sums(stacks) => flamegraphs::flamegraph(stacks, &options),
        WeightedStacks::Grown(stacks) => flamegraphs::differential(stacks, &options),
    }
}

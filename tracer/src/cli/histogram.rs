//! `tracer histogram`: distributions of latency, as SVG.

use super::picture::{open, subtitle, write};
use crate::latency::{Distribution, Latencies, Latency};
use crate::timeline::rows::Source;
use crate::timeline::tables::Tables;
use anyhow::{Context, Result};
use flamegraphs::{Header, HistogramInput, Panel, Quantile};
use std::path::PathBuf;
use std::process::ExitCode;

/// Draw the distributions of TTFT, ITL, steps and GPU spans
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  tracer histogram trace/ -o histogram.svg")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// File to write; `-` is stdout
    #[arg(long, short, default_value = "histogram.svg")]
    output: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let tables = open(&args.capture)?.tables()?;
    let svg = flamegraphs::histogram(&picture(&tables))
        .with_context(|| format!("cannot draw the histogram of {}", args.capture.display()))?;
    write(&args.output, "histogram", &svg)?;
    Ok(ExitCode::SUCCESS)
}

/// The distributions drawn, top to bottom.
const DRAWN: [Latency; 4] = [Latency::Ttft, Latency::Itl, Latency::Step, Latency::GpuSpan];

fn picture(tables: &Tables) -> HistogramInput {
    let mut latencies = Latencies::default();
    tables.tokens.iter().for_each(|token| latencies.add_token(token));
    tables.steps.iter().for_each(|step| latencies.add_step(step));
    HistogramInput {
        header: Header {
            title: "Latency of tokens and steps".to_owned(),
            subtitle: subtitle(tables, &[format!("{} requests", tables.requests.len())]),
            simulated: tables.meta.simulated,
        },
        panels: DRAWN.map(|latency| panel(latency, tables.source(), latencies.get(latency))).into(),
    }
}

fn panel(latency: Latency, source: Option<Source>, distribution: &Distribution) -> Panel {
    let quantile = |name: &str, value_ns| Quantile { name: name.to_owned(), value_ns };
    Panel {
        name: format!("{}: {}", latency.name(), latency.origin(source)),
        values: distribution.values().collect(),
        quantiles: vec![
            quantile("p50", distribution.quantile(0.5).value()),
            quantile("p99", distribution.quantile(0.99).value()),
            quantile("max", distribution.max()),
        ],
    }
}

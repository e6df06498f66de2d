//! `tracer histogram`: distributions of latency, as SVG.

use super::picture::{open, subtitle, write};
use crate::timeline::rows::Step;
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

fn picture(tables: &Tables) -> HistogramInput {
    let tokens = |first: bool| {
        let some = tables.tokens.iter().filter(move |token| (token.index == 0) == first);
        some.filter_map(|token| token.latency_ns).collect::<Vec<u64>>()
    };
    let gpu: Vec<u64> = tables.steps.iter().filter_map(|step| step.gpu.map(|gpu| gpu.span_ns)).collect();
    let observed = if gpu.is_empty() { "host-observed" } else { "GPU end" };
    let panels = vec![
        panel("TTFT (request received → first token)", tokens(true)),
        panel("ITL (token → next token)", tokens(false)),
        panel(&format!("step (enqueue → {observed})"), tables.steps.iter().filter_map(step_ns).collect()),
        panel("gpu_span (begin event → end event)", gpu),
    ];
    HistogramInput {
        header: Header {
            title: "Latency of tokens and steps".to_owned(),
            subtitle: subtitle(tables, &[format!("{} requests", tables.requests.len())]),
            simulated: tables.meta.simulated,
        },
        panels,
    }
}

/// From the begin of the enqueue call to the end on the GPU, or else to where the host saw it, ns.
fn step_ns(step: &Step) -> Option<u64> {
    let end = step.gpu.map(|gpu| gpu.end_ns).or(step.observed_end_ns)?;
    end.checked_sub(step.begin_ns)
}

fn panel(name: &str, mut values: Vec<u64>) -> Panel {
    values.sort_unstable();
    let quantiles = vec![
        Quantile { name: "p50".to_owned(), value_ns: quantile(&values, 500) },
        Quantile { name: "p99".to_owned(), value_ns: quantile(&values, 990) },
        Quantile { name: "max".to_owned(), value_ns: values.last().copied() },
    ];
    let mut counted: Vec<(u64, u64)> = Vec::new();
    for value in values {
        match counted.last_mut() {
            Some((same, n)) if *same == value => *n += 1,
            _ => counted.push((value, 1)),
        }
    }
    Panel { name: name.to_owned(), values: counted, quantiles }
}

/// The quantile in thousandths (nearest rank) of sorted values; only where at least 10 of them lie beyond it.
fn quantile(sorted: &[u64], per_mille: usize) -> Option<u64> {
    let n = sorted.len();
    let beyond = n.saturating_mul(1000 - per_mille);
    if beyond < 10_000 {
        return None;
    }
    sorted.get((n * per_mille).div_ceil(1000).saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_honest() {
        let values: Vec<u64> = (1..=1000).collect();
        assert_eq!(quantile(&values, 500), Some(500));
        assert_eq!(quantile(&values, 990), Some(990));
        assert_eq!(quantile(&values[..999], 990), None);
        assert_eq!(quantile(&[], 500), None);
        let panel = panel("x", vec![3, 1, 3]);
        assert_eq!(panel.values, [(1, 1), (3, 2)]);
        assert_eq!(panel.quantiles.iter().map(|q| q.value_ns).collect::<Vec<_>>(), [None, None, Some(3)]);
    }
}

//! `tracer histogram`: distributions of latency, as SVG, and for HdrHistogram's tools.

mod hdr;

use super::picture::{open, span_ns, subtitle, write};
use crate::latency::{Distribution, Latencies, Latency};
use crate::timeline::rows::Source;
use crate::timeline::tables::Tables;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use flamegraphs::{Header, HistogramInput, Panel, PercentileInput, Quantile, Series};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Draw the distributions of TTFT, ITL, steps and GPU spans, or percentiles of one of them in several captures
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer histogram trace/ -o histogram.svg
  tracer histogram before/ after/ --latency ttft -o percentiles.svg
  tracer histogram trace/ -o trace.hlog                HdrHistogram V2 log: a tag for each latency, ns
  tracer histogram trace/ --latency itl -o itl.hgrm    percentile text, ms")]
pub(crate) struct Args {
    /// Folder of the capture; of several, percentiles are drawn over each other
    #[arg(required = true)]
    captures: Vec<PathBuf>,
    /// File to write: .svg, .hlog or .hgrm; `-` is stdout (SVG)
    #[arg(long, short, default_value = "histogram.svg")]
    output: PathBuf,
    /// Draw percentiles also of a single capture
    #[arg(long)]
    percentiles: bool,
    /// Whose percentiles
    #[arg(long, value_enum, default_value_t = Of::Itl)]
    latency: Of,
}

/// A latency that has percentiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Of {
    /// Time to first token
    Ttft,
    /// Time between two tokens
    Itl,
    /// Mean time between tokens of a request
    Tpot,
    /// A step, from its enqueueing to its end
    Step,
    /// A step on its GPU
    GpuSpan,
    /// A whole request
    E2e,
}

impl Of {
    const fn latency(self) -> Latency {
        match self {
            Self::Ttft => Latency::Ttft,
            Self::Itl => Latency::Itl,
            Self::Tpot => Latency::Tpot,
            Self::Step => Latency::Step,
            Self::GpuSpan => Latency::GpuSpan,
            Self::E2e => Latency::E2e,
        }
    }
}

/// A capture's tables, their latencies, and what it is called.
struct Recorded {
    name: String,
    tables: Tables,
    latencies: Latencies,
}

impl Recorded {
    fn read(capture: &Path) -> Result<Self> {
        let tables = open(capture)?.tables()?;
        Ok(Self { name: capture.display().to_string(), latencies: latencies(&tables), tables })
    }
}

fn latencies(tables: &Tables) -> Latencies {
    let mut latencies = Latencies::default();
    tables.tokens.iter().for_each(|token| latencies.add_token(token));
    tables.steps.iter().for_each(|step| latencies.add_step(step));
    tables.requests.iter().for_each(|request| latencies.add_request(request));
    latencies
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let recorded: Vec<Recorded> =
        args.captures.iter().map(|capture| Recorded::read(capture)).collect::<Result<_>>()?;
    let latency = args.latency.latency();
    let extension = args.output.extension().and_then(OsStr::to_str);
    let (what, content) = match (extension, recorded.as_slice()) {
        (Some("hlog"), [Recorded { name, tables, latencies }]) => {
            let log = hdr::log(&tables.meta, span_ns(tables), latencies);
            ("HdrHistogram log", log.with_context(|| format!("cannot encode the histograms of {name}"))?)
        }
        (Some("hgrm"), [one]) => ("percentile text", hdr::percentiles(one.latencies.get(latency))),
        (Some("hlog" | "hgrm"), _) => {
            bail!("{} holds one capture; name one, or write .svg to compare several", args.output.display())
        }
        (_, [one]) if !args.percentiles => {
            let drawn = flamegraphs::histogram(&picture(one));
            ("histogram", drawn.with_context(|| format!("cannot draw the histogram of {}", one.name))?)
        }
        (_, several) => {
            let drawn = flamegraphs::percentiles(&percentiles(several, latency));
            ("percentiles", drawn.with_context(|| format!("cannot draw percentiles of {}", latency.name()))?)
        }
    };
    write(&args.output, what, &content)?;
    Ok(ExitCode::SUCCESS)
}

/// The distributions drawn, top to bottom.
const DRAWN: [Latency; 4] = [Latency::Ttft, Latency::Itl, Latency::Step, Latency::GpuSpan];

fn picture(Recorded { tables, latencies, .. }: &Recorded) -> HistogramInput {
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

fn percentiles(recorded: &[Recorded], latency: Latency) -> PercentileInput {
    let mut sources = recorded.iter().map(|one| one.tables.source());
    let first = sources.next().flatten();
    let source = first.filter(|_| sources.all(|source| source == first));
    let simulated = recorded.iter().filter(|one| one.tables.meta.simulated).count();
    let subtitle = if let [one] = recorded {
        subtitle(&one.tables, &[])
    } else {
        let is_lossy = |one: &&Recorded| one.tables.ledger.iter().any(|row| row.loss && row.count > 0);
        let lost = match recorded.iter().filter(is_lossy).count() {
            0 => "nothing lost".to_owned(),
            n => format!("events lost in {n} of them"),
        };
        let some = if (1..recorded.len()).contains(&simulated) { " · simulated GPU in some" } else { "" };
        format!("{} captures · {lost}{some}", recorded.len())
    };
    let series = recorded
        .iter()
        .map(|one| Series { name: one.name.clone(), values: one.latencies.get(latency).values().collect() });
    PercentileInput {
        header: Header {
            title: format!("Percentiles of {}", latency.name()),
            subtitle,
            simulated: simulated > 0,
        },
        latency_name: format!("{}: {}", latency.name(), latency.origin(source)),
        series: series.collect(),
    }
}

//! `tracer heatmap`: latency over time or over the token index, as SVG.

mod strips;

use super::picture::{Names, open, span_ns, subtitle, write};
use crate::capture::Counter;
use crate::event::ProcessId;
use crate::latency;
use crate::timeline::rows::{Source, Token};
use crate::timeline::tables::Tables;
use anyhow::{Context, Result};
use clap::ValueEnum;
use flamegraphs::{Axis, Header, HeatmapInput, Loss, Point};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Draw a heatmap of latency; its cells name their slowest requests
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  tracer heatmap trace/\n  tracer heatmap trace/ --latency ttft -o ttft.svg\n  \
                        tracer heatmap trace/ --by token -o by-token.svg"
)]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// File to write; `-` is stdout
    #[arg(long, short, default_value = "heatmap.svg")]
    output: PathBuf,
    /// What the columns are
    #[arg(long, value_enum, default_value_t = By::Time)]
    by: By,
    /// Which latency [default: itl; with --by token and token-log: all]
    #[arg(long, value_enum)]
    latency: Option<Latency>,
}

/// What the columns of a heatmap are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// When the token was delivered
    Time,
    /// Its index in its choice
    Token,
    /// Its index, with columns that grow
    TokenLog,
}

/// Which tokens, and so which latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Latency {
    /// Time to first token
    Ttft,
    /// Time between two tokens
    Itl,
    /// Both
    All,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = open(&args.capture)?;
    let tables = capture.tables()?;
    let names = Names::new(&tables.requests);
    let mut input = picture(&tables, &names, args.by, args.latency);
    input.losses = losses(capture.counters()?.collect::<Result<_, _>>()?, tables.meta.started_ns);
    let svg = flamegraphs::heatmap(&input)
        .with_context(|| format!("cannot draw the heatmap of {}", args.capture.display()))?;
    write(&args.output, "heatmap", &svg)?;
    Ok(ExitCode::SUCCESS)
}

fn picture<'a>(tables: &Tables, names: &'a Names, by: By, latency: Option<Latency>) -> HeatmapInput<'a> {
    let latency = latency.unwrap_or(if by == By::Time { Latency::Itl } else { Latency::All });
    let points: Vec<Point<'a>> = tables
        .tokens
        .iter()
        .filter(|token| latency.includes(token))
        .filter_map(|token| {
            let x = match by {
                By::Time => token.delivered_ns.checked_sub(tables.meta.started_ns)?,
                By::Token | By::TokenLog => u64::from(token.index),
            };
            Some(Point { x, latency_ns: token.latency_ns?, id: names.of(token) })
        })
        .collect();
    let axis = match by {
        By::Time => {
            Axis::Time { name: "time since the recording began".to_owned(), range: 0..span_ns(tables) }
        }
        By::Token => Axis::TokenIndex,
        By::TokenLog => Axis::LogTokenIndex,
    };
    let title = match by {
        By::Time => latency.name(tables.source()),
        By::Token | By::TokenLog => format!("{}, by token index", latency.name(tables.source())),
    };
    HeatmapInput {
        header: Header {
            title,
            subtitle: subtitle(tables, &[format!("n={} tokens", points.len())]),
            simulated: tables.meta.simulated,
        },
        axis,
        latency_name: latency.name(tables.source()),
        count_name: "tokens".to_owned(),
        points,
        losses: Vec::new(),
        strips: if by == By::Time { strips::of(tables) } else { Vec::new() },
    }
}

/// When the recorder's counters of losses grew: between the flush before the one that says so, and that one.
fn losses(mut counters: Vec<Counter>, started_ns: u64) -> Vec<Loss> {
    counters.sort_by_key(|counter| counter.time_ns);
    let mut flushes: Vec<u64> = counters.iter().map(|counter| counter.time_ns).collect();
    flushes.dedup();
    let mut before: HashMap<(Option<ProcessId>, String), u64> = HashMap::new();
    let mut losses = Vec::new();
    for Counter { time_ns, row } in counters.into_iter().filter(|counter| counter.row.loss) {
        let known = before.entry((row.process, row.name.clone())).or_default();
        let lost = row.count.saturating_sub(*known);
        *known = row.count;
        // A line without a time is about the capture's files, not about an instant.
        if lost > 0 && time_ns > started_ns {
            let flush = flushes.partition_point(|&flush| flush < time_ns);
            let since = flush.checked_sub(1).and_then(|i| flushes.get(i)).copied().unwrap_or(started_ns);
            let range = since.saturating_sub(started_ns)..time_ns - started_ns;
            losses.push(Loss { range, what: format!("{lost} {}", row.name) });
        }
    }
    losses
}

impl Latency {
    /// Whether a token's latency is such a one. The first token of a further choice is neither: it has no origin.
    fn includes(self, token: &Token) -> bool {
        match (token.choice, token.index) {
            (0, 0) => self != Self::Itl,
            (_, 0) => false,
            _ => self != Self::Ttft,
        }
    }

    fn name(self, source: Option<Source>) -> String {
        let named = |latency: latency::Latency| format!("{}: {}", latency.name(), latency.origin(source));
        match self {
            Self::Ttft => named(latency::Latency::Ttft),
            Self::Itl => named(latency::Latency::Itl),
            Self::All => "ttft (token 0), itl (later tokens)".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::rows::Source;
    use crate::timeline::tables::LedgerRow;

    fn token(index: u32, delivered_ns: u64, latency_ns: Option<u64>) -> Token {
        Token {
            request: 1,
            choice: 0,
            index,
            process: crate::event::ProcessId::default(),
            tid: 0,
            delivered_ns,
            written_ns: None,
            wire_ns: None,
            latency_ns,
            source: Source::Mark,
            join: crate::timeline::rows::Join::Mark,
            iteration: None,
            step: None,
            prefill: false,
        }
    }

    fn tables() -> Tables {
        let mut tables = Tables::default();
        tables.meta.started_ns = 1_000;
        tables.meta.ended_ns = 9_000;
        tables.tokens = vec![
            token(0, 2_000, Some(70)),
            token(1, 3_000, Some(50)),
            token(2, 4_000, None),
            token(1, 500, Some(9)),
        ];
        tables
    }

    #[test]
    fn a_loss_lies_between_two_flushes() {
        let counter = |time_ns, name: &str, count, loss| Counter {
            time_ns,
            row: LedgerRow { process: None, name: name.to_owned(), count, loss },
        };
        let counters = vec![
            counter(0, "torn", 7, true),
            counter(1_100, "calls", 5, false),
            counter(1_200, "dropped", 0, true),
            counter(1_200, "calls", 9, false),
            counter(1_300, "calls", 12, false),
            counter(1_400, "dropped", 3, true),
            counter(1_500, "dropped", 4, true),
        ];
        let expected = [(300..400, "3 dropped"), (400..500, "1 dropped")];
        let expected = expected.map(|(range, what)| Loss { range, what: what.to_owned() });
        assert_eq!(losses(counters, 1_000), expected);
    }

    #[test]
    fn first_tokens_and_later_ones_are_different_latencies() {
        let (tables, names) = (tables(), Names::default());
        let drawn = |by, latency| -> Vec<(u64, u64)> {
            let input = picture(&tables, &names, by, latency);
            input.points.iter().map(|p| (p.x, p.latency_ns)).collect()
        };
        assert_eq!(drawn(By::Time, None), [(2_000, 50)]);
        assert_eq!(drawn(By::Time, Some(Latency::Ttft)), [(1_000, 70)]);
        assert_eq!(drawn(By::Token, None), [(0, 70), (1, 50), (1, 9)]);
    }
}

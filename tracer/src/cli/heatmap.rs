//! `tracer heatmap`: latency over time, the token index, the offset in a second, or by request, as SVG.

mod rows;
mod strips;

use super::duration::{ns, parse as duration, parse_offset as offset};
use super::picture::{Names, losses, open, span_ns, subtitle, write};
use crate::latency;
use crate::timeline::rows::Source;
use crate::timeline::tables::Tables;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use flamegraphs::{Axis, Header, HeatmapInput, Loss, Point};
use std::borrow::Cow;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Draw a heatmap of latency; its cells name their slowest requests
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer heatmap trace/
  tracer heatmap trace/ --latency ttft -o ttft.svg
  tracer heatmap trace/ --latency gpu-span --from 5s --to 8s
  tracer heatmap trace/ --by token -o by-token.svg
  tracer heatmap trace/ --by offset      whole seconds against the time within them, as FlameScope draws them
  tracer heatmap trace/ --by request     the requests with the slowest tokens, a row each")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// File to write; `-` is stdout
    #[arg(long, short, default_value = "heatmap.svg")]
    output: PathBuf,
    /// What the columns, or with offset and request the rows, are
    #[arg(long, value_enum, default_value_t = By::Time)]
    by: By,
    /// Which latency [default: itl; with --by token, token-log and offset: all]
    #[arg(long, value_enum)]
    latency: Option<Latency>,
    /// Only from this time on, since the recording began
    #[arg(long, value_name = "OFFSET", value_parser = offset)]
    from: Option<Duration>,
    /// Only before this time, since the recording began
    #[arg(long, value_name = "OFFSET", value_parser = duration)]
    to: Option<Duration>,
}

/// What a heatmap is drawn by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// When the token was delivered, or the step began
    Time,
    /// Its index in its choice
    Token,
    /// Its index, with columns that grow
    TokenLog,
    /// When within its second: rows of 20 ms, a column each second, counts
    Offset,
    /// Its request: a row each, its slowest token in each column of time
    Request,
}

impl By {
    const fn is_index(self) -> bool {
        matches!(self, Self::Token | Self::TokenLog)
    }
}

/// Which latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Latency {
    /// Time to first token
    Ttft,
    /// Time between two tokens
    Itl,
    /// Both
    All,
    /// A step, from its enqueueing to its end
    Step,
    /// A step on its GPU
    GpuSpan,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let latency = args.latency.unwrap_or(match args.by {
        By::Time | By::Request => Latency::Itl,
        By::Token | By::TokenLog | By::Offset => Latency::All,
    });
    if latency.is_of_steps() && (args.by.is_index() || args.by == By::Request) {
        bail!("a step is of several tokens and requests: draw its latency --by time or --by offset");
    }
    let capture = open(&args.capture)?;
    let tables = capture.tables()?;
    let names = Names::new(&tables.requests);
    let end = args.to.map_or(span_ns(&tables), ns).min(span_ns(&tables));
    let drawing = Drawing {
        tables: &tables,
        by: args.by,
        latency,
        range: args.from.map_or(0, ns)..end,
        observed: latency.observed(&tables, &names),
        losses: losses(&capture, tables.meta.started_ns)?,
    };
    let drawn = match args.by {
        By::Offset => flamegraphs::matrix(&drawing.offsets()),
        By::Request => flamegraphs::matrix(&drawing.requests()),
        By::Time | By::Token | By::TokenLog => flamegraphs::heatmap(&drawing.heatmap()),
    };
    let svg = drawn.with_context(|| format!("cannot draw the heatmap of {}", args.capture.display()))?;
    write(&args.output, "heatmap", &svg)?;
    Ok(ExitCode::SUCCESS)
}

/// A latency.
struct Observed<'a> {
    /// ns since the recording began.
    at_ns: u64,
    latency_ns: u64,
    /// Index of the token; 0 of a step.
    index: u64,
    /// Of the request; 0 of a step.
    request: u64,
    /// Whose it is: a request or step.
    name: Cow<'a, str>,
}

struct Drawing<'a> {
    tables: &'a Tables,
    by: By,
    latency: Latency,
    /// What of the recording is drawn, ns since it began.
    range: Range<u64>,
    observed: Vec<Observed<'a>>,
    losses: Vec<Loss>,
}

const TIME: &str = "time since the recording began";

impl Drawing<'_> {
    fn header(&self, title: String, n: usize) -> Header {
        let facts = [format!("n={n} {}", self.latency.count_name())];
        Header { title, subtitle: subtitle(self.tables, &facts), simulated: self.tables.meta.simulated }
    }

    fn name(&self) -> String {
        self.latency.name(self.tables.source())
    }

    /// Those in the range.
    fn observed(&self) -> impl Iterator<Item = &Observed<'_>> {
        self.observed.iter().filter(|observed| self.range.contains(&observed.at_ns))
    }

    fn heatmap(&self) -> HeatmapInput<'_> {
        let by_index = self.by.is_index();
        let points: Vec<Point> = self
            .observed()
            .map(|observed| {
                let x = if by_index { observed.index } else { observed.at_ns };
                Point { x, latency_ns: observed.latency_ns, id: &observed.name }
            })
            .collect();
        let axis = match self.by {
            By::Token => Axis::TokenIndex,
            By::TokenLog => Axis::LogTokenIndex,
            _ => Axis::Time { name: TIME.to_owned(), range: self.range.clone() },
        };
        let title = if by_index { format!("{}, by token index", self.name()) } else { self.name() };
        HeatmapInput {
            header: self.header(title, points.len()),
            axis,
            latency_name: self.name(),
            count_name: self.latency.count_name().to_owned(),
            points,
            losses: self.losses.clone(),
            strips: if by_index { Vec::new() } else { strips::of(self.tables) },
        }
    }
}

impl Latency {
    const fn is_of_steps(self) -> bool {
        matches!(self, Self::Step | Self::GpuSpan)
    }

    const fn count_name(self) -> &'static str {
        if self.is_of_steps() { "steps" } else { "tokens" }
    }

    /// Whose latencies they are.
    const fn whose(self) -> &'static str {
        match self {
            Self::Ttft => "First tokens",
            Self::Itl => "Tokens after the first",
            Self::All => "Tokens",
            Self::Step | Self::GpuSpan => "Steps",
        }
    }

    /// All latencies of a recording that are such ones.
    fn observed<'a>(self, tables: &Tables, names: &'a Names) -> Vec<Observed<'a>> {
        let since = |ns: u64| ns.checked_sub(tables.meta.started_ns);
        if self.is_of_steps() {
            let steps = tables.steps.iter().filter_map(|step| {
                let latency_ns = match self {
                    Self::Step => step.duration_ns()?,
                    _ => step.gpu?.span_ns,
                };
                let name = format!("step #{}", step.id).into();
                Some(Observed { at_ns: since(step.begin_ns)?, latency_ns, index: 0, request: 0, name })
            });
            return steps.collect();
        }
        let wanted: &[latency::Latency] = match self {
            Self::Ttft => &[latency::Latency::Ttft],
            Self::Itl => &[latency::Latency::Itl],
            _ => &[latency::Latency::Ttft, latency::Latency::Itl],
        };
        let tokens = tables.tokens.iter().filter(|token| wanted.iter().any(|latency| latency.is_of(token)));
        tokens
            .filter_map(|token| {
                Some(Observed {
                    at_ns: since(token.delivered_ns)?,
                    latency_ns: token.latency_ns?,
                    index: token.index.into(),
                    request: token.request,
                    name: names.of(token).into(),
                })
            })
            .collect()
    }

    fn name(self, source: Option<Source>) -> String {
        let named = |latency: latency::Latency| format!("{}: {}", latency.name(), latency.origin(source));
        match self {
            Self::Ttft => named(latency::Latency::Ttft),
            Self::Itl => named(latency::Latency::Itl),
            Self::All => "ttft (token 0), itl (later tokens)".to_owned(),
            Self::Step => named(latency::Latency::Step),
            Self::GpuSpan => named(latency::Latency::GpuSpan),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::rows::{Source, Token};

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
    fn first_tokens_and_later_ones_are_different_latencies() {
        let (tables, names) = (tables(), Names::default());
        let drawing = |by, latency: Latency| Drawing {
            tables: &tables,
            by,
            latency,
            range: 0..8_000,
            observed: latency.observed(&tables, &names),
            losses: Vec::new(),
        };
        let drawn = |by, latency| -> Vec<(u64, u64)> {
            drawing(by, latency).heatmap().points.iter().map(|p| (p.x, p.latency_ns)).collect()
        };
        assert_eq!(drawn(By::Time, Latency::Itl), [(2_000, 50)]);
        assert_eq!(drawn(By::Time, Latency::Ttft), [(1_000, 70)]);
        assert_eq!(drawn(By::Token, Latency::All), [(0, 70), (1, 50)]);
        let earlier = Drawing { range: 0..2_000, ..drawing(By::Time, Latency::All) };
        assert_eq!(earlier.heatmap().points.len(), 1);
    }

    #[test]
    fn steps_have_latencies_of_their_own() {
        let tables = crate::cli::testing::tables();
        let names = Names::default();
        let (steps, spans) =
            (Latency::Step.observed(&tables, &names), Latency::GpuSpan.observed(&tables, &names));
        assert_eq!((steps.len(), spans.len()), (tables.steps.len(), tables.steps.len()));
        assert!(steps.iter().zip(&spans).all(|(step, span)| step.latency_ns >= span.latency_ns));
        assert_eq!(steps[0].name, format!("step #{}", tables.steps[0].id));
    }
}

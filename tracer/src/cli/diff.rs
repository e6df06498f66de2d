//! `tracer diff`: how the latencies of two captures differ.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use flamegraphs::{FlameOptions, Header};
use serde::Serialize;

use super::picture;
use super::report::style_of_stdout;
use super::table::{Side, Style, Table};
use super::units::{clean, count, duration};
use crate::capture::{Capture, Stacks};
use crate::latency::{Change, Shift};
use crate::timeline::budget::Place;
use crate::timeline::tables::{Meta, Tables};

/// Compare the latencies of two captures: what changed beyond chance, and which parts of the tokens' time
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer diff before after
  tracer diff before after -o diff.svg
  tracer diff before after --json | jq '.latencies[] | select(.changed)'

Exit codes: 0 nothing changed beyond chance, 4 something did, 1 the captures cannot be compared.

Intervals are of 99 % confidence, by drawing slices of time anew (block bootstrap), since tokens are slow together.
A figure has changed when its interval leaves zero out and the change is 4 standard errors or more.")]
pub(crate) struct Args {
    /// Folder of the capture before
    a: PathBuf,
    /// Folder of the capture after
    b: PathBuf,
    /// Also draw what a token's time went on in B as a flame graph, red where it is longer than in A
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Exit code: something changed beyond chance.
const EXIT_CHANGED: u8 = 4;

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let captures = [picture::open(&args.a)?, picture::open(&args.b)?];
    let [a, b] = [captures[0].tables()?, captures[1].tables()?];
    if let Some(path) = &args.output {
        picture::write(path, "flame graph", &draw(&captures, [&a, &b])?)?;
    }
    let shifts = Shift::all(&a, &b);
    anyhow::ensure!(
        !shifts.is_empty(),
        "{} and {} have no latency in common that lasts long enough to be compared; `tracer report` shows what each has",
        args.a.display(),
        args.b.display()
    );
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Document::new(&a, &b, &shifts))?;
        writeln!(out)?;
    } else {
        out.write_all(text(&a, &b, &shifts, style_of_stdout()).as_bytes())?;
    }
    let changed = shifts.iter().any(Shift::is_real);
    Ok(if changed { ExitCode::from(EXIT_CHANGED) } else { ExitCode::SUCCESS })
}

/// The mean time of a token by phase, part and stack, of both.
fn draw(captures: &[Capture; 2], tables: [&Tables; 2]) -> Result<String> {
    let mut means: BTreeMap<Vec<String>, [u64; 2]> = BTreeMap::new();
    let mut tokens = [0; 2];
    for (i, (capture, tables)) in captures.iter().zip(tables).enumerate() {
        let (budgets, stacks) = (capture.budgets_of(tables)?, Stacks::read(capture)?);
        let mut sums: BTreeMap<(bool, Place), u64> = BTreeMap::new();
        for token in tables.tokens.iter().filter(|token| token.latency_ns.is_some()) {
            tokens[i] += 1;
            for segment in budgets.segments(token) {
                *sums.entry((token.prefill, Place::of(&segment))).or_default() += segment.length_ns();
            }
        }
        // Numbers of stacks are a capture's own; names are not.
        for ((prefill, place), ns) in sums {
            let phase = if prefill { "prefill" } else { "decode" };
            let frames = place.frames(|stack| stacks.off_cpu(Some(stack)));
            let frames = std::iter::once(phase.to_owned()).chain(frames).collect();
            means.entry(frames).or_default()[i] += ns / tokens[i];
        }
    }
    let options = FlameOptions {
        header: Header {
            title: "Time of a token in B, red where longer than in A".to_owned(),
            subtitle: picture::subtitle(
                tables[1],
                &[format!("A n={}", tokens[0]), format!("B n={}", tokens[1])],
            ),
            simulated: tables.iter().any(|tables| tables.meta.simulated),
        },
        count_name: "µs of a token".to_owned(),
        factor: 1e-3,
        groups: 2,
        ..FlameOptions::default()
    };
    let drawn = flamegraphs::differential(&means.into_iter().collect(), &options);
    drawn.context("cannot draw the flame graph: B has no token with a known latency")
}

fn text(a: &Tables, b: &Tables, shifts: &[Shift], style: Style) -> String {
    use Side::{Left, Right};
    let mut out = String::new();
    for (name, tables) in [("A", a), ("B", b)] {
        let Meta { host, target, simulated, .. } = &tables.meta;
        let simulated = if *simulated { " · simulated GPU" } else { "" };
        let tokens = count(tables.tokens.len() as u64);
        let target = clean(target, 40);
        let _ = writeln!(
            out,
            "{name}: {} · {tokens} tokens · {} · {target}{simulated} · {}",
            duration(picture::span_ns(tables)),
            clean(host, 30),
            picture::missing(&tables.ledger)
        );
    }
    let columns = [
        ("", Left),
        ("A", Right),
        ("B", Right),
        ("change", Right),
        ("", Right),
        ("99 % interval", Left),
        ("", Left),
    ];
    for shift in shifts {
        let (a, b) = shift.samples;
        let name = format!("\n{} (n={} and {})", shift.latency.name(), count(a), count(b));
        let _ = writeln!(out, "{}", style.heading(&name));
        let mut table = Table::new(columns);
        for (q, change) in &shift.quantiles {
            table.push(cells(&format!("p{}", q * 100.0), change));
        }
        table.push(cells("mean", &shift.mean));
        for (label, change) in &shift.parts {
            table.push(cells(&format!("· {}", label.name()), change));
        }
        out.push_str(&table.render(style));
    }
    let verdict = match shifts.iter().filter(|shift| shift.is_real()).count() {
        0 => "nothing changed beyond chance".to_owned(),
        _ => {
            let real = shifts.iter().filter(|shift| shift.is_real()).map(|shift| shift.latency.name());
            format!("changed beyond chance (marked *): {}", real.collect::<Vec<_>>().join(", "))
        }
    };
    let _ = writeln!(out, "\n{}", style.note(&verdict));
    out
}

fn cells(name: &str, change: &Change) -> [String; 7] {
    let percent = match change.a_ns {
        a if a > 0.0 => format!("{:+.1} %", 100.0 * change.shift_ns() / a),
        _ => "new".to_owned(),
    };
    [
        name.to_owned(),
        duration(change.a_ns.round() as u64),
        duration(change.b_ns.round() as u64),
        signed(change.shift_ns()),
        percent,
        format!("{} to {}", signed(change.low_ns), signed(change.high_ns)),
        if change.is_real { "*" } else { "" }.to_owned(),
    ]
}

fn signed(ns: f64) -> String {
    let sign = if ns < 0.0 { "−" } else { "+" };
    format!("{sign}{}", duration(ns.abs().round() as u64))
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    /// Something changed beyond chance.
    changed: bool,
    /// How intervals are found.
    method: &'static str,
    confidence: f64,
    a: Recording<'a>,
    b: Recording<'a>,
    latencies: Vec<LatencyRow>,
}

#[derive(Serialize)]
struct Recording<'a> {
    host: &'a str,
    target: &'a str,
    started_realtime_ns: u64,
    length_ns: u64,
    tokens: usize,
    simulated: bool,
}

#[derive(Serialize)]
struct LatencyRow {
    latency: &'static str,
    changed: bool,
    a_samples: u64,
    b_samples: u64,
    quantiles: Vec<QuantileRow>,
    mean: ChangeRow,
    parts: Vec<PartRow>,
}

#[derive(Serialize)]
struct QuantileRow {
    quantile: f64,
    #[serde(flatten)]
    change: ChangeRow,
}

#[derive(Serialize)]
struct PartRow {
    part: &'static str,
    #[serde(flatten)]
    change: ChangeRow,
}

#[derive(Serialize)]
struct ChangeRow {
    a_ns: f64,
    b_ns: f64,
    shift_ns: f64,
    shift_low_ns: f64,
    shift_high_ns: f64,
    changed: bool,
}

impl From<&Change> for ChangeRow {
    fn from(change: &Change) -> Self {
        let Change { a_ns, b_ns, low_ns: shift_low_ns, high_ns: shift_high_ns, is_real: changed } = *change;
        Self { a_ns, b_ns, shift_ns: change.shift_ns(), shift_low_ns, shift_high_ns, changed }
    }
}

impl<'a> Document<'a> {
    fn new(a: &'a Tables, b: &'a Tables, shifts: &[Shift]) -> Self {
        let recording = |tables: &'a Tables| Recording {
            host: &tables.meta.host,
            target: &tables.meta.target,
            started_realtime_ns: tables.meta.started_realtime_ns,
            length_ns: picture::span_ns(tables),
            tokens: tables.tokens.len(),
            simulated: tables.meta.simulated,
        };
        let row = |shift: &Shift| LatencyRow {
            latency: shift.latency.name(),
            changed: shift.is_real(),
            a_samples: shift.samples.0,
            b_samples: shift.samples.1,
            quantiles: shift
                .quantiles
                .iter()
                .map(|(quantile, change)| QuantileRow { quantile: *quantile, change: change.into() })
                .collect(),
            mean: (&shift.mean).into(),
            parts: shift
                .parts
                .iter()
                .map(|(label, change)| PartRow { part: label.name(), change: change.into() })
                .collect(),
        };
        Self {
            schema: "tracer.diff/1",
            changed: shifts.iter().any(Shift::is_real),
            method: "block bootstrap of 64 slices of time, 500 draws",
            confidence: 0.99,
            a: recording(a),
            b: recording(b),
            latencies: shifts.iter().map(row).collect(),
        }
    }
}

//! `tracer diff`: how the latencies of two captures differ.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use super::picture;
use super::report::style_of_stdout;
use super::table::{Side, Style, Table};
use super::units::{clean, count, duration};
use crate::latency::{Change, Shift};
use crate::timeline::tables::{Meta, Tables};

/// Compare the latencies of two captures: what changed beyond chance, and which parts of the tokens' time
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer diff before after
  tracer diff before after --json | jq '.latencies[] | select(.changed)'

Exit codes: 0 nothing changed beyond chance, 4 something did, 1 the captures cannot be compared.

Intervals are of 99 % confidence, by drawing slices of time anew (block bootstrap), since tokens are slow together.
A figure has changed when its interval leaves zero out and the change is 4 standard errors or more.")]
pub(crate) struct Args {
    /// Folder of the capture before
    a: PathBuf,
    /// Folder of the capture after
    b: PathBuf,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Exit code: something changed beyond chance.
const EXIT_CHANGED: u8 = 4;

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let (a, b) = (picture::open(&args.a)?.tables()?, picture::open(&args.b)?.tables()?);
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

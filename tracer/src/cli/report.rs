//! `tracer report`: what a capture says about latency, on one page.

mod by;
mod engine;
mod gpu;
pub(super) mod hazards;
mod layers;
mod sockets;
mod summary;
mod why;

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::table::{Side, Style, Table, WIDTH, cut};
use super::units::{clean, count, duration, offset};
use crate::capture::{Capture, Stacks};
use crate::timeline::coverage::Coverage;
use crate::timeline::rows::Unmatched;
use crate::timeline::shares::Weights;
use by::{By, Property};
use sockets::{Sockets, Spread};
use summary::{ClockLine, LatencyRow, LedgerLine, SlowToken, Summary};

/// Show latencies, the slowest tokens and what was lost
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer report trace
  tracer report trace --slowest 50
  tracer report trace --json | jq '.latencies[] | {name, p99_ns}'
  tracer report trace --by tenant_id,model      whose latency, and whose GPU time
  tracer report trace --slow 80ms               why tokens that took 80 ms did
  tracer report trace --reclock    GPU times of an old capture as this version maps them

A quantile is printed only where at least ten samples lie beyond it. Next: tracer request DIR ID")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// How many of the slowest tokens to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    slowest: usize,
    /// Compare tokens that took this long with the middle half [default: the slowest hundredth]
    #[arg(long, value_name = "DURATION", value_parser = super::duration::parse)]
    slow: Option<Duration>,
    /// Latencies and shares of the GPU's time by these properties, instead of the page
    #[arg(long, value_name = "PROPERTY,…", value_delimiter = ',')]
    by: Vec<Property>,
    /// With --by: sum over tenants, too
    #[arg(long, requires = "by")]
    mix_tenants: bool,
    /// With --by: how many times the weight of a decoded token a token of a prompt has
    #[arg(long, value_name = "WEIGHT", requires = "by", default_value_t = 1.0, value_parser = weight)]
    prefill_weight: f64,
    /// Map GPU times anew from the recorded clock readings, for this report only; `tracer recover --reclock` stores them
    #[arg(long)]
    reclock: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = Capture::open(&args.capture)?;
    let tables = if args.reclock { capture.tables_anew()? } else { capture.tables()? };
    if !args.by.is_empty() {
        let weights = Weights { prefill: args.prefill_weight };
        return print(&By::new(&tables, &args.by, args.mix_tenants, weights), args.json, By::text);
    }
    let mut summary = Summary::new(&tables, args.slowest, args.slow.map(|slow| slow.as_nanos() as u64));
    summary.recording.reclocked = args.reclock;
    if let Some(hazards) = &mut summary.hazards {
        hazards.name(&Stacks::read(&capture)?);
    }
    print(&summary, args.json, text)
}

fn print<T: Serialize>(page: &T, json: bool, text: impl Fn(&T, Style) -> String) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, page)?;
        writeln!(out)?;
    } else {
        out.write_all(text(page, style_of_stdout()).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A number that is not negative.
fn weight(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(weight) if (0.0..=1e6).contains(&weight) => Ok(weight),
        _ => Err(format!("`{text}` is no weight; write a number from 0 on, such as 0.1")),
    }
}

/// Colour on a terminal, unless NO_COLOR is set.
pub(super) fn style_of_stdout() -> Style {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Style { color: std::io::stdout().is_terminal() && !refused }
}

/// What the mark of a step with a wide bound means.
pub(super) const VAGUE: &str =
    "  ! the bound of its GPU time exceeds its GPU span: where in the step the GPU worked is not known";

/// The page, at most 100 columns wide.
fn text(summary: &Summary, style: Style) -> String {
    let mut out = String::new();
    header(summary, style, &mut out);
    if let Some(hazards) = &summary.hazards {
        section("Hazards", style, &mut out);
        hazards.text(summary.recording.started_ns, style, &mut out);
    }
    if !summary.why_slow.is_empty() {
        section("Why slow tokens were slow", style, &mut out);
        summary.why_slow.iter().for_each(|why| why.text(style, &mut out));
    }
    section("Latency", style, &mut out);
    out.push_str(&latencies(summary).render(style));
    doubts(summary, style, &mut out);
    if !summary.clocks.is_empty() {
        section("Device clocks", style, &mut out);
        out.push_str(&clocks(&summary.clocks).render(style));
        violations(&summary.clocks, style, &mut out);
    }
    if !summary.gpus.is_empty() {
        section("GPU, as NVML and the driver say", style, &mut out);
        summary.gpus.text(summary.recording.started_ns, style, &mut out);
    }
    if summary.engines.is_known() {
        section("Engines", style, &mut out);
        summary.engines.text(style, &mut out);
    }
    if let Some(layers) = &summary.layers {
        section("Layers on the GPU", style, &mut out);
        layers.text(style, &mut out);
    }
    if !summary.phases.is_empty() {
        section("Phases of the program", style, &mut out);
        layers::phases_text(&summary.phases, style, &mut out);
    }
    section("Counts", style, &mut out);
    counts(summary, &mut out);
    let lists = [
        ("Slowest gaps between tokens, one line a step", &summary.slowest_tokens),
        ("Slowest first tokens", &summary.slowest_first_tokens),
    ];
    for (title, tokens) in lists.into_iter().filter(|(_, tokens)| !tokens.is_empty()) {
        section(title, style, &mut out);
        out.push_str(&slowest(tokens, summary.recording.started_ns).render(style));
        if tokens.iter().any(|token| token.gpu_is_vague) {
            let _ = writeln!(out, "{}", style.note(VAGUE));
        }
    }
    if let Some(sockets) = &summary.sockets {
        section("Sockets", style, &mut out);
        of_sockets(sockets, style, &mut out);
    }
    if !summary.coverage.is_empty() {
        section("Probe points", style, &mut out);
        coverage(summary, style, &mut out);
    }
    section("Ledger", style, &mut out);
    ledger(summary, style, &mut out);
    out
}

fn section(title: &str, style: Style, out: &mut String) {
    let _ = writeln!(out, "\n{}", style.heading(title));
}

fn header(summary: &Summary, style: Style, out: &mut String) {
    let recording = &summary.recording;
    let badge = if recording.simulated_gpu { "  simulated GPU" } else { "" };
    let target = clean(&recording.target, WIDTH - badge.len());
    let _ = writeln!(out, "{}{}", style.heading(&target), style.note(badge));
    let when = recording.started_at.as_deref().unwrap_or("unknown time");
    let probed = if recording.engines.is_empty() { "no engine".into() } else { recording.engines.join(", ") };
    let line = format!(
        "  {} from {when} on {}; probed: {}; tracer {}",
        duration(recording.duration_ns),
        clean(&recording.host, 30),
        clean(&probed, 40),
        clean(&recording.tracer_version, 20)
    );
    let _ = writeln!(out, "{}", cut(&line, WIDTH));
    let gpu = &summary.gpu_times;
    let bound = match (gpu.median_bound_ns, gpu.max_bound_ns) {
        (Some(median), Some(max)) => format!("; bound {} (worst {})", duration(median), duration(max)),
        _ => String::new(),
    };
    let simulated = if recording.simulated_gpu { " (simulated GPU)" } else { "" };
    let steps = match gpu.source {
        "partly injected" => format!(" for {} of {} steps", gpu.steps_injected, summary.counts.steps),
        _ => String::new(),
    };
    let _ = writeln!(out, "  GPU times: {}{steps}{simulated}{bound}", gpu.source);
    if recording.reclocked {
        let note = "  They were mapped anew for this report; `tracer recover --reclock` would store them.";
        let _ = writeln!(out, "{}", style.note(note));
    }
    if !recording.complete {
        let warning = "  The recorder did not end by itself: the end of the recording may be missing.";
        let _ = writeln!(out, "{}", style.alarm(warning));
    }
}

fn latencies(summary: &Summary) -> Table {
    use Side::{Left, Right};
    let mut table = Table::new([
        ("", Left),
        ("n", Right),
        ("p50", Right),
        ("p90", Right),
        ("p99", Right),
        ("p99.9", Right),
        ("max", Right),
        ("from → to", Left),
    ]);
    for row in &summary.latencies {
        let cell = |q: f64, value: Option<u64>| quantile_cell(row, q, value);
        table.push([
            row.name.into(),
            count(row.n),
            cell(0.5, row.p50_ns),
            cell(0.9, row.p90_ns),
            cell(0.99, row.p99_ns),
            cell(0.999, row.p999_ns),
            cell(1.0, row.max_ns),
            row.origin.into(),
        ]);
    }
    table
}

/// `~` before what a loss could have moved; a dash where there are too few samples.
fn quantile_cell(row: &LatencyRow, q: f64, value: Option<u64>) -> String {
    let doubtful = row.doubtful_from.is_some_and(|from| q >= from);
    match value {
        Some(ns) => format!("{}{}", if doubtful { "~" } else { "" }, duration(ns)),
        None => "–".into(),
    }
}

fn doubts(summary: &Summary, style: Style, out: &mut String) {
    if summary.latencies.iter().any(|row| row.n > 0 && has_gap(row)) {
        let _ =
            writeln!(out, "{}", style.faint("  – too few samples: fewer than ten lie beyond that quantile"));
    }
    for row in summary.latencies.iter().filter(|row| row.n > 0 && row.doubtful_from.is_some()) {
        let line =
            format!("  ~ {}: up to {} samples were lost, enough to move this", row.name, count(row.lost));
        let _ = writeln!(out, "{}", style.alarm(&line));
    }
}

fn has_gap(row: &LatencyRow) -> bool {
    [row.p50_ns, row.p90_ns, row.p99_ns, row.p999_ns].contains(&None)
}

/// One line a clock; in a recording of many, those that are known worst.
fn clocks(clocks: &[ClockLine]) -> Table {
    use Side::{Left, Right};
    const MOST: usize = 16;
    let mut table = Table::new([
        ("device", Left),
        ("process", Right),
        ("epoch", Right),
        ("segments", Right),
        ("bound p50", Right),
        ("bound p99", Right),
        ("drift", Right),
        ("quantum", Right),
        ("violations", Right),
    ]);
    let mut worst: Vec<&ClockLine> = clocks.iter().collect();
    worst.sort_by_key(|clock| std::cmp::Reverse((clock.causality_violations, clock.median_bound_ns)));
    for clock in worst.into_iter().take(MOST) {
        table.push([
            clean(&clock.device_uuid, 9),
            clock.tgid.to_string(),
            clock.epoch.to_string(),
            count(clock.segments.into()),
            duration(clock.median_bound_ns),
            duration(clock.p99_bound_ns),
            // Adding 0 makes a negative zero positive.
            format!("{:+.2} ppm", (clock.drift_ppm * 100.0).round() / 100.0 + 0.0),
            duration(clock.quantum_ns),
            format!("{} of {}", count(clock.causality_violations), count(clock.causality_samples)),
        ]);
    }
    table
}

fn violations(clocks: &[ClockLine], style: Style, out: &mut String) {
    let violations: u64 = clocks.iter().map(|clock| clock.causality_violations).sum();
    if violations > 0 {
        let line = format!(
            "  {} launches or waits contradict the GPU times: a bound is wrong, or they are not of that step",
            count(violations)
        );
        let _ = writeln!(out, "{}", style.alarm(&cut(&line, WIDTH)));
    }
}

fn counts(summary: &Summary, out: &mut String) {
    let counts = &summary.counts;
    let mut requests = format!("  {} requests", count(counts.requests));
    let parts = [
        (counts.requests_running, "still running"),
        (counts.requests_cancelled, "cancelled"),
        (counts.requests_failed, "failed"),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{} {what}", count(*n))).collect();
    if !parts.is_empty() {
        let _ = write!(requests, " ({})", parts.join(", "));
    }
    if counts.requests_unknown > 0 {
        let _ = write!(requests, ", {} more from before the recording", count(counts.requests_unknown));
    }
    let _ = writeln!(out, "{requests}");
    let rate = counts.tokens_per_second.map_or(String::new(), |rate| format!(" ({rate:.1} per second)"));
    let _ = writeln!(out, "  {} tokens{rate}", count(counts.tokens));
    let batch =
        counts.mean_batch.map_or(String::new(), |batch| format!(", {batch:.1} requests in a batch (mean)"));
    let iterations = match counts.iterations {
        0 => String::new(),
        n => format!(" in {} iterations", count(n)),
    };
    let _ = writeln!(
        out,
        "  {} steps{iterations}{batch}; {} process{}",
        count(counts.steps),
        count(counts.processes),
        if counts.processes == 1 { "" } else { "es" }
    );
}

fn slowest(tokens: &[SlowToken], started_ns: u64) -> Table {
    use Side::{Left, Right};
    let mut table = Table::new([
        ("latency", Right),
        ("request", Left),
        ("token", Right),
        ("others", Right),
        ("delivered", Right),
        ("batch", Right),
        ("step", Right),
        ("waited longest for", Left),
    ]);
    for token in tokens {
        let optional = |value: Option<u64>| value.map_or("–".into(), duration);
        table.push([
            duration(token.latency_ns),
            name_of(token),
            token_name(token),
            if token.others == 0 { String::new() } else { format!("+{}", token.others) },
            offset(token.delivered_ns, started_ns),
            token.batch.map_or("–".into(), |n| format!("{n}{}", if token.prefill { " P" } else { "" })),
            format!("{}{}", optional(token.step_duration_ns), if token.gpu_is_vague { "!" } else { "" }),
            token.waited_for.clone(),
        ]);
    }
    table
}

fn name_of(token: &SlowToken) -> String {
    match token.request_id.as_deref() {
        Some("") => format!("#{}", token.request),
        Some(id) => clean(id, 20),
        None => "(unknown)".into(),
    }
}

fn token_name(token: &SlowToken) -> String {
    if token.choice == 0 { token.index.to_string() } else { format!("{}/{}", token.choice, token.index) }
}

fn of_sockets(sockets: &Sockets, style: Style, out: &mut String) {
    let optional = |value: Option<u64>| value.map_or("–".into(), duration);
    let spread = |spread: &Spread| {
        format!(
            "n {}, p50 {}, p99 {}, max {}",
            count(spread.n),
            optional(spread.p50_ns),
            optional(spread.p99_ns),
            optional(spread.max_ns)
        )
    };
    let Sockets { exchanges, cut, slow_clients, unread, lag, marks, held, held_long } = sockets;
    let mut exchanges = format!("  {} exchanges", count(*exchanges));
    for (n, what) in
        [(*cut, "cut short by the end of their connection"), (*slow_clients, "with a slow client")]
    {
        if n > 0 {
            let _ = write!(exchanges, ", {} {what}", count(n));
        }
    }
    let _ = writeln!(out, "{exchanges}");
    for unread in unread {
        let line = format!("  not read: {} {}", count(unread.count), unread.what);
        let _ = writeln!(out, "{}", style.note(&line));
    }
    if lag.n > 0 {
        let _ = writeln!(out, "  arrived → read (event-loop lag): {}", spread(lag));
    }
    if marks.n > 0 {
        let _ = writeln!(out, "  mark of a token – its write: {}", spread(marks));
    }
    if held.n > 0 {
        let _ = writeln!(out, "  written → on the wire, where not at once: {}", spread(held));
    }
    if *held_long > 0 {
        let advice = format!(
            "  {} writes were held for a millisecond or more (Nagle's algorithm and a delayed ACK, or a full window): set \
             TCP_NODELAY on the server's connections",
            count(*held_long)
        );
        for line in wrap_words(&advice, WIDTH) {
            let _ = writeln!(out, "{}", style.note(&line));
        }
    }
}

fn coverage(summary: &Summary, style: Style, out: &mut String) {
    for process in &summary.coverage {
        let Coverage { tgid, found, attached, fired, silent } = process;
        let line = format!("  process {tgid}: {found} found, {attached} attached, {fired} fired");
        let _ = writeln!(out, "{}", if attached < found { style.alarm(&line) } else { line });
        for silent in silent {
            for line in wrap_words(&silent.to_string(), WIDTH - 4) {
                let _ = writeln!(out, "{}", style.note(&format!("    {line}")));
            }
        }
    }
}

pub(super) fn wrap_words(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(cut(word, width)),
        }
    }
    lines
}

fn ledger(summary: &Summary, style: Style, out: &mut String) {
    let is_unmatched = |line: &&LedgerLine| Unmatched::ALL.iter().any(|kind| kind.name() == line.name);
    let seen: Vec<&LedgerLine> = summary.ledger.iter().filter(|line| line.count > 0).collect();
    let (losses, others): (Vec<&LedgerLine>, Vec<&LedgerLine>) = seen.into_iter().partition(|line| line.loss);
    let (unmatched, others): (Vec<_>, Vec<_>) = others.into_iter().partition(is_unmatched);
    if !summary.has_loss() {
        let _ = writeln!(out, "  nothing lost");
    }
    for line in losses {
        let text = format!("  LOST       {:>12}  {}", count(line.count), clean(&line.name, 200));
        let _ = writeln!(out, "{}", style.alarm(&text));
    }
    for line in unmatched {
        let text = format!("  unmatched  {:>12}  {}", count(line.count), clean(&line.name, 60));
        let _ = writeln!(out, "{}", style.note(&text));
    }
    let others = others.iter().map(|line| format!("{} {}", clean(&line.name, 60), count(line.count)));
    for line in wrap(others, WIDTH - 2) {
        let _ = writeln!(out, "{}", style.faint(&format!("  {line}")));
    }
}

/// Joins items by ` · ` into lines.
pub(super) fn wrap(items: impl Iterator<Item = String>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + item.chars().count() <= width => {
                line.push_str(" · ");
                line.push_str(&item);
            }
            _ => lines.push(cut(&item, width)),
        }
    }
    lines
}

#[cfg(test)]
mod tests;

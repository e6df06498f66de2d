//! `tracer request`: one request's tokens on a timeline, as text and as SVG.

mod document;
mod picture;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP};

use document::Document;

use super::budget;
use super::picture::write;
use super::report::{VAGUE, hazards::meaning, style_of_stdout, wrap};
use super::table::{Side, Style, Table, WIDTH, cut};
use super::units::{clean, count, date_time, duration, offset};
use crate::capture::Capture;
use crate::hex::hex;
use crate::timeline::budget::{Budget, ByToken};
use crate::timeline::rows::{Engine, GpuTime, Hazard, Phase, Request, Step, Token};
use crate::timeline::tables::Tables;

/// Columns of a token's bar.
const BAR: usize = 20;
/// Most names that a message suggests.
const SUGGESTIONS: usize = 5;
/// Hazards that the text names; JSON has all that have rows.
const HAZARDS: usize = 4;

/// Show where the time of one request's tokens went
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer request trace req-7f3a
  tracer request trace 4bf92f3577b34da6a3ce929d0e0e4736
  tracer request trace '#17' -o request.svg

ID is what the client sent (X-Request-ID), a trace id, or # and the number that the report shows.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// The request
    id: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Also draw it as SVG; `-` is stdout, without the text
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = Capture::open(&args.capture)?;
    let tables = capture.tables()?;
    let found = find(&tables, &args.id);
    if found.is_empty() {
        bail!(not_found(&tables, &args.id, &args.capture.display().to_string()));
    }
    let lives: Vec<Life> = found.iter().map(|request| Life::new(&tables, request)).collect();
    if let (Some(path), Some(life)) = (&args.output, lives.first()) {
        if let Some(others) = lives.len().checked_sub(1).filter(|others| *others > 0) {
            eprintln!("drawn is #{}; {others} more have this id: name them by #", life.request.id);
        }
        let svg =
            picture::svg(&capture, &tables, life).with_context(|| format!("cannot draw {}", args.id))?;
        write(path, "request", &svg)?;
        if path.as_os_str() == "-" {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &Document::new(&tables, &lives))?;
        writeln!(out)?;
    } else {
        for life in &lives {
            out.write_all(text(&tables, life, style_of_stdout()).as_bytes())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Requests of this name; several when a client used an id again.
pub(crate) fn find<'a>(tables: &'a Tables, id: &str) -> Vec<&'a Request> {
    let number = id.strip_prefix('#').and_then(|number| number.parse::<u64>().ok());
    let is_it = |request: &&Request| {
        number == Some(request.id)
            || (!id.is_empty() && request.request_id == id)
            || request.trace_id.is_some_and(|trace| hex(&trace).eq_ignore_ascii_case(id))
    };
    let mut found: Vec<&Request> = tables.requests.iter().filter(is_it).collect();
    found.sort_by_key(|request| request.received_ns);
    found
}

fn not_found(tables: &Tables, id: &str, capture: &str) -> String {
    let mut message = format!("no request `{}` in {capture}", clean(id, 80));
    let close = |request: &&Request| !id.is_empty() && request.request_id.contains(id);
    let mut names: Vec<String> =
        tables.requests.iter().filter(close).map(|request| clean(&request.request_id, 80)).collect();
    names.sort();
    names.dedup();
    let more = names.len().saturating_sub(SUGGESTIONS);
    names.truncate(SUGGESTIONS);
    if !names.is_empty() {
        let _ = write!(message, "; there are: {}", names.join(", "));
        if more > 0 {
            let _ = write!(message, " and {more} more");
        }
    }
    let _ = write!(message, "; `tracer report {capture}` names the slowest ones");
    message
}

/// A request with its tokens.
struct Life<'a> {
    request: &'a Request,
    tokens: Vec<Piece<'a>>,
    /// In order of their begin.
    phases: Vec<&'a Phase>,
    /// The engines of its tokens' steps, as far as they are known.
    engines: Vec<&'a Engine>,
    /// As far as they have rows.
    hazards: Vec<&'a Hazard>,
}

/// A token with its step and what it waited for.
struct Piece<'a> {
    token: &'a Token,
    step: Option<&'a Step>,
    /// Requests that the step served.
    batch: Option<u64>,
    budget: Option<&'a Budget>,
}

impl Piece<'_> {
    fn gpu(&self) -> Option<GpuTime> {
        self.step?.gpu
    }
}

impl<'a> Life<'a> {
    fn new(tables: &'a Tables, request: &'a Request) -> Self {
        let mut tokens: Vec<&Token> =
            tables.tokens.iter().filter(|token| token.request == request.id).collect();
        tokens.sort_by_key(|token| (token.choice, token.index));
        let batches = tables.batches();
        let steps: HashMap<u64, &Step> = tables.steps.iter().map(|step| (step.id, step)).collect();
        let budgets = ByToken::new(&tables.budgets);
        let piece = |token: &'a Token| {
            let step = token.step.and_then(|id| steps.get(&id)).copied();
            let batch = token.step.and_then(|id| batches.get(&id)).copied();
            Piece { token, step, batch, budget: budgets.of(token) }
        };
        let tokens: Vec<Piece> = tokens.into_iter().map(piece).collect();
        let is_its = |phase: &&Phase| match phase.request {
            Some(id) => id == request.id,
            None => !phase.request_id.is_empty() && phase.request_id == request.request_id,
        };
        let mut phases: Vec<&Phase> = tables.phases.iter().filter(is_its).collect();
        phases.sort_by_key(|phase| phase.begin_ns);
        let mut engines: Vec<&Engine> = Vec::new();
        for engine in tokens.iter().filter_map(|piece| piece.step?.engine.as_deref()) {
            if !engines.contains(&engine) {
                engines.push(engine);
            }
        }
        let is_its = |hazard: &&Hazard| [hazard.request, hazard.other_request].contains(&Some(request.id));
        let hazards = tables.hazards.iter().filter(is_its).collect();
        Self { request, tokens, phases, engines, hazards }
    }
}

fn text(tables: &Tables, life: &Life, style: Style) -> String {
    let mut out = String::new();
    header(tables, life, style, &mut out);
    if life.tokens.is_empty() {
        out.push_str("  no token was seen\n\n");
        return out;
    }
    out.push_str(&timeline(life).render(style));
    let held = life.tokens.iter().filter_map(|piece| piece.token.held_ns());
    if let Some(longest) = held.clone().max() {
        let line = format!(
            "  {} tokens were held after they were written, up to {}: the kernel waited for an acknowledgement",
            held.count(),
            duration(longest)
        );
        let _ = writeln!(out, "{}", style.note(&line));
    }
    let budgets = life.tokens.iter().filter_map(|piece| piece.budget);
    for line in wrap(budget::legend(budgets), WIDTH - 2) {
        let _ = writeln!(out, "{}", style.faint(&format!("  {line}")));
    }
    let _ = writeln!(out, "{}", style.faint("  Shares of each latency, in order of causes and not of time."));
    if life.tokens.iter().filter_map(Piece::gpu).any(|gpu| gpu.is_vague()) {
        let _ = writeln!(out, "{}", style.note(VAGUE));
    }
    out.push('\n');
    out
}

fn header(tables: &Tables, life: &Life, style: Style, out: &mut String) {
    let request = life.request;
    let name = if request.request_id.is_empty() { "(no id)".into() } else { clean(&request.request_id, 60) };
    let badge = if tables.meta.simulated { "  simulated GPU" } else { "" };
    let title = format!("request {name}  #{}", request.id);
    let _ = writeln!(out, "{}{}", style.heading(&cut(&title, WIDTH - 16)), style.note(badge));
    let mut facts = vec![format!("received {}", offset(request.received_ns, tables.meta.started_ns))];
    facts.extend(request.prompt_tokens.map(|n| format!("prompt {} tokens", count(n.into()))));
    facts.push(match request.declared_tokens {
        Some(declared) => format!("{} of {declared} tokens seen", request.tokens),
        None => format!("{} tokens seen", request.tokens),
    });
    facts.push(finish(request).into());
    let _ = writeln!(out, "{}", cut(&format!("  {}", facts.join(" · ")), WIDTH));
    let served = [
        ("tenant", &request.tenant_id),
        ("model", &request.model),
        ("version", &request.model_version),
        ("engine", &request.engine_hash),
        ("adapters", &request.adapters),
        ("KV cache", &request.kv_cache_strategy),
    ];
    let served = served.iter().filter(|(_, value)| !value.is_empty());
    let served: Vec<String> = served.map(|(name, value)| format!("{name} {}", clean(value, 20))).collect();
    if !served.is_empty() {
        let _ = writeln!(out, "{}", cut(&format!("  {}", served.join(" · ")), WIDTH));
    }
    let e2e = request.end_ns.and_then(|end| end.checked_sub(request.received_ns));
    let shown = |name: &str, ns: Option<u64>| format!("{name} {}", ns.map_or("–".into(), duration));
    let tpot = request.tpot_ns.map(|ns| ns.round() as u64);
    let latencies = [shown("ttft", request.ttft_ns), shown("tpot", tpot), shown("e2e", e2e)];
    let _ = writeln!(out, "  {} (source: {})", latencies.join(" · "), request.source.name());
    let names = [
        tables.wall.realtime_ns(request.received_ns).and_then(date_time),
        // A request that passed through several servers is there once for each.
        Some(format!("process {}", request.process.tgid)),
        request.trace_id.map(|trace| format!("trace {}", hex(&trace))),
    ];
    let names: Vec<String> = names.into_iter().flatten().collect();
    if !names.is_empty() {
        let _ = writeln!(out, "  {}", names.join(" · "));
    }
    for engine in &life.engines {
        let sum = hex(&engine.fingerprint);
        let known = if sum.is_empty() {
            "fingerprint unknown".into()
        } else {
            format!("fingerprint {}", cut(&sum, 12))
        };
        let line = format!("  engine {} · {} bytes · {known}", clean(&engine.path, 60), count(engine.bytes));
        let _ = writeln!(out, "{}", cut(&line, WIDTH));
    }
    for phase in &life.phases {
        let at = duration(phase.begin_ns.saturating_sub(request.received_ns));
        let took = match phase.end_ns.and_then(|end| end.checked_sub(phase.begin_ns)) {
            _ if phase.is_mark => String::new(),
            Some(ns) => format!(" for {}", duration(ns)),
            None => " to the end".into(),
        };
        let line = format!("  {} at {at}{took} ({})", clean(&phase.name, 60), phase.source.name());
        let _ = writeln!(out, "{}", cut(&line, WIDTH));
    }
    for hazard in life.hazards.iter().take(HAZARDS) {
        let Hazard { kind, time_ns, step, .. } = hazard;
        let at = duration(time_ns.saturating_sub(request.received_ns));
        let line = format!("  hazard at {at}, step #{step}: {}", meaning(*kind));
        let _ = writeln!(out, "{}", style.alarm(&cut(&line, WIDTH)));
    }
    if let Some(more) = life.hazards.len().checked_sub(HAZARDS).filter(|more| *more > 0) {
        let _ =
            writeln!(out, "{}", style.alarm(&format!("  {more} more hazards; `tracer report` shows where")));
    }
    out.push('\n');
}

fn finish(request: &Request) -> &'static str {
    match (request.end_ns, request.finish_reason) {
        (None, _) => "still running",
        (_, FINISH_STOP) => "finished: stop",
        (_, FINISH_LENGTH) => "finished: length",
        (_, FINISH_CANCELLED) => "cancelled",
        (_, FINISH_ERROR) => "failed",
        _ => "finished",
    }
}

fn timeline(life: &Life) -> Table {
    use Side::{Left, Right};
    let mut table = Table::new([
        ("token", Right),
        ("at", Right),
        ("latency", Right),
        ("step", Right),
        ("GPU ±", Right),
        ("batch", Right),
        ("", Left),
        ("longest part", Left),
    ]);
    let mut expected = (0, 0);
    for Piece { token, step, batch, budget } in &life.tokens {
        if token.choice != expected.0 {
            expected = (token.choice, 0);
        }
        if token.index > expected.1 {
            missing(&mut table, token.choice, expected.1, token.index - 1);
        }
        expected.1 = token.index.saturating_add(1);
        let batch = batch.map(|batch| format!("{batch}{}", if token.prefill { " P" } else { "" }));
        table.push([
            index(token.choice, token.index),
            duration(token.delivered_ns.saturating_sub(life.request.received_ns)),
            token.latency_ns.map_or("–".into(), duration),
            token.step.map_or("–".into(), |id| format!("#{id}")),
            step.and_then(|step| step.gpu).map_or("–".into(), bound),
            batch.unwrap_or_else(|| "–".into()),
            budget.map_or(String::new(), |budget| budget::bar(budget, budget.latency_ns, BAR)),
            budget.map_or(String::new(), budget::longest),
        ]);
    }
    table
}

/// What a GPU time is right within, marked where that is more than its span.
fn bound(gpu: GpuTime) -> String {
    format!("{}{}", duration(gpu.bound_ns), if gpu.is_vague() { "!" } else { "" })
}

fn index(choice: u32, index: u32) -> String {
    if choice == 0 { index.to_string() } else { format!("{choice}/{index}") }
}

fn missing(table: &mut Table, choice: u32, from: u32, until: u32) {
    let which =
        if from == until { index(choice, from) } else { format!("{}–{until}", index(choice, from)) };
    let dash = || "–".to_owned();
    table.push([which, dash(), dash(), dash(), dash(), dash(), "not seen".into(), String::new()]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;

    #[test]
    fn the_timeline_of_a_request() {
        let tables = tables();
        let found = find(&tables, "req-0");
        let text = text(&tables, &Life::new(&tables, found[0]), Style::default());
        println!("{text}");
        assert!(text.contains("request req-0  #0  simulated GPU"), "{text}");
        assert!(text.contains("\n  2026-11-30T00:53:20.") && !text.contains('!'), "{text}");
        assert!(text.contains("ttft ") && text.contains("finished: length"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.lines().any(|line| line.contains("ew#ss") && line.ends_with(" %")), "{text}");
    }

    #[test]
    fn a_token_that_was_not_seen_has_a_line() {
        let mut tables = tables();
        let id = find(&tables, "req-0")[0].id;
        tables.tokens.retain(|token| (token.request, token.index) != (id, 1));
        let life = Life::new(&tables, find(&tables, "req-0")[0]);
        assert!(text(&tables, &life, Style::default()).contains("not seen"));
    }

    #[test]
    fn requests_are_found_by_every_name_and_missing_ones_suggested() {
        let mut tables = tables();
        tables.requests[1].trace_id = Some([0xab; 16]);
        assert_eq!(find(&tables, "#2")[0].id, 2);
        assert_eq!(find(&tables, &"AB".repeat(16)).len(), 1);
        assert!(find(&tables, "").is_empty() && find(&tables, "re").is_empty());
        let message = not_found(&tables, "req", "trace");
        assert!(message.starts_with("no request `req` in trace; there are: req-0, req-1"), "{message}");
    }

    #[test]
    fn json_has_a_schema_and_parts_that_sum_up() {
        let tables = tables();
        let lives: Vec<Life> = find(&tables, "req-1").into_iter().map(|r| Life::new(&tables, r)).collect();
        let json = serde_json::to_value(Document::new(&tables, &lives)).unwrap();
        assert_eq!(json["schema"], "tracer.request/1");
        let tokens = json["requests"][0]["tokens"].as_array().unwrap();
        assert!(!tokens.is_empty());
        for token in tokens {
            let parts = token["parts"].as_object().unwrap();
            let sum: u64 = parts.values().map(|ns| ns.as_u64().unwrap()).sum();
            assert_eq!(Some(sum), token["latency_ns"].as_u64());
            assert_eq!(token["gpu"]["bound_ns"], 1);
            for at in [&token["delivered_at"], &token["step_begin_at"], &token["gpu"]["end_at"]] {
                assert!(at.as_str().is_some_and(|at| at.starts_with("2026-11-30T00:53:2")), "{token}");
            }
        }
    }

    #[test]
    fn a_step_whose_bound_exceeds_its_span_is_marked() {
        let mut tables = tables();
        for gpu in tables.steps.iter_mut().filter_map(|step| step.gpu.as_mut()) {
            gpu.bound_ns = gpu.span_ns + 1;
        }
        let text = text(&tables, &Life::new(&tables, find(&tables, "req-0")[0]), Style::default());
        assert!(text.contains("s!") && text.contains(VAGUE), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }
}

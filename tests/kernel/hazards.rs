//! Hazards: what the stand-in server does wrong on purpose is found, each by its kind; what it does right is not.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, ensure};
use tracer::{
    capture::Stacks,
    timeline::rows::{Hazard, HazardKind},
};

use crate::{
    Test, faults,
    truth::{self, Run, Truth},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("hazards::shared_stream", shared_stream),
    ("hazards::captured_step", captured_step),
    ("hazards::early_output", early_output),
    ("hazards::early_output_by_gpu_times", early_output_by_gpu_times),
    ("hazards::none_where_nothing_is_wrong", none),
    ("hazards::none_with_several_ranks", none_with_several_ranks),
];

const LOAD: &[&str] = &["--requests", "60", "--concurrency", "8", "--output-tokens", "20-60"];

fn record(bug: &str, record: &[&str]) -> Result<Run> {
    truth::run(&["--bug", bug, "--step-us", "3000"], LOAD, record)
}

impl Run {
    /// Batches with a bug, with their other one.
    fn bugs(&self) -> Vec<(u64, Option<u64>)> {
        let bugs = self.truth.iter().filter_map(|line| match *line {
            Truth::Bug { batch_id, other_batch_id } => Some((batch_id, other_batch_id)),
            _ => None,
        });
        bugs.collect()
    }

    /// The batch of each step.
    fn batches(&self) -> HashMap<u64, u64> {
        self.tables.steps.iter().filter_map(|step| Some((step.id, step.batch_id?))).collect()
    }

    /// All hazards are of this kind, and all have rows.
    fn only(&self, kind: HazardKind) -> Result<&[Hazard]> {
        for other in HazardKind::ALL {
            let (rows, count) = (&self.tables.hazards, self.ledger(other.counter()));
            let rows = rows.iter().filter(|hazard| hazard.kind == other).count() as u64;
            ensure!(rows == count, "{count} {}, of which {rows} have rows", other.name());
            ensure!(other == kind || count == 0, "{count} {}: {:?}", other.name(), self.tables.hazards);
        }
        Ok(&self.tables.hazards)
    }

    /// Both stacks of some hazard name functions of the stand-in server, these ones.
    fn has_stacks(&self, second: &[&str], first: &[&str]) -> Result<()> {
        let stacks = Stacks::read(&self.capture)?;
        let joined = |id| stacks.root_first(id).collect::<Vec<_>>().join(";");
        let holds = |id, parts: &[&str]| {
            let stack = joined(id);
            parts.iter().all(|part| stack.contains(part))
        };
        let named = self
            .tables
            .hazards
            .iter()
            .filter(|hazard| holds(hazard.stack, second) && holds(hazard.other_stack, first))
            .count();
        println!("  {named} of {} hazards have both stacks whole", self.tables.hazards.len());
        let some = self.tables.hazards.last().context("no hazard")?;
        let why = || format!("stacks\n{}\n{}", joined(some.stack), joined(some.other_stack));
        ensure!(named * 2 > self.tables.hazards.len(), "{}", why());
        Ok(())
    }

    fn report_has(&self, parts: &[&str]) -> Result<()> {
        let folder = self.folder().display().to_string();
        let output = faults::tracer()?.args(["report", &folder]).output()?;
        ensure!(output.status.success(), "report: {}", faults::stderr(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for part in parts {
            ensure!(text.contains(part), "{part:?} is not in the report:\n{text}");
        }
        ensure!(parts.is_empty() != text.contains("\nHazards\n"), "{text}");
        Ok(())
    }
}

/// Exactly the pairs of steps that the server put on one stream, with their requests.
fn shared_stream() -> Result<()> {
    let run = record("shared-stream", &["--no-inject"])?;
    let hazards = run.only(HazardKind::SharedStream)?;
    let batches = run.batches();
    let keys: HashMap<u64, u64> =
        run.tables.requests.iter().map(|request| (request.id, request.program_request)).collect();
    let mut found = BTreeSet::new();
    for hazard in hazards {
        let other_step = hazard.other_step.context("no other step")?;
        let (batch, other) = (batches[&hazard.step], batches[&other_step]);
        found.insert((other, Some(batch)));
        ensure!(hazard.tid != hazard.other_tid, "{hazard:?}");
        for (batch, request) in [(batch, hazard.request), (other, hazard.other_request)] {
            let key = keys[&request.context("no request")?];
            let served = run.truth.iter().any(|line| match line {
                Truth::Step { batch_id, slots, .. } => {
                    *batch_id == batch && slots.iter().any(|slot| slot.0 == key)
                }
                _ => false,
            });
            ensure!(served, "request {key} is not of batch {batch}: {hazard:?}");
        }
    }
    let planted: BTreeSet<_> = run.bugs().into_iter().collect();
    println!("  {} planted, {} found", planted.len(), found.len());
    ensure!(planted.len() > 20 && found == planted, "{found:?}, not {planted:?}");
    run.has_stacks(
        &["standin_server::bug::intrude", "Rank::enqueue", "libnvinfer"],
        &["Leader::run", "Leader::share_stream", "Rank::enqueue", "libnvinfer"],
    )?;
    run.report_has(&["shared_stream: two threads gave one stream", "standin_server::bug::intrude"])
}

fn captured_step() -> Result<()> {
    let run = record("capture", &[])?;
    let batches = run.batches();
    let found: BTreeSet<u64> =
        run.only(HazardKind::CapturedStep)?.iter().map(|hazard| batches[&hazard.step]).collect();
    let planted: BTreeSet<u64> = run.bugs().into_iter().map(|(batch_id, _)| batch_id).collect();
    println!("  {} planted, {} found", planted.len(), found.len());
    ensure!(planted.len() > 20 && found == planted, "{found:?}, not {planted:?}");
    run.has_stacks(
        &["Leader::run", "Rank::enqueue", "libnvinfer"],
        &["standin_server::bug::capture", "cuStreamBeginCapture_v2"],
    )?;
    run.report_has(&["captured_step: ", "standin_server::bug::capture"])
}

/// Tokens that were handed out before their step was over, and no other ones.
fn check_early(run: &Run, at_least: f64) -> Result<()> {
    let batches = run.batches();
    let mut planted = 0;
    let (bugs, mut ends) = (run.bugs(), HashMap::new());
    for line in &run.truth {
        if let Truth::Step { batch_id, enqueue_end_ns, sync_end_ns, slots, no_token, .. } = line {
            ends.insert(*batch_id, (*enqueue_end_ns, *sync_end_ns));
            if bugs.iter().any(|(bug, _)| bug == batch_id) {
                planted += slots.len() - no_token.len();
            }
        }
    }
    let hazards = run.only(HazardKind::EarlyOutput)?;
    for hazard in hazards {
        let batch = batches[&hazard.step];
        ensure!(bugs.iter().any(|(bug, _)| *bug == batch), "batch {batch} is right: {hazard:?}");
        let (from, until) = ends[&batch];
        ensure!((from..until).contains(&hazard.time_ns), "batch {batch} ran {from} to {until}: {hazard:?}");
    }
    println!("  {planted} tokens were early, {} were found", hazards.len());
    ensure!(planted > 100 && hazards.len() <= planted, "{} of {planted}", hazards.len());
    // A thread that delivers may come to it only when the step is over.
    ensure!(hazards.len() as f64 >= planted as f64 * at_least, "{} of {planted}", hazards.len());
    run.has_stacks(
        &["standin_server::connection", "hand_over"],
        &["Leader::run", "Rank::enqueue", "libnvinfer"],
    )?;
    run.report_has(&["early_output: ", "hand_over"])
}

fn early_output() -> Result<()> {
    check_early(&record("early-output", &["--no-inject"])?, 0.5)
}

fn early_output_by_gpu_times() -> Result<()> {
    check_early(&record("early-output", &[])?, 0.5)
}

fn check_none(server: &[&str], arguments: &[&str]) -> Result<()> {
    let run = truth::run(server, LOAD, arguments)?;
    ensure!(run.tables.hazards.is_empty(), "{:?}", run.tables.hazards);
    for kind in HazardKind::ALL {
        ensure!(run.ledger(kind.counter()) == 0, "{} {}", run.ledger(kind.counter()), kind.name());
    }
    let (steps, tokens) = (run.ledger("hazards_steps_checked"), run.ledger("hazards_tokens_checked"));
    println!("  {steps} steps and {tokens} tokens checked");
    ensure!(steps > 100, "{steps} steps checked");
    run.report_has(&[])
}

fn none() -> Result<()> {
    let stalls = ["--stall", "gpu:every:60", "--stall", "lock:every:70", "--stall", "cpu:every:80"];
    check_none(&[&stalls[..], &["--step-us", "3000"]].concat(), &[])?;
    check_none(&["--step-us", "3000"], &["--no-inject"])?;
    check_none(&["--zero-gpu"], &["--no-inject"])?;
    check_none(&["--step-us", "3000"], &["--layers", "4", "--point", "sync"])
}

fn none_with_several_ranks() -> Result<()> {
    check_none(&["--ranks", "3", "--step-us", "3000"], &[])?;
    check_none(&["--ranks", "2", "--step-us", "3000"], &["--no-inject"])
}

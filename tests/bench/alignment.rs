//! How right the clocks are: ours and the usual ones on a simulated device.

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use std::fs;
use std::path::Path;
use tracer_tests::clock_sim::conditions::{Condition, Score};
use tracer_tests::table::Table;

use crate::progress;

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    simulated_gpu: bool,
    quick: bool,
    outcomes: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    condition: &'static str,
    seconds: f64,
    seeds: u64,
    scores: Vec<Score>,
    /// Demands on ours that were not met.
    misses: Vec<String>,
}

/// Prints a table per length of a recording and condition; an error when ours miss a demand.
pub(crate) fn run(quick: bool, json: Option<&Path>) -> Result<()> {
    let lengths: &[(f64, u64)] = if quick { &[(120.0, 2)] } else { &[(600.0, 8), (3600.0, 3)] };
    let mut outcomes = Vec::new();
    for &(seconds, seeds) in lengths {
        for condition in Condition::all(seconds, seeds) {
            progress(&format!("{}, {seconds} s", condition.name));
            outcomes.push(outcome(&condition));
        }
    }
    progress("");
    println!(
        "Simulated GPU, fixed seeds. Errors in µs: the median seed's p50, the worst seed's p99 and maximum.\n"
    );
    outcomes.iter().for_each(|outcome| println!("{}", table(outcome)));
    let missed: Vec<String> = outcomes
        .iter()
        .flat_map(|outcome| outcome.misses.iter().map(|miss| format!("{}: {miss}", title(outcome))))
        .collect();
    if let Some(file) = json {
        let report = Report { schema: "tracer.bench.clock/1", simulated_gpu: true, quick, outcomes };
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
    }
    ensure!(missed.is_empty(), "demands missed:\n  {}", missed.join("\n  "));
    println!("All demands on ours are met.");
    Ok(())
}

fn outcome(condition: &Condition) -> Outcome {
    let scores = condition.scores(true);
    let misses =
        scores.iter().filter(|score| score.is_ours()).flat_map(|score| condition.misses(score)).collect();
    Outcome {
        condition: condition.name,
        seconds: condition.config.seconds,
        seeds: condition.seeds,
        scores,
        misses,
    }
}

fn title(outcome: &Outcome) -> String {
    format!("{}, {:.0} min, {} seeds", outcome.condition, outcome.seconds / 60.0, outcome.seeds)
}

fn table(outcome: &Outcome) -> Table {
    let mut table =
        Table::new(&title(outcome), &["clock", "p50", "p99", "max", "in bound", "median bound", "mapped"]);
    for score in &outcome.scores {
        let optional = |value: Option<String>| value.unwrap_or_else(|| "–".into());
        table.rows.push(vec![
            format!("{}{}", score.clock, if score.live { ", live" } else { "" }),
            format!("{:.2}", score.p50_us),
            format!("{:.2}", score.p99_us),
            format!("{:.2}", score.max_us),
            optional(score.covered.map(|share| format!("{:.2} %", share * 100.0))),
            optional(score.median_bound_us.map(|bound| format!("{bound:.2}"))),
            format!("{:.2} %", score.mapped * 100.0),
        ]);
    }
    table
}

//! GPU times from a driver whose clock misbehaves: right within their bound, or none.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use tracer::event::{Event, Mark};

use crate::{Test, graph, truth::Driver};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("inject::preempted_bursts", || check("query_late_us=5000", 0, 0)),
    ("inject::late_answer", || check("record_late_us=50000@4001", 0, 0)),
    ("inject::clock_step", || check("clock_step_ns=3000000@4000", 1, 0)),
    ("inject::clock_step_back", || check("clock_step_ns=-3000000@4000", 1, 0)),
    // The one step whose event has the wrong time cannot be told from others.
    ("inject::backwards_reading", || check("glitch_ns=-400000@4001", 0, 1)),
    ("inject::coarser_clock", || check("quantum_ns=32000@4000", 0, 0)),
    // ±10 ppm, changing by up to 1.1 ppm/s: more than crystals do.
    ("inject::clock_wander", || check("wander_ns=100000", 0, 0)),
    ("inject::turned_off", turned_off),
];

/// Records a program on a driver with this fault. At least `unaligned` spans have no GPU time, at most `wrong` ones have
/// one that is outside of its bound.
fn check(fault: &str, unaligned: usize, wrong: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = graph::record(folder.path(), "dlsym", fault)?;
    let tables = capture.tables()?;
    let mut events: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
    for line in std::fs::read_to_string(folder.path().join("truth"))?.lines() {
        if let Driver::Event { tid, record_ns, complete_ns } = serde_json::from_str(line)? {
            events.entry(tid).or_default().push((record_ns, complete_ns));
        }
    }
    let (mut aligned, mut lost, mut outside, mut worst, mut bounds) = (0, 0, Vec::new(), 0, Vec::new());
    for event in capture.events()? {
        let Event::Mark(mark) = event? else { continue };
        let Mark::GpuSpan(span) = mark.mark else { continue };
        let inside =
            |time: u64| (span.enqueue_begin_ns - 5_000..=span.enqueue_end_ns + 5_000).contains(&time);
        let step = tables.steps.iter().find(|step| step.tid == span.tid && inside(step.begin_ns));
        let Some(gpu) = step.context("a span without its step")?.gpu else {
            lost += 1;
            continue;
        };
        let pair: Vec<_> =
            events.get(&span.tid).into_iter().flatten().filter(|(record, _)| inside(*record)).collect();
        ensure!(pair.len() == 2, "{} events in a step", pair.len());
        let error = gpu.begin_ns.abs_diff(pair[0].1).max(gpu.end_ns.abs_diff(pair[1].1));
        aligned += 1;
        worst = worst.max(error);
        bounds.push(gpu.bound_ns);
        if error > gpu.bound_ns {
            outside.push((error, gpu.bound_ns));
        }
    }
    bounds.sort_unstable();
    println!(
        "  {fault}: {aligned} GPU times, worst error {worst} ns, bounds {:?} to {:?} ns; {lost} unaligned, {} outside",
        bounds.first(),
        bounds.last(),
        outside.len()
    );
    // Bursts that do not show how coarse the clock became leave those up to two bursts before without a time.
    ensure!(aligned > 300, "{aligned} GPU times");
    let counted: u64 =
        tables.ledger.iter().filter(|row| row.name == "gpu_span_unaligned").map(|row| row.count).sum();
    ensure!(counted == lost as u64 && lost >= unaligned, "{lost} unaligned, {counted} counted");
    ensure!(outside.len() <= wrong, "outside of their bound: {:?}", &outside[..outside.len().min(5)]);
    Ok(())
}

/// A driver that errs: the capture says why there are no GPU times.
fn turned_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let tables = graph::record(folder.path(), "dlsym", "record_error=999@4000")?.tables()?;
    let timed = tables.steps.iter().filter(|step| step.gpu.is_some()).count();
    ensure!((1000..3000).contains(&timed), "{timed} GPU times");
    let reason = "gpu_times_off: the CUDA driver answered with error 999";
    ensure!(tables.ledger.iter().any(|row| row.name == reason && row.loss), "{:?}", tables.ledger);
    Ok(())
}

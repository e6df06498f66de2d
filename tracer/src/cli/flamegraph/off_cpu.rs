//! Time off the CPU: thread → what it waited for → stack → who woke it.

use super::path::Path;
use super::{Source, Weighted, WeightedStacks};
use crate::capture::{OffCpu, OffReason};
use anyhow::Result;
use flamegraphs::Palette;
use std::collections::BTreeMap;

/// What a thread waits for that could run.
const RUNQUEUE: &str = "waited for a CPU";

/// Ends the name of a thread that woke another, as other tools mark it.
const WAKER: &str = "_[w]";

pub(super) fn weigh(source: &Source) -> Result<Weighted> {
    let path = if source.filters.is_by_token() {
        let budgets = source.capture.budgets_of(source.tables)?;
        Some(Path::new(&source.filters.tokens(source.tables)?, &budgets))
    } else {
        None
    };
    let window = source.filters.window(source.tables);
    let (mut weights, mut intervals) = (BTreeMap::<Vec<String>, u64>::new(), 0u64);
    for off in source.capture.offcpu()? {
        let off = off?;
        let thread = (off.process.tgid, off.tid);
        if !source.filters.has_thread(&source.threads, thread) {
            continue;
        }
        let mut is_counted = false;
        for (begin_ns, end_ns, frames) in parts(source, &off) {
            let range = begin_ns.max(window.start)..end_ns.min(window.end);
            let ns = match &path {
                Some(path) => path.covered_ns(thread, range),
                None => range.end.saturating_sub(range.start),
            };
            if ns > 0 {
                is_counted = true;
                *weights.entry(frames).or_default() += ns;
            }
        }
        intervals += u64::from(is_counted);
    }
    let title = if path.is_some() { "Off-CPU time that tokens waited for" } else { "Off-CPU time" };
    Ok(Weighted {
        title: format!("{title} by thread, cause, stack and waker"),
        facts: vec![format!("{intervals} intervals")],
        count_name: "µs off CPU",
        groups: 2,
        palette: Palette::Wait,
        stacks: WeightedStacks::Sums(weights.into_iter().map(|(stack, ns)| (stack, [ns])).collect()),
    })
}

/// The sleep of an interval and its wait for a CPU: begin, end and frames of each.
fn parts(source: &Source, off: &OffCpu) -> [(u64, u64, Vec<String>); 2] {
    let runnable_ns = match (off.reason, off.runqueue_ns) {
        (OffReason::Preempted, _) => off.begin_ns,
        (_, Some(wait_ns)) => off.end_ns.saturating_sub(wait_ns).max(off.begin_ns),
        (_, None) => off.end_ns,
    };
    let frames = |cause: &str| -> Vec<String> {
        let root = [source.threads.of((off.process.tgid, off.tid)), cause.to_owned()];
        root.into_iter().chain(source.stacks.off_cpu(off.stack)).collect()
    };
    let blocked = source.stacks.blocked(off.stack);
    let mut slept = frames(blocked.name());
    if off.waker_tid != 0 && blocked.is_for_a_thread() {
        slept.push(format!("{}{WAKER}", source.threads.of((off.waker_tgid, off.waker_tid))));
    }
    let waited = frames(RUNQUEUE);
    [(off.begin_ns, runnable_ns, slept), (runnable_ns, off.end_ns, waited)]
}

//! What could not be joined, counted per process and kind, with a few examples of each.

use std::collections::BTreeMap;

use super::rows::Unmatched;
use super::tables::LedgerRow;
use crate::event::{Origin, ProcessId};

/// Most examples kept of each kind.
const EXAMPLES: usize = 8;

/// Prefix of the ledger's line about a process whose injected library takes no GPU times: `gpu_times_off: REASON`.
pub const GPU_TIMES_OFF: &str = "gpu_times_off: ";

/// One thing that could not be joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    pub kind: Unmatched,
    pub process: ProcessId,
    pub tid: u32,
    /// CLOCK_MONOTONIC ns.
    pub time_ns: u64,
    /// What it was: `batch 17`, `request 4 choice 0 token 12`.
    pub what: String,
}

#[derive(Default)]
pub(super) struct Counts {
    counts: BTreeMap<(ProcessId, Unmatched), u64>,
    examples: Vec<Example>,
    /// Why GPU times are not taken: the first reason of each process.
    off: BTreeMap<ProcessId, String>,
}

impl Counts {
    pub(super) fn gpu_times_off(&mut self, process: ProcessId, reason: &str) {
        self.off.entry(process).or_insert_with(|| reason.to_owned());
    }

    pub(super) fn add(&mut self, kind: Unmatched, origin: Origin, count: u64, what: impl FnOnce() -> String) {
        if count == 0 {
            return;
        }
        if self.examples.iter().filter(|example| example.kind == kind).count() < EXAMPLES {
            let Origin { time_ns, process, tid, .. } = origin;
            self.examples.push(Example { kind, process, tid, time_ns, what: what() });
        }
        *self.counts.entry((origin.process, kind)).or_default() += count;
    }

    pub(super) fn total(&self, kind: Unmatched) -> u64 {
        self.counts.iter().filter(|((_, k), _)| *k == kind).map(|(_, count)| count).sum()
    }

    pub(super) fn ledger(&self) -> Vec<LedgerRow> {
        let row = |(&(process, kind), &count): (&(ProcessId, Unmatched), &u64)| LedgerRow {
            process: Some(process),
            name: kind.name().to_owned(),
            count,
            loss: kind.is_loss(),
        };
        let off = |(&process, reason): (&ProcessId, &String)| LedgerRow {
            process: Some(process),
            name: format!("{GPU_TIMES_OFF}{reason}"),
            count: 1,
            loss: true,
        };
        self.counts.iter().map(row).chain(self.off.iter().map(off)).collect()
    }

    pub(super) fn examples(&self) -> &[Example] {
        &self.examples
    }
}

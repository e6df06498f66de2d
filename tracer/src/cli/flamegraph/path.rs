//! Which tokens waited for a thread at an instant.

use crate::timeline::budget::{Budgets, Label};
use crate::timeline::rows::Token;
use std::collections::HashMap;
use std::ops::Range;

/// A thread: tgid and tid.
pub(super) type Thread = (u32, u32);

/// The threads that tokens waited for, and when.
#[derive(Default)]
pub(super) struct Path {
    /// In order of their begin.
    threads: HashMap<Thread, Vec<Wait>>,
}

/// A token waits.
#[derive(Clone, Copy)]
struct Wait {
    begin_ns: u64,
    end_ns: u64,
    /// The latest end of this and all before it.
    reach_ns: u64,
    token: usize,
    label: Label,
}

impl Path {
    /// Of some tokens, which are numbered in their order.
    pub(super) fn new(tokens: &[&Token], budgets: &Budgets) -> Self {
        let mut path = Self::default();
        for (i, token) in tokens.iter().enumerate() {
            for segment in budgets.segments(token) {
                path.push(segment.thread, segment.begin_ns..segment.end_ns, i, segment.label);
            }
        }
        path.sort();
        path
    }

    fn push(&mut self, thread: Thread, range: Range<u64>, token: usize, label: Label) {
        let Range { start: begin_ns, end: end_ns } = range;
        let wait = Wait { begin_ns, end_ns, reach_ns: 0, token, label };
        self.threads.entry(thread).or_default().push(wait);
    }

    fn sort(&mut self) {
        for waits in self.threads.values_mut() {
            waits.sort_by_key(|wait| (wait.begin_ns, wait.token));
            let mut reach_ns = 0;
            for wait in waits {
                reach_ns = wait.end_ns.max(reach_ns);
                wait.reach_ns = reach_ns;
            }
        }
    }

    /// The waits that lie within `begin_ns..end_ns` in part, latest first.
    fn within(&self, thread: Thread, begin_ns: u64, end_ns: u64) -> impl Iterator<Item = &Wait> {
        let waits = self.threads.get(&thread).map_or(&[][..], Vec::as_slice);
        let before = waits.partition_point(|wait| wait.begin_ns < end_ns);
        let reaching = waits[..before].iter().rev().take_while(move |wait| wait.reach_ns > begin_ns);
        reaching.filter(move |wait| wait.end_ns > begin_ns)
    }

    /// The tokens that waited for a thread at an instant, and what for.
    pub(super) fn at(&self, thread: Thread, time_ns: u64) -> impl Iterator<Item = (usize, Label)> {
        self.within(thread, time_ns, time_ns.saturating_add(1)).map(|wait| (wait.token, wait.label))
    }

    /// For how long of a stretch any token waited for a thread, ns.
    pub(super) fn covered_ns(&self, thread: Thread, range: Range<u64>) -> u64 {
        let waits = self.within(thread, range.start, range.end);
        let mut parts: Vec<(u64, u64)> =
            waits.map(|wait| (wait.begin_ns.max(range.start), wait.end_ns.min(range.end))).collect();
        parts.sort_unstable();
        let (mut covered_ns, mut until_ns) = (0, range.start);
        for (begin_ns, end_ns) in parts {
            covered_ns += end_ns.saturating_sub(begin_ns.max(until_ns));
            until_ns = until_ns.max(end_ns);
        }
        covered_ns
    }
}

/// The thread itself runs while a token waits for it so.
pub(super) const fn is_running(label: Label) -> bool {
    use Label::{Deliver, Enqueue, EventLoopLag, HostRunning, OtherSteps, Queue, SyncWake};
    matches!(label, EventLoopLag | Queue | OtherSteps | HostRunning | Enqueue | SyncWake | Deliver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn waits_are_found_and_counted_once(
            waits in prop::collection::vec((0u64..60, 0u64..20), 0..30),
            at in 0u64..80,
            (from, to) in (0u64..80, 0u64..80),
        ) {
            let thread = (1, 2);
            let mut path = Path::default();
            for (i, (begin, length)) in waits.iter().enumerate() {
                path.push(thread, *begin..begin + length, i, Label::Queue);
            }
            path.sort();
            let is_there = |at: u64, (begin, length): &(u64, u64)| (*begin..begin + length).contains(&at);
            let mut found: Vec<usize> = path.at(thread, at).map(|(token, _)| token).collect();
            found.sort_unstable();
            let expected: Vec<usize> = (0..waits.len()).filter(|i| is_there(at, &waits[*i])).collect();
            prop_assert_eq!(found, expected);
            let covered = (from..to).filter(|at| waits.iter().any(|wait| is_there(*at, wait))).count();
            prop_assert_eq!(path.covered_ns(thread, from..to), covered as u64);
            prop_assert_eq!(path.at((1, 3), at).count(), 0);
        }
    }
}

//! When threads were off the CPU, and who woke them: what was waited for, backwards from an instant.

use std::collections::{HashMap, HashSet};

use super::label::Blocked;
use crate::event::StackId;

/// Most pieces of one chain; what lies before is unknown.
const MAX_PIECES: usize = 10_000;

/// A thread: tgid and tid.
pub(super) type Thread = (u32, u32);

/// An interval in which a thread was off the CPU; CLOCK_MONOTONIC ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffCpuInterval {
    pub begin_ns: u64,
    /// When it could run again; `begin_ns` when it was preempted, `end_ns` when that was not seen.
    pub runnable_ns: u64,
    pub end_ns: u64,
    /// Who woke it: tgid and tid; tid 0: nobody known.
    pub waker: (u32, u32),
    pub blocked: Blocked,
    pub stack: Option<StackId>,
}

/// The threads of a recording.
#[derive(Debug, Default)]
pub struct Threads {
    off: HashMap<Thread, Vec<OffCpuInterval>>,
    /// Of which anything is known: other threads of these never slept.
    processes: HashSet<u32>,
}

/// What a thread of a chain did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Runqueue,
    Blocked(Blocked),
    Unknown,
}

/// A part of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) begin_ns: u64,
    pub(super) end_ns: u64,
    pub(super) thread: Thread,
    pub(super) state: State,
    pub(super) stack: Option<StackId>,
}

impl Piece {
    pub(super) const fn running(thread: Thread) -> Self {
        Self { begin_ns: 0, end_ns: 0, thread, state: State::Running, stack: None }
    }

    pub(super) const fn is_held(&self) -> bool {
        matches!(self.state, State::Blocked(on) if on.is_held())
    }
}

impl Threads {
    /// Adds an interval; those of a thread need no order.
    pub fn push(&mut self, thread: (u32, u32), interval: OffCpuInterval) {
        self.off.entry(thread).or_default().push(interval);
        self.processes.insert(thread.0);
    }

    /// Brings all in order, once all were added.
    pub fn sort(&mut self) {
        self.off.values_mut().for_each(|intervals| intervals.sort_by_key(|interval| interval.begin_ns));
    }

    /// What a thread, and those that it waited for, did from `begin_ns` to `end_ns`: backwards in time, without gaps.
    pub(super) fn chain(&self, thread: Thread, begin_ns: u64, end_ns: u64) -> Vec<Piece> {
        let (mut thread, mut end_ns) = (thread, end_ns);
        let mut pieces = Vec::new();
        let mut push = |from_ns: u64, to_ns: u64, thread, state, stack| {
            let from_ns = from_ns.max(begin_ns);
            if from_ns < to_ns {
                pieces.push(Piece { begin_ns: from_ns, end_ns: to_ns, thread, state, stack });
            }
            pieces.len()
        };
        let mut steps = 0;
        while end_ns > begin_ns {
            if steps == MAX_PIECES || !self.processes.contains(&thread.0) {
                push(begin_ns, end_ns, thread, State::Unknown, None);
                break;
            }
            steps += 1;
            let intervals = self.off.get(&thread).map_or(&[][..], Vec::as_slice);
            let before = intervals.partition_point(|interval| interval.begin_ns < end_ns).checked_sub(1);
            let Some(off) = before.and_then(|i| intervals.get(i)).filter(|off| off.end_ns > begin_ns) else {
                push(begin_ns, end_ns, thread, State::Running, None);
                break;
            };
            push(off.end_ns.min(end_ns), end_ns, thread, State::Running, None);
            end_ns = end_ns.min(off.end_ns);
            let runnable_ns = off.runnable_ns.clamp(off.begin_ns, off.end_ns);
            push(runnable_ns.min(end_ns), end_ns, thread, State::Runqueue, off.stack);
            end_ns = end_ns.min(runnable_ns);
            if end_ns <= off.begin_ns || end_ns <= begin_ns {
                end_ns = end_ns.min(off.begin_ns.max(begin_ns));
                continue;
            }
            // Not where only part of the sleep is looked at: the end of it is not what is waited for.
            let is_whole = end_ns == runnable_ns;
            let waker = Some(off.waker).filter(|waker| {
                is_whole && off.blocked.is_for_a_thread() && *waker != thread && self.off.contains_key(waker)
            });
            if let Some(waker) = waker {
                thread = waker;
                continue;
            }
            push(off.begin_ns, end_ns, thread, State::Blocked(off.blocked), off.stack);
            end_ns = off.begin_ns;
        }
        pieces
    }
}

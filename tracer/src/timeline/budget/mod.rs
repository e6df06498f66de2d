//! The budget of a token: its latency, cut into parts of known cause.
//!
//! In: the finished steps, requests and tokens of a recording, and when its threads were off the CPU. Out: for each token
//! the [`Segment`]s of the interval from its origin (the request was received, or the token before was delivered) to its
//! delivery. Segments never overlap and leave no gap, so that their lengths sum to the latency to the nanosecond.
//!
//! The interval is walked backwards from the delivery, on the thread that delivered. Where that thread slept, the walk
//! goes on with the thread that woke it: what that one did is what was waited for. This is the chain ([`chain`]). Along
//! it, the label that wins at an instant is, in this order:
//! 1. `event_loop_lag`: the request had arrived and the program had not read it;
//! 2. `gpu_span`, `gpu_wait`: a step that generates the token runs on the GPU, or was enqueued and does not run yet
//!    (`host_observed`, without GPU times: it was enqueued and the host's wait for it has not returned);
//!    `neighbour_prefill` is the end of that time, by as much as it is longer than that of the thread's usual steps,
//!    where the batch also has prompts of others;
//! 3. `host_runqueue`: the thread could run and had no CPU;
//! 4. `sync_wake`: the GPU had ended and the host's wait for it had not returned;
//! 5. `queue`, or `other_steps` once the request was in a batch: the thread was in a step of others;
//! 6. `host_blocked`: the thread slept, and nobody is known who kept it waiting;
//! 7. `enqueue`: it was enqueueing;
//! 8. `host_running`, or `deliver` after the step: it ran;
//! 9. `unattributed`: nothing is known of the thread.
//!
//! While a step is still being enqueued, 3. and 6. come before `gpu_span`: the GPU has begun, and gets no more work from a
//! thread that has no CPU.
//!
//! A step that the chain does not pass (whoever waited for it was not seen waking anyone) counts where the chain is at a
//! thread that waits for something unknown, or does something else: the token could not be there before its step ended.
//! It does not count where a thread was held by its client or a disk, since that is what the token waited for.

mod chain;
mod label;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use chain::{OffCpuInterval, Threads};
pub use label::{Blocked, Label};

use super::rows::{Request, Step, Token};
use crate::event::StackId;
use chain::{Piece, State};
use steps::{Phase, Steps, Times};

/// A part of a token's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// CLOCK_MONOTONIC ns.
    pub begin_ns: u64,
    pub end_ns: u64,
    pub label: Label,
    /// The thread of the chain: tgid and tid.
    pub thread: (u32, u32),
    /// What it slept on, where [`Label::HostBlocked`].
    pub blocked: Option<Blocked>,
    /// Where it went off the CPU, where it was.
    pub stack: Option<StackId>,
    /// The step that the label is about.
    pub step: Option<u64>,
}

impl Segment {
    #[must_use]
    pub const fn length_ns(&self) -> u64 {
        self.end_ns - self.begin_ns
    }
}

/// How the latency of a token splits up; all in ns. The parts of [`Label::PARTS`] sum to `latency_ns`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Key of the token.
    pub request: u64,
    pub choice: u32,
    pub index: u32,
    pub latency_ns: u64,
    /// By [`Label::PARTS`].
    pub parts_ns: [u64; Label::PARTS.len()],
    /// From the delivery until its last byte was on the wire: held by Nagle's algorithm, or a full window. Not part of
    /// the latency.
    pub nagle_hold_ns: u64,
    /// What it was blocked on for longest.
    pub blocked: Option<Blocked>,
    /// Where it was blocked for longest.
    pub blocked_stack: Option<StackId>,
    /// The begin and end of GPU parts are right within this; 0 without GPU times.
    pub bound_ns: u64,
    /// A GPU span is shorter than its bound: what lies next to it may belong to it.
    pub vague: bool,
}

impl Budget {
    #[must_use]
    pub fn part_ns(&self, label: Label) -> u64 {
        match label {
            Label::NagleHold => self.nagle_hold_ns,
            _ => self.parts_ns.get(label as usize).copied().unwrap_or(0),
        }
    }

    /// The longest part; of equal ones the first.
    #[must_use]
    pub fn top(&self) -> Label {
        let parts = Label::PARTS.into_iter().rev();
        parts.max_by_key(|label| self.part_ns(*label)).unwrap_or(Label::Unattributed)
    }
}

/// Budgets by token.
#[derive(Debug)]
pub struct ByToken<'a>(HashMap<(u64, u32, u32), &'a Budget>);

impl<'a> ByToken<'a> {
    #[must_use]
    pub fn new(budgets: &'a [Budget]) -> Self {
        Self(budgets.iter().map(|budget| ((budget.request, budget.choice, budget.index), budget)).collect())
    }

    /// `None`: the latency of the token is not known.
    #[must_use]
    pub fn of(&self, token: &Token) -> Option<&'a Budget> {
        self.0.get(&(token.request, token.choice, token.index)).copied()
    }
}

/// Cuts tokens up.
#[derive(Debug, Default)]
pub struct Budgets {
    threads: Threads,
    steps: Steps,
    /// When each request was received and read, where that is two times.
    lags: HashMap<u64, (u64, u64)>,
}

impl Budgets {
    /// For the tokens of a recording.
    #[must_use]
    pub fn new(steps: &[Step], requests: &[Request], tokens: &[Token], threads: Threads) -> Self {
        let lag = |request: &Request| Some((request.id, (request.received_ns, request.read_ns?)));
        Self {
            threads,
            steps: Steps::new(steps, requests, tokens),
            lags: requests.iter().filter_map(lag).collect(),
        }
    }

    /// The parts of a token's latency in order of time, without those of no length; empty when the latency is not known.
    #[must_use]
    pub fn segments(&self, token: &Token) -> Vec<Segment> {
        let Some(begin_ns) = token.latency_ns.and_then(|latency| token.delivered_ns.checked_sub(latency))
        else {
            return Vec::new();
        };
        let mut cut = Cut {
            own: self.steps.own(token, begin_ns),
            segments: Vec::new(),
            begin_ns,
            chain_end_ns: token.delivered_ns,
        };
        let lag = self.lags.get(&token.request).filter(|_| (token.choice, token.index) == (0, 0));
        let read_ns = lag.map_or(begin_ns, |(_, read_ns)| (*read_ns).clamp(begin_ns, token.delivered_ns));
        let process = token.process;
        for piece in self.threads.chain((process.tgid, token.tid), read_ns, token.delivered_ns) {
            self.label(&mut cut, &piece);
        }
        if read_ns > begin_ns {
            cut.push(
                begin_ns,
                read_ns,
                Label::EventLoopLag,
                &Piece::running((process.tgid, token.tid)),
                None,
            );
        }
        cut.segments.reverse();
        cut.segments
    }

    /// The sums of a token's parts; `None` when its latency is not known.
    #[must_use]
    pub fn budget(&self, token: &Token) -> Option<Budget> {
        let latency_ns = token.latency_ns?;
        let segments = self.segments(token);
        let mut budget = Budget {
            request: token.request,
            choice: token.choice,
            index: token.index,
            latency_ns,
            nagle_hold_ns: token.held_ns().unwrap_or(0),
            ..Budget::default()
        };
        let mut blocked: HashMap<Blocked, u64> = HashMap::new();
        let mut longest = 0;
        for segment in &segments {
            if let Some(part) = budget.parts_ns.get_mut(segment.label as usize) {
                *part += segment.length_ns();
            }
            if let Some(on) = segment.blocked {
                *blocked.entry(on).or_default() += segment.length_ns();
                if segment.length_ns() > longest {
                    (longest, budget.blocked_stack) = (segment.length_ns(), segment.stack);
                }
            }
            let gpu = segment.step.filter(|_| segment.label.is_gpu()).and_then(|step| self.steps.gpu(step));
            if let Some(gpu) = gpu {
                budget.bound_ns = budget.bound_ns.max(gpu.bound_ns);
                budget.vague |= gpu.is_vague();
            }
        }
        budget.blocked = blocked.into_iter().max_by_key(|&(on, ns)| (ns, on)).map(|(on, _)| on);
        Some(budget)
    }

    /// Labels a piece of the chain, from its end to its begin.
    fn label(&self, cut: &mut Cut, piece: &Piece) {
        // Whoever was held beyond the end of the step is what the token waited for.
        let is_held = piece.is_held() && piece.end_ns >= cut.own.end_ns;
        let mut end_ns = piece.end_ns;
        while end_ns > piece.begin_ns {
            let at = end_ns - 1;
            let here = self.steps.at(piece.thread, at);
            let own = cut.own.at(at).filter(|(step, _)| step.thread == piece.thread || !is_held);
            // Up to the next instant at which anything changes.
            let changes = here.map(|(step, _)| step.change_before(at)).into_iter();
            let changes = changes.chain(self.steps.end_before(piece.thread, at));
            let changes = changes.chain(cut.own.change_before(at)).chain(cut.own.admitted_before(at));
            let begin_ns = changes.fold(piece.begin_ns, u64::max);
            let (label, step) = match (own, here) {
                (Some((step, phase)), _) => {
                    let neighbours = cut.own.decodes && step.is_prefilling(at);
                    (own_label(step, phase, neighbours, piece, at), Some(step.id))
                }
                (None, Some((step, _))) if piece.state == State::Runqueue => {
                    (Label::HostRunqueue, Some(step.id))
                }
                (None, Some((step, _))) if cut.own.is_admitted(at) => (Label::OtherSteps, Some(step.id)),
                (None, Some((step, _))) => (Label::Queue, Some(step.id)),
                (None, None) => match piece.state {
                    State::Runqueue => (Label::HostRunqueue, None),
                    State::Blocked(_) => (Label::HostBlocked, None),
                    State::Running if at >= cut.own.end_ns => (Label::Deliver, None),
                    State::Running => (Label::HostRunning, None),
                    State::Unknown => (Label::Unattributed, None),
                },
            };
            cut.push(begin_ns, end_ns, label, piece, step);
            end_ns = begin_ns;
        }
    }
}

/// The label of a step that generates the token, where its own thread or another is what is looked at.
fn own_label(step: &Times, phase: Phase, neighbours: bool, piece: &Piece, at_ns: u64) -> Label {
    let state = Some(piece.state).filter(|_| piece.thread == step.thread);
    match (phase, state) {
        (Phase::GpuSpan, Some(State::Runqueue)) if step.is_enqueueing(at_ns) => Label::HostRunqueue,
        (Phase::GpuSpan, Some(State::Blocked(_))) if step.is_enqueueing(at_ns) => Label::HostBlocked,
        (Phase::GpuSpan | Phase::Observed, _) if neighbours => Label::NeighbourPrefill,
        (Phase::GpuSpan, _) => Label::GpuSpan,
        (Phase::GpuWait, _) => Label::GpuWait,
        (Phase::Observed, _) => Label::HostObserved,
        (_, Some(State::Runqueue)) => Label::HostRunqueue,
        (Phase::SyncWake, _) => Label::SyncWake,
        (Phase::Enqueue, Some(State::Blocked(_))) => Label::HostBlocked,
        (Phase::Enqueue, _) => Label::Enqueue,
    }
}

/// A token that is being cut, from its end to its begin.
struct Cut<'a> {
    own: steps::Own<'a>,
    segments: Vec<Segment>,
    begin_ns: u64,
    chain_end_ns: u64,
}

impl Cut<'_> {
    fn push(&mut self, begin_ns: u64, end_ns: u64, label: Label, piece: &Piece, step: Option<u64>) {
        debug_assert!(
            self.begin_ns <= begin_ns && end_ns <= self.chain_end_ns,
            "a part outside of the latency"
        );
        if begin_ns == end_ns {
            return;
        }
        let blocked = match (label, piece.state) {
            (Label::HostBlocked, State::Blocked(on)) => Some(on),
            _ => None,
        };
        let segment = Segment {
            begin_ns,
            end_ns,
            label,
            thread: piece.thread,
            blocked,
            stack: piece.stack.filter(|_| matches!(label, Label::HostBlocked | Label::HostRunqueue)),
            step,
        };
        if let Some(last) = self.segments.last_mut()
            && (Segment { begin_ns, end_ns, ..*last }) == segment
        {
            last.begin_ns = begin_ns;
            return;
        }
        self.segments.push(segment);
    }
}

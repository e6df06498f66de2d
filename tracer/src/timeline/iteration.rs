//! Iterations: the steps of one process with one batch id, and the tokens that they generated.

use std::collections::{BTreeMap, BTreeSet};

use tracer_abi::mark::{PREFILL, SLOT_NO_TOKEN, Slot};

use super::hazard::{Delivered, Ran};
use super::request::{Generated, Place};
use super::rows::{Iteration, Join, Token, Unmatched};
use super::{Clock, Timeline};
use crate::event::{Origin, ProcessId, StackId};

/// Order of creation.
pub(super) type IterationKey = u64;

/// What an iteration keeps of a released step.
#[derive(Clone, Copy)]
pub(super) struct StepEnd {
    pub(super) id: u64,
    pub(super) rank: u32,
    pub(super) begin_ns: u64,
    /// GPU end, else host-observed end, else end of the enqueue.
    pub(super) end_ns: u64,
    /// For hazards.
    pub(super) ran: Ran,
}

/// (request, choice, generation step).
type SlotKey = (u64, u16, u32);

/// An iteration to which steps or tokens may still come.
pub(super) struct OpenIteration {
    /// The batch mark that opened it.
    origin: Origin,
    batch_id: u64,
    /// Assigned when a first step joins.
    id: Option<u64>,
    last_mark_ns: u64,
    /// Batch marks that no step has used yet.
    pending: u32,
    open_steps: u32,
    steps: Vec<StepEnd>,
    /// The same slot of several ranks counts once: (tokens, prefill).
    slots: BTreeMap<SlotKey, (u32, bool)>,
    /// Delivered tokens that wait for the iteration to be final.
    tokens: Vec<Waiting>,
}

/// A delivered token that waits for its iteration to be final.
pub(super) struct Waiting {
    pub(super) origin: Origin,
    pub(super) token: Token,
    /// Where it was delivered.
    pub(super) stack: Option<StackId>,
}

impl OpenIteration {
    /// A batch mark was made: of a new batch, or one more part of a split one.
    pub(super) fn marked(&mut self, time_ns: u64, is_new: bool) {
        self.last_mark_ns = self.last_mark_ns.max(time_ns);
        self.pending += u32::from(is_new);
    }

    /// A batch mark will have no step.
    pub(super) fn pending_gone(&mut self) {
        self.pending = self.pending.saturating_sub(1);
    }

    /// A step used a batch mark. Returns the iteration's id.
    pub(super) fn step_joined(&mut self, next_id: impl FnOnce() -> u64) -> u64 {
        self.pending_gone();
        self.open_steps += 1;
        *self.id.get_or_insert_with(next_id)
    }

    pub(super) fn step_left(&mut self) {
        self.open_steps = self.open_steps.saturating_sub(1);
    }

    pub(super) fn step_released(&mut self, step: StepEnd) {
        self.step_left();
        self.steps.push(step);
    }

    pub(super) fn push_token(&mut self, token: Waiting) {
        self.tokens.push(token);
    }

    /// The step that ended last; of several the first.
    fn slowest(&self) -> Option<StepEnd> {
        self.steps.iter().copied().max_by_key(|step| (step.end_ns, std::cmp::Reverse(step.id)))
    }

    fn row(&self, id: u64, slowest: StepEnd) -> Iteration {
        let requests: BTreeSet<u64> = self.slots.keys().map(|key| key.0).collect();
        let prefills: BTreeSet<u64> =
            self.slots.iter().filter(|(_, (_, prefill))| *prefill).map(|(key, _)| key.0).collect();
        Iteration {
            id,
            process: self.origin.process,
            batch_id: self.batch_id,
            begin_ns: self.steps.iter().map(|step| step.begin_ns).min().unwrap_or(slowest.begin_ns),
            end_ns: slowest.end_ns,
            steps: count(self.steps.len()),
            slowest_rank: slowest.rank,
            requests: count(requests.len()),
            prefill_requests: count(prefills.len()),
            tokens: self.slots.values().map(|(tokens, _)| u64::from(*tokens)).sum(),
        }
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl<C: Clock> Timeline<C> {
    /// The open iteration of a batch, made if there is none, with these slots in it.
    pub(super) fn iteration_of(
        &mut self,
        origin: Origin,
        batch_id: u64,
        slots: &[Slot],
        requests: &[u64],
    ) -> IterationKey {
        let next_key = &mut self.next_iteration_key;
        let program = self.programs.entry(origin.process).or_default();
        let key = *program.batches.entry(batch_id).or_insert_with(|| {
            *next_key += 1;
            *next_key
        });
        let iteration = self.iterations.entry(key).or_insert_with(|| OpenIteration {
            origin,
            batch_id,
            id: None,
            last_mark_ns: origin.time_ns,
            pending: 0,
            open_steps: 0,
            steps: Vec::new(),
            slots: BTreeMap::new(),
            tokens: Vec::new(),
        });
        for (slot, &request) in slots.iter().zip(requests) {
            let prefill = slot.phase == PREFILL;
            let kept = iteration.slots.entry((request, slot.choice, slot.generation_step)).or_default();
            *kept = (kept.0.max(slot.tokens), kept.1 | prefill);
            if slot.flags & SLOT_NO_TOKEN == 0 {
                let generated = Generated { place: Place::Open(key), prefill };
                if !self.requests.generated(request, slot.choice.into(), slot.generation_step, generated) {
                    let what = || format!("generated tokens of request {}", slot.request);
                    self.counts.add(Unmatched::Evicted, origin, 1, what);
                }
            }
        }
        key
    }

    pub(super) fn open_iteration(&mut self, process: ProcessId, batch_id: u64) -> Option<&mut OpenIteration> {
        let key = self.programs.get(&process)?.batches.get(&batch_id)?;
        self.iterations.get_mut(key)
    }

    /// Closes iterations in order of creation, each as soon as nothing more can join it.
    pub(super) fn close_iterations(&mut self) {
        while let Some((&key, iteration)) = self.iterations.first_key_value() {
            let expired =
                self.finishing || self.now_ns >= iteration.last_mark_ns.saturating_add(self.config.hold_ns);
            let complete = iteration.pending == 0 && self.ranks_moved_on(key, iteration);
            if iteration.open_steps > 0 || !(complete || expired) {
                return;
            }
            self.close_iteration(key);
        }
    }

    /// Whether every thread that runs steps has begun a later iteration.
    fn ranks_moved_on(&self, key: IterationKey, iteration: &OpenIteration) -> bool {
        let Some(program) = self.programs.get(&iteration.origin.process) else { return true };
        let asleep_ns = self.now_ns.saturating_sub(self.config.hold_ns);
        let mut marks = program.threads.values().filter_map(|thread| thread.last_batch);
        marks
            .all(|(time_ns, last)| (time_ns > iteration.origin.time_ns && last != key) || time_ns < asleep_ns)
    }

    pub(super) fn evict_iteration(&mut self) {
        if let Some((&key, iteration)) = self.iterations.first_key_value() {
            let batch_id = iteration.batch_id;
            self.counts
                .add(Unmatched::Evicted, iteration.origin, 1, || format!("iteration of batch {batch_id}"));
            self.close_iteration(key);
        }
    }

    fn close_iteration(&mut self, key: IterationKey) {
        let Some(mut iteration) = self.iterations.remove(&key) else { return };
        let mut is_old = true;
        if let Some(program) = self.programs.get_mut(&iteration.origin.process) {
            program.batches.remove(&iteration.batch_id);
            is_old = program.is_before_steps(iteration.origin.time_ns);
        }
        let tokens = std::mem::take(&mut iteration.tokens);
        let closed = iteration.id.zip(iteration.slowest());
        let place = match closed {
            Some((iteration, step)) => Place::Closed { iteration, step: step.id },
            None => Place::Nowhere { is_old },
        };
        for &(request, choice, index) in iteration.slots.keys() {
            self.requests.iteration_closed(key, (request, choice.into(), index), place);
        }
        let ran: Vec<Ran> = iteration.steps.iter().map(|step| step.ran).collect();
        for Waiting { origin, mut token, stack } in tokens {
            if let Some((id, step)) = closed {
                let (time_ns, tid) = (token.delivered_ns, token.tid);
                self.hazards.delivered(
                    Delivered { time_ns, request: token.request, tid, stack },
                    &ran,
                    step.id,
                );
                (token.iteration, token.step, token.join) = (Some(id), Some(step.id), Join::Mark);
                self.marked_token(origin, token);
            } else {
                self.token_without_step(origin, token, is_old);
            }
        }
        if let Some((id, slowest)) = closed {
            self.out.iterations.push(iteration.row(id, slowest));
        }
    }
}

//! Continuous batching: which requests the next step serves. Pure: no clocks, no threads.
//!
//! A request keeps its place in the batch until it ends. Each step first gives one token to every request that has
//! been prefilled, then spends up to `prefill_chunk` prompt tokens on the others, oldest first; the step that processes
//! the end of a prompt also yields the first token.

use tracer_marks::{DECODE, PREFILL, SLOT_NO_TOKEN, Slot};

/// A request in the batch; `J` is what the caller needs to answer it.
#[derive(Debug)]
struct Running<J> {
    key: u64,
    job: J,
    prompt_tokens: u32,
    max_tokens: u32,
    prefilled: u32,
    generated: u32,
}

/// What the next step does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) slots: Vec<Slot>,
    /// Prompt tokens that it processes.
    pub(crate) prefill_tokens: u64,
    /// Tokens of context that its decoded requests have.
    pub(crate) context_tokens: u64,
}

/// A token that a step generated.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Generated<J> {
    pub(crate) job: J,
    pub(crate) index: u32,
    /// The request ends with it.
    pub(crate) last: bool,
}

#[derive(Debug)]
pub(crate) struct Scheduler<J> {
    prefill_chunk: u32,
    places: Vec<Option<Running<J>>>,
}

impl<J: Clone> Scheduler<J> {
    pub(crate) fn new(max_batch: u32, prefill_chunk: u32) -> Self {
        Self { prefill_chunk, places: (0..max_batch).map(|_| None).collect() }
    }

    /// How many more requests can be admitted.
    pub(crate) fn free(&self) -> usize {
        self.places.iter().filter(|place| place.is_none()).count()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Takes a request into the batch; `false` when that is full. It has at least one prompt token and one output token.
    pub(crate) fn admit(&mut self, key: u64, prompt_tokens: u32, max_tokens: u32, job: J) -> bool {
        let Some(place) = self.places.iter_mut().find(|place| place.is_none()) else { return false };
        *place = Some(Running {
            key,
            job,
            prompt_tokens: prompt_tokens.max(1),
            max_tokens: max_tokens.max(1),
            prefilled: 0,
            generated: 0,
        });
        true
    }

    /// Drops the requests that nobody waits for any more.
    pub(crate) fn retain(&mut self, wanted: impl Fn(&J) -> bool) {
        for place in &mut self.places {
            if place.as_ref().is_some_and(|running| !wanted(&running.job)) {
                *place = None;
            }
        }
    }

    /// The next step; without slots when there is nothing to do.
    pub(crate) fn plan(&self) -> Step {
        let mut step = Step::default();
        let mut budget = self.prefill_chunk;
        let mut prefills: Vec<(u32, &Running<J>)> = Vec::new();
        for (offset, place) in (0..).zip(&self.places) {
            let Some(running) = place else { continue };
            if running.prefilled < running.prompt_tokens {
                prefills.push((offset, running));
                continue;
            }
            step.context_tokens += u64::from(running.prompt_tokens) + u64::from(running.generated);
            step.slots.push(Slot {
                request: running.key,
                sample_offset: offset,
                generation_step: running.generated,
                tokens: 1,
                choice: 0,
                phase: DECODE,
                flags: 0,
            });
        }
        prefills.sort_by_key(|(_, running)| running.key);
        for (offset, running) in prefills {
            let left = running.prompt_tokens - running.prefilled;
            let tokens = left.min(budget);
            if tokens == 0 {
                break;
            }
            budget -= tokens;
            step.prefill_tokens += u64::from(tokens);
            step.slots.push(Slot {
                request: running.key,
                sample_offset: offset,
                generation_step: 0,
                tokens,
                choice: 0,
                phase: PREFILL,
                flags: if tokens < left { SLOT_NO_TOKEN } else { 0 },
            });
        }
        step
    }

    /// Accounts for a step that has run; returns the tokens that it generated.
    pub(crate) fn complete(&mut self, step: &Step) -> Vec<Generated<J>> {
        let mut tokens = Vec::with_capacity(step.slots.len());
        for slot in &step.slots {
            let Some(place) = self.places.get_mut(slot.sample_offset as usize) else { continue };
            let Some(running) = place.as_mut().filter(|running| running.key == slot.request) else {
                continue;
            };
            if slot.phase == PREFILL {
                running.prefilled += slot.tokens;
            }
            if slot.flags & SLOT_NO_TOKEN != 0 {
                continue;
            }
            let index = running.generated;
            running.generated += 1;
            let last = running.generated >= running.max_tokens;
            tokens.push(Generated { job: running.job.clone(), index, last });
            if last {
                *place = None;
            }
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every request gets its tokens, in order; no step is larger than allowed; prompts are processed once.
        #[test]
        fn every_request_is_served(requests in proptest::collection::vec((0u32..200, 0u32..20), 1..40),
                                   max_batch in 1u32..8, prefill_chunk in 1u32..64) {
            let mut scheduler = Scheduler::new(max_batch, prefill_chunk);
            let mut waiting: Vec<_> = requests.iter().enumerate().rev().collect();
            let mut generated: HashMap<usize, u32> = HashMap::new();
            let mut processed: HashMap<u64, u32> = HashMap::new();
            while !(waiting.is_empty() && scheduler.is_idle()) {
                while scheduler.free() > 0 && let Some((key, &(prompt, output))) = waiting.pop() {
                    prop_assert!(scheduler.admit(key as u64, prompt, output, key));
                }
                let step = scheduler.plan();
                prop_assert!(!step.slots.is_empty() && step.slots.len() <= max_batch as usize);
                prop_assert!(step.prefill_tokens <= u64::from(prefill_chunk));
                for slot in step.slots.iter().filter(|slot| slot.phase == PREFILL) {
                    *processed.entry(slot.request).or_default() += slot.tokens;
                }
                for token in scheduler.complete(&step) {
                    let next = generated.entry(token.job).or_default();
                    prop_assert_eq!(token.index, *next);
                    *next += 1;
                    prop_assert_eq!(token.last, *next == requests[token.job].1.max(1));
                }
            }
            for (key, &(prompt, output)) in requests.iter().enumerate() {
                prop_assert_eq!(generated[&key], output.max(1));
                prop_assert_eq!(processed[&(key as u64)], prompt.max(1));
            }
        }
    }

    #[test]
    fn what_nobody_wants_is_dropped() {
        let mut scheduler = Scheduler::new(2, 10);
        assert!(
            scheduler.admit(1, 1, 5, 'a') && scheduler.admit(2, 1, 5, 'b') && !scheduler.admit(3, 1, 5, 'c')
        );
        let step = scheduler.plan();
        scheduler.retain(|&job| job == 'b');
        let tokens = scheduler.complete(&step);
        assert_eq!(tokens, [Generated { job: 'b', index: 0, last: false }]);
        assert_eq!(scheduler.free(), 1);
    }
}

//! Which steps a token waited for, and what a step was doing at an instant.

use std::collections::HashMap;

use super::chain::Thread;
use tracer_abi::mark::PREFILL;

use crate::timeline::rows::{GpuTime, Request, Step, Token};
use crate::timeline::shares::Names;

/// Steps without prompts that a thread must have run, for others to be compared with them.
const LEAST_USUAL: usize = 10;

/// What a step was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Enqueue,
    /// Enqueued; the GPU has not begun it.
    GpuWait,
    GpuSpan,
    /// The GPU has ended it; the host's wait has not returned.
    SyncWake,
    /// Enqueued; the host's wait has not returned, and there are no GPU times.
    Observed,
}

/// When a step went from one phase to the next; CLOCK_MONOTONIC ns, in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) id: u64,
    pub(super) thread: Thread,
    begin_ns: u64,
    enqueued_ns: u64,
    gpu: Option<(u64, u64)>,
    end_ns: u64,
    /// When it would have ended if it were a usual one, where it has prompts and took longer.
    prefilling_ns: u64,
}

impl Times {
    fn new(step: &Step) -> Self {
        let begin_ns = step.begin_ns;
        let enqueued_ns = step.end_ns.max(begin_ns);
        // A wait cannot have returned before what it waited for ended; that it seems so is the clock's error.
        let seen_ns = step.observed_end_ns.or(step.gpu.map(|gpu| gpu.end_ns)).unwrap_or(enqueued_ns);
        let end_ns = seen_ns.max(enqueued_ns);
        let gpu = step.gpu.map(|gpu| {
            let gpu_begin_ns = gpu.begin_ns.clamp(begin_ns, end_ns);
            (gpu_begin_ns, gpu.end_ns.clamp(gpu_begin_ns, end_ns))
        });
        let thread = (step.process.tgid, step.tid);
        Self { id: step.id, thread, begin_ns, enqueued_ns, gpu, end_ns, prefilling_ns: u64::MAX }
    }

    fn phase(&self, at_ns: u64) -> Option<Phase> {
        if !(self.begin_ns..self.end_ns).contains(&at_ns) {
            return None;
        }
        Some(match self.gpu {
            Some((begin_ns, end_ns)) if (begin_ns..end_ns).contains(&at_ns) => Phase::GpuSpan,
            _ if at_ns < self.enqueued_ns => Phase::Enqueue,
            Some((begin_ns, _)) if at_ns < begin_ns => Phase::GpuWait,
            Some(_) => Phase::SyncWake,
            None => Phase::Observed,
        })
    }

    /// When it ran: on the GPU, or else as the host saw it.
    fn run(&self) -> (u64, u64) {
        self.gpu.unwrap_or((self.enqueued_ns, self.end_ns))
    }

    /// It ran for longer than steps without prompts do.
    pub(super) fn is_prefilling(&self, at_ns: u64) -> bool {
        at_ns >= self.prefilling_ns
    }

    pub(super) fn is_enqueueing(&self, at_ns: u64) -> bool {
        at_ns < self.enqueued_ns
    }

    /// The latest instant up to `at_ns` at which its phase changed.
    pub(super) fn change_before(&self, at_ns: u64) -> u64 {
        let (gpu_begin_ns, gpu_end_ns) = self.gpu.unwrap_or_default();
        [self.begin_ns, self.enqueued_ns, gpu_begin_ns, gpu_end_ns, self.end_ns, self.prefilling_ns]
            .into_iter()
            .filter(|ns| *ns <= at_ns)
            .max()
            .unwrap_or(0)
    }
}

/// All steps of a recording.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// By id.
    times: Vec<Times>,
    gpu: Vec<Option<GpuTime>>,
    /// Indices of the steps of each thread, in order of their begin.
    of_thread: HashMap<Thread, Vec<usize>>,
    /// Indices of the steps that served each request, in order of their begin.
    of_request: HashMap<u64, Vec<usize>>,
    by_id: HashMap<u64, usize>,
}

impl Steps {
    pub(super) fn new(steps: &[Step], requests: &[Request], tokens: &[Token]) -> Self {
        let mut all = Self { times: steps.iter().map(Times::new).collect(), ..Self::default() };
        all.gpu = steps.iter().map(|step| step.gpu).collect();
        all.by_id = steps.iter().enumerate().map(|(i, step)| (step.id, i)).collect();
        for (i, times) in all.times.iter().enumerate() {
            all.of_thread.entry(times.thread).or_default().push(i);
        }
        all.find_prefilling(steps);
        all.served(steps, requests);
        for token in tokens {
            if let Some(&step) = token.step.as_ref().and_then(|step| all.by_id.get(step)) {
                all.of_request.entry(token.request).or_default().push(step);
            }
        }
        let Self { times, of_thread, of_request, .. } = &mut all;
        let begin = |i: &usize| times.get(*i).map_or(0, |times| times.begin_ns);
        of_thread.values_mut().for_each(|steps| steps.sort_by_key(begin));
        for steps in of_request.values_mut() {
            steps.sort_by_key(begin);
            steps.dedup();
        }
        all
    }

    /// Compares steps that have prompts with the median of those of the same thread that have none.
    fn find_prefilling(&mut self, steps: &[Step]) {
        let prompts: Vec<bool> =
            steps.iter().map(|step| step.slots.iter().any(|slot| slot.phase == PREFILL)).collect();
        for of_thread in self.of_thread.values() {
            let has_prompts = |i: &usize| prompts.get(*i) == Some(&true);
            let run = |i: &usize| self.times.get(*i).map(|times| times.run().1 - times.run().0);
            let mut usual: Vec<u64> = of_thread.iter().filter(|i| !has_prompts(i)).filter_map(run).collect();
            if usual.len() < LEAST_USUAL {
                continue;
            }
            let middle = usual.len() / 2;
            let usual_ns = *usual.select_nth_unstable(middle).1;
            for i in of_thread.iter().filter(|i| has_prompts(i)) {
                let Some(times) = self.times.get_mut(*i) else { continue };
                times.prefilling_ns = times.run().0.saturating_add(usual_ns);
            }
        }
    }

    /// Which requests the batches of the steps name; of an iteration of several ranks, the step that ended last counts.
    fn served(&mut self, steps: &[Step], requests: &[Request]) {
        let mut slowest: HashMap<u64, usize> = HashMap::new();
        for (i, step) in steps.iter().enumerate() {
            let Some(iteration) = step.iteration else { continue };
            let end_ns = |i: usize| self.times.get(i).map_or(0, |times| times.end_ns);
            let kept = slowest.entry(iteration).or_insert(i);
            if end_ns(i) > end_ns(*kept) {
                *kept = i;
            }
        }
        let names = Names::new(requests);
        for i in slowest.into_values() {
            let Some(step) = steps.get(i) else { continue };
            for slot in &step.slots {
                if let Some(request) = names.at(step.process, slot.request, step.begin_ns) {
                    self.of_request.entry(request.id).or_default().push(i);
                }
            }
        }
    }

    pub(super) fn gpu(&self, id: u64) -> Option<GpuTime> {
        *self.gpu.get(*self.by_id.get(&id)?)?
    }

    /// The latest step of a thread that had begun by then.
    fn begun(&self, thread: Thread, at_ns: u64) -> Option<&Times> {
        let steps = self.of_thread.get(&thread)?;
        let begun = steps.partition_point(|i| self.times.get(*i).is_some_and(|t| t.begin_ns <= at_ns));
        self.times.get(*steps.get(begun.checked_sub(1)?)?)
    }

    /// The step that a thread was in, and what that was doing.
    pub(super) fn at(&self, thread: Thread, at_ns: u64) -> Option<(&Times, Phase)> {
        let times = self.begun(thread, at_ns)?;
        Some((times, times.phase(at_ns)?))
    }

    /// When the latest step of a thread that had ended by then ended.
    pub(super) fn end_before(&self, thread: Thread, at_ns: u64) -> Option<u64> {
        self.begun(thread, at_ns).map(|times| times.end_ns).filter(|end_ns| *end_ns <= at_ns)
    }

    /// The steps that a token waited for since `begin_ns`: that generated it, and before the first one, those that
    /// processed its prompt.
    pub(super) fn own(&self, token: &Token, begin_ns: u64) -> Own<'_> {
        let last = token.step.and_then(|step| self.by_id.get(&step)).and_then(|i| self.times.get(*i));
        let served = self.of_request.get(&token.request).map_or(&[][..], Vec::as_slice);
        let until = last.map_or(0, |last| last.begin_ns);
        let of = |i: &usize| self.times.get(*i);
        let first = served.first().and_then(of);
        let from = served.partition_point(|i| of(i).is_some_and(|times| times.end_ns <= begin_ns));
        let steps = served.get(from..).unwrap_or_default().iter().filter_map(of);
        Own {
            steps: steps.take_while(|times| times.begin_ns <= until).collect(),
            admitted_ns: first.map_or(u64::MAX, |first| first.begin_ns),
            end_ns: last.map_or(u64::MAX, |last| last.end_ns),
            decodes: !token.prefill,
        }
    }
}

/// The steps that a token waited for, in order of their begin.
#[derive(Debug)]
pub(super) struct Own<'a> {
    steps: Vec<&'a Times>,
    /// When the first step of its request began.
    admitted_ns: u64,
    /// Its own prompt was processed before.
    pub(super) decodes: bool,
    /// When the step that generated the token ended; no time when that step is not known.
    pub(super) end_ns: u64,
}

impl Own<'_> {
    pub(super) fn at(&self, at_ns: u64) -> Option<(&Times, Phase)> {
        self.steps.iter().rev().find_map(|step| Some((*step, step.phase(at_ns)?)))
    }

    /// The latest instant up to `at_ns` at which the phase of any of them changed.
    pub(super) fn change_before(&self, at_ns: u64) -> Option<u64> {
        self.steps.iter().map(|step| step.change_before(at_ns)).max()
    }

    pub(super) fn admitted_before(&self, at_ns: u64) -> Option<u64> {
        Some(self.admitted_ns).filter(|ns| *ns <= at_ns)
    }

    pub(super) fn is_admitted(&self, at_ns: u64) -> bool {
        at_ns >= self.admitted_ns
    }
}

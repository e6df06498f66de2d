//! Which step generated a token that was seen on a socket.
//!
//! By counting: a request gets one token a step, so its token k is of step s₀+k, where s₀ = min over k of (number of the
//! latest step that had ended before token k was handed to the kernel) − k. Delivery is never early, so the minimum is
//! right as soon as any one token was prompt. Where that cannot be (the step would lie before the request, as when a step
//! yields several tokens), the latest ended step is taken, and says so.
//!
//! Which steps are counted is told by wake-ups ([`super::wakes`]) and by rhythm. Wake-ups lead to the processes that the
//! writing threads heard of, and to no others. Where these run several engines (two models in one program), each is
//! counted for itself, and the one whose steps the tokens followed most evenly made them: beside an engine with another
//! rhythm, tokens come ever later or ever sooner, however long the way from engine to socket is. Where two are alike,
//! wake-ups decide; where they do not, the steps are inferred.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::pair::TokenKey;
use super::rows::{Join, Step};
use super::wakes::{Context, Vote, Votes};
use crate::event::ProcessId;

/// Most steps of a process that are remembered to join tokens to.
const MAX_STEPS: usize = 1 << 16;
/// Most engines that are tried for a request.
const MAX_LANES: usize = 32;
/// Fewer tokens have no rhythm.
const RHYTHM: usize = 4;

/// A step that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) step: u64,
    pub(super) iteration: Option<u64>,
    begin_ns: u64,
    ended_ns: u64,
    tid: u32,
    context: Context,
}

impl Ended {
    fn thread(&self) -> (ProcessId, u32) {
        (self.context.process, self.tid)
    }
}

/// Steps that tokens may be of: per process, in order of their begin.
#[derive(Debug, Default)]
pub(super) struct Steps(BTreeMap<ProcessId, VecDeque<Ended>>);

/// The step of each token of a request.
#[derive(Debug, Default)]
pub(super) struct Joined {
    pub(super) tokens: BTreeMap<TokenKey, (Ended, Join)>,
    /// End of the first step that is remembered; `None`: there is none.
    pub(super) first_ns: Option<u64>,
}

/// When the tokens of each choice were delivered: (index, CLOCK_MONOTONIC ns), in order.
pub(super) type Deliveries = BTreeMap<u32, Vec<(u32, u64)>>;

impl Steps {
    /// Remembers a step, once it is final; `object`: the first argument of its call.
    pub(super) fn add(&mut self, step: &Step, object: u64) {
        let Some(ended_ns) = step.completion_ns() else { return };
        let steps = self.0.entry(step.process).or_default();
        if steps.len() == MAX_STEPS {
            steps.pop_front();
        }
        steps.push_back(Ended {
            step: step.id,
            iteration: step.iteration,
            begin_ns: step.begin_ns,
            ended_ns,
            tid: step.tid,
            context: Context { process: step.process, object },
        });
    }

    /// The steps of the tokens of a request that `process` received at `received_ns`.
    pub(super) fn join(
        &self,
        process: ProcessId,
        received_ns: u64,
        deliveries: &Deliveries,
        votes: &Votes,
    ) -> Joined {
        let (votes, contexts) = votes.credible();
        let mut processes: BTreeSet<ProcessId> = contexts.iter().map(|context| context.process).collect();
        if processes.is_empty() {
            processes.extend(self.likely(process));
        }
        let first_ns = processes.iter().filter_map(|id| Some(self.0.get(id)?.front()?.ended_ns)).min();
        let last_ns = deliveries.values().filter_map(|tokens| tokens.last()).map(|(_, ns)| *ns).max();
        let all = self.between(&processes, received_ns, last_ns.unwrap_or(0));
        let lanes = lanes(&all);
        let is_only = lanes.len() == 1;
        let counted = lanes.iter().filter_map(|steps| Counted::new(steps, deliveries, &votes)).collect();
        let tokens = decide(counted, votes.len(), is_only).unwrap_or_else(|| {
            let is_heard_of = |step: &&Ended| contexts.is_empty() || contexts.contains(&step.context);
            latest(&all.iter().filter(is_heard_of).copied().collect::<Vec<_>>(), deliveries)
        });
        Joined { tokens, first_ns }
    }

    /// The process whose steps serve a request of which no wake-up tells: its own, or (where it has none) the only one
    /// that has any.
    fn likely(&self, process: ProcessId) -> Option<ProcessId> {
        let own = self.0.contains_key(&process).then_some(process);
        own.or_else(|| self.0.keys().next().copied().filter(|_| self.0.len() == 1))
    }

    /// The steps of these processes that began in this time, in order of their end.
    fn between(&self, processes: &BTreeSet<ProcessId>, begin_ns: u64, end_ns: u64) -> Vec<Ended> {
        let mut found = Vec::new();
        for steps in processes.iter().filter_map(|id| self.0.get(id)) {
            let from = steps.partition_point(|step| step.begin_ns < begin_ns);
            let until = steps.partition_point(|step| step.begin_ns < end_ns);
            found.extend(steps.range(from..until.max(from)));
        }
        found.sort_by_key(|step: &Ended| step.ended_ns);
        found
    }
}

/// The steps of each engine that these may be of: together, by thread, and by context.
fn lanes(all: &[Ended]) -> Vec<Vec<Ended>> {
    // An engine whose steps move from thread to thread or from context to context runs one after the other.
    let follows = |pair: &[Ended]| {
        let [before, after] = pair else { return true };
        before.thread() == after.thread() || before.ended_ns <= after.begin_ns
    };
    let mut lanes = Vec::new();
    if all.windows(2).all(follows) {
        lanes.push(all.to_vec());
    }
    let threads: BTreeSet<_> = all.iter().map(Ended::thread).collect();
    let contexts: BTreeSet<_> = all.iter().map(|step| step.context).collect();
    let of =
        |is_of: &dyn Fn(&Ended) -> bool| all.iter().filter(|step| is_of(step)).copied().collect::<Vec<_>>();
    let by_thread = threads.iter().map(|thread| of(&|step| step.thread() == *thread));
    let by_context = contexts.iter().map(|context| of(&|step| step.context == *context));
    for lane in by_thread.chain(by_context).take(MAX_LANES) {
        if !lanes.contains(&lane) {
            lanes.push(lane);
        }
    }
    lanes
}

/// Tokens joined by counting the steps of one engine.
struct Counted {
    tokens: BTreeMap<TokenKey, (Ended, Join)>,
    /// Standard deviation of the time from the end of a token's step to its delivery.
    unevenness_ns: u64,
    /// Wake-ups that say the same.
    agreeing: usize,
}

impl Counted {
    /// `None`: the tokens cannot be of these steps, one each.
    fn new(steps: &[Ended], deliveries: &Deliveries, votes: &[Vote]) -> Option<Self> {
        let mut tokens = BTreeMap::new();
        let mut lags_ns = Vec::new();
        for (choice, deliveries) in deliveries {
            for ((index, delivered_ns), step) in deliveries.iter().zip(count(steps, deliveries)?) {
                lags_ns.push(delivered_ns.saturating_sub(step.ended_ns) as f64);
                tokens.insert((*choice, *index), (step, Join::Count));
            }
        }
        let count = lags_ns.len() as f64;
        let mean_ns = lags_ns.iter().sum::<f64>() / count;
        let variance = lags_ns.iter().map(|lag| (lag - mean_ns).powi(2)).sum::<f64>() / count;
        let agrees =
            |vote: &&Vote| tokens.get(&vote.token).is_some_and(|(step, _)| step.context == vote.context);
        let agreeing = votes.iter().filter(agrees).count();
        Some(Self { tokens, unevenness_ns: variance.sqrt() as u64, agreeing })
    }
}

/// The tokens of the engine that made them, inferred where nothing tells which; `None`: of none, one each.
fn decide(
    mut counted: Vec<Counted>,
    votes: usize,
    is_only: bool,
) -> Option<BTreeMap<TokenKey, (Ended, Join)>> {
    counted.sort_by_key(|counted| counted.unevenness_ns);
    let evenest = counted.first()?;
    if is_only {
        return counted.into_iter().next().map(|only| only.tokens);
    }
    // As even, within a quarter, is alike; what comes to the same is no rival.
    let limit_ns = evenest.unevenness_ns.saturating_add(evenest.unevenness_ns / 4);
    let has_rhythm = evenest.tokens.len() >= RHYTHM;
    let steps = |counted: &Counted| counted.tokens.values().map(|(step, _)| step.step).collect::<Vec<_>>();
    let first = steps(evenest);
    let is_alone =
        counted.iter().skip(1).all(|other| other.unevenness_ns > limit_ns || steps(other) == first);
    if is_alone && has_rhythm {
        return counted.into_iter().next().map(|evenest| evenest.tokens);
    }
    counted.retain(|other| !has_rhythm || other.unevenness_ns <= limit_ns);
    let mut best = counted.into_iter().rev().max_by_key(|counted| counted.agreeing)?;
    if best.agreeing * 2 <= votes {
        best.tokens.values_mut().for_each(|(_, join)| *join = Join::Inferred);
    }
    Some(best.tokens)
}

/// How many of the steps, in order of their end, had ended by then.
fn ended_by(steps: &[Ended], time_ns: u64) -> usize {
    steps.partition_point(|step| step.ended_ns <= time_ns)
}

/// The step of each delivery (index, time), by counting; see the module. No step began before the request.
fn count(steps: &[Ended], deliveries: &[(u32, u64)]) -> Option<Vec<Ended>> {
    let before = |(index, time_ns): &(u32, u64)| ended_by(steps, *time_ns).checked_sub(*index as usize + 1);
    let first = deliveries.iter().map(before).min()??;
    deliveries.iter().map(|(index, _)| steps.get(first + *index as usize).copied()).collect()
}

/// The latest step that had ended before each delivery.
fn latest(steps: &[Ended], deliveries: &Deliveries) -> BTreeMap<TokenKey, (Ended, Join)> {
    let tokens =
        deliveries.iter().flat_map(|(choice, tokens)| tokens.iter().map(move |token| (*choice, *token)));
    let step = |(choice, (index, time_ns))| {
        let step = ended_by(steps, time_ns).checked_sub(1).and_then(|at| steps.get(at))?;
        Some(((choice, index), (*step, Join::Inferred)))
    };
    tokens.filter_map(step).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP_NS: u64 = 1_000;
    const SERVER: ProcessId = ProcessId { tgid: 10, start_ticks: 1 };
    const ENGINE: ProcessId = ProcessId { tgid: 20, start_ticks: 1 };
    const OTHER: ProcessId = ProcessId { tgid: 30, start_ticks: 1 };

    /// A step of a thread and context, `number` steps after 10 000 ns.
    fn step(process: ProcessId, number: u64, tid: u32, object: u64) -> Ended {
        Ended {
            step: number,
            iteration: None,
            begin_ns: 10_000 + number * STEP_NS,
            ended_ns: 10_000 + (number + 1) * STEP_NS,
            tid,
            context: Context { process, object },
        }
    }

    /// Steps one after the other, the first beginning at 10 000 ns.
    fn steps(count: u64) -> Steps {
        of(SERVER, (0..count).map(|number| step(SERVER, number, 11, 1)))
    }

    fn of(process: ProcessId, steps: impl Iterator<Item = Ended>) -> Steps {
        Steps(BTreeMap::from([(process, steps.collect())]))
    }

    /// Number of the step, and how it was joined, of each token of choice 0.
    fn join(
        steps: &Steps,
        received_ns: u64,
        deliveries: &[(u32, u64)],
        votes: &Votes,
    ) -> Vec<Option<(u64, Join)>> {
        let all = Deliveries::from([(0, deliveries.to_vec())]);
        let joined = steps.join(SERVER, received_ns, &all, votes).tokens;
        let token = |(index, _): &(u32, u64)| joined.get(&(0, *index)).map(|(step, how)| (step.step, *how));
        deliveries.iter().map(token).collect()
    }

    fn joined(steps: &Steps, received_ns: u64, delays_ns: &[u64], first: u64) -> Vec<Option<(u64, Join)>> {
        let mut before = 0;
        let deliveries: Vec<(u32, u64)> = (0u32..)
            .zip(delays_ns)
            .map(|(index, delay)| {
                // A write cannot overtake the one before.
                before = before.max(10_000 + (first + u64::from(index) + 1) * STEP_NS + delay);
                (index, before)
            })
            .collect();
        join(steps, received_ns, &deliveries, &Votes::default())
    }

    proptest! {
        /// However late the others are, one prompt delivery makes all right.
        #[test]
        fn counting_finds_the_steps(
            first in 0u64..40,
            mut delays in prop::collection::vec(0u64..30_000, 1..50),
            prompt in any::<prop::sample::Index>(),
        ) {
            // Earlier delays must not push the prompt one back.
            let prompt = prompt.index(delays.len());
            for (index, delay) in delays.iter_mut().enumerate() {
                let until_prompt = (prompt.saturating_sub(index)) as u64 * STEP_NS;
                *delay = if index == prompt { 10 } else if index < prompt { (*delay).min(until_prompt) } else { *delay };
            }
            let steps = steps(200);
            let received_ns = 10_000 + first * STEP_NS;
            for (index, one) in (0u64..).zip(joined(&steps, received_ns, &delays, first)) {
                prop_assert_eq!(one, Some((first + index, Join::Count)));
            }
        }
    }

    #[test]
    fn several_tokens_a_step_are_not_counted_as_one_each() {
        let steps = steps(100);
        // Three tokens a step from step 10 on, delivered at once: counting would put token 0 far before the request.
        let received_ns = 10_000 + 10 * STEP_NS;
        let deliveries: Vec<(u32, u64)> =
            (0..30).map(|index| (index, 10_000 + (10 + u64::from(index) / 3 + 1) * STEP_NS + 5)).collect();
        let joined = join(&steps, received_ns, &deliveries, &Votes::default());
        for (index, one) in (0u64..).zip(joined) {
            assert_eq!(one, Some((10 + index / 3, Join::Inferred)));
        }
    }

    #[test]
    fn what_no_step_preceded_has_none() {
        assert_eq!(join(&steps(10), 0, &[(0, 5_000)], &Votes::default()), [None]);
        assert_eq!(join(&Steps::default(), 0, &[(0, 5_000)], &Votes::default()), [None]);
    }

    /// Every second step is of another thread and context; the request is served by the even ones.
    fn two_engines(threads: [u32; 2]) -> Steps {
        let step = |number: u64| {
            let which = (number % 2) as usize;
            step(SERVER, number, threads[which], which as u64)
        };
        of(SERVER, (0..100).map(step))
    }

    /// Tokens of the steps 20, 22, 24, …, the later ones ever later.
    fn of_even_steps() -> Vec<(u32, u64)> {
        let delivered =
            |index: u32| 10_000 + (20 + 2 * u64::from(index) + 1) * STEP_NS + 10 + u64::from(index) * 40;
        (0..30).map(|index| (index, delivered(index))).collect()
    }

    #[test]
    fn wake_ups_tell_two_engines_of_a_program_apart() {
        for threads in [[11, 12], [11, 11]] {
            let steps = two_engines(threads);
            let votes = Votes::of((0..30).map(|index| (0, index)), Context { process: SERVER, object: 0 });
            let joined = join(&steps, 10_000 + 20 * STEP_NS, &of_even_steps(), &votes);
            for (index, one) in (0..).zip(joined) {
                assert_eq!(one, Some((20 + 2 * index, Join::Count)), "{threads:?}");
            }
        }
    }

    #[test]
    fn without_wake_ups_two_engines_that_are_alike_are_not_told_apart() {
        // Both run at once, and end their steps together.
        let step = |number: u64| Ended {
            step: number,
            ..step(SERVER, number / 2, 11 + (number % 2) as u32, number % 2)
        };
        let steps = of(SERVER, (0..100).map(step));
        let deliveries: Vec<(u32, u64)> =
            (0..20).map(|index| (index, 10_000 + (20 + u64::from(index) + 1) * STEP_NS + 10)).collect();
        let joined = join(&steps, 10_000 + 20 * STEP_NS, &deliveries, &Votes::default());
        assert!(joined.iter().all(|one| matches!(one, Some((_, Join::Inferred)))), "{joined:?}");
    }

    /// An engine of 1 µs a step, and one of 1.7 µs, on a thread each.
    fn unlike_engines() -> Vec<Ended> {
        let slow = (0..60).map(|number| Ended {
            begin_ns: 10_000 + number * 1_700,
            ended_ns: 10_000 + (number + 1) * 1_700,
            ..step(SERVER, 1_000 + number, 12, 2)
        });
        let mut steps: Vec<Ended> = (0..100).map(|number| step(SERVER, number, 11, 1)).chain(slow).collect();
        steps.sort_by_key(|step| step.begin_ns);
        steps
    }

    proptest! {
        /// Whichever engine, however the loop between is woken by both: the rhythm tells.
        #[test]
        fn rhythm_tells_engines_apart(
            is_slow in any::<bool>(),
            first in 0u64..20,
            way_ns in 10u64..400,
            delays in prop::collection::vec(0u64..600, 12..30),
            heard in prop::collection::vec(any::<bool>(), 30),
        ) {
            let steps = of(SERVER, unlike_engines().into_iter());
            let (begin, period_ns) = if is_slow { (1_000, 1_700) } else { (0, STEP_NS) };
            let received_ns = 10_000 + first * period_ns;
            let deliveries: Vec<(u32, u64)> = (0u32..)
                .zip(&delays)
                .map(|(index, delay)| (index, received_ns + (u64::from(index) + 1) * period_ns + way_ns + delay))
                .collect();
            let mut votes = Votes::default();
            for (index, is_slow) in (0..).zip(heard.iter().take(delays.len())) {
                votes.add(Votes::of([(0, index)], Context { process: SERVER, object: 1 + u64::from(*is_slow) }));
            }
            let joined = join(&steps, received_ns, &deliveries, &votes);
            for (index, one) in (0..).zip(joined) {
                prop_assert_eq!(one, Some((begin + first + index, Join::Count)));
            }
        }
    }

    #[test]
    fn one_loop_that_alternates_contexts_is_counted_as_a_whole() {
        // A prompt by one context, then tokens by graphs of several batch sizes.
        let context = |number: u64| number / 7 % 3;
        let steps = of(SERVER, (0..100).map(|number| step(SERVER, number, 11, context(number))));
        let deliveries: Vec<(u32, u64)> =
            (0..40).map(|index| (index, 10_000 + (20 + u64::from(index) + 1) * STEP_NS + 10)).collect();
        let mut votes = Votes::default();
        for index in 0..40 {
            let object = context(20 + u64::from(index));
            votes.add(Votes::of([(0, index)], Context { process: SERVER, object }));
        }
        let joined = join(&steps, 10_000 + 20 * STEP_NS, &deliveries, &votes);
        for (index, one) in (0..).zip(joined) {
            assert_eq!(one, Some((20 + index, Join::Count)));
        }
    }

    #[test]
    fn an_engine_in_another_process_is_found_though_a_third_has_more_steps() {
        let engine = (0..50).map(|number| step(ENGINE, number, 21, 7));
        let other = (0..150).map(|number| step(OTHER, number, 31, 7));
        let steps = Steps(BTreeMap::from([(ENGINE, engine.collect()), (OTHER, other.collect())]));
        let deliveries = [(0, 10_000 + 5 * STEP_NS + 3), (1, 10_000 + 6 * STEP_NS + 3)];
        let all = Deliveries::from([(0, deliveries.to_vec())]);
        let join = |votes| steps.join(SERVER, 10_000 + 4 * STEP_NS, &all, &votes).tokens;
        let joined = join(Votes::of([(0, 0)], Context { process: ENGINE, object: 7 }));
        assert!(joined.values().all(|(step, how)| step.context.process == ENGINE && *how == Join::Count));
        assert_eq!(joined.len(), 2);
        // Nothing tells which.
        assert!(join(Votes::default()).is_empty());
    }
}

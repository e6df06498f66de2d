//! Whose time a step is: it is split over the requests of its batch, and the shares sum to it.
//!
//! The weight of a request in a step is the number of tokens that the step processes for it: 1 where it is decoded, the
//! tokens of its prompt where that is processed (each of those counts as many as [`Weights::prefill`] says). What integer
//! division leaves goes to the largest remainders, earlier slots first. Without batch marks, requests are those that got
//! a token of the step, each with the weight of its tokens.

use std::collections::{BTreeMap, HashMap};

use tracer_abi::mark::PREFILL;

use super::rows::{Request, Step, Token};
use crate::event::ProcessId;

/// How tokens weigh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of a token of a prompt, where one that is decoded weighs 1. Prompts are processed many tokens at a time, which
    /// costs less for each; how much less depends on the model and the GPU, so nothing is assumed: 1.
    pub prefill: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { prefill: 1.0 }
    }
}

/// What one request had of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub step: u64,
    /// `None`: a request whose begin was not seen.
    pub request: Option<u64>,
    pub prefill: bool,
    /// Tokens that the step processed for it.
    pub tokens: u32,
    /// Of the time from the begin of the enqueue to the completion, ns; 0 where that is not known.
    pub step_ns: u64,
    /// Of the GPU span, ns; `None` without GPU times.
    pub gpu_ns: Option<u64>,
}

/// Splits every step whose batch is known.
#[must_use]
pub fn shares(steps: &[Step], requests: &[Request], tokens: &[Token], weights: Weights) -> Vec<Share> {
    let names = Names::new(requests);
    let mut delivered: HashMap<u64, BTreeMap<(u64, bool), u32>> = HashMap::new();
    for token in tokens {
        if let Some(step) = token.step {
            *delivered.entry(step).or_default().entry((token.request, token.prefill)).or_default() += 1;
        }
    }
    let mut shares = Vec::new();
    for step in steps {
        let mut of_step: Vec<Share> = Vec::new();
        let mut add = |request, prefill, tokens| {
            of_step.push(Share { step: step.id, request, prefill, tokens, step_ns: 0, gpu_ns: None });
        };
        for slot in &step.slots {
            let request = names.at(step.process, slot.request, step.begin_ns);
            add(request.map(|request| request.id), slot.phase == PREFILL, slot.tokens);
        }
        if step.slots.is_empty() {
            let got = delivered.get(&step.id).into_iter().flatten();
            got.for_each(|(&(request, prefill), &tokens)| add(Some(request), prefill, tokens));
        }
        let weight = |share: &Share| {
            /// Parts of a token.
            const FINE: f64 = 1e3;
            let each = if share.prefill { weights.prefill } else { 1.0 };
            (f64::from(share.tokens) * each * FINE).round() as u64
        };
        let by_weight: Vec<u64> = of_step.iter().map(weight).collect();
        let of_time = split(step.duration_ns().unwrap_or(0), &by_weight);
        let of_gpu = step.gpu.map(|gpu| split(gpu.span_ns, &by_weight));
        for (i, (share, step_ns)) in of_step.iter_mut().zip(of_time).enumerate() {
            share.step_ns = step_ns;
            share.gpu_ns = of_gpu.as_ref().and_then(|parts| parts.get(i)).copied();
        }
        shares.append(&mut of_step);
    }
    shares
}

/// Which request a program meant by a number: numbers may be used again, and who had one is told by the time.
#[derive(Debug)]
pub(super) struct Names<'a>(HashMap<(ProcessId, u64), Vec<&'a Request>>);

impl<'a> Names<'a> {
    pub(super) fn new(requests: &'a [Request]) -> Self {
        let mut names: HashMap<(ProcessId, u64), Vec<&Request>> = HashMap::new();
        for request in requests {
            names.entry((request.process, request.program_request)).or_default().push(request);
        }
        names.values_mut().for_each(|requests| requests.sort_by_key(|request| request.received_ns));
        Self(names)
    }

    pub(super) fn at(&self, process: ProcessId, number: u64, time_ns: u64) -> Option<&'a Request> {
        let candidates = self.0.get(&(process, number))?;
        let after = candidates.partition_point(|request| request.received_ns <= time_ns);
        candidates.get(after.checked_sub(1)?).copied()
    }
}

/// Splits `whole` by `parts` so that the shares add up to it: each gets its share rounded down, and what is left goes to
/// the largest remainders, the earlier one first. Equal shares when all parts are zero.
pub(crate) fn split(whole: u64, parts: &[u64]) -> Vec<u64> {
    let ones = vec![1; parts.len()];
    let parts = if parts.iter().all(|&part| part == 0) { &ones } else { parts };
    let sum: u128 = parts.iter().map(|&part| u128::from(part)).sum();
    if sum == 0 {
        return Vec::new();
    }
    let exact = |part: u64| u128::from(whole) * u128::from(part);
    let mut shares: Vec<u64> =
        parts.iter().map(|&part| u64::try_from(exact(part) / sum).unwrap_or(whole)).collect();
    let left = whole.saturating_sub(shares.iter().sum());
    let mut by_remainder: Vec<(usize, u128)> =
        parts.iter().map(|&part| exact(part) % sum).enumerate().collect();
    by_remainder.sort_by_key(|(_, remainder)| std::cmp::Reverse(*remainder));
    for (i, _) in by_remainder.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
        if let Some(share) = shares.get_mut(i) {
            *share += 1;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cli::testing::tables;

    #[test]
    fn shares_of_a_step_sum_to_it() {
        let tables = tables();
        let shares = shares(&tables.steps, &tables.requests, &tables.tokens, Weights::default());
        for step in &tables.steps {
            let of_step: Vec<&Share> = shares.iter().filter(|share| share.step == step.id).collect();
            assert_eq!(of_step.len(), step.slots.len());
            let sum: u64 = of_step.iter().map(|share| share.step_ns).sum();
            assert_eq!(Some(sum), step.duration_ns().filter(|_| !of_step.is_empty()));
            let gpu: u64 = of_step.iter().filter_map(|share| share.gpu_ns).sum();
            assert_eq!(Some(gpu), step.gpu.map(|gpu| gpu.span_ns).filter(|_| !of_step.is_empty()));
            assert!(of_step.iter().all(|share| share.request.is_some()));
        }
    }

    #[test]
    fn prompts_weigh_by_their_tokens_and_by_what_is_asked_for() {
        let mut tables = tables();
        let step = tables.steps.iter_mut().find(|step| step.slots.len() > 1 && step.gpu.is_some()).unwrap();
        for (i, slot) in step.slots.iter_mut().enumerate() {
            (slot.phase, slot.tokens) = if i == 0 { (PREFILL, 300) } else { (tracer_abi::mark::DECODE, 1) };
        }
        step.slots.truncate(2);
        let (id, span_ns) = (step.id, step.gpu.unwrap().span_ns);
        let gpu = |prefill| -> Vec<u64> {
            let all = shares(&tables.steps, &tables.requests, &tables.tokens, Weights { prefill });
            all.iter().filter(|share| share.step == id).filter_map(|share| share.gpu_ns).collect()
        };
        assert_eq!(gpu(1.0)[1], (span_ns as f64 / 301.0).round() as u64);
        assert_eq!(gpu(0.01)[1], (span_ns as f64 / 4.0).round() as u64);
        assert_eq!(gpu(0.0), [0, span_ns]);
    }

    #[test]
    fn without_batches_those_that_got_a_token_share() {
        let mut tables = tables();
        tables.steps.iter_mut().for_each(|step| step.slots.clear());
        let shares = shares(&tables.steps, &tables.requests, &tables.tokens, Weights::default());
        assert_eq!(shares.iter().map(|share| u64::from(share.tokens)).sum::<u64>(), 1_000);
    }

    proptest! {
        #[test]
        fn shares_add_up_and_are_fair(whole: u64, parts in prop::collection::vec(any::<u64>(), 1..40)) {
            let shares = split(whole, &parts);
            prop_assert_eq!(shares.iter().map(|&s| u128::from(s)).sum::<u128>(), u128::from(whole));
            let sum: u128 = parts.iter().map(|&p| u128::from(p)).sum();
            for (&share, &part) in shares.iter().zip(&parts) {
                if let Some(floor) = (u128::from(whole) * u128::from(part)).checked_div(sum) {
                    prop_assert!(u128::from(share) == floor || u128::from(share) == floor + 1);
                }
            }
        }

    }
}

//! The latencies of tokens: request → phase → part → stack. GPU and queue stand beside the CPU, and all of it sums to
//! the latencies.

use super::attribution::root_names;
use super::path::Path;
use super::select::Phase;
use super::{Source, Weighted, WeightedStacks};
use crate::cli::picture::name;
use crate::event::StackId;
use crate::timeline::budget::{Budgets, Label, Place, Segment};
use crate::timeline::rows::Token;
use crate::timeline::shares::split;
use anyhow::Result;
use flamegraphs::Palette;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

pub(super) fn weigh(source: &Source) -> Result<Weighted> {
    let tokens = source.filters.tokens(source.tables)?;
    let numbers: HashMap<u64, usize> =
        source.tables.requests.iter().enumerate().map(|(i, request)| (request.id, i)).collect();
    let request = |token: &Token| numbers.get(&token.request).copied().unwrap_or(usize::MAX);
    let budgets = source.capture.budgets_of(source.tables)?;
    let (running, samples) = samples(source, &budgets, &tokens, |token| (request(token), Phase::of(token)))?;
    let mut sums: BTreeMap<((usize, Phase), Place), u64> = BTreeMap::new();
    for token in &tokens {
        let key = (request(token), Phase::of(token));
        for segment in segments(source, &budgets, token) {
            *sums.entry((key, Place::of(&segment))).or_default() += segment.length_ns();
        }
    }
    let (unsplit, whole): (Vec<_>, Vec<_>) =
        sums.into_iter().partition(|((_, place), _)| is_sampled(place.label));
    let mut weights: BTreeMap<((usize, Phase), Vec<String>), u64> = BTreeMap::new();
    for ((key, place), ns) in whole {
        *weights.entry((key, place.frames(|stack| source.stacks.off_cpu(Some(stack))))).or_default() += ns;
    }
    // What threads ran is split by the samples of them that are there.
    for ((key, place), ns) in unsplit {
        let root = place.frames(|stack| source.stacks.off_cpu(Some(stack)));
        let seen = running.get(&(key, place.label)).cloned().unwrap_or_default();
        if seen.is_empty() {
            *weights.entry((key, root)).or_default() += ns;
            continue;
        }
        let counts: Vec<u64> = seen.values().copied().collect();
        for (stack, share) in seen.into_keys().zip(split(ns, &counts)) {
            let frames =
                root.iter().cloned().chain(source.stacks.root_first(stack).map(Cow::into_owned)).collect();
            *weights.entry((key, frames)).or_default() += share;
        }
    }
    let mut totals: BTreeMap<usize, u64> = BTreeMap::new();
    weights.iter().for_each(|(((request, _), _), ns)| *totals.entry(*request).or_default() += ns);
    let names: Vec<String> = source.tables.requests.iter().map(name).collect();
    let names = root_names(&names, totals, source.named);
    let stacks = weights.into_iter().map(|(((request, phase), frames), ns)| {
        let root = [names.get(&request).cloned().unwrap_or_default(), phase.name().to_owned()];
        (root.into_iter().chain(frames).collect::<Vec<_>>(), [ns])
    });
    Ok(Weighted {
        title: "Time of tokens by request, phase, part and stack".to_owned(),
        facts: vec![format!("n={} tokens", tokens.len()), format!("running split by {samples} samples")],
        count_name: "µs of latency",
        groups: 3,
        palette: Palette::Wait,
        stacks: WeightedStacks::Sums(stacks.collect()),
    })
}

/// The parts of a token's latency, of the selected threads.
pub(super) fn segments(source: &Source, budgets: &Budgets, token: &Token) -> Vec<Segment> {
    let mut segments = budgets.segments(token);
    segments.retain(|segment| source.filters.has_thread(&source.threads, segment.thread));
    segments
}

/// Its thread runs the program's own code.
const fn is_sampled(label: Label) -> bool {
    matches!(label, Label::HostRunning | Label::Enqueue | Label::Deliver)
}

/// How often each stack was seen while tokens waited for its thread to run, by token's key and part.
type Running<K> = BTreeMap<(K, Label), BTreeMap<Option<StackId>, u64>>;

fn samples<K: Ord>(
    source: &Source,
    budgets: &Budgets,
    tokens: &[&Token],
    key: impl Fn(&Token) -> K,
) -> Result<(Running<K>, u64)> {
    let path = Path::new(tokens, budgets);
    let mut running: Running<K> = BTreeMap::new();
    let mut samples = 0;
    for sample in source.capture.samples()? {
        let sample = sample?;
        let thread = (sample.origin.process.tgid, sample.origin.tid);
        if !source.filters.has_thread(&source.threads, thread) {
            continue;
        }
        let waiting = path.at(thread, sample.origin.time_ns).filter(|(_, label)| is_sampled(*label));
        let mut is_counted = false;
        for (i, label) in waiting {
            if let Some(token) = tokens.get(i) {
                is_counted = true;
                *running.entry((key(token), label)).or_default().entry(sample.stack).or_default() += 1;
            }
        }
        samples += u64::from(is_counted);
    }
    Ok((running, samples))
}

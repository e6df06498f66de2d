//! CPU time by request, phase and function.
//!
//! Of everything: by what the threads' batches were for ([`attribution`](super::attribution)). Of selected tokens: what of
//! it they waited for, a sample being split over those that waited at its instant.

use super::attribution::{Attribution, TABLES, root_names};
use super::path::{Path, is_running};
use super::select::Phase;
use super::{Source, Weighted, WeightedStacks};
use crate::cli::picture::name;
use crate::event::{Event, StackId};
use crate::timeline::shares::split;
use anyhow::Result;
use flamegraphs::{Folded, Name, Palette};
use std::collections::{BTreeMap, HashMap};

pub(super) fn weigh(source: &Source) -> Result<Weighted> {
    let (weights, samples) = if source.filters.is_by_token() { waited_for(source)? } else { all(source)? };
    let count = |such: &dyn Fn(Option<StackId>) -> bool| -> u64 {
        samples.iter().filter(|(stack, _)| such(**stack)).map(|(_, n)| n).sum()
    };
    let cut = count(&|stack| stack.is_some_and(|stack| source.stacks.is_cut(stack)));
    let mut folded = Folded::default();
    let mut known: HashMap<Option<StackId>, Vec<Name>> = HashMap::new();
    for (root, stack, ns) in weights {
        let frames = known
            .entry(stack)
            .or_insert_with(|| source.stacks.root_first(stack).map(|name| folded.name(&name)).collect());
        let root = root.map(|name| folded.name(&name));
        folded.add(root.into_iter().chain(frames.iter().copied()), [ns]);
    }
    let title = if source.filters.is_by_token() { "CPU time that tokens waited for" } else { "CPU time" };
    Ok(Weighted {
        title: format!("{title} by request, phase and function"),
        facts: vec![format!("{} samples", count(&|_| true)), format!("{cut} truncated")],
        count_name: "µs on CPU",
        groups: 2,
        palette: Palette::Hot,
        stacks: WeightedStacks::Sums(folded),
    })
}

/// The two frames at the root, the stack, ns of CPU time; and the samples of each stack.
type Weights = (Vec<([String; 2], Option<StackId>, u64)>, BTreeMap<Option<StackId>, u64>);

fn all(source: &Source) -> Result<Weights> {
    let window = source.filters.window(source.tables);
    let mut attribution = Attribution::default();
    for event in source.capture.events_of(&TABLES)? {
        let event = event?;
        let is_wanted = match &event {
            Event::Sample(sample) => {
                let thread = (sample.origin.process.tgid, sample.origin.tid);
                window.contains(&sample.origin.time_ns) && source.filters.has_thread(&source.threads, thread)
            }
            _ => true,
        };
        if is_wanted {
            attribution.feed(&event);
        }
    }
    let rooted = attribution.finish(source.named);
    Ok((rooted.weights, rooted.samples))
}

fn waited_for(source: &Source) -> Result<Weights> {
    let tokens = source.filters.tokens(source.tables)?;
    let path = Path::new(&tokens, &source.capture.budgets_of(source.tables)?);
    let window = source.filters.window(source.tables);
    let mut sums: BTreeMap<(usize, Phase, Option<StackId>), u64> = BTreeMap::new();
    let mut samples = BTreeMap::new();
    let numbers: HashMap<u64, usize> =
        source.tables.requests.iter().enumerate().map(|(i, request)| (request.id, i)).collect();
    for sample in source.capture.samples()? {
        let sample = sample?;
        let thread = (sample.origin.process.tgid, sample.origin.tid);
        if !window.contains(&sample.origin.time_ns) || !source.filters.has_thread(&source.threads, thread) {
            continue;
        }
        let waiting = path.at(thread, sample.origin.time_ns).filter(|(_, label)| is_running(*label));
        let mut waiting: Vec<usize> = waiting.map(|(token, _)| token).collect();
        waiting.sort_unstable();
        if waiting.is_empty() {
            continue;
        }
        *samples.entry(sample.stack).or_default() += 1;
        for (i, share) in waiting.iter().zip(split(sample.period_ns, &vec![1; waiting.len()])) {
            let Some(token) = tokens.get(*i) else { continue };
            let request = numbers.get(&token.request).copied().unwrap_or(usize::MAX);
            *sums.entry((request, Phase::of(token), sample.stack)).or_default() += share;
        }
    }
    let mut totals: BTreeMap<usize, u64> = BTreeMap::new();
    sums.iter().for_each(|((request, ..), ns)| *totals.entry(*request).or_default() += ns);
    let names: Vec<String> = source.tables.requests.iter().map(name).collect();
    let names = root_names(&names, totals, source.named);
    let root = |request: usize, phase: Phase| {
        [names.get(&request).cloned().unwrap_or_default(), phase.name().to_owned()]
    };
    let weights = sums.into_iter().map(|((request, phase, stack), ns)| (root(request, phase), stack, ns));
    Ok((weights.collect(), samples))
}

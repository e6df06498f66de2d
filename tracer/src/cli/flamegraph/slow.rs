//! Slow tokens against usual ones: part → stack, ns of a token.

use super::select::Phase;
use super::token_time::segments;
use super::{Source, Weighted, WeightedStacks};
use crate::cli::duration::ns;
use crate::latency::{Contrasts, Latency, TooFew};
use crate::timeline::budget::Place;
use crate::timeline::rows::Token;
use crate::timeline::tables::Tables;
use anyhow::{Result, bail};
use flamegraphs::{Palette, duration};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

/// With first tokens where those are selected, else with gaps between tokens.
pub(super) fn weigh(source: &Source, slow_from: Option<Duration>) -> Result<Weighted> {
    let latency = match source.filters.phase {
        Some(Phase::Prefill) => Latency::Ttft,
        _ => Latency::Itl,
    };
    let selected = Tables {
        tokens: source.filters.tokens(source.tables)?.into_iter().cloned().collect(),
        budgets: source.tables.budgets.clone(),
        steps: source.tables.steps.iter().filter(|step| step.sampled).cloned().collect(),
        ..Tables::default()
    };
    let slow_ns = slow_from.map(ns);
    let contrast = match Contrasts::new(&selected).by(latency, slow_ns) {
        Ok(contrast) => contrast,
        Err(TooFew(n)) => bail!(
            "{n} tokens with a known {} are too few to compare slow ones with usual ones; \
             select more, or give --slow=DURATION",
            latency.name()
        ),
    };
    let group = |band: RangeInclusive<u64>| -> Vec<&Token> {
        let is_in =
            |token: &&Token| latency.is_of(token) && token.latency_ns.is_some_and(|ns| band.contains(&ns));
        selected.plain_tokens().filter(is_in).collect()
    };
    let slow = group(contrast.slow.least_ns..=u64::MAX);
    let usual = group(contrast.usual.least_ns..=contrast.usual.most_ns);
    let budgets = source.capture.budgets_of(source.tables)?;
    let mut weights: BTreeMap<Place, [u128; 2]> = BTreeMap::new();
    for (i, tokens) in [&usual, &slow].into_iter().enumerate() {
        for segment in tokens.iter().flat_map(|token| segments(source, &budgets, token)) {
            weights.entry(Place::of(&segment)).or_default()[i] += u128::from(segment.length_ns());
        }
    }
    let counts = [usual.len().max(1), slow.len().max(1)].map(|n| n as u128);
    let mean = |sums: [u128; 2]| [0, 1].map(|i| u64::try_from(sums[i] / counts[i]).unwrap_or(u64::MAX));
    let quantile = contrast.quantile.map_or(String::new(), |q| format!(", p{}", q * 100.0));
    Ok(Weighted {
        title: format!(
            "What slow tokens ({} ≥ {}{quantile}) wait for, red where longer than usual ones",
            latency.name(),
            duration(contrast.slow.least_ns)
        ),
        facts: vec![
            format!("slow n={}, mean {}", slow.len(), duration(contrast.slow.mean_ns.round() as u64)),
            format!(
                "usual (p25–p75) n={}, mean {}",
                usual.len(),
                duration(contrast.usual.mean_ns.round() as u64)
            ),
        ],
        count_name: "µs of a slow token",
        groups: 1,
        palette: Palette::Hot,
        stacks: WeightedStacks::Grown(
            weights
                .into_iter()
                .map(|(place, sums)| (place.frames(|stack| source.stacks.off_cpu(Some(stack))), mean(sums)))
                .collect(),
        ),
    })
}

//! Time on the GPU of sampled steps: engine → layers.

use std::collections::{BTreeMap, HashMap};

use super::{Source, Weighted, WeightedStacks};
use crate::timeline::rows::{Layer, Step};
use crate::timeline::tables::Tables;
use flamegraphs::{Folded, Palette};

/// What of a step is in no layer.
const UNSPLIT: &str = "[unsplit]";

/// The layers of the sampled steps in the window.
pub(super) fn weigh(source: &Source) -> Weighted {
    let tables = source.tables;
    let window = source.filters.window(tables);
    let steps: Vec<&Step> =
        tables.steps.iter().filter(|step| step.sampled && window.contains(&step.begin_ns)).collect();
    Weighted {
        title: "GPU time by engine and layer".to_owned(),
        facts: vec![format!("{} sampled steps of {}", steps.len(), tables.steps.len())],
        count_name: "µs on the step's stream",
        groups: 1,
        palette: Palette::default(),
        stacks: WeightedStacks::Sums(stacks(tables, &steps)),
    }
}

/// The layers of steps, in ns of GPU time.
fn stacks(tables: &Tables, steps: &[&Step]) -> Folded<1> {
    let mut layers: HashMap<u64, Vec<&Layer>> = HashMap::new();
    tables.layers.iter().for_each(|layer| layers.entry(layer.step).or_default().push(layer));
    let mut weights: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for step in steps {
        let of_step = layers.get(&step.id).map(Vec::as_slice).unwrap_or_default();
        let root = engine_name(tables, step);
        let mut paths: HashMap<u32, Vec<String>> = HashMap::new();
        for layer in of_step {
            let mut path = layer
                .parent
                .and_then(|parent| paths.get(&parent))
                .cloned()
                .unwrap_or_else(|| vec![root.clone()]);
            path.push(if layer.name.is_empty() { "(no name)".to_owned() } else { layer.name.clone() });
            paths.insert(layer.number, path.clone());
            *weights.entry(path).or_default() += layer.gpu_self_ns;
        }
        let covered: u64 =
            of_step.iter().filter(|layer| layer.parent.is_none()).map(|layer| layer.gpu_span_ns).sum();
        if let Some(gpu) = step.gpu {
            *weights.entry(vec![root, UNSPLIT.to_owned()]).or_default() +=
                gpu.span_ns.saturating_sub(covered);
        }
    }
    weights.into_iter().map(|(stack, ns)| (stack, [ns])).collect()
}

/// The name of the engine's file, else that of the library that executed it.
fn engine_name(tables: &Tables, step: &Step) -> String {
    if let Some(engine) = &step.engine {
        return engine.path.rsplit('/').next().unwrap_or_default().to_owned();
    }
    let point = tables.points.iter().find(|point| point.id == step.point);
    let engine = point.map_or("engine", |point| point.engine.as_str());
    format!("{engine} {}", step.engine_version).trim_end().to_owned()
}

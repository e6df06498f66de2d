//! Where sampled steps spent their time on the GPU, and what programs called the parts of their work.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use serde::Serialize;

use crate::cli::table::{Side, Style, Table, WIDTH, cut};
use crate::cli::units::{clean, count, duration};
use crate::timeline::rows::Step;
use crate::timeline::tables::Tables;

/// Lines that are printed; JSON has all.
const SHOWN: usize = 12;

/// One layer over all sampled steps. GPU times are of the layer without the layers inside it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LayerLine {
    pub(crate) name: String,
    /// Steps that it was seen in.
    pub(crate) steps: u64,
    pub(crate) gpu_ns: u64,
    /// Its part of the GPU spans of the sampled steps.
    pub(crate) share: Option<f64>,
}

/// Layers of sampled steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Layers {
    /// One step in so many was to be sampled.
    pub(crate) steps_sampled: u64,
    /// Tokens that sampled steps generated: in no distribution of TTFT and ITL.
    pub(crate) tokens_of_sampled_steps: u64,
    /// Of the sampled steps whose span is known.
    pub(crate) gpu_span_ns: u64,
    /// In no layer: work on other streams, gaps, and what the engine did outside of layers.
    pub(crate) unsplit_ns: u64,
    /// Longest first.
    pub(crate) layers: Vec<LayerLine>,
}

impl Layers {
    pub(crate) fn new(tables: &Tables) -> Self {
        let sampled: HashMap<u64, &Step> =
            tables.steps.iter().filter(|step| step.sampled).map(|step| (step.id, step)).collect();
        let gpu_span_ns: u64 = sampled.values().filter_map(|step| Some(step.gpu?.span_ns)).sum();
        let of_known =
            tables.layers.iter().filter(|layer| sampled.get(&layer.step).is_some_and(|s| s.gpu.is_some()));
        let covered: u64 =
            of_known.filter(|layer| layer.parent.is_none()).map(|layer| layer.gpu_span_ns).sum();
        let mut by_name: BTreeMap<&str, (u64, u64, Option<u64>)> = BTreeMap::new();
        for layer in &tables.layers {
            let (steps, gpu_ns, last) = by_name.entry(&layer.name).or_default();
            *steps += u64::from(*last != Some(layer.step));
            *gpu_ns += layer.gpu_self_ns;
            *last = Some(layer.step);
        }
        let share = |ns: u64| (gpu_span_ns > 0).then(|| ns as f64 / gpu_span_ns as f64);
        let mut layers: Vec<LayerLine> = by_name
            .into_iter()
            .map(|(name, (steps, gpu_ns, _))| LayerLine {
                name: name.into(),
                steps,
                gpu_ns,
                share: share(gpu_ns),
            })
            .collect();
        layers.sort_by_key(|layer| std::cmp::Reverse(layer.gpu_ns));
        let of_sampled = |id: &u64| sampled.contains_key(id);
        Self {
            steps_sampled: sampled.len() as u64,
            tokens_of_sampled_steps: tables
                .tokens
                .iter()
                .filter(|t| t.step.as_ref().is_some_and(of_sampled))
                .count() as u64,
            gpu_span_ns,
            unsplit_ns: gpu_span_ns.saturating_sub(covered),
            layers,
        }
    }

    pub(crate) fn text(&self, style: Style, out: &mut String) {
        let line = format!(
            "  {} sampled steps, whose layers were timed; they and their {} tokens are in no latency above",
            count(self.steps_sampled),
            count(self.tokens_of_sampled_steps)
        );
        let _ = writeln!(out, "{}", cut(&line, WIDTH));
        use Side::{Left, Right};
        let mut table =
            Table::new([("GPU time", Right), ("share", Right), ("in steps", Right), ("layer", Left)]);
        let percent =
            |share: Option<f64>| share.map_or("–".into(), |share| format!("{:.1} %", share * 100.0));
        for layer in self.layers.iter().take(SHOWN) {
            table.push([
                duration(layer.gpu_ns),
                percent(layer.share),
                count(layer.steps),
                if layer.name.is_empty() { "(no name)".into() } else { clean(&layer.name, 80) },
            ]);
        }
        let rest = self.layers.get(SHOWN..).unwrap_or_default();
        if !rest.is_empty() {
            let gpu_ns = rest.iter().map(|layer| layer.gpu_ns).sum();
            let share = (self.gpu_span_ns > 0).then(|| gpu_ns as f64 / self.gpu_span_ns as f64);
            table.push([duration(gpu_ns), percent(share), String::new(), format!("({} more)", rest.len())]);
        }
        let share = (self.gpu_span_ns > 0).then(|| self.unsplit_ns as f64 / self.gpu_span_ns as f64);
        table.push([
            duration(self.unsplit_ns),
            percent(share),
            String::new(),
            "(unsplit: in no layer)".into(),
        ]);
        out.push_str(&table.render(style));
    }
}

/// The phases of one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PhaseLine {
    pub(crate) name: String,
    pub(crate) domain: String,
    /// `mark` or `nvtx`.
    pub(crate) source: &'static str,
    /// Those that ended, and the host's time in them.
    pub(crate) n: u64,
    pub(crate) total_ns: u64,
    pub(crate) max_ns: u64,
}

/// Phases by name, longest in total first; marks of NVTX are none.
pub(crate) fn phases(tables: &Tables) -> Vec<PhaseLine> {
    let mut by_name: BTreeMap<(&str, &str, &'static str), (u64, u64, u64)> = BTreeMap::new();
    for phase in tables.phases.iter().filter(|phase| !phase.is_mark) {
        let Some(ns) = phase.end_ns.and_then(|end| end.checked_sub(phase.begin_ns)) else { continue };
        let (n, total_ns, max_ns) =
            by_name.entry((&phase.name, &phase.domain, phase.source.name())).or_default();
        (*n, *total_ns, *max_ns) = (*n + 1, *total_ns + ns, ns.max(*max_ns));
    }
    let mut lines: Vec<PhaseLine> = by_name
        .into_iter()
        .map(|((name, domain, source), (n, total_ns, max_ns))| PhaseLine {
            name: name.into(),
            domain: domain.into(),
            source,
            n,
            total_ns,
            max_ns,
        })
        .collect();
    lines.sort_by_key(|line| std::cmp::Reverse(line.total_ns));
    lines
}

pub(crate) fn phases_text(lines: &[PhaseLine], style: Style, out: &mut String) {
    use Side::{Left, Right};
    let mut table = Table::new([
        ("n", Right),
        ("total", Right),
        ("mean", Right),
        ("max", Right),
        ("from", Left),
        ("phase", Left),
    ]);
    for line in lines.iter().take(SHOWN) {
        let domain =
            if line.domain.is_empty() { String::new() } else { format!("{}: ", clean(&line.domain, 30)) };
        table.push([
            count(line.n),
            duration(line.total_ns),
            duration(line.total_ns / line.n.max(1)),
            duration(line.max_ns),
            line.source.into(),
            format!("{domain}{}", clean(&line.name, 60)),
        ]);
    }
    out.push_str(&table.render(style));
    if lines.len() > SHOWN {
        let _ = writeln!(out, "{}", style.faint(&format!("  {} more: --json has all", lines.len() - SHOWN)));
    }
}

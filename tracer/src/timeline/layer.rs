//! Layers: the ranges inside a sampled step, once its GPU span is known.

use std::collections::BTreeMap;

use super::rows::{GpuTime, Layer, Unmatched};
use super::{Clock, Timeline};
use crate::event::Origin;
use crate::event::mark::{GpuLayer, GpuLayers, GpuSpan};

/// Most sampled steps of a process whose span is still to come.
const MAX_PENDING: usize = 64;

/// Layers of sampled steps whose span is still to come, by the span's number.
pub(super) type PendingLayers = BTreeMap<u64, Vec<GpuLayer>>;

impl<C: Clock> Timeline<C> {
    pub(super) fn gpu_layers(&mut self, origin: Origin, mark: GpuLayers) {
        let GpuLayers { sequence, first, cut, layers, .. } = mark;
        if cut && first == 0 {
            self.counts.add(Unmatched::LayersCut, origin, 1, || format!("layers of gpu span {sequence}"));
        }
        let pending = &mut self.programs.entry(origin.process).or_default().layers;
        let known = pending.entry(sequence).or_default();
        // Parts come in order; after a lost one, numbers would be those of other layers.
        if known.len() == first as usize {
            known.extend(layers);
        }
        if pending.len() > MAX_PENDING {
            pending.pop_first();
            self.counts.add(Unmatched::Evicted, origin, 1, || "layers of a step".to_owned());
        }
    }
}

/// The layers of a step on CLOCK_MONOTONIC, where its own time on the GPU is known there.
///
/// What the driver measured between two events of the step is right within the steps of the device's clock; so that
/// they lie in the step's span, they are stretched as the clock stretched the span (by some ppm).
pub(super) fn rows(step: u64, span: &GpuSpan, gpu: Option<GpuTime>, layers: &[GpuLayer]) -> Vec<Layer> {
    let rate = match gpu {
        Some(gpu) if span.span_ms > 0.0 => gpu.span_ns as f64 / (f64::from(span.span_ms) * 1e6),
        _ => 1.0,
    };
    // A float to integer cast saturates, and NaN is 0: bad readings stay within the span.
    let whole_ns = gpu.map_or((f64::from(span.span_ms) * 1e6) as u64, |gpu| gpu.span_ns);
    let ns = |ms: f32| ((f64::from(ms) * 1e6 * rate).round() as u64).min(whole_ns);
    let mut rows: Vec<Layer> = (0u32..)
        .zip(layers)
        .map(|(number, layer)| {
            let (begin, end) = (ns(layer.begin_ms), ns(layer.end_ms));
            let span_ns = end.saturating_sub(begin);
            Layer {
                step,
                number,
                parent: layer.parent,
                depth: layer.depth,
                name: layer.name.clone(),
                gpu_begin_ns: gpu.map(|gpu| gpu.begin_ns + begin),
                gpu_end_ns: gpu.map(|gpu| gpu.begin_ns + begin + span_ns),
                gpu_span_ns: span_ns,
                gpu_self_ns: span_ns,
                gpu_bound_ns: gpu.map(|gpu| gpu.bound_ns),
            }
        })
        .collect();
    for index in 0..rows.len() {
        let (parent, span_ns) = (rows[index].parent, rows[index].gpu_span_ns);
        if let Some(parent) = parent.and_then(|parent| rows.get_mut(parent as usize)) {
            parent.gpu_self_ns = parent.gpu_self_ns.saturating_sub(span_ns);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layer(begin_ms: f32, end_ms: f32, parent: Option<u32>) -> GpuLayer {
        GpuLayer { begin_ms, end_ms, parent, depth: u16::from(parent.is_some()), name: String::new() }
    }

    #[test]
    fn a_layer_has_its_place_in_the_step_and_its_children_are_not_its_own_time() {
        let span = GpuSpan { span_ms: 1.0, ..GpuSpan::default() };
        let gpu = GpuTime { begin_ns: 5_000_000, end_ns: 6_000_100, span_ns: 1_000_100, bound_ns: 900 };
        let layers = [
            layer(0.0, 1.0, None),
            layer(0.1, 0.4, Some(0)),
            layer(0.4, 0.9, Some(0)),
            layer(0.5, 0.6, Some(2)),
        ];
        let rows = rows(7, &span, Some(gpu), &layers);
        let own: Vec<u64> = rows.iter().map(|row| row.gpu_self_ns).collect();
        assert_eq!(own.iter().sum::<u64>(), gpu.span_ns);
        assert_eq!((rows[0].gpu_begin_ns, rows[0].gpu_end_ns), (Some(5_000_000), Some(6_000_100)));
        assert!(rows[1].gpu_span_ns.abs_diff(300_030) <= 1 && own[2].abs_diff(400_040) <= 1, "{rows:?}");
        assert_eq!((rows[3].step, rows[3].number, rows[3].gpu_bound_ns), (7, 3, Some(900)));
        assert_eq!(super::rows(7, &span, None, &layers)[3].gpu_begin_ns, None);
    }

    #[test]
    fn layers_come_with_the_span_of_their_step_in_parts() {
        use super::super::testing::{EnqueueClock, HTTP_TID, RANK_TID, STEP, call, mark, points, span};
        use super::super::{Config, Timeline};
        use crate::event::{Event, Mark};

        let part = |time_ns, first, cut, layers: Vec<GpuLayer>| {
            let layers = GpuLayers { sequence: 0, total: 3, first, cut, layers };
            mark(HTTP_TID, time_ns, Mark::GpuLayers(layers))
        };
        let mut sampled = span(RANK_TID, 900, (90, 210), 400);
        if let Event::Mark(event) = &mut sampled
            && let Mark::GpuSpan(span) = &mut event.mark
        {
            span.sampled = true;
        }
        let first = vec![layer(0.0, 300e-6, None), layer(0.0, 100e-6, Some(0))];
        let feed = |events: &[Event]| {
            let mut timeline = Timeline::new(Config::default(), EnqueueClock);
            points().iter().chain(events).for_each(|event| timeline.feed(event));
            timeline.finish();
            let cut = timeline.unmatched(Unmatched::LayersCut);
            (timeline.drain(), cut)
        };
        let step = call(STEP, RANK_TID, 100, 200, [0, 7]);
        let rest = vec![layer(100e-6, 250e-6, Some(0))];
        let (out, cut) = feed(&[
            step.clone(),
            part(800, 0, true, first),
            part(801, 2, false, rest.clone()),
            sampled.clone(),
        ]);
        assert!(out.steps[0].sampled && cut == 1);
        let numbers: Vec<_> =
            out.layers.iter().map(|layer| (layer.step, layer.number, layer.parent)).collect();
        assert_eq!(numbers, [(0, 0, None), (0, 1, Some(0)), (0, 2, Some(0))]);
        // Without its first part the numbers of the second would be those of others.
        let (out, _) = feed(&[step, part(801, 2, false, rest), sampled]);
        assert!(out.steps[0].sampled && out.layers.is_empty());
    }

    proptest! {
        /// Whatever the device says: layers stay within the step, and no time is its own and a child's.
        #[test]
        fn layers_stay_in_their_step(
            times in prop::collection::vec((any::<f32>(), any::<f32>(), any::<Option<u8>>()), 0..20),
            span_ms in prop_oneof![any::<f32>(), 0f32..100.0],
            span_ns in 0u64..1 << 40,
        ) {
            let layers: Vec<GpuLayer> = times
                .iter()
                .enumerate()
                .map(|(i, (begin, end, parent))| {
                    let parent = parent.map(u32::from).filter(|&parent| (parent as usize) < i);
                    layer(*begin, *end, parent)
                })
                .collect();
            let gpu = GpuTime { begin_ns: 1 << 50, end_ns: (1 << 50) + span_ns, span_ns, bound_ns: 1 };
            let span = GpuSpan { span_ms, ..GpuSpan::default() };
            for row in rows(0, &span, Some(gpu), &layers) {
                prop_assert!(row.gpu_begin_ns >= Some(gpu.begin_ns) && row.gpu_end_ns <= Some(gpu.end_ns));
                prop_assert!(row.gpu_self_ns <= row.gpu_span_ns);
            }
        }
    }
}

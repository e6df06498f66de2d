//! What the host saw of a GPU's work bounds the clocks' offset too, from one side each.
//!
//! Work cannot begin before the call that launched it, so θ ≥ h_launch − d_begin − q − ε; and it is over when a wait
//! for it has returned, so θ ≤ h_return − d_end + ε. Such samples cost the traced program nothing, and in number they
//! narrow the corridor where bursts queue behind work. But they are only as good as the join that made them. So they
//! never move the curve, one that contradicts the bursts is counted and not used, and with the first such sample all
//! of its kind lose their say in this series.

use super::burst::Origin;
use super::curve::{Corridor, Segment};
use super::host::HostMap;
use crate::timeline::Witness;

/// A [`Witness`] and the device's time that it is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) witness: Witness,
    pub(super) chain: u32,
    pub(super) base_ns: i64,
    pub(super) elapsed_ns: f64,
    /// What f32 may have rounded off, and what it may have added up to in `base_ns`.
    pub(super) rounding_ns: f64,
    pub(super) chain_rounding_ns: f64,
}

/// How many samples there were, and how many of them contradict the bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) samples: u64,
    pub(super) violations: u64,
}

impl Count {
    pub(super) fn add(&mut self, violated: bool) {
        self.samples += 1;
        self.violations += u64::from(violated);
    }
}

/// One side of θ at one x, and the corridor there.
struct Bound {
    x: f64,
    is_low: bool,
    theta: f64,
    at: Corridor,
}

impl Bound {
    fn is_violated(&self) -> bool {
        if self.is_low { self.theta > self.at.high } else { self.theta < self.at.low }
    }
}

impl Sample {
    fn bound(&self, segment: &Segment, host: &HostMap) -> Option<Bound> {
        let x = segment.x(self.base_ns, self.elapsed_ns);
        let at = segment.corridor(x, self.chain_rounding_ns)?;
        let (is_low, host_ns) = match self.witness {
            Witness::LaunchBegan(ns) => (true, ns),
            Witness::WaitReturned(ns) => (false, ns),
        };
        let raw = host.raw(host_ns)?;
        let theta = Origin::theta(&segment.origin, raw.ns, self.base_ns) - self.elapsed_ns;
        let slack = raw.bound_ns + self.rounding_ns;
        Some(Bound { x, is_low, theta: if is_low { theta - slack - at.quantum } else { theta + slack }, at })
    }

    fn near_ns(&self) -> i64 {
        self.base_ns.saturating_add(self.elapsed_ns as i64)
    }

    /// Whether the sample contradicts what the segments say; `None` where they say nothing.
    pub(super) fn is_violated(&self, segments: &[Segment], host: &HostMap) -> Option<bool> {
        let segment = Segment::holding(segments, self.chain, self.near_ns())?;
        Some(self.bound(segment, host)?.is_violated())
    }
}

/// Narrows the segments' walls by what agrees with them; counts what does not.
pub(super) fn apply(samples: &[Sample], segments: &mut [Segment], host: &HostMap) -> Count {
    let mut count = Count::default();
    let is_launch = |sample: &Sample| matches!(sample.witness, Witness::LaunchBegan(_));
    let mut violated = [false; 2];
    for sample in samples {
        if let Some(is_violated) = sample.is_violated(segments, host) {
            count.add(is_violated);
            violated[usize::from(is_launch(sample))] |= is_violated;
        }
    }
    let trusted = samples.iter().filter(|sample| !violated[usize::from(is_launch(sample))]);
    let mut narrowed = segments.to_vec();
    for sample in trusted {
        let segment = Segment::holding(segments, sample.chain, sample.near_ns());
        let number =
            segments.iter().position(|other| segment.is_some_and(|segment| std::ptr::eq(segment, other)));
        if let (Some(segment), Some(target)) = (segment, number.and_then(|number| narrowed.get_mut(number)))
            && let Some(bound) = sample.bound(segment, host)
        {
            target.narrow_at(bound.x, sample.chain_rounding_ns, bound.is_low, bound.theta);
        }
    }
    for (segment, mut narrowed) in segments.iter_mut().zip(narrowed) {
        narrowed.propagate();
        // Samples that agree with the bursts and not with each other say nothing.
        let is_crossed = |segment: &Segment| segment.nodes.iter().any(|node| node.low > node.high);
        if is_crossed(segment) || !is_crossed(&narrowed) {
            *segment = narrowed;
        } else {
            count.violations += 1;
        }
    }
    count
}

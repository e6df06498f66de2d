//! θ between the bursts of one uninterrupted stretch, and what it must lie within.
//!
//! The curve is straight between bursts. Every burst is a pair of walls about it, and a wall loosens with the
//! distance from its burst by ρ, what the curve's rate may be wrong by. Together they are a corridor:
//! `high(x) = min_i (u_i + ∫ρ)`, `low(x) = max_i (l_i − ∫ρ)`, both followed along the curve and found by one pass
//! forth and one back. A device reading d is then at d + θ, which is at least low − ε and at most high + q + ε: q,
//! since the reading was rounded down; ε for what f32 rounded off. So it is given as d + θ + q/2, where q is a usual
//! one.

use super::RawTime;
use super::burst::{Bounds, Burst, Origin};
use super::filter::PPM;
use super::quantum::{COARSEST_NS, UNLIMITED_NS};

const NS: f64 = 1e9;
/// Beyond this distance from a burst, ρ grows by [`GAP_RHO`]: nothing shows there what a crystal does.
const GAP_NS: f64 = 2e9;
const GAP_RHO: f64 = 3.0 * PPM;
/// How far beyond the first and last burst a curve may be used, in ns.
const REACH_NS: i64 = 10_000_000_000;

/// The curve at one burst, for the `clock` table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knot {
    /// Number of the uninterrupted stretch within the series.
    pub segment: u32,
    /// Bases whose device times count from the same zero.
    pub chain: u32,
    /// Device ns in the chain, and the CLOCK_MONOTONIC_RAW ns that they map to.
    pub device_ns: i64,
    pub host_raw_ns: i64,
    /// The host time is right within this.
    pub bound_ns: f64,
    /// Standard deviation of the host time that the filter claims: precision, no error. Two ways that differ in delay
    /// look like an offset.
    pub precision_ns: f64,
    /// Width of the burst's bounds: its effective round trip.
    pub width_ns: f64,
    /// Step of the device's clock, as assumed.
    pub quantum_ns: f64,
}

/// The curve at one burst. All in ns relative to the origin; rates in ns/s.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) x: f64,
    pub(super) theta: f64,
    /// Of the curve from here on.
    pub(super) rate: f64,
    /// What `rate` may be wrong by up to the next node.
    pub(super) rho: f64,
    /// Walls.
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) width: f64,
    pub(super) sd_theta: f64,
    pub(super) quantum: f64,
    pub(super) chain_rounding: f64,
}

impl Node {
    /// By a burst alone: in the middle of its bounds, with a uniform distribution's deviation; no rate is known.
    pub(super) fn new(bounds: &Bounds, burst: &Burst) -> Self {
        Self {
            x: bounds.x,
            theta: bounds.mid(),
            rate: 0.0,
            rho: 0.0,
            low: bounds.low,
            high: bounds.high,
            width: bounds.width(),
            sd_theta: bounds.width() / 12f64.sqrt(),
            quantum: bounds.quantum,
            chain_rounding: burst.chain_rounding_ns,
        }
    }

    /// The walls of this node `dx` away from it, when f32 may have rounded off `rounding` in between.
    pub(super) fn walls(&self, dx: f64, rate: f64, rho: f64, rounding: f64) -> (f64, f64) {
        let distance = dx.abs();
        let reach = (rho * distance + GAP_RHO * (distance - GAP_NS).max(0.0)) / NS + rounding;
        let moved = rate * dx / NS;
        (self.low + moved - reach, self.high + moved + reach)
    }

    fn walls_at(&self, to: &Self, rate: f64, rho: f64) -> (f64, f64) {
        self.walls(to.x - self.x, rate, rho, (to.chain_rounding - self.chain_rounding).abs())
    }

    fn narrow(&mut self, (low, high): (f64, f64)) {
        self.low = self.low.max(low);
        self.high = self.high.min(high);
    }
}

/// A stretch of bursts without a break.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) chain: u32,
    pub(super) origin: Origin,
    /// Least and greatest rate that the bursts allow, where they are too few for the filter to know better.
    pub(super) rates: Option<(f64, f64)>,
    /// In order of `x`, never empty.
    pub(super) nodes: Vec<Node>,
}

impl Segment {
    /// Adds a node behind the others; their walls come with it.
    pub(super) fn push(&mut self, mut node: Node) {
        if let Some(last) = self.nodes.last() {
            node.narrow(last.walls_at(&node, last.rate, last.rho));
        }
        self.nodes.push(node);
    }

    /// Carries every wall to its neighbours, forth and back.
    pub(super) fn propagate(&mut self) {
        for i in 1..self.nodes.len() {
            let before = self.nodes[i - 1];
            let walls = before.walls_at(&self.nodes[i], before.rate, before.rho);
            self.nodes[i].narrow(walls);
        }
        for i in (1..self.nodes.len()).rev() {
            let Node { rate, rho, .. } = self.nodes[i - 1];
            let walls = self.nodes[i].walls_at(&self.nodes[i - 1], rate, rho);
            self.nodes[i - 1].narrow(walls);
        }
    }

    /// Takes in that θ at `x` is not below, or not above, a value: as walls of the node before.
    pub(super) fn narrow_at(&mut self, x: f64, chain_rounding: f64, is_low: bool, theta: f64) {
        let i = self.index(x);
        let Some(node) = self.nodes.get_mut(i) else { return };
        let (low, high) = if is_low { (theta, f64::INFINITY) } else { (f64::NEG_INFINITY, theta) };
        let wall = Node { x, low, high, chain_rounding, ..*node };
        node.narrow(wall.walls_at(node, node.rate, node.rho));
    }

    /// Number of the node whose line holds at `x`.
    fn index(&self, x: f64) -> usize {
        self.nodes.partition_point(|node| node.x <= x).saturating_sub(1)
    }

    /// θ on the curve at `x`, its walls there, and the device's step.
    pub(super) fn corridor(&self, x: f64, chain_rounding: f64) -> Option<Corridor> {
        let i = self.index(x);
        let (node, next) = (self.nodes.get(i)?, self.nodes.get(i + 1));
        let dx = x - node.x;
        let rounding = |node: &Node| (chain_rounding - node.chain_rounding).abs();
        let (mut low, mut high) = node.walls(dx, node.rate, node.rho, rounding(node));
        let mut theta = node.theta + node.rate * dx / NS;
        if let Some(next) = next.filter(|_| dx >= 0.0) {
            theta = node.theta + (next.theta - node.theta) * (dx / (next.x - node.x));
            let (from_next, to_next) = next.walls(x - next.x, node.rate, node.rho, rounding(next));
            (low, high) = (low.max(from_next), high.min(to_next));
        }
        // Walls that cross: ρ did not hold here. What both exclude is then the least that must be admitted.
        (low, high) = (low.min(high), high.max(low));
        let quantum = next.map_or(node.quantum, |next| next.quantum.max(node.quantum));
        Some(Corridor { theta: theta.clamp(low, high), low, high, quantum })
    }

    /// Where a device time is counted from the origin.
    pub(super) fn x(&self, base_ns: i64, offset_ns: f64) -> f64 {
        (base_ns - self.origin.device_ns) as f64 + offset_ns
    }

    /// Host time of the device time `base_ns + offset_ns`, of which f32 may have rounded off `rounding_ns`; `None` where
    /// nothing limits how far it was rounded down.
    pub(super) fn map(
        &self,
        base_ns: i64,
        offset_ns: f64,
        rounding_ns: f64,
        chain_rounding: f64,
    ) -> Option<RawTime> {
        let at = self.corridor(self.x(base_ns, offset_ns), chain_rounding)?;
        if at.quantum >= UNLIMITED_NS as f64 {
            return None;
        }
        // A coarser step may be a guess that chance suggests: it widens the bound and moves nothing.
        let middle = at.quantum.min(COARSEST_NS as f64) / 2.0;
        let fraction_ns = offset_ns + at.theta + middle;
        let whole = fraction_ns.floor();
        let host_ns = self.origin.host_ns.checked_add(base_ns - self.origin.device_ns)?;
        Some(RawTime {
            ns: host_ns.saturating_add(whole as i64),
            fraction_ns: fraction_ns - whole,
            bound_ns: (at.high - at.theta + at.quantum - middle).max(at.theta - at.low + middle)
                + rounding_ns,
        })
    }

    /// The segment of a chain that holds a device time: never one on the other side of a break.
    pub(super) fn holding(segments: &[Self], chain: u32, device_ns: i64) -> Option<&Self> {
        let mut candidates = segments.iter().filter(|segment| segment.chain == chain).peekable();
        let mut is_first = true;
        while let Some(segment) = candidates.next() {
            let from = segment.device_ns(segment.nodes.first()?.x);
            let until = segment.device_ns(segment.nodes.last()?.x);
            let from = if is_first { from.saturating_sub(REACH_NS) } else { from };
            let until = if candidates.peek().is_none() { until.saturating_add(REACH_NS) } else { until };
            if (from..=until).contains(&device_ns) {
                return Some(segment);
            }
            is_first = false;
        }
        None
    }

    fn device_ns(&self, x: f64) -> i64 {
        self.origin.device_ns.saturating_add(x.round() as i64)
    }

    pub(super) fn knots(&self, number: u32) -> impl Iterator<Item = Knot> {
        self.nodes.iter().filter_map(move |node| {
            let time = self.map(self.origin.device_ns, node.x, 0.0, node.chain_rounding)?;
            Some(Knot {
                segment: number,
                chain: self.chain,
                device_ns: self.device_ns(node.x),
                host_raw_ns: time.ns,
                bound_ns: time.bound_ns,
                precision_ns: node.sd_theta,
                width_ns: node.width,
                quantum_ns: node.quantum,
            })
        })
    }
}

/// What is known of θ at one device time, in ns relative to the origin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Corridor {
    pub(super) theta: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) quantum: f64,
}

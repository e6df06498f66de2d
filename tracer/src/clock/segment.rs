//! θ = host − device between the bursts of one uninterrupted stretch, and what it must lie within.
//!
//! The curve goes through the tightest burst of every window of a few seconds (one line over a whole capture is the
//! mistake to avoid: crystals drift). Every burst then bounds θ relative to the curve, and such a bound loosens with
//! the distance from its burst by ρ, the rate that the curve may be wrong by. Together they make a corridor; the
//! curve is kept inside it, and the distance to its walls is the bound that is given.

use super::RawTime;
use super::burst::{Bounds, Burst, Origin, quantum_ns};

/// What a curve's rate may be wrong by between anchors, at the ends, and when nothing at all is known of the rate.
const RHO: f64 = 2e-6;
const RHO_END: f64 = 5e-6;
const RHO_UNKNOWN: f64 = 300e-6;
/// Bursts that do not fit on one line within this rate are on two sides of a step of a clock.
const RHO_STEP: f64 = 15e-6;
/// Clocks that differ more than this are no clocks.
const MAX_RATE: f64 = 1e-3;
/// Longest and shortest window, in ns.
const WINDOW: f64 = 2e9;
const MIN_WINDOW: f64 = 0.5e9;
/// The round-trip floor is the tightest burst within this distance, in ns.
const FLOOR_REACH: f64 = 60e9;
/// A burst is tight when its width is below this many times the floor, plus this many ns.
const TIGHT: f64 = 1.5;
const TIGHT_NS: f64 = 500.0;
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
    /// Width of the burst's bounds: its effective round trip.
    pub width_ns: f64,
    /// Step of the device's clock, as assumed.
    pub quantum_ns: f64,
}

/// A burst's place in the corridor: walls relative to the curve.
#[derive(Clone, Copy, Debug)]
struct Wall {
    x: f64,
    low: f64,
    high: f64,
    width: f64,
    chain_rounding: f64,
}

/// The curve through one point, and its rate up to the next.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    x: f64,
    theta: f64,
    rate: f64,
    /// What `rate` may be wrong by, and the integral of that from the first anchor to this one.
    rho: f64,
    rho_until: f64,
}

/// A stretch of bursts without a break.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    chain: u32,
    origin: Origin,
    quantum: f64,
    anchors: Vec<Anchor>,
    walls: Vec<Wall>,
}

/// The rate of θ over some bursts, right within `slack`.
#[derive(Clone, Copy)]
struct Rate {
    rate: f64,
    slack: f64,
}

/// Cuts bursts where a clock was interrupted and fits each stretch.
pub(super) fn fit(bursts: &[Burst], suspends: &[(i64, i64)]) -> Vec<Segment> {
    let quantum = quantum_ns(bursts);
    let times = |burst: &Burst| {
        let host_ns = burst.host_ns();
        (suspends.partition_point(|s| s.0 < host_ns), suspends.partition_point(|s| s.1 < host_ns))
    };
    let continues = |a: &Burst, b: &Burst| {
        a.chain == b.chain && times(a) == times(b) && a.origin().device_ns < b.origin().device_ns
    };
    let mut segments = Vec::new();
    for run in bursts.chunk_by(continues) {
        split_at_steps(run, quantum, &mut segments);
    }
    segments
}

fn split_at_steps(run: &[Burst], quantum: f64, segments: &mut Vec<Segment>) {
    let Some(origin) = run.first().map(Burst::origin) else { return };
    let rate = rate(&run.iter().map(|burst| burst.best_bounds(origin)).collect::<Vec<_>>());
    let rho = RHO_STEP + rate.slack;
    let mut corridor: Option<Bounds> = None;
    let mut from = 0;
    for (i, burst) in run.iter().enumerate() {
        let mut next = burst.bounds(origin, rate.rate, rho);
        next.low -= quantum;
        if let Some(before) = corridor {
            let distance = next.x - before.x;
            let low = before.low + (rate.rate - rho) * distance;
            let high = before.high + (rate.rate + rho) * distance;
            if next.low > high || next.high < low {
                segments.extend(Segment::fit(&run[from..i], quantum));
                from = i;
            } else {
                next.low = next.low.max(low);
                next.high = next.high.min(high);
            }
        }
        corridor = Some(next);
    }
    segments.extend(Segment::fit(&run[from..], quantum));
}

/// The median rate between tight bursts a quarter of the stretch apart: a step in between spoils a minority.
fn rate(bounds: &[Bounds]) -> Rate {
    let unknown = Rate { rate: 0.0, slack: RHO_UNKNOWN };
    let floor = bounds.iter().map(Bounds::width).fold(f64::INFINITY, f64::min);
    let tight: Vec<Bounds> = bounds.iter().copied().filter(|b| is_tight(b, floor)).collect();
    let points = if tight.len() < 2 { bounds } else { &tight };
    let lag = (points.len() / 4).max(1);
    let pairs = points.iter().zip(points.iter().skip(lag));
    let mut rates: Vec<Rate> = pairs
        .map(|(a, b)| Rate {
            rate: (b.mid() - a.mid()) / (b.x - a.x),
            slack: (a.width() + b.width()) / 2.0 / (b.x - a.x),
        })
        .collect();
    rates.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    rates.get(rates.len() / 2).copied().filter(|rate| rate.rate.abs() < MAX_RATE).unwrap_or(unknown)
}

fn is_tight(bounds: &Bounds, floor: f64) -> bool {
    bounds.width() <= floor * TIGHT + TIGHT_NS
}

impl Segment {
    /// `None` when no burst is consistent in itself.
    fn fit(run: &[Burst], quantum: f64) -> Option<Self> {
        let first = run.first()?;
        let origin = first.origin();
        let rough = rate(&run.iter().map(|burst| burst.best_bounds(origin)).collect::<Vec<_>>());
        let bounds = run.iter().map(|burst| burst.bounds(origin, rough.rate, RHO_STEP + rough.slack));
        let sane: Vec<(Bounds, f64)> = bounds
            .zip(run)
            .filter(|(bounds, _)| bounds.low - quantum <= bounds.high)
            .map(|(bounds, burst)| (bounds, burst.chain_rounding_ns))
            .collect();
        if sane.is_empty() {
            return None;
        }
        let bounds: Vec<Bounds> = sane.iter().map(|(bounds, _)| *bounds).collect();
        let anchors = anchors(&bounds, rough);
        let mut segment = Self { chain: first.chain, origin, quantum, anchors, walls: Vec::new() };
        segment.walls = sane.iter().map(|(bounds, rounding)| segment.wall(bounds, *rounding)).collect();
        segment.propagate();
        Some(segment)
    }

    fn wall(&self, bounds: &Bounds, chain_rounding: f64) -> Wall {
        let (curve, _) = self.curve(bounds.x);
        Wall {
            x: bounds.x,
            low: bounds.low - self.quantum - curve,
            high: bounds.high - curve,
            width: bounds.width(),
            chain_rounding,
        }
    }

    /// Carries every wall to its neighbours, forth and back.
    fn propagate(&mut self) {
        let mut walls = std::mem::take(&mut self.walls);
        let carry = |before: Wall, wall: &mut Wall| {
            let reach = self.reach(&before, wall.x, wall.chain_rounding);
            wall.low = wall.low.max(before.low - reach);
            wall.high = wall.high.min(before.high + reach);
        };
        for i in 1..walls.len() {
            let before = walls[i - 1];
            carry(before, &mut walls[i]);
        }
        for i in (1..walls.len()).rev() {
            let before = walls[i];
            carry(before, &mut walls[i - 1]);
        }
        self.walls = walls;
    }

    /// By how much a wall loosens up to `x` on a base with this chain rounding.
    fn reach(&self, wall: &Wall, x: f64, chain_rounding: f64) -> f64 {
        (self.curve(x).1 - self.curve(wall.x).1).abs() + (chain_rounding - wall.chain_rounding).abs()
    }

    /// θ on the curve, and the integral of ρ from the first anchor.
    fn curve(&self, x: f64) -> (f64, f64) {
        let after = self.anchors.partition_point(|anchor| anchor.x <= x);
        match (after.checked_sub(1).and_then(|i| self.anchors.get(i)), self.anchors.first()) {
            (Some(anchor), _) => {
                let distance = x - anchor.x;
                (anchor.theta + anchor.rate * distance, anchor.rho_until + anchor.rho * distance)
            }
            (None, Some(first)) => {
                let distance = x - first.x;
                (first.theta + first.rate * distance, RHO_END.max(first.rho) * distance)
            }
            (None, None) => (0.0, 0.0),
        }
    }

    /// (curve, error of it at its least, at its most) at `x`.
    fn corridor(&self, x: f64, chain_rounding: f64) -> (f64, f64, f64) {
        let after = self.walls.partition_point(|wall| wall.x <= x);
        let neighbours = self.walls.iter().skip(after.saturating_sub(1)).take(if after == 0 { 1 } else { 2 });
        let (mut low, mut high) = (f64::NEG_INFINITY, f64::INFINITY);
        for wall in neighbours {
            let reach = self.reach(wall, x, chain_rounding);
            low = low.max(wall.low - reach);
            high = high.min(wall.high + reach);
        }
        // Walls that cross: ρ did not hold here. What both exclude is then the least that must be admitted.
        (self.curve(x).0, low.min(high), high.max(low))
    }

    /// Host time of the device time `base_ns + offset_ns`, of which f32 may have rounded off `rounding_ns`.
    pub(super) fn map(&self, base_ns: i64, offset_ns: f64, rounding_ns: f64, chain_rounding: f64) -> RawTime {
        let x = (base_ns - self.origin.device_ns) as f64 + offset_ns;
        let (curve, low, high) = self.corridor(x, chain_rounding);
        let kept_inside = 0f64.clamp(low, high);
        let host = x + curve + kept_inside;
        let late = high - kept_inside + self.quantum + rounding_ns;
        let early = kept_inside - low + rounding_ns;
        let whole = host.floor();
        RawTime {
            ns: self.origin.host_ns.saturating_add(whole as i64),
            fraction_ns: host - whole,
            bound_ns: late.max(early),
        }
    }

    /// The segment of a chain that holds a device time: never one on the other side of a break.
    pub(super) fn holding(segments: &[Self], chain: u32, device_ns: i64) -> Option<&Self> {
        let mut candidates = segments.iter().filter(|segment| segment.chain == chain).peekable();
        let mut is_first = true;
        while let Some(segment) = candidates.next() {
            let from = segment.device_ns(segment.walls.first()?.x);
            let until = segment.device_ns(segment.walls.last()?.x);
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
        self.walls.iter().map(move |wall| {
            let time = self.map(self.origin.device_ns, wall.x, 0.0, wall.chain_rounding);
            Knot {
                segment: number,
                chain: self.chain,
                device_ns: self.device_ns(wall.x),
                host_raw_ns: time.ns,
                bound_ns: time.bound_ns,
                width_ns: wall.width,
                quantum_ns: self.quantum,
            }
        })
    }
}

/// The tightest burst of every window, joined by lines.
fn anchors(bounds: &[Bounds], rough: Rate) -> Vec<Anchor> {
    let (Some(first), Some(last)) = (bounds.first(), bounds.last()) else { return Vec::new() };
    let window = ((last.x - first.x) / 4.0).clamp(MIN_WINDOW, WINDOW);
    let floors = floors(bounds);
    let excess = |i: usize| bounds[i].width() - floors[i];
    let same_window = |a: &usize, b: &usize| {
        let number = |i: usize| ((bounds[i].x - first.x) / window).floor();
        number(*a) == number(*b)
    };
    let indices: Vec<usize> = (0..bounds.len()).collect();
    let best = |part: &[usize]| part.iter().copied().min_by(|a, b| excess(*a).total_cmp(&excess(*b)));
    let mut chosen: Vec<usize> =
        indices.chunk_by(same_window).filter_map(best).filter(|&i| is_tight(&bounds[i], floors[i])).collect();
    if chosen.is_empty() {
        chosen.extend(best(&indices));
    }
    join(&chosen.iter().map(|&i| (bounds[i], excess(i))).collect::<Vec<_>>(), window, rough)
}

/// Lines through (bounds, excess over the floor).
fn join(points: &[(Bounds, f64)], window: f64, rough: Rate) -> Vec<Anchor> {
    let line = |(a, excess_a): (Bounds, f64), (b, excess_b): (Bounds, f64)| {
        let distance = b.x - a.x;
        // The part of the round trips above their floor may lie all on one side.
        ((b.mid() - a.mid()) / distance, (excess_a + excess_b) / 2.0 / distance)
    };
    let mut anchors: Vec<Anchor> = Vec::with_capacity(points.len());
    let mut rho_until = 0.0;
    for (i, &point) in points.iter().enumerate() {
        let (rate, rho) = match (points.get(i + 1), i.checked_sub(2.min(i)).filter(|_| i > 0)) {
            (Some(&next), _) => {
                let (rate, slack) = line(point, next);
                let is_gap = next.0.x - point.0.x > 2.5 * window;
                (rate, slack + if is_gap { RHO_END } else { RHO })
            }
            (None, Some(before)) => {
                let (rate, slack) = line(points[before], point);
                (rate, slack + RHO_END)
            }
            (None, None) => (rough.rate, rough.slack + RHO_END),
        };
        anchors.push(Anchor { x: point.0.x, theta: point.0.mid(), rate, rho, rho_until });
        rho_until += points.get(i + 1).map_or(0.0, |next| rho * (next.0.x - point.0.x));
    }
    anchors
}

/// The tightest width within reach of each burst.
fn floors(bounds: &[Bounds]) -> Vec<f64> {
    let width_near = |b: &Bounds| {
        let from = bounds.partition_point(|other| other.x < b.x - FLOOR_REACH);
        let near = bounds[from..].iter().take_while(|other| other.x <= b.x + FLOOR_REACH);
        near.map(Bounds::width).fold(f64::INFINITY, f64::min)
    };
    bounds.iter().map(width_near).collect()
}

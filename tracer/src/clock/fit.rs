//! Bursts → segments with hindsight.
//!
//! [`track`](super::track) says where the stretches end and what their rate is. Each is then smoothed as a whole, and
//! the curve joins the smoothed θ of its bursts by straight lines. One line for a whole recording would be the mistake
//! to avoid: crystals drift by tens of µs in minutes.

use super::burst::{Bounds, Burst};
use super::curve::{Node, Segment};
use super::filter::{self, PPM, Smoothed};
use super::host::HostMap;
use super::track::{RHO, Tracker, rho};

const NS: f64 = 1e9;
/// What the rate of a whole stretch may be off by inside one burst, where it hardly matters.
const BURST_RATE: f64 = 10.0 * PPM;

/// Segments, oldest first, and how many bursts contradicted themselves.
pub(super) fn fit(bursts: &[Burst], host: &HostMap) -> (Vec<Segment>, u64) {
    let mut tracker = Tracker::default();
    bursts.iter().for_each(|burst| tracker.push(burst, host));
    let mut rest = bursts;
    let mut rejected = 0;
    let mut segments = Vec::with_capacity(tracker.segments.len());
    for (i, tracked) in tracker.segments.iter().enumerate() {
        // Bursts come in order of host time, and a segment counts from its first.
        let is_of = |burst: &Burst| {
            tracker.segments.get(i + 1).is_none_or(|next| burst.host_ns() < next.origin.host_ns)
        };
        let (stretch, later) =
            rest.split_at(rest.iter().position(|burst| !is_of(burst)).unwrap_or(rest.len()));
        rest = later;
        segments.extend(smooth(tracked, stretch, &mut rejected));
    }
    (segments, rejected)
}

fn smooth(tracked: &Segment, stretch: &[Burst], rejected: &mut u64) -> Option<Segment> {
    let origin = tracked.origin;
    let mut rates: Vec<f64> = tracked.nodes.iter().map(|node| node.rate).collect();
    rates.sort_by(f64::total_cmp);
    let rate = *rates.get(rates.len() / 2)?;
    let sd_rate = (tracked.nodes.last()?.rho - rho(0.0)).max(0.0) / 3.0;
    let mut sane: Vec<(Bounds, &Burst)> = Vec::with_capacity(stretch.len());
    for burst in stretch {
        let bounds = burst.bounds(origin, rate / NS, (BURST_RATE + 3.0 * sd_rate) / NS);
        let is_next = sane.last().is_none_or(|(last, _)| last.x < bounds.x) && burst.chain == tracked.chain;
        if is_next && bounds.width() >= 0.0 {
            sane.push((bounds, burst));
        } else {
            *rejected += 1;
        }
    }
    let bounds: Vec<Bounds> = sane.iter().map(|(bounds, _)| *bounds).collect();
    let Smoothed { states, wander } = filter::smooth(&bounds, rate, sd_rate);
    let next = states.iter().zip(&bounds).skip(1).map(Some).chain([None]);
    let nodes = states.iter().zip(&sane).zip(next).map(|((state, (bounds, burst)), next)| {
        let dt_ns = next.map_or(0.0, |(_, at)| at.x - bounds.x);
        let rate = next.map_or(state.rate, |(next, _)| (next.theta - state.theta) / dt_ns * NS);
        // Three standard deviations of what the rate does between two bursts.
        let wandered = 3.0 * (wander * dt_ns / NS).sqrt();
        let rho = match tracked.rates {
            Some((low, high)) => (high - rate).max(rate - low),
            // The state's rate is as good as its deviation says; the line to the next burst may have another.
            None => rho(state.sd_rate()) + (rate - state.rate).abs() + (wandered - RHO).max(0.0),
        };
        Node { theta: state.theta, rate, rho, sd_theta: state.sd_theta(), ..Node::new(bounds, burst) }
    });
    let Segment { chain, rates, .. } = *tracked;
    let mut segment = Segment { chain, origin, rates, nodes: nodes.collect() };
    segment.propagate();
    (!segment.nodes.is_empty()).then_some(segment)
}

//! How good the clocks of a recording are, in figures.

use super::SeriesKey;
use super::causality::Count;
use super::curve::{Knot, Segment};
use super::filter::PPM;

/// How well the clock of one series is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quality {
    /// Bursts that were used, and those that contradicted themselves.
    pub bursts: u64,
    pub bursts_rejected: u64,
    /// Uninterrupted stretches: one more than clocks were interrupted.
    pub segments: u32,
    /// Of the bounds at the bursts.
    pub median_bound_ns: u64,
    pub p99_bound_ns: u64,
    /// Median standard deviation that the filter claims: precision, not accuracy.
    pub precision_ns: u64,
    /// Median rate by which the device is faster than CLOCK_MONOTONIC_RAW, in parts in a million.
    pub drift_ppm: f64,
    /// Coarsest step of the device's clock.
    pub quantum_ns: u64,
    /// Launches and waits that were compared with the map, and those that it cannot explain (as it should be: 0).
    pub causality_samples: u64,
    pub causality_violations: u64,
}

/// The [`Quality`] of each series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockQuality {
    pub series: SeriesKey,
    pub quality: Quality,
}

impl Quality {
    pub(super) fn with(self, rejected: u64, causality: Count) -> Self {
        Self {
            bursts_rejected: rejected,
            causality_samples: causality.samples,
            causality_violations: causality.violations,
            ..self
        }
    }

    pub(super) fn of(segments: &[Segment]) -> Self {
        let knots: Vec<Knot> = segments.iter().flat_map(|segment| segment.knots(0)).collect();
        let bounds = sorted(knots.iter().map(|knot| knot.bound_ns));
        // θ = host − device: with dθ/dd = r, the device runs at 1/(1 + r) of the host's rate.
        let rates =
            sorted(segments.iter().flat_map(|segment| segment.nodes.iter().map(|node| node.rate / PPM)));
        let rate_ppm = quantile(&rates, 0.5);
        Self {
            bursts: knots.len() as u64,
            segments: u32::try_from(segments.len()).unwrap_or(u32::MAX),
            median_bound_ns: quantile(&bounds, 0.5).ceil() as u64,
            p99_bound_ns: quantile(&bounds, 0.99).ceil() as u64,
            precision_ns: quantile(&sorted(knots.iter().map(|knot| knot.precision_ns)), 0.5).ceil() as u64,
            drift_ppm: -rate_ppm / (1.0 + rate_ppm * 1e-6),
            quantum_ns: knots.iter().map(|knot| knot.quantum_ns).fold(0.0, f64::max) as u64,
            ..Self::default()
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The smallest value that is not below a share `q` of them; 0 of none.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

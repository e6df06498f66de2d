//! Statistics of repeated measurements.

use serde::Serialize;

use crate::random::SplitMix;

/// Fewer paired measurements than this support no claim.
pub const MIN_PAIRS: usize = 10;

const RESAMPLES: usize = 2_000;
/// Fixed, so that the same measurements always give the same interval.
const SEED: u64 = 0x7472_6163_6572;

/// The middle value, or the mean of the two in the middle; `None` of nothing.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    middle(&sorted)
}

fn middle(sorted: &[f64]) -> Option<f64> {
    let upper = sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(*upper);
    }
    Some(f64::midpoint(sorted[sorted.len() / 2 - 1], *upper))
}

/// A median and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    /// Number of measurements.
    pub n: usize,
}

/// Median with the percentile bootstrap's 95 % interval (Efron, 1979); `None` of nothing. The order of the
/// measurements does not matter.
#[must_use]
pub fn estimate(values: &[f64]) -> Option<Estimate> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let mut random = SplitMix::new(SEED);
    let mut resample = vec![0.0; sorted.len()];
    let mut medians = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        for value in &mut resample {
            *value = sorted[random.below(sorted.len())];
        }
        resample.sort_unstable_by(f64::total_cmp);
        medians.push(middle(&resample)?);
    }
    medians.sort_unstable_by(f64::total_cmp);
    let tail = RESAMPLES / 40;
    Some(Estimate {
        median: middle(&sorted)?,
        low: medians[tail],
        high: medians[RESAMPLES - 1 - tail],
        n: sorted.len(),
    })
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

/// Whether a figure is what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Met,
    Missed,
    /// Fewer than [`MIN_PAIRS`] measurements.
    TooFew,
}

impl Aim {
    /// What may be claimed: the end of the interval that is worse for us.
    #[must_use]
    pub fn claim(self, estimate: &Estimate) -> f64 {
        match self {
            Self::AtLeast(_) => estimate.low,
            Self::AtMost(_) => estimate.high,
        }
    }

    /// Judges the claim, not the median.
    #[must_use]
    pub fn judge(self, estimate: &Estimate) -> Verdict {
        let claim = self.claim(estimate);
        let met = match self {
            Self::AtLeast(aim) => claim >= aim,
            Self::AtMost(aim) => claim <= aim,
        };
        match met {
            _ if estimate.n < MIN_PAIRS => Verdict::TooFew,
            true => Verdict::Met,
            false => Verdict::Missed,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(median: f64, low: f64, high: f64, n: usize) -> Estimate {
        Estimate { median, low, high, n }
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(estimate(&[]), None);
    }

    #[test]
    fn equal_values_leave_no_doubt() {
        assert_eq!(estimate(&[2.0; 12]), Some(of(2.0, 2.0, 2.0, 12)));
    }

    #[test]
    fn the_interval_of_a_sample_is_as_theory_says() {
        // The 95 % interval of a median by order statistics (binomial) is here between the 40th and the 61st value.
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        let estimate = estimate(&values).unwrap();
        assert_eq!(estimate.median, 50.5);
        assert!((38.0..=43.0).contains(&estimate.low), "{estimate:?}");
        assert!((58.0..=63.0).contains(&estimate.high), "{estimate:?}");
    }

    #[test]
    fn the_worse_end_is_claimed() {
        let ratio = of(0.995, 0.985, 1.001, 10);
        assert_eq!(Aim::AtLeast(0.99).judge(&ratio), Verdict::Missed);
        assert_eq!(Aim::AtLeast(0.98).judge(&ratio), Verdict::Met);
        assert_eq!(Aim::AtMost(1.0).judge(&ratio), Verdict::Missed);
        assert_eq!(Aim::AtMost(1.3).judge(&of(1.1, 1.0, 1.2, 9)), Verdict::TooFew);
    }

    proptest! {
        #[test]
        fn the_median_is_inside_and_order_is_nothing(mut values in prop::collection::vec(0.1f64..10.0, 1..40)) {
            let one = estimate(&values).unwrap();
            prop_assert!(one.low <= one.median && one.median <= one.high);
            prop_assert!(values.contains(&one.low) || values.len() > 1);
            values.reverse();
            prop_assert_eq!(estimate(&values).unwrap(), one);
        }

        #[test]
        fn scaling_scales(values in prop::collection::vec(0.1f64..10.0, 1..40)) {
            let doubled: Vec<f64> = values.iter().map(|value| value * 2.0).collect();
            let (one, two) = (estimate(&values).unwrap(), estimate(&doubled).unwrap());
            prop_assert_eq!((one.median * 2.0, one.low * 2.0, one.high * 2.0), (two.median, two.low, two.high));
        }
    }
}

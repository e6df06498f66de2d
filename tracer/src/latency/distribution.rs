//! One distribution: an HDR histogram with exact count, sum and extremes.

use hdrhistogram::Histogram;

/// Longest latency that keeps its place, in ns: a day. A longer one counts there; the maximum stays exact.
const LONGEST_NS: u64 = 86_400_000_000_000;
/// Significant decimal digits: a quantile is right within 0.1 %.
const DIGITS: u8 = 3;
/// Samples that must lie beyond a quantile for it to be given.
const BEYOND: f64 = 10.0;

/// A quantile, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantile {
    /// ns.
    Value(u64),
    /// Fewer than ten of the `n` samples would lie beyond it.
    TooFew { n: u64 },
}

impl Quantile {
    #[must_use]
    pub fn value(self) -> Option<u64> {
        match self {
            Self::Value(ns) => Some(ns),
            Self::TooFew { .. } => None,
        }
    }
}

/// Samples from `from_ns` up to but not including `to_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bin {
    pub from_ns: u64,
    pub to_ns: u64,
    pub count: u64,
}

/// Latencies in ns.
#[derive(Clone, Debug)]
pub struct Distribution {
    histogram: Histogram<u64>,
    sum_ns: u128,
    min_ns: u64,
    max_ns: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self::new()
    }
}

impl Distribution {
    #[must_use]
    #[expect(clippy::expect_used, reason = "the arguments are constants that the histogram accepts")]
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("constant bounds");
        Self { histogram, sum_ns: 0, min_ns: u64::MAX, max_ns: 0 }
    }

    pub fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.sum_ns += u128::from(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    #[must_use]
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Exact; `None` without samples.
    #[must_use]
    pub fn max(&self) -> Option<u64> {
        (self.count() > 0).then_some(self.max_ns)
    }

    /// Exact; `None` without samples.
    #[must_use]
    pub fn min(&self) -> Option<u64> {
        (self.count() > 0).then_some(self.min_ns)
    }

    /// In ns; `None` without samples.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.sum_ns as f64 / self.count() as f64)
    }

    /// The histogram itself, for its own formats.
    #[must_use]
    pub(crate) const fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// The values recorded, ascending, to three digits, and how often each was: for pictures that bin them.
    pub fn values(&self) -> impl Iterator<Item = (u64, u64)> {
        let (min, max) = (self.min_ns, self.max_ns);
        self.histogram
            .iter_recorded()
            .map(move |at| (at.value_iterated_to().clamp(min, max), at.count_at_value()))
    }

    /// The quantile `q` of [0, 1], where at least ten samples lie beyond it: n·(1 − q) ≥ 10.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Quantile {
        let n = self.count();
        // 100 × (1 − 0.9) is a little below 10 in binary.
        let is_honest = n as f64 * (1.0 - q) >= BEYOND * (1.0 - 1e-9);
        if !(0.0..=1.0).contains(&q) || !is_honest {
            return Quantile::TooFew { n };
        }
        Quantile::Value(self.histogram.value_at_quantile(q).clamp(self.min_ns, self.max_ns))
    }

    /// Counts in log-spaced bins, `per_decade` to each power of ten, from the smallest to the largest sample.
    #[must_use]
    pub fn bins(&self, per_decade: u32) -> Vec<Bin> {
        let (Some(min), Some(max)) = (self.min(), self.max()) else { return Vec::new() };
        let per_decade = f64::from(per_decade.max(1));
        let number = |ns: u64| ((ns.max(1) as f64).log10() * per_decade + 1e-9).floor() as i32;
        let edge = |i: i32| 10f64.powf(f64::from(i) / per_decade).round() as u64;
        let (first, last) = (number(min.min(LONGEST_NS)), number(max.min(LONGEST_NS)));
        let mut bins: Vec<Bin> =
            (first..=last).map(|i| Bin { from_ns: edge(i), to_ns: edge(i + 1), count: 0 }).collect();
        for value in self.histogram.iter_recorded() {
            let ns = value.value_iterated_to().clamp(min, max).min(LONGEST_NS);
            let i = (number(ns) - first).clamp(0, last - first);
            if let Some(bin) = usize::try_from(i).ok().and_then(|i| bins.get_mut(i)) {
                bin.count += value.count_at_value();
            }
        }
        bins
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(samples: impl IntoIterator<Item = u64>) -> Distribution {
        let mut distribution = Distribution::new();
        samples.into_iter().for_each(|ns| distribution.record(ns));
        distribution
    }

    #[test]
    fn a_quantile_needs_ten_samples_beyond_it() {
        for (q, needed) in [(0.5, 20), (0.9, 100), (0.99, 1_000), (0.999, 10_000)] {
            assert!(matches!(of(1..=needed).quantile(q), Quantile::Value(_)), "{q}");
            assert_eq!(of(1..needed).quantile(q), Quantile::TooFew { n: needed - 1 });
        }
        assert_eq!(of([]).quantile(0.5), Quantile::TooFew { n: 0 });
        assert_eq!(of(1..=1_000).quantile(f64::NAN).value(), None);
    }

    #[test]
    fn extremes_are_exact() {
        let distribution = of([7, 123_456_789_012, u64::MAX]);
        assert_eq!((distribution.min(), distribution.max()), (Some(7), Some(u64::MAX)));
        assert_eq!(of([]).max(), None);
        assert_eq!(of([1, 2]).mean(), Some(1.5));
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_samples(mut samples in prop::collection::vec(0u64..1 << 40, 20..400)) {
            let distribution = of(samples.iter().copied());
            samples.sort_unstable();
            if let Quantile::Value(median) = distribution.quantile(0.5) {
                let exact = samples[samples.len().div_ceil(2) - 1];
                prop_assert!(median >= exact && median as f64 <= exact as f64 * 1.001 + 1.0, "{} {}", median, exact);
            }
        }

        #[test]
        fn bins_hold_every_sample(samples in prop::collection::vec(any::<u64>().prop_map(|x| x >> (x % 64)), 1..200), per_decade in 1u32..30) {
            let distribution = of(samples.iter().copied());
            let bins = distribution.bins(per_decade);
            prop_assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), samples.len() as u64);
            prop_assert!(bins.windows(2).all(|pair| pair[0].to_ns == pair[1].from_ns));
        }
    }
}

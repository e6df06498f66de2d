//! Reproducible choices: the same seed gives the same run.

/// SplitMix64 (Steele, Lea, Flood 2014): its output function, also used as a hash.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number in 0..1 that depends on all parts.
pub(crate) fn chance(seed: u64, parts: &[u64]) -> f64 {
    let hash =
        parts.iter().fold(mix(seed.wrapping_add(STEP)), |hash, part| mix(hash ^ part.wrapping_mul(STEP)));
    to_unit(hash)
}

fn to_unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// A stream of numbers.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number in 0..1.
    pub(crate) fn unit(&mut self) -> f64 {
        to_unit(self.next())
    }

    /// A number between `low` and `high`, spread evenly over the orders of magnitude: many short, few long.
    pub(crate) fn between(&mut self, low: u32, high: u32) -> u32 {
        let (low_ln, high_ln) = (f64::from(low.max(1)).ln(), (f64::from(high.max(low).max(1)) + 1.0).ln());
        ((low_ln + (high_ln - low_ln) * self.unit()).exp() as u32).clamp(low, high.max(low))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_stay_in_range(seed: u64, low in 0u32..1_000, more in 0u32..100_000, parts: Vec<u64>) {
            let mut random = Random::new(seed);
            prop_assert!((low..=low + more).contains(&random.between(low, low + more)));
            prop_assert!((0.0..1.0).contains(&random.unit()));
            prop_assert!((0.0..1.0).contains(&chance(seed, &parts)));
            prop_assert_eq!(chance(seed, &parts), chance(seed, &parts));
        }
    }

    #[test]
    fn chance_is_as_frequent_as_it_says() {
        let hits = (0..100_000).filter(|&key| chance(1, &[7, key]) < 0.2).count();
        assert!((19_000..21_000).contains(&hits), "{hits}");
    }
}

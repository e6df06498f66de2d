//! CLOCK_MONOTONIC → CLOCK_REALTIME, as the logs of other programs have it.
//!
//! A time server slews both clocks alike and steps only REALTIME. So their difference is constant but for steps, and
//! the nearest bracket says which one holds: right to about a µs, except between the two brackets, a second apart, that
//! a step came between.

use crate::event::HostClock;

/// What CLOCK_REALTIME was at times of CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WallClock {
    /// CLOCK_MONOTONIC ns, increasing, and REALTIME − MONOTONIC.
    offsets: Vec<(u64, i64)>,
}

impl WallClock {
    /// Takes the next bracket in; one without REALTIME says nothing.
    pub fn push(&mut self, bracket: &HostClock) {
        if let Some(realtime_ns) = bracket.realtime_ns {
            self.push_pair(bracket.monotonic_ns, realtime_ns);
        }
    }

    /// Takes in one instant on both clocks, in ns.
    pub fn push_pair(&mut self, monotonic_ns: u64, realtime_ns: u64) {
        let offset_ns = i128::from(realtime_ns) - i128::from(monotonic_ns);
        let is_next = self.offsets.last().is_none_or(|(last, _)| *last < monotonic_ns);
        if let Some(offset_ns) = i64::try_from(offset_ns).ok().filter(|_| is_next) {
            self.offsets.push((monotonic_ns, offset_ns));
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// CLOCK_REALTIME ns since the epoch; `None` where nothing is known.
    #[must_use]
    pub fn realtime_ns(&self, monotonic_ns: u64) -> Option<u64> {
        let after = self.offsets.partition_point(|(at, _)| *at <= monotonic_ns);
        let candidates = [after.checked_sub(1), Some(after)].into_iter().flatten();
        let near = candidates
            .filter_map(|i| Some((self.offsets.get(i)?.0.abs_diff(monotonic_ns), i)))
            .min_by_key(|(distance, _)| *distance)?
            .1;
        monotonic_ns.checked_add_signed(self.offset_ns(near)?)
    }

    /// The middle one of a bracket's and its neighbours' offsets: a bracket that was interrupted between its readings
    /// is wrong alone, and a step has two of the three on its side.
    fn offset_ns(&self, i: usize) -> Option<i64> {
        let neighbours = i.checked_sub(1).and_then(|first| self.offsets.get(first..=first + 2));
        match neighbours {
            Some(&[(_, a), (_, b), (_, c)]) => Some(a.max(b).min(a.min(b).max(c))),
            _ => Some(self.offsets.get(i)?.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn clock(offsets: &[u64]) -> WallClock {
        let mut clock = WallClock::default();
        for (second, offset) in (1..).zip(offsets) {
            clock.push_pair(second * S, second * S + offset);
        }
        clock
    }

    #[test]
    fn nothing_is_known_without_brackets() {
        assert_eq!(WallClock::default().realtime_ns(5), None);
        let mut clock = WallClock::default();
        clock.push(&HostClock {
            raw_before_ns: 1,
            monotonic_ns: 2,
            raw_after_ns: 3,
            realtime_ns: None,
            boottime_ns: None,
        });
        assert!(clock.is_empty());
    }

    #[test]
    fn the_nearest_bracket_holds_before_and_behind_all_too() {
        let clock = clock(&[7]);
        assert_eq!(clock.realtime_ns(0), Some(7));
        assert_eq!(clock.realtime_ns(90 * S), Some(90 * S + 7));
        assert_eq!(clock.realtime_ns(u64::MAX), None);
    }

    #[test]
    fn steps_are_followed_and_interrupted_brackets_are_not() {
        let clock = clock(&[0, 0, 5 * S, 5 * S, 5 * S + 9_000_000, 5 * S, 5 * S]);
        assert_eq!(clock.realtime_ns(2 * S + S / 4), Some(2 * S + S / 4));
        assert_eq!(clock.realtime_ns(3 * S - S / 4), Some(8 * S - S / 4));
        assert_eq!(clock.realtime_ns(5 * S), Some(10 * S));
    }
}

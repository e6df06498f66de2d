//! CLOCK_MONOTONIC_RAW → CLOCK_MONOTONIC, and when the machine was suspended or its clocks stepped.
//!
//! NTP slews MONOTONIC and not RAW, so devices are fitted to RAW and their times taken to MONOTONIC here, by straight
//! lines between brackets (RAW, MONOTONIC, RAW). Where the slew changed by Δr between two brackets Δt apart, the line
//! is off by at most Δr·Δt/4: 2.5 µs at 500 ppm and 50 brackets a second.

use super::RawTime;
use super::burst::MAX_NS;
use crate::event::HostClock;

/// Where brackets do not say better, NTP may slew by this much (ns per ns).
const SLEW: f64 = 500e-6;
/// BOOTTIME − MONOTONIC grows by more than this over a suspend.
const SUSPEND_NS: i64 = 1_000_000;
/// A bracket was interrupted when its half gap is above this many times the tightest, plus this many ns.
const WIDE: f64 = 4.0;
const WIDE_NS: f64 = 200.0;
/// MONOTONIC − RAW changes faster than this over a step only (ns per ns).
const MAX_SLEW: f64 = 2e-3;
/// How far to look for a bracket that was not interrupted.
const LOOK: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Bracket {
    raw_ns: i64,
    /// MONOTONIC − RAW.
    offset_ns: i64,
    half_gap_ns: f64,
    /// Brackets between which MONOTONIC did not step have the same number.
    run: u32,
}

impl Bracket {
    /// Whether MONOTONIC stepped between this bracket and a later one.
    fn is_stepped(&self, later: &Self) -> bool {
        let slewed = MAX_SLEW * (later.raw_ns - self.raw_ns) as f64;
        (later.offset_ns - self.offset_ns).abs() as f64 > slewed + self.half_gap_ns + later.half_gap_ns
    }

    /// Rate of MONOTONIC − RAW from this bracket to a later one.
    fn slope_to(&self, later: &Self) -> f64 {
        (later.offset_ns - self.offset_ns) as f64 / (later.raw_ns - self.raw_ns) as f64
    }
}

#[derive(Debug, Default)]
pub(super) struct HostMap {
    /// By `raw_ns`, strictly increasing.
    brackets: Vec<Bracket>,
    tightest_ns: f64,
    /// RAW and BOOTTIME − MONOTONIC of the newest bracket that had BOOTTIME.
    boot: Option<(i64, i64)>,
    /// Intervals of RAW in which the machine was suspended once, or MONOTONIC stepped.
    breaks: Vec<(i64, i64)>,
}

impl HostMap {
    /// Takes the next bracket in; one with impossible times is left out.
    pub(super) fn push(&mut self, clock: &HostClock) {
        let times = [clock.raw_before_ns, clock.raw_after_ns, clock.monotonic_ns].map(i64::try_from);
        let [Ok(before), Ok(after), Ok(monotonic)] = times else { return };
        if after < before
            || after.max(monotonic) > MAX_NS
            || self.brackets.last().is_some_and(|last| last.raw_ns >= before)
        {
            return;
        }
        let raw_ns = before + (after - before) / 2;
        let half_gap_ns = (after - before) as f64 / 2.0;
        let is_first = self.brackets.is_empty();
        self.tightest_ns = if is_first { half_gap_ns } else { self.tightest_ns.min(half_gap_ns) };
        let mut bracket = Bracket { raw_ns, offset_ns: monotonic - raw_ns, half_gap_ns, run: 0 };
        if let Some(last) = self.brackets.last() {
            bracket.run = last.run;
            if last.is_stepped(&bracket) {
                bracket.run = last.run.wrapping_add(1);
                self.breaks.push((last.raw_ns, raw_ns));
            }
        }
        self.brackets.push(bracket);
        let Some(boottime) = clock.boottime_ns.and_then(|ns| i64::try_from(ns).ok()) else { return };
        let asleep = boottime.min(MAX_NS) - monotonic;
        if let Some((since, before)) = self.boot.replace((raw_ns, asleep))
            && asleep - before > SUSPEND_NS
        {
            self.breaks.push((since, raw_ns));
        }
    }

    pub(super) fn forget_all_but(&mut self, brackets: usize) {
        if self.brackets.len() > 2 * brackets {
            self.brackets.drain(..self.brackets.len() - brackets);
        }
    }

    /// Whether neither a suspend nor a step lies, or may lie, between two RAW times.
    pub(super) fn is_unbroken(&self, from: i64, until: i64) -> bool {
        let later = self.breaks.partition_point(|&(_, by)| by <= from);
        self.breaks[later..].iter().all(|&(since, _)| until <= since)
    }

    /// RAW ns at a time of CLOCK_MONOTONIC, and what it is right within.
    pub(super) fn raw(&self, monotonic_ns: u64) -> Option<RawTime> {
        let ns = i64::try_from(monotonic_ns).ok().filter(|ns| *ns <= MAX_NS)?;
        let after = self.brackets.partition_point(|bracket| bracket.raw_ns + bracket.offset_ns <= ns);
        let near = self.brackets.get(after.saturating_sub(1))?;
        // The offset changes by less than 1 ns over what the guess is off by, some hundred ns.
        let guess = RawTime { ns: ns - near.offset_ns, fraction_ns: 0.0, bound_ns: 0.0 };
        let (mapped, bound_ns) = self.monotonic(guess)?;
        let off = ns - i64::try_from(mapped).ok()?;
        Some(RawTime { ns: guess.ns.checked_add(off)?, fraction_ns: 0.0, bound_ns: bound_ns as f64 + 1.0 })
    }

    /// CLOCK_MONOTONIC ns and what they are right within; `None` without brackets, in a step of a clock, or before its
    /// zero.
    pub(super) fn monotonic(&self, raw: RawTime) -> Option<(u64, u64)> {
        if !(0..=MAX_NS).contains(&raw.ns) {
            return None;
        }
        let (before, after) = self.brackets.split_at(self.brackets.partition_point(|b| b.raw_ns <= raw.ns));
        let run = match (before.last(), after.first()) {
            // In the midst of a step.
            (Some(left), Some(right)) if left.run != right.run => return None,
            (Some(near), _) | (None, Some(near)) => near.run,
            (None, None) => return None,
        };
        let left = self.nearest(before.iter().rev().take_while(|bracket| bracket.run == run));
        let right = self.nearest(after.iter().take_while(|bracket| bracket.run == run));
        let (offset_ns, bound_ns) = match (left, right) {
            ([Some(left), beyond_left], [Some(right), beyond_right]) => {
                let slope = left.slope_to(right);
                let bend = match (beyond_left, beyond_right) {
                    (Some(l), Some(r)) => (l.slope_to(left) - right.slope_to(r)).abs(),
                    (Some(l), None) => (l.slope_to(left) - slope).abs(),
                    (None, Some(r)) => (right.slope_to(r) - slope).abs(),
                    (None, None) => SLEW,
                };
                // Where the rate changed by `bend` between the two, the line is off by at most a quarter of that.
                let off = bend * (right.raw_ns - left.raw_ns) as f64 / 4.0;
                let offset = left.offset_ns as f64 + slope * (raw.ns - left.raw_ns) as f64;
                (offset, left.half_gap_ns.max(right.half_gap_ns) + off)
            }
            ([Some(near), beyond], _) | (_, [Some(near), beyond]) => {
                let distance = (raw.ns - near.raw_ns) as f64;
                let slope = beyond.map_or(0.0, |beyond| beyond.slope_to(near));
                (near.offset_ns as f64 + slope * distance, near.half_gap_ns + SLEW * distance.abs())
            }
            _ => return None,
        };
        let ns = i128::from(raw.ns) + (raw.fraction_ns + offset_ns).round() as i128;
        Some((u64::try_from(ns).ok()?, (raw.bound_ns + bound_ns).ceil() as u64 + 1))
    }

    /// The two nearest brackets that were not interrupted; where there are none near, the nearest of all.
    fn nearest<'a>(&self, outwards: impl Iterator<Item = &'a Bracket> + Clone) -> [Option<&'a Bracket>; 2] {
        let limit = self.tightest_ns * WIDE + WIDE_NS;
        let mut tight = outwards.clone().take(LOOK).filter(|bracket| bracket.half_gap_ns <= limit);
        match (tight.next(), tight.next()) {
            (None, _) => {
                let mut all = outwards;
                [all.next(), all.next()]
            }
            (first, second) => [first, second],
        }
    }
}

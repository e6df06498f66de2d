//! One burst of brackets as bounds on θ = host − device.
//!
//! A reading d is the device's time rounded down to its quantum q, and f32 rounded it once more by at most ε. It was
//! taken between the host times h0 and h1. With the rate r of θ, a burst's readings bound θ at the device time d₀:
//! `max_j (h0_j − d_j + r·(d₀ − d_j) − ε_j) − q ≤ θ(d₀) ≤ min_j (h1_j − d_j + r·(d₀ − d_j) + ε_j)`.
//! Without r, a preemption of 5 ms inside a burst would move a bound by 1 µs at 210 ppm.

use tracer_abi::mark::ClockReading;

use super::filter::TIGHT_NS;
use super::quantum::Shown;
use crate::event::mark::ClockBurst;

/// Times beyond this (73 years) are no times; below it, sums and differences fit.
pub(super) const MAX_NS: i64 = 1 << 61;

/// Whether f32 milliseconds are a time between two events: not negative, at most about a year.
pub(super) fn is_elapsed(ms: f32) -> bool {
    (0.0..=3e10).contains(&ms)
}

/// Device ns of f32 milliseconds.
pub(super) fn ms_to_ns(ms: f32) -> f64 {
    f64::from(ms) * 1e6
}

/// Largest rounding error of f32 milliseconds, in ns: half a unit in the last place, 2^(⌊log2 ms⌋ − 24) ms. 31 ns
/// up to a second, which is why bases are that close.
#[must_use]
pub fn rounding_ns(ms: f32) -> f64 {
    let ms = ms.abs();
    (f64::from(ms.next_up()) - f64::from(ms)) / 2.0 * 1e6
}

/// Whether with this step of the device's clock it is rounding, not delays, that makes most of what a burst leaves open.
pub(super) fn is_coarse(quantum_ns: f64) -> bool {
    quantum_ns > TIGHT_NS
}

/// One bracket: the device showed `device_ns` between two host times.
#[derive(Clone, Copy, Debug)]
struct Reading {
    /// CLOCK_MONOTONIC_RAW ns.
    before_ns: i64,
    after_ns: i64,
    /// Device ns since the base.
    elapsed_ns: f64,
    rounding_ns: f64,
}

impl Reading {
    fn new(raw: &ClockReading) -> Option<Self> {
        let elapsed_ms = f32::from_bits(raw.elapsed_ms_bits);
        let before_ns = i64::try_from(raw.h0_raw_ns).ok()?;
        let after_ns = i64::try_from(raw.h1_raw_ns).ok()?;
        let sane = is_elapsed(elapsed_ms) && before_ns <= after_ns && after_ns <= MAX_NS;
        sane.then(|| Self {
            before_ns,
            after_ns,
            elapsed_ns: ms_to_ns(elapsed_ms),
            rounding_ns: rounding_ns(elapsed_ms),
        })
    }

    fn round_trip_ns(&self) -> i64 {
        self.after_ns - self.before_ns
    }
}

/// A burst with at least one sane reading.
#[derive(Clone, Debug)]
pub(super) struct Burst {
    /// Number of the base that it counts from.
    pub(super) base: u32,
    base_ns: i64,
    /// What rounding may have added up to in `base_ns` since the chain began.
    pub(super) chain_rounding_ns: f64,
    pub(super) chain: u32,
    /// Step of the device's clock.
    pub(super) quantum_ns: f64,
    readings: Vec<Reading>,
    /// The reading with the shortest round trip: where the bounds are given.
    best: Reading,
}

/// Bounds on θ at one device time, all in ns and relative to an origin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Device time.
    pub(super) x: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    /// Step of the device's clock.
    pub(super) quantum: f64,
    /// The shortest there and back.
    pub(super) round_trip: f64,
}

impl Bounds {
    /// Negative: the burst contradicts itself.
    pub(super) fn width(&self) -> f64 {
        self.high - self.low
    }

    pub(super) fn mid(&self) -> f64 {
        (self.high + self.low) / 2.0
    }
}

/// Where a segment counts from. Absolute times are integers; floating point only ever sees differences from here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Origin {
    pub(super) device_ns: i64,
    /// CLOCK_MONOTONIC_RAW ns.
    pub(super) host_ns: i64,
}

impl Origin {
    /// θ, relative to the origin's own, of a host time and a base.
    pub(super) fn theta(&self, host_ns: i64, base_ns: i64) -> f64 {
        ((host_ns - self.host_ns) - (base_ns - self.device_ns)) as f64
    }
}

/// The base that a burst counts from.
#[derive(Clone, Copy, Debug)]
pub(super) struct BaseTime {
    /// Device time in ns since the first base of its chain.
    pub(super) device_ns: i64,
    /// What rounding may have added up to since then, in ns.
    pub(super) rounding_ns: f64,
    /// Bases whose distance is known. A lost re-base begins a new chain.
    pub(super) chain: u32,
}

impl Burst {
    pub(super) fn new(base: &BaseTime, burst: &ClockBurst) -> Option<Self> {
        let readings: Vec<Reading> = burst.readings.iter().filter_map(Reading::new).collect();
        let best = readings.iter().copied().min_by_key(Reading::round_trip_ns)?;
        Some(Self {
            base: burst.base,
            base_ns: base.device_ns,
            chain_rounding_ns: base.rounding_ns,
            chain: base.chain,
            quantum_ns: 0.0,
            readings,
            best,
        })
    }

    /// What the readings so close to the base that f32 resolves single ns show of the quantum; `rate_slack` as in
    /// [`bounds`](Self::bounds), about 0.
    pub(super) fn shown(&self, rate_slack: f64) -> Shown {
        let readings: Vec<Reading> = self.readings.iter().copied().filter(|r| r.rounding_ns < 0.25).collect();
        let ns: Vec<u64> = readings.iter().map(|reading| reading.elapsed_ns.round() as u64).collect();
        // They can only all be true if the quantum is as large as what is missing.
        let bounds =
            Self { readings, quantum_ns: 0.0, ..self.clone() }.bounds(self.origin(), 0.0, rate_slack);
        Shown::new(ns, (-bounds.width()).max(0.0) as u64)
    }

    pub(super) fn origin(&self) -> Origin {
        Origin { device_ns: self.base_ns + self.best.elapsed_ns as i64, host_ns: self.best.before_ns }
    }

    /// CLOCK_MONOTONIC_RAW ns at the burst.
    pub(super) fn host_ns(&self) -> i64 {
        self.best.before_ns
    }

    /// Device time relative to the origin, in ns.
    pub(super) fn x(&self, origin: Origin) -> f64 {
        self.x_of(&self.best, origin)
    }

    fn x_of(&self, reading: &Reading, origin: Origin) -> f64 {
        (self.base_ns - origin.device_ns) as f64 + reading.elapsed_ns
    }

    /// Bounds by all readings, projected with the rate of θ (ns per ns), which is right within `rate_slack`.
    pub(super) fn bounds(&self, origin: Origin, rate: f64, rate_slack: f64) -> Bounds {
        let x = self.x(origin);
        let mut bounds = Bounds {
            x,
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
            quantum: self.quantum_ns,
            round_trip: self.best.round_trip_ns() as f64,
        };
        for reading in &self.readings {
            let distance = x - self.x_of(reading, origin);
            let theta = |host_ns| origin.theta(host_ns, self.base_ns) - reading.elapsed_ns + rate * distance;
            let slack = reading.rounding_ns + rate_slack * distance.abs();
            bounds.low = bounds.low.max(theta(reading.before_ns) - slack);
            bounds.high = bounds.high.min(theta(reading.after_ns) + slack);
        }
        bounds.low -= self.quantum_ns;
        bounds
    }
}

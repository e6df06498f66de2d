//! One burst of brackets as bounds on θ = host − device.

use tracer_abi::mark::ClockReading;

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

/// Largest rounding error of f32 milliseconds, in ns: half a unit in the last place.
pub(super) fn rounding_ns(ms: f32) -> f64 {
    let ms = ms.abs();
    (f64::from(ms.next_up()) - f64::from(ms)) / 2.0 * 1e6
}

/// One bracket: the device showed `device_ns` between two host times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
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
    base_ns: i64,
    /// What rounding may have added up to in `base_ns` since the chain began.
    pub(super) chain_rounding_ns: f64,
    pub(super) chain: u32,
    readings: Vec<Reading>,
    /// The reading with the shortest round trip: where the bounds are given.
    best: Reading,
}

/// Bounds on θ at one device time, all in ns and relative to an origin; rounding included, the quantum not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Device time.
    pub(super) x: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Bounds {
    pub(super) fn width(&self) -> f64 {
        self.high - self.low
    }

    pub(super) fn mid(&self) -> f64 {
        (self.high + self.low) / 2.0
    }
}

/// Where a segment counts from, so that floating point only ever sees differences.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Origin {
    pub(super) device_ns: i64,
    /// CLOCK_MONOTONIC_RAW ns.
    pub(super) host_ns: i64,
}

impl Burst {
    pub(super) fn new(base_ns: i64, chain_rounding_ns: f64, chain: u32, burst: &ClockBurst) -> Option<Self> {
        let readings: Vec<Reading> = burst.readings.iter().filter_map(Reading::new).collect();
        let best = readings.iter().copied().min_by_key(Reading::round_trip_ns)?;
        Some(Self { base_ns, chain_rounding_ns, chain, readings, best })
    }

    pub(super) fn origin(&self) -> Origin {
        Origin { device_ns: self.base_ns + self.best.elapsed_ns as i64, host_ns: self.best.before_ns }
    }

    /// CLOCK_MONOTONIC_RAW ns at the burst.
    pub(super) fn host_ns(&self) -> i64 {
        self.best.before_ns
    }

    fn x(&self, reading: &Reading, origin: Origin) -> f64 {
        (self.base_ns - origin.device_ns) as f64 + reading.elapsed_ns
    }

    /// Bounds by the shortest round trip alone: needs no rate.
    pub(super) fn best_bounds(&self, origin: Origin) -> Bounds {
        let x = self.x(&self.best, origin);
        let theta = |host_ns: i64| (host_ns - origin.host_ns) as f64 - x;
        let rounding = self.best.rounding_ns;
        Bounds { x, low: theta(self.best.before_ns) - rounding, high: theta(self.best.after_ns) + rounding }
    }

    /// Bounds by all readings, projected with the rate of θ (ns per ns), which is right within `rate_slack`.
    pub(super) fn bounds(&self, origin: Origin, rate: f64, rate_slack: f64) -> Bounds {
        let mut bounds = self.best_bounds(origin);
        for reading in &self.readings {
            let x = self.x(reading, origin);
            let theta = |host_ns: i64| (host_ns - origin.host_ns) as f64 - x;
            let distance = bounds.x - x;
            let slack = reading.rounding_ns + rate_slack * distance.abs();
            bounds.low = bounds.low.max(theta(reading.before_ns) + rate * distance - slack);
            bounds.high = bounds.high.min(theta(reading.after_ns) + rate * distance + slack);
        }
        bounds
    }
}

/// Smallest quantum assumed where readings show none (they may show a multiple of it, which is safe).
const FINEST_QUANTUM_NS: u64 = 32;
/// Quantum assumed while too few readings say anything: the coarsest known.
const COARSEST_QUANTUM_NS: u64 = 1_000;
/// Readings needed to tell the quantum.
const ENOUGH_READINGS: usize = 8;

/// The step of the device's clock in ns, from readings so close to their base that f32 resolves single ns: the
/// greatest common divisor, so never less than the true one for a quantum of whole ns.
pub(super) fn quantum_ns(bursts: &[Burst]) -> f64 {
    let readings = bursts.iter().flat_map(|burst| &burst.readings);
    let mut close = 0;
    let mut divisor = 0;
    for reading in readings.filter(|reading| reading.rounding_ns < 0.25 && reading.elapsed_ns >= 1.0) {
        close += 1;
        divisor = gcd(divisor, reading.elapsed_ns.round() as u64);
    }
    if close < ENOUGH_READINGS {
        return COARSEST_QUANTUM_NS as f64;
    }
    divisor.max(FINEST_QUANTUM_NS) as f64
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

//! An interval Kalman filter of θ = host − device, and its smoother.
//!
//! State [θ, r] with r = dθ/dt and the white-noise acceleration model (Bar-Shalom, Li, Kirubarajan, "Estimation with
//! Applications to Tracking and Navigation", 2001, §6.2.2) plus a random walk of θ:
//! `F = [1 Δ; 0 1]`, `Q = [q_θ·Δ + q_r·Δ³/3, q_r·Δ²/2; q_r·Δ²/2, q_r·Δ]`.
//!
//! A burst is an interval [l, u] and no point, the quantum included. With h, half the shortest width within two minutes (the delay that
//! every exchange has, h each way), θ is at l + h when nothing delayed the way there and at u − h when nothing delayed
//! the way back. What is left of the interval, e = (u − h) − (l + h), says how much was delayed, not on which way:
//! - e ≤ 1.5 µs: z = middle, R = s₀² + e²/12 (uniform);
//! - expected θ outside [l + h, u − h]: z = the nearer end, R = 4 s₀²;
//! - expected θ inside: z = middle, R = s₀² + 4 e² (delays of a queue are no white noise: hardly any pull);
//! - a step of the clock beyond 1.5 µs: as inside, and h = 0, since ends are then by chance of the step;
//! - expected θ not known within the interval (P > e²/12): z = middle, R = s₀² + e²/12.
//!
//! Whatever comes of it is kept inside [l, u], where the truth is.

use std::collections::VecDeque;

use super::burst::{Bounds, is_coarse};

/// ns/s of one part in a million.
pub(super) const PPM: f64 = 1e3;
const NS: f64 = 1e9;
/// s₀: scatter of an exchange that nothing delayed, in ns.
const SCATTER_NS: f64 = 350.0;
/// e up to which a burst counts as a point, in ns.
pub(super) const TIGHT_NS: f64 = 1_500.0;
/// q_θ: random walk of θ, in ns²/s (1e-4 µs²/s).
const WALK: f64 = 1e2;
/// q_r when it cannot be chosen with hindsight, in (ns/s)²/s (3e-2 ppm²/s).
pub(super) const WANDER_LIVE: f64 = 3e-2 * PPM * PPM;
/// Those to choose from with hindsight, in ppm²/s: a crystal at rest, in a room, under changing load; the others are
/// for clocks that are none.
const WANDERS: [f64; 7] = [1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3];
/// Where the shortest round trip is looked for, in device ns.
const FLOOR_REACH_NS: f64 = 120e9;
/// θ and r are known this badly before the first of several bursts: 5 µs about the tightest of the first eight, or what
/// that leaves open, 20 ppm.
const START_THETA_NS: f64 = 5e3;
const START_RATE: f64 = 20.0 * PPM;
const START_BURSTS: usize = 8;
/// Passes of the smoother; the first two find the ends that the later ones look from.
const PASSES: usize = 3;

/// θ in ns, its rate in ns/s, and their covariance.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub(super) theta: f64,
    pub(super) rate: f64,
    pub(super) var_theta: f64,
    pub(super) cov: f64,
    pub(super) var_rate: f64,
}

/// What a burst says of θ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measurement {
    pub(super) z: f64,
    pub(super) variance: f64,
    /// Nearly nothing was delayed.
    pub(super) tight: bool,
    /// It says where θ is, not only where it may be.
    pub(super) tells: bool,
}

impl Measurement {
    /// With half the floor of the round trips, the θ to judge by, and its variance where that is a forecast.
    pub(super) fn new(bounds: &Bounds, half_floor: f64, expected: f64, forecast: Option<f64>) -> Self {
        let middle = bounds.mid();
        let excess = (bounds.width() - 2.0 * half_floor).max(0.0);
        let (low, high) = (middle - excess / 2.0, middle + excess / 2.0);
        let uniform = excess * excess / 12.0;
        let scatter = SCATTER_NS * SCATTER_NS;
        let tight = excess <= TIGHT_NS;
        let (z, variance, tells) = if tight || forecast.is_some_and(|variance| variance > uniform) {
            (middle, scatter + uniform, tight)
        } else if expected < low && !is_coarse(bounds.quantum) {
            (low, 4.0 * scatter, true)
        } else if expected > high && !is_coarse(bounds.quantum) {
            (high, 4.0 * scatter, true)
        } else {
            (middle, scatter + 4.0 * excess * excess, false)
        };
        Self { z, variance, tight, tells }
    }

    /// How far θ is from the forecast, in ns, beyond what chance explains (three standard deviations).
    pub(super) fn surprise(&self, forecast: &State) -> f64 {
        let usual = 3.0 * (forecast.var_theta + self.variance).sqrt();
        if self.tells { ((self.z - forecast.theta).abs() - usual).max(0.0) } else { 0.0 }
    }
}

impl State {
    pub(super) fn new(theta: f64, sd_theta: f64, rate: f64, sd_rate: f64) -> Self {
        Self { theta, rate, var_theta: sd_theta * sd_theta, cov: 0.0, var_rate: sd_rate * sd_rate }
    }

    /// `dt_ns` later.
    pub(super) fn predict(&self, dt_ns: f64, wander: f64) -> Self {
        let dt = dt_ns / NS;
        Self {
            theta: self.theta + self.rate * dt,
            rate: self.rate,
            var_theta: self.var_theta
                + dt * (2.0 * self.cov + dt * self.var_rate + WALK + wander * dt * dt / 3.0),
            cov: self.cov + dt * (self.var_rate + wander * dt / 2.0),
            var_rate: self.var_rate + wander * dt,
        }
    }

    /// Takes a measurement in, and keeps θ inside what is certain.
    pub(super) fn update(&self, measurement: &Measurement, certain: (f64, f64)) -> Self {
        let innovation = measurement.z - self.theta;
        let s = self.var_theta + measurement.variance;
        let (k0, k1) = (self.var_theta / s, self.cov / s);
        let theta = self.theta + k0 * innovation;
        Self {
            theta: if certain.0 <= certain.1 { theta.clamp(certain.0, certain.1) } else { theta },
            rate: self.rate + k1 * innovation,
            var_theta: (1.0 - k0) * self.var_theta,
            cov: (1.0 - k0) * self.cov,
            var_rate: self.var_rate - k1 * self.cov,
        }
    }

    pub(super) fn sd_theta(&self) -> f64 {
        self.var_theta.max(0.0).sqrt()
    }

    pub(super) fn sd_rate(&self) -> f64 {
        self.var_rate.max(0.0).sqrt()
    }
}

/// The shortest width of the last two minutes, while bursts come.
#[derive(Clone, Debug, Default)]
pub(super) struct Floor {
    /// (x, width), both increasing: those that may be the shortest once older ones are out of reach.
    widths: VecDeque<(f64, f64)>,
}

impl Floor {
    /// Half the floor, this burst included; 0 where chance of the quantum and not delays makes the width of a burst.
    pub(super) fn half(&mut self, bounds: &Bounds) -> f64 {
        let is_coarse = is_coarse(bounds.quantum);
        let width = if is_coarse { bounds.round_trip } else { bounds.width() };
        while self.widths.back().is_some_and(|back| back.1 >= width) {
            self.widths.pop_back();
        }
        self.widths.push_back((bounds.x, width));
        while self.widths.front().is_some_and(|front| front.0 < bounds.x - FLOOR_REACH_NS) {
            self.widths.pop_front();
        }
        self.widths.front().filter(|_| !is_coarse).map_or(0.0, |front| front.1 / 2.0)
    }
}

/// Half the floor at each of some bursts, by those before and after it.
fn half_floors(bounds: &[Bounds]) -> Vec<f64> {
    let mut before = Floor::default();
    let mut halves: Vec<f64> = bounds.iter().map(|bounds| before.half(bounds)).collect();
    let mut after = Floor::default();
    for (half, bounds) in halves.iter_mut().zip(bounds).rev() {
        *half = half.min(after.half(&Bounds { x: -bounds.x, ..*bounds }));
    }
    halves
}

/// The states at the bursts of a stretch, and the q_r that explains them best.
#[derive(Debug, Default)]
pub(super) struct Smoothed {
    pub(super) states: Vec<State>,
    pub(super) wander: f64,
}

/// The states at bursts of one stretch, each by all of them. `rate` (ns/s) and its standard deviation are what is
/// known of the rate.
pub(super) fn smooth(bounds: &[Bounds], rate: f64, sd_rate: f64) -> Smoothed {
    let trend = |x: f64| rate * x / NS;
    let level: Vec<Bounds> =
        bounds.iter().map(|b| Bounds { low: b.low - trend(b.x), high: b.high - trend(b.x), ..*b }).collect();
    let halves = half_floors(&level);
    let first = level.iter().take(START_BURSTS).min_by(|a, b| a.width().total_cmp(&b.width()));
    let Some(first) = first else { return Smoothed::default() };
    let (first, open) = (first.mid(), first.width() / 2.0);
    let smoother = Smoother { bounds: &level, halves: &halves };
    let start = State::new(first, START_THETA_NS.max(open), 0.0, sd_rate.max(START_RATE));
    let pass = |wander: f64| (wander * PPM * PPM, smoother.forward(start, wander * PPM * PPM, None));
    let passes = WANDERS.map(pass);
    let best = passes.into_iter().max_by(|(_, a), (_, b)| a.log_likelihood.total_cmp(&b.log_likelihood));
    let Some((wander, pass)) = best else { return Smoothed::default() };
    let mut states = pass.smoothed();
    for _ in 1..PASSES {
        let expected: Vec<f64> = states.iter().map(|state| state.theta).collect();
        let start = State { theta: expected.first().copied().unwrap_or(first), ..start };
        states = smoother.forward(start, wander, Some(&expected)).smoothed();
    }
    for (state, bounds) in states.iter_mut().zip(bounds) {
        state.theta += trend(bounds.x);
        state.rate += rate;
    }
    Smoothed { states, wander }
}

struct Smoother<'a> {
    bounds: &'a [Bounds],
    halves: &'a [f64],
}

/// States before and after each burst was taken in.
struct Pass {
    dt_ns: Vec<f64>,
    predicted: Vec<State>,
    filtered: Vec<State>,
    /// Of the innovations of tight bursts.
    log_likelihood: f64,
}

impl Smoother<'_> {
    /// `expected`: the curve to judge intervals by; `None`: the filter's own forecast.
    fn forward(&self, start: State, wander: f64, expected: Option<&[f64]>) -> Pass {
        /// The first innovations show where it started, not how it wanders; an outlier is worth five σ.
        const SETTLED: usize = 4;
        const OUTLIER: f64 = 25.0;
        let n = self.bounds.len();
        let mut pass = Pass {
            dt_ns: Vec::with_capacity(n),
            predicted: Vec::with_capacity(n),
            filtered: Vec::with_capacity(n),
            log_likelihood: 0.0,
        };
        let (mut state, mut x) = (start, self.bounds.first().map_or(0.0, |first| first.x));
        for (i, (bounds, half)) in self.bounds.iter().zip(self.halves).enumerate() {
            let dt_ns = bounds.x - x;
            x = bounds.x;
            let predicted = state.predict(dt_ns, wander);
            let measurement = match expected.and_then(|expected| expected.get(i)) {
                Some(expected) => Measurement::new(bounds, *half, *expected, None),
                None => Measurement::new(bounds, *half, predicted.theta, Some(predicted.var_theta)),
            };
            if measurement.tight && i >= SETTLED {
                let s = predicted.var_theta + measurement.variance;
                let innovation = measurement.z - predicted.theta;
                pass.log_likelihood -= 0.5 * ((innovation * innovation / s).min(OUTLIER) + s.ln());
            }
            state = predicted.update(&measurement, (bounds.low, bounds.high));
            pass.dt_ns.push(dt_ns);
            pass.predicted.push(predicted);
            pass.filtered.push(state);
        }
        pass
    }
}

impl Pass {
    /// Rauch, Tung and Striebel, "Maximum likelihood estimates of linear dynamic systems", 1965:
    /// `C = P·Fᵀ·P⁻¹(next)`, `x ← x + C·(x(next) − predicted(next))`, `P ← P + C·(P(next) − predicted P(next))·Cᵀ`.
    fn smoothed(self) -> Vec<State> {
        let mut states = self.filtered;
        for i in (1..states.len()).rev() {
            let (dt, predicted, next) = (self.dt_ns[i] / NS, self.predicted[i], states[i]);
            let state = &mut states[i - 1];
            let determinant = predicted.var_theta * predicted.var_rate - predicted.cov * predicted.cov;
            if determinant <= 0.0 {
                continue;
            }
            let f = [
                state.var_theta + dt * state.cov,
                state.cov,
                state.cov + dt * state.var_rate,
                state.var_rate,
            ];
            let inverse = [predicted.var_rate, -predicted.cov, predicted.var_theta].map(|v| v / determinant);
            let c = [
                f[0] * inverse[0] + f[1] * inverse[1],
                f[0] * inverse[1] + f[1] * inverse[2],
                f[2] * inverse[0] + f[3] * inverse[1],
                f[2] * inverse[1] + f[3] * inverse[2],
            ];
            let (theta, rate) = (next.theta - predicted.theta, next.rate - predicted.rate);
            let e = [
                next.var_theta - predicted.var_theta,
                next.cov - predicted.cov,
                next.var_rate - predicted.var_rate,
            ];
            state.theta += c[0] * theta + c[1] * rate;
            state.rate += c[2] * theta + c[3] * rate;
            let row = |a: f64, b: f64| (a * e[0] + b * e[1], a * e[1] + b * e[2]);
            let ((t0, t1), (r0, r1)) = (row(c[0], c[1]), row(c[2], c[3]));
            state.var_theta += c[0] * t0 + c[1] * t1;
            state.cov += c[2] * t0 + c[3] * t1;
            state.var_rate += c[2] * r0 + c[3] * r1;
        }
        states
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bursts of a clock with a constant rate: half a second apart, 8 µs wide, some delayed on the way there.
    fn line(rate: f64, delayed: &[f64]) -> Vec<Bounds> {
        let burst = |(i, delay): (usize, &f64)| {
            let x = i as f64 * 5e8;
            let theta = rate * x / NS;
            Bounds { x, low: theta - 4e3 - delay, high: theta + 4e3, quantum: 0.0, round_trip: 8e3 }
        };
        delayed.iter().enumerate().map(burst).collect()
    }

    #[test]
    fn delays_on_one_way_do_not_pull() {
        let delays: Vec<f64> =
            (0..120).map(|i| if i % 3 == 0 { 0.0 } else { 50e3 + 1e3 * f64::from(i) }).collect();
        let bounds = line(0.0, &delays);
        for state in smooth(&bounds, 0.0, 0.0).states {
            assert!(state.theta.abs() < 150.0, "{state:?}");
        }
    }

    proptest! {
        #[test]
        fn a_straight_line_is_found(rate in -300.0..300.0f64, guess in -5.0..5.0f64) {
            let bounds = line(rate * PPM, &[0.0; 60]);
            for (state, bounds) in smooth(&bounds, (rate + guess) * PPM, 0.0).states.iter().zip(&bounds) {
                prop_assert!((state.theta - rate * PPM * bounds.x / NS).abs() < 150.0, "{:?}", state);
                prop_assert!((state.rate / PPM - rate).abs() < 0.2, "{:?}", state);
            }
        }

        #[test]
        fn the_state_stays_within_what_is_certain_and_variances_stay_positive(
            delays in prop::collection::vec(prop::sample::select(vec![0.0, 500.0, 3e3, 40e3, 400e3]), 1..60),
        ) {
            let bounds = line(0.0, &delays);
            let mut state = State::new(bounds[0].mid(), 5e3, 0.0, 100.0 * PPM);
            let mut floor = Floor::default();
            for bounds in &bounds {
                let predicted = state.predict(5e8, WANDER_LIVE);
                let half = floor.half(bounds);
                let measured = Measurement::new(bounds, half, predicted.theta, Some(predicted.var_theta));
                state = predicted.update(&measured, (bounds.low, bounds.high));
                prop_assert!((bounds.low..=bounds.high).contains(&state.theta));
                prop_assert!(state.var_theta > 0.0 && state.var_rate > 0.0);
            }
        }
    }
}

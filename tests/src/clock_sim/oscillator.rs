//! The device's crystal and counter.

use super::{Config, Wander};
use crate::random::SplitMix;

const RATE_PPM: f64 = 210.0;
const STEP_SECONDS: f64 = 0.05;
#[expect(clippy::approx_constant, reason = "the reference draws up to this")]
const MOST_PHASE: f64 = 6.28;

pub(super) struct Oscillator {
    /// What wander has added to the device's time by each step.
    wandered_us: Vec<f64>,
    quantum_us: f64,
    late_quantum_us: f64,
    step_us: f64,
    half_us: f64,
}

impl Oscillator {
    pub(super) fn new(config: &Config, random: &mut SplitMix) -> Self {
        let n = ((config.seconds + 20.0) / STEP_SECONDS) as usize + 2;
        let time = |i: usize| i as f64 * STEP_SECONDS;
        let mut ppm = vec![0.0; n];
        if config.wander != Wander::Constant {
            let phase = random.uniform(0.0, MOST_PHASE);
            let mut walk = 0.0;
            for (i, ppm) in ppm.iter_mut().enumerate() {
                walk += random.normal(0.01 * STEP_SECONDS.sqrt());
                *ppm = 0.2 * (std::f64::consts::TAU * time(i) / 1200.0 + phase).sin() + walk;
            }
        }
        if config.wander == Wander::Thermal {
            for (share, change) in [(0.3, 4.0), (0.65, -4.0)] {
                for (i, ppm) in ppm.iter_mut().enumerate() {
                    let since = (time(i) - share * config.seconds).max(0.0);
                    *ppm += change * (1.0 - (-since / 25.0).exp());
                }
            }
        }
        let mut wandered_us = Vec::with_capacity(n);
        let mut sum = 0.0;
        for ppm in ppm {
            wandered_us.push(sum);
            sum += ppm * 1e-6 * STEP_SECONDS * 1e6;
        }
        Self {
            wandered_us,
            quantum_us: config.quantum_us,
            late_quantum_us: config.late_quantum_us.unwrap_or(config.quantum_us),
            step_us: config.step_us,
            half_us: config.seconds / 2.0 * 1e6,
        }
    }

    /// The device's time at a host time, as exact as it is.
    fn time(&self, host_us: f64) -> f64 {
        let at = host_us / (STEP_SECONDS * 1e6);
        let i = (at as usize).min(self.wandered_us.len() - 2);
        let (a, b) = (self.wandered_us[i], self.wandered_us[i + 1]);
        let step = if host_us >= self.half_us { self.step_us } else { 0.0 };
        host_us * (1.0 + RATE_PPM * 1e-6) + a + (b - a) * (at - i as f64) + step
    }

    /// What the device's counter shows at a host time.
    pub(super) fn read(&self, host_us: f64) -> f64 {
        let quantum = if host_us >= self.half_us { self.late_quantum_us } else { self.quantum_us };
        (self.time(host_us) / quantum).floor() * quantum
    }
}

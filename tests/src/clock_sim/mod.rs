//! A simulated GPU with a clock of its own: what bursts read of it, and what is true.
//!
//! The models are assumptions, no measurements. `tests/data/clock_sim.py` holds the same ones, and what it computes is
//! what this must compute. All times are µs, host times since the start on a clock that nothing disciplines.

pub mod classic;
pub mod conditions;
mod oscillator;
mod recording;

use oscillator::Oscillator;
pub use recording::{Estimate, Recording};

use crate::random::SplitMix;

/// How the device's rate wanders about 210 ppm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wander {
    Constant,
    /// ±0.2 ppm over 20 minutes and a random walk of 0.01 ppm/√s.
    Mild,
    /// The same, and the board heats at 30 % of the time and cools at 65 %: ±4 ppm with 25 s.
    Thermal,
}

/// What delays an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noise {
    Quiet,
    Standard,
    /// 35 % of bursts queue behind work on the device for 2 to 400 µs; 15 % of the time the host answers 3 µs and more
    /// late for 20 s; preemptions of ms.
    Busy,
    /// As busy, and more of it: 60 %.
    Awful,
}

impl Noise {
    /// Shares of exchanges that are held up (60 µs, exponential) and preempted (0.1 to 8 ms, Pareto).
    fn shares(self) -> (f64, f64) {
        match self {
            Self::Quiet => (0.01, 0.0005),
            Self::Standard => (0.04, 0.005),
            Self::Busy => (0.08, 0.01),
            Self::Awful => (0.25, 0.05),
        }
    }

    /// Share of bursts that find the device busy.
    fn busy(self) -> Option<f64> {
        match self {
            Self::Quiet | Self::Standard => None,
            Self::Busy => Some(0.35),
            Self::Awful => Some(0.6),
        }
    }
}

/// One simulation.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub seed: u64,
    pub seconds: f64,
    pub bursts_per_second: f64,
    /// Readings in a burst.
    pub readings: usize,
    /// Step of the device's clock.
    pub quantum_us: f64,
    /// From half time on, if it changes.
    pub late_quantum_us: Option<f64>,
    pub wander: Wander,
    pub noise: Noise,
    /// Least delay to the device, and back.
    pub there_us: f64,
    pub back_us: f64,
    /// The device's clock jumps by this at half time.
    pub step_us: f64,
    /// No bursts for this long from half time on.
    pub gap_seconds: f64,
    /// CLOCK_MONOTONIC is slewed by this for 10 s from half time on.
    pub slew_ppm: f64,
    pub queries: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 1,
            seconds: 600.0,
            bursts_per_second: 2.0,
            readings: 8,
            quantum_us: 0.5,
            late_quantum_us: None,
            wander: Wander::Mild,
            noise: Noise::Standard,
            there_us: 4.0,
            back_us: 4.0,
            step_us: 0.0,
            gap_seconds: 0.0,
            slew_ppm: 0.0,
            queries: 20_000,
        }
    }
}

/// A bracket: the host's time before and after, and the device's time in between.
#[derive(Clone, Copy, Debug)]
pub struct Bracket {
    pub before: f64,
    pub after: f64,
    /// When the device read its clock.
    pub event: f64,
    /// What it read.
    pub device: f64,
}

/// What a simulation came to.
pub struct Simulation {
    pub config: Config,
    oscillator: Oscillator,
    /// Each with [`Config::readings`] brackets.
    pub bursts: Vec<Vec<Bracket>>,
    /// Host times, in order, at which something happens on the device.
    pub queries: Vec<f64>,
}

impl Simulation {
    #[must_use]
    pub fn new(config: Config) -> Self {
        let mut random = SplitMix::new(config.seed);
        let oscillator = Oscillator::new(&config, &mut random);
        let count = (config.seconds * config.bursts_per_second) as usize;
        let readings = count * config.readings;
        let jitter = random.many(count, |random| random.uniform(0.0, 0.3));
        let start: Vec<f64> = jitter
            .iter()
            .enumerate()
            .map(|(i, jitter)| (i as f64 + jitter) / config.bursts_per_second * 1e6)
            .collect();
        let mut there = delays(&mut random, readings, config.noise);
        let mut back = delays(&mut random, readings, config.noise);
        if let Some(share) = config.noise.busy() {
            let busy = random.many(count, SplitMix::unit);
            let queued = random.many(readings, |random| random.uniform(2.0, 400.0));
            let epoch = |i: usize| (start[i] / 20e6) as usize;
            let epochs = (0..count).map(epoch).max().unwrap_or(0) + 2;
            let noisy = random.many(epochs, SplitMix::unit);
            let late = random.many(readings, |random| random.exponential(12.0) + 3.0);
            for i in 0..readings {
                let burst = i / config.readings;
                there[i] += if busy[burst] < share { queued[i] } else { 0.0 };
                back[i] += if noisy[epoch(burst)] < 0.15 { late[i] } else { 0.0 };
            }
        }
        let mut bursts = Vec::with_capacity(count);
        for (burst, &start) in start.iter().enumerate() {
            let mut before = start;
            let brackets = (burst * config.readings..(burst + 1) * config.readings).map(|i| {
                let event = before + config.there_us + there[i];
                let after = event + config.back_us + back[i];
                let bracket = Bracket { before, after, event, device: oscillator.read(event) };
                before = after + 1.0;
                bracket
            });
            bursts.push(brackets.collect());
        }
        let end = (config.seconds - 0.5) * 1e6;
        let mut queries = random.many(config.queries, |random| random.uniform(0.5e6, end));
        queries.sort_unstable_by(f64::total_cmp);
        let gap = config.seconds / 2.0 * 1e6;
        let is_in_gap =
            |burst: &Vec<Bracket>| burst[0].before >= gap && burst[0].before < gap + config.gap_seconds * 1e6;
        bursts.retain(|burst| !is_in_gap(burst));
        Self { config, oscillator, bursts, queries }
    }

    /// What the device's clock reads at a host time.
    #[must_use]
    pub fn read(&self, host: f64) -> f64 {
        self.oscillator.read(host)
    }

    /// CLOCK_MONOTONIC at a host time.
    #[must_use]
    pub fn monotonic(&self, host: f64) -> f64 {
        let begin = self.config.seconds / 2.0 * 1e6;
        host + self.config.slew_ppm * 1e-6 * (host - begin).clamp(0.0, 10e6)
    }
}

/// Log-normal about 0.5 µs, with the noise's tails.
fn delays(random: &mut SplitMix, n: usize, noise: Noise) -> Vec<f64> {
    let (held_up, preempted) = noise.shares();
    let mut delays = random.many(n, |random| (0.5f64.ln() + 0.8 * random.normal(1.0)).exp());
    let chance = random.many(n, SplitMix::unit);
    let tail = random.many(n, |random| random.exponential(60.0));
    for i in 0..n {
        delays[i] += if chance[i] < held_up { tail[i] } else { 0.0 };
    }
    let chance = random.many(n, SplitMix::unit);
    let tail = random.many(n, |random| (200.0 * random.pareto(1.3) + 100.0).min(8_000.0));
    for i in 0..n {
        delays[i] += if chance[i] < preempted { tail[i] } else { 0.0 };
    }
    delays
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Both compute in doubles, but with different functions for logarithms and cosines.
    const TOLERANCE_US: f64 = 1e-6;

    fn numbers(case: &Value, name: &str) -> Vec<f64> {
        case[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    }

    fn assert_equal(ours: &[f64], theirs: &[f64], what: &str) {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        for (i, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            assert!((ours - theirs).abs() < TOLERANCE_US, "{what} {i}: {ours} and not {theirs}");
        }
    }

    #[test]
    fn is_as_the_reference() {
        let cases: Value = serde_json::from_str(include_str!("../../data/clock_sim.json")).unwrap();
        for case in cases.as_array().unwrap() {
            let number = |name: &str| case[name].as_f64().unwrap();
            let simulation = Simulation::new(Config {
                seed: number("seed") as u64,
                seconds: number("T"),
                bursts_per_second: number("f"),
                readings: number("K") as usize,
                quantum_us: number("q"),
                wander: match case["wander"].as_str().unwrap() {
                    "const" => Wander::Constant,
                    "mild" => Wander::Mild,
                    _ => Wander::Thermal,
                },
                noise: match case["noise"].as_str().unwrap() {
                    "quiet" => Noise::Quiet,
                    "std" => Noise::Standard,
                    "busy" => Noise::Busy,
                    _ => Noise::Awful,
                },
                there_us: number("m1"),
                back_us: number("m2"),
                queries: number("nq") as usize,
                ..Config::default()
            });
            let of = |field: fn(&Bracket) -> f64| {
                simulation.bursts.iter().flatten().map(field).collect::<Vec<_>>()
            };
            assert_equal(&of(|bracket| bracket.before), &numbers(case, "before"), "before");
            assert_equal(&of(|bracket| bracket.after), &numbers(case, "after"), "after");
            assert_equal(&of(|bracket| bracket.device), &numbers(case, "device"), "device");
            assert_equal(&simulation.queries, &numbers(case, "queries"), "queries");
            let read: Vec<f64> = simulation.queries.iter().map(|host| simulation.read(*host)).collect();
            assert_equal(&read, &numbers(case, "query_device"), "query_device");
        }
    }
}

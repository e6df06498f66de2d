//! Under what the clocks are tried, what is demanded of ours, and how they did.

use serde::Serialize;

use super::classic::Classic;
use super::{Config, Estimate, Noise, Recording, Simulation, Wander};

/// Live clocks are judged from here on, in µs.
const WARM_US: f64 = 6e6;
const OURS: &str = "ours";

/// What a clock of ours must be right within, in µs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demand {
    pub p99: Option<f64>,
    pub max: Option<f64>,
    pub median_bound: Option<f64>,
}

/// Something to try the clocks under.
#[derive(Clone, Debug)]
pub struct Condition {
    pub name: &'static str,
    pub config: Config,
    pub seeds: u64,
    pub offline: Demand,
    pub live: Demand,
    /// Uninterrupted stretches that there truly are.
    pub segments: u32,
}

/// How one clock did, in µs, over the seeds of a condition.
#[derive(Clone, Debug, Serialize)]
pub struct Score {
    pub clock: &'static str,
    pub live: bool,
    /// Median over the seeds.
    pub p50_us: f64,
    /// Of the worst seed.
    pub p99_us: f64,
    pub max_us: f64,
    /// Share of the queries whose error was within the bound; `None`: it gives none.
    pub covered: Option<f64>,
    /// Of the worst seed.
    pub median_bound_us: Option<f64>,
    /// Share of the queries that it mapped.
    pub mapped: f64,
    /// Of every seed.
    pub segments: Vec<u32>,
}

impl Score {
    /// Whether it is a clock of ours.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.clock == OURS
    }
}

impl Condition {
    /// Those of a capture of some length, each with as many seeds.
    #[must_use]
    pub fn all(seconds: f64, seeds: u64) -> Vec<Self> {
        use Noise::{Awful, Busy, Quiet, Standard};
        use Wander::{Mild, Thermal};
        let base = Config { seconds, ..Config::default() };
        let still = |noise, quantum_us, wander| Config { noise, quantum_us, wander, ..base };
        let asymmetric = |there_us, back_us| Config { there_us, back_us, wander: Thermal, ..base };
        let mut conditions = vec![
            Self::still("quiet, mild, q 32 ns", still(Quiet, 0.032, Mild)),
            Self::still("quiet, thermal, q 0.5 µs", still(Quiet, 0.5, Thermal)),
            Self::still("standard, mild, q 0.5 µs", still(Standard, 0.5, Mild)),
            Self::still("standard, thermal, q 32 ns", still(Standard, 0.032, Thermal)),
            Self::still("standard, thermal, q 0.5 µs", still(Standard, 0.5, Thermal)),
            Self::new("standard, thermal, q 1 µs", still(Standard, 1.0, Thermal)).bounded(),
            Self::busy("busy, thermal", still(Busy, 0.5, Thermal), 4.0),
            // More: where a recording begins in 20 s of a late host, no burst shows that it is late.
            Self::busy("awful, thermal", still(Awful, 0.5, Thermal), 5.0),
            Self::new("asymmetric 5.5/2.5 µs", asymmetric(5.5, 2.5)).bounded(),
            Self::new("asymmetric 7/1 µs", asymmetric(7.0, 1.0)).bounded(),
            Self::new("gap of 30 s, thermal", Config { gap_seconds: 30.0, wander: Thermal, ..base }),
            Self::new(
                "q 1 µs, then 32 ns",
                Config { late_quantum_us: Some(0.032), ..still(Standard, 1.0, Mild) },
            ),
            Self::new(
                "q 32 ns, then 1 µs",
                Config { late_quantum_us: Some(1.0), ..still(Standard, 0.032, Mild) },
            ),
            Self::new(
                "q 0.5 µs, then 32 µs",
                Config { late_quantum_us: Some(32.0), ..still(Standard, 0.5, Mild) },
            ),
            Self::new(
                "q 32 µs, then 0.5 µs",
                Config { late_quantum_us: Some(0.5), ..still(Standard, 32.0, Mild) },
            ),
            Self::slewed("MONOTONIC slewed by 500 ppm", Config { slew_ppm: 500.0, ..base }),
            Self { segments: 2, ..Self::new("step of 20 µs", Config { step_us: 20.0, ..base }) },
        ];
        conditions.iter_mut().for_each(|condition| condition.seeds = seeds);
        conditions
    }

    fn new(name: &'static str, config: Config) -> Self {
        Self { name, config, seeds: 1, offline: Demand::default(), live: Demand::default(), segments: 1 }
    }

    /// RTTmin/2 + q + 1 µs offline, + 2 µs live.
    fn bounded(mut self) -> Self {
        let Config { there_us, back_us, quantum_us, .. } = self.config;
        let floor = (there_us + back_us) / 2.0 + quantum_us;
        self.offline.median_bound = Some(floor + 1.0);
        self.live.median_bound = Some(floor + 2.0);
        self
    }

    fn still(name: &'static str, config: Config) -> Self {
        let mut condition = Self::new(name, config).bounded();
        (condition.offline.p99, condition.offline.max) = (Some(0.5), Some(1.0));
        (condition.live.p99, condition.live.max) = (Some(0.75), Some(1.5));
        condition
    }

    fn busy(name: &'static str, config: Config, offline_max: f64) -> Self {
        let mut condition = Self::new(name, config);
        (condition.offline.max, condition.live.max) = (Some(offline_max), Some(10.0));
        condition
    }

    /// 1 µs, and a quarter of what the rate changes by over the time between two brackets of the host's clocks.
    fn slewed(name: &'static str, config: Config) -> Self {
        let mut condition = Self::new(name, config);
        let max = 1.0 + config.slew_ppm * 1e-6 * 20e3 / 4.0;
        (condition.offline.max, condition.live.max) = (Some(max), Some(max));
        condition
    }

    /// How ours do, and with `classic` how the others do beside them.
    #[must_use]
    pub fn scores(&self, classic: bool) -> Vec<Score> {
        let mut ours = [Tally::new(OURS, false), Tally::new(OURS, true)];
        let mut others = Classic::ALL.map(|classic| Tally::new(classic.name(), classic.is_live()));
        for seed in 0..self.seeds {
            let simulation = Simulation::new(Config { seed, ..self.config });
            let recording = Recording::new(&simulation);
            let [offline, live] = &mut ours;
            let (estimates, quality) = recording.offline();
            offline.add(&estimates, &simulation, quality.segments);
            let (estimates, quality) = recording.live();
            live.add(&estimates, &simulation, quality.segments);
            // They align with one clock of the host, so a slew is nothing that they see.
            if classic && self.config.slew_ppm == 0.0 {
                for (tally, classic) in others.iter_mut().zip(Classic::ALL) {
                    tally.add(&classic.estimate(&simulation), &simulation, 1);
                }
            }
        }
        let [offline, live] = ours.map(Tally::score);
        let mut scores: Vec<Score> = others.map(Tally::score).into_iter().flatten().collect();
        scores.extend(offline);
        scores.extend(live);
        scores.sort_by_key(|score| score.live);
        scores
    }

    /// Share of the queries that must be mapped: all but those in an interval in which nothing can be said.
    fn mapped(&self, live: bool) -> f64 {
        let Config { seconds, gap_seconds, bursts_per_second, .. } = self.config;
        let interrupted = f64::from(self.segments - 1) * 2.0 / bursts_per_second;
        let silent = if live { gap_seconds } else { 0.0 };
        1.0 - (interrupted + silent) / seconds
    }

    /// What of the demands a clock of ours does not meet.
    #[must_use]
    pub fn misses(&self, score: &Score) -> Vec<String> {
        /// Share that must lie within their bound.
        const COVERED: f64 = 0.999;
        let demand = if score.live { self.live } else { self.offline };
        let mut misses = Vec::new();
        let mut at_most = |what: &str, value: Option<f64>, limit: Option<f64>| {
            if let (Some(value), Some(limit)) = (value, limit)
                && value > limit
            {
                misses.push(format!("{what} {value:.2} > {limit:.2} µs"));
            }
        };
        at_most("p99", Some(score.p99_us), demand.p99);
        at_most("max", Some(score.max_us), demand.max);
        at_most("median bound", score.median_bound_us, demand.median_bound);
        if let Some(covered) = score.covered.filter(|covered| *covered < COVERED) {
            misses.push(format!("{:.3} % within the bound", covered * 100.0));
        }
        if score.mapped < self.mapped(score.live) {
            misses.push(format!("{:.3} % mapped", score.mapped * 100.0));
        }
        // A live clock remembers two minutes.
        let remembers = !score.live || self.config.seconds / 2.0 < 120.0;
        if remembers && score.segments.iter().any(|&segments| segments != self.segments) {
            misses.push(format!("segments {:?}", score.segments));
        }
        misses
    }
}

/// Errors of one clock, seed by seed.
struct Tally {
    clock: &'static str,
    live: bool,
    p50: Vec<f64>,
    p99: Vec<f64>,
    max: Vec<f64>,
    median_bound: Vec<f64>,
    queries: usize,
    mapped: usize,
    bounded: usize,
    covered: usize,
    segments: Vec<u32>,
}

impl Tally {
    fn new(clock: &'static str, live: bool) -> Self {
        Self {
            clock,
            live,
            p50: Vec::new(),
            p99: Vec::new(),
            max: Vec::new(),
            median_bound: Vec::new(),
            queries: 0,
            mapped: 0,
            bounded: 0,
            covered: 0,
            segments: Vec::new(),
        }
    }

    fn add(&mut self, estimates: &[Estimate], simulation: &Simulation, segments: u32) {
        let from = if self.live { WARM_US } else { 0.0 };
        let judged: Vec<&Estimate> = estimates.iter().filter(|estimate| estimate.host_us >= from).collect();
        let mut errors: Vec<f64> = judged.iter().map(|estimate| estimate.error_us.abs()).collect();
        errors.sort_unstable_by(f64::total_cmp);
        let mut bounds: Vec<f64> = judged.iter().filter_map(|estimate| estimate.bound_us).collect();
        bounds.sort_unstable_by(f64::total_cmp);
        let quantile =
            |sorted: &[f64], q: f64| sorted.get(((sorted.len() as f64 - 1.0) * q) as usize).copied();
        self.p50.extend(quantile(&errors, 0.5));
        self.p99.extend(quantile(&errors, 0.99));
        self.max.extend(errors.last());
        self.median_bound.extend(quantile(&bounds, 0.5));
        self.queries += simulation.queries.iter().filter(|host| **host >= from).count();
        self.mapped += judged.len();
        self.bounded += bounds.len();
        let is_covered =
            |estimate: &&&Estimate| estimate.bound_us.is_some_and(|bound| estimate.error_us.abs() <= bound);
        self.covered += judged.iter().filter(is_covered).count();
        self.segments.push(segments);
    }

    /// `None` when it mapped nothing.
    fn score(self) -> Option<Score> {
        let worst = |values: &[f64]| values.iter().copied().max_by(f64::total_cmp);
        Some(Score {
            clock: self.clock,
            live: self.live,
            p50_us: crate::stats::median(&self.p50)?,
            p99_us: worst(&self.p99)?,
            max_us: worst(&self.max)?,
            covered: (self.bounded > 0).then(|| self.covered as f64 / self.bounded as f64),
            median_bound_us: worst(&self.median_bound),
            mapped: self.mapped as f64 / self.queries as f64,
            segments: self.segments,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_clocks_meet_what_is_demanded() {
        for mut condition in Condition::all(120.0, 2) {
            condition.config.queries = 2_000;
            for score in condition.scores(false) {
                let misses = condition.misses(&score);
                assert!(misses.is_empty(), "{}: {misses:?} {score:?}", condition.name);
            }
        }
    }

    #[test]
    fn one_line_for_a_recording_is_tens_of_microseconds_wrong() {
        let config = Config { seconds: 300.0, wander: Wander::Thermal, queries: 1_000, ..Config::default() };
        let scores = Condition::new("thermal", config).scores(true);
        for score in scores.iter().filter(|score| !score.is_ours() && !score.live) {
            assert!(score.max_us > 20.0, "{score:?}");
        }
    }
}

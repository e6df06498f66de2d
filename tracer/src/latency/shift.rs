//! How the latencies of two recordings differ, and whether chance explains it.
//!
//! Tokens are not independent: those of one step are slow together, and a stall of a second slows thousands. So what is
//! drawn anew is time and not tokens: each recording is cut into [`SLICES`] slices of equal length, and of those as many
//! are drawn with repetition (block bootstrap; Künsch 1989). [`DRAWS`] draws of both give the distribution of each
//! difference: its middle 99 % are the interval, its spread the standard error. A difference is called real when the
//! interval leaves zero out and it is [`LEAST_SIGMAS`] standard errors: dozens of figures are compared at once.

use crate::latency::Latency;
use crate::timeline::budget::{ByToken, Label};
use crate::timeline::tables::Tables;
use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR};

/// Quantiles that are compared, where ten samples of both lie beyond.
const QUANTILES: [f64; 4] = [0.5, 0.9, 0.99, 0.999];
/// Samples that must lie beyond a quantile.
const BEYOND: f64 = 10.0;
const SLICES: usize = 64;
/// Fewer slices that hold anything say too little of how a recording varies.
const LEAST_SLICES: usize = 20;
const DRAWS: usize = 500;
/// Draws outside of the middle 99 %, on either side.
const TAIL: usize = 2;
const LEAST_SIGMAS: f64 = 4.0;

/// A figure of both recordings, ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    pub a_ns: f64,
    pub b_ns: f64,
    /// Between which `b_ns − a_ns` lies with 99 % confidence.
    pub low_ns: f64,
    pub high_ns: f64,
    /// Chance does not explain it.
    pub is_real: bool,
}

impl Change {
    #[must_use]
    pub fn shift_ns(&self) -> f64 {
        self.b_ns - self.a_ns
    }
}

/// One latency of both recordings.
#[derive(Clone, Debug, PartialEq)]
pub struct Shift {
    pub latency: Latency,
    pub samples: (u64, u64),
    /// Quantile and its change.
    pub quantiles: Vec<(f64, Change)>,
    pub mean: Change,
    /// Of the mean budget; all parts that either has, those that grew most first. Of TTFT and ITL only.
    pub parts: Vec<(Label, Change)>,
}

impl Shift {
    /// Of every latency that both have enough of.
    #[must_use]
    pub fn all(a: &Tables, b: &Tables) -> Vec<Self> {
        Latency::ALL.into_iter().filter_map(|latency| Self::new(latency, a, b)).collect()
    }

    fn new(latency: Latency, a: &Tables, b: &Tables) -> Option<Self> {
        let (a, b) = (Slices::new(latency, a)?, Slices::new(latency, b)?);
        let least = a.sorted.len().min(b.sorted.len()) as f64;
        // 100 × (1 − 0.9) is a little below 10 in binary.
        let quantiles = QUANTILES.into_iter().filter(|q| least * (1.0 - q) >= BEYOND * (1.0 - 1e-9));
        let quantiles: Vec<f64> = quantiles.collect();
        let (a_is, b_is) = (a.figures(&[1; SLICES], &quantiles), b.figures(&[1; SLICES], &quantiles));
        let mut random = Random(0x7472_6163_6572);
        let mut draws: Vec<Vec<f64>> = vec![Vec::with_capacity(DRAWS); a_is.len()];
        for _ in 0..DRAWS {
            let a_drawn = a.figures(&a.draw(&mut random), &quantiles);
            let b_drawn = b.figures(&b.draw(&mut random), &quantiles);
            for ((draws, a), b) in draws.iter_mut().zip(a_drawn).zip(b_drawn) {
                draws.push(b - a);
            }
        }
        let mut changes = a_is.into_iter().zip(b_is).zip(draws).map(|((a, b), draws)| change(a, b, draws));
        let quantiles = quantiles.into_iter().zip(changes.by_ref()).collect();
        let mean = changes.next()?;
        let mut parts: Vec<(Label, Change)> = Label::PARTS.into_iter().zip(changes).collect();
        parts.retain(|(_, change)| change.a_ns > 0.0 || change.b_ns > 0.0);
        parts.sort_by(|(_, a), (_, b)| b.shift_ns().total_cmp(&a.shift_ns()));
        Some(Self {
            latency,
            samples: (a.sorted.len() as u64, b.sorted.len() as u64),
            quantiles,
            mean,
            parts,
        })
    }

    /// Whether anything of it changed beyond chance.
    #[must_use]
    pub fn is_real(&self) -> bool {
        let all = self.quantiles.iter().map(|(_, change)| change);
        all.chain([&self.mean])
            .chain(self.parts.iter().map(|(_, change)| change))
            .any(|change| change.is_real)
    }
}

fn change(a_ns: f64, b_ns: f64, mut draws: Vec<f64>) -> Change {
    draws.sort_by(f64::total_cmp);
    let n = draws.len().max(1) as f64;
    let mean = draws.iter().sum::<f64>() / n;
    let sigma = (draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / n).sqrt();
    let at = |i: usize| draws.get(i).copied().unwrap_or(f64::NAN);
    let (low_ns, high_ns) = (at(TAIL), at(draws.len().saturating_sub(TAIL + 1)));
    let shift_ns = b_ns - a_ns;
    let leaves_zero_out = low_ns > 0.0 || high_ns < 0.0;
    Change { a_ns, b_ns, low_ns, high_ns, is_real: leaves_zero_out && shift_ns.abs() >= LEAST_SIGMAS * sigma }
}

/// A sample: when, ns; how long; the parts of a token's budget.
type Sample<'a> = (u64, u64, Option<&'a [u64; Label::PARTS.len()]>);

/// The samples of a recording, by slices of time.
struct Slices {
    /// Latency and slice, ascending.
    sorted: Vec<(u64, u8)>,
    sums: Vec<Sums>,
    has_parts: bool,
}

/// Sums of a slice.
#[derive(Clone, Default)]
struct Sums {
    samples: u64,
    latency_ns: f64,
    parts_ns: [f64; Label::PARTS.len()],
}

impl Slices {
    fn new(latency: Latency, tables: &Tables) -> Option<Self> {
        let samples = samples(latency, tables);
        let first_ns = samples.iter().map(|(at_ns, ..)| *at_ns).min()?;
        let last_ns = samples.iter().map(|(at_ns, ..)| *at_ns).max()?;
        let length_ns = (last_ns - first_ns) / SLICES as u64 + 1;
        let mut sums = vec![Sums::default(); SLICES];
        let mut sorted = Vec::with_capacity(samples.len());
        for (at_ns, latency_ns, parts_ns) in &samples {
            let slice = usize::try_from((at_ns - first_ns) / length_ns).unwrap_or(0).min(SLICES - 1);
            sorted.push((*latency_ns, slice as u8));
            let Some(sum) = sums.get_mut(slice) else { continue };
            sum.samples += 1;
            sum.latency_ns += *latency_ns as f64;
            for (sum, part) in sum.parts_ns.iter_mut().zip(parts_ns.iter().copied().flatten()) {
                *sum += *part as f64;
            }
        }
        if sums.iter().filter(|sum| sum.samples > 0).count() < LEAST_SLICES {
            return None;
        }
        sorted.sort_unstable();
        let has_parts = samples.iter().any(|(_, _, parts)| parts.is_some());
        Some(Self { sorted, sums, has_parts })
    }

    /// How often each slice is taken.
    fn draw(&self, random: &mut Random) -> [u32; SLICES] {
        loop {
            let mut times = [0; SLICES];
            for _ in 0..SLICES {
                times[random.below(SLICES)] += 1;
            }
            // Slices without samples are slices too; a draw of nothing else says nothing.
            if self.sums.iter().zip(times).any(|(sum, times)| sum.samples > 0 && times > 0) {
                return times;
            }
        }
    }

    /// Quantiles, mean, and means of the parts, of slices taken so often; all in ns.
    fn figures(&self, times: &[u32; SLICES], quantiles: &[f64]) -> Vec<f64> {
        let total: u64 =
            self.sums.iter().zip(times).map(|(sum, times)| sum.samples * u64::from(*times)).sum();
        let mut figures = Vec::with_capacity(quantiles.len() + 1 + Label::PARTS.len());
        let (mut seen, mut samples) = (0, self.sorted.iter());
        for q in quantiles {
            let rank = ((total as f64 * q).ceil() as u64).max(1);
            let mut at_ns = figures.last().copied().unwrap_or(0.0);
            while seen < rank {
                let Some((latency_ns, slice)) = samples.next() else { break };
                seen += u64::from(times[usize::from(*slice)]);
                at_ns = *latency_ns as f64;
            }
            figures.push(at_ns);
        }
        let mean = |of: &dyn Fn(&Sums) -> f64| {
            let sum: f64 = self.sums.iter().zip(times).map(|(sum, times)| of(sum) * f64::from(*times)).sum();
            sum / total.max(1) as f64
        };
        figures.push(mean(&|sum| sum.latency_ns));
        if self.has_parts {
            figures.extend((0..Label::PARTS.len()).map(|part| mean(&|sum| sum.parts_ns[part])));
        }
        figures
    }
}

fn samples(latency: Latency, tables: &Tables) -> Vec<Sample<'_>> {
    let budgets = ByToken::new(&tables.budgets);
    let tokens = |first: bool| {
        let of_kind = tables.tokens.iter().filter(move |token| match first {
            true => (token.choice, token.index) == (0, 0),
            false => token.index > 0,
        });
        let sample = |token| {
            let budget = budgets.of(token)?;
            Some((token.delivered_ns, budget.latency_ns, Some(&budget.parts_ns)))
        };
        of_kind.filter_map(sample).collect()
    };
    let requests = tables.requests.iter();
    let steps = tables.steps.iter();
    match latency {
        Latency::Ttft => tokens(true),
        Latency::Itl => tokens(false),
        Latency::Tpot => {
            requests.filter_map(|r| Some((r.received_ns, r.tpot_ns?.round() as u64, None))).collect()
        }
        Latency::E2e => requests
            .filter(|request| !matches!(request.finish_reason, FINISH_CANCELLED | FINISH_ERROR))
            .filter_map(|r| Some((r.received_ns, r.end_ns?.checked_sub(r.received_ns)?, None)))
            .collect(),
        Latency::Step => steps.filter_map(|step| Some((step.begin_ns, step.duration_ns()?, None))).collect(),
        Latency::GpuSpan => steps.filter_map(|step| Some((step.begin_ns, step.gpu?.span_ns, None))).collect(),
    }
}

/// Small, fast, seeded: splitmix64 (Steele, Lea, Flood 2014). So that a comparison comes out the same again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::budget::Budget;
    use crate::timeline::rows::Token;

    const PER_TENTH: u64 = 20;

    /// Gaps of a recording: every tenth of a second has a speed of its own, so that tokens are slow together.
    fn recording(seed: u64, slower: f64) -> Tables {
        let mut random = Random(seed);
        let mut share = || (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut tables = Tables::default();
        for tenth in 0..100_u64 {
            let speed = 1.0 + share();
            for i in 0..PER_TENTH {
                let gpu_ns = (1e6 * (speed + 0.2 * share())) as u64;
                let lock_ns = (1e6 * slower * (1.0 + share())) as u64;
                let index = (tenth * PER_TENTH + i + 1) as u32;
                let mut budget = Budget { index, latency_ns: gpu_ns + lock_ns, ..Budget::default() };
                budget.parts_ns[Label::GpuSpan as usize] = gpu_ns;
                budget.parts_ns[Label::HostBlocked as usize] = lock_ns;
                tables.budgets.push(budget);
                tables.tokens.push(token(index, tenth * 100_000_000 + i * 1_000_000, gpu_ns + lock_ns));
            }
        }
        tables
    }

    fn token(index: u32, delivered_ns: u64, latency_ns: u64) -> Token {
        Token {
            request: 0,
            choice: 0,
            index,
            process: crate::event::ProcessId::default(),
            tid: 0,
            delivered_ns,
            written_ns: None,
            wire_ns: None,
            latency_ns: Some(latency_ns),
            source: crate::timeline::rows::Source::Mark,
            iteration: None,
            step: None,
            join: crate::timeline::rows::Join::None,
            prefill: false,
        }
    }

    #[test]
    fn chance_raises_no_alarm() {
        let alarms = (0..40).filter(|i| {
            let (a, b) = (recording(2 * i, 0.1), recording(2 * i + 1, 0.1));
            Shift::all(&a, &b).iter().any(Shift::is_real)
        });
        assert!(alarms.count() <= 1);
    }

    #[test]
    fn what_grew_is_found_and_within_its_interval() {
        let shifts = Shift::all(&recording(1, 0.1), &recording(2, 1.1));
        let [shift] = shifts.as_slice() else { panic!("{shifts:?}") };
        assert_eq!((shift.latency, shift.samples), (Latency::Itl, (2_000, 2_000)));
        assert_eq!(shift.quantiles.iter().map(|(q, _)| *q).collect::<Vec<_>>(), [0.5, 0.9, 0.99]);
        assert!(shift.quantiles.iter().all(|(_, change)| change.is_real), "{shift:?}");
        let (label, lock) = shift.parts[0];
        assert_eq!(label, Label::HostBlocked);
        // Each was 1.5 × slower × 1 ms on average.
        assert!(lock.is_real && lock.low_ns < 1.5e6 && 1.5e6 < lock.high_ns, "{lock:?}");
        assert!(!shift.parts[1].1.is_real, "{shift:?}");
    }

    #[test]
    fn a_recording_does_not_differ_from_itself_and_little_says_nothing() {
        let a = recording(5, 0.3);
        let [same] = &Shift::all(&a, &a)[..] else { panic!() };
        assert!(!same.is_real() && same.mean.shift_ns() == 0.0);
        let mut short = recording(5, 0.3);
        short.tokens.truncate(300);
        short.budgets.truncate(300);
        short.tokens.iter_mut().for_each(|token| token.delivered_ns = 1 + u64::from(token.index % 7));
        assert!(Shift::all(&short, &a).is_empty());
        assert!(Shift::all(&Tables::default(), &a).is_empty());
    }
}

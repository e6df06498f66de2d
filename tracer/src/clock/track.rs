//! Bursts → segments as they come: the live curve, and where a stretch ends.
//!
//! A new segment begins with another chain of bases, at a suspend, where the host's clocks stepped, where device time
//! went back, and where the device's clock stepped: when a burst's bounds and the corridor exclude each other, or when
//! three tight bursts in a row are on one side of the forecast by more than max(4 σ, 2 µs), after a tight burst that
//! agreed with it. A step below half a round trip shows only in the second way.

use super::burst::{Bounds, Burst, Origin};
use super::curve::{Node, Segment};
use super::filter::{Floor, Measurement, PPM, State, WANDER_LIVE};
use super::host::HostMap;

const NS: f64 = 1e9;
/// What is known of a rate before there are two bursts: crystals are right within 300 ppm (three σ).
const START_RATE: f64 = 100.0 * PPM;
/// How much a rate may change between bursts. Crystals under changing load do so by less than 0.2 ppm/s.
pub(super) const RHO: f64 = 2.0 * PPM;
/// What is added to ρ before bounds are said to exclude each other.
const RHO_STEP: f64 = 8.0 * PPM;
/// While bursts leave more than this open of the rate, nothing is taken as known of round trips but the bursts' own.
const WARM: f64 = 3.0 * PPM;
const SUSPECT_SIGMAS: f64 = 4.0;
const SUSPECT_NS: f64 = 2_000.0;
const SUSPECTS: usize = 3;

/// ρ where the rate has this standard deviation.
pub(super) fn rho(sd_rate: f64) -> f64 {
    RHO + 3.0 * sd_rate
}

/// Follows one series.
#[derive(Clone, Debug, Default)]
pub(super) struct Tracker {
    /// Oldest first.
    pub(super) segments: Vec<Segment>,
    stretch: Option<Stretch>,
    /// Bursts that contradicted themselves.
    pub(super) rejected: u64,
}

/// The newest segment's filter.
#[derive(Clone, Debug)]
struct Stretch {
    last: Burst,
    state: State,
    floor: Floor,
    half_floor: f64,
    /// Least and greatest rate that all bursts allow; `None` once that is known well, and the filter knows it better.
    rates: Option<(f64, f64)>,
    /// The newest burst was tight and as forecast.
    agreed: bool,
    /// The newest bursts, when they are tight and on one side of the forecast, and that side.
    suspects: Vec<Burst>,
    side: f64,
}

/// What became of a burst.
enum Verdict {
    Taken,
    /// This many of the newest bursts, this one included, are behind a step.
    Stepped(usize),
}

impl Tracker {
    /// Takes the next burst in.
    pub(super) fn push(&mut self, burst: &Burst, host: &HostMap) {
        let continues = self.stretch.as_ref().is_some_and(|stretch| stretch.is_continued_by(burst, host));
        let (Some(stretch), Some(segment)) = (&mut self.stretch, self.segments.last_mut()) else {
            return self.begin(burst);
        };
        if !continues {
            return self.begin(burst);
        }
        let Some(bounds) = stretch.bounds(burst, segment.origin) else {
            self.rejected += 1;
            return;
        };
        if let Verdict::Stepped(count) = stretch.take(burst, &bounds, segment) {
            let behind = std::mem::take(&mut stretch.suspects);
            segment.nodes.truncate(segment.nodes.len() + 1 - count);
            let older = behind.get(..count - 1).unwrap_or_default();
            for (i, burst) in older.iter().chain([burst]).enumerate() {
                if i == 0 { self.begin(burst) } else { self.push(burst, host) }
            }
        }
    }

    fn begin(&mut self, burst: &Burst) {
        let origin = burst.origin();
        let bounds = burst.bounds(origin, 0.0, 3.0 * START_RATE / NS);
        if bounds.low - burst.quantum_ns > bounds.high {
            self.rejected += 1;
            return;
        }
        let mut floor = Floor::default();
        let half_floor = floor.half(&bounds);
        let stretch = Stretch {
            last: burst.clone(),
            state: State::new(bounds.mid(), Measurement::uniform(&bounds).variance.sqrt(), 0.0, START_RATE),
            floor,
            half_floor,
            rates: Some((-3.0 * START_RATE, 3.0 * START_RATE)),
            agreed: false,
            suspects: Vec::new(),
            side: 0.0,
        };
        let nodes = vec![stretch.node(&bounds, burst)];
        self.segments.push(Segment { chain: burst.chain, origin, rates: stretch.rates, nodes });
        self.stretch = Some(stretch);
    }

    /// Forgets the oldest nodes beyond `most`.
    pub(super) fn forget_all_but(&mut self, most: usize) {
        let mut excess = self.segments.iter().map(|segment| segment.nodes.len()).sum::<usize>().saturating_sub(most);
        self.segments.retain_mut(|segment| {
            let gone = excess.min(segment.nodes.len());
            segment.nodes.drain(..gone);
            excess -= gone;
            !segment.nodes.is_empty()
        });
    }
}

impl Stretch {
    fn is_continued_by(&self, burst: &Burst, host: &HostMap) -> bool {
        self.last.chain == burst.chain
            && self.last.origin().device_ns < burst.origin().device_ns
            && host.is_unbroken(self.last.host_ns(), burst.host_ns())
    }

    /// `None`: the burst contradicts itself.
    fn bounds(&self, burst: &Burst, origin: Origin) -> Option<Bounds> {
        let slack = (RHO_STEP + self.rho()) / NS;
        let bounds = burst.bounds(origin, self.state.rate / NS, slack);
        (bounds.low - burst.quantum_ns <= bounds.high).then_some(bounds)
    }

    fn take(&mut self, burst: &Burst, bounds: &Bounds, segment: &mut Segment) -> Verdict {
        let Some(last) = segment.nodes.last() else { return Verdict::Taken };
        let dt_ns = bounds.x - last.x;
        let (low, high) = last.walls(dt_ns, last.rate, last.rho + RHO_STEP, 0.0);
        let certain = (bounds.low - burst.quantum_ns, bounds.high);
        if certain.0 > high || certain.1 < low || !self.narrow_rates(bounds.x, certain, segment) {
            return Verdict::Stepped(1);
        }
        let mut predicted = self.state.predict(dt_ns, WANDER_LIVE);
        let half_floor = self.floor.half(bounds);
        // A lower floor shows that what was taken for the middle before may have been off by the difference.
        predicted.var_theta += (self.half_floor - half_floor).max(0.0).powi(2);
        self.half_floor = half_floor;
        let measurement = match self.rates {
            None => Measurement::new(bounds, half_floor, predicted.theta, Some(predicted.var_theta)),
            Some(_) => Measurement::uniform(bounds),
        };
        if self.is_suspect(&measurement, &predicted) {
            self.suspects.push(burst.clone());
            if self.suspects.len() == SUSPECTS {
                return Verdict::Stepped(SUSPECTS);
            }
            // Not believed yet, so only what is certain counts.
            self.state = State { theta: predicted.theta.clamp(certain.0, certain.1), ..predicted };
        } else {
            self.suspects.clear();
            self.agreed = measurement.tight;
            self.state = predicted.update(&measurement, certain);
        }
        if let Some((low, high)) = self.rates {
            self.state.rate = self.state.rate.clamp(low, high);
        }
        segment.push(self.node(bounds, burst));
        segment.rates = self.rates;
        self.last = burst.clone();
        Verdict::Taken
    }

    /// Takes in what a burst's bounds and those before it say of the rate; false when no rate is left.
    fn narrow_rates(&mut self, x: f64, certain: (f64, f64), segment: &Segment) -> bool {
        let Some((mut low, mut high)) = self.rates else { return true };
        for node in &segment.nodes {
            let dt = (x - node.x) / NS;
            low = low.max((certain.0 - node.high) / dt - RHO);
            high = high.min((certain.1 - node.low) / dt + RHO);
        }
        self.rates = Some((low, high)).filter(|_| (high - low) / 2.0 - RHO > WARM);
        low <= high
    }

    /// What the rate may be wrong by.
    fn rho(&self) -> f64 {
        match self.rates {
            Some((low, high)) => (high - self.state.rate).max(self.state.rate - low),
            None => rho(self.state.sd_rate()),
        }
    }

    fn node(&self, bounds: &Bounds, burst: &Burst) -> Node {
        Node {
            x: bounds.x,
            theta: self.state.theta,
            rate: self.state.rate,
            rho: self.rho(),
            low: bounds.low - burst.quantum_ns,
            high: bounds.high,
            width: bounds.width(),
            sd_theta: self.state.sd_theta(),
            quantum: burst.quantum_ns,
            chain_rounding: burst.chain_rounding_ns,
        }
    }

    fn is_suspect(&mut self, measurement: &Measurement, predicted: &State) -> bool {
        let innovation = measurement.z - predicted.theta;
        let limit = SUSPECT_SIGMAS * (predicted.var_theta + measurement.variance).sqrt();
        let is_off = measurement.tight && innovation.abs() > limit.max(SUSPECT_NS);
        let is_first = self.suspects.is_empty();
        let follows = if is_first { self.agreed } else { self.side == innovation.signum() };
        self.side = innovation.signum();
        is_off && follows
    }
}

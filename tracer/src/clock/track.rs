//! Bursts → segments as they come: the live curve, and where a stretch ends.
//!
//! A new segment begins with another chain of bases, at a suspend, where the host's clocks stepped, where device time
//! went back, and where the device's clock stepped: when a burst's bounds and the corridor exclude each other, or when
//! three tight bursts in a row are on one side of the forecast by more than max(4 σ, 2 µs), after a tight burst that
//! agreed with it. A step below half a round trip shows only in the second way. Bursts that stray further each time
//! are no step: the rate changes faster than was assumed, and from then on the filter, and with it ρ, assumes what
//! explains them.

use super::burst::{Bounds, Burst, Origin};
use super::curve::{Node, Segment};
use super::filter::{Floor, Measurement, PPM, State, WANDER_LIVE};
use super::host::HostMap;

const NS: f64 = 1e9;
/// What is known of a rate before there are two bursts: no crystals are that far apart.
pub(super) const UNKNOWN_RATES: (f64, f64) = (-300.0 * PPM, 300.0 * PPM);
/// What a rate may be off by after its clock stepped: the crystal is still the same.
const RHO_BEHIND_STEP: f64 = 20.0 * PPM;
/// How much a rate may change between bursts: assumed, for crystals under changing load, to be below 0.2 ppm/s.
pub(super) const RHO: f64 = 2.0 * PPM;
/// What is added to ρ before bounds are said to exclude each other.
const RHO_STEP: f64 = 8.0 * PPM;
/// While bursts leave more than this open of the rate (and [`RHO`]), ρ is what they leave open.
const WARM: f64 = 3.0 * PPM;
const WARM_BURSTS: usize = 256;
const SUSPECT_SIGMAS: f64 = 4.0;
const SUSPECT_NS: f64 = 2_000.0;
const SUSPECTS: usize = 3;
/// Mean square of innovations over what they should be (1) beyond which the wander is more than assumed, over this
/// many bursts.
const STRAIN: f64 = 3.0;
const STRAIN_BURSTS: f64 = 8.0;
/// By how much the assumed wander is raised at a time, and its limit, in (ns/s)²/s: no crystal does (100 ppm/√s).
const WANDER_FACTOR: f64 = 4.0;
const WANDER_MOST: f64 = 1e4 * PPM * PPM;

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

/// What is known of the newest segment.
#[derive(Clone, Debug)]
struct Stretch {
    last: Burst,
    /// `None` once the filter's σ says what ρ is.
    warming: Option<Warming>,
    state: State,
    /// q_r, raised when bursts refute it.
    wander: f64,
    strain: f64,
    floor: Floor,
    half_floor: f64,
    /// The newest burst was tight and as forecast.
    agreed: bool,
    /// The newest bursts, when they are tight and on one side of the forecast, and that side.
    suspects: Vec<Suspect>,
    side: f64,
}

/// A burst that may be behind a step.
#[derive(Clone, Debug)]
struct Suspect {
    burst: Burst,
    bounds: Bounds,
    measurement: Measurement,
    /// Before it was taken in, and for how long that had been so.
    state: State,
    dt_ns: f64,
}

/// The first bursts of a segment. The filter's σ would claim too much: it takes for noise, which averages out, what may
/// be the same delay each time. So until what is certain suffices, ρ is by that.
#[derive(Clone, Debug)]
struct Warming {
    /// Least and greatest rate, in ns/s, that the bursts allow.
    low: f64,
    high: f64,
    bursts: Vec<(Bounds, Burst)>,
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
            return self.begin(burst, UNKNOWN_RATES);
        };
        if !continues {
            return self.begin(burst, UNKNOWN_RATES);
        }
        let Some(bounds) = stretch.bounds(burst, segment.origin) else {
            self.rejected += 1;
            return;
        };
        if let Verdict::Stepped(count) = stretch.take(burst, &bounds, segment) {
            let behind = std::mem::take(&mut stretch.suspects);
            segment.nodes.truncate((segment.nodes.len() + 1).saturating_sub(count));
            let rates = stretch.rates_behind_step();
            let older = behind.get(..count - 1).unwrap_or_default().iter().map(|suspect| &suspect.burst);
            for (i, burst) in older.chain([burst]).enumerate() {
                if i == 0 { self.begin(burst, rates) } else { self.push(burst, host) }
            }
        }
    }

    /// With the least and the greatest rate, in ns/s.
    fn begin(&mut self, burst: &Burst, (low, high): (f64, f64)) {
        let origin = burst.origin();
        let mut warming = Warming { low, high, bursts: Vec::new() };
        let (rate, rho) = warming.rate();
        let bounds = burst.bounds(origin, rate / NS, rho / NS);
        if bounds.width() < 0.0 {
            self.rejected += 1;
            return;
        }
        let mut floor = Floor::default();
        let half_floor = floor.half(&bounds);
        warming.bursts.push((bounds, burst.clone()));
        let nodes = vec![Node { rate, rho, ..Node::new(&bounds, burst) }];
        self.segments.push(Segment { chain: burst.chain, origin, rates: Some((low, high)), nodes });
        self.stretch = Some(Stretch {
            last: burst.clone(),
            warming: Some(warming),
            state: State::new(bounds.mid(), bounds.width(), rate, rho / 3.0),
            wander: WANDER_LIVE,
            strain: 1.0,
            floor,
            half_floor,
            agreed: false,
            suspects: Vec::new(),
            side: 0.0,
        });
    }

    /// Forgets the oldest nodes beyond `most`.
    pub(super) fn forget_all_but(&mut self, most: usize) {
        let mut excess =
            self.segments.iter().map(|segment| segment.nodes.len()).sum::<usize>().saturating_sub(most);
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

    /// What the rate may be wrong by.
    fn rho(&self) -> f64 {
        let rate = self.state.rate;
        self.warming.as_ref().map_or(rho(self.state.sd_rate()), |w| (w.high - rate).max(rate - w.low))
    }

    /// `None`: the burst contradicts itself.
    fn bounds(&self, burst: &Burst, origin: Origin) -> Option<Bounds> {
        let bounds = burst.bounds(origin, self.state.rate / NS, (RHO_STEP + self.rho()) / NS);
        (bounds.width() >= 0.0).then_some(bounds)
    }

    fn take(&mut self, burst: &Burst, bounds: &Bounds, segment: &mut Segment) -> Verdict {
        let Some(last) = segment.nodes.last() else { return Verdict::Taken };
        let (low, high) = last.walls(bounds.x - last.x, last.rate, last.rho + RHO_STEP, 0.0);
        if bounds.low > high || bounds.high < low {
            return Verdict::Stepped(1);
        }
        let half_floor = self.floor.half(bounds);
        let fallen = (self.half_floor - half_floor).max(0.0);
        self.half_floor = half_floor;
        self.last = burst.clone();
        let Some(warming) = &mut self.warming else {
            return self.filter(burst, bounds, fallen, segment);
        };
        if !warming.take(burst, bounds, segment) {
            return Verdict::Stepped(1);
        }
        self.replay(segment);
        Verdict::Taken
    }

    /// What is known of the rate when the clock stepped; nothing where it was not known before, or does not stay.
    fn rates_behind_step(&self) -> (f64, f64) {
        if self.wander > WANDER_LIVE {
            return UNKNOWN_RATES;
        }
        let open = RHO_BEHIND_STEP + rho(self.state.sd_rate());
        self.warming.as_ref().map_or((self.state.rate - open, self.state.rate + open), |_| UNKNOWN_RATES)
    }

    /// Filters all bursts of a segment that is warming anew, with what they say of the rate.
    fn replay(&mut self, segment: &mut Segment) {
        let Some(warming) = &mut self.warming else { return };
        let bursts = std::mem::take(&mut warming.bursts);
        let tightest = bursts.iter().map(|(bounds, _)| bounds).min_by(|a, b| a.width().total_cmp(&b.width()));
        let (Some(tightest), (rate, open)) = (tightest, warming.rate()) else { return };
        let is_over = warming.is_over(bursts.len());
        segment.rates = Some((warming.low, warming.high)).filter(|_| !is_over);
        if is_over {
            self.warming = None;
        }
        self.state = State::new(tightest.mid() - rate * tightest.x / NS, tightest.width(), rate, open / 3.0);
        segment.nodes.clear();
        for (bounds, burst) in &bursts {
            self.filter(burst, bounds, 0.0, segment);
        }
        self.suspects.clear();
        if let Some(warming) = &mut self.warming {
            warming.bursts = bursts;
        }
    }

    /// `fallen`: by how much half the floor is lower than before.
    fn filter(&mut self, burst: &Burst, bounds: &Bounds, fallen: f64, segment: &mut Segment) -> Verdict {
        let dt_ns = segment.nodes.last().map_or(0.0, |last| bounds.x - last.x);
        let mut predicted = self.state.predict(dt_ns, self.wander);
        // What was taken for the middle before may have been off by as much.
        predicted.var_theta += fallen * fallen;
        let measurement =
            Measurement::new(bounds, self.half_floor, predicted.theta, Some(predicted.var_theta));
        let certain = (bounds.low, bounds.high);
        let surprise = measurement.surprise(&predicted) / dt_ns.max(1.0) * NS;
        if let Some(last) = segment.nodes.last_mut() {
            last.rho += surprise;
        }
        if self.is_suspect(&measurement, &predicted) {
            let (burst, bounds, state) = (burst.clone(), *bounds, self.state);
            self.suspects.push(Suspect { burst, bounds, measurement, state, dt_ns });
            if self.suspects.len() == SUSPECTS {
                return self.judge(segment);
            }
            // Not believed yet, so only what is certain counts.
            self.state = State { theta: predicted.theta.clamp(certain.0, certain.1), ..predicted };
        } else {
            self.suspects.clear();
            self.agreed = measurement.tight;
            if self.is_strained(&measurement, &predicted) {
                self.raise_wander();
                predicted = self.state.predict(dt_ns, self.wander);
            }
            self.state = predicted.update(&measurement, certain);
        }
        if let Some(Warming { low, high, .. }) = self.warming {
            self.state.rate = self.state.rate.clamp(low, high);
        }
        segment.push(Node {
            theta: self.state.theta,
            rate: self.state.rate,
            rho: self.rho() + surprise,
            sd_theta: self.state.sd_theta(),
            ..Node::new(bounds, burst)
        });
        Verdict::Taken
    }

    /// Whether the suspects are behind a step, or the rate has changed: then they are taken in.
    fn judge(&mut self, segment: &mut Segment) -> Verdict {
        let mut off = [0.0; SUSPECTS];
        let (Some(first), mut dt_ns) = (self.suspects.first(), 0.0) else { return Verdict::Taken };
        let before = first.state;
        for (off, suspect) in off.iter_mut().zip(&self.suspects) {
            dt_ns += suspect.dt_ns;
            *off = (suspect.measurement.z - before.predict(dt_ns, 0.0).theta) * self.side;
        }
        let strayed = off[SUSPECTS - 1] - off[0];
        if strayed <= off[0].max(SUSPECT_NS) / 2.0 + SUSPECT_SIGMAS * before.sd_rate() * dt_ns / NS {
            return Verdict::Stepped(SUSPECTS);
        }
        self.state = before;
        let is_explained = |wander| off[SUSPECTS - 1].powi(2) < 4.0 * before.predict(dt_ns, wander).var_theta;
        while !is_explained(self.wander) && self.raise_wander() {}
        let suspects = std::mem::take(&mut self.suspects);
        segment.nodes.truncate((segment.nodes.len() + 1).saturating_sub(SUSPECTS));
        for Suspect { burst, bounds, .. } in &suspects {
            self.agreed = false;
            self.filter(burst, bounds, 0.0, segment);
        }
        Verdict::Taken
    }

    /// False when it is as high as it may be.
    fn raise_wander(&mut self) -> bool {
        self.strain = 1.0;
        self.wander = (self.wander * WANDER_FACTOR).min(WANDER_MOST);
        self.wander < WANDER_MOST
    }

    /// Whether forecasts have been off by more than the wander explains.
    fn is_strained(&mut self, measurement: &Measurement, predicted: &State) -> bool {
        if self.warming.is_none() && measurement.tells {
            let innovation = measurement.z - predicted.theta;
            let square = innovation * innovation / (predicted.var_theta + measurement.variance);
            self.strain += (square - self.strain) / STRAIN_BURSTS;
        }
        self.strain > STRAIN
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

impl Warming {
    /// The rate, and what it may be wrong by.
    fn rate(&self) -> (f64, f64) {
        (f64::midpoint(self.low, self.high), (self.high - self.low) / 2.0)
    }

    fn is_over(&self, bursts: usize) -> bool {
        self.rate().1 <= WARM + RHO || bursts >= WARM_BURSTS
    }

    /// Takes in what a burst and those before it say of the rate; false when they allow none.
    fn take(&mut self, burst: &Burst, bounds: &Bounds, segment: &Segment) -> bool {
        let certain = (bounds.low, bounds.high);
        for node in &segment.nodes {
            let dt = (bounds.x - node.x) / NS;
            self.low = self.low.max((certain.0 - node.high) / dt - RHO);
            self.high = self.high.min((certain.1 - node.low) / dt + RHO);
        }
        if self.low > self.high {
            return false;
        }
        self.bursts.push((*bounds, burst.clone()));
        true
    }
}

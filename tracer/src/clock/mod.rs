//! Device clocks → CLOCK_MONOTONIC, with a bound for every value.
//!
//! In: clock bursts (host, device, host brackets that the injected library took), brackets of the host's own clocks,
//! and what the host saw of launches and waits. Out: [`GpuTime`]s. A device time without its bound never leaves this
//! folder, and nothing is ever interpolated across an epoch, a break in the chain of bases, a step of either clock, or
//! a suspend.
//!
//! One series is one clock: (process, device, context, epoch). Its device time counts ns from the first base event,
//! `T(k) = T(k−1) + elapsed(base k−1, base k)`; θ is host − device, the host side on CLOCK_MONOTONIC_RAW, which NTP
//! does not slew.
//!
//! - `burst`: a burst bounds θ from both sides; `quantum`: by how much device readings are rounded down;
//! - `filter`: an interval Kalman filter and its smoother; `track` runs it forward and cuts at interruptions, `fit`
//!   smooths what lies between two cuts;
//! - `curve`: θ between bursts, and the corridor that it must lie in: the bound that is given;
//! - `causality`: launches and waits agree with the map, or are counted;
//! - `host`: RAW → MONOTONIC; `wall`: MONOTONIC → REALTIME, for logs.
//!
//! A bound holds if crystals keep their rate within ρ between bursts and no step went unseen. The curve is the middle
//! of what is possible, and its error is half of what the way to the device takes longer than the way back: no
//! two-way exchange can see that.

mod burst;
mod causality;
mod curve;
mod filter;
mod fit;
mod host;
mod live;
mod quality;
mod quantum;
mod series;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;
mod track;
mod wall;

use std::collections::BTreeMap;

use crate::event::mark::{ClockBurst, GpuSpan};
use crate::event::{HostClock, ProcessId};
use crate::timeline::rows::GpuTime;
use crate::timeline::{Clock, Witness};
use burst::Burst;
pub use burst::rounding_ns;
use causality::{Count, Sample};
pub use curve::Knot;
use curve::Segment;
use host::HostMap;
pub use live::LiveClock;
pub use quality::{ClockQuality, Quality};
pub use quantum::grid_ns;
use series::Bases;
pub use wall::WallClock;

/// One device clock as one process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeriesKey {
    pub process: ProcessId,
    pub device_uuid: [u8; 16],
    pub context: u64,
    pub epoch: u32,
}

impl SeriesKey {
    fn of_burst(process: ProcessId, burst: &ClockBurst) -> Self {
        Self { process, device_uuid: burst.device_uuid, context: burst.context, epoch: burst.epoch }
    }

    fn of_span(process: ProcessId, span: &GpuSpan) -> Self {
        Self { process, device_uuid: span.device_uuid, context: span.context, epoch: span.epoch }
    }
}

/// The bursts of one clock and what was made of them.
#[derive(Debug, Default)]
struct Series {
    bases: Bases,
    bursts: Vec<Burst>,
    samples: Vec<Sample>,
    /// `None`: something came since the last fit.
    fitted: Option<Fitted>,
}

#[derive(Debug)]
struct Fitted {
    segments: Vec<Segment>,
    rejected: u64,
    causality: Count,
}

impl Series {
    fn push(&mut self, burst: &ClockBurst) {
        if let Some(burst) = self.bases.burst(burst) {
            self.bursts.push(burst);
            self.fitted = None;
        }
    }

    fn fitted(&mut self, host: &HostMap) -> &mut Fitted {
        let Self { bases, bursts, samples, fitted } = self;
        fitted.get_or_insert_with(|| {
            bases.settle_quanta(bursts);
            let (mut segments, rejected) = fit::fit(bursts, host);
            let causality = causality::apply(samples, &mut segments, host);
            Fitted { segments, rejected, causality }
        })
    }
}

/// Maps device times of any number of clocks to CLOCK_MONOTONIC, with hindsight.
#[derive(Debug, Default)]
pub struct DeviceClock {
    host: HostMap,
    series: BTreeMap<SeriesKey, Series>,
}

impl DeviceClock {
    /// Fits all clocks of a recording from its bursts (with the process that took them) and host brackets, each in
    /// order of time.
    #[must_use]
    pub fn fit<'a>(
        bursts: impl IntoIterator<Item = (ProcessId, &'a ClockBurst)>,
        host: impl IntoIterator<Item = &'a HostClock>,
    ) -> Self {
        let mut clock = Self::default();
        host.into_iter().for_each(|bracket| clock.learn_host(bracket));
        bursts.into_iter().for_each(|(process, burst)| clock.learn(process, burst));
        clock
    }

    /// Takes one more burst in. Fits anew what it changes, when that is next asked for.
    pub fn learn(&mut self, process: ProcessId, burst: &ClockBurst) {
        self.series.entry(SeriesKey::of_burst(process, burst)).or_default().push(burst);
    }

    /// Takes one more host bracket in; all of them before the first time is mapped.
    pub fn learn_host(&mut self, bracket: &HostClock) {
        self.host.push(bracket);
    }

    /// Takes in when a span was launched, once its base is known. What comes before the first time is mapped narrows
    /// bounds.
    pub fn learn_launch(&mut self, process: ProcessId, span: &GpuSpan) {
        self.witness(process, span, Witness::LaunchBegan(span.enqueue_begin_ns));
    }

    /// The curve of every series, for the `clock` table.
    pub fn knots(&mut self) -> impl Iterator<Item = (SeriesKey, Knot)> {
        let host = &self.host;
        self.series.iter_mut().flat_map(move |(key, series)| {
            let segments = series.fitted(host).segments.iter().zip(0..);
            segments.flat_map(move |(segment, i)| segment.knots(i).map(move |knot| (*key, knot)))
        })
    }

    /// How good each clock is.
    pub fn quality(&mut self) -> impl Iterator<Item = ClockQuality> {
        let host = &self.host;
        self.series.iter_mut().map(move |(key, series)| {
            let fitted = series.fitted(host);
            let quality = Quality::of(&fitted.segments).with(fitted.rejected, fitted.causality);
            ClockQuality { series: *key, quality }
        })
    }
}

impl Clock for DeviceClock {
    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        let series = self.series.get_mut(&SeriesKey::of_span(process, span))?;
        let place = series.bases.place(span)?;
        place.map(&series.fitted(&self.host).segments, &self.host)
    }

    fn witness(&mut self, process: ProcessId, span: &GpuSpan, witness: Witness) {
        let Some(series) = self.series.get_mut(&SeriesKey::of_span(process, span)) else { return };
        let Some(place) = series.bases.place(span) else { return };
        let sample = place.sample(witness);
        match &mut series.fitted {
            None => series.samples.push(sample),
            Some(fitted) => {
                if let Some(violated) = sample.is_violated(&fitted.segments, &self.host) {
                    fitted.causality.add(violated);
                }
            }
        }
    }
}

/// An instant on CLOCK_MONOTONIC_RAW: whole ns and a fraction, right within `bound_ns`.
#[derive(Clone, Copy, Debug)]
struct RawTime {
    ns: i64,
    fraction_ns: f64,
    bound_ns: f64,
}

//! Device clocks → CLOCK_MONOTONIC, with a bound for every value.
//!
//! In: clock bursts (host, device, host brackets that the injected library took) and brackets of the host's own
//! clocks. Out: [`GpuTime`]s. A device time without its bound never leaves this folder, and nothing is ever
//! interpolated across an epoch, a break in the chain of bases, a step of either clock, or a suspend.
//!
//! One series is one clock: (process, device, context, epoch). Its device time counts ns from the first base event,
//! `T(k) = T(k−1) + elapsed(base k−1, base k)`; θ is host − device, the host side on CLOCK_MONOTONIC_RAW, which NTP
//! does not slew. Each burst bounds θ from both sides; [`segment`] estimates θ between the bursts and says within
//! what it must be; [`host`] takes RAW to MONOTONIC.

mod burst;
mod host;
mod segment;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::event::mark::{ClockBurst, GpuSpan};
use crate::event::{Event, HostClock, Mark, ProcessId};
use crate::timeline::Clock;
use crate::timeline::rows::GpuTime;
use burst::{Burst, MAX_NS, is_elapsed, ms_to_ns, rounding_ns};
use host::HostMap;
pub use segment::Knot;
use segment::Segment;

/// Bursts that a live clock remembers of each series: about two minutes.
const LIVE_BURSTS: usize = 256;

/// One device clock as one process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeriesKey {
    pub process: ProcessId,
    pub device_uuid: [u8; 16],
    pub context: u64,
    pub epoch: u32,
}

/// A base event of a series.
#[derive(Clone, Copy, Debug)]
struct Base {
    /// Device time in ns since the first base of its chain.
    device_ns: i64,
    /// What rounding may have added up to since then, in ns.
    rounding_ns: f64,
    /// Bases whose distance is known. A lost re-base begins a new chain.
    chain: u32,
}

/// The bursts of one clock and what was made of them.
#[derive(Debug, Default)]
struct Series {
    bases: BTreeMap<u32, Base>,
    bursts: Vec<Burst>,
    chains: u32,
    /// `None`: bursts came since the last fit.
    segments: Option<Vec<Segment>>,
}

impl Series {
    fn push(&mut self, burst: &ClockBurst) {
        let base = match (self.bases.get(&burst.base), burst.rebase_ms) {
            (Some(base), _) => *base,
            (None, rebase_ms) => self.add_base(burst.base, rebase_ms),
        };
        if let Some(burst) = Burst::new(base.device_ns, base.rounding_ns, base.chain, burst) {
            self.bursts.push(burst);
            self.segments = None;
        }
    }

    fn add_base(&mut self, number: u32, rebase_ms: Option<f32>) -> Base {
        let before = number.checked_sub(1).and_then(|before| self.bases.get(&before));
        let base = match (before, rebase_ms.filter(|ms| is_elapsed(*ms))) {
            (Some(before), Some(ms)) if before.device_ns < MAX_NS / 2 => Base {
                device_ns: before.device_ns + ms_to_ns(ms).round() as i64,
                rounding_ns: before.rounding_ns + rounding_ns(ms) + 0.5,
                chain: before.chain,
            },
            _ => {
                self.chains += 1;
                Base { device_ns: 0, rounding_ns: 0.0, chain: self.chains }
            }
        };
        self.bases.insert(number, base);
        base
    }

    fn forget_all_but(&mut self, bursts: usize) {
        let excess = self.bursts.len().saturating_sub(bursts);
        self.bursts.drain(..excess);
        // A base has at least one burst: no more bases than that are of use.
        while self.bases.len() > bursts {
            self.bases.pop_first();
        }
    }

    fn segments(&mut self, host: &HostMap) -> &[Segment] {
        self.segments.get_or_insert_with(|| segment::fit(&self.bursts, host.suspends()))
    }
}

/// Maps device times of any number of clocks to CLOCK_MONOTONIC.
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
        self.push(process, burst);
    }

    /// Takes one more host bracket in.
    pub fn learn_host(&mut self, bracket: &HostClock) {
        self.host.push(bracket);
    }

    fn push(&mut self, process: ProcessId, burst: &ClockBurst) -> &mut Series {
        let ClockBurst { device_uuid, context, epoch, .. } = *burst;
        let series = self.series.entry(SeriesKey { process, device_uuid, context, epoch }).or_default();
        series.push(burst);
        series
    }

    /// The curve of every series, for the `clock` table.
    pub fn knots(&mut self) -> impl Iterator<Item = (SeriesKey, Knot)> {
        let host = &self.host;
        self.series.iter_mut().flat_map(move |(key, series)| {
            let segments = series.segments(host).iter().zip(0..);
            segments.flat_map(move |(segment, i)| segment.knots(i).map(move |knot| (*key, knot)))
        })
    }

    fn map_span(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        let &GpuSpan { device_uuid, context, epoch, begin_ms, span_ms, .. } = span;
        if !(is_elapsed(begin_ms) && is_elapsed(span_ms)) {
            return None;
        }
        let series = self.series.get_mut(&SeriesKey { process, device_uuid, context, epoch })?;
        let base = *series.bases.get(&span.base)?;
        let near_ns = base.device_ns + ms_to_ns(begin_ms) as i64;
        let segments = series.segments(&self.host);
        let segment = Segment::holding(segments, base.chain, near_ns)?;
        let begin_rounding = rounding_ns(begin_ms);
        let begin = segment.map(base.device_ns, ms_to_ns(begin_ms), begin_rounding, base.rounding_ns);
        let end = segment.map(
            base.device_ns,
            ms_to_ns(begin_ms) + ms_to_ns(span_ms),
            begin_rounding + rounding_ns(span_ms),
            base.rounding_ns,
        );
        let (begin_ns, begin_bound) = self.host.monotonic(begin)?;
        let (end_ns, end_bound) = self.host.monotonic(end)?;
        let end_ns = end_ns.max(begin_ns);
        Some(GpuTime { begin_ns, end_ns, span_ns: end_ns - begin_ns, bound_ns: begin_bound.max(end_bound) })
    }
}

impl Clock for DeviceClock {
    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        self.map_span(process, span)
    }
}

/// A device clock that learns while events pass: forward only, so its bounds are a little wider.
#[derive(Debug, Default)]
pub struct LiveClock(DeviceClock);

impl Clock for LiveClock {
    fn observe(&mut self, event: &Event) {
        match event {
            Event::HostClock(bracket) => {
                self.0.host.push(bracket);
                self.0.host.forget_all_but(LIVE_BURSTS * 25);
            }
            Event::Mark(event) => {
                if let Mark::ClockBurst(burst) = &event.mark {
                    self.0.push(event.origin.process, burst).forget_all_but(LIVE_BURSTS);
                }
            }
            _ => {}
        }
    }

    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        self.0.map_span(process, span)
    }
}

/// An instant on CLOCK_MONOTONIC_RAW: whole ns and a fraction, right within `bound_ns`.
#[derive(Clone, Copy, Debug)]
struct RawTime {
    ns: i64,
    fraction_ns: f64,
    bound_ns: f64,
}

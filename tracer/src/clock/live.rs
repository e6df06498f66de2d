//! A device clock that learns while events pass: forward only, so its bounds are a little wider.

use std::collections::BTreeMap;

use super::SeriesKey;
use super::causality::Count;
use super::host::HostMap;
use super::quality::{ClockQuality, Quality};
use super::series::Bases;
use super::track::Tracker;
use crate::event::mark::{ClockBurst, GpuSpan};
use crate::event::{Event, HostClock, Mark, ProcessId};
use crate::timeline::rows::GpuTime;
use crate::timeline::{Clock, Witness};

/// Bursts that are remembered of each series: about two minutes.
const BURSTS: usize = 256;
/// Brackets of the host's clocks: as long.
const BRACKETS: usize = 25 * BURSTS;

/// Maps device times while bursts come.
#[derive(Debug, Default)]
pub struct LiveClock {
    host: HostMap,
    series: BTreeMap<SeriesKey, Series>,
}

#[derive(Debug, Default)]
struct Series {
    bases: Bases,
    tracker: Tracker,
    causality: Count,
}

impl Series {
    fn check(&mut self, span: &GpuSpan, witness: Witness, host: &HostMap) {
        let sample = self.bases.place(span).map(|place| place.sample(witness));
        if let Some(violated) = sample.and_then(|sample| sample.is_violated(&self.tracker.segments, host)) {
            self.causality.add(violated);
        }
    }
}

impl LiveClock {
    /// Takes one more burst in.
    pub fn learn(&mut self, process: ProcessId, burst: &ClockBurst) {
        let series = self.series.entry(SeriesKey::of_burst(process, burst)).or_default();
        if let Some(burst) = series.bases.burst(burst) {
            series.tracker.push(&burst, &self.host);
            series.tracker.forget_all_but(BURSTS);
            series.bases.forget_all_but(BURSTS);
        }
    }

    /// Takes one more host bracket in.
    pub fn learn_host(&mut self, bracket: &HostClock) {
        self.host.push(bracket);
        self.host.forget_all_but(BRACKETS);
    }

    /// How good each clock has been over the last two minutes.
    pub fn quality(&self) -> impl Iterator<Item = ClockQuality> {
        self.series.iter().map(|(key, series)| {
            let quality = Quality::of(&series.tracker.segments);
            ClockQuality { series: *key, quality: quality.with(series.tracker.rejected, series.causality) }
        })
    }
}

impl Clock for LiveClock {
    fn observe(&mut self, event: &Event) {
        match event {
            Event::HostClock(bracket) => self.learn_host(bracket),
            Event::Mark(event) => {
                if let Mark::ClockBurst(burst) = &event.mark {
                    self.learn(event.origin.process, burst);
                }
            }
            _ => {}
        }
    }

    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        let series = self.series.get_mut(&SeriesKey::of_span(process, span))?;
        let time = series.bases.place(span)?.map(&series.tracker.segments, &self.host);
        series.check(span, Witness::LaunchBegan(span.enqueue_begin_ns), &self.host);
        time
    }

    fn witness(&mut self, process: ProcessId, span: &GpuSpan, witness: Witness) {
        if let Some(series) = self.series.get_mut(&SeriesKey::of_span(process, span)) {
            series.check(span, witness, &self.host);
        }
    }
}

//! A simulation as the injected library would report it, and what our clocks make of it.

use tracer::clock::{DeviceClock, LiveClock, Quality};
use tracer::event::mark::{ClockBurst, GpuSpan};
use tracer::event::{HostClock, ProcessId};
use tracer::timeline::Clock;
use tracer_abi::mark::ClockReading;

use super::{Bracket, Simulation};

const PROCESS: ProcessId = ProcessId { tgid: 1, start_ticks: 1 };
/// RAW, and MONOTONIC, ns at the start.
const START_NS: u64 = 3_600_000_000_000;
/// A burst begins a new base this long after the last: at two a second, each does.
const REBASE_US: f64 = 0.3e6;
/// Brackets of the host's clocks, and how long one takes.
const HOST_PER_SECOND: f64 = 50.0;
const HOST_GAP_NS: f64 = 40.0;
/// A step is mapped this long after it began at the earliest (`timeline::Config::order_ns`): the brackets of the host's
/// clocks around it are known then, the burst after it may not be.
const RELEASE_NS: u64 = 250_000_000;

/// Where a clock put something, relative to the truth.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    pub host_us: f64,
    pub error_us: f64,
    /// `None`: the estimator gives none.
    pub bound_us: Option<f64>,
}

/// Marks and brackets of a simulation.
pub struct Recording<'a> {
    simulation: &'a Simulation,
    bursts: Vec<ClockBurst>,
    host: Vec<HostClock>,
    /// Number of each base, the bracket that it was in, and when its burst was over.
    bases: Vec<(u32, &'a Bracket, f64)>,
}

impl<'a> Recording<'a> {
    #[must_use]
    pub fn new(simulation: &'a Simulation) -> Self {
        let mut bases: Vec<(u32, &Bracket, f64)> = Vec::new();
        let mut bursts = Vec::with_capacity(simulation.bursts.len());
        for burst in &simulation.bursts {
            let (Some(first), Some(end)) = (burst.first(), burst.last()) else { continue };
            let last = bases.last().copied();
            let mut rebase_ms = None;
            let (number, base, _) = match last {
                Some(last) if first.event - last.1.event < REBASE_US => last,
                _ => {
                    rebase_ms = last.map(|(_, base, _)| elapsed_ms(base, first.device));
                    let base = (last.map_or(0, |(number, ..)| number + 1), first, end.after);
                    bases.push(base);
                    base
                }
            };
            let reading = |bracket: &Bracket| ClockReading {
                h0_raw_ns: START_NS + (bracket.before * 1e3).floor() as u64,
                h1_raw_ns: START_NS + (bracket.after * 1e3).ceil() as u64,
                elapsed_ms_bits: elapsed_ms(base, bracket.device).to_bits(),
                _pad: 0,
            };
            bursts.push(ClockBurst {
                device_uuid: [1; 16],
                context: 1,
                epoch: 0,
                base: number,
                rebase_ms,
                readings: burst.iter().map(reading).collect(),
            });
        }
        let brackets = 0..(simulation.config.seconds * HOST_PER_SECOND) as u64 + 2;
        let host = brackets.map(|i| {
            // Half a period off the start, so that no slew begins at a bracket.
            let raw_ns = (i as f64 - 0.5) * 1e9 / HOST_PER_SECOND;
            let monotonic_ns = simulation.monotonic(raw_ns / 1e3) * 1e3;
            HostClock {
                raw_before_ns: START_NS.saturating_add_signed((raw_ns - HOST_GAP_NS / 2.0) as i64),
                monotonic_ns: START_NS.saturating_add_signed(monotonic_ns.round() as i64),
                raw_after_ns: START_NS.saturating_add_signed((raw_ns + HOST_GAP_NS / 2.0) as i64),
                realtime_ns: None,
                boottime_ns: None,
            }
        });
        Self { simulation, bursts, host: host.collect(), bases }
    }

    /// Something without duration that happens on the device.
    /// What happens on the device at a host time, as the injected library would report it.
    #[must_use]
    pub fn span(&self, host_us: f64) -> GpuSpan {
        let after = self.bases.partition_point(|(_, _, end)| *end <= host_us);
        let device = self.simulation.read(host_us);
        let base = self.bases.get(after.saturating_sub(1));
        let (base, begin_ms) =
            base.map_or((0, f32::NAN), |(number, base, _)| (*number, elapsed_ms(base, device)));
        GpuSpan {
            device_uuid: [1; 16],
            context: 1,
            stream: 0,
            sequence: 0,
            enqueue_begin_ns: 0,
            enqueue_end_ns: 0,
            tid: 1,
            epoch: 0,
            base,
            begin_ms,
            span_ms: 0.0,
            sampled: false,
        }
    }

    /// Brackets of the host's clocks.
    #[must_use]
    pub fn host(&self) -> &[HostClock] {
        &self.host
    }

    /// In order of time, each with a base of its own at two a second.
    #[must_use]
    pub fn bursts(&self) -> &[ClockBurst] {
        &self.bursts
    }

    fn ask(&self, clock: &mut impl Clock, host_us: f64) -> Option<Estimate> {
        let time = clock.map(PROCESS, &self.span(host_us))?;
        let truth_us = self.simulation.monotonic(host_us);
        let mapped_us = time.begin_ns.cast_signed().saturating_sub_unsigned(START_NS) as f64 / 1e3;
        Some(Estimate { host_us, error_us: mapped_us - truth_us, bound_us: Some(time.bound_ns as f64 / 1e3) })
    }

    /// With hindsight, of every query that maps; and how good the clock says it is.
    #[must_use]
    pub fn offline(&self) -> (Vec<Estimate>, Quality) {
        let mut clock = DeviceClock::fit(self.bursts.iter().map(|burst| (PROCESS, burst)), &self.host);
        let estimates =
            self.simulation.queries.iter().filter_map(|host| self.ask(&mut clock, *host)).collect();
        let quality = clock.quality().next().map_or_else(Quality::default, |clock| clock.quality);
        (estimates, quality)
    }

    /// Each query by the bursts before it.
    #[must_use]
    pub fn live(&self) -> (Vec<Estimate>, Quality) {
        let mut clock = LiveClock::default();
        let mut bursts = self.bursts.iter().zip(&self.simulation.bursts).peekable();
        let mut host = self.host.iter().peekable();
        let mut estimates = Vec::with_capacity(self.simulation.queries.len());
        for &query in &self.simulation.queries {
            let now_ns = START_NS + (query * 1e3) as u64;
            while let Some(bracket) = host.next_if(|bracket| bracket.raw_after_ns <= now_ns + RELEASE_NS) {
                clock.learn_host(bracket);
            }
            let is_past =
                |burst: &(&ClockBurst, &Vec<Bracket>)| burst.1.last().is_none_or(|last| last.after <= query);
            while let Some((burst, _)) = bursts.next_if(is_past) {
                clock.learn(PROCESS, burst);
            }
            estimates.extend(self.ask(&mut clock, query));
        }
        let quality = clock.quality().next().map_or_else(Quality::default, |clock| clock.quality);
        (estimates, quality)
    }
}

/// As cuEventElapsedTime would round.
fn elapsed_ms(base: &Bracket, device_us: f64) -> f32 {
    (elapsed_ns(base, device_us) / 1e6) as f32
}

fn elapsed_ns(base: &Bracket, device_us: f64) -> f64 {
    ((device_us - base.device) * 1e3).round()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock_sim::Config;

    #[test]
    fn bases_are_so_close_that_floats_are_good_to_35_ns() {
        let simulation = Simulation::new(Config { seconds: 60.0, ..Config::default() });
        let recording = Recording::new(&simulation);
        for host in &simulation.queries {
            let span = recording.span(*host);
            let exact_ns = elapsed_ns(recording.bases[span.base as usize].1, simulation.read(*host));
            assert!(exact_ns < 1.024e9, "{exact_ns}");
            assert!((f64::from(span.begin_ms) * 1e6 - exact_ns).abs() <= 35.0, "{exact_ns}");
        }
    }
}

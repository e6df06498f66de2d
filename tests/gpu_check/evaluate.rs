//! A recording → lines, by the estimators that captures are mapped with.

use tracer::clock::{ClockQuality, DeviceClock, Knot, Quality, rounding_ns};
use tracer::event::HostClock;
use tracer::event::mark::{ClockBurst, GpuSpan};
use tracer::timeline::{Clock as _, Witness};
use tracer_abi::mark::ClockReading;
use tracer_tests::stats::{Aim, median};

use crate::handshake::{Comparison, compare, step_ns};
use crate::line::Line;
use crate::record::{PROCESS, Recording};

/// A burst whose bounds are at most this many times as wide as the tightest says where the device's clock was.
const TIGHT: f64 = 1.5;
/// Over which a rate is taken: long enough that what bounds leave open does not matter.
const WINDOW_NS: i64 = 10_000_000_000;
/// Fewer values than this support no p99: ten must lie beyond it.
const ENOUGH_FOR_P99: usize = 1_000;
const NONE_AT_ALL: Option<Aim> = Some(Aim::AtMost(0.0));

pub(crate) fn lines(recording: &Recording) -> Vec<Line> {
    let mut clock = DeviceClock::fit(recording.bursts.iter().map(|burst| (PROCESS, burst)), &recording.host);
    recording.launches.iter().for_each(|launch| clock.learn_launch(PROCESS, &launch.span));
    for launch in &recording.launches {
        clock.witness(PROCESS, &launch.span, Witness::WaitReturned(launch.returned_ns));
    }
    let knots: Vec<Knot> = clock.knots().map(|(_, knot)| knot).collect();
    let Some(ClockQuality { quality, .. }) = clock.quality().next() else {
        return vec![Line::missing("clocks", "", None, "the device answered no burst".into())];
    };
    let mut lines = of_readings(recording, &quality);
    lines.extend(of_rates(&knots, &quality));
    lines.extend(of_rounding(recording));
    lines.extend(HoldOut::new(&recording.bursts).lines());
    lines.push(Line::new(
        "causality violations",
        "",
        quality.causality_violations as f64,
        NONE_AT_ALL,
        format!("of {} launches and waits", quality.causality_samples),
    ));
    lines.extend(of_handshakes(recording, &mut clock));
    lines
}

fn round_trip_ns(reading: &ClockReading) -> f64 {
    reading.h1_raw_ns.saturating_sub(reading.h0_raw_ns) as f64
}

fn least(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.min_by(f64::total_cmp)
}

fn greatest(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.max_by(f64::total_cmp)
}

fn of_readings(recording: &Recording, quality: &Quality) -> Vec<Line> {
    let best: Vec<f64> =
        recording.bursts.iter().filter_map(|burst| least(burst.readings.iter().map(round_trip_ns))).collect();
    let floor_us = least(best.iter().copied()).unwrap_or(f64::NAN) / 1e3;
    let quantum_us = quality.quantum_ns as f64 / 1e3;
    let typical_us = median(&best).unwrap_or(f64::NAN) / 1e3;
    let bound_aim = floor_us / 2.0 + quantum_us + 1.0;
    vec![
        Line::new(
            "round trip of a reading, floor",
            "µs",
            floor_us,
            None,
            format!("of {} bursts; a burst's best is {typical_us:.2} µs (median)", best.len()),
        ),
        Line::new(
            "event quantum",
            "µs",
            quantum_us,
            Some(Aim::AtMost(1.0)),
            "the coarsest that any base showed; few readings at even intervals may look coarser than the device is, and \
             one whose step is not known yet is taken for one of 1 µs"
                .into(),
        ),
        Line::new(
            "bound of a GPU time, median",
            "µs",
            quality.median_bound_ns as f64 / 1e3,
            Some(Aim::AtMost(bound_aim)),
            format!("aim: floor / 2 + quantum + 1 µs; p99 {:.2} µs", quality.p99_bound_ns as f64 / 1e3),
        ),
        Line::new(
            "interruptions of the clock",
            "",
            f64::from(quality.segments.saturating_sub(1)),
            NONE_AT_ALL,
            format!("{} bursts contradicted themselves", quality.bursts_rejected),
        ),
    ]
}

/// Rates of θ over windows, in ppm, in each uninterrupted stretch; and the greatest change from one to the next.
fn rates(knots: &[Knot]) -> (Vec<f64>, Option<f64>) {
    let mut rates = Vec::new();
    let mut changes = Vec::new();
    let mut last: Option<(u32, f64)> = None;
    let mut from: Option<&Knot> = None;
    for knot in knots {
        let Some(begin) = from.filter(|begin| begin.segment == knot.segment) else {
            from = Some(knot);
            continue;
        };
        let (host_ns, device_ns) = (knot.host_raw_ns - begin.host_raw_ns, knot.device_ns - begin.device_ns);
        if host_ns >= WINDOW_NS {
            let rate = (host_ns - device_ns) as f64 / device_ns as f64 * 1e6;
            if let Some((_, before)) = last.filter(|(segment, _)| *segment == knot.segment) {
                changes.push((rate - before).abs() / (host_ns as f64 / 1e9));
            }
            rates.push(rate);
            last = Some((knot.segment, rate));
            from = Some(knot);
        }
    }
    (rates, greatest(changes.into_iter()))
}

fn of_rates(knots: &[Knot], quality: &Quality) -> Vec<Line> {
    let names = ["wander of the device's rate", "fastest change of the rate"];
    let aim = Some(Aim::AtMost(0.2));
    let (rates, change) = rates(knots);
    let (Some(change), Some(low), Some(high)) =
        (change, least(rates.iter().copied()), greatest(rates.iter().copied()))
    else {
        let why = || "takes at least 30 s without an interruption".to_owned();
        return vec![
            Line::missing(names[0], "ppm", None, why()),
            Line::missing(names[1], "ppm/s", aim, why()),
        ];
    };
    let note = format!(
        "over {} windows of 10 s; the device runs {:+.2} ppm from CLOCK_MONOTONIC_RAW",
        rates.len(),
        quality.drift_ppm
    );
    let assumed = "what bounds between bursts assume of crystals".to_owned();
    vec![
        Line::new(names[0], "ppm", high - low, None, note),
        Line::new(names[1], "ppm/s", change, aim, assumed),
    ]
}

/// How far ms are from whole ns, in ns.
fn off_grid_ns(ms: f32) -> f64 {
    let ns = f64::from(ms) * 1e6;
    (ns - ns.round()).abs()
}

/// Whether elapsed times are whole ns, rounded once to f32, and add up.
fn of_rounding(recording: &Recording) -> Vec<Line> {
    let readings = recording.bursts.iter().flat_map(|burst| &burst.readings);
    let elapsed = readings.map(|reading| f32::from_bits(reading.elapsed_ms_bits));
    let spans = recording.launches.iter().map(|launch| launch.span.span_ms);
    // Beyond that f32 does not resolve a ns.
    let resolved: Vec<f32> = elapsed.chain(spans).filter(|ms| *ms > 0.0 && rounding_ns(*ms) < 0.25).collect();
    // The conversion to f64 ns adds far less than this.
    let off = resolved.iter().filter(|ms| off_grid_ns(**ms) > rounding_ns(**ms) + 1e-6).count();
    let (mut chain_ns, mut slack_ns) = (0.0, 0.0);
    let (mut worst, mut beyond, mut checked) = ((0.0, 0.0), 0, 0);
    for (burst, far_ms) in recording.bursts.iter().zip(&recording.far_ms) {
        let Some(rebase_ms) = burst.rebase_ms else { continue };
        chain_ns += (f64::from(rebase_ms) * 1e6).round();
        slack_ns += rounding_ns(rebase_ms) + 0.5;
        let far_ns = f64::from(*far_ms) * 1e6;
        let difference_ns = (far_ns - chain_ns).abs();
        checked += 1;
        beyond += usize::from(difference_ns > slack_ns + rounding_ns(*far_ms));
        if difference_ns > worst.0 {
            worst = (difference_ns, far_ns / 1e9);
        }
    }
    let spans = recording.launches.iter().map(|launch| rounding_ns(launch.span.begin_ms));
    let rounding = greatest(spans).unwrap_or(0.0);
    vec![
        Line::new(
            "elapsed times that are no rounded whole ns",
            "",
            off as f64,
            NONE_AT_ALL,
            format!("of {} that f32 resolves to 1 ns", resolved.len()),
        ),
        Line::new(
            "elapsed times against their sum by bases",
            "",
            beyond as f64,
            NONE_AT_ALL,
            format!(
                "of {checked}, beyond what rounding explains; from one base alone a time is off by up to {:.2} µs, at \
                 {:.0} s",
                worst.0 / 1e3,
                worst.1
            ),
        ),
        Line::new(
            "rounding of a begin against its base, worst",
            "µs",
            rounding / 1e3,
            Some(Aim::AtMost(0.035)),
            String::new(),
        ),
    ]
}

/// The clock fitted on every other burst, against the bursts between.
struct HoldOut {
    /// Of tight bursts: how far the prediction is from the middle of what they allow, in µs.
    errors_us: Vec<f64>,
    /// Readings whose bracket and the predicted time, with its bound, exclude each other; of how many.
    outside: usize,
    predicted: usize,
    unpredicted: usize,
    worst_bound_us: f64,
}

impl HoldOut {
    fn new(bursts: &[ClockBurst]) -> Self {
        // Brackets that say that both of the host's clocks are the same, so that predictions are on
        // CLOCK_MONOTONIC_RAW as the readings are.
        let same = |ns: u64| HostClock {
            raw_before_ns: ns,
            monotonic_ns: ns,
            raw_after_ns: ns,
            realtime_ns: None,
            boottime_ns: None,
        };
        let times: Vec<u64> = bursts
            .iter()
            .filter_map(|burst| burst.readings.first())
            .map(|reading| reading.h0_raw_ns)
            .collect();
        let (first, last) = (times.first().copied().unwrap_or(0), times.last().copied().unwrap_or(0));
        let around = |ns: u64, far: u64| [ns.saturating_sub(far), ns.saturating_add(far)];
        let mut host: Vec<u64> = times;
        for far in [1_000_000_000, 2_000_000_000] {
            host.push(around(first, far)[0]);
            host.push(around(last, far)[1]);
        }
        host.sort_unstable();
        host.dedup();
        let host: Vec<HostClock> = host.into_iter().map(same).collect();
        // Of a burst that is held out, only its base is known: the chain of bases goes through all.
        let known: Vec<ClockBurst> = bursts
            .iter()
            .enumerate()
            .map(|(i, burst)| match i % 2 {
                0 => burst.clone(),
                _ => ClockBurst { readings: Vec::new(), ..burst.clone() },
            })
            .collect();
        let mut clock = DeviceClock::fit(known.iter().map(|burst| (PROCESS, burst)), &host);
        let mut out =
            Self { errors_us: Vec::new(), outside: 0, predicted: 0, unpredicted: 0, worst_bound_us: 0.0 };
        let judged: Vec<(f64, f64)> =
            bursts.iter().skip(1).step_by(2).filter_map(|burst| out.judge(burst, &mut clock)).collect();
        let tight = least(judged.iter().map(|(width, _)| *width)).unwrap_or(0.0) * TIGHT;
        out.errors_us =
            judged.iter().filter(|(width, _)| *width <= tight).map(|(_, error)| error / 1e3).collect();
        out.errors_us.sort_unstable_by(f64::total_cmp);
        out
    }

    /// Width of what a burst allows, and how far the prediction is from its middle, in ns.
    fn judge(&mut self, burst: &ClockBurst, clock: &mut DeviceClock) -> Option<(f64, f64)> {
        let (mut low, mut high) = (f64::NEG_INFINITY, f64::INFINITY);
        for reading in &burst.readings {
            let Some(time) = clock.map(PROCESS, &at(burst, reading)) else {
                self.unpredicted += 1;
                continue;
            };
            let after = |ns: u64| ns.cast_signed().wrapping_sub_unsigned(time.begin_ns) as f64;
            let (before_ns, after_ns) = (after(reading.h0_raw_ns), after(reading.h1_raw_ns));
            let bound_ns = time.bound_ns as f64;
            self.predicted += 1;
            self.outside += usize::from(before_ns > bound_ns || after_ns < -bound_ns);
            self.worst_bound_us = self.worst_bound_us.max(bound_ns / 1e3);
            (low, high) = (low.max(before_ns), high.min(after_ns));
        }
        let middle = f64::midpoint(low, high);
        middle.is_finite().then_some((high - low, middle.abs()))
    }

    fn lines(&self) -> Vec<Line> {
        let names = ["hold-out error", "hold-out readings outside the bound"];
        let aim = Some(Aim::AtMost(1.0));
        let n = self.errors_us.len();
        let rank = if n >= ENOUGH_FOR_P99 { (n as f64 * 0.99).ceil() as usize } else { n };
        let Some(error) = rank.checked_sub(1).and_then(|i| self.errors_us.get(i)) else {
            let why = || "too few bursts".to_owned();
            return vec![Line::missing(names[0], "µs", aim, why()), Line::missing(names[1], "", aim, why())];
        };
        let which = if n >= ENOUGH_FOR_P99 { "p99" } else { "greatest; too few for p99" };
        let typical = median(&self.errors_us).unwrap_or(f64::NAN);
        vec![
            Line::new(
                names[0],
                "µs",
                *error,
                aim,
                format!(
                    "{which} of {n} tight bursts, each predicted by the bursts beside it; median {typical:.2} µs"
                ),
            ),
            Line::new(
                names[1],
                "",
                (self.outside + self.unpredicted) as f64,
                NONE_AT_ALL,
                format!(
                    "of {}, {} of them not predicted at all; widest bound {:.2} µs",
                    self.predicted + self.unpredicted,
                    self.unpredicted,
                    self.worst_bound_us
                ),
            ),
        ]
    }
}

/// A span without length at a reading.
fn at(burst: &ClockBurst, reading: &ClockReading) -> GpuSpan {
    GpuSpan {
        device_uuid: burst.device_uuid,
        context: burst.context,
        epoch: burst.epoch,
        base: burst.base,
        begin_ms: f32::from_bits(reading.elapsed_ms_bits),
        ..GpuSpan::default()
    }
}

fn of_handshakes(recording: &Recording, clock: &mut DeviceClock) -> Vec<Line> {
    let names = ["bias of events by unlike ways (asymmetry)", "events and %globaltimer disagree"];
    let step_ns = step_ns(&recording.handshakes);
    let all: Vec<Comparison> =
        recording.handshakes.iter().filter_map(|handshake| compare(handshake, clock, step_ns)).collect();
    let biases: Vec<f64> = all.iter().map(|one| one.bias_ns / 1e3).collect();
    let halves: Vec<f64> = all.iter().map(|one| one.half_ns / 1e3).collect();
    let (Some(bias), Some(half)) = (median(&biases), median(&halves)) else {
        let why = || match recording.handshakes.len() {
            0 => "the device does not answer from a kernel".to_owned(),
            n => format!("none of {n} handshakes could be mapped"),
        };
        return vec![
            Line::missing(names[0], "µs", None, why()),
            Line::missing(names[1], "", NONE_AT_ALL, why()),
        ];
    };
    let answers = recording.handshakes.iter().flat_map(|handshake| &handshake.answers);
    let floor = least(answers.map(|answer| answer.after_ns.saturating_sub(answer.before_ns) as f64));
    let disagree = all.iter().filter(|one| !one.agrees).count();
    vec![
        Line::new(
            names[0],
            "µs",
            bias,
            None,
            format!(
                "± {half:.2} µs (medians of {}); positive: the way to the device is the longer one. A kernel's answer \
                 takes {:.2} µs at least, %globaltimer steps by {step_ns} ns",
                all.len(),
                floor.unwrap_or(f64::NAN) / 1e3
            ),
        ),
        Line::new(
            names[1],
            "",
            disagree as f64,
            NONE_AT_ALL,
            format!("of {} comparisons, beyond both bounds together", all.len()),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use tracer_tests::clock_sim::{Config, Recording as Simulated, Simulation};

    use super::*;

    fn knot(segment: u32, seconds: f64, ppm: f64) -> Knot {
        let host_raw_ns = (seconds * 1e9) as i64;
        let device_ns = (seconds * 1e9 * (1.0 - ppm * 1e-6)) as i64;
        Knot {
            segment,
            chain: 0,
            device_ns,
            host_raw_ns,
            bound_ns: 0.0,
            precision_ns: 0.0,
            width_ns: 0.0,
            quantum_ns: 0.0,
        }
    }

    #[test]
    fn rates_are_by_window_and_never_across_a_cut() {
        let knots: Vec<Knot> = (0..62).map(|i| knot(0, f64::from(i) / 2.0, 200.0)).collect();
        let (steady, change) = rates(&knots);
        assert_eq!(steady.len(), 3);
        assert!(steady.iter().all(|ppm| (ppm - 200.04).abs() < 0.01), "{steady:?}");
        assert!(change.unwrap() < 1e-3);
        let cut = [knot(0, 0.0, 0.0), knot(0, 10.0, 0.0), knot(1, 20.0, 500.0), knot(1, 25.0, 500.0)];
        assert_eq!(rates(&cut), (vec![0.0], None));
    }

    #[test]
    fn whole_ns_are_on_the_grid() {
        for ns in [1u32, 500, 1_024, 31_250, 2_000_001] {
            let ms = (f64::from(ns) / 1e6) as f32;
            assert!(off_grid_ns(ms) <= rounding_ns(ms) + 1e-6, "{ns}");
        }
        assert!(off_grid_ns(1.234_5e-3) > 0.4);
    }

    #[test]
    fn simulated_bursts_are_predicted_within_the_bound() {
        let simulation = Simulation::new(Config { seconds: 60.0, ..Config::default() });
        let recording = Simulated::new(&simulation);
        let held_out = HoldOut::new(recording.bursts());
        assert_eq!((held_out.outside, held_out.unpredicted), (0, 0));
        assert!(held_out.errors_us.len() > 30 && held_out.errors_us.iter().all(|us| *us < 1.0));
    }
}

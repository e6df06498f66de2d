//! A second way to the device's time: a kernel that answers the host with `%globaltimer`.
//!
//! The host asks through memory and sees the answer there, without the driver: a bracket of its own, of another and
//! shorter way than an event's. Two events around the kernel tie the kernel's times to those of events. So both ways
//! bound one instant, the kernel's begin, and must agree; and what the middle of one lies from the middle of the
//! other shows how unlike the event's ways to the device and back are, which no exchange of events can see.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tracer::clock::{DeviceClock, grid_ns};
use tracer::event::mark::GpuSpan;
use tracer::host_clock::monotonic_ns;
use tracer::timeline::Clock as _;

use crate::driver::{Gpu, Handle, Kernel};
use crate::record::PROCESS;

/// Answers in one launch.
const ROUNDS: usize = 64;
/// Words of the page before the answers: what is asked for, what was answered, begin, end.
const ASKED: usize = 0;
const ANSWERED: usize = 1;
const BEGIN: usize = 2;
const END: usize = 3;
const TIMES: usize = 4;
/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_millis(50);
/// What clocks may differ by in rate: no crystals are that far apart.
const RATE: f64 = 300e-6;

/// An answer, between two times of CLOCK_MONOTONIC (ns).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) before_ns: u64,
    pub(crate) after_ns: u64,
    /// `%globaltimer`.
    pub(crate) device_ns: u64,
}

/// One launch of the kernel.
pub(crate) struct Handshake {
    /// From the event before the kernel to the one after it.
    pub(crate) span: GpuSpan,
    /// `%globaltimer` at the kernel's begin and end.
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) answers: Vec<Answer>,
}

pub(crate) struct Shaker {
    stream: Handle,
    kernel: Kernel,
    page: &'static [AtomicU64],
    pair: (Handle, Handle),
}

impl Shaker {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            stream: gpu.stream()?,
            kernel: gpu.handshake_kernel()?,
            page: gpu.page(TIMES + ROUNDS)?,
            pair: (gpu.event()?, gpu.event()?),
        })
    }

    /// Launches the kernel and asks it; `None` where it does not answer. `span` knows the base, of which this is the
    /// event.
    pub(crate) fn shake(&mut self, gpu: &Gpu, base: Handle, span: GpuSpan) -> Result<Option<Handshake>> {
        self.page.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let enqueue_begin_ns = monotonic_ns();
        gpu.record(self.pair.0, self.stream)?;
        let patience_ns = PATIENCE.as_nanos() as u64;
        let arguments = [self.page.as_ptr() as u64, ROUNDS as u64, patience_ns];
        gpu.launch(self.kernel, self.stream, &arguments)?;
        gpu.record(self.pair.1, self.stream)?;
        let enqueue_end_ns = monotonic_ns();
        let brackets: Option<Vec<(u64, u64)>> = (1..=ROUNDS as u64).map(|round| self.ask(round)).collect();
        // The kernel ends in any case: after its rounds, or when it is not asked any more.
        gpu.synchronize(self.stream)?;
        let Some(brackets) = brackets else { return Ok(None) };
        let time = |word: usize| self.page[word].load(Ordering::Acquire);
        let answers = brackets.into_iter().enumerate().map(|(i, (before_ns, after_ns))| Answer {
            before_ns,
            after_ns,
            device_ns: time(TIMES + i),
        });
        let begin_ms = gpu.elapsed(base, self.pair.0)?;
        let span_ms = gpu.elapsed(self.pair.0, self.pair.1)?;
        let span = GpuSpan { enqueue_begin_ns, enqueue_end_ns, begin_ms, span_ms, ..span };
        Ok(Some(Handshake { span, begin_ns: time(BEGIN), end_ns: time(END), answers: answers.collect() }))
    }

    fn ask(&self, round: u64) -> Option<(u64, u64)> {
        let until = Instant::now() + PATIENCE;
        let before_ns = monotonic_ns();
        self.page[ASKED].store(round, Ordering::Release);
        while self.page[ANSWERED].load(Ordering::Acquire) < round {
            if Instant::now() > until {
                return None;
            }
            std::hint::spin_loop();
        }
        Some((before_ns, monotonic_ns()))
    }
}

/// What an instant may be: CLOCK_MONOTONIC ns relative to some origin.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Interval {
    low: f64,
    high: f64,
}

impl Interval {
    fn mid(self) -> f64 {
        f64::midpoint(self.low, self.high)
    }

    fn half(self) -> f64 {
        (self.high - self.low) / 2.0
    }
}

/// What one handshake says of the events' way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    /// How much later the device passes an event than events say, which take both ways to be alike.
    pub(crate) bias_ns: f64,
    /// What that is right within.
    pub(crate) half_ns: f64,
    /// Both ways' bounds have an instant in common.
    pub(crate) agrees: bool,
}

/// Step of `%globaltimer`, as far as the answers show it.
pub(crate) fn step_ns(handshakes: &[Handshake]) -> u64 {
    let pairs = handshakes.iter().flat_map(|handshake| handshake.answers.windows(2));
    grid_ns(pairs.map(|pair| pair[1].device_ns.wrapping_sub(pair[0].device_ns)).filter(|ns| *ns > 0))
}

/// Compares both ways; `None` where the clock does not know the kernel's span.
pub(crate) fn compare(handshake: &Handshake, clock: &mut DeviceClock, step_ns: u64) -> Option<Comparison> {
    let time = clock.map(PROCESS, &handshake.span)?;
    let step_ns = step_ns as f64;
    let kernel_ns = handshake.end_ns.checked_sub(handshake.begin_ns)? as f64;
    // What passed between the events outside of the kernel, before its begin or after its end.
    let outside_ns = (f64::from(handshake.span.span_ms) * 1e6 - kernel_ns).max(0.0) + step_ns;
    let bound_ns = time.bound_ns as f64;
    let by_events = Interval { low: -bound_ns, high: outside_ns + bound_ns };
    let by_answers = by_answers(handshake, time.begin_ns, step_ns)?;
    let begin = Interval { low: 0.0, high: outside_ns };
    Some(Comparison {
        bias_ns: by_answers.mid() - begin.mid(),
        half_ns: by_answers.half() + begin.half(),
        agrees: by_answers.low <= by_events.high && by_events.low <= by_answers.high,
    })
}

/// The kernel's begin by its answers, relative to a host time.
fn by_answers(handshake: &Handshake, origin_ns: u64, step_ns: f64) -> Option<Interval> {
    let mut begin = Interval { low: f64::NEG_INFINITY, high: f64::INFINITY };
    for answer in &handshake.answers {
        let since_ns = answer.device_ns.checked_sub(handshake.begin_ns)? as f64;
        let slack_ns = step_ns + RATE * since_ns;
        let host = |ns: u64| ns.cast_signed().wrapping_sub_unsigned(origin_ns) as f64 - since_ns;
        begin.low = begin.low.max(host(answer.before_ns) - slack_ns);
        begin.high = begin.high.min(host(answer.after_ns) + slack_ns);
    }
    begin.mid().is_finite().then_some(begin)
}

#[cfg(test)]
mod tests {
    use tracer_tests::clock_sim::{Config, Recording, Simulation};

    use super::*;

    /// A kernel that begins at 1 000 000 on the host and 5 000 on the device; each question takes `there` and `back`.
    fn handshake(there: u64, back: u64) -> Handshake {
        let answer = |i: u64| Answer {
            before_ns: 1_000_000 + i * 10_000 - there,
            after_ns: 1_000_000 + i * 10_000 + back,
            device_ns: 5_000 + i * 10_000,
        };
        let span = GpuSpan::default();
        Handshake { span, begin_ns: 5_000, end_ns: 100_000, answers: (1..9).map(answer).collect() }
    }

    #[test]
    fn answers_bound_the_begin() {
        let begin = by_answers(&handshake(600, 400), 1_000_000, 32.0).unwrap();
        // 300 ppm of 10 µs are 3 ns.
        assert_eq!(begin, Interval { low: -635.0, high: 435.0 });
        assert_eq!((begin.mid(), begin.half()), (-100.0, 535.0));
    }

    /// A kernel of 100 µs on a simulated device whose clock is fitted from bursts of unlike ways; what the host sees of
    /// it is `late_us` off.
    fn compared(late_us: f64) -> Comparison {
        let config = Config { seconds: 30.0, there_us: 5.5, back_us: 2.5, ..Config::default() };
        let simulation = Simulation::new(config);
        let recording = Recording::new(&simulation);
        let bursts = recording.bursts().iter().map(|burst| (PROCESS, burst));
        let mut clock = DeviceClock::fit(bursts, recording.host());
        let begin_us = 15e6;
        // Another zero than that of events.
        let device_ns =
            |host_us: f64| (simulation.read(host_us) * 1e3).round() as u64 + 1_700_000_000_000_000_000;
        let host_ns = |host_us: f64| 3_600_000_000_000 + ((host_us + late_us) * 1e3) as u64;
        let answer = |i: u32| {
            let host_us = begin_us + f64::from(i);
            let (before_ns, after_ns) = (host_ns(host_us - 0.4), host_ns(host_us + 0.4));
            Answer { before_ns, after_ns, device_ns: device_ns(host_us) }
        };
        let handshake = Handshake {
            span: GpuSpan { span_ms: 0.1, ..recording.span(begin_us) },
            begin_ns: device_ns(begin_us),
            end_ns: device_ns(begin_us + 100.0),
            answers: (1..90).map(answer).collect(),
        };
        compare(&handshake, &mut clock, 500).unwrap()
    }

    #[test]
    fn unlike_ways_show_and_a_wrong_clock_does() {
        let right = compared(0.0);
        assert!(right.agrees, "{right:?}");
        // (5.5 − 2.5) / 2 µs, and what the quantum adds to either side.
        assert!((right.bias_ns - 1_500.0).abs() < right.half_ns && right.half_ns < 1_500.0, "{right:?}");
        assert!(!compared(20.0).agrees);
    }

    #[test]
    fn without_answers_there_is_no_bound() {
        let silent = Handshake { answers: Vec::new(), ..handshake(0, 0) };
        assert!(by_answers(&silent, 0, 0.0).is_none());
        assert_eq!(step_ns(&[silent]), 0);
        assert_eq!(step_ns(&[handshake(1, 1)]), 10_000);
    }
}

//! A simulated device with a clock of its own: what the bursts would read, and what is true.

use tracer_abi::mark::ClockReading;

use crate::event::mark::{ClockBurst, GpuSpan};
use crate::event::{HostClock, ProcessId};

pub(super) const PROCESS: ProcessId = ProcessId { tgid: 4, start_ticks: 5 };
const UUID: [u8; 16] = *b"SIMGPU-simulated";
const SECOND: f64 = 1e9;

/// Host times are true CLOCK_MONOTONIC_RAW ns, as f64 since a start at which the counters stood elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) seed: u64,
    pub(super) seconds: u32,
    pub(super) offset_ns: i64,
    pub(super) drift_ppm: f64,
    /// Amplitude of a periodic change of the drift, and its period.
    pub(super) wander_ppm: f64,
    pub(super) wander_seconds: f64,
    pub(super) quantum_ns: u64,
    /// From half time on.
    pub(super) late_quantum_ns: u64,
    /// Least time from host to device and back to host.
    pub(super) there_ns: f64,
    pub(super) back_ns: f64,
    /// Bursts (percent) that find the device busy for up to 400 µs.
    pub(super) busy: u64,
    /// The device's clock jumps by this many ns at half time.
    pub(super) step_ns: f64,
    /// MONOTONIC runs this much faster than RAW.
    pub(super) slew_ppm: f64,
}

impl Default for Device {
    fn default() -> Self {
        Self {
            seed: 1,
            seconds: 30,
            offset_ns: 1_234_567_890_123,
            drift_ppm: 120.0,
            wander_ppm: 0.2,
            wander_seconds: 60.0,
            quantum_ns: 500,
            late_quantum_ns: 500,
            there_ns: 4_000.0,
            back_ns: 4_000.0,
            busy: 0,
            step_ns: 0.0,
            slew_ppm: 12.0,
        }
    }
}

/// A span as the injected library would report it, and when it was, on CLOCK_MONOTONIC.
pub(super) struct TrueSpan {
    pub(super) span: GpuSpan,
    pub(super) begin_ns: f64,
    pub(super) end_ns: f64,
}

#[derive(Default)]
pub(super) struct Run {
    pub(super) bursts: Vec<ClockBurst>,
    pub(super) host: Vec<HostClock>,
    pub(super) spans: Vec<TrueSpan>,
}

const START_NS: u64 = 86_400_000_000_000;

impl Device {
    /// The device's clock at a host time, as it would be read.
    fn read(&self, host: f64) -> i64 {
        let turn = std::f64::consts::TAU / (self.wander_seconds * SECOND);
        let wander = self.wander_ppm * 1e-6 * (1.0 - (host * turn).cos()) / turn;
        let step = if host > self.half_ns() { self.step_ns } else { 0.0 };
        let device = host + self.drift_ppm * 1e-6 * host + wander + step;
        let quantum = if host > self.half_ns() { self.late_quantum_ns } else { self.quantum_ns } as i64;
        (self.offset_ns + device.round() as i64).div_euclid(quantum) * quantum
    }

    pub(super) fn half_ns(&self) -> f64 {
        f64::from(self.seconds) * SECOND / 2.0
    }

    /// CLOCK_MONOTONIC of a host time.
    pub(super) fn monotonic(&self, host: f64) -> f64 {
        START_NS as f64 / 2.0 + host * (1.0 + self.slew_ppm * 1e-6)
    }

    pub(super) fn run(&self) -> Run {
        let mut random = Noise(self.seed);
        let mut run = Run::default();
        let mut base = (0, self.read(0.0));
        for half_second in 0..2 * self.seconds {
            let begin = f64::from(half_second) * SECOND / 2.0 + random.unit() * 50e6;
            let spans_at = begin + 100e6;
            let busy = if random.below(100) < self.busy { random.unit() * 400e3 } else { 0.0 };
            let mut now = begin;
            let mut readings = Vec::new();
            let mut rebase_ms = None;
            let is_new_base = half_second % 2 == 0;
            for i in 0..8 {
                let event = now + self.there_ns + busy + random.delay();
                let after = event + self.back_ns + random.delay();
                let device = self.read(event);
                if i == 0 && is_new_base {
                    rebase_ms = (half_second > 0).then(|| ms(device - base.1));
                    base = (half_second / 2, device);
                }
                readings.push(ClockReading {
                    h0_raw_ns: START_NS + now as u64,
                    h1_raw_ns: START_NS + after.ceil() as u64,
                    elapsed_ms_bits: ms(device - base.1).to_bits(),
                    _pad: 0,
                });
                now = after + 1_000.0;
            }
            run.bursts.push(ClockBurst {
                device_uuid: UUID,
                context: 9,
                epoch: 1,
                base: base.0,
                rebase_ms,
                readings,
            });
            for _ in 0..4 {
                run.spans.push(self.span(base, spans_at + random.unit() * 300e6, random.unit() * 20e6));
            }
        }
        for i in 0..self.seconds * 50 + 5 {
            let raw = (f64::from(i) - 1.0) * SECOND / 50.0;
            let gap = 20.0 + if random.below(50) == 0 { 5_000.0 * random.unit() } else { 0.0 };
            let read_at = raw + gap * random.unit();
            run.host.push(HostClock {
                raw_before_ns: (START_NS as f64 + raw).floor() as u64,
                monotonic_ns: self.monotonic(read_at).round() as u64,
                raw_after_ns: (START_NS as f64 + raw + gap).ceil() as u64,
                realtime_ns: None,
                boottime_ns: None,
            });
        }
        run
    }

    fn span(&self, base: (u32, i64), begin: f64, length: f64) -> TrueSpan {
        let (at, end) = (self.read(begin), self.read(begin + length));
        let span = GpuSpan {
            device_uuid: UUID,
            context: 9,
            stream: 0,
            sequence: 0,
            enqueue_begin_ns: 0,
            enqueue_end_ns: 0,
            tid: 0,
            epoch: 1,
            base: base.0,
            begin_ms: ms(at - base.1),
            span_ms: ms(end - at),
            sampled: false,
        };
        TrueSpan { span, begin_ns: self.monotonic(begin), end_ns: self.monotonic(begin + length) }
    }
}

/// As cuEventElapsedTime rounds.
fn ms(ns: i64) -> f32 {
    (ns as f64 / 1e6) as f32
}

struct Noise(u64);

impl Noise {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn unit(&mut self) -> f64 {
        self.below(1 << 30) as f64 / (1u64 << 30) as f64
    }

    /// Mostly below 1 µs, sometimes tens of µs, rarely a preemption of ms.
    fn delay(&mut self) -> f64 {
        let body = -500.0 * (1.0 - self.unit()).ln();
        let spike = if self.below(25) == 0 { -60e3 * (1.0 - self.unit()).ln() } else { 0.0 };
        let preempted = if self.below(200) == 0 { 3e6 * self.unit() } else { 0.0 };
        body + spike + preempted
    }
}

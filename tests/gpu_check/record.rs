//! Comparing the clocks for a while, as the injected library and the tracer do in a recording.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tracer::event::mark::{ClockBurst, GpuSpan};
use tracer::event::{HostClock, ProcessId};
use tracer::host_clock::{bracket, monotonic_ns, raw_ns};
use tracer_abi::mark::ClockReading;

use crate::driver::{Gpu, Handle, Kernel};
use crate::handshake::{Handshake, Shaker};

/// Stands for this process.
pub(crate) const PROCESS: ProcessId = ProcessId { tgid: 1, start_ticks: 1 };
/// Readings of one burst.
const READINGS: usize = 8;
/// Between bursts: the first few come sooner.
const BURST: Duration = Duration::from_millis(500);
const EARLY_BURST: Duration = Duration::from_millis(250);
const EARLY_BURSTS: usize = 2;
/// Between brackets of the host's clocks, and how many there are to one of CLOCK_REALTIME.
const BRACKET: Duration = Duration::from_millis(20);
const WALL_EVERY: usize = 50;
/// How long one reading may take.
const READING: Duration = Duration::from_millis(50);
/// Handshakes that are tried on a device that never answers.
const UNANSWERED: u32 = 3;
/// Launches between events before each burst, and after it.
const LAUNCHES: u64 = 4;

/// A launch between two events, and when a wait for it returned (CLOCK_MONOTONIC ns).
pub(crate) struct Launch {
    pub(crate) span: GpuSpan,
    pub(crate) returned_ns: u64,
}

/// What was read.
#[derive(Default)]
pub(crate) struct Recording {
    /// Each with a base of its own.
    pub(crate) bursts: Vec<ClockBurst>,
    /// Milliseconds from the first base to each burst's, in one span.
    pub(crate) far_ms: Vec<f32>,
    pub(crate) host: Vec<HostClock>,
    pub(crate) launches: Vec<Launch>,
    pub(crate) handshakes: Vec<Handshake>,
}

struct Recorder<'a> {
    gpu: &'a Gpu,
    stream: Handle,
    kernel: Kernel,
    /// Events of readings, of which a base is none.
    readings: Vec<Handle>,
    pair: (Handle, Handle),
    first_base: Option<Handle>,
    base: Option<Handle>,
    out: Recording,
}

/// Reads for so long.
pub(crate) fn record(gpu: &Gpu, seconds: u32) -> Result<Recording> {
    let mut recorder = Recorder::new(gpu)?;
    let mut shaker = Shaker::new(gpu)?;
    let until = Instant::now() + Duration::from_secs(seconds.into());
    let mut next = Instant::now();
    let mut unanswered = 0;
    while next <= until {
        recorder.host();
        // As far from a base as launches of a recording get, and close to one.
        recorder.launch()?;
        recorder.burst()?;
        recorder.launch()?;
        if let Some(base) = recorder.base
            && (unanswered < UNANSWERED || !recorder.out.handshakes.is_empty())
        {
            match recorder.span_of(|span| shaker.shake(gpu, base, span))? {
                Some(handshake) => recorder.out.handshakes.push(handshake),
                None => unanswered += 1,
            }
        }
        next += if recorder.out.bursts.len() <= EARLY_BURSTS { EARLY_BURST } else { BURST };
        while Instant::now() < next {
            recorder.host();
            std::thread::sleep(BRACKET);
        }
        progress(until.saturating_duration_since(Instant::now()).as_secs());
    }
    recorder.host();
    Ok(recorder.out)
}

impl<'a> Recorder<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self> {
        Ok(Self {
            gpu,
            stream: gpu.stream()?,
            kernel: gpu.empty_kernel()?,
            readings: (1..READINGS).map(|_| gpu.event()).collect::<Result<_>>()?,
            pair: (gpu.event()?, gpu.event()?),
            first_base: None,
            base: None,
            out: Recording::default(),
        })
    }

    fn host(&mut self) {
        self.out.host.push(bracket(self.out.host.len().is_multiple_of(WALL_EVERY)));
    }

    /// One burst: each reading is an event that was recorded and seen complete between two host times. The first is
    /// the base, and of an event of its own, so that all bases stay comparable.
    fn burst(&mut self) -> Result<()> {
        let base = self.gpu.event()?;
        let mut taken: Vec<(Handle, u64, u64)> = Vec::with_capacity(READINGS);
        for event in std::iter::once(base).chain(self.readings.iter().copied()) {
            let before_ns = raw_ns();
            self.gpu.record(event, self.stream)?;
            if !self.wait(event)? {
                break;
            }
            taken.push((event, before_ns, raw_ns()));
        }
        if taken.is_empty() {
            return Ok(());
        }
        let first = *self.first_base.get_or_insert(base);
        let rebase_ms = self.base.map(|last| self.gpu.elapsed(last, base)).transpose()?;
        let mut readings = Vec::with_capacity(READINGS);
        for (event, before_ns, after_ns) in taken {
            let elapsed_ms = if event == base { 0.0 } else { self.gpu.elapsed(base, event)? };
            let elapsed_ms_bits = elapsed_ms.to_bits();
            readings.push(ClockReading {
                h0_raw_ns: before_ns,
                h1_raw_ns: after_ns,
                elapsed_ms_bits,
                _pad: 0,
            });
        }
        self.out.far_ms.push(if first == base { 0.0 } else { self.gpu.elapsed(first, base)? });
        self.base = Some(base);
        let number = u32::try_from(self.out.bursts.len()).context("too many bursts")?;
        self.out.bursts.push(ClockBurst {
            device_uuid: self.gpu.uuid,
            context: 0,
            epoch: 0,
            base: number,
            rebase_ms,
            readings,
        });
        Ok(())
    }

    fn wait(&self, event: Handle) -> Result<bool> {
        let until = Instant::now() + READING;
        while !self.gpu.is_complete(event)? {
            if Instant::now() > until {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        Ok(true)
    }

    /// A span that counts from the newest base: with the key of this clock, the rest as `make` says.
    fn span_of<T>(&self, make: impl FnOnce(GpuSpan) -> Result<T>) -> Result<T> {
        make(GpuSpan {
            device_uuid: self.gpu.uuid,
            base: u32::try_from(self.out.bursts.len().saturating_sub(1)).context("too many bursts")?,
            ..GpuSpan::default()
        })
    }

    /// Launches between two events, each waited for.
    fn launch(&mut self) -> Result<()> {
        let (Some(base), (begin, end)) = (self.base, self.pair) else { return Ok(()) };
        for sequence in 0..LAUNCHES {
            let enqueue_begin_ns = monotonic_ns();
            self.gpu.record(begin, self.stream)?;
            self.gpu.launch(self.kernel, self.stream, &[])?;
            self.gpu.record(end, self.stream)?;
            let enqueue_end_ns = monotonic_ns();
            self.gpu.synchronize(self.stream)?;
            let returned_ns = monotonic_ns();
            let (begin_ms, span_ms) = (self.gpu.elapsed(base, begin)?, self.gpu.elapsed(begin, end)?);
            let span = self.span_of(|span| {
                Ok(GpuSpan { sequence, enqueue_begin_ns, enqueue_end_ns, begin_ms, span_ms, ..span })
            })?;
            self.out.launches.push(Launch { span, returned_ns });
        }
        Ok(())
    }
}

/// Says on a terminal how long it will take.
fn progress(seconds: u64) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A terminal that went away is no reason to stop.
        let _ = write!(err, "\r\x1b[K{seconds} s left\r").and_then(|()| err.flush());
    }
}

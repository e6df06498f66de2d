//! Our thread's work while a tracer listens: makes the event pairs of new contexts, reads the events of finished steps,
//! compares the clocks.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU32, Ordering},
};

use tracer_abi::mark::{ClockBurst, ClockReading, GpuSpan, SPAN_SAMPLED};

use crate::{
    clock,
    context::{self, Context, MAX_CONTEXTS, PAIRS, Pair},
    driver::{CudaError, Driver, Handle, Meaning},
    layers, nvtx,
    report::{self, COUNTERS, count},
    step::{self, DONE, Step},
};

/// Readings of one burst.
const READINGS: usize = 8;
/// Between bursts, ns: the first few of an epoch come sooner.
const BURST_NS: u64 = 500_000_000;
const EARLY_BURST_NS: u64 = 250_000_000;
const EARLY_BURSTS: u32 = 2;
/// Age at which a base is replaced, ns: the f32 milliseconds from an older one are too coarse (31 ns at 1 s). A little
/// less than the time between bursts, so that each replaces it and shows the clock's quantum.
const REBASE_NS: u64 = 450_000_000;
/// Bases that are kept for steps that began before the newest.
const MAX_BASES: usize = 16;
/// How long one reading may take, ns: spinning first, then sleeping in between.
const SPIN_NS: u64 = 1_000_000;
const READING_NS: u64 = 50_000_000;
/// A step whose events are not complete after this time is given up, ns.
const ABANDON_NS: u64 = 60_000_000_000;
/// Attempts to prepare a context.
const MAX_ATTEMPTS: u8 = 8;
/// Between states, ns.
const STATE_NS: u64 = 1_000_000_000;

/// Clock series of this process so far.
static EPOCHS: AtomicU32 = AtomicU32::new(0);

/// What this thread knows.
#[derive(Default)]
pub(crate) struct Harvester {
    series: [Option<Series>; MAX_CONTEXTS],
    /// Steps whose events may not be complete yet, oldest first.
    pending: VecDeque<Step>,
    /// Failed attempts to prepare each context.
    attempts: [u8; MAX_CONTEXTS],
    /// CLOCK_MONOTONIC ns.
    next_state_ns: u64,
}

/// The clock of one context.
struct Series {
    uuid: [u8; 16],
    /// Our own stream in the context.
    stream: Handle,
    epoch: u32,
    /// Bursts of this epoch so far.
    bursts: u32,
    /// Bases of this epoch, oldest first.
    bases: VecDeque<Base>,
    next_base: u32,
    /// Events for readings.
    events: [Handle; READINGS],
    /// Events of former bases.
    spare: Vec<Handle>,
    /// CLOCK_MONOTONIC ns.
    next_burst_ns: u64,
}

/// An event that others count from.
#[derive(Clone, Copy)]
struct Base {
    number: u32,
    event: Handle,
    /// CLOCK_MONOTONIC ns at which it was known to be complete.
    complete_ns: u64,
}

impl Harvester {
    /// One round of work.
    pub(crate) fn work(&mut self, driver: &Driver) {
        let now = clock::monotonic();
        for index in 0..MAX_CONTEXTS {
            let Some(context) = context::at(index) else { continue };
            let result = self.tend(driver, index, context, now);
            self.settle(index, context, result);
        }
        while let Some(step) = DONE.pop() {
            self.pending.push_back(step);
        }
        self.read_steps(driver, clock::monotonic());
    }

    /// Reports the state when that is due; `problem`: why an engine is not hooked; `hooked`: something is.
    pub(crate) fn report(&mut self, problem: Option<&str>, hooked: bool) {
        let now = clock::monotonic();
        if now >= self.next_state_ns {
            if hooked || problem.is_some() || report::is_disabled() {
                report::emit_state(problem, hooked);
            }
            if nvtx::clients() + nvtx::refused() > 0 {
                report::emit_nvtx_state();
            }
            self.next_state_ns = now + STATE_NS;
        }
    }

    /// Nobody listens any more: what was under way is dropped; the next listener gets new epochs.
    pub(crate) fn rest(&mut self) {
        while let Some(step) = DONE.pop() {
            self.pending.push_back(step);
        }
        for step in self.pending.drain(..) {
            step::give_back_all(&step);
        }
        for series in self.series.iter_mut().flatten() {
            series.restart();
        }
        self.next_state_ns = 0;
    }

    /// Prepares a context that a step has asked for, and compares its clock when that is due.
    fn tend(&mut self, driver: &Driver, index: usize, context: &Context, now: u64) -> Result<(), CudaError> {
        if context.is_wanted() {
            driver.relax_captures();
            driver.set_context(context.handle())?;
            let mut series = Series::new(driver)?;
            // Before its first step, so that a base precedes every step.
            series.burst(driver, context.handle(), now)?;
            for _ in 0..PAIRS {
                let _ = context.free.push(Pair { begin: driver.event()?, end: driver.event()? });
            }
            self.series[index] = Some(series);
            context.set_ready();
            return Ok(());
        }
        if context.is_ready() && layers::is_wanted(index) {
            driver.set_context(context.handle())?;
            layers::prepare(driver, index)?;
        }
        if context.is_ready()
            && let Some(series) = &mut self.series[index]
            && now >= series.next_burst_ns
        {
            driver.set_context(context.handle())?;
            series.burst(driver, context.handle(), now)?;
        }
        Ok(())
    }

    /// Draws the consequence of an error of the driver on this thread.
    fn settle(&mut self, index: usize, context: &Context, result: Result<(), CudaError>) {
        let Err(error) = result else { return };
        match error.meaning() {
            Meaning::ContextLost => {
                context.set_lost();
                self.series[index] = None;
                let lost_slots = self.pending.iter().filter(|step| step.open.context == index);
                lost_slots.filter_map(|step| step.layers).for_each(layers::give_back);
                layers::context_lost(index);
                let lost = self.pending.iter().filter(|step| step.open.context == index).count();
                COUNTERS.abandoned.fetch_add(lost as u64, Ordering::Relaxed);
                self.pending.retain(|step| step.open.context != index);
            }
            // Tried again at the next round, but not for ever: each attempt to prepare a context costs events.
            Meaning::Capturing | Meaning::NotReady => {
                if context.is_wanted() {
                    self.attempts[index] += 1;
                    if self.attempts[index] > MAX_ATTEMPTS {
                        context.set_lost();
                    }
                }
            }
            Meaning::Exiting => crate::start::stop(),
            Meaning::Unknown => report::disable_by_driver(error),
        }
    }

    /// Reads the events of finished steps. On one stream steps finish in order: behind one that has not, none is asked.
    fn read_steps(&mut self, driver: &Driver, now: u64) {
        let mut busy: Vec<(usize, Handle)> = Vec::new();
        let mut lost = None;
        let mut rest = VecDeque::with_capacity(self.pending.len());
        for step in std::mem::take(&mut self.pending) {
            let (index, key) = (step.open.context, (step.open.context, step.open.stream));
            let is_lost = lost.is_some_and(|(context, _)| context == index);
            if is_lost || busy.contains(&key) {
                rest.push_back(step);
                continue;
            }
            match self.read_step(driver, &step) {
                Ok(true) => step::give_back_all(&step),
                Ok(false) if now.saturating_sub(step.end_ns) > ABANDON_NS => {
                    count(&COUNTERS.abandoned);
                    step::give_back_all(&step);
                }
                Ok(false) => {
                    busy.push(key);
                    rest.push_back(step);
                }
                Err(error) => {
                    lost = Some((index, error));
                    rest.push_back(step);
                }
            }
        }
        self.pending = rest;
        if let Some((index, error)) = lost
            && let Some(context) = context::at(index)
        {
            self.settle(index, context, Err(error));
        }
    }

    /// Reports a step if its events are complete.
    fn read_step(&mut self, driver: &Driver, step: &Step) -> Result<bool, CudaError> {
        let open = &step.open;
        if !driver.is_complete(open.pair.end)? {
            return Ok(false);
        }
        let (Some(context), Some(series)) = (context::at(open.context), &self.series[open.context]) else {
            count(&COUNTERS.abandoned);
            return Ok(true);
        };
        let Some(base) = series.base_before(open.begin_ns) else {
            // The first burst of this epoch is still to come.
            return Ok(false);
        };
        let begin_ms = driver.elapsed(base.event, open.pair.begin)?;
        let span_ms = driver.elapsed(open.pair.begin, open.pair.end)?;
        if let Some(slot) = step.layers {
            report::emit_layers(driver, slot, open)?;
        }
        report::emit_span(GpuSpan {
            device_uuid: series.uuid,
            context: context.handle() as u64,
            stream: open.stream as u64,
            sequence: open.sequence,
            enqueue_begin_ns: open.begin_ns,
            enqueue_end_ns: step.end_ns,
            tid: step.tid,
            epoch: series.epoch,
            base: base.number,
            begin_ms_bits: begin_ms.to_bits(),
            span_ms_bits: span_ms.to_bits(),
            flags: if step.layers.is_some() { SPAN_SAMPLED } else { 0 },
            ..GpuSpan::default()
        });
        Ok(true)
    }
}

impl Series {
    /// In the current context.
    fn new(driver: &Driver) -> Result<Self, CudaError> {
        let mut events = [0; READINGS];
        for event in &mut events {
            *event = driver.event()?;
        }
        let mut spare = Vec::with_capacity(MAX_BASES + 1);
        for _ in 0..=MAX_BASES {
            spare.push(driver.event()?);
        }
        let mut series = Self {
            uuid: driver.device_uuid()?,
            stream: driver.stream()?,
            epoch: 0,
            bursts: 0,
            bases: VecDeque::with_capacity(MAX_BASES + 1),
            next_base: 0,
            events,
            spare,
            next_burst_ns: 0,
        };
        series.restart();
        Ok(series)
    }

    /// Begins a new epoch.
    fn restart(&mut self) {
        self.spare.extend(self.bases.drain(..).map(|base| base.event));
        self.epoch = EPOCHS.fetch_add(1, Ordering::Relaxed);
        (self.bursts, self.next_base, self.next_burst_ns) = (0, 0, 0);
    }

    /// The newest base that was complete before a step began; the oldest there is when none was.
    fn base_before(&self, begin_ns: u64) -> Option<Base> {
        self.bases.iter().rev().find(|base| base.complete_ns <= begin_ns).or(self.bases.front()).copied()
    }

    /// Compares the clocks: each reading is an event that was recorded and seen complete between two host times.
    fn burst(&mut self, driver: &Driver, context: Handle, now: u64) -> Result<(), CudaError> {
        let early = self.bursts < EARLY_BURSTS;
        self.next_burst_ns = now + if early { EARLY_BURST_NS } else { BURST_NS };
        let mut taken: Vec<(usize, u64, u64)> = Vec::with_capacity(READINGS);
        let mut first_complete_ns = 0;
        for index in 0..READINGS {
            let h0 = clock::raw();
            driver.record(self.events[index], self.stream)?;
            if !wait(driver, self.events[index], h0)? {
                // The device is busy beyond reason; what there is must do.
                break;
            }
            taken.push((index, h0, clock::raw()));
            if index == 0 {
                first_complete_ns = clock::monotonic();
            }
        }
        if taken.is_empty() {
            return Ok(());
        }
        let newest = self.bases.back().copied();
        let rebase_ms = match newest {
            Some(base) if first_complete_ns.saturating_sub(base.complete_ns) < REBASE_NS => f32::NAN,
            _ => self.rebase(driver, newest, first_complete_ns)?,
        };
        let Some(base) = self.bases.back().copied() else { return Ok(()) };
        let is_new = newest.is_none_or(|newest| newest.number != base.number);
        let mut readings = [ClockReading::default(); READINGS];
        for (reading, (index, h0, h1)) in readings.iter_mut().zip(&taken) {
            // The first event of this burst has become the base.
            let elapsed =
                if is_new && *index == 0 { 0.0 } else { driver.elapsed(base.event, self.events[*index])? };
            *reading =
                ClockReading { h0_raw_ns: *h0, h1_raw_ns: *h1, elapsed_ms_bits: elapsed.to_bits(), _pad: 0 };
        }
        let burst = ClockBurst {
            device_uuid: self.uuid,
            context: context as u64,
            epoch: self.epoch,
            base: base.number,
            rebase_ms_bits: rebase_ms.to_bits(),
            ..ClockBurst::default()
        };
        report::emit_burst(burst, &readings[..taken.len()]);
        self.bursts += 1;
        Ok(())
    }

    /// Makes the first event of this burst the new base; returns the milliseconds from the last one (NaN: none).
    fn rebase(&mut self, driver: &Driver, last: Option<Base>, complete_ns: u64) -> Result<f32, CudaError> {
        let event = self.events[0];
        let ms = last.map_or(Ok(f32::NAN), |last| driver.elapsed(last.event, event))?;
        if self.bases.len() == MAX_BASES {
            self.spare.extend(self.bases.pop_front().map(|base| base.event));
        }
        // There are more events than bases.
        if let Some(event) = self.spare.pop() {
            self.events[0] = event;
        }
        self.bases.push_back(Base { number: self.next_base, event, complete_ns });
        self.next_base += 1;
        Ok(ms)
    }
}

/// Waits for an event of ours that was recorded at `h0` (CLOCK_MONOTONIC_RAW ns); false when it takes too long.
fn wait(driver: &Driver, event: Handle, h0: u64) -> Result<bool, CudaError> {
    loop {
        if driver.is_complete(event)? {
            return Ok(true);
        }
        match clock::raw().saturating_sub(h0) {
            ..SPIN_NS => std::hint::spin_loop(),
            SPIN_NS..READING_NS => std::thread::sleep(std::time::Duration::from_micros(100)),
            _ => return Ok(false),
        }
    }
}

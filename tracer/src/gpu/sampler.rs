//! The thread that asks NVML, and what the recorder holds of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

use super::nvml::{Gpu, is_standin};
use super::{Absence, READINGS};
use crate::event::Event;

/// What may wait for the recorder: seconds of many GPUs.
const WAITING: usize = 8192;
/// How long the end of a recording waits for the library's last answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts since the start.
#[derive(Default)]
struct Counters {
    absent: AtomicBool,
    skipped: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
}

/// [`Counters`] at a time.
pub(super) struct Counts {
    pub(super) absent: bool,
    /// Samples that were not taken because the one before took longer than a period.
    pub(super) skipped: u64,
    /// Samples for which a GPU answered no question.
    pub(super) failed: u64,
    /// Events that the recorder did not take in time.
    pub(super) dropped: u64,
}

/// What the thread says.
enum Said {
    Event(Event),
    Absent(String),
}

/// The recorder's end of the thread.
pub(super) struct Sampler {
    said: Receiver<Said>,
    /// Dropped, it ends the thread.
    stop: Option<Sender<Infallible>>,
    counters: Arc<Counters>,
}

impl Sampler {
    /// Starts sampling at `hz`. The library is loaded on the thread, too: initialising GPUs can take seconds.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(super) fn start(hz: u32) -> std::io::Result<Self> {
        let (said_by_thread, said) = sync_channel(WAITING);
        let (stop, stopped) = channel();
        let counters = Arc::new(Counters::default());
        let thread = Thread { out: said_by_thread, stopped, counters: Arc::clone(&counters) };
        let period = Duration::from_secs(1) / hz.max(1);
        std::thread::Builder::new().name("nvml".into()).spawn(move || thread.run(period))?;
        Ok(Self { said, stop: Some(stop), counters })
    }

    pub(super) fn drain(&mut self, out: &mut Vec<Event>, absences: &mut Vec<Absence>) {
        while let Ok(said) = self.said.try_recv() {
            take(said, out, absences);
        }
    }

    /// Ends the thread and takes the rest; `false` when it did not end in time.
    pub(super) fn stop(&mut self, out: &mut Vec<Event>, absences: &mut Vec<Absence>) -> bool {
        self.stop = None;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.said.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(said) => take(said, out, absences),
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { absent, skipped, failed, dropped } = &*self.counters;
        Counts {
            absent: absent.load(Ordering::Relaxed),
            skipped: of(skipped),
            failed: of(failed),
            dropped: of(dropped),
        }
    }
}

fn take(said: Said, out: &mut Vec<Event>, absences: &mut Vec<Absence>) {
    match said {
        Said::Event(event) => out.push(event),
        Said::Absent(why) => absences.push(Absence { what: READINGS, why }),
    }
}

/// The thread's end. Its `out` is dropped last, which tells that it has left the library.
struct Thread {
    out: SyncSender<Said>,
    stopped: Receiver<Infallible>,
    counters: Arc<Counters>,
}

impl Thread {
    fn run(&self, period: Duration) {
        let nvml = match Nvml::init() {
            Ok(nvml) => nvml,
            Err(error) => return self.absent(format!("NVML: {error}")),
        };
        let simulated = is_standin();
        let count = match nvml.device_count() {
            Ok(0) => return self.absent("NVML sees no GPU".into()),
            Ok(count) => count,
            Err(error) => return self.absent(format!("NVML: {error}")),
        };
        let mut gpus: Vec<Gpu<'_>> = Vec::new();
        for index in 0..count {
            match Gpu::new(&nvml, index, simulated) {
                Ok(gpu) => gpus.push(gpu),
                Err(error) => self.say(Said::Absent(format!("GPU {index}: {error}"))),
            }
        }
        self.sample(&mut gpus, period);
        drop(gpus);
        // At the end there is nobody to tell.
        let _ = nvml.shutdown();
    }

    fn sample(&self, gpus: &mut [Gpu<'_>], period: Duration) {
        let mut refused = vec![false; gpus.len()];
        let mut due = Instant::now();
        loop {
            for (index, (gpu, refused)) in gpus.iter_mut().zip(&mut refused).enumerate() {
                match gpu.look() {
                    Ok(events) => events.into_iter().for_each(|event| self.say(Said::Event(event))),
                    Err(error) => {
                        self.counters.failed.fetch_add(1, Ordering::Relaxed);
                        if !std::mem::replace(refused, true) {
                            self.say(Said::Absent(format!("GPU {index}: {error}")));
                        }
                    }
                }
            }
            due += period;
            let late = Instant::now().saturating_duration_since(due);
            let skipped = u32::try_from(late.as_nanos() / period.as_nanos().max(1)).unwrap_or(u32::MAX);
            self.counters.skipped.fetch_add(skipped.into(), Ordering::Relaxed);
            due += period.saturating_mul(skipped);
            let wait = due.saturating_duration_since(Instant::now());
            if self.stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    fn absent(&self, why: String) {
        self.counters.absent.store(true, Ordering::Relaxed);
        self.say(Said::Absent(why));
    }

    fn say(&self, said: Said) {
        if self.out.try_send(said).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

//! The model: streams run their operations in order, and the end of each is known when it is submitted.
//!
//! begin = max(submission + latency of an idle stream, end of what the stream does before). Times are raw (`device`).

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{Config, config, raw_now, wait_until};
use crate::error::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, CONTEXT_IS_DESTROYED,
    ILLEGAL_STATE, INVALID_HANDLE, NOT_READY, Result,
};
use crate::fault;
use crate::handle::Table;
use crate::log;
use crate::pointer::Handle;

pub(crate) static STREAMS: Table<Stream> = Table::new(0x5e02);
pub(crate) static EVENTS: Table<Event> = Table::new(0x5e03);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What streams and events know of their context.
#[derive(Debug)]
pub(crate) struct Owner {
    /// The context's handle.
    pub(crate) context: u64,
    pub(crate) destroyed: AtomicBool,
}

impl Owner {
    fn check(&self) -> Result {
        if self.destroyed.load(Ordering::Acquire) { Err(CONTEXT_IS_DESTROYED) } else { Ok(()) }
    }
}

/// An event: the raw time at which the device passes its last record.
#[derive(Debug)]
pub(crate) struct Event {
    handle: u64,
    owner: Arc<Owner>,
    pub(crate) timed: bool,
    /// By how much its time is wrong: see [`fault`].
    glitch_ns: AtomicI64,
    state: Mutex<EventState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct EventState {
    /// Completion of the last record.
    complete: Option<u64>,
    /// Last recorded into a capture: it has no time of its own.
    captured: bool,
}

impl Event {
    pub(crate) fn new(handle: Handle, owner: Arc<Owner>, timed: bool) -> Self {
        Self { handle: handle as u64, owner, timed, glitch_ns: AtomicI64::new(0), state: Mutex::default() }
    }

    /// Completion of the last record; `None`: never recorded.
    fn completion(&self) -> Result<Option<u64>> {
        self.owner.check()?;
        let state = lock(&self.state);
        if state.captured { Err(CAPTURED_EVENT) } else { Ok(state.complete) }
    }

    pub(crate) fn set_glitch(&self, ns: i64) {
        self.glitch_ns.store(ns, Ordering::Relaxed);
    }

    pub(crate) fn query(&self) -> Result {
        match self.completion()? {
            Some(end) if raw_now() < end => Err(NOT_READY),
            _ => Ok(()),
        }
    }

    pub(crate) fn synchronize(&self) -> Result {
        if let Some(end) = self.completion()? {
            wait_until(end);
        }
        Ok(())
    }

    /// Device time from `begin` to `end` in ms, rounded once.
    pub(crate) fn elapsed_ms(begin: &Self, end: &Self, config: &Config) -> Result<f32> {
        let stamp = |event: &Self| {
            let complete = event.completion()?.filter(|_| event.timed).ok_or(INVALID_HANDLE)?;
            if raw_now() < complete {
                return Err(NOT_READY);
            }
            Ok(fault::stamp(config, complete) + event.glitch_ns.load(Ordering::Relaxed))
        };
        // Both errors of a bad handle come before NOT_READY.
        let (begin, end) = match (stamp(begin), stamp(end)) {
            (Err(NOT_READY), Err(error)) | (Err(error), _) | (_, Err(error)) => return Err(error),
            (Ok(begin), Ok(end)) => (begin, end),
        };
        Ok((end.wrapping_sub(begin) as f64 / 1e6) as f32)
    }
}

/// What a stream does.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Kernel {
        ns: u64,
    },
    /// A copy or a fill; its bytes are moved when it is submitted.
    Copy {
        ns: u64,
    },
    Record(Arc<Event>),
    Wait(Arc<Event>),
}

/// State of a capture, as `cuStreamIsCapturing` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Capturing {
    None = 0,
    Active = 1,
    Invalidated = 2,
}

/// A stream of a context.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) handle: u64,
    pub(crate) owner: Arc<Owner>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When everything submitted so far is done.
    ready: u64,
    capture: Option<Capture>,
}

#[derive(Debug, Default)]
struct Capture {
    operations: Vec<Operation>,
    invalidated: bool,
}

impl Stream {
    /// `handle` null: the context's legacy stream.
    pub(crate) fn new(handle: Handle, owner: Arc<Owner>) -> Self {
        Self { handle: handle as u64, owner, state: Mutex::default() }
    }

    /// Appends operations, or records them while the stream is capturing.
    pub(crate) fn submit(&self, operations: &[Operation]) -> Result {
        self.owner.check()?;
        let mut state = lock(&self.state);
        if let Some(capture) = &mut state.capture {
            return operations.iter().try_for_each(|operation| capture.add(operation, &self.owner));
        }
        for operation in operations {
            if let Operation::Record(event) | Operation::Wait(event) = operation {
                event.owner.check()?;
            }
            if let Operation::Record(event) = operation
                && event.owner.context != self.owner.context
            {
                return Err(INVALID_HANDLE);
            }
            state.ready = self.run(operation, raw_now(), state.ready)?;
        }
        Ok(())
    }

    /// When an operation that is submitted now ends, on a stream that is ready at `ready`.
    fn run(&self, operation: &Operation, now: u64, ready: u64) -> Result<u64> {
        let config = config();
        Ok(match operation {
            Operation::Kernel { ns } => {
                let (latency, ns) = if config.zero == 1 { (0, 0) } else { (config.launch_ns, *ns) };
                let begin = ready.max(now.saturating_add(latency));
                let (begin, end) =
                    if config.serialise == 1 { one_at_a_time(begin, ns) } else { (begin, begin + ns) };
                log::kernel(self.handle, now, begin, end);
                end
            }
            Operation::Copy { ns } => ready.max(now).saturating_add(*ns),
            Operation::Record(event) => {
                let complete = ready.max(now + config.event_ns);
                *lock(&event.state) = EventState { complete: Some(complete), captured: false };
                if event.timed {
                    log::event(self.handle, event.handle, now, complete);
                }
                complete
            }
            Operation::Wait(event) => ready.max(event.completion()?.unwrap_or(0)),
        })
    }

    /// Time at which all is done; an error while the stream is capturing, which also invalidates the capture.
    fn ready(&self) -> Result<u64> {
        self.owner.check()?;
        let mut state = lock(&self.state);
        match &mut state.capture {
            Some(capture) => {
                capture.invalidated = true;
                Err(CAPTURE_UNSUPPORTED)
            }
            None => Ok(state.ready),
        }
    }

    pub(crate) fn query(&self) -> Result {
        if raw_now() < self.ready()? { Err(NOT_READY) } else { Ok(()) }
    }

    pub(crate) fn synchronize(&self) -> Result {
        wait_until(self.ready()?);
        Ok(())
    }

    pub(crate) fn begin_capture(&self) -> Result {
        self.owner.check()?;
        if self.handle == 0 {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let mut state = lock(&self.state);
        if state.capture.is_some() {
            return Err(ILLEGAL_STATE);
        }
        state.capture = Some(Capture::default());
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Vec<Operation>> {
        let capture = lock(&self.state).capture.take().ok_or(ILLEGAL_STATE)?;
        if capture.invalidated { Err(CAPTURE_INVALIDATED) } else { Ok(capture.operations) }
    }

    pub(crate) fn capturing(&self) -> Capturing {
        match &lock(&self.state).capture {
            None => Capturing::None,
            Some(Capture { invalidated: false, .. }) => Capturing::Active,
            Some(_) => Capturing::Invalidated,
        }
    }
}

impl Capture {
    fn add(&mut self, operation: &Operation, owner: &Owner) -> Result {
        if self.invalidated {
            return Err(CAPTURE_INVALIDATED);
        }
        let refused = match operation {
            Operation::Record(event) => {
                let wrong = event.owner.context != owner.context;
                if !wrong {
                    lock(&event.state).captured = true;
                }
                wrong.then_some(INVALID_HANDLE)
            }
            // Only events of the same capture may be waited for.
            Operation::Wait(event) => (!lock(&event.state).captured).then_some(CAPTURE_ISOLATION),
            Operation::Kernel { .. } | Operation::Copy { .. } => None,
        };
        if let Some(error) = refused {
            self.invalidated = true;
            return Err(error);
        }
        self.operations.push(operation.clone());
        Ok(())
    }
}

/// Begin and end of a kernel that waits until the device has nothing else to do.
fn one_at_a_time(begin: u64, ns: u64) -> (u64, u64) {
    static DEVICE_READY: Mutex<u64> = Mutex::new(0);
    let mut ready = lock(&DEVICE_READY);
    let begin = begin.max(*ready);
    *ready = begin + ns;
    (begin, *ready)
}

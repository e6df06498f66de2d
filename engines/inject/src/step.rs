//! What happens around a step, on the program's own thread: two events on the step's stream, and no waiting.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    clock,
    context::{self, Lookup, MAX_CONTEXTS, PAIRS, Pair},
    driver::{self, CudaError, Driver, Handle, Meaning},
    layers,
    queue::Queue,
    report::{self, COUNTERS, count},
    start,
};

/// Steps whose events are recorded, for our thread to read. As many as there are pairs: it never overflows.
pub(crate) static DONE: Queue<Step, { (MAX_CONTEXTS * PAIRS).next_power_of_two() }> = Queue::new();

static SEQUENCE: AtomicU64 = AtomicU64::new(0);

/// A step whose begin event is recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    /// Place in the table of contexts.
    pub(crate) context: usize,
    pub(crate) pair: Pair,
    pub(crate) stream: Handle,
    pub(crate) sequence: u64,
    /// CLOCK_MONOTONIC ns before the begin event was recorded.
    pub(crate) begin_ns: u64,
}

/// A step with both events recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) open: Open,
    /// CLOCK_MONOTONIC ns after the end event was recorded.
    pub(crate) end_ns: u64,
    pub(crate) tid: u32,
    /// Slot of its ranges, if it is a sampled one.
    pub(crate) layers: Option<usize>,
}

/// Before the engine's function. `None`: this step goes untimed, and is counted.
pub(crate) fn begin(stream: Handle) -> Option<Open> {
    layers::enter();
    count(&COUNTERS.steps);
    if report::is_disabled() {
        return None;
    }
    start::ensure_thread();
    let Some(driver) = driver::get() else {
        // Our thread has not looked yet: there are no events.
        count(&COUNTERS.pool);
        return None;
    };
    try_begin(driver, stream).unwrap_or_else(|error| {
        failed(error);
        None
    })
}

fn try_begin(driver: &Driver, stream: Handle) -> Result<Option<Open>, CudaError> {
    if driver.is_capturing(stream)? {
        // An event would become a node of the graph, and its time would mean nothing.
        count(&COUNTERS.capturing);
        return Ok(None);
    }
    let handle = driver.context_of(stream)?;
    let (context, pair) = match context::lookup(handle, driver.context_id(handle)) {
        Lookup::Ready(index) => (index, context::at(index).and_then(|context| context.free.pop())),
        Lookup::Soon | Lookup::Full => (0, None),
    };
    let Some(pair) = pair else {
        count(&COUNTERS.pool);
        return Ok(None);
    };
    let begin_ns = clock::monotonic();
    if let Err(error) = driver.record(pair.begin, stream) {
        give_back(context, pair);
        return Err(error);
    }
    let sequence = SEQUENCE.fetch_add(1, Ordering::Relaxed);
    layers::sample(context, stream, sequence);
    Ok(Some(Open { context, pair, stream, sequence, begin_ns }))
}

/// After the engine's function, with what [`begin`] gave.
pub(crate) fn end(open: Option<Open>) {
    let layers = layers::leave();
    let Some(open) = open else { return };
    let recorded = driver::get().map(|driver| driver.record(open.pair.end, open.stream));
    let end_ns = clock::monotonic();
    match recorded {
        Some(Ok(())) => {
            // SAFETY: takes nothing and cannot fail.
            let tid = unsafe { libc::gettid() } as u32;
            if DONE.push(Step { open, end_ns, tid, layers }).is_err() {
                give_back(open.context, open.pair);
                layers.into_iter().for_each(layers::give_back);
                count(&COUNTERS.pool);
            }
        }
        Some(Err(error)) => {
            give_back(open.context, open.pair);
            layers.into_iter().for_each(layers::give_back);
            failed(error);
        }
        None => {}
    }
}

/// Returns what a step had of its context's events.
pub(crate) fn give_back_all(step: &Step) {
    give_back(step.open.context, step.open.pair);
    step.layers.into_iter().for_each(layers::give_back);
}

/// Returns a pair to its pool. Its events may be recorded again even while the old records are still to come.
pub(crate) fn give_back(context: usize, pair: Pair) {
    if let Some(context) = context::at(context) {
        // There is room: a pool has as many places as pairs.
        let _ = context.free.push(pair);
    }
}

/// A call of the driver failed on the program's thread. Whether the context is gone is for our own thread to find out.
fn failed(error: CudaError) {
    match error.meaning() {
        Meaning::Capturing => count(&COUNTERS.capturing),
        Meaning::ContextLost | Meaning::NotReady | Meaning::Exiting => count(&COUNTERS.error),
        Meaning::Unknown => {
            count(&COUNTERS.error);
            report::disable_by_driver(error);
        }
    }
}

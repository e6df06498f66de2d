//! Layers: TensorRT names each layer by an NVTX range while it enqueues it. In some steps an event is recorded on the
//! step's stream where a range begins and where it ends; what lies between them is the layer's time on the GPU.
//!
//! A sampled step takes longer, and says so. One step in [`every`] is sampled, at random, so that nothing periodic in
//! the program is in step with it; none while its stream is capturing (it has no events at all then), and none while
//! events are short. The events of a sampled step are a slot's, which our thread fills ahead.

use std::{
    cell::{Cell, UnsafeCell},
    ffi::CStr,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use tracer_abi::mark::{self, MAX_LAYERS, MAX_NVTX_BYTES, NO_LAYER};

use crate::{
    context::{self, PAIRS},
    driver::{CudaError, Driver, Handle},
    nvtx,
    report::count,
};

/// Environment variable: one step in so many is sampled; 0: none.
const SETTING: &CStr = c"TRACER_INJECT_LAYERS";
const DEFAULT_EVERY: u32 = 200;

/// Sampled steps at a time.
pub(crate) const SLOTS: usize = 4;
/// Events of a slot: one at each end of each range.
const EVENTS: usize = 2 * MAX_LAYERS;
/// Fewer pairs than these in a context's pool: steps are more than can be read, and none of them is sampled.
const SHORT_OF_PAIRS: usize = PAIRS / 4;

const EMPTY: u32 = 0;
/// Our thread is to make its events in `context`.
const WANTED: u32 = 1;
const FREE: u32 = 2;
/// A thread of the program, or ours, has it.
const TAKEN: u32 = 3;

/// Events for the ranges of one sampled step.
struct Slot {
    state: AtomicU32,
    /// Place in the table of contexts.
    context: AtomicUsize,
    data: UnsafeCell<Data>,
}

// SAFETY: the data are touched only by the one thread that set the state from FREE (or WANTED) to TAKEN, until it or
// the thread that it handed the slot to sets another state.
unsafe impl Sync for Slot {}

/// What a slot holds of a step.
pub(crate) struct Data {
    stream: Handle,
    events: [Handle; EVENTS],
    used_events: usize,
    ranges: [Range; MAX_LAYERS],
    used: usize,
    /// The innermost open range, or [`NO_LAYER`].
    top: u32,
    /// There were more ranges than places, or an event could not be recorded.
    cut: bool,
}

/// One range of a sampled step.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    /// Handle of its NVTX domain; ranges nest within one.
    domain: usize,
    pub(crate) parent: u32,
    /// Places of its events.
    begin: u16,
    end: u16,
    pub(crate) depth: u16,
    name_bytes: u16,
    name: [u8; MAX_NVTX_BYTES],
}

impl Range {
    const NONE: Self = Self {
        domain: 0,
        parent: NO_LAYER,
        begin: 0,
        end: 0,
        depth: 0,
        name_bytes: 0,
        name: [0; MAX_NVTX_BYTES],
    };

    pub(crate) fn name(&self) -> &[u8] {
        self.name.get(..self.name_bytes.into()).unwrap_or_default()
    }
}

static SLOT: [Slot; SLOTS] = [const {
    Slot {
        state: AtomicU32::new(EMPTY),
        context: AtomicUsize::new(0),
        data: UnsafeCell::new(Data {
            stream: 0,
            events: [0; EVENTS],
            used_events: 0,
            ranges: [Range::NONE; MAX_LAYERS],
            used: 0,
            top: NO_LAYER,
            cut: false,
        }),
    }
}; SLOTS];

pub(crate) static SAMPLED: AtomicU64 = AtomicU64::new(0);
pub(crate) static SKIPPED: AtomicU64 = AtomicU64::new(0);

/// The step that a thread is in.
#[derive(Clone, Copy)]
struct Current {
    /// Steps that this thread is inside of.
    depth: u32,
    /// Place of the slot plus one; 0: not sampled.
    slot: usize,
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current { depth: 0, slot: 0 }) };
}

/// One step in so many is sampled; 0: none.
pub(crate) fn every() -> u32 {
    const UNKNOWN: u64 = u64::MAX;
    static EVERY: AtomicU64 = AtomicU64::new(UNKNOWN);
    let known = EVERY.load(Ordering::Relaxed);
    if known != UNKNOWN {
        return known as u32;
    }
    // SAFETY: the name is a string; what is found stays until the program changes its environment.
    let value = unsafe { libc::getenv(SETTING.as_ptr()) };
    let text = if value.is_null() {
        ""
    } else {
        // SAFETY: a value is a string.
        unsafe { CStr::from_ptr(value) }.to_str().unwrap_or_default()
    };
    let every = text.parse().unwrap_or(DEFAULT_EVERY);
    EVERY.store(every.into(), Ordering::Relaxed);
    every
}

/// Whether step number `number` is a sampled one: its hash decides (splitmix64, whose results are evenly spread).
fn is_due(number: u64, every: u32) -> bool {
    if every == 0 {
        return false;
    }
    let mut hash = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (hash ^ hash >> 31).is_multiple_of(every.into())
}

/// The thread begins a step.
pub(crate) fn enter() {
    let current = CURRENT.get();
    CURRENT.set(Current { depth: current.depth + 1, ..current });
}

/// The thread ends a step; the slot that holds its ranges, if it was sampled.
pub(crate) fn leave() -> Option<usize> {
    let current = CURRENT.get();
    CURRENT.set(Current { depth: current.depth.saturating_sub(1), slot: 0 });
    current.slot.checked_sub(1)
}

/// Whether the thread is in a step: its ranges are layers.
pub(crate) fn is_in_step() -> bool {
    CURRENT.get().depth > 0
}

/// The thread's step has its begin event on `stream`: samples it if it is due.
pub(crate) fn sample(context: usize, stream: Handle, number: u64) {
    if nvtx::clients() == 0 || CURRENT.get().depth != 1 || !is_due(number, every()) {
        return;
    }
    let pairs = context::at(context).map_or(0, |context| context.free.len());
    match (pairs >= SHORT_OF_PAIRS).then(|| claim(context)).flatten() {
        Some(index) => {
            // SAFETY: the slot was taken by this thread.
            let data = unsafe { &mut *SLOT[index].data.get() };
            (data.stream, data.used_events, data.used) = (stream, 0, 0);
            (data.top, data.cut) = (NO_LAYER, false);
            CURRENT.set(Current { slot: index + 1, ..CURRENT.get() });
            count(&SAMPLED);
        }
        None => count(&SKIPPED),
    }
}

/// A free slot of a context; asks for one where it has none.
fn claim(context: usize) -> Option<usize> {
    let takes = |slot: &Slot| {
        slot.context.load(Ordering::Relaxed) == context
            && slot.state.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if let Some(index) = SLOT.iter().position(takes) {
        return Some(index);
    }
    let is_asked_for = |slot: &Slot| {
        slot.context.load(Ordering::Relaxed) == context && slot.state.load(Ordering::Relaxed) == WANTED
    };
    if !SLOT.iter().any(is_asked_for)
        && let Some(slot) = SLOT.iter().find(|slot| {
            slot.state.compare_exchange(EMPTY, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    {
        slot.context.store(context, Ordering::Relaxed);
        slot.state.store(WANTED, Ordering::Release);
    }
    None
}

/// A range begins in the thread's step; `name` writes its name and says how long it is.
pub(crate) fn begin_range(driver: &Driver, domain: usize, name: impl FnOnce(&mut [u8]) -> usize) {
    with_data(|data| {
        if data.cut || data.used == MAX_LAYERS {
            data.cut = true;
            return;
        }
        let Some(begin) = data.event(driver) else { return };
        let depth = data.ranges.get(data.top as usize).map_or(0, |top| top.depth.saturating_add(1));
        let parent = data.top;
        data.top = data.used as u32;
        let range = &mut data.ranges[data.used];
        (range.domain, range.parent, range.depth) = (domain, parent, depth);
        // Until it ends: a step that leaves ranges open has no time for them.
        (range.begin, range.end) = (begin, begin);
        range.name_bytes = name(&mut range.name).min(MAX_NVTX_BYTES) as u16;
        data.used += 1;
    });
}

/// The innermost range of a domain ends in the thread's step.
pub(crate) fn end_range(driver: &Driver, domain: usize) {
    with_data(|data| {
        if data.cut || data.ranges.get(data.top as usize).is_none_or(|top| top.domain != domain) {
            return;
        }
        let Some(end) = data.event(driver) else { return };
        let range = &mut data.ranges[data.top as usize];
        range.end = end;
        data.top = range.parent;
    });
}

fn with_data(work: impl FnOnce(&mut Data)) {
    let Some(index) = CURRENT.get().slot.checked_sub(1) else { return };
    // SAFETY: the thread took the slot, and has it until its step ends.
    work(unsafe { &mut *SLOT[index].data.get() });
}

impl Data {
    /// Records the next event on the step's stream; its place.
    fn event(&mut self, driver: &Driver) -> Option<u16> {
        let event = *self.events.get(self.used_events)?;
        // The step's own events tell of trouble, too, and stop what has to be stopped.
        if driver.record(event, self.stream).is_err() {
            self.cut = true;
            return None;
        }
        self.used_events += 1;
        Some((self.used_events - 1) as u16)
    }
}

/// The slot of a step is not needed any more.
pub(crate) fn give_back(index: usize) {
    if let Some(slot) = SLOT.get(index) {
        slot.state.store(FREE, Ordering::Release);
    }
}

/// Makes the events of slots that were asked for in a context, which is current on our thread.
///
/// # Errors
/// The driver makes no event.
pub(crate) fn prepare(driver: &Driver, context: usize) -> Result<(), CudaError> {
    for slot in &SLOT {
        let is_ours = slot.context.load(Ordering::Relaxed) == context
            && slot.state.compare_exchange(WANTED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !is_ours {
            continue;
        }
        // SAFETY: the exchange gave the slot to this thread.
        let data = unsafe { &mut *slot.data.get() };
        for event in &mut data.events {
            *event = driver.event().inspect_err(|_| slot.state.store(EMPTY, Ordering::Release))?;
        }
        slot.state.store(FREE, Ordering::Release);
    }
    Ok(())
}

/// Whether [`prepare`] has anything to do in a context.
pub(crate) fn is_wanted(context: usize) -> bool {
    SLOT.iter().any(|slot| {
        slot.context.load(Ordering::Relaxed) == context && slot.state.load(Ordering::Relaxed) == WANTED
    })
}

/// A context is gone, and its events with it. Slots in the hands of steps come back through [`give_back`]: their
/// context is never asked for again.
pub(crate) fn context_lost(context: usize) {
    for slot in &SLOT {
        if slot.context.load(Ordering::Relaxed) == context {
            for state in [WANTED, FREE] {
                let _ = slot.state.compare_exchange(state, EMPTY, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// Forgets everything in a child process that has one thread.
pub(crate) fn reset() {
    SLOT.iter().for_each(|slot| slot.state.store(EMPTY, Ordering::Release));
    CURRENT.set(Current { depth: 0, slot: 0 });
}

/// The ranges of a step whose events are complete, each with the milliseconds from `from` to its begin and its end.
///
/// # Errors
/// The driver gives no time.
pub(crate) fn read(
    driver: &Driver,
    index: usize,
    from: Handle,
    mut each: impl FnMut(&Range, mark::GpuLayer),
) -> Result<Summary, CudaError> {
    // SAFETY: the step handed the slot to this thread.
    let data = unsafe { &*SLOT[index].data.get() };
    for range in &data.ranges[..data.used] {
        let begin_ms = driver.elapsed(from, data.events[usize::from(range.begin)])?;
        let end_ms = driver.elapsed(from, data.events[usize::from(range.end)])?;
        each(
            range,
            mark::GpuLayer {
                begin_ms_bits: begin_ms.to_bits(),
                end_ms_bits: end_ms.to_bits(),
                parent: range.parent,
                depth: range.depth,
                name_bytes: range.name_bytes,
            },
        );
    }
    Ok(Summary { total: data.used as u32, cut: data.cut })
}

/// What a sampled step came to.
pub(crate) struct Summary {
    pub(crate) total: u32,
    pub(crate) cut: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_step_in_so_many_is_due_and_not_periodically() {
        let due: Vec<u64> = (0..200_000).filter(|&number| is_due(number, 200)).collect();
        assert!((800..1200).contains(&due.len()), "{}", due.len());
        let gaps: Vec<u64> = due.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().any(|&gap| gap < 100) && gaps.iter().any(|&gap| gap > 400));
        assert!((0..100).all(|number| is_due(number, 1) && !is_due(number, 0)));
    }

    #[test]
    fn a_slot_is_asked_for_made_taken_and_given_back() {
        // A context that no other test has.
        let context = 77;
        assert_eq!(claim(context), None);
        assert!(is_wanted(context) && !is_wanted(78));
        assert_eq!(claim(context), None);
        let index = SLOT.iter().position(|slot| slot.context.load(Ordering::Relaxed) == context).unwrap();
        give_back(index);
        assert_eq!(claim(context), Some(index));
        assert_eq!(claim(context), None, "another one is asked for meanwhile");
        give_back(index);
        context_lost(context);
        assert!(!is_wanted(context));
        assert_eq!(SLOT[index].state.load(Ordering::Relaxed), EMPTY);
        reset();
    }

    #[test]
    fn a_thread_is_in_a_step_until_its_outermost_one_ends() {
        assert!(!is_in_step());
        enter();
        enter();
        assert_eq!(leave(), None);
        assert!(is_in_step());
        assert_eq!(leave(), None);
        assert!(!is_in_step());
    }
}

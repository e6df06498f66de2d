//! Steps that the program itself marks out, for engines of its own: `tracer_marks::gpu_step` in Rust.
//!
//! `tracer_step_begin(stream, step)` … `tracer_step_end(step)`, on one thread, with the work put on the stream in between.
//! `step` is memory of the caller's, written by the first and read by the second. [`tracer_step`] lies between the two
//! events' records and is what the tracer probes (`--engine own_steps`).

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    context::Pair,
    graph::InStep,
    hook::guard,
    report,
    step::{self, Open},
};

/// A step, as the caller keeps it.
#[repr(C)]
struct OwnStep {
    /// Bits: [`TIMED`], [`ENTERED`], [`IN_STEP`]; 0 while nobody listens.
    state: u64,
    context: u64,
    begin: u64,
    end: u64,
    stream: u64,
    sequence: u64,
    begin_ns: u64,
}

/// There are events.
const TIMED: u64 = 1;
/// This thread's graph launches are parts of this step.
const ENTERED: u64 = 2;
/// A tracer listened when it began.
const IN_STEP: u64 = 4;

static USED: AtomicBool = AtomicBool::new(false);

/// Whether the program has marked out a step while a tracer listened.
pub(crate) fn is_used() -> bool {
    USED.load(Ordering::Relaxed)
}

impl OwnStep {
    const IDLE: Self = Self { state: 0, context: 0, begin: 0, end: 0, stream: 0, sequence: 0, begin_ns: 0 };

    fn new(open: Option<Open>, entered: bool) -> Self {
        let entered = if entered { ENTERED | IN_STEP } else { IN_STEP };
        open.map_or(Self { state: entered, ..Self::IDLE }, |open| Self {
            state: entered | TIMED,
            context: open.context as u64,
            begin: open.pair.begin as u64,
            end: open.pair.end as u64,
            stream: open.stream as u64,
            sequence: open.sequence,
            begin_ns: open.begin_ns,
        })
    }

    fn open(&self) -> Option<Open> {
        (self.state & TIMED != 0).then_some(Open {
            context: self.context as usize,
            pair: Pair { begin: self.begin as usize, end: self.end as usize },
            stream: self.stream as usize,
            sequence: self.sequence,
            begin_ns: self.begin_ns,
        })
    }
}

/// Before the work of a step is put on `stream`, a CUstream.
///
/// # Safety
/// `own` must be valid for writes; `stream` must be a stream that work may be put on until the step ends.
#[unsafe(no_mangle)]
unsafe extern "C" fn tracer_step_begin(stream: *mut c_void, own: *mut OwnStep) {
    // SAFETY: by this function's contract.
    unsafe { own.write(OwnStep::IDLE) };
    if !report::listening() {
        return;
    }
    USED.store(true, Ordering::Relaxed);
    let open = guard(|| step::begin(stream as usize)).flatten();
    // SAFETY: by this function's contract.
    unsafe { own.write(OwnStep::new(open, InStep::enter().into_raw())) };
    tracer_step(stream);
}

/// After the work of a step was put on its stream.
///
/// # Safety
/// `own` must be what [`tracer_step_begin`] wrote on this thread, and not have been passed here before.
#[unsafe(no_mangle)]
unsafe extern "C" fn tracer_step_end(own: *mut OwnStep) {
    // SAFETY: by this function's contract.
    let own = unsafe { own.replace(OwnStep::IDLE) };
    drop(InStep::from_raw(own.state & ENTERED != 0));
    if own.state & IN_STEP != 0 {
        guard(|| step::end(own.open()));
    }
}

/// Does nothing: it exists to be probed. Its only argument is the stream.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tracer_step(stream: *mut c_void) {
    // A body that no other function has, so that it is not merged with one.
    std::hint::black_box((stream, "tracer_step"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_comes_back_as_it_was_kept() {
        let open = Open { context: 3, pair: Pair { begin: 4, end: 5 }, stream: 6, sequence: 7, begin_ns: 8 };
        assert_eq!(format!("{:?}", OwnStep::new(Some(open), true).open()), format!("{:?}", Some(open)));
        assert!(OwnStep::new(None, true).open().is_none());
        assert_eq!(size_of::<OwnStep>(), 56);
    }

    #[test]
    fn nothing_happens_while_nobody_listens() {
        let mut own = OwnStep::new(None, false);
        assert_eq!(own.state, IN_STEP);
        // SAFETY: valid for writes; streams are not looked at.
        unsafe { tracer_step_begin(std::ptr::null_mut(), &raw mut own) };
        assert_eq!(own.state, 0);
        // SAFETY: just written.
        unsafe { tracer_step_end(&raw mut own) };
    }
}

//! CUDA contexts that steps ran in, each with its pool of event pairs.
//!
//! A step asks for a pair; our thread makes the pairs of a context ahead, when its first step has asked. A context that
//! was lost is never used again: its events are not destroyed, since they went with it.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::{driver::Handle, queue::Queue};

/// Most contexts of a process that are timed.
pub(crate) const MAX_CONTEXTS: usize = 8;
/// Event pairs per context: as many steps may be under way before some go untimed.
pub(crate) const PAIRS: usize = 256;

/// The events before and after one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) begin: Handle,
    pub(crate) end: Handle,
}

const FREE: u32 = 0;
/// A thread is writing the handle.
const CLAIMED: u32 = 1;
/// Our thread is to make the pairs.
const WANTED: u32 = 2;
const READY: u32 = 3;
const LOST: u32 = 4;

/// A place in the table of contexts.
pub(crate) struct Context {
    state: AtomicU32,
    handle: AtomicUsize,
    /// See [`crate::driver::Driver::context_id`].
    id: AtomicU64,
    pub(crate) free: Queue<Pair, PAIRS>,
}

static CONTEXTS: [Context; MAX_CONTEXTS] = [const {
    Context {
        state: AtomicU32::new(FREE),
        handle: AtomicUsize::new(0),
        id: AtomicU64::new(0),
        free: Queue::new(),
    }
}; MAX_CONTEXTS];

/// The context at a place of the table.
pub(crate) fn at(index: usize) -> Option<&'static Context> {
    CONTEXTS.get(index)
}

/// What the table has for a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// Its pairs are ready; place in the table.
    Ready(usize),
    /// Our thread will make its pairs.
    Soon,
    /// The table is full.
    Full,
}

/// Looks a context up, and asks for its pairs when it is new. Called on the program's threads.
pub(crate) fn lookup(handle: Handle, id: u64) -> Lookup {
    for (index, context) in CONTEXTS.iter().enumerate() {
        match context.state.load(Ordering::Acquire) {
            state @ (WANTED | READY) => {
                let (its_handle, its_id) =
                    (context.handle.load(Ordering::Relaxed), context.id.load(Ordering::Relaxed));
                if its_handle == handle && its_id == id {
                    return if state == READY { Lookup::Ready(index) } else { Lookup::Soon };
                }
            }
            // Places are taken in order: the context is not behind this one.
            FREE => {
                if context.state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
                {
                    context.handle.store(handle, Ordering::Relaxed);
                    context.id.store(id, Ordering::Relaxed);
                    context.state.store(WANTED, Ordering::Release);
                }
                return Lookup::Soon;
            }
            // Another thread is about to say which context this is.
            CLAIMED => return Lookup::Soon,
            _ => {}
        }
    }
    Lookup::Full
}

impl Context {
    pub(crate) fn handle(&self) -> Handle {
        self.handle.load(Ordering::Relaxed)
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.state.load(Ordering::Acquire) == WANTED
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.state.load(Ordering::Acquire) == READY
    }

    /// Its pairs are in the pool.
    pub(crate) fn set_ready(&self) {
        self.state.store(READY, Ordering::Release);
    }

    /// It is gone.
    pub(crate) fn set_lost(&self) {
        self.state.store(LOST, Ordering::Release);
    }
}

/// Forgets all contexts, in a child process that has one thread: a driver does not survive a fork.
pub(crate) fn reset() {
    for context in &CONTEXTS {
        context.free.reset();
        context.state.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_asked_for_once_and_a_lost_one_is_not_taken_again() {
        assert_eq!(lookup(0x10, 1), Lookup::Soon);
        let first = at(0).unwrap();
        assert!(first.is_wanted() && first.handle() == 0x10);
        assert_eq!(lookup(0x10, 1), Lookup::Soon);
        assert!(!at(1).unwrap().is_wanted());
        first.set_ready();
        assert_eq!(lookup(0x10, 1), Lookup::Ready(0));
        // The same handle, another context.
        assert_eq!(lookup(0x10, 2), Lookup::Soon);
        at(1).unwrap().set_ready();
        first.set_lost();
        assert_eq!(lookup(0x10, 2), Lookup::Ready(1));
        assert_eq!(lookup(0x10, 1), Lookup::Soon);
        for handle in 3..9 {
            lookup(handle, 0);
        }
        assert_eq!(lookup(0x99, 0), Lookup::Full);
        reset();
        assert_eq!(lookup(0x99, 0), Lookup::Soon);
        reset();
    }
}

//! A bounded queue for several producers and consumers that never blocks and never allocates (Dmitry Vyukov's array
//! queue): each cell has a number that says whose turn it is.

use std::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{AtomicUsize, Ordering},
};

/// `N` must be a power of two.
pub(crate) struct Queue<T, const N: usize> {
    cells: [Cell<T>; N],
    head: AtomicUsize,
    tail: AtomicUsize,
}

struct Cell<T> {
    /// Counted from the cell's index, so that a fresh queue is all zeros: at lap `n` the cell may be filled when this is
    /// `n · N`, and taken when it is `n · N + 1`.
    turn: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a cell's value is only touched by the one thread whose turn it is, and values move between threads.
unsafe impl<T: Copy + Send, const N: usize> Sync for Queue<T, N> {}

impl<T: Copy, const N: usize> Queue<T, N> {
    pub(crate) const fn new() -> Self {
        assert!(N.is_power_of_two());
        Self {
            cells: [const { Cell { turn: AtomicUsize::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) } };
                N],
            head: AtomicUsize::new(0),
            tail: AtomicUsize::new(0),
        }
    }

    /// Adds a value; gives it back when the queue is full.
    pub(crate) fn push(&self, value: T) -> Result<(), T> {
        let mut at = self.tail.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[at % N];
            let ahead = cell.turn.load(Ordering::Acquire).wrapping_sub(at - at % N) as isize;
            match ahead {
                0 => match self.tail.compare_exchange_weak(
                    at,
                    at.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        // SAFETY: the exchange gave this cell to this thread alone until the store below.
                        unsafe { (*cell.value.get()).write(value) };
                        cell.turn.store((at - at % N).wrapping_add(1), Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => at = now,
                },
                ..0 => return Err(value),
                _ => at = self.tail.load(Ordering::Relaxed),
            }
        }
    }

    /// Takes the oldest value, unless the queue is empty or that value is still being written.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut at = self.head.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[at % N];
            let ahead =
                cell.turn.load(Ordering::Acquire).wrapping_sub((at - at % N).wrapping_add(1)) as isize;
            match ahead {
                0 => match self.head.compare_exchange_weak(
                    at,
                    at.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        // SAFETY: as in `push`; the turn says that the value was written.
                        let value = unsafe { (*cell.value.get()).assume_init() };
                        cell.turn.store((at - at % N).wrapping_add(N), Ordering::Release);
                        return Some(value);
                    }
                    Err(now) => at = now,
                },
                ..0 => return None,
                _ => at = self.head.load(Ordering::Relaxed),
            }
        }
    }

    /// How many values there are; other threads may add and take meanwhile.
    pub(crate) fn len(&self) -> usize {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Relaxed).wrapping_sub(head).min(N)
    }

    /// Empties the queue in a process that has one thread.
    pub(crate) fn reset(&self) {
        for cell in &self.cells {
            cell.turn.store(0, Ordering::Relaxed);
        }
        self.head.store(0, Ordering::Relaxed);
        self.tail.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::atomic::AtomicU64};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// One thread: as a plain queue of the same capacity.
        #[test]
        fn as_a_plain_queue(pushes in proptest::collection::vec(any::<bool>(), 0..300)) {
            let queue = Queue::<u32, 8>::new();
            let mut plain = VecDeque::new();
            for (value, push) in (0u32..).zip(pushes) {
                if push {
                    let full = plain.len() == 8;
                    prop_assert_eq!(queue.push(value), if full { Err(value) } else { Ok(()) });
                    if !full {
                        plain.push_back(value);
                    }
                } else {
                    prop_assert_eq!(queue.pop(), plain.pop_front());
                }
                prop_assert_eq!(queue.len(), plain.len());
            }
            queue.reset();
            prop_assert_eq!(queue.pop(), None);
            prop_assert_eq!(queue.push(1), Ok(()));
        }
    }

    #[test]
    fn nothing_is_lost_or_doubled_between_threads() {
        const EACH: u64 = 50_000;
        static QUEUE: Queue<u64, 64> = Queue::new();
        let (sum, taken) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for producer in 0..3 {
                scope.spawn(move || {
                    for value in producer * EACH..(producer + 1) * EACH {
                        while QUEUE.push(value).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    while taken.load(Ordering::Relaxed) < 3 * EACH {
                        match QUEUE.pop() {
                            Some(value) => {
                                sum.fetch_add(value, Ordering::Relaxed);
                                taken.fetch_add(1, Ordering::Relaxed);
                            }
                            None => std::thread::yield_now(),
                        }
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), (0..3 * EACH).sum());
        assert_eq!(QUEUE.pop(), None);
    }
}

//! Puts events of several CPUs and rings into time order.
//!
//! The rings are filled by all CPUs at once and drained one after the other, so what comes out is nearly, not quite,
//! in order. Release rule: the drainer reads the clock, then empties both rings; everything that was written before
//! that reading minus a slack has then arrived and may leave, oldest first. The slack covers a program that was
//! preempted between taking its time stamp and writing its record. An event that is later still leaves at once, out of
//! order, and is counted: late is better than lost.

use std::{cmp::Reverse, collections::BinaryHeap};

/// Holds items until no older one can come.
#[derive(Debug)]
pub struct Sorter<T> {
    /// (Time, order of arrival, slot): items stay where they are, since they are many times as big as these.
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    slots: Vec<Option<T>>,
    free: Vec<usize>,
    slack_ns: u64,
    released_ns: u64,
    sequence: u64,
    late: u64,
}

impl<T> Sorter<T> {
    /// A sorter that allows records to arrive up to `slack_ns` after their time.
    #[must_use]
    pub fn new(slack_ns: u64) -> Self {
        Self {
            heap: BinaryHeap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            slack_ns,
            released_ns: 0,
            sequence: 0,
            late: 0,
        }
    }

    /// Adds an item; items of equal time keep their order.
    pub fn push(&mut self, time_ns: u64, item: T) {
        if time_ns < self.released_ns {
            self.late += 1;
        }
        self.sequence += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(item);
        self.heap.push(Reverse((time_ns, self.sequence, slot)));
    }

    /// Hands over, oldest first, everything that is older than `drained_ns` minus the slack, where `drained_ns` is
    /// the time read before the rings were emptied.
    pub fn release(&mut self, drained_ns: u64, mut sink: impl FnMut(T)) {
        let watermark = drained_ns.saturating_sub(self.slack_ns);
        self.released_ns = self.released_ns.max(watermark);
        while let Some(&Reverse((time_ns, _, slot))) = self.heap.peek()
            && time_ns < watermark
        {
            self.heap.pop();
            self.free.push(slot);
            if let Some(item) = self.slots[slot].take() {
                sink(item);
            }
        }
    }

    /// Hands over all that is left.
    pub fn finish(&mut self, sink: impl FnMut(T)) {
        self.release(u64::MAX, sink);
    }

    /// Items that came after a younger one had left.
    #[must_use]
    pub const fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Sorter;

    proptest! {
        /// Whatever the arrival order within the slack, items leave in time order, all of them, none early.
        #[test]
        fn releases_in_order(delays in prop::collection::vec(0u64..100, 1..200)) {
            let mut arrivals: Vec<(u64, u64)> =
                delays.iter().enumerate().map(|(index, delay)| (index as u64 * 7 + delay, index as u64 * 7)).collect();
            arrivals.sort_unstable();
            let mut sorter = Sorter::new(100);
            let mut out = Vec::new();
            for (arrival, time) in arrivals {
                sorter.push(time, time);
                sorter.release(arrival, |time| {
                    assert!(time + 100 < arrival);
                    out.push(time);
                });
            }
            sorter.finish(|time| out.push(time));
            prop_assert!(out.is_sorted());
            prop_assert_eq!(out.len(), delays.len());
            prop_assert_eq!(sorter.late(), 0);
        }
    }

    #[test]
    fn late_items_are_counted_and_not_lost() {
        let mut sorter = Sorter::new(0);
        sorter.push(10, 10);
        sorter.release(20, |_| ());
        sorter.push(5, 5);
        let mut out = Vec::new();
        sorter.release(21, |time| out.push(time));
        assert_eq!((out, sorter.late()), (vec![5], 1));
    }
}

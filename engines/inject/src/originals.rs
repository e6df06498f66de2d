//! The functions that shims stand for. A shim is code and cannot carry an address: it has a number, and its function is
//! at that place of a table.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Addresses of `N` functions; 0: none yet. A place is filled before anything leads to its shim, and never changed.
pub(crate) struct Originals<const N: usize>([AtomicUsize; N]);

impl<const N: usize> Originals<N> {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicUsize::new(0) }; N])
    }

    /// The function at a place.
    #[inline(always)]
    pub(crate) fn get(&self, place: usize) -> usize {
        self.0[place].load(Ordering::Acquire)
    }

    /// The place of a function, which it gets if it has none; `None`: all are taken.
    pub(crate) fn claim(&self, function: usize) -> Option<usize> {
        self.0.iter().position(|place| {
            match place.compare_exchange(0, function, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => true,
                Err(taken) => taken == function,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_one_place() {
        let originals = Originals::<2>::new();
        assert_eq!(
            [7, 8, 7, 9, 8].map(|function| originals.claim(function)),
            [Some(0), Some(1), Some(0), None, Some(1)]
        );
        assert_eq!([originals.get(0), originals.get(1)], [7, 8]);
    }
}

//! Ranges of a map's indices: taken, and given back.

use std::collections::BTreeMap;

/// Which indices of an array are free.
#[derive(Debug)]
pub(super) struct Ranges {
    /// First index → how many; neighbours are one range.
    free: BTreeMap<u32, u32>,
}

impl Ranges {
    pub(super) fn new(entries: u32) -> Self {
        Self { free: BTreeMap::from([(0, entries)]) }
    }

    /// Takes `len` indices in a row; returns the first.
    pub(super) fn take(&mut self, len: u32) -> Option<u32> {
        if len == 0 {
            return Some(0);
        }
        let (first, free) = self.free.iter().map(|(first, free)| (*first, *free)).find(|(_, n)| *n >= len)?;
        self.free.remove(&first);
        if free > len {
            self.free.insert(first + len, free - len);
        }
        Some(first)
    }

    /// Gives back what was taken.
    pub(super) fn give(&mut self, first: u32, len: u32) {
        if len == 0 {
            return;
        }
        let (mut first, mut len) = (first, len);
        if let Some((&before, &n)) = self.free.range(..first).next_back()
            && before + n == first
        {
            self.free.remove(&before);
            (first, len) = (before, n + len);
        }
        if let Some(n) = self.free.remove(&(first + len)) {
            len += n;
        }
        self.free.insert(first, len);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_taken_is_nobody_elses_and_all_comes_back(
            wishes in prop::collection::vec((1u32..40, any::<bool>()), 0..200)
        ) {
            let mut ranges = Ranges::new(500);
            let mut owner = vec![None; 500];
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (number, (len, gives)) in wishes.into_iter().enumerate() {
                if gives && !taken.is_empty() {
                    let (first, len) = taken.swap_remove(number % taken.len());
                    owner[first as usize..][..len as usize].fill(None);
                    ranges.give(first, len);
                } else if let Some(first) = ranges.take(len) {
                    for cell in &mut owner[first as usize..][..len as usize] {
                        prop_assert!(cell.replace(number).is_none());
                    }
                    taken.push((first, len));
                } else {
                    // Refused only where no gap is long enough.
                    let gaps = owner.split(|cell| cell.is_some());
                    prop_assert!(gaps.into_iter().all(|gap| gap.len() < len as usize));
                }
            }
            taken.into_iter().for_each(|(first, len)| ranges.give(first, len));
            prop_assert_eq!(ranges.free, BTreeMap::from([(0, 500)]));
        }
    }
}

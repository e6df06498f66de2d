//! Handles: numbers that look like pointers and stand for objects of this library.

use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{INVALID_HANDLE, Result};
use crate::pointer::Handle;

/// Objects of one kind, found by handle.
pub(crate) struct Table<T> {
    /// In the upper half of every handle, so that one kind's handle is never another's.
    tag: u32,
    slots: RwLock<Vec<Option<Arc<T>>>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(tag: u32) -> Self {
        Self { tag, slots: RwLock::new(Vec::new()) }
    }

    /// Adds what `make` makes of its handle.
    pub(crate) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Handle {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let index = slots.iter().position(Option::is_none).unwrap_or(slots.len());
        if index == slots.len() {
            slots.push(None);
        }
        let handle = ((u64::from(self.tag) << 32) | ((index as u64 + 1) << 4)) as Handle;
        slots[index] = Some(Arc::new(make(handle)));
        handle
    }

    fn index(&self, handle: Handle) -> Result<usize> {
        let number = handle as u64;
        let index = ((number & u64::from(u32::MAX)) >> 4).checked_sub(1).ok_or(INVALID_HANDLE)?;
        if number >> 32 != u64::from(self.tag) || number & 15 != 0 {
            return Err(INVALID_HANDLE);
        }
        Ok(index as usize)
    }

    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<T>> {
        let index = self.index(handle)?;
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(index).cloned().flatten().ok_or(INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        let index = self.index(handle)?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots.get_mut(index).and_then(Option::take).ok_or(INVALID_HANDLE)
    }

    /// Every object.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_distinct_and_bad_ones_are_refused() {
        let (a, b) = (Table::new(0x5e01), Table::new(0x5e02));
        let one = a.insert(|_| 1);
        let two = a.insert(|_| 2);
        assert_ne!(one, two);
        assert_eq!((*a.get(one).unwrap(), *a.get(two).unwrap()), (1, 2));
        assert_eq!(*a.remove(one).unwrap(), 1);
        for bad in [one, std::ptr::null_mut(), 0x10 as Handle, usize::MAX as Handle] {
            assert_eq!(a.get(bad), Err(INVALID_HANDLE));
            assert_eq!(a.remove(bad), Err(INVALID_HANDLE));
        }
        assert_eq!(b.get(two), Err(INVALID_HANDLE));
        _ = b.insert(|_| 3);
        assert_eq!(a.insert(|_| 4), one, "slots are used again");
        assert_eq!(a.all().len(), 2);
    }
}

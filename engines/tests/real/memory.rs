//! How much of the heap is in use at most.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

/// The system's allocator, with what is in use counted.
pub(crate) struct Peak {
    used: AtomicUsize,
    peak: AtomicUsize,
}

impl Peak {
    pub(crate) const fn new() -> Self {
        Self { used: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Forgets the peak; returns the bytes in use now.
    pub(crate) fn restart(&self) -> usize {
        let used = self.used.load(Ordering::Relaxed);
        self.peak.store(used, Ordering::Relaxed);
        used
    }

    /// Most bytes in use since the last [`Self::restart`].
    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }
}

// SAFETY: every call goes to the system's allocator as it came; only counters are kept beside it.
unsafe impl GlobalAlloc for Peak {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = self.used.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        self.peak.fetch_max(used, Ordering::Relaxed);
        // SAFETY: the caller keeps the promises of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.used.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

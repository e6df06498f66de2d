//! Names that a program registers with NVTX once and refers to by handles: strings and domains.

use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use tracer_abi::mark::MAX_NVTX_BYTES;

/// Most names of a process; a program that registers more gets none for them.
const NAMES: usize = 4096;

/// A place for one name.
struct Place {
    /// Bytes of the name plus one, once it is there.
    ready: AtomicU32,
    bytes: UnsafeCell<[u8; MAX_NVTX_BYTES]>,
}

// SAFETY: the bytes are written by the one thread that took the place, before `ready` says so, and only read after.
unsafe impl Sync for Place {}

static PLACES: [Place; NAMES] =
    [const { Place { ready: AtomicU32::new(0), bytes: UnsafeCell::new([0; MAX_NVTX_BYTES]) } }; NAMES];
static TAKEN: AtomicUsize = AtomicUsize::new(0);
static LOST: AtomicU64 = AtomicU64::new(0);

/// Keeps a name for the life of the process; its handle, or 0 when there is no place left.
pub(crate) fn keep(name: &[u8]) -> usize {
    let index = TAKEN.fetch_add(1, Ordering::Relaxed);
    let Some(place) = PLACES.get(index) else {
        // Far from wrapping around.
        TAKEN.fetch_sub(1, Ordering::Relaxed);
        LOST.fetch_add(1, Ordering::Relaxed);
        return 0;
    };
    let name = &name[..name.len().min(MAX_NVTX_BYTES)];
    // SAFETY: the counter gave this place to this thread alone, and nobody reads it before the store below.
    unsafe { (&mut (*place.bytes.get()))[..name.len()].copy_from_slice(name) };
    place.ready.store(name.len() as u32 + 1, Ordering::Release);
    std::ptr::from_ref(place) as usize
}

/// The name of a handle; empty for what is none of ours.
pub(crate) fn of(handle: usize) -> &'static [u8] {
    let Some(offset) = handle.checked_sub(PLACES.as_ptr() as usize) else { return &[] };
    if offset % size_of::<Place>() != 0 {
        return &[];
    }
    let Some(place) = PLACES.get(offset / size_of::<Place>()) else { return &[] };
    let length = (place.ready.load(Ordering::Acquire) as usize).saturating_sub(1);
    // SAFETY: the load above saw that the name is written; it is never written again.
    let bytes: &'static [u8] = unsafe { &*place.bytes.get() };
    bytes.get(..length).unwrap_or_default()
}

/// Names that found no place.
pub(crate) fn lost() -> u64 {
    LOST.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_kept_up_to_a_bound_and_other_handles_are_none() {
        let handle = keep(b"decoder layer");
        assert_eq!(of(handle), b"decoder layer");
        assert_eq!(of(keep(&[b'x'; 1000])), [b'x'; MAX_NVTX_BYTES]);
        for other in [0, 1, handle + 1, handle - 8, usize::MAX] {
            assert_eq!(of(other), b"", "{other:#x}");
        }
        let kept = (0..2 * NAMES).filter(|_| keep(b"more") != 0).count();
        assert_eq!(kept, NAMES - 2);
        assert_eq!(lost(), (NAMES + 2) as u64);
        assert_eq!(of(handle), b"decoder layer");
    }
}

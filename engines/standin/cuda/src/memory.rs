//! Device memory, which is host memory here, and pinned host memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{INVALID_VALUE, OUT_OF_MEMORY, Result};
use crate::pointer::Address;

/// Bytes of memory of the device.
pub(crate) const TOTAL: usize = 8 << 30;
/// Alignment of every allocation, in bytes.
const ALIGN: usize = 256;

static BLOCKS: Mutex<BTreeMap<Address, Layout>> = Mutex::new(BTreeMap::new());

fn blocks() -> MutexGuard<'static, BTreeMap<Address, Layout>> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn used() -> usize {
    blocks().values().map(Layout::size).sum()
}

pub(crate) fn allocate(bytes: usize) -> Result<Address> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if used().saturating_add(bytes) > TOTAL {
        return Err(OUT_OF_MEMORY);
    }
    let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: the layout is not empty.
    let address = unsafe { alloc_zeroed(layout) } as Address;
    if address == 0 {
        return Err(OUT_OF_MEMORY);
    }
    blocks().insert(address, layout);
    Ok(address)
}

pub(crate) fn free(address: Address) -> Result {
    if address == 0 {
        return Ok(());
    }
    let layout = blocks().remove(&address).ok_or(INVALID_VALUE)?;
    // SAFETY: allocated above with this layout, and forgotten just now.
    unsafe { dealloc(address as *mut u8, layout) };
    Ok(())
}

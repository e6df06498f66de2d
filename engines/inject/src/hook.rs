//! Replaces vtable slots with shims, and puts them back.

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{graph::InStep, originals::Originals, report, step};

/// `bool enqueueV3(this, stream)`. The result is passed on as it is: all of rax.
type Enqueue = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) -> usize;

/// Different functions that can be replaced in one process.
const SHIMS: usize = 16;

static ORIGINALS: Originals<SHIMS> = Originals::new();

macro_rules! shims {
    ($($index:literal)*) => { [$(shim::<$index>),*] };
}
const SHIM: [Enqueue; SHIMS] = shims!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Stands in the vtable for the engine's function.
///
/// # Safety
/// Only callable as a virtual function of an engine's object, through a slot that [`install`] changed.
unsafe extern "C-unwind" fn shim<const INDEX: usize>(this: *mut c_void, stream: *mut c_void) -> usize {
    // SAFETY: `install` stored the address of the function that the slot held, before the slot led here.
    let original = unsafe { std::mem::transmute::<usize, Enqueue>(ORIGINALS.get(INDEX)) };
    if report::listening() {
        // SAFETY: the caller's arguments, passed on.
        return unsafe { timed(original, this, stream) };
    }
    // SAFETY: as above.
    unsafe { original(this, stream) }
}

/// A step between two events.
///
/// # Safety
/// As [`shim`].
#[cold]
#[inline(never)]
unsafe extern "C-unwind" fn timed(original: Enqueue, this: *mut c_void, stream: *mut c_void) -> usize {
    let open = guard(|| step::begin(stream as usize)).flatten();
    let in_step = InStep::enter();
    // SAFETY: the caller's arguments, passed on.
    let result = unsafe { original(this, stream) };
    drop(in_step);
    guard(|| step::end(open));
    result
}

/// Keeps a panic from reaching the program, and this library from going on after one.
pub(crate) fn guard<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| report::disable_by_panic()).ok()
}

/// A slot that leads to a shim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hook {
    /// Address of the vtable word.
    word: usize,
    shim: usize,
    original: usize,
    /// The loader made the word's page read-only after relocation.
    read_only: bool,
}

/// Leads a vtable word to a shim.
///
/// # Errors
/// When the word does not hold `original`, or when its page cannot be written.
///
/// # Safety
/// `word` must be the address of a vtable word of a library that stays mapped during the call, for a method of the
/// type of [`Enqueue`]; `read_only` says whether the loader has protected it.
pub(crate) unsafe fn install(word: usize, original: usize, read_only: bool) -> Result<Hook, String> {
    let shim = ORIGINALS
        .claim(original)
        .ok_or_else(|| format!("more than {SHIMS} different functions to replace"))?;
    let hook = Hook { word, shim: SHIM[shim] as usize, original, read_only };
    // SAFETY: by this function's contract.
    let found = unsafe { atomic(word) }.load(Ordering::Relaxed);
    if found == hook.shim {
        return Ok(hook);
    }
    if found != original {
        return Err(format!(
            "the vtable slot holds {found:#x}, not {original:#x}: the file or the slot was changed"
        ));
    }
    // SAFETY: as above.
    unsafe { hook.write(hook.original, hook.shim) }?;
    Ok(hook)
}

impl Hook {
    /// Puts the original back, unless the slot holds something else by now.
    ///
    /// # Safety
    /// The library must still be mapped.
    pub(crate) unsafe fn remove(self) -> Result<(), String> {
        // SAFETY: by this function's contract.
        unsafe { self.write(self.shim, self.original) }
    }

    /// Replaces `old` by `new` in the slot; does nothing when it holds something else.
    ///
    /// # Safety
    /// The library must still be mapped.
    unsafe fn write(&self, old: usize, new: usize) -> Result<(), String> {
        if self.read_only {
            protect(self.word, libc::PROT_READ | libc::PROT_WRITE)?;
        }
        // SAFETY: by this function's contract the word is mapped, and it is writable now. Whoever calls through the
        // slot meanwhile sees one function or the other.
        let _ = unsafe { atomic(self.word) }.compare_exchange(old, new, Ordering::Release, Ordering::Relaxed);
        if self.read_only { protect(self.word, libc::PROT_READ) } else { Ok(()) }
    }
}

/// The word as an atomic.
///
/// # Safety
/// The word must be mapped as long as the reference is used.
unsafe fn atomic<'a>(word: usize) -> &'a AtomicUsize {
    // SAFETY: by this function's contract; vtable words are aligned.
    unsafe { AtomicUsize::from_ptr(word as *mut usize) }
}

/// Sets the protection of the page that holds a word.
fn protect(word: usize, protection: libc::c_int) -> Result<(), String> {
    // SAFETY: takes a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let start = word & !(page - 1);
    // SAFETY: only data that the loader has relocated lies there; nothing is unmapped, and reading stays allowed.
    let result = unsafe { libc::mprotect(start as *mut c_void, page, protection) };
    if result == 0 {
        return Ok(());
    }
    Err(format!("cannot change the protection of the vtable's page: {}", std::io::Error::last_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C-unwind" fn engine(this: *mut c_void, stream: *mut c_void) -> usize {
        this as usize * 1000 + stream as usize
    }

    #[test]
    fn a_slot_leads_to_the_shim_and_back() {
        let original = engine as *const () as usize;
        let mut word = original;
        let address = &raw mut word as usize;
        // SAFETY: the word lives through the test.
        let hook = unsafe { install(address, original, false) }.unwrap();
        // SAFETY: as above.
        let now = || unsafe { atomic(address) }.load(Ordering::Relaxed);
        assert_ne!(now(), original);
        // SAFETY: the slot leads to a shim of this type.
        let function = unsafe { std::mem::transmute::<usize, Enqueue>(now()) };
        // SAFETY: `engine` takes any numbers.
        assert_eq!(unsafe { function(7 as *mut c_void, 3 as *mut c_void) }, 7003);
        // SAFETY: the word lives through the test.
        let again = unsafe { install(address, original, false) }.unwrap();
        assert_eq!(again.shim, hook.shim);
        // SAFETY: as above.
        unsafe { hook.remove() }.unwrap();
        assert_eq!(now(), original);
        // Somebody else's pointer stays.
        // SAFETY: as above.
        unsafe { atomic(address) }.store(0x1234, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { hook.remove() }.unwrap();
        assert_eq!(now(), 0x1234);
        // SAFETY: as above.
        assert!(unsafe { install(address, original, false) }.unwrap_err().contains("0x1234"));
    }
}

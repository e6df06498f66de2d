//! `dlsym`, through which TensorRT, PyTorch and programs with their own copy of libcudart find the driver.
//!
//! This library's `dlsym` comes before the C library's in programs that are started with it (LD_PRELOAD). It passes
//! every call on by a jump, so that the caller stays the caller (which is what RTLD_NEXT and RTLD_DEFAULT mean), except
//! where libcuda itself has a function that has a shim. Where this library is loaded later, nothing comes here.

use std::ffi::{CStr, c_char, c_void};

use crate::graph::Known;

/// A function of libcuda by name. For callers that have one of it.
pub(crate) fn of_driver(name: &CStr) -> Option<*mut c_void> {
    // Linked: behind this library in the program's search order.
    find(libc::RTLD_NEXT, name).filter(|function| is_of_driver(*function)).or_else(|| {
        // SAFETY: the name is a string; RTLD_NOLOAD only looks at what is loaded. The reference keeps it mapped.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        if library.is_null() { None } else { find(library, name) }
    })
}

fn find(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the handle is one that the loader gave out or RTLD_NEXT, and the name is a string.
    let function = unsafe { real(library, name.as_ptr()) };
    (!function.is_null()).then_some(function)
}

/// Whether a function is in a libcuda; if so, that stays mapped from now on.
fn is_of_driver(function: *mut c_void) -> bool {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: `info` is valid for writes.
    if unsafe { libc::dladdr(function, info.as_mut_ptr()) } == 0 {
        return false;
    }
    // SAFETY: the call above has filled it.
    let path = unsafe { info.assume_init() }.dli_fname;
    if path.is_null() {
        return false;
    }
    // SAFETY: the loader's string.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // SAFETY: a string; RTLD_NOLOAD only looks at what is loaded.
    name.starts_with(b"libcuda.so")
        && !unsafe { libc::dlopen(path, libc::RTLD_NOLOAD | libc::RTLD_LAZY) }.is_null()
}

/// What `dlsym` answers in place of the C library's; null: what that one answers.
///
/// # Safety
/// As `dlsym`.
#[cfg_attr(
    not(all(target_arch = "x86_64", target_env = "gnu")),
    expect(dead_code, reason = "used by the shim only")
)]
unsafe extern "C" fn answer(library: *mut c_void, name: *const c_char) -> *mut c_void {
    let none = std::ptr::null_mut();
    // SAFETY: by this function's contract.
    let Some(known) = (unsafe { Known::named(name) }) else { return none };
    if library == libc::RTLD_DEFAULT || library == libc::RTLD_NEXT {
        // Relative to the caller, which only a jump keeps. The first finds this library's own exports.
        return none;
    }
    // SAFETY: the caller's arguments, passed on. Where this fails, so will the call that the shim makes: its error is
    // what the caller sees.
    let function = unsafe { real(library, name) };
    if function.is_null() || !is_of_driver(function) {
        return none;
    }
    known.shim(function).unwrap_or(none)
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
mod shim {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::{answer, c_char, c_void};

    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

    /// The `dlsym` behind this library's: the C library's, or that of another library that does as this one.
    static REAL: AtomicUsize = AtomicUsize::new(0);

    /// # Safety
    /// As `dlsym`; RTLD_NEXT is relative to this library.
    pub(super) unsafe fn real(library: *mut c_void, name: *const c_char) -> *mut c_void {
        prepare();
        // SAFETY: `prepare` has stored a function of this type.
        let real = unsafe { std::mem::transmute::<usize, Dlsym>(REAL.load(Ordering::Relaxed)) };
        // SAFETY: by this function's contract.
        unsafe { real(library, name) }
    }

    /// Finds the real one: by `dlvsym`, which nobody replaces, the C library's; by that, the next one.
    fn prepare() {
        if REAL.load(Ordering::Relaxed) != 0 {
            return;
        }
        let versions = [c"GLIBC_2.2.5", c"GLIBC_2.34"];
        // SAFETY: strings.
        let found = versions
            .iter()
            .map(|version| unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) })
            .find(|found| !found.is_null());
        let real = found.map_or(missing as *const () as usize, |first| {
            // SAFETY: it is the C library's `dlsym`.
            let first = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(first) };
            // SAFETY: strings.
            let next = unsafe { first(libc::RTLD_NEXT, c"dlsym".as_ptr()) };
            if next.is_null() { first as usize } else { next as usize }
        });
        REAL.store(real, Ordering::Relaxed);
    }

    /// Where there is no `dlsym` at all, nothing is found.
    unsafe extern "C" fn missing(_library: *mut c_void, _name: *const c_char) -> *mut c_void {
        std::ptr::null_mut()
    }

    /// # Safety
    /// As `dlsym`.
    unsafe extern "C" fn ask(library: *mut c_void, name: *const c_char) -> *mut c_void {
        prepare();
        // SAFETY: by this function's contract.
        unsafe { answer(library, name) }
    }

    /// Answers, or jumps to the real one with the caller's arguments, stack and return address.
    #[cfg_attr(not(test), unsafe(no_mangle))]
    #[unsafe(naked)]
    unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "push rsi",
            ".cfi_adjust_cfa_offset 8",
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 8",
            "call {ask}",
            "add rsp, 8",
            ".cfi_adjust_cfa_offset -8",
            "pop rsi",
            ".cfi_adjust_cfa_offset -8",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "test rax, rax",
            "jne 2f",
            "jmp qword ptr [rip + {real}]",
            "2:",
            "ret",
            ".cfi_endproc",
            ask = sym ask,
            real = sym REAL,
        )
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn calls_are_passed_on() {
            let of_libc = |name: &std::ffi::CStr| {
                // SAFETY: a string.
                unsafe {
                    (dlsym(libc::RTLD_DEFAULT, name.as_ptr()), libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()))
                }
            };
            let (ours, theirs) = of_libc(c"getenv");
            assert!(!ours.is_null() && ours == theirs);
            // SAFETY: no preconditions.
            unsafe { libc::dlerror() };
            let (ours, theirs) = of_libc(c"there_is_no_such_function");
            assert!(ours.is_null() && theirs.is_null());
            // SAFETY: no preconditions; an error was just set.
            let error = unsafe { std::ffi::CStr::from_ptr(libc::dlerror()) };
            assert!(error.to_string_lossy().contains("there_is_no_such_function"));
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
use shim::real;

/// # Safety
/// As `dlsym`.
#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
unsafe fn real(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: by this function's contract.
    unsafe { libc::dlsym(library, name) }
}

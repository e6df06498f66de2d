//! Pointers that callers of the driver API pass. The exports are `unsafe`: their callers promise, as for the real
//! library, that each pointer is null or valid for what its type says. These types rely on that promise, and only
//! exports' arguments are ever of these types.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::error::{INVALID_VALUE, Result};

/// Where to write a result; null is refused.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn set(self, value: T) -> Result {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and valid by the promise above.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// As [`Self::set`], but null means that the caller does not want to know.
    pub(crate) fn set_if_wanted(self, value: T) {
        _ = self.set(value);
    }
}

impl Out<c_char> {
    /// Writes a string into a buffer of `len` bytes, cut to fit, with its NUL.
    pub(crate) fn set_text(self, len: c_int, text: &str) -> Result {
        let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(INVALID_VALUE)?;
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        let n = text.len().min(room);
        // SAFETY: the buffer holds `len > n` bytes by the promise above.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr().cast(), n);
            self.0.add(n).write(0);
        }
        Ok(())
    }
}

/// A string that ends with NUL; null is refused.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and a string by the promise above.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// A value to read; null is refused.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Result<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and valid by the promise above.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// Parameters of a kernel: an array of pointers to values.
pub(crate) type KernelParameters = In<In<u64>>;

/// Memory of the host or of the simulated device, which is the host's too.
pub(crate) type Address = u64;

/// Copies as `memmove`; null with bytes to copy is refused.
pub(crate) fn copy(to: Address, from: Address, bytes: usize) -> Result {
    if bytes > 0 && (to == 0 || from == 0) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: both ranges are valid by the promise above.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    Ok(())
}

/// Sets bytes; null with bytes to set is refused.
pub(crate) fn fill(to: Address, value: u8, bytes: usize) -> Result {
    if bytes > 0 && to == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the range is valid by the promise above.
    unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
    Ok(())
}

/// A handle as callers see it.
pub(crate) type Handle = *mut c_void;

//! Pointers that callers of NVML pass. The exports are `unsafe`: their callers promise, as for the real library, that
//! each pointer is null or valid for what its type says. These types rely on that promise, and only exports' arguments
//! are ever of these types.

use std::ffi::{CStr, c_char, c_uint};

use crate::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, Result};

/// Where to write a result, or an array of them; null is refused.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub(crate) fn set(self, value: T) -> Result {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and valid by the promise above.
        unsafe { self.0.write(value) };
        Ok(())
    }

    pub(crate) fn get(self) -> Result<T> {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and valid by the promise above.
        Ok(unsafe { self.0.read() })
    }

    /// Writes an array, whose room is `*count`, and how many there are; too little room is an error that says so.
    pub(crate) fn set_all(self, count: Out<c_uint>, values: &[T]) -> Result {
        let room = count.get()? as usize;
        count.set(values.len() as c_uint)?;
        if values.is_empty() {
            return Ok(());
        }
        if self.0.is_null() || room < values.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        // SAFETY: not null, and valid for `room` values by the promise above.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a string with its NUL into a buffer of `len` bytes.
    pub(crate) fn set_text(self, len: c_uint, text: &str) -> Result {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if text.len() >= len as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        // SAFETY: the buffer holds more bytes than the text by the promise above.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
            self.0.add(text.len()).write(0);
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
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and a string by the promise above.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

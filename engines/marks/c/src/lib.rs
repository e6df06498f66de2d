//! The C ABI of marks: `include/tracer_marks.h` documents it.
//!
//! A library of its own, so that Rust programs and libraries that use marks do not export these symbols.

use std::ffi::{c_char, c_int};

use marks::{AttrValue, FinishReason, MAX_STRING_BYTES, Slot};

/// `struct tracer_request_begin`.
#[repr(C)]
pub struct RequestBegin {
    pub request: u64,
    pub received_ns: u64,
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub trace_flags: u32,
    pub prompt_tokens: u32,
    pub request_id: *const c_char,
    pub tenant_id: *const c_char,
    pub model: *const c_char,
    pub model_version: *const c_char,
    pub engine_hash: *const c_char,
    pub adapters: *const c_char,
    pub kv_cache_strategy: *const c_char,
}

/// As much of a C string as a mark can hold. On the stack: marks may be made where memory cannot be allocated.
struct Text {
    bytes: [u8; MAX_STRING_BYTES],
    len: usize,
}

impl Text {
    /// The string at `s`, invalid bytes replaced; empty when null. Reads no further than a mark can hold.
    ///
    /// # Safety
    /// `s` is null, or points to a string that ends with NUL.
    unsafe fn new(s: *const c_char) -> Self {
        // Three bytes more than fit: a character that is cut here begins where nothing fits any more.
        let mut raw = [0; MAX_STRING_BYTES + 3];
        let mut len = 0;
        while !s.is_null() && len < raw.len() {
            // SAFETY: not null, and no byte before this one was the string's end.
            let byte = unsafe { s.add(len).read() } as u8;
            if byte == 0 {
                break;
            }
            raw[len] = byte;
            len += 1;
        }
        let mut text = Self { bytes: [0; MAX_STRING_BYTES], len: 0 };
        for chunk in raw[..len].utf8_chunks() {
            let replacement = if chunk.invalid().is_empty() { "" } else { "\u{fffd}" };
            if !text.push(chunk.valid()) || !text.push(replacement) {
                break;
            }
        }
        text
    }

    /// Appends whole characters; false when not all of them fitted.
    fn push(&mut self, s: &str) -> bool {
        let fits = s.floor_char_boundary(MAX_STRING_BYTES - self.len);
        self.bytes[self.len..self.len + fits].copy_from_slice(&s.as_bytes()[..fits]);
        self.len += fits;
        fits == s.len()
    }

    fn as_str(&self) -> &str {
        // Only whole characters were appended.
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn tracer_mark_listening() -> c_int {
    marks::listening().into()
}

/// # Safety
/// `begin` is null or points to a `struct tracer_request_begin` whose strings are null or end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_request_begin(begin: *const RequestBegin) {
    if !marks::listening() {
        return;
    }
    if !begin.is_aligned() {
        return;
    }
    // SAFETY: null, or aligned, and valid by the caller's promise.
    let Some(begin) = (unsafe { begin.as_ref() }) else { return };
    let strings = [
        begin.request_id,
        begin.tenant_id,
        begin.model,
        begin.model_version,
        begin.engine_hash,
        begin.adapters,
        begin.kv_cache_strategy,
    ];
    // SAFETY: null, or strings by the caller's promise.
    let strings = strings.map(|s| unsafe { Text::new(s) });
    let [request_id, tenant_id, model, model_version, engine_hash, adapters, kv_cache_strategy] =
        strings.each_ref().map(Text::as_str);
    marks::request_begin(&marks::RequestBegin {
        request: begin.request,
        received_ns: (begin.received_ns != 0).then_some(begin.received_ns),
        trace_id: begin.trace_id,
        span_id: begin.span_id,
        trace_flags: begin.trace_flags,
        prompt_tokens: begin.prompt_tokens,
        request_id,
        tenant_id,
        model,
        model_version,
        engine_hash,
        adapters,
        kv_cache_strategy,
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn tracer_mark_request_end(request: u64, output_tokens: u32, finish_reason: u32) {
    let reason = match finish_reason {
        1 => FinishReason::Stop,
        2 => FinishReason::Length,
        3 => FinishReason::Cancelled,
        4 => FinishReason::Error,
        _ => FinishReason::Unknown,
    };
    marks::request_end(request, output_tokens, reason);
}

/// # Safety
/// `slots` is null or points to `slot_count` slots.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_batch(batch_id: u64, rank: u32, slots: *const Slot, slot_count: usize) {
    if !marks::listening() {
        return;
    }
    let slots =
        if slots.is_null() || !slots.is_aligned() || slot_count > isize::MAX as usize / size_of::<Slot>() {
            &[]
        } else {
            // SAFETY: not null, aligned, of a possible size, and valid by the caller's promise.
            unsafe { std::slice::from_raw_parts(slots, slot_count) }
        };
    marks::batch(batch_id, rank, slots);
}

#[unsafe(no_mangle)]
pub extern "C" fn tracer_mark_token(request: u64, choice: u32, index: u32) {
    marks::token(request, choice, index);
}

/// # Safety
/// `name` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_phase_begin(request: u64, name: *const c_char) {
    if marks::listening() {
        // SAFETY: null, or a string by the caller's promise.
        marks::phase_begin(request, unsafe { Text::new(name) }.as_str());
    }
}

/// # Safety
/// `name` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_phase_end(request: u64, name: *const c_char) {
    if marks::listening() {
        // SAFETY: null, or a string by the caller's promise.
        marks::phase_end(request, unsafe { Text::new(name) }.as_str());
    }
}

/// # Safety
/// `key` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_attr_number(request: u64, choice: u32, key: *const c_char, value: f64) {
    if marks::listening() {
        // SAFETY: null, or a string by the caller's promise.
        marks::attr(request, choice, unsafe { Text::new(key) }.as_str(), AttrValue::Number(value));
    }
}

/// # Safety
/// `key` and `value` are null or end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_attr_string(
    request: u64,
    choice: u32,
    key: *const c_char,
    value: *const c_char,
) {
    if marks::listening() {
        // SAFETY: null, or strings by the caller's promise.
        let (key, value) = unsafe { (Text::new(key), Text::new(value)) };
        marks::attr(request, choice, key.as_str(), AttrValue::String(value.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As the standard library replaces invalid bytes, cut where no further character fits.
        #[test]
        fn any_bytes_become_whole_characters(bytes in prop::collection::vec(1u8.., 0..400)) {
            let string = CString::new(bytes.clone()).unwrap();
            // SAFETY: a string.
            let text = unsafe { Text::new(string.as_ptr()) };
            let whole = String::from_utf8_lossy(&bytes);
            prop_assert!(whole.starts_with(text.as_str()));
            let rest = whole[text.len..].chars().next();
            prop_assert!(rest.is_none_or(|c| text.len + c.len_utf8() > MAX_STRING_BYTES));
        }
    }

    #[test]
    fn null_is_empty_and_long_strings_are_not_read_to_their_end() {
        // SAFETY: null is allowed.
        assert_eq!(unsafe { Text::new(std::ptr::null()) }.as_str(), "");
        // No NUL: reading further would be seen by a sanitizer.
        let long = [b'x' as c_char; MAX_STRING_BYTES + 3];
        // SAFETY: no more is read than there is.
        assert_eq!(unsafe { Text::new(long.as_ptr()) }.as_str().len(), MAX_STRING_BYTES);
    }
}

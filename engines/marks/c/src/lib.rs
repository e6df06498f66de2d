//! The C ABI of marks: `include/tracer_marks.h` documents it.
//!
//! A library of its own, so that Rust programs and libraries that use marks do not export these symbols.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int};

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
}

/// The string at `s`, or as much of it as a mark can hold; empty when null.
///
/// # Safety
/// `s` is null, or points to a string that ends with NUL and lives for `'a`.
unsafe fn text<'a>(s: *const c_char) -> Cow<'a, str> {
    if s.is_null() {
        return Cow::Borrowed("");
    }
    // SAFETY: not null, and a string by the caller's promise.
    let bytes = unsafe { CStr::from_ptr(s) }.to_bytes();
    // Three bytes more than fit: a character that is cut here begins where nothing fits any more.
    String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_STRING_BYTES + 3)])
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
    // SAFETY: null, or valid by the caller's promise.
    let Some(begin) = (unsafe { begin.as_ref() }) else { return };
    // SAFETY: null, or strings by the caller's promise.
    let (request_id, tenant_id, model) =
        unsafe { (text(begin.request_id), text(begin.tenant_id), text(begin.model)) };
    marks::request_begin(&marks::RequestBegin {
        request: begin.request,
        received_ns: (begin.received_ns != 0).then_some(begin.received_ns),
        trace_id: begin.trace_id,
        span_id: begin.span_id,
        trace_flags: begin.trace_flags,
        prompt_tokens: begin.prompt_tokens,
        request_id: &request_id,
        tenant_id: &tenant_id,
        model: &model,
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
        marks::phase(request, &unsafe { text(name) }, true);
    }
}

/// # Safety
/// `name` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_phase_end(request: u64, name: *const c_char) {
    if marks::listening() {
        // SAFETY: null, or a string by the caller's promise.
        marks::phase(request, &unsafe { text(name) }, false);
    }
}

/// # Safety
/// `key` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tracer_mark_attr_number(request: u64, choice: u32, key: *const c_char, value: f64) {
    if marks::listening() {
        // SAFETY: null, or a string by the caller's promise.
        marks::attr(request, choice, &unsafe { text(key) }, AttrValue::Number(value));
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
        let (key, value) = unsafe { (text(key), text(value)) };
        marks::attr(request, choice, &key, AttrValue::String(&value));
    }
}

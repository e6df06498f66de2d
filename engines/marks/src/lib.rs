//! Marks: how a program tells the tracer what a request is.
//!
//! In: calls from the program. Out: a payload of [`tracer_abi::mark`], shown to whoever probes the site `tracer:mark`.
//! While nobody does, every function here returns after reading one byte (about 1 ns). Nothing here blocks, allocates,
//! takes a lock, makes a system call or fails: marks may be made anywhere, also in signal handlers and after `fork`.
//! Strings longer than [`MAX_STRING_BYTES`] are cut at a character boundary, batches of more than [`MAX_SLOTS`] are
//! split. `docs/marks.md` says what each field is for.
//!
//! ```
//! use tracer_marks as marks;
//!
//! let request = 7;
//! marks::request_begin(&marks::RequestBegin { request, request_id: "req-7", prompt_tokens: 12, ..Default::default() });
//! let slot = marks::Slot { request, tokens: 12, phase: marks::PREFILL, ..Default::default() };
//! marks::batch(1, 0, &[slot]);
//! // … the engine's step …
//! marks::token(request, 0, 0);
//! marks::request_end(request, 1, marks::FinishReason::Stop);
//! ```

#[macro_use]
mod note;
mod payload;
mod site;
#[cfg(target_os = "linux")]
mod step;

#[cfg(target_os = "linux")]
pub use step::{GpuStep, gpu_step};
pub use tracer_abi::mark::{DECODE, MAX_SLOTS, MAX_STRING_BYTES, PREFILL, REQUEST_KEYS, SLOT_NO_TOKEN, Slot};

use payload::{Payload, clip, header};
use tracer_abi::mark::{self as abi, MarkKind};

/// Bytes of a payload whose tail is at most `strings` strings.
const fn with_strings<Fixed>(strings: usize) -> usize {
    size_of::<Fixed>() + strings * MAX_STRING_BYTES
}

/// Whether a tracer listens to marks now. Costs about 1 ns; worth asking before gathering what a mark would say.
#[inline(always)]
#[must_use]
pub fn listening() -> bool {
    site::listening()
}

/// What is known of a request when it is taken in. Unknown: empty, zero or `None`; what becomes known later is told by
/// [`attr`], with the field's name as key ([`REQUEST_KEYS`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestBegin<'a> {
    /// The program's own number for the request, unique in the process while the request lives.
    pub request: u64,
    /// CLOCK_MONOTONIC ns at which the program received the request; `None`: now.
    pub received_ns: Option<u64>,
    /// W3C trace context.
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub trace_flags: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The id that the client or the program uses outside, for instance `X-Request-ID`.
    pub request_id: &'a str,
    pub tenant_id: &'a str,
    pub model: &'a str,
    pub model_version: &'a str,
    /// Digest of the engine file (hexadecimal).
    pub engine_hash: &'a str,
    /// Names of the adapters (LoRA), separated by commas.
    pub adapters: &'a str,
    /// How the request's KV cache is kept, in the program's own words (`paged`, `prefix`, `offloaded`, …).
    pub kv_cache_strategy: &'a str,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum FinishReason {
    #[default]
    Unknown = abi::FINISH_UNKNOWN,
    Stop = abi::FINISH_STOP,
    Length = abi::FINISH_LENGTH,
    /// The client went away or cancelled.
    Cancelled = abi::FINISH_CANCELLED,
    Error = abi::FINISH_ERROR,
}

/// Value of an attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttrValue<'a> {
    Number(f64),
    String(&'a str),
}

/// The program took a request in.
#[inline]
pub fn request_begin(begin: &RequestBegin<'_>) {
    if listening() {
        cold::request_begin(begin);
    }
}

/// The program is done with a request; `output_tokens` counts the tokens of all choices.
#[inline]
pub fn request_end(request: u64, output_tokens: u32, finish_reason: FinishReason) {
    if listening() {
        cold::request_end(request, output_tokens, finish_reason);
    }
}

/// The next step of this thread serves these requests.
///
/// `batch_id` numbers the iteration, unique in the process: the steps of several ranks of one iteration share it.
#[inline]
pub fn batch(batch_id: u64, rank: u32, slots: &[Slot]) {
    if listening() {
        cold::batch(batch_id, rank, slots);
    }
}

/// The program hands token `index` (from 0) of a choice to its client.
#[inline]
pub fn token(request: u64, choice: u32, index: u32) {
    if listening() {
        cold::token(request, choice, index);
    }
}

/// A named part of a request's life begins.
#[inline]
pub fn phase_begin(request: u64, name: &str) {
    if listening() {
        cold::phase(request, name, true);
    }
}

/// A named part of a request's life ends.
#[inline]
pub fn phase_end(request: u64, name: &str) {
    if listening() {
        cold::phase(request, name, false);
    }
}

/// A fact about one choice of a request.
#[inline]
pub fn attr(request: u64, choice: u32, key: &str, value: AttrValue<'_>) {
    if listening() {
        cold::attr(request, choice, key, value);
    }
}

/// A payload that the caller built as [`tracer_abi::mark`] says; longer ones than [`abi::MAX_BYTES`] are dropped.
#[inline]
pub fn emit(payload: &[u8]) {
    if listening() {
        cold::emit(payload);
    }
}

/// What happens when somebody listens. Out of line, so that the frames of callers stay small while nobody does.
mod cold {
    use super::*;

    #[cold]
    #[inline(never)]
    pub(super) fn request_begin(begin: &RequestBegin<'_>) {
        request_begin_payload(begin, site::hit);
    }

    pub(super) fn request_begin_payload(begin: &RequestBegin<'_>, emit: impl FnOnce(&[u8])) {
        let strings = [
            begin.request_id,
            begin.tenant_id,
            begin.model,
            begin.model_version,
            begin.engine_hash,
            begin.adapters,
            begin.kv_cache_strategy,
        ]
        .map(clip);
        let mut payload = Payload::<{ with_strings::<abi::RequestBegin>(7) }>::new(&abi::RequestBegin {
            header: header::<abi::RequestBegin>(MarkKind::RequestBegin),
            request: begin.request,
            received_ns: begin.received_ns.unwrap_or(0),
            trace_id: begin.trace_id,
            span_id: begin.span_id,
            trace_flags: begin.trace_flags,
            prompt_tokens: begin.prompt_tokens,
            request_id_bytes: strings[0].len() as u16,
            tenant_id_bytes: strings[1].len() as u16,
            model_bytes: strings[2].len() as u16,
            model_version_bytes: strings[3].len() as u16,
            engine_hash_bytes: strings[4].len() as u16,
            adapters_bytes: strings[5].len() as u16,
            kv_cache_strategy_bytes: strings[6].len() as u16,
            _pad: 0,
        });
        strings.iter().for_each(|s| payload.push(s.as_bytes()));
        emit(payload.finish());
    }

    #[cold]
    #[inline(never)]
    pub(super) fn request_end(request: u64, output_tokens: u32, finish_reason: FinishReason) {
        site::hit(bytemuck::bytes_of(&abi::RequestEnd {
            header: header::<abi::RequestEnd>(MarkKind::RequestEnd),
            request,
            output_tokens,
            finish_reason: finish_reason as u32,
        }));
    }

    #[cold]
    #[inline(never)]
    pub(super) fn batch(batch_id: u64, rank: u32, slots: &[Slot]) {
        batch_payloads(batch_id, rank, slots, site::hit);
    }

    pub(super) fn batch_payloads(batch_id: u64, rank: u32, slots: &[Slot], mut emit: impl FnMut(&[u8])) {
        let mut part = |first: usize, slots_here: &[Slot]| {
            const BYTES: usize = size_of::<abi::Batch>() + MAX_SLOTS * size_of::<Slot>();
            let mut payload = Payload::<BYTES>::new(&abi::Batch {
                header: header::<abi::Batch>(MarkKind::Batch),
                batch_id,
                rank,
                slot_count: slots.len() as u32,
                first_slot: first as u32,
                slots: slots_here.len() as u32,
            });
            payload.push(bytemuck::cast_slice(slots_here));
            emit(payload.finish());
        };
        if slots.is_empty() {
            part(0, &[]);
        }
        for (i, chunk) in slots.chunks(MAX_SLOTS).enumerate() {
            part(i * MAX_SLOTS, chunk);
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn token(request: u64, choice: u32, index: u32) {
        let header = header::<abi::Token>(MarkKind::Token);
        site::hit(bytemuck::bytes_of(&abi::Token { header, request, choice, index }));
    }

    #[cold]
    #[inline(never)]
    pub(super) fn phase(request: u64, name: &str, begins: bool) {
        phase_payload(request, name, begins, site::hit);
    }

    pub(super) fn phase_payload(request: u64, name: &str, begins: bool, emit: impl FnOnce(&[u8])) {
        let name = clip(name);
        let mut payload = Payload::<{ with_strings::<abi::Phase>(1) }>::new(&abi::Phase {
            header: header::<abi::Phase>(MarkKind::Phase),
            request,
            action: if begins { abi::PHASE_BEGIN } else { abi::PHASE_END },
            name_bytes: name.len() as u16,
            _pad: 0,
        });
        payload.push(name.as_bytes());
        emit(payload.finish());
    }

    #[cold]
    #[inline(never)]
    pub(super) fn attr(request: u64, choice: u32, key: &str, value: AttrValue<'_>) {
        attr_payload(request, choice, key, value, site::hit);
    }

    pub(super) fn attr_payload(
        request: u64,
        choice: u32,
        key: &str,
        value: AttrValue<'_>,
        emit: impl FnOnce(&[u8]),
    ) {
        let key = clip(key);
        let (value_kind, number, string) = match value {
            AttrValue::Number(number) => (abi::ATTR_NUMBER, number, ""),
            AttrValue::String(string) => (abi::ATTR_STRING, 0.0, clip(string)),
        };
        let mut payload = Payload::<{ with_strings::<abi::Attr>(2) }>::new(&abi::Attr {
            header: header::<abi::Attr>(MarkKind::Attr),
            request,
            number,
            choice,
            value_kind,
            key_bytes: key.len() as u16,
            value_bytes: string.len() as u16,
            _pad: [0; 3],
        });
        payload.push(key.as_bytes());
        payload.push(string.as_bytes());
        emit(payload.finish());
    }

    #[cold]
    #[inline(never)]
    pub(super) fn emit(payload: &[u8]) {
        // The caller's bytes may lie in a page that is not mapped yet, or not any more: the kernel would skip them.
        let mut copy = [0; abi::MAX_BYTES];
        if let Some(copy) = copy.get_mut(..payload.len()) {
            copy.copy_from_slice(payload);
            site::hit(copy);
        }
    }
}

#[cfg(test)]
mod tests;

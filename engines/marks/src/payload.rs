//! Payloads, built on the stack: a fixed part, then a tail.

use bytemuck::{Pod, bytes_of};
use tracer_abi::mark::{MAX_STRING_BYTES, MarkHeader, MarkKind, VERSION};

/// A payload of at most `N` bytes.
///
/// Zeroed, hence written: the kernel reads it without faulting pages in.
pub(crate) struct Payload<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Payload<N> {
    /// Begins with the fixed part of a kind; its header's `size` is set by [`Self::finish`].
    pub(crate) fn new(fixed: &impl Pod) -> Self {
        let mut payload = Self { bytes: [0; N], len: 0 };
        payload.push(bytes_of(fixed));
        payload
    }

    /// Appends to the tail; what does not fit is left out.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let n = bytes.len().min(N - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&bytes[..n]);
        self.len += n;
    }

    /// The payload's bytes, with their number in the header.
    pub(crate) fn finish(&mut self) -> &[u8] {
        const SIZE: usize = core::mem::offset_of!(MarkHeader, size);
        self.bytes[SIZE..SIZE + 4].copy_from_slice(&(self.len as u32).to_ne_bytes());
        &self.bytes[..self.len]
    }
}

/// Header of a payload of this kind; `size` is what the fixed part alone would have.
pub(crate) const fn header<Fixed>(kind: MarkKind) -> MarkHeader {
    MarkHeader { version: VERSION, kind: kind as u16, size: size_of::<Fixed>() as u32 }
}

/// The longest prefix of `s` of at most [`MAX_STRING_BYTES`] bytes that ends at a character boundary.
pub(crate) fn clip(s: &str) -> &str {
    if s.len() <= MAX_STRING_BYTES {
        return s;
    }
    &s[..s.floor_char_boundary(MAX_STRING_BYTES)]
}

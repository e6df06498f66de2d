//! `call_stack`: where calls and marks come from.
//!
//! A thread makes the same call from the same place over and over. So its stack is a record of its own, made when the
//! place is new to the thread or was last walked [`REFRESH_NS`] ago; calls and marks carry the key that names it.

use bytemuck::{Pod, Zeroable};

use crate::{
    Header,
    stack::{STACK_WORDS, StackHead},
};

/// A place is walked anew after so many ns of CLOCK_MONOTONIC: tables may have come since, or a caller far up changed.
pub const REFRESH_NS: u64 = 1_000_000_000;

/// A stack, for the calls and marks of its thread with the same key from this record on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct CallStack {
    pub header: Header,
    /// Of the place: made of the probe point, the stack pointer and the return address; never [`NO_STACK`].
    pub key: u32,
    pub _pad: u32,
    pub head: StackHead,
    /// Only as many words as `head` says are in the record.
    pub stack: [u64; STACK_WORDS],
}

/// The key of a call whose stack is not taken.
pub const NO_STACK: u32 = 0;

/// Bytes before the stack.
pub const FIXED_BYTES: usize = 56;

const _: () = assert!(size_of::<CallStack>() == FIXED_BYTES + 8 * STACK_WORDS);

//! `sample`: a target thread was on the CPU when the sampling clock fired.

use bytemuck::{Pod, Zeroable};

use crate::{
    Header,
    stack::{STACK_WORDS, StackHead},
};

/// The thread was in kernel mode.
pub const KERNEL_MODE: u16 = 1;

/// On-CPU sample.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Sample {
    pub header: Header,
    /// CPU time that this sample stands for, in ns.
    pub period_ns: u64,
    pub head: StackHead,
    /// Only as many words as `head` says are in the record.
    pub stack: [u64; STACK_WORDS],
}

/// Bytes before the stack.
pub const FIXED_BYTES: usize = 56;

const _: () = assert!(size_of::<Sample>() == FIXED_BYTES + 8 * STACK_WORDS);

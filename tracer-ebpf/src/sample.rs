//! `sample`: a target thread was on the CPU when the sampling clock fired.

use bytemuck::{Pod, Zeroable};

use crate::{Header, MAX_FRAMES};

/// The thread was in kernel mode.
pub const KERNEL_MODE: u16 = 1;

/// On-CPU sample.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Sample {
    pub header: Header,
    /// CPU time that this sample stands for, in ns.
    pub period_ns: u64,
    /// Frames at the beginning of `stack` that are kernel addresses.
    pub kernel_frames: u16,
    /// Frames after those that are user addresses.
    pub user_frames: u16,
    pub _pad: u32,
    /// Leaf first; only `kernel_frames + user_frames` entries are in the record.
    pub stack: [u64; MAX_FRAMES],
}

/// Bytes before the stack.
pub const FIXED_BYTES: usize = 56;

const _: () = assert!(size_of::<Sample>() == FIXED_BYTES + 8 * MAX_FRAMES);

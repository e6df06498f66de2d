//! `call`: one call of a probe point, entry and return paired in the kernel per thread.

use bytemuck::{Pod, Zeroable};

use crate::Header;

/// The function returned: `end_ns` and `ret` are valid.
pub const RETURNED: u16 = 1;
/// The point has no return probe: `end_ns` and `ret` are 0.
pub const ENTRY_ONLY: u16 = 2;
/// The frame was gone without a return (longjmp, exception): `end_ns` is when that was noticed.
pub const UNWOUND: u16 = 4;
/// Still open when the thread exited (`end_ns` is then that time).
pub const EXITED: u16 = 16;

/// Deepest nesting of probed calls per thread; a deeper call is counted and not recorded.
pub const MAX_DEPTH: u32 = 16;
/// `parent_point` of a call that no other probed call encloses.
pub const NO_PARENT: u32 = u32::MAX;

/// A finished (or abandoned) call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Call {
    pub header: Header,
    /// Probe point, as numbered by the capture's `points` table.
    pub point: u32,
    /// The probed call that encloses this one on the same thread, or [`NO_PARENT`].
    pub parent_point: u32,
    /// Number of probed calls that enclose this one.
    pub depth: u32,
    /// [`crate::CallStack::key`] of where it comes from, or [`crate::call_stack::NO_STACK`].
    pub stack: u32,
    /// CLOCK_MONOTONIC ns at entry.
    pub begin_ns: u64,
    /// CLOCK_MONOTONIC ns at return; see the flags.
    pub end_ns: u64,
    /// Stack pointer at entry.
    pub sp: u64,
    /// First six integer arguments (System V order: rdi, rsi, rdx, rcx, r8, r9).
    pub args: [u64; 6],
    /// Integer return value (rax).
    pub ret: u64,
}

/// A call that has begun and not returned.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct OpenCall {
    pub begin_ns: u64,
    pub sp: u64,
    pub args: [u64; 6],
    pub point: u32,
    pub parent_point: u32,
    /// See [`Call::stack`].
    pub stack: u32,
    pub _pad: u32,
}

/// The open calls of one thread: value of the map [`crate::maps::OPEN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ThreadCalls {
    /// See [`crate::Target::start_ticks`].
    pub start_ticks: u64,
    pub tgid: u32,
    /// How many of `calls` are open.
    pub depth: u32,
    /// Outermost first.
    pub calls: [OpenCall; MAX_DEPTH as usize],
}

const _: () = assert!(size_of::<Call>() == 136);
const _: () = assert!(size_of::<ThreadCalls>() == 1296);

/// In an attach cookie: the call's stack is wanted.
pub const WITH_STACK: u64 = 1 << 33;

/// Attach cookie of a call probe: the point id, and in bit 32 whether a return probe is attached too.
#[must_use]
pub const fn cookie(point: u32, has_return: bool) -> u64 {
    point as u64 | ((has_return as u64) << 32)
}

/// Inverse of [`cookie`]: (point, has_return).
#[must_use]
pub const fn from_cookie(cookie: u64) -> (u32, bool) {
    (cookie as u32, cookie >> 32 & 1 == 1)
}

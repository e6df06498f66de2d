//! `sched`: one interval in which a target thread was off the CPU, from switch-out to switch-in.

use bytemuck::{Pod, Zeroable};

use crate::{
    Header,
    stack::{STACK_WORDS, StackHead},
};

/// The thread was preempted: it stayed runnable, so the whole interval is run-queue wait.
pub const PREEMPTED: u16 = 1;
/// Still off the CPU when the recording stopped; `header.time_ns` is that time. Written by user space.
pub const OPEN: u16 = 2;

/// Off-CPU interval. `header.time_ns` is the switch-in, `header.cpu` the CPU that switched it in.
///
/// Run-queue wait is `time_ns - wake_ns` when woken, the whole interval when preempted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Sched {
    pub header: Header,
    /// CLOCK_MONOTONIC ns of the switch-out.
    pub off_ns: u64,
    /// CLOCK_MONOTONIC ns at which another thread (or an interrupt) woke it; 0 when preempted.
    pub wake_ns: u64,
    /// Thread that ran when the wake-up happened (an interrupt borrows the thread that it interrupted).
    pub waker_tgid: u32,
    pub waker_tid: u32,
    /// Task state at switch-out (`TASK_INTERRUPTIBLE` 1, `TASK_UNINTERRUPTIBLE` 2, …).
    pub prev_state: u32,
    /// Number of the system call that it was in at switch-out; negative: in none (of a preempted thread: by an
    /// interrupt).
    pub syscall: i32,
    /// Where it blocked.
    pub head: StackHead,
    /// Only as many words as `head` says are in the record.
    pub stack: [u64; STACK_WORDS],
}

/// Bytes before the stack.
pub const FIXED_BYTES: usize = 80;

const _: () = assert!(size_of::<Sched>() == FIXED_BYTES + 8 * STACK_WORDS);

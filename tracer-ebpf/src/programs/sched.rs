//! `sched`: off-CPU intervals of target threads, with where they blocked and who woke them.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext, Global,
    helpers::bpf_get_current_pid_tgid,
    macros::{btf_tracepoint, map},
    maps::{Array, HashMap},
    programs::BtfTracePointContext,
};
use tracer_abi::{
    Counter, Kind, MAX_THREADS, Sched, Target,
    sched::{FIXED_BYTES, PREEMPTED},
    stack::StackHead,
};

use super::{
    common::{OFFSETS, Ring, TARGETS, count, entry, header, now_ns, output, read_kernel},
    repeat::{self, Place},
    unwind::{self, copy_stack, record_bytes},
};

/// The interval that a thread is in, or `off_ns` = 0 while it runs. An entry lives as long as its thread.
#[map]
static SLEEPERS: HashMap<u32, Sched> = HashMap::with_max_entries(MAX_THREADS, 0);
/// A zeroed value to begin an entry with: a `Sched` is too big for the stack.
#[map]
static ZERO: Array<Sched> = Array::with_max_entries(1, 0);

#[unsafe(no_mangle)]
static MIN_OFF_CPU_NS: Global<u64> = Global::new(0);

#[btf_tracepoint(function = "sched_switch")]
fn sched_switch(ctx: BtfTracePointContext) -> i32 {
    let now = now_ns();
    switched_out(&ctx, now);
    let next: u64 = ctx.arg(2);
    switched_in(read_kernel(next + u64::from(OFFSETS.load().task_pid)), now);
    0
}

#[btf_tracepoint(function = "sched_waking")]
fn sched_waking(ctx: BtfTracePointContext) -> i32 {
    let task: u64 = ctx.arg(0);
    let tid: u32 = read_kernel(task + u64::from(OFFSETS.load().task_pid));
    let Some(sleeper) = SLEEPERS.get_ptr_mut(tid) else { return 0 };
    // SAFETY: a valid map value. Other CPUs access the same aligned words, which are read and written whole; the first
    // waker wins, and the switch-in of this wake-up reads what it wrote.
    unsafe {
        if (&raw const (*sleeper).off_ns).read_volatile() == 0
            || (&raw const (*sleeper).wake_ns).read_volatile() != 0
        {
            return 0;
        }
        let waker = bpf_get_current_pid_tgid();
        (*sleeper).waker_tgid = (waker >> 32) as u32;
        (*sleeper).waker_tid = waker as u32;
        (&raw mut (*sleeper).wake_ns).write_volatile(now_ns());
    }
    0
}

/// The current thread leaves the CPU.
#[inline(always)]
fn switched_out(ctx: &BtfTracePointContext, now: u64) {
    let id = bpf_get_current_pid_tgid();
    let (tgid, tid) = ((id >> 32) as u32, id as u32);
    // SAFETY: the value is copied at once.
    let Some(target) = (unsafe { TARGETS.get(tgid) }) else { return };
    let target = *target;
    let Some(sleeper) = entry(&SLEEPERS, tid, &ZERO) else {
        count(Counter::SleepersFull);
        return;
    };
    let preempt: u64 = ctx.arg(0);
    let prev: u64 = ctx.arg(1);
    let offsets = OFFSETS.load();
    let state: u32 = if offsets.switch_has_state != 0 {
        let state: u64 = ctx.arg(3);
        state as u32
    } else {
        read_kernel(prev + u64::from(offsets.task_state))
    };
    let preempted = preempt & 0xff != 0 || state == 0;
    let place = Place::current(tid, preempted);
    // SAFETY: a valid map value that only this thread's switches write, apart from the wake fields, which are
    // ignored by wakers while `off_ns` is 0. Its stack has room for one.
    unsafe {
        let to = (&raw mut (*sleeper).stack).cast();
        (*sleeper).head = match repeat::stack(ctx.as_ptr(), &place, (&target, tgid), to) {
            Some(head) => head,
            None => walked(ctx, (&target, tgid, tid), &place, to),
        };
        (*sleeper).header =
            header(Kind::Sched, if preempted { PREEMPTED } else { 0 }, FIXED_BYTES, now, &target, tgid, tid);
        (*sleeper).wake_ns = 0;
        (*sleeper).waker_tgid = 0;
        (*sleeper).waker_tid = 0;
        (*sleeper).prev_state = state;
        (*sleeper).syscall = place.syscall();
        (&raw mut (*sleeper).off_ns).write_volatile(now);
    }
}

/// Walks the stack of the current thread, and remembers it. Where in the kernel a thread was preempted tells nothing, and is
/// not looked for.
///
/// # Safety
/// `to` has room for a stack.
#[inline(always)]
unsafe fn walked(
    ctx: &BtfTracePointContext,
    thread: (&Target, u32, u32),
    place: &Place,
    to: *mut c_void,
) -> StackHead {
    // SAFETY: this program's context and walk; the room is there by the caller's promise.
    unsafe {
        let Some(walk) = unwind::walk(ctx.as_ptr(), unwind::SCHED, !place.is_preempted(), thread) else {
            return StackHead::default();
        };
        repeat::remember(walk, place);
        copy_stack(walk, to)
    }
}

/// Thread `tid` gets the CPU.
#[inline(always)]
fn switched_in(tid: u32, now: u64) {
    let Some(sleeper) = SLEEPERS.get_ptr_mut(tid) else { return };
    // SAFETY: a valid map value; a thread is switched in by one CPU at a time.
    let sleeper = unsafe { &mut *sleeper };
    let off = sleeper.off_ns;
    if off == 0 {
        return;
    }
    sleeper.off_ns = 0;
    if now.wrapping_sub(off) < MIN_OFF_CPU_NS.load() {
        return;
    }
    let size = record_bytes(FIXED_BYTES, &sleeper.head);
    let target = Target { start_ticks: sleeper.header.start_ticks, flags: 0, epoch: 0 };
    sleeper.header = header(
        Kind::Sched,
        sleeper.header.flags,
        size as usize,
        now,
        &target,
        sleeper.header.tgid,
        sleeper.header.tid,
    );
    sleeper.off_ns = off;
    // SAFETY: `size` is at most the size of a `Sched`.
    unsafe { output(Ring::Bulk, core::ptr::from_ref(sleeper).cast(), size) };
    sleeper.off_ns = 0;
}

/// A thread ends.
#[inline(always)]
pub(crate) fn thread_exits(tid: u32) {
    let _gone = SLEEPERS.remove(tid);
    repeat::thread_exits(tid);
}

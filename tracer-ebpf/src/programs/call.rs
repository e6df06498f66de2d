//! `call`: one pair of programs serves every probe point; the attach cookie says which.
//!
//! The open calls of a thread are one map entry, found once on entry and once on return: most of what a probe costs
//! here is map look-ups. The entry lives as long as its thread, and only that thread changes it.

use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_F_NO_PREALLOC, BPF_RB_NO_WAKEUP},
    helpers::{bpf_get_current_pid_tgid, generated::bpf_get_attach_cookie},
    macros::{map, uprobe, uretprobe},
    maps::{Array, HashMap},
    programs::{ProbeContext, RetProbeContext},
};
use aya_log_ebpf::debug;
use tracer_abi::{
    Call, Counter, Kind, MAX_THREADS, Target,
    call::{
        self, ENTRY_ONLY, EXITED, MAX_DEPTH, NO_PARENT, OpenCall, RETURNED, ThreadCalls, UNWOUND, WITH_STACK,
    },
    call_stack::NO_STACK,
};

use super::{
    call_stack,
    common::{VITAL, count, count_hit, current_target, header, now_ns},
};

/// User space reads what is left in here when a recording stops. Allocated as threads come: most make no probed call.
#[map]
static OPEN: HashMap<u32, ThreadCalls> = HashMap::with_max_entries(MAX_THREADS, BPF_F_NO_PREALLOC);
/// What an entry begins with: it is too big for the stack.
#[map]
static NO_CALLS: Array<ThreadCalls> = Array::with_max_entries(1, 0);

#[uprobe]
fn call_entry(ctx: ProbeContext) -> u32 {
    entry(&ctx);
    0
}

#[uretprobe]
fn call_return(ctx: RetProbeContext) -> u32 {
    exit(&ctx);
    0
}

#[inline(always)]
fn entry(ctx: &ProbeContext) {
    let now = now_ns();
    let tid = bpf_get_current_pid_tgid() as u32;
    let Some(thread) = thread_of(tid) else { return };
    // SAFETY: `ctx` is this program's context.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let (point, has_return) = call::from_cookie(cookie);
    count_hit(point);
    // SAFETY: the context of a uprobe is the user's registers.
    let regs = unsafe { &*ctx.regs };
    let sp = regs.rsp;
    close_stale(thread, tid, sp, now);
    let depth = thread.depth;
    let parent_point = if depth == 0 { NO_PARENT } else { slot(thread, depth - 1).point };
    let args = [regs.rdi, regs.rsi, regs.rdx, regs.rcx, regs.r8, regs.r9];
    let stack =
        if cookie & WITH_STACK == 0 { NO_STACK } else { call_stack::key_of_call(point, sp, tid, now) };
    let open = OpenCall { begin_ns: now, sp, args, point, parent_point, stack, _pad: 0 };
    if !has_return {
        emit(thread, tid, &open, depth, 0, ENTRY_ONLY, 0);
    } else if depth < MAX_DEPTH {
        *slot(thread, depth) = open;
        thread.depth = depth + 1;
    } else {
        count(Counter::CallTooDeep);
    }
}

#[inline(always)]
fn exit(ctx: &RetProbeContext) {
    let now = now_ns();
    let tid = bpf_get_current_pid_tgid() as u32;
    // SAFETY: `ctx` is this program's context, the user's registers after the return.
    let (cookie, sp, ret) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rsp, (*ctx.regs).rax) };
    let (point, _) = call::from_cookie(cookie);
    // The return has popped the return address, so the entry's sp was 8 less.
    let entry_sp = sp.wrapping_sub(8);
    if let Some(thread) = OPEN.get_ptr_mut(tid) {
        // SAFETY: a valid map value; only this thread changes it.
        let thread = unsafe { &mut *thread };
        let mut step = 0;
        while step < MAX_DEPTH && thread.depth > 0 {
            step += 1;
            let depth = thread.depth - 1;
            let open = *slot(thread, depth);
            if open.sp > entry_sp {
                break;
            }
            thread.depth = depth;
            if open.sp == entry_sp && open.point == point {
                emit(thread, tid, &open, depth, now, RETURNED, ret);
                return;
            }
            count(Counter::CallUnwound);
            emit(thread, tid, &open, depth, now, UNWOUND, 0);
        }
    }
    // Returns of processes that are not recorded are none of our business.
    if current_target().is_none() {
        return;
    }
    count(Counter::ReturnWithoutEntry);
    debug!(ctx, "return of point {} on thread {} without an entry", point, tid);
}

/// The entry of the current thread, made if need be; `None` if its process is no target, or (counted) there are too
/// many threads.
#[inline(always)]
fn thread_of(tid: u32) -> Option<&'static mut ThreadCalls> {
    if let Some(thread) = OPEN.get_ptr_mut(tid) {
        // SAFETY: a valid map value; only this thread changes it.
        return Some(unsafe { &mut *thread });
    }
    let (target, tgid, _) = current_target()?;
    let none = NO_CALLS.get(0)?;
    if OPEN.insert(tid, none, 0).is_err() {
        count(Counter::OpenCallsFull);
        return None;
    }
    // SAFETY: as above.
    let thread = unsafe { &mut *OPEN.get_ptr_mut(tid)? };
    thread.start_ticks = target.start_ticks;
    thread.tgid = tgid;
    Some(thread)
}

#[inline(always)]
fn slot(thread: &mut ThreadCalls, depth: u32) -> &mut OpenCall {
    // The mask is what the verifier sees: `depth` is below MAX_DEPTH, a power of two, anyway.
    let index = super::common::opaque(u64::from(depth)) & u64::from(MAX_DEPTH - 1);
    &mut thread.calls[index as usize]
}

/// Closes the calls of a thread whose frames are gone: a live outer frame lies above the new one.
#[inline(always)]
fn close_stale(thread: &mut ThreadCalls, tid: u32, sp: u64, now: u64) {
    let mut step = 0;
    while step < MAX_DEPTH && thread.depth > 0 {
        step += 1;
        let depth = thread.depth - 1;
        let open = *slot(thread, depth);
        if open.sp > sp {
            return;
        }
        thread.depth = depth;
        count(Counter::CallUnwound);
        emit(thread, tid, &open, depth, now, UNWOUND, 0);
    }
}

/// A thread ends: its open calls end with it.
#[inline(always)]
pub(crate) fn thread_exits(tid: u32) {
    let now = now_ns();
    if let Some(thread) = OPEN.get_ptr_mut(tid) {
        // SAFETY: a valid map value; its thread is the one that ends.
        let thread = unsafe { &mut *thread };
        let mut step = 0;
        while step < MAX_DEPTH && thread.depth > 0 {
            step += 1;
            thread.depth -= 1;
            let depth = thread.depth;
            let open = *slot(thread, depth);
            emit(thread, tid, &open, depth, now, EXITED, 0);
        }
        let _gone = OPEN.remove(tid);
    }
}

#[inline(always)]
fn emit(thread: &ThreadCalls, tid: u32, open: &OpenCall, depth: u32, end_ns: u64, flag: u16, ret: u64) {
    let Some(mut entry) = VITAL.reserve::<Call>(0) else {
        count(Counter::VitalDropped);
        return;
    };
    let target = Target { start_ticks: thread.start_ticks, flags: 0, epoch: 0 };
    let time_ns = if end_ns == 0 { open.begin_ns } else { end_ns };
    entry.write(Call {
        header: header(Kind::Call, flag, size_of::<Call>(), time_ns, &target, thread.tgid, tid),
        point: open.point,
        parent_point: open.parent_point,
        depth,
        stack: open.stack,
        begin_ns: open.begin_ns,
        end_ns,
        sp: open.sp,
        args: open.args,
        ret,
    });
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    count(Counter::VitalWritten);
}

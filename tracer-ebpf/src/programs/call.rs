//! `call`: one pair of programs serves every probe point; the attach cookie says which.

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_RB_NO_WAKEUP,
    helpers::generated::bpf_get_attach_cookie,
    macros::{map, uprobe, uretprobe},
    maps::HashMap,
    programs::{ProbeContext, RetProbeContext},
};
use aya_log_ebpf::debug;
use tracer_abi::{
    Call, Counter, Kind, MAX_THREADS, Target,
    call::{self, ENTRY_ONLY, EXITED, MAX_DEPTH, NO_PARENT, OpenKey, RETURNED, UNWOUND},
};

use super::common::{VITAL, count, count_hit, current_target, header, now_ns};

/// Calls that have begun, by thread and depth. User space reads what is left when a recording stops.
#[map]
static OPEN: HashMap<OpenKey, Call> = HashMap::with_max_entries(4 * MAX_THREADS, 0);
/// Number of open calls of a thread.
#[map]
static DEPTH: HashMap<u32, u32> = HashMap::with_max_entries(MAX_THREADS, 0);

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
    let Some((target, tgid, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context.
    let (point, has_return) = call::from_cookie(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    count_hit(point);
    // SAFETY: the context of a uprobe is the user's registers.
    let regs = unsafe { &*ctx.regs };
    let mut record = Call {
        header: header(Kind::Call, ENTRY_ONLY, size_of::<Call>(), now, &target, tgid, tid),
        point,
        parent_point: NO_PARENT,
        depth: 0,
        _pad: 0,
        begin_ns: now,
        end_ns: 0,
        sp: regs.rsp,
        args: [regs.rdi, regs.rsi, regs.rdx, regs.rcx, regs.r8, regs.r9],
        ret: 0,
    };
    let mut depth = close_stale(tid, record.sp, now);
    if depth > 0
        && let Some(parent) = OPEN.get_ptr(OpenKey { tid, depth: depth - 1 })
    {
        // SAFETY: a valid map value; only this thread changes it.
        record.parent_point = unsafe { (*parent).point };
    }
    record.depth = depth;
    if !has_return {
        emit(&record);
        return;
    }
    if depth >= MAX_DEPTH {
        count(Counter::CallTooDeep);
        return;
    }
    if OPEN.insert(OpenKey { tid, depth }, record, 0).is_err() {
        count(Counter::OpenCallsFull);
        return;
    }
    depth += 1;
    if DEPTH.insert(tid, depth, 0).is_err() {
        count(Counter::OpenCallsFull);
    }
}

#[inline(always)]
fn exit(ctx: &RetProbeContext) {
    let now = now_ns();
    let id = aya_ebpf::helpers::bpf_get_current_pid_tgid();
    let tid = id as u32;
    // SAFETY: `ctx` is this program's context, the user's registers after the return.
    let (cookie, sp, ret) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rsp, (*ctx.regs).rax) };
    let (point, _) = call::from_cookie(cookie);
    // The return has popped the return address, so the entry's sp was 8 less.
    let entry_sp = sp.wrapping_sub(8);
    let mut depth = depth_of(tid);
    let mut step = 0;
    while step < MAX_DEPTH && depth > 0 {
        step += 1;
        let key = OpenKey { tid, depth: depth - 1 };
        let Some(open) = OPEN.get_ptr_mut(key) else { break };
        // SAFETY: a valid map value; only this thread changes it.
        let open = unsafe { &mut *open };
        if open.sp > entry_sp {
            break;
        }
        let matches = open.sp == entry_sp && open.point == point;
        close(open, now, if matches { RETURNED } else { UNWOUND }, ret);
        let _gone = OPEN.remove(key);
        depth -= 1;
        if matches {
            let _kept = DEPTH.insert(tid, depth, 0);
            return;
        }
    }
    let _kept = DEPTH.insert(tid, depth, 0);
    count(Counter::ReturnWithoutEntry);
    debug!(ctx, "return of point {} on thread {} without an entry", point, tid);
}

/// Closes the calls of a thread whose frames are gone: a live outer frame lies above the new one. Returns the depth.
#[inline(always)]
fn close_stale(tid: u32, sp: u64, now: u64) -> u32 {
    let mut depth = depth_of(tid);
    let before = depth;
    let mut step = 0;
    while step < MAX_DEPTH && depth > 0 {
        step += 1;
        let key = OpenKey { tid, depth: depth - 1 };
        if let Some(open) = OPEN.get_ptr_mut(key) {
            // SAFETY: a valid map value; only this thread changes it.
            let open = unsafe { &mut *open };
            if open.sp > sp {
                break;
            }
            close(open, now, UNWOUND, 0);
            let _gone = OPEN.remove(key);
        }
        depth -= 1;
    }
    if depth != before {
        let _kept = DEPTH.insert(tid, depth, 0);
    }
    depth
}

/// A thread ends: its open calls end with it.
#[inline(always)]
pub(crate) fn thread_exits(tid: u32) {
    let now = now_ns();
    let mut depth = depth_of(tid);
    let mut step = 0;
    while step < MAX_DEPTH && depth > 0 {
        step += 1;
        depth -= 1;
        let key = OpenKey { tid, depth };
        if let Some(open) = OPEN.get_ptr_mut(key) {
            // SAFETY: a valid map value; only this thread changes it.
            close(unsafe { &mut *open }, now, EXITED, 0);
            let _gone = OPEN.remove(key);
        }
    }
    let _gone = DEPTH.remove(tid);
}

#[inline(always)]
fn depth_of(tid: u32) -> u32 {
    // SAFETY: the value is copied at once; only this thread changes it.
    unsafe { DEPTH.get(tid) }.copied().unwrap_or(0)
}

#[inline(always)]
fn close(open: &mut Call, now: u64, flag: u16, ret: u64) {
    open.end_ns = now;
    open.ret = ret;
    open.header.flags = flag;
    let target = Target { start_ticks: open.header.start_ticks, flags: 0 };
    open.header =
        header(Kind::Call, flag, size_of::<Call>(), now, &target, open.header.tgid, open.header.tid);
    if flag == UNWOUND {
        count(Counter::CallUnwound);
    }
    emit(open);
}

#[inline(always)]
fn emit(record: &Call) {
    match VITAL.reserve::<Call>(0) {
        Some(mut entry) => {
            entry.write(*record);
            entry.submit(u64::from(BPF_RB_NO_WAKEUP));
            count(Counter::VitalWritten);
        }
        None => count(Counter::VitalDropped),
    }
}

//! `process`: targets fork, execute, exit; children of a followed target become targets before they run.

use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP, helpers::bpf_get_current_pid_tgid, macros::btf_tracepoint,
    programs::BtfTracePointContext,
};
use tracer_abi::{
    Counter, Kind, Process, TARGET_FOLLOW, Target,
    process::{EXEC, EXIT, FORK},
};

use super::{
    call,
    common::{OFFSETS, TARGETS, VITAL, count, current_target, header, now_ns, read_kernel},
    python, sched, unwind,
};

/// USER_HZ is 100 on every architecture that is supported.
const NS_PER_TICK: u64 = 10_000_000;

#[btf_tracepoint(function = "sched_process_fork")]
fn process_fork(ctx: BtfTracePointContext) -> i32 {
    let Some((parent, parent_tgid, parent_tid)) = current_target() else { return 0 };
    let child: u64 = ctx.arg(1);
    let offsets = OFFSETS.load();
    let [tid, tgid]: [u32; 2] = read_kernel(child + u64::from(offsets.task_pid));
    let mut target = parent;
    if tgid != parent_tgid {
        if parent.flags & TARGET_FOLLOW == 0 {
            return 0;
        }
        let start_ns: u64 = read_kernel(child + u64::from(offsets.task_start_boottime));
        target = Target { start_ticks: start_ns / NS_PER_TICK, flags: parent.flags, epoch: parent.epoch };
        if TARGETS.insert(tgid, target, 0).is_err() {
            count(Counter::TargetsFull);
        }
        unwind::process_forks(parent_tgid, tgid);
    }
    emit(FORK, &target, (tgid, tid), (parent_tgid, parent_tid), child);
    0
}

#[btf_tracepoint(function = "sched_process_exec")]
fn process_exec(ctx: BtfTracePointContext) -> i32 {
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    let task: u64 = ctx.arg(0);
    let old_tid: u64 = ctx.arg(1);
    call::thread_exits(old_tid as u32);
    python::thread_exits(old_tid as u32);
    // What was mapped before must not be taken for what is now.
    if let Some(target) = TARGETS.get_ptr_mut(tgid) {
        // SAFETY: a valid map value; a process executes one program at a time.
        unsafe { (&raw mut (*target).epoch).write_volatile((*target).epoch.wrapping_add(1)) };
    }
    unwind::process_ends(tgid);
    emit(EXEC, &target, (tgid, tid), (0, old_tid as u32), task);
    0
}

#[btf_tracepoint(function = "sched_process_exit")]
fn process_exit(ctx: BtfTracePointContext) -> i32 {
    let id = bpf_get_current_pid_tgid();
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    let task: u64 = ctx.arg(0);
    call::thread_exits(id as u32);
    sched::thread_exits(id as u32);
    python::thread_exits(id as u32);
    emit(EXIT, &target, (tgid, tid), (0, 0), task);
    // The last thread: the tgid may be given to another process after this.
    let offsets = OFFSETS.load();
    let signal: u64 = read_kernel(task + u64::from(offsets.task_signal));
    let live: u32 = read_kernel(signal + u64::from(offsets.signal_live));
    if live == 0 {
        let _gone = TARGETS.remove(tgid);
        unwind::process_ends(tgid);
    }
    0
}

#[inline(always)]
fn emit(action: u32, target: &Target, (tgid, tid): (u32, u32), parent: (u32, u32), task: u64) {
    match VITAL.reserve::<Process>(0) {
        Some(mut entry) => {
            entry.write(Process {
                header: header(Kind::Process, 0, size_of::<Process>(), now_ns(), target, tgid, tid),
                action,
                parent_tgid: parent.0,
                parent_tid: parent.1,
                _pad: 0,
                comm: read_kernel(task + u64::from(OFFSETS.load().task_comm)),
            });
            entry.submit(u64::from(BPF_RB_NO_WAKEUP));
            count(Counter::VitalWritten);
        }
        None => count(Counter::VitalDropped),
    }
}

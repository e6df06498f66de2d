//! A thread that leaves the CPU where it did before: its stack is the one that was walked then.
//!
//! Most times that a server's threads do are such, and a walk costs several times what it takes to see that nothing has
//! changed: registers and system call are the same, each return address of the user stack is where it was, and so are the
//! innermost kernel frames, by which the ways of one system call to sleep differ. Where that is not so, the stack is
//! walked.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    helpers::{bpf_get_current_task_btf, generated},
    macros::map,
    maps::{Array, HashMap},
};
use tracer_abi::{
    Target,
    stack::{Cut, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, StackHead},
};

use super::{
    common::{entry, opaque, read_user},
    unwind::{BP, PC, SP, Walk, space_of},
};

/// Innermost kernel frames that are compared, but for the first, which is this program's: of the tracepoint three, of the
/// scheduler two, and as many of what sleeps.
const INNERMOST: usize = 8;
/// Places of a thread that are remembered.
const PLACES: u64 = 4;
const MAX_REPEATS: u32 = 8192;
const FRAMES: usize = MAX_KERNEL_FRAMES + MAX_USER_FRAMES;

/// A place where a thread has left the CPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Repeat {
    pc: u64,
    sp: u64,
    bp: u64,
    syscall: i32,
    preempted: u32,
    /// [`tracer_abi::unwind::Space::id`] of its process.
    space: u32,
    _pad: u32,
    head: StackHead,
    /// Where the return address of each user frame but the leaf is, from sp.
    returns: [u32; MAX_USER_FRAMES],
    stack: [u64; FRAMES],
}

/// By thread and [`PLACES`]; allocated as they come.
#[map]
static REPEATS: HashMap<u64, Repeat> = HashMap::with_max_entries(MAX_REPEATS, BPF_F_NO_PREALLOC);
/// A zeroed value to begin an entry with: it is too big for the stack.
#[map]
static NOTHING: Array<Repeat> = Array::with_max_entries(1, 0);

/// Where a thread is that leaves the CPU.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pc: u64,
    sp: u64,
    bp: u64,
    syscall: i32,
    tid: u32,
    /// 1: it did not go by itself, and has no kernel frames that tell anything.
    preempted: u32,
}

impl Place {
    /// That of the current thread.
    #[inline(always)]
    pub(crate) fn current(tid: u32, preempted: bool) -> Self {
        const SYSCALL: usize = 15;
        // SAFETY: helpers without preconditions; the registers of the current task are there, and the verifier knows their
        // type.
        unsafe {
            let regs = generated::bpf_task_pt_regs(bpf_get_current_task_btf().cast()) as *const u64;
            let (pc, sp, bp) = (*regs.add(PC), *regs.add(SP), *regs.add(BP));
            Self { pc, sp, bp, syscall: *regs.add(SYSCALL) as i32, tid, preempted: u32::from(preempted) }
        }
    }

    /// Number of the system call; negative: it is in none.
    #[inline(always)]
    pub(crate) fn syscall(&self) -> i32 {
        self.syscall
    }

    #[inline(always)]
    pub(crate) fn is_preempted(&self) -> bool {
        self.preempted != 0
    }

    #[inline(always)]
    fn key(&self) -> u64 {
        let mixed = self.pc >> 1 ^ self.sp >> 4 ^ self.syscall as u64 ^ u64::from(self.preempted) << 1;
        u64::from(self.tid) * PLACES | mixed & (PLACES - 1)
    }
}

/// Copies the stack of the current thread, if it has slept in this place before; returns its head.
///
/// # Safety
/// `ctx` is the context of the running program, and `to` has room for a stack.
#[inline(always)]
pub(crate) unsafe fn stack(
    ctx: *mut c_void,
    place: &Place,
    (target, tgid): (&Target, u32),
    to: *mut c_void,
) -> Option<StackHead> {
    // SAFETY: only this thread's switches change it.
    let repeat = unsafe { REPEATS.get(place.key()) }?;
    let before = (repeat.pc, repeat.sp, repeat.bp, repeat.syscall, repeat.preempted);
    if (place.pc, place.sp, place.bp, place.syscall, place.preempted) != before || repeat.space == 0 {
        return None;
    }
    if space_of(tgid, target).id != repeat.space {
        return None;
    }
    // SAFETY: by the caller's promise.
    if place.preempted == 0 && !unsafe { sleeps_as_before(ctx, repeat) } {
        return None;
    }
    let (first, frames) = (usize::from(repeat.head.kernel_frames), usize::from(repeat.head.user_frames));
    let mut frame = 1;
    while frame < MAX_USER_FRAMES {
        if frame >= frames {
            break;
        }
        let index = opaque((first + frame) as u64) as usize;
        let at = place.sp + u64::from(repeat.returns[frame]);
        if index >= FRAMES || read_user(at) != Some(repeat.stack[index]) {
            return None;
        }
        frame += 1;
    }
    let mut bytes = opaque((8 * (first + frames)) as u64);
    if bytes > 8 * FRAMES as u64 {
        bytes = 8 * FRAMES as u64;
    }
    // SAFETY: so many bytes are there, and there is room for them by the caller's promise.
    unsafe { generated::bpf_probe_read_kernel(to, bytes as u32, repeat.stack.as_ptr().cast()) };
    Some(repeat.head)
}

/// Whether the innermost kernel frames are the same.
///
/// # Safety
/// `ctx` is the context of the running program.
#[inline(always)]
unsafe fn sleeps_as_before(ctx: *mut c_void, repeat: &Repeat) -> bool {
    const BYTES: u32 = 8 * INNERMOST as u32;
    let mut kernel = [0u64; INNERMOST];
    // SAFETY: as long as said.
    let bytes = unsafe { generated::bpf_get_stack(ctx, kernel.as_mut_ptr().cast(), BYTES, 0) };
    bytes == i64::from(BYTES) && kernel[1..] == repeat.stack[1..INNERMOST]
}

/// Remembers the stack of a thread that leaves the CPU in a system call, which was walked just now.
#[inline(always)]
pub(crate) fn remember(walk: &Walk, place: &Place) {
    let head = &walk.head;
    let is_whole = head.cut == Cut::None as u8
        && head.python_frames == 0
        && walk.space.python == 0
        && walk.repeatable != 0
        && (place.preempted != 0 || usize::from(head.kernel_frames) >= INNERMOST);
    if place.syscall < 0 || !is_whole {
        return;
    }
    let Some(repeat) = entry(&REPEATS, place.key(), &NOTHING) else { return };
    // SAFETY: a valid map value that only this thread's switches change; the sources are as long as said.
    unsafe {
        (*repeat).space = walk.space.id;
        (*repeat).pc = place.pc;
        (*repeat).sp = place.sp;
        (*repeat).bp = place.bp;
        (*repeat).syscall = place.syscall;
        (*repeat).preempted = place.preempted;
        (*repeat).head = *head;
        let returns = size_of_val(&walk.returns_at) as u32;
        generated::bpf_probe_read_kernel(
            (&raw mut (*repeat).returns).cast(),
            returns,
            walk.returns_at.as_ptr().cast(),
        );
        let stack = 8 * FRAMES as u32;
        generated::bpf_probe_read_kernel(
            (&raw mut (*repeat).stack).cast(),
            stack,
            walk.words.as_ptr().cast(),
        );
    }
}

/// A thread ends.
#[inline(always)]
pub(crate) fn thread_exits(tid: u32) {
    let mut place = 0;
    while place < PLACES {
        let _gone = REPEATS.remove(u64::from(tid) * PLACES | place);
        place += 1;
    }
}

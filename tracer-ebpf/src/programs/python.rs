//! Frames of CPython: read from the interpreter's own list, which hangs on its state of the thread.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap},
};
use tracer_abi::{
    MAX_THREADS,
    stack::{
        MAX_PYTHON_FRAMES, PYTHON_CODE, PYTHON_DEPTH, PYTHON_ENTRY, PYTHON_NO_THREAD, PYTHON_UNREADABLE,
    },
    unwind::{MAX_PYTHONS, PythonOffsets, PythonThread},
};

use super::{
    common::{opaque, read_user},
    unwind::{WORDS, Walk, walk_of},
};

#[map]
static PYTHONS: Array<PythonOffsets> = Array::with_max_entries(MAX_PYTHONS, 0);
#[map]
static PYTHON_THREADS: HashMap<u32, PythonThread> = HashMap::with_max_entries(MAX_THREADS, 0);

/// Outcomes of [`python_step`].
const CONTINUE: u32 = 0;
const END: u32 = 1;
const UNREADABLE: u32 = 2;

/// Appends the Python frames of the current thread, if its process runs `python`; returns flags of the stack's head.
#[inline(always)]
pub(crate) fn frames(walk: &mut Walk, slot: u32, python: u32, tgid: u32, tid: u32) -> u8 {
    if python == 0 {
        return 0;
    }
    let python = python.wrapping_sub(1);
    let Some(offsets) = PYTHONS.get(python) else { return 0 };
    // SAFETY: the value is copied at once.
    let thread = match unsafe { PYTHON_THREADS.get(tid) } {
        Some(thread) if thread.tgid == tgid => *thread,
        _ => return PYTHON_NO_THREAD,
    };
    let Some(mut frame) = read_user::<u64>(thread.state.wrapping_add(u64::from(offsets.thread_frame))) else {
        return PYTHON_UNREADABLE;
    };
    if offsets.frame_is_inner != 0 {
        let Some(inner) = read_user::<u64>(frame.wrapping_add(u64::from(offsets.inner_frame))) else {
            return PYTHON_UNREADABLE;
        };
        frame = inner;
    }
    walk.python_frame = frame;
    let mut turn = 0;
    while turn < MAX_PYTHON_FRAMES {
        match python_step(slot, python) {
            CONTINUE => {}
            END => return 0,
            _ => return PYTHON_UNREADABLE,
        }
        turn += 1;
    }
    if walk.python_frame == 0 { 0 } else { PYTHON_DEPTH }
}

/// Records a frame and goes to its caller. A function of its own for the same reason as `unwind_step`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn python_step(slot: u32, python: u32) -> u32 {
    let Some(walk) = walk_of(slot) else { return UNREADABLE };
    let Some(offsets) = PYTHONS.get(python) else { return UNREADABLE };
    let frame = walk.python_frame;
    if frame == 0 {
        return END;
    }
    let word = |offset: u32| read_user::<u64>(frame.wrapping_add(u64::from(offset)));
    let (Some(code), Some(instruction), Some(previous), Some(entry)) = (
        word(offsets.frame_code),
        word(offsets.frame_instruction),
        word(offsets.frame_previous),
        read_user::<u8>(frame.wrapping_add(u64::from(offsets.frame_entry))),
    ) else {
        return UNREADABLE;
    };
    let code = code & PYTHON_CODE;
    // The frame at an entry may have no code.
    let first_line = read_user::<u32>(code.wrapping_add(u64::from(offsets.code_first_line))).unwrap_or(0);
    let is_entry = u32::from(entry) == offsets.entry_value;
    let done = u64::from(walk.kernel_frames)
        .wrapping_add(u64::from(walk.user_frames))
        .wrapping_add(u64::from(walk.python_frames).wrapping_mul(2));
    let index = opaque(done) as usize;
    walk.words[index & (WORDS - 1)] = code | if is_entry { PYTHON_ENTRY } else { 0 };
    walk.words[index.wrapping_add(1) & (WORDS - 1)] =
        instruction.wrapping_sub(code) & 0xffff_ffff | u64::from(first_line) << 32;
    walk.python_frames = walk.python_frames.wrapping_add(1);
    walk.python_frame = previous;
    CONTINUE
}

/// A thread ends, and its number may be another's.
#[inline(always)]
pub(crate) fn thread_exits(tid: u32) {
    let _gone = PYTHON_THREADS.remove(tid);
}

//! Walks the user stack of the current thread, by tables where there are some, else by frame pointers.
//!
//! One step is a function of its own, which the verifier looks at once: inlined into the loop it would look at it for
//! each frame. It takes the number of a walk and finds its state itself, since such a function takes plain numbers only.
//!
//! What is put on a stack is certain, or the walk ends with a reason: a caller is recorded only where its address lies
//! in a mapping that user space has described.

use core::ffi::c_void;

use aya_ebpf::{
    btf_maps,
    helpers::{bpf_get_current_task_btf, generated},
    macros::{btf_map, map},
    maps::{Array, HashMap, PerCpuArray},
};
use tracer_abi::{
    Counter, MAX_TARGETS, Target,
    sample::FIXED_BYTES,
    stack::{Cut, MAX_KERNEL_FRAMES, MAX_USER_FRAMES, STACK_WORDS, StackHead},
    unwind::{
        CHUNK_ROWS, MAPPING_STEPS, MAX_CHUNKS, MAX_MAPPINGS, MAX_PAGES, MAX_RULES, Mapping, PAGE_SHIFT,
        ROW_STEPS, Rule, Space, TABLE_PENDING, WITH_TABLE, cfa, rbp,
    },
};

use super::{
    common::{count, offset, opaque, read_kernel, read_user},
    python,
};

#[map]
static SPACES: HashMap<u32, Space> = HashMap::with_max_entries(MAX_TARGETS, 0);
#[map]
static MAPPINGS: Array<Mapping> = Array::with_max_entries(MAX_MAPPINGS, 0);
#[map]
static PAGES: Array<u64> = Array::with_max_entries(MAX_PAGES, 0);
#[map]
static RULES: Array<Rule> = Array::with_max_entries(MAX_RULES, 0);
#[btf_map]
static ROWS: btf_maps::ArrayOfMaps<btf_maps::Array<u32, { CHUNK_ROWS as usize }>, { MAX_CHUNKS as usize }> =
    btf_maps::ArrayOfMaps::new();
#[map]
static WALKS: PerCpuArray<Walk> = PerCpuArray::with_max_entries(3, 0);

/// Walks of this CPU: one for each program that walks. The first two cannot be interrupted by themselves: the scheduler's
/// tracepoint runs with interrupts off, and the sampling clock is an interrupt. A probe can, and claims its walk.
pub(crate) const SAMPLE: u32 = 0;
pub(crate) const SCHED: u32 = 1;
pub(crate) const CALL: u32 = 2;

/// Words that an index under this mask fits into, whatever it is.
pub(crate) const WORDS: usize = 512;
const _: () = assert!(WORDS >= STACK_WORDS && WORDS.is_power_of_two());
const _: () = assert!(MAX_KERNEL_FRAMES <= 255 && MAX_USER_FRAMES <= 255);

/// A walk in progress.
#[repr(C)]
pub(crate) struct Walk {
    /// Room for the fixed part of a sample, so that the record is in one piece.
    pub(crate) fixed: [u8; FIXED_BYTES],
    pub(crate) words: [u64; WORDS],
    pub(crate) head: StackHead,
    /// Registers of the frame that the walk is at.
    pc: u64,
    sp: u64,
    bp: u64,
    /// Of the leaf, as the kernel saved them (`pt_regs`, x86-64).
    pub(crate) saved: [u64; SAVED_WORDS],
    /// Where the return address of each user frame but the leaf is, from the leaf's sp.
    pub(crate) returns_at: [u32; MAX_USER_FRAMES],
    /// They all are there, and nearer than 4 GB.
    pub(crate) repeatable: u32,
    /// Return probes that are pending further up the stack, and the page that their return addresses point to.
    returns: u64,
    trampoline: u64,
    pub(crate) space: Space,
    /// Index of the mapping that the last address was in.
    mapping: u32,
    /// `pc` is a return address: the call is before it.
    is_return: u32,
    bp_lost: u32,
    /// Frames since the leaf, or since what a signal has interrupted.
    depth: u32,
    /// The last step went by frame pointers.
    by_frame_pointer: u32,
    pub(crate) kernel_frames: u32,
    pub(crate) user_frames: u32,
    pub(crate) python_frames: u32,
    frame_pointer_steps: u32,
    /// A [`python`] frame.
    pub(crate) python_frame: u64,
    /// Claims the walk of [`CALL`].
    pub(crate) busy: u64,
}

const NO_SPACE: Space = Space { first: 0, len: 0, id: 0, python: 0, epoch: 0 };

/// Words of `pt_regs` up to rsp.
const SAVED_WORDS: usize = 20;
pub(crate) const BP: usize = 4;
pub(crate) const PC: usize = 16;
const CS: usize = 17;
pub(crate) const SP: usize = 19;
/// Code segments of user space: the lowest two bits; that of 32-bit code.
const USER_MODE: u64 = 3;
const USER32_CS: u64 = 0x23;

/// `step` goes on.
const CONTINUE: u32 = 256;

/// Records kernel frames (where wanted), user frames and Python frames of the current thread. `None` only where the
/// verifier's doubts would be justified.
///
/// # Safety
/// `ctx` is the context of the running program, and `slot` is its own.
#[inline(always)]
pub(crate) unsafe fn walk(
    ctx: *mut c_void,
    slot: u32,
    with_kernel: bool,
    (target, tgid, tid): (&Target, u32, u32),
) -> Option<&'static mut Walk> {
    let walk = walk_of(slot)?;
    let mut kernel = 0;
    if with_kernel {
        const BYTES: u32 = 8 * MAX_KERNEL_FRAMES as u32;
        // SAFETY: `words` has room for so many.
        let bytes = unsafe { generated::bpf_get_stack(ctx, walk.words.as_mut_ptr().cast(), BYTES, 0) };
        kernel = if bytes > 0 { bytes as u32 / 8 } else { 0 };
    }
    walk.kernel_frames = kernel;
    walk.user_frames = 0;
    walk.python_frames = 0;
    walk.frame_pointer_steps = 0;
    walk.by_frame_pointer = 0;
    walk.bp_lost = 0;
    walk.depth = 0;
    walk.is_return = 0;
    walk.returns = 0;
    walk.trampoline = 0;
    let mut flags = 0;
    let mut cut = Cut::NoRegisters as u32;
    if registers(walk) {
        walk.space = space_of(tgid, target);
        walk.mapping = walk.space.first;
        pending_returns(walk);
        walk.repeatable = u32::from(walk.pc == walk.saved[PC]);
        let mut frame = 0;
        cut = Cut::Depth as u32;
        while frame <= MAX_USER_FRAMES {
            let outcome = unwind_step(slot);
            if outcome != CONTINUE {
                cut = outcome;
                break;
            }
            frame += 1;
        }
        flags = python::frames(walk, slot, walk.space.python, tgid, tid);
    }
    let steps = walk.frame_pointer_steps;
    walk.head = StackHead {
        kernel_frames: walk.kernel_frames as u8,
        user_frames: walk.user_frames as u8,
        python_frames: walk.python_frames as u8,
        cut: cut as u8,
        frame_pointer_steps: if steps > 255 { 255 } else { steps as u8 },
        flags,
        _pad: [0; 2],
    };
    Some(walk)
}

/// What a target maps, as far as it is known.
#[inline(always)]
pub(crate) fn space_of(tgid: u32, target: &Target) -> Space {
    // SAFETY: the value is copied at once.
    let space = unsafe { SPACES.get(tgid) }.copied();
    space.filter(|space| space.epoch == target.epoch).unwrap_or(NO_SPACE)
}

/// The walk of a slot, for the program whose slot it is.
#[inline(always)]
pub(crate) fn walk_of(slot: u32) -> Option<&'static mut Walk> {
    let walk = WALKS.get_ptr_mut(slot)?;
    // SAFETY: a valid map value of this CPU, which no other program uses at the same time; see `SAMPLE`.
    Some(unsafe { &mut *walk })
}

/// Bytes of a record with a stack, in bounds that the verifier can see.
#[inline(always)]
pub(crate) fn record_bytes(fixed: usize, head: &StackHead) -> u64 {
    fixed as u64 + 8 * words(head)
}

#[inline(always)]
fn words(head: &StackHead) -> u64 {
    let words =
        u64::from(head.kernel_frames) + u64::from(head.user_frames) + 2 * u64::from(head.python_frames);
    let words = opaque(words);
    if words > STACK_WORDS as u64 { STACK_WORDS as u64 } else { words }
}

/// Copies the words of a walk; returns their head.
///
/// # Safety
/// `to` has room for [`STACK_WORDS`].
#[inline(always)]
pub(crate) unsafe fn copy_stack(walk: &Walk, to: *mut c_void) -> StackHead {
    let bytes = 8 * words(&walk.head) as u32;
    // SAFETY: so many bytes are there, by the caller's promise and by the type.
    unsafe { generated::bpf_probe_read_kernel(to, bytes, walk.words.as_ptr().cast()) };
    walk.head
}

/// A child has its parent's mappings until it executes something.
#[inline(always)]
pub(crate) fn process_forks(parent: u32, child: u32) {
    // SAFETY: the value is copied at once.
    let Some(space) = (unsafe { SPACES.get(parent) }).copied() else { return };
    if SPACES.insert(child, space, 0).is_err() {
        count(Counter::SpacesFull);
    }
}

#[inline(always)]
pub(crate) fn process_ends(tgid: u32) {
    let _gone = SPACES.remove(tgid);
}

/// The registers with which the thread left user space: at the top of its kernel stack, whatever took it there.
/// `false` where it has none that can be walked from.
#[inline(always)]
fn registers(walk: &mut Walk) -> bool {
    // SAFETY: helpers without preconditions.
    let regs = unsafe { generated::bpf_task_pt_regs(bpf_get_current_task_btf().cast()) };
    // Copied rather than loaded field by field: `words` of a walk and fields of the kernel's are one address to the
    // compiler, which would merge the loads of both.
    // SAFETY: as long as said; the helper checks the source.
    let failed = unsafe {
        generated::bpf_probe_read_kernel(
            walk.saved.as_mut_ptr().cast(),
            8 * SAVED_WORDS as u32,
            (regs as *const c_void).cast(),
        )
    };
    walk.pc = walk.saved[PC];
    walk.sp = walk.saved[SP];
    walk.bp = walk.saved[BP];
    let cs = walk.saved[CS];
    failed == 0 && cs & USER_MODE == USER_MODE && cs != USER32_CS
}

/// What probes have done to the stack: a pending return probe has put its page's address in place of the return address,
/// and the instruction that a probe has displaced runs at another place.
#[inline(always)]
fn pending_returns(walk: &mut Walk) {
    if offset!(task_utask) == 0 {
        return;
    }
    // SAFETY: a helper without preconditions.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let utask: u64 = read_kernel(task + u64::from(offset!(task_utask)));
    if utask == 0 {
        return;
    }
    walk.returns = read_kernel(utask + u64::from(offset!(utask_returns)));
    let mm: u64 = read_kernel(task + u64::from(offset!(task_mm)));
    let area: u64 = read_kernel(mm + u64::from(offset!(mm_xol_area)));
    if area == 0 {
        return;
    }
    walk.trampoline = read_kernel(area + u64::from(offset!(xol_vaddr)));
    let at = walk.pc.wrapping_sub(walk.trampoline);
    if walk.trampoline == 0 || at >= 4096 {
        return;
    }
    if at >= 0x80 {
        // A copy of the probed instruction.
        let original: u64 = read_kernel(utask + u64::from(offset!(utask_vaddr)));
        let copy: u64 = read_kernel(utask + u64::from(offset!(utask_xol_vaddr)));
        walk.pc = original.wrapping_add(walk.pc.wrapping_sub(copy));
    } else if walk.returns != 0 {
        // On the way back, from the first instructions of the page: push rax; push rcx; push r11; mov; syscall.
        walk.sp = walk.sp.wrapping_add(match at {
            0 => 0,
            1 => 8,
            2 => 16,
            _ => 24,
        });
        walk.pc = next_return(walk);
        walk.is_return = 1;
    }
}

/// The return address of the innermost pending return probe, which is taken off.
#[inline(always)]
fn next_return(walk: &mut Walk) -> u64 {
    let mut instance = walk.returns;
    let address = read_kernel(instance + u64::from(offset!(return_address)));
    // Several probes of one function are one place on the stack.
    let mut turn = 0;
    while turn < 4 {
        turn += 1;
        let chained: u8 = read_kernel(instance + u64::from(offset!(return_chained)));
        instance = read_kernel(instance + u64::from(offset!(return_next)));
        if chained == 0 || instance == 0 {
            break;
        }
    }
    walk.returns = instance;
    address
}

/// Records the frame that a walk is at and goes to its caller; [`CONTINUE`], or why it ends as a [`Cut`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn unwind_step(slot: u32) -> u32 {
    let Some(walk) = walk_of(slot) else { return Cut::NoRegisters as u32 };
    match step(walk) {
        None => CONTINUE,
        Some(cut) => cut as u32,
    }
}

#[inline(always)]
fn step(walk: &mut Walk) -> Option<Cut> {
    let is_leaf = walk.user_frames == 0;
    let pc = walk.pc;
    let place = pc.wrapping_sub(u64::from(walk.is_return));
    let mapping = mapping_of(walk, place);
    // Where the walk begins is certain; a caller is one only in code.
    if mapping.is_none() && !is_leaf {
        return Some(Cut::Unmapped);
    }
    if walk.user_frames >= MAX_USER_FRAMES as u32 {
        return Some(Cut::Depth);
    }
    let index = (walk.kernel_frames as usize).wrapping_add(walk.user_frames as usize);
    walk.words[opaque(index as u64) as usize & (WORDS - 1)] = pc;
    let at = walk.sp.wrapping_sub(8).wrapping_sub(walk.saved[SP]);
    walk.returns_at[opaque(walk.user_frames.into()) as usize & (MAX_USER_FRAMES - 1)] = at as u32;
    if !is_leaf && (walk.is_return == 0 || at >> 32 != 0) {
        walk.repeatable = 0;
    }
    walk.user_frames = walk.user_frames.wrapping_add(1);
    walk.depth = walk.depth.wrapping_add(1);
    let Some(mapping) = mapping else { return Some(Cut::Unmapped) };
    if mapping.kind == TABLE_PENDING {
        return Some(Cut::TablePending);
    }
    let rule = if mapping.kind == WITH_TABLE { rule_of(mapping, place) } else { None };
    match rule {
        Some(rule) if rule.cfa != cfa::NONE => by_rule(walk, *rule, place, is_leaf),
        _ => by_frame_pointer(walk),
    }
}

#[inline(always)]
fn by_rule(walk: &mut Walk, rule: Rule, place: u64, is_leaf: bool) -> Option<Cut> {
    walk.by_frame_pointer = 0;
    let offset = i64::from(rule.cfa_offset) as u64;
    // It does so by itself or in a function that calls no other: further up the stack its frame is what it was.
    if rule.rbp & rbp::LEAVES_FOR_HANDLER != 0 && walk.depth <= 2 {
        return Some(Cut::Exception);
    }
    let rbp_rule = rule.rbp & !rbp::LEAVES_FOR_HANDLER;
    let needs_bp = rule.cfa == cfa::RBP || rule.cfa == cfa::AT_RBP || rbp_rule == rbp::AT_RBP;
    if needs_bp && walk.bp_lost != 0 {
        return Some(Cut::RegisterLost);
    }
    let cfa = match rule.cfa {
        cfa::RSP => walk.sp.wrapping_add(offset),
        cfa::RBP => walk.bp.wrapping_add(offset),
        cfa::PLT => {
            let pushed = place & 15 >= offset;
            walk.sp.wrapping_add(if pushed { 16 } else { 8 })
        }
        cfa::END => return Some(Cut::None),
        cfa::AT_RBP | cfa::AT_RSP => {
            let base = if rule.cfa == cfa::AT_RBP { walk.bp } else { walk.sp };
            let Some(word) = read_user::<u64>(base.wrapping_add(offset)) else {
                return Some(Cut::Unreadable);
            };
            word.wrapping_add(i64::from(rule.cfa_offset2) as u64)
        }
        cfa::SIGNAL => return interrupted(walk),
        cfa::REGISTER if is_leaf => {
            let at = saved_index(rule.register);
            walk.saved[opaque(at as u64) as usize & 15].wrapping_add(offset)
        }
        _ => return Some(Cut::Unsupported),
    };
    if cfa <= walk.sp {
        return Some(Cut::NoProgress);
    }
    // The return address and, at its usual place, rbp.
    let Some([saved_bp, ra]) = read_user::<[u64; 2]>(cfa.wrapping_sub(16)) else {
        return Some(Cut::Unreadable);
    };
    match rbp_rule {
        rbp::AT_CFA if rule.rbp_offset == -16 => walk.bp = saved_bp,
        rbp::AT_CFA | rbp::AT_RBP => {
            let base = if rbp_rule == rbp::AT_CFA { cfa } else { walk.bp };
            let address = base.wrapping_add(i64::from(rule.rbp_offset) as u64);
            let Some(bp) = read_user::<u64>(address) else { return Some(Cut::Unreadable) };
            walk.bp = bp;
        }
        rbp::LOST => {}
        _ => return returned(walk, ra, cfa),
    }
    walk.bp_lost = u32::from(rbp_rule == rbp::LOST);
    returned(walk, ra, cfa)
}

/// Goes on in the caller.
#[inline(always)]
fn returned(walk: &mut Walk, ra: u64, sp: u64) -> Option<Cut> {
    let mut ra = ra;
    if ra == 0 {
        return Some(Cut::None);
    }
    if ra == walk.trampoline && walk.returns != 0 {
        ra = next_return(walk);
    }
    walk.pc = ra;
    walk.sp = sp;
    walk.is_return = 1;
    None
}

/// Goes on in what a signal has interrupted: registers of `struct ucontext` (x86-64), which is at rsp.
#[inline(always)]
fn interrupted(walk: &mut Walk) -> Option<Cut> {
    let sp = walk.sp;
    let (Some(bp), Some([next, pc])) =
        (read_user::<u64>(sp.wrapping_add(120)), read_user::<[u64; 2]>(sp.wrapping_add(160)))
    else {
        return Some(Cut::Unreadable);
    };
    walk.pc = pc;
    walk.sp = next;
    walk.bp = bp;
    walk.bp_lost = 0;
    walk.is_return = 0;
    walk.depth = 0;
    None
}

/// A frame pointer is one only if it leads up the stack, a little.
#[inline(always)]
fn by_frame_pointer(walk: &mut Walk) -> Option<Cut> {
    const FARTHEST: u64 = 1 << 20;
    let (bp, sp) = (walk.bp, walk.sp);
    if walk.bp_lost != 0 {
        return Some(Cut::RegisterLost);
    }
    // The first frame of a chain of frame pointers has none.
    if bp == 0 && walk.by_frame_pointer != 0 {
        return Some(Cut::None);
    }
    if bp < sp || bp.wrapping_sub(sp) > FARTHEST || bp & 7 != 0 {
        return Some(Cut::FramePointers);
    }
    let Some([next, ra]) = read_user::<[u64; 2]>(bp) else { return Some(Cut::FramePointers) };
    walk.bp = next;
    walk.by_frame_pointer = 1;
    walk.frame_pointer_steps = walk.frame_pointer_steps.wrapping_add(1);
    returned(walk, ra, bp.wrapping_add(16))
}

/// Place in `pt_regs` of a register by its DWARF number.
#[inline(always)]
fn saved_index(register: u16) -> usize {
    match register {
        0 => 10,
        1 => 12,
        2 => 11,
        3 => 5,
        4 => 13,
        5 => 14,
        8 => 9,
        9 => 8,
        10 => 7,
        11 => 6,
        12 => 3,
        13 => 2,
        14 => 1,
        _ => 0,
    }
}

#[inline(always)]
fn mapping_of(walk: &mut Walk, address: u64) -> Option<&'static Mapping> {
    if let Some(mapping) = MAPPINGS.get(walk.mapping)
        && holds(mapping, address, walk.space.id)
    {
        return Some(mapping);
    }
    let first = walk.space.first;
    let (mut low, mut high) = (first, first.wrapping_add(walk.space.len));
    let mut turn = 0;
    while turn < MAPPING_STEPS {
        turn += 1;
        if low >= high {
            break;
        }
        let middle = low.wrapping_add(high) >> 1;
        if MAPPINGS.get(middle)?.begin <= address {
            low = middle.wrapping_add(1);
        } else {
            high = middle;
        }
    }
    if low == first {
        return None;
    }
    let index = low.wrapping_sub(1);
    let mapping = MAPPINGS.get(index)?;
    if !holds(mapping, address, walk.space.id) {
        return None;
    }
    walk.mapping = index;
    Some(mapping)
}

#[inline(always)]
fn holds(mapping: &Mapping, address: u64, space: u32) -> bool {
    mapping.space == space && space != 0 && address >= mapping.begin && address < mapping.end
}

/// The rule that holds at an address; `None` where the table has none for this part of the file.
#[inline(always)]
fn rule_of(mapping: &Mapping, address: u64) -> Option<&'static Rule> {
    let at = address.wrapping_sub(mapping.bias);
    let page = at >> PAGE_SHIFT;
    if page >= u64::from(mapping.pages) {
        return None;
    }
    let page = *PAGES.get(mapping.first_page.wrapping_add(page as u32))?;
    if page == 0 {
        return None;
    }
    let rows = ROWS.get(((page >> 32) as u32).wrapping_sub(1))?;
    let first = (page as u32) >> 16;
    let (mut low, mut high) = (first, first.wrapping_add(page as u32 & 0xffff).wrapping_add(1));
    let wanted = at as u32 & 0xffff;
    let mut turn = 0;
    while turn < ROW_STEPS {
        turn += 1;
        if low >= high {
            break;
        }
        let middle = low.wrapping_add(high) >> 1;
        if *rows.get(middle)? >> 16 <= wanted {
            low = middle.wrapping_add(1);
        } else {
            high = middle;
        }
    }
    let row = *rows.get(low.wrapping_sub(1))?;
    RULES.get(row & 0xffff)
}

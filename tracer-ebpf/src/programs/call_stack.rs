//! `call_stack`: walks the stack of a call or mark whose place is new to its thread; else it is named by a key only.

use aya_ebpf::{macros::map, maps::LruHashMap};
use tracer_abi::{
    Counter, Header, Kind, MAX_THREADS,
    call_stack::{FIXED_BYTES, NO_STACK, REFRESH_NS},
    stack::{Cut, StackHead},
};

use super::{
    common::{Ring, count, current_target, exchange, header, output, read_user},
    unwind::{self, record_bytes, walk_of},
};

/// Places that are remembered of a thread.
const PLACES: usize = 4;

/// A walk that came to code whose table was being built is repeated after so many ns.
const PENDING_NS: u64 = 50_000_000;
/// Of [`record_call_stack`]: nothing was recorded.
const NOT_NOW: u32 = 256;

/// A place whose stack was recorded.
#[repr(C)]
#[derive(Clone, Copy)]
struct Place {
    walked_ns: u64,
    key: u32,
    _pad: u32,
}

const NO_PLACES: [Place; PLACES] = [Place { walked_ns: 0, key: NO_STACK, _pad: 0 }; PLACES];

/// By thread. One that is forgotten is walked again.
#[map]
static CALL_STACKS: LruHashMap<u32, [Place; PLACES]> = LruHashMap::with_max_entries(MAX_THREADS, 0);

/// The key of a call's stack, which is recorded first where need be. The probe's place leaves the stack pointer as it
/// was at the function's entry: it points to the return address.
#[inline(always)]
pub(crate) fn key_of_call(point: u32, sp: u64, tid: u32, now: u64) -> u32 {
    key_of(point, sp, read_user(sp).unwrap_or(0), tid, now)
}

/// As [`key_of_call`], of a site in the middle of a function.
#[inline(always)]
pub(crate) fn key_of_mark(point: u32, sp: u64, tid: u32, now: u64) -> u32 {
    key_of(point, sp, 0, tid, now)
}

#[inline(always)]
fn key_of(point: u32, sp: u64, return_address: u64, tid: u32, now: u64) -> u32 {
    // Knuth's multiplier: 2^64 divided by the golden ratio.
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = (sp ^ return_address.rotate_left(24) ^ u64::from(point).rotate_left(48)).wrapping_mul(SPREAD);
    let key = (mixed >> 32) as u32 | 1;
    let places = match CALL_STACKS.get_ptr_mut(tid) {
        Some(places) => places,
        None => {
            let _full = CALL_STACKS.insert(tid, NO_PLACES, 0);
            match CALL_STACKS.get_ptr_mut(tid) {
                Some(places) => places,
                None => return NO_STACK,
            }
        }
    };
    // SAFETY: a valid map value. Should it be given to another thread meanwhile, one of both is walked once more.
    let place = unsafe { &mut (*places)[(mixed >> 62) as usize] };
    if place.key != key || now.wrapping_sub(place.walked_ns) >= REFRESH_NS {
        let cut = record_call_stack(key, now);
        if cut != NOT_NOW {
            let pending = cut == Cut::TablePending as u32;
            place.walked_ns = if pending { now.wrapping_sub(REFRESH_NS - PENDING_NS) } else { now };
            place.key = key;
        }
    }
    key
}

/// Records the current stack under a key; why it ends as a [`Cut`], or [`NOT_NOW`]. A function of its own for the same reason as `unwind_step`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn record_call_stack(key: u32, now: u64) -> u32 {
    let Some((target, tgid, tid)) = current_target() else { return NOT_NOW };
    let Some(claimed) = walk_of(unwind::CALL) else { return NOT_NOW };
    let busy = &raw mut claimed.busy;
    // SAFETY: a valid map value, which is only accessed atomically.
    if unsafe { exchange(busy, 1) } != 0 {
        count(Counter::CallStackBusy);
        return NOT_NOW;
    }
    // SAFETY: without frames of the kernel no context is asked for; the claim makes the walk this program's.
    let walked = unsafe { unwind::walk(core::ptr::null_mut(), unwind::CALL, false, (&target, tgid, tid)) };
    let mut cut = NOT_NOW;
    if let Some(walk) = walked {
        let head = walk.head;
        cut = u32::from(head.cut);
        let size = record_bytes(FIXED_BYTES, &head);
        let base = walk.fixed.as_mut_ptr();
        // SAFETY: the fixed part and then the stack are at the beginning of a walk, which is longer than any record.
        unsafe {
            base.cast::<Header>().write(header(Kind::CallStack, 0, size as usize, now, &target, tgid, tid));
            base.add(40).cast::<[u32; 2]>().write([key, 0]);
            base.add(48).cast::<StackHead>().write(head);
            output(Ring::Vital, base.cast_const().cast(), size);
        }
    }
    // SAFETY: as above.
    unsafe { exchange(busy, 0) };
    cut
}

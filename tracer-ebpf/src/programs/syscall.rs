//! `socket` records from system calls, for kernels without hooks below them (before 6.3).
//!
//! A connection is (process, descriptor) here, until the descriptor is closed: one that is duplicated, or passed on to
//! another process, is another connection. When bytes arrived and when they left is not seen, and every system call on
//! the machine passes by.

use aya_ebpf::{
    helpers::bpf_get_current_pid_tgid,
    macros::{btf_tracepoint, map},
    maps::LruHashMap,
    programs::BtfTracePointContext,
};
use tracer_abi::{
    Kind, MAX_THREADS, Socket,
    socket::{RECV, RECV_BYTES, SEND, SEND_BYTES, STATE, STATE_CLOSE},
};

use super::{
    common::{current_target, header, now_ns},
    socket::{HTTP, Place, begins_request, emit, place_of},
};

/// The system call that a thread is in, if it is one of those below.
#[repr(C)]
#[derive(Clone, Copy)]
struct Call {
    number: u64,
    descriptor: u64,
    second: u64,
    third: u64,
}

/// Connections on which requests come, or certainly none: see [`begins_request`].
#[map]
static CONNECTIONS: LruHashMap<u64, u64> = LruHashMap::with_max_entries(32_768, 0);
#[map]
static SYSCALLS: LruHashMap<u32, Call> = LruHashMap::with_max_entries(MAX_THREADS, 0);

const CLOSE: u64 = 3;
/// read, readv, recvfrom, recvmsg
const RECEIVES: u64 = 1 | 1 << 19 | 1 << 45 | 1 << 47;
/// write, writev, sendto, sendmsg
const SENDS: u64 = 1 << 1 | 1 << 20 | 1 << 44 | 1 << 46;
const MSG_PEEK: u64 = 2;

const fn is_one_of(set: u64, number: u64) -> bool {
    number < 64 && set >> number & 1 == 1
}

#[btf_tracepoint(function = "sys_enter")]
fn syscall_enter(ctx: BtfTracePointContext) -> i32 {
    let number: u64 = ctx.arg(1);
    if !is_one_of(RECEIVES | SENDS | 1 << CLOSE, number) || current_target().is_none() {
        return 0;
    }
    let regs: *const u64 = ctx.arg(0);
    // Words of the saved registers, x86-64: 14, 13, 12 and 7 the first to the fourth argument.
    // SAFETY: the tracepoint's registers; the verifier knows their type.
    let (descriptor, second, third, fourth) =
        unsafe { (*regs.add(14), *regs.add(13), *regs.add(12), *regs.add(7)) };
    let peeks = number == 45 && fourth & MSG_PEEK != 0 || number == 47 && third & MSG_PEEK != 0;
    if !peeks {
        let tid = bpf_get_current_pid_tgid() as u32;
        let _full = SYSCALLS.insert(tid, Call { number, descriptor, second, third }, 0);
    }
    0
}

#[btf_tracepoint(function = "sys_exit")]
fn syscall_exit(ctx: BtfTracePointContext) -> i32 {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    // SAFETY: the value is copied at once.
    let Some(call) = (unsafe { SYSCALLS.get(tid) }).copied() else { return 0 };
    let _gone = SYSCALLS.remove(tid);
    let result: i64 = ctx.arg(1);
    let cookie = u64::from(tgid) << 32 | call.descriptor & 0xffff_ffff;
    let place = place_of(call.number, call.second, call.third);
    // SAFETY: the value is copied at once.
    let what = unsafe { CONNECTIONS.get(cookie) }.copied().unwrap_or(0);
    let known = what == HTTP;
    let (action, result, most) = if call.number == CLOSE && what != 0 {
        let _gone = CONNECTIONS.remove(cookie);
        if !known {
            return 0;
        }
        (STATE, STATE_CLOSE, 0)
    } else if is_one_of(SENDS, call.number) && known {
        (SEND, result, SEND_BYTES as u64)
    } else if is_one_of(RECEIVES, call.number)
        && result >= 0
        && (known || what == 0 && result > 0 && begins(cookie, place, result as u64))
    {
        (RECV, result, RECV_BYTES as u64)
    } else {
        return 0;
    };
    let record = Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now, &target, tgid, tid),
        cookie,
        result,
        action,
        syscall: call.number as u32,
        ..Socket::default()
    };
    emit(&record, if action == STATE { Place::Unknown } else { place }, most);
    0
}

/// Whether a request begins; what begins is remembered.
#[inline(always)]
fn begins(cookie: u64, place: Place, bytes: u64) -> bool {
    let what = begins_request(place, bytes);
    if what != 0 {
        let _full = CONNECTIONS.insert(cookie, what, 0);
    }
    what == HTTP
}

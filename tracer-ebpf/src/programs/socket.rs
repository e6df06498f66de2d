//! `socket`: hooks below the system calls, where every way of reading and writing a socket comes by, and nothing else.
//! Kernels before 6.3 have none there: on these, [`syscall`] looks at the system calls themselves.
//!
//! A connection becomes interesting when a target receives the beginning of an HTTP request on it; of others nothing is
//! copied. Bytes are captured after they were moved: how many is known then, and the pages are there.

use aya_ebpf::{
    helpers::{bpf_get_current_task_btf, generated},
    macros::{btf_tracepoint, map},
    maps::{HashMap, LruHashMap},
    programs::BtfTracePointContext,
};
use tracer_abi::{
    Counter, Kind, Socket, Target,
    socket::{RECV, RECV_BYTES, SEND, SEND_BYTES, STATE, STATE_CLOSE, STATE_CLOSE_WAIT, WIRE},
};

use super::common::{
    OFFSETS, Ring, ScratchBytes, count, current_target, header, now_ns, opaque, output, read_kernel,
    read_user, with_scratch,
};

/// Connections on which requests come, by cookie: [`HTTP`] or [`FOREIGN`].
#[map]
static CONNECTIONS: LruHashMap<u64, u32> = LruHashMap::with_max_entries(32_768, 0);
/// When the first unread bytes reached a socket.
#[map]
static ARRIVALS: LruHashMap<u64, u64> = LruHashMap::with_max_entries(32_768, 0);
/// Connections with bytes that were handed over and not put on the wire.
#[map]
static HELD: LruHashMap<u64, u32> = LruHashMap::with_max_entries(4096, 0);
/// Local ports on which arrivals are noted.
#[map]
static PORTS: HashMap<u16, u32> = HashMap::with_max_entries(1024, 0);

const HTTP: u32 = 1;
/// TLS or HTTP/2: counted once.
const FOREIGN: u32 = 2;

const MSG_PEEK: i32 = 2;
const BPF_NOEXIST: u64 = 1;
/// Parts of one vectored call that are captured.
const PARTS: u64 = 8;

/// Where the bytes of a system call are.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Flat(u64),
    Parts { at: u64, count: u64 },
    Unknown,
}

#[btf_tracepoint(function = "sock_send_length")]
fn socket_send(ctx: BtfTracePointContext) -> i32 {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    let (sk, result): (u64, i32) = (ctx.arg(0), ctx.arg(1));
    let Some((tcp, cookie)) = connection(sk) else { return 0 };
    if !is_followed(cookie) {
        return 0;
    }
    let (syscall, place) = place();
    let mut record = Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now, &target, tgid, tid),
        cookie,
        result: i64::from(result),
        action: SEND,
        syscall,
        ..name(sk)
    };
    sequence(&mut record, tcp);
    if record.sent_until != record.wire_until {
        let _full = HELD.insert(cookie, record.sent_until, 0);
    }
    emit(&record, place, SEND_BYTES as u64);
    0
}

#[btf_tracepoint(function = "sock_recv_length")]
fn socket_recv(ctx: BtfTracePointContext) -> i32 {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    let (sk, result, flags): (u64, i32, i32) = (ctx.arg(0), ctx.arg(1), ctx.arg(2));
    if result < 0 || flags & MSG_PEEK != 0 {
        return 0;
    }
    let Some((_, cookie)) = connection(sk) else { return 0 };
    let (syscall, place) = place();
    // SAFETY: the value is copied at once.
    match unsafe { CONNECTIONS.get(cookie) }.copied() {
        Some(HTTP) => {}
        None if result > 0 && begins_request(cookie, place, result as u64) => {}
        _ => return 0,
    }
    // SAFETY: the value is copied at once.
    let arrived_ns = unsafe { ARRIVALS.get(cookie) }.copied().unwrap_or(0);
    if arrived_ns != 0 {
        let _gone = ARRIVALS.remove(cookie);
    }
    let record = Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now, &target, tgid, tid),
        cookie,
        arrived_ns,
        result: i64::from(result),
        action: RECV,
        syscall,
        ..name(sk)
    };
    emit(&record, place, RECV_BYTES as u64);
    0
}

#[btf_tracepoint(function = "inet_sock_set_state")]
fn socket_state(ctx: BtfTracePointContext) -> i32 {
    let (sk, new): (u64, i32) = (ctx.arg(0), ctx.arg(2));
    let state = i64::from(new);
    if state != STATE_CLOSE && state != STATE_CLOSE_WAIT {
        return 0;
    }
    let cookie = cookie(sk);
    if !is_followed(cookie) {
        return 0;
    }
    if state == STATE_CLOSE {
        forget(cookie);
        let _gone = HELD.remove(cookie);
    }
    emit(&Socket { result: state, ..unnamed(sk, cookie, STATE) }, Place::Unknown, 0);
    0
}

#[btf_tracepoint(function = "sk_data_ready")]
fn socket_ready(ctx: BtfTracePointContext) -> i32 {
    let sk: u64 = ctx.arg(0);
    let port: u16 = read_kernel(sk + u64::from(OFFSETS.load().sock_num));
    // SAFETY: only whether there is an entry is looked at.
    if unsafe { PORTS.get(port) }.is_some() {
        // The first unread arrival wins.
        let _there = ARRIVALS.insert(cookie(sk), now_ns(), BPF_NOEXIST);
    }
    0
}

/// Each incoming segment, before it is processed: what it acknowledged has let held bytes go since the last one.
#[btf_tracepoint(function = "tcp_probe")]
fn socket_wire(ctx: BtfTracePointContext) -> i32 {
    let sk: u64 = ctx.arg(0);
    let cookie = cookie(sk);
    // SAFETY: only whether there is an entry is looked at.
    if unsafe { HELD.get(cookie) }.is_none() {
        return 0;
    }
    let mut record = unnamed(sk, cookie, WIRE);
    sequence(&mut record, sk);
    if record.sent_until == record.wire_until {
        let _gone = HELD.remove(cookie);
    }
    emit(&record, Place::Unknown, 0);
    0
}

/// A TCP socket and its cookie.
#[inline(always)]
fn connection(sk: u64) -> Option<(u64, u64)> {
    // SAFETY: `sk` is the tracepoint's socket.
    let tcp = unsafe { generated::bpf_skc_to_tcp_sock(sk as *mut _) } as u64;
    if tcp == 0 { None } else { Some((tcp, cookie(sk))) }
}

#[inline(always)]
fn cookie(sk: u64) -> u64 {
    // SAFETY: `sk` is the tracepoint's socket.
    unsafe { generated::bpf_get_socket_cookie(sk as *mut _) }
}

#[inline(always)]
fn name(sk: u64) -> Socket {
    let offsets = OFFSETS.load();
    Socket {
        local_port: read_kernel(sk + u64::from(offsets.sock_num)),
        remote_port: read_kernel(sk + u64::from(offsets.sock_dport)),
        ..Socket::default()
    }
}

/// A record of what no process does.
#[inline(always)]
fn unnamed(sk: u64, cookie: u64, action: u32) -> Socket {
    let nobody = Target { start_ticks: 0, flags: 0, epoch: 0 };
    Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now_ns(), &nobody, 0, 0),
        cookie,
        action,
        ..name(sk)
    }
}

#[inline(always)]
fn sequence(record: &mut Socket, tcp: u64) {
    let offsets = OFFSETS.load();
    record.sent_until = read_kernel(tcp + u64::from(offsets.tcp_write_seq));
    record.wire_until = read_kernel(tcp + u64::from(offsets.tcp_snd_nxt));
}

/// The system call that the current thread is in, and where its bytes are. Words of the saved registers, x86-64: 15 the
/// number, 13 and 12 the second and third argument.
#[inline(always)]
fn place() -> (u32, Place) {
    // SAFETY: helpers without preconditions; the registers of the current task are there.
    let regs = unsafe { generated::bpf_task_pt_regs(bpf_get_current_task_btf().cast()) } as *const u64;
    // SAFETY: as above; the verifier knows the type.
    let (number, second, third) = unsafe { (*regs.add(15), *regs.add(13), *regs.add(12)) };
    (number as u32, place_of(number, second, third))
}

/// Where the bytes of this system call are.
#[inline(always)]
pub(super) fn place_of(number: u64, second: u64, third: u64) -> Place {
    match number {
        // read, write, sendto, recvfrom
        0 | 1 | 44 | 45 => Place::Flat(second),
        // readv, writev
        19 | 20 => Place::Parts { at: second, count: third },
        // sendmsg, recvmsg: struct msghdr has the parts at 16 and their number at 24
        46 | 47 => {
            let [at, count]: [u64; 2] = read_user(second + 16).unwrap_or([0, 0]);
            Place::Parts { at, count }
        }
        _ => Place::Unknown,
    }
}

/// Whether this is a connection on which requests come.
#[inline(always)]
pub(super) fn is_followed(cookie: u64) -> bool {
    // SAFETY: the value is copied at once.
    unsafe { CONNECTIONS.get(cookie) }.copied() == Some(HTTP)
}

#[inline(always)]
pub(super) fn forget(cookie: u64) {
    let _gone = CONNECTIONS.remove(cookie);
}

/// Whether the bytes that were received begin a request; remembers the connection. No HTTP is remembered, too, where
/// that is certain.
#[inline(always)]
pub(super) fn begins_request(cookie: u64, place: Place, bytes: u64) -> bool {
    let at = match place {
        Place::Flat(at) => at,
        Place::Parts { at, .. } => read_user(at).unwrap_or(0),
        Place::Unknown => 0,
    };
    let Some(first) = read_user::<u32>(at) else { return false };
    // Fewer bytes than four: only those that were received count.
    let mask = match bytes {
        1 => 0xff,
        2 => 0xffff,
        3 => 0x00ff_ffff,
        _ => 0xffff_ffff,
    };
    let begins = |word: &[u8; 4]| first & mask == u32::from_le_bytes(*word) & mask;
    let what = if begins(b"GET ")
        || begins(b"POST")
        || begins(b"PUT ")
        || begins(b"HEAD")
        || begins(b"DELE")
        || begins(b"OPTI")
        || begins(b"PATC")
    {
        HTTP
    } else if begins(b"PRI ") {
        count(Counter::SocketHttp2);
        FOREIGN
    } else if bytes >= 3 && first & 0xffff == 0x0316 && first >> 16 & 0xff <= 4 {
        // A TLS handshake: type 22, version 3.0 to 3.4.
        count(Counter::SocketTls);
        FOREIGN
    } else {
        return false;
    };
    let _full = CONNECTIONS.insert(cookie, what, 0);
    what == HTTP
}

/// Writes a record with up to `most` of the bytes that were moved.
#[inline(always)]
pub(super) fn emit(record: &Socket, place: Place, most: u64) {
    with_scratch(|scratch| {
        let base = scratch.as_mut_ptr();
        let wanted = if record.result > 0 { record.result as u64 } else { 0 };
        let wanted = if wanted > most { most } else { wanted };
        let mut captured = opaque(if most == 0 { 0 } else { capture(scratch, place, wanted) });
        if captured > SEND_BYTES as u64 {
            captured = SEND_BYTES as u64;
        }
        // SAFETY: the slot has room for the fixed part and twice the bytes of a send.
        unsafe {
            base.cast::<Socket>().write_unaligned(Socket { captured: captured as u32, ..*record });
            output(Ring::Vital, base.cast_const().cast(), size_of::<Socket>() as u64 + captured);
        }
    });
}

/// Copies bytes of user space behind the fixed part; returns how many.
#[inline(always)]
fn capture(scratch: &mut ScratchBytes, place: Place, wanted: u64) -> u64 {
    match place {
        Place::Flat(at) => copy(scratch, 0, at, wanted),
        Place::Parts { at, count } => {
            let mut done = 0;
            let mut index = 0;
            while index < PARTS {
                if index >= count || done >= wanted {
                    break;
                }
                let Some([from, bytes]) = read_user::<[u64; 2]>(at + index * 16) else { break };
                let left = wanted - done;
                let bytes = if bytes > left { left } else { bytes };
                if copy(scratch, done, from, bytes) != bytes {
                    break;
                }
                done += bytes;
                index += 1;
            }
            done
        }
        Place::Unknown => 0,
    }
}

/// Copies up to [`SEND_BYTES`]; returns how many, 0 (counted) where they cannot be read.
#[inline(always)]
fn copy(scratch: &mut ScratchBytes, at: u64, from: u64, bytes: u64) -> u64 {
    let at = opaque(at) & (SEND_BYTES as u64 - 1);
    let mut bytes = opaque(bytes);
    if bytes > SEND_BYTES as u64 {
        bytes = SEND_BYTES as u64;
    }
    if bytes == 0 {
        return 0;
    }
    // SAFETY: `at` is below SEND_BYTES and `bytes` at most that: twice that many follow the fixed part.
    let failed = unsafe {
        generated::bpf_probe_read_user(
            scratch.as_mut_ptr().add(size_of::<Socket>()).add(at as usize).cast(),
            bytes as u32,
            from as *const _,
        )
    };
    if failed != 0 {
        count(Counter::SocketUnreadable);
        return 0;
    }
    bytes
}

//! `socket`: hooks below the system calls, where every way of reading and writing a socket comes by, and nothing else.
//! Kernels before 6.3 have none there: on these, [`syscall`] looks at the system calls themselves.
//!
//! A connection (TCP, or between processes of this machine) becomes interesting when a target receives the beginning of an
//! HTTP request on it; of others nothing is copied. Bytes are captured after they were moved: how many is known then, and
//! the pages are there. Where they are is known from the system call that the thread is in. With an io_uring the kernel
//! also moves bytes on its own, at the end of any system call: these are counted, not seen.

use aya_ebpf::{
    bindings::BPF_SK_STORAGE_GET_F_CREATE,
    btf_maps::SkStorage,
    helpers::{bpf_get_current_task_btf, generated},
    macros::{btf_map, btf_tracepoint, map},
    maps::HashMap,
    programs::BtfTracePointContext,
};
use tracer_abi::{
    Counter, Kind, Socket, TARGET_RING, Target,
    socket::{RECV, RECV_BYTES, SEND, SEND_BYTES, STATE, STATE_CLOSE, STATE_CLOSE_WAIT, STATE_LISTEN, WIRE},
};

use super::common::{
    Ring, ScratchBytes, TARGETS, count, current_target, header, member, now_ns, offset, opaque, output,
    read_kernel, read_user, with_scratch,
};

/// What is known of each socket; it is gone with it. In order: [`HTTP`], [`FOREIGN`] or 0; when its first unread bytes reached
/// it (CLOCK_MONOTONIC ns) or 0; 1 while bytes were handed over that are not on the wire.
#[btf_map]
static SOCKETS: SkStorage<Known> = SkStorage::new();
type Known = [u64; 3];
const WHAT: usize = 0;
const ARRIVED_NS: usize = 1;
const HELD: usize = 2;
/// Local ports on which arrivals are noted.
#[map]
static PORTS: HashMap<u16, u32> = HashMap::with_max_entries(1024, 0);

/// Requests come on it.
pub(super) const HTTP: u64 = 1;
/// TLS or HTTP/2: counted once.
const FOREIGN: u64 = 2;

const MSG_PEEK: i32 = 2;
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
    let Some(known) = followed(sk) else { return 0 };
    let (syscall, place) = place(&target, sk);
    if matches!(place, Place::Unknown) {
        count(unseen(&target, syscall));
    }
    let mut record = Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now, &target, tgid, tid),
        cookie: cookie(sk),
        result: i64::from(result),
        action: SEND,
        syscall,
        local_port: local_port(sk),
        ..Socket::default()
    };
    sequence(&mut record, sk);
    if record.sent_until != record.wire_until {
        known[HELD] = 1;
    }
    emit(&record, place, SEND_BYTES as u64);
    0
}

#[btf_tracepoint(function = "sock_recv_length")]
fn socket_recv(ctx: BtfTracePointContext) -> i32 {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return 0 };
    let (sk, result, flags): (u64, i32, i32) = (ctx.arg(0), ctx.arg(1), ctx.arg(2));
    if result < 0 || flags & MSG_PEEK != 0 || !is_stream(sk) {
        return 0;
    }
    let (syscall, place) = place(&target, sk);
    if matches!(place, Place::Unknown) && result > 0 {
        count(unseen(&target, syscall));
    }
    let mut found = known(sk, 0);
    if found.as_ref().is_none_or(|known| known[WHAT] == 0) {
        let begins = if result > 0 { begins_request(place, result as u64) } else { 0 };
        if begins == 0 {
            return 0;
        }
        found = known(sk, BPF_SK_STORAGE_GET_F_CREATE);
        if let Some(known) = &mut found {
            known[WHAT] = begins;
        }
    }
    let Some(known) = found.filter(|known| known[WHAT] == HTTP) else { return 0 };
    let arrived_ns = known[ARRIVED_NS];
    known[ARRIVED_NS] = 0;
    let record = Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now, &target, tgid, tid),
        cookie: cookie(sk),
        arrived_ns,
        result: i64::from(result),
        action: RECV,
        syscall,
        local_port: local_port(sk),
        ..Socket::default()
    };
    emit(&record, place, RECV_BYTES as u64);
    0
}

#[btf_tracepoint(function = "inet_sock_set_state")]
fn socket_state(ctx: BtfTracePointContext) -> i32 {
    let (sk, new): (u64, i32) = (ctx.arg(0), ctx.arg(2));
    let state = i64::from(new);
    if state == STATE_LISTEN && current_target().is_some() {
        // A server that begins: when its first request arrives is wanted, too.
        let _full = PORTS.insert(local_port(sk) as u16, 1, 0);
    }
    if state != STATE_CLOSE && state != STATE_CLOSE_WAIT {
        return 0;
    }
    let Some(known) = followed(sk) else { return 0 };
    if state == STATE_CLOSE {
        known[WHAT] = 0;
        known[HELD] = 0;
    }
    emit(&Socket { result: state, ..unnamed(sk, STATE) }, Place::Unknown, 0);
    0
}

#[btf_tracepoint(function = "sk_data_ready")]
fn socket_ready(ctx: BtfTracePointContext) -> i32 {
    let sk: u64 = ctx.arg(0);
    let port = local_port(sk) as u16;
    // SAFETY: only whether there is an entry is looked at.
    if unsafe { PORTS.get(port) }.is_some()
        && let Some(known) = known(sk, BPF_SK_STORAGE_GET_F_CREATE)
        // The first unread arrival wins.
        && known[ARRIVED_NS] == 0
    {
        known[ARRIVED_NS] = now_ns();
    }
    0
}

/// Each incoming segment, before it is processed: what it acknowledged has let held bytes go since the last one.
#[btf_tracepoint(function = "tcp_probe")]
fn socket_wire(ctx: BtfTracePointContext) -> i32 {
    let sk: u64 = ctx.arg(0);
    let Some(known) = followed(sk) else { return 0 };
    if known[HELD] == 0 {
        return 0;
    }
    let mut record = unnamed(sk, WIRE);
    sequence(&mut record, sk);
    if record.sent_until == record.wire_until {
        known[HELD] = 0;
    }
    emit(&record, Place::Unknown, 0);
    0
}

#[btf_tracepoint(function = "io_uring_create")]
fn socket_ring(_ctx: BtfTracePointContext) -> i32 {
    let Some((_, tgid, _)) = current_target() else { return 0 };
    count(Counter::RingsMade);
    if let Some(target) = TARGETS.get_ptr_mut(tgid) {
        // SAFETY: a valid map value; the flag is only ever set.
        unsafe { (*target).flags |= TARGET_RING };
    }
    0
}

/// Whether it is of TCP, or between processes of this machine.
#[inline(always)]
fn is_stream(sk: u64) -> bool {
    // SAFETY: `sk` is the tracepoint's socket.
    unsafe {
        !generated::bpf_skc_to_tcp_sock(sk as *mut _).is_null()
            || !generated::bpf_skc_to_unix_sock(sk as *mut _).is_null()
    }
}

/// What is known of a socket; of flags there is one, which makes that where nothing is.
#[inline(always)]
fn known<'a>(sk: u64, flags: u32) -> Option<&'a mut Known> {
    let map = (&raw const SOCKETS).cast_mut().cast();
    // SAFETY: `sk` is the tracepoint's socket, and the helper returns null or a value of the map, which lives as long as
    // the program runs. Other CPUs may change its words, each of which means something by itself.
    unsafe {
        generated::bpf_sk_storage_get(map, sk as *mut _, core::ptr::null_mut(), flags.into())
            .cast::<Known>()
            .as_mut()
    }
}

/// What is known of a socket on which requests come.
#[inline(always)]
fn followed<'a>(sk: u64) -> Option<&'a mut Known> {
    known(sk, 0).filter(|known| known[WHAT] == HTTP)
}

#[inline(always)]
fn cookie(sk: u64) -> u64 {
    // SAFETY: `sk` is the tracepoint's socket.
    unsafe { generated::bpf_get_socket_cookie(sk as *mut _) }
}

#[inline(always)]
fn local_port(sk: u64) -> u32 {
    // SAFETY: `sk` is the tracepoint's socket.
    u32::from(unsafe { member::<u16>(sk, offset!(sock_num)) })
}

/// A record of what no process does.
#[inline(always)]
fn unnamed(sk: u64, action: u32) -> Socket {
    let nobody = Target { start_ticks: 0, flags: 0, epoch: 0 };
    Socket {
        header: header(Kind::Socket, 0, size_of::<Socket>(), now_ns(), &nobody, 0, 0),
        cookie: cookie(sk),
        action,
        local_port: local_port(sk),
        ..Socket::default()
    }
}

/// How far a TCP connection has sent; of others nothing.
#[inline(always)]
fn sequence(record: &mut Socket, sk: u64) {
    // SAFETY: `sk` is the tracepoint's socket.
    let tcp = unsafe { generated::bpf_skc_to_tcp_sock(sk as *mut _) } as u64;
    if tcp == 0 {
        return;
    }
    // SAFETY: a TCP socket, as the helper that gave it says.
    unsafe {
        record.sent_until = member(tcp, offset!(tcp_write_seq));
        record.wire_until = member(tcp, offset!(tcp_snd_nxt));
    }
}

/// The system call that the current thread is in, and where its bytes are. Words of the saved registers, x86-64: 15 the
/// number, 14, 13 and 12 the first to the third argument.
#[inline(always)]
fn place(target: &Target, sk: u64) -> (u32, Place) {
    // SAFETY: helpers without preconditions; the registers of the current task are there.
    let regs = unsafe { generated::bpf_task_pt_regs(bpf_get_current_task_btf().cast()) } as *const u64;
    // SAFETY: as above; the verifier knows the type.
    let (number, first, second, third) =
        unsafe { (*regs.add(15), *regs.add(14), *regs.add(13), *regs.add(12)) };
    if target.flags & TARGET_RING != 0 && socket_of(first) != sk {
        return (number as u32, Place::Unknown);
    }
    (number as u32, place_of(number, second, third))
}

/// The socket (`struct sock`) of a descriptor of the current task.
#[inline(always)]
fn socket_of(descriptor: u64) -> u64 {
    let follow = |from: u64, offset: u32| read_kernel::<u64>(from + u64::from(offset));
    // SAFETY: a helper without preconditions.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let table = follow(follow(task, offset!(task_files)), offset!(files_fdt));
    let file = read_kernel::<u64>(follow(table, offset!(fdt_fd)) + (descriptor & 0xffff_ffff) * 8);
    follow(follow(file, offset!(file_private_data)), offset!(socket_sk))
}

/// What counts bytes that moved out of sight.
#[inline(always)]
fn unseen(target: &Target, syscall: u32) -> Counter {
    // sendfile, splice, recvmmsg, sendmmsg
    match syscall {
        40 | 275 | 299 | 307 => Counter::SocketUnseen,
        _ if target.flags & TARGET_RING != 0 => Counter::SocketRing,
        _ => Counter::SocketUnseen,
    }
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

/// What begins with the bytes that were received: [`HTTP`], [`FOREIGN`] (counted), 0 where that is not certain.
#[inline(always)]
pub(super) fn begins_request(place: Place, bytes: u64) -> u64 {
    let at = match place {
        Place::Flat(at) => at,
        Place::Parts { at, .. } => read_user(at).unwrap_or(0),
        Place::Unknown => 0,
    };
    let Some(first) = read_user::<u32>(at) else { return 0 };
    // Fewer bytes than four: only those that were received count.
    let mask = match bytes {
        1 => 0xff,
        2 => 0xffff,
        3 => 0x00ff_ffff,
        _ => 0xffff_ffff,
    };
    let begins = |word: &[u8; 4]| first & mask == u32::from_le_bytes(*word) & mask;
    if begins(b"GET ")
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
        0
    }
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

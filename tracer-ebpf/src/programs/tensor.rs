//! `tensor`: what a program asks an engine or its execution context, as a mark once it is answered.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_pid_tgid,
        generated::{self, bpf_get_attach_cookie},
    },
    macros::{map, uprobe, uretprobe},
    maps::LruHashMap,
    programs::{ProbeContext, RetProbeContext},
};
use tracer_abi::{
    Counter, Header, Kind, MAX_THREADS, call,
    mark::{DataType, FIXED_BYTES, MAX_NVTX_BYTES, Made, MarkHeader, MarkKind, Shape, VERSION},
    shape::is_wide,
    tensor::{Question, question},
};

use super::{
    common::{
        Ring, ScratchBytes, count, count_hit, current_target, header, now_ns, opaque, output, read_user,
        with_scratch,
    },
    shape::read_dims,
};

/// A question that is not answered yet.
#[repr(C)]
#[derive(Clone, Copy)]
struct Asked {
    object: u64,
    question: u32,
    name_bytes: u32,
    name: [u8; MAX_NVTX_BYTES],
}

/// By thread: these functions call none of each other.
#[map]
static ASKED: LruHashMap<u32, Asked> = LruHashMap::with_max_entries(MAX_THREADS, 0);

#[uprobe]
fn tensor(ctx: ProbeContext) -> u32 {
    ask(&ctx);
    0
}

#[uretprobe]
fn tensor_return(ctx: RetProbeContext) -> u32 {
    answer(&ctx);
    0
}

#[inline(always)]
fn ask(ctx: &ProbeContext) {
    let Some((_, _, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context, the user's registers.
    let (cookie, first, second, third) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rdi, (*ctx.regs).rsi, (*ctx.regs).rdx) };
    count_hit(call::from_cookie(cookie).0);
    let question = question(cookie);
    let (object, name) = if question == Question::Shape as u32 { (second, third) } else { (first, second) };
    let mut asked = Asked { object, question, name_bytes: 0, name: [0; MAX_NVTX_BYTES] };
    if question != Question::Context as u32 {
        // SAFETY: as long as said; the helper checks the source.
        let read = unsafe {
            generated::bpf_probe_read_user_str(
                asked.name.as_mut_ptr().cast(),
                MAX_NVTX_BYTES as u32,
                name as *const c_void,
            )
        };
        // Without its end; one that cannot be read is empty.
        asked.name_bytes = if read > 0 { read as u32 - 1 } else { 0 };
    }
    if ASKED.insert(tid, asked, 0).is_err() {
        count(Counter::OpenCallsFull);
    }
}

#[inline(always)]
fn answer(ctx: &RetProbeContext) {
    let now = now_ns();
    let tid = bpf_get_current_pid_tgid() as u32;
    // SAFETY: `ctx` is this program's context, the user's registers after the return.
    let (cookie, result) = unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rax) };
    let Some(asked) = ASKED.get_ptr(tid) else { return };
    // SAFETY: a valid map value of this thread.
    let asked = unsafe { &*asked };
    let Some((target, tgid, _)) = current_target() else { return };
    if asked.question != question(cookie) {
        return;
    }
    with_scratch(|scratch| {
        let mut name_bytes = opaque(u64::from(asked.name_bytes));
        if name_bytes > MAX_NVTX_BYTES as u64 {
            name_bytes = MAX_NVTX_BYTES as u64;
        }
        let Some(fixed) = write(scratch, asked, result, cookie, name_bytes as u32) else {
            count(Counter::MarkUnreadable);
            return;
        };
        let bytes = fixed + name_bytes as usize;
        let base = scratch.as_mut_ptr();
        // SAFETY: the scratch slot has room for the longest mark; its places are aligned to 8 bytes.
        unsafe {
            generated::bpf_probe_read_kernel(
                base.add(FIXED_BYTES + fixed).cast(),
                name_bytes as u32,
                asked.name.as_ptr().cast(),
            );
            base.cast::<Header>().write(header(Kind::Mark, 0, FIXED_BYTES + bytes, now, &target, tgid, tid));
            base.add(40).cast::<[u32; 2]>().write([bytes as u32, 0]);
            (*base.add(FIXED_BYTES).cast::<MarkHeader>()).size = bytes as u32;
            output(Ring::Vital, base.cast_const().cast(), (FIXED_BYTES + fixed) as u64 + name_bytes);
        }
    });
    let _gone = ASKED.remove(tid);
}

/// Writes the payload before its name; returns its length. `None`: the answer could not be read.
#[inline(always)]
fn write(
    scratch: &mut ScratchBytes,
    asked: &Asked,
    result: u64,
    cookie: u64,
    name_bytes: u32,
) -> Option<usize> {
    // SAFETY: the scratch slot has room for the longest mark, and this place is aligned to 8 bytes.
    let payload = unsafe { scratch.as_mut_ptr().add(FIXED_BYTES) };
    let object = asked.object;
    let header = |kind: MarkKind| MarkHeader { version: VERSION, kind: kind as u16, size: 0 };
    if asked.question == Question::DataType as u32 {
        let data_type = result as u32;
        let mark = DataType { header: header(MarkKind::DataType), object, data_type, name_bytes };
        // SAFETY: as above.
        unsafe { payload.cast::<DataType>().write(mark) };
        return Some(size_of::<DataType>());
    }
    if asked.question == Question::Shape as u32 {
        let (count, dims) = read_dims(result, is_wide(cookie))?;
        let header = header(MarkKind::Shape);
        let mark = Shape { header, object, dims, count, name_bytes: name_bytes as u16, asked: 1 };
        // SAFETY: as above.
        unsafe { payload.cast::<Shape>().write(mark) };
        return Some(size_of::<Shape>());
    }
    let made: u64 = read_user(result.wrapping_add(8))?;
    // SAFETY: as above.
    unsafe { payload.cast::<Made>().write(Made { header: header(MarkKind::Made), maker: object, made }) };
    Some(size_of::<Made>())
}

//! `open`: a target calls a function that opens a file whose name is that of an engine.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::{self, bpf_get_attach_cookie},
    macros::uprobe,
    programs::ProbeContext,
};
use tracer_abi::{
    Kind, Open, call,
    open::{MAX_PATH_BYTES, SUFFIXES, WORKING_DIRECTORY, has_folder},
};

use super::common::{
    Ring, count_hit, current_target, header, now_ns, opaque, output, read_kernel, with_scratch,
};

const FIXED: usize = size_of::<Open>();
/// The longest suffix, a byte of name before it, and the end.
const SHORTEST: u64 = 9;

#[uprobe]
fn file_open(ctx: ProbeContext) -> u32 {
    record(&ctx);
    0
}

#[inline(always)]
fn record(ctx: &ProbeContext) {
    let Some((target, tgid, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context, the user's registers.
    let (cookie, first, second) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rdi, (*ctx.regs).rsi) };
    count_hit(call::from_cookie(cookie).0);
    let (folder, path) = if has_folder(cookie) { (first as i32, second) } else { (WORKING_DIRECTORY, first) };
    with_scratch(|scratch| {
        let base = scratch.as_mut_ptr();
        // SAFETY: the scratch slot has room for the record and the path.
        let read = unsafe {
            generated::bpf_probe_read_user_str(
                base.add(FIXED).cast(),
                MAX_PATH_BYTES as u32,
                path as *const core::ffi::c_void,
            )
        };
        // With its end. One that cannot be read is not in memory yet, as is nobody's who has just put it together.
        let bytes = opaque(if read < 0 { 0 } else { read as u64 });
        if bytes < SHORTEST || bytes > MAX_PATH_BYTES as u64 {
            return;
        }
        // SAFETY: the eight bytes before the path's end, which lie in the slot: there are nine at least.
        let last: u64 =
            read_kernel(unsafe { base.add(FIXED).add(bytes as usize - SHORTEST as usize) } as u64);
        if !is_engine(last) {
            return;
        }
        let path_bytes = bytes - 1;
        // SAFETY: the scratch slot has room; its places are aligned to 8 bytes.
        unsafe {
            base.cast::<Open>().write(Open {
                header: header(Kind::Open, 0, FIXED + path_bytes as usize, now_ns(), &target, tgid, tid),
                path_bytes: path_bytes as u32,
                folder,
            });
            output(Ring::Vital, base.cast_const().cast(), FIXED as u64 + path_bytes);
        }
    });
}

/// Whether a path whose last eight bytes are these has an engine's name.
#[inline(always)]
fn is_engine(last: u64) -> bool {
    let mut index = 0;
    while index < SUFFIXES.len() {
        let suffix = SUFFIXES[index].as_bytes();
        let mut wanted = 0u64;
        let mut at = 0;
        while at < suffix.len() {
            wanted = wanted << 8 | suffix[suffix.len() - 1 - at] as u64;
            at += 1;
        }
        if last >> (8 * (8 - suffix.len())) == wanted {
            return true;
        }
        index += 1;
    }
    false
}

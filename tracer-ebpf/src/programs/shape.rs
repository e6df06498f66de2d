//! `shape`: the shape that a program sets for an engine's input, as a mark.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::{self, bpf_get_attach_cookie},
    macros::uprobe,
    programs::ProbeContext,
};
use tracer_abi::{
    Counter, Header, Kind, call,
    mark::{FIXED_BYTES, MAX_DIMS, MAX_NVTX_BYTES, MarkHeader, MarkKind, Shape, VERSION},
    shape::is_wide,
};

use super::common::{
    Ring, count, count_hit, current_target, header, now_ns, opaque, output, read_user, with_scratch,
};

const PAYLOAD: usize = size_of::<Shape>();

#[uprobe]
fn shape(ctx: ProbeContext) -> u32 {
    record(&ctx);
    0
}

#[inline(always)]
fn record(ctx: &ProbeContext) {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context, the user's registers.
    let (cookie, object, name, dims) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rdi, (*ctx.regs).rsi, (*ctx.regs).rdx) };
    count_hit(call::from_cookie(cookie).0);
    let Some((count_of_dims, dims)) = read_dims(dims, is_wide(cookie)) else {
        count(Counter::MarkUnreadable);
        return;
    };
    let shape = Shape { object, dims, count: count_of_dims, ..Shape::default() };
    with_scratch(|scratch| {
        let base = scratch.as_mut_ptr();
        // SAFETY: the scratch slot has room for the longest mark.
        let read = unsafe {
            generated::bpf_probe_read_user_str(
                base.add(FIXED_BYTES + PAYLOAD).cast(),
                MAX_NVTX_BYTES as u32,
                name as *const core::ffi::c_void,
            )
        };
        // Without its end; one that cannot be read is empty.
        let mut name_bytes = opaque(if read > 0 { read as u64 - 1 } else { 0 });
        if name_bytes > MAX_NVTX_BYTES as u64 {
            name_bytes = MAX_NVTX_BYTES as u64;
        }
        let bytes = PAYLOAD + name_bytes as usize;
        let mark = MarkHeader { version: VERSION, kind: MarkKind::Shape as u16, size: bytes as u32 };
        // SAFETY: the scratch slot has room for all of it; its places are aligned to 8 bytes.
        unsafe {
            base.cast::<Header>().write(header(Kind::Mark, 0, FIXED_BYTES + bytes, now, &target, tgid, tid));
            base.add(40).cast::<[u32; 2]>().write([bytes as u32, 0]);
            base.add(FIXED_BYTES).cast::<Shape>().write(Shape {
                header: mark,
                name_bytes: name_bytes as u16,
                ..shape
            });
            output(Ring::Vital, base.cast_const().cast(), (FIXED_BYTES + PAYLOAD) as u64 + name_bytes);
        }
    });
}

/// Reads `nvinfer1::Dims`: a count, then the dimensions, aligned as their type is. `None` where that fails.
#[inline(always)]
pub(crate) fn read_dims(address: u64, is_wide: bool) -> Option<(u32, [i64; MAX_DIMS])> {
    let count = read_user::<u32>(address)?;
    let mut dims = [0; MAX_DIMS];
    if is_wide {
        if let Some(wide) = read_user::<[i64; MAX_DIMS]>(address.wrapping_add(8)) {
            dims = wide;
        }
    } else if let Some(narrow) = read_user::<[i32; MAX_DIMS]>(address.wrapping_add(4)) {
        let mut at = 0;
        while at < MAX_DIMS {
            dims[at] = narrow[at] as i64;
            at += 1;
        }
    }
    Some((count, dims))
}

//! `mark`: copies the payload of a mark, which the program put on its own stack.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::{self, bpf_get_attach_cookie},
    macros::uprobe,
    programs::ProbeContext,
};
use aya_log_ebpf::debug;
use tracer_abi::{
    Counter, Header, Kind, call,
    call_stack::NO_STACK,
    mark::{FIXED_BYTES, MAX_BYTES, MarkHeader, MarkKind},
};

use super::{
    call_stack,
    common::{Ring, count, count_hit, current_target, header, now_ns, opaque, output, with_scratch},
};

#[uprobe]
fn mark(ctx: ProbeContext) -> u32 {
    record(&ctx);
    0
}

#[inline(always)]
fn record(ctx: &ProbeContext) {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context.
    let (point, _) = call::from_cookie(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
    count_hit(point);
    // SAFETY: the context of a uprobe is the user's registers.
    let (address, bytes, kind, sp) =
        unsafe { ((*ctx.regs).rdi, (*ctx.regs).rsi, (*ctx.regs).rdx, (*ctx.regs).rsp) };
    if bytes < size_of::<MarkHeader>() as u64 || bytes > MAX_BYTES as u64 {
        count(Counter::MarkBadSize);
        debug!(ctx, "mark of {} bytes refused", bytes);
        return;
    }
    // What hands output over may do so too early: whoever looks into that asks from where.
    let stack =
        if kind == MarkKind::Token as u64 { call_stack::key_of_mark(point, sp, tid, now) } else { NO_STACK };
    with_scratch(|scratch| {
        let mut bytes = opaque(bytes);
        if bytes > MAX_BYTES as u64 {
            bytes = MAX_BYTES as u64;
        }
        let base = scratch.as_mut_ptr();
        // SAFETY: the scratch slot has room for the header, the fixed part and MAX_BYTES of payload.
        unsafe {
            base.cast::<Header>().write(header(
                Kind::Mark,
                0,
                FIXED_BYTES + bytes as usize,
                now,
                &target,
                tgid,
                tid,
            ));
            base.add(40).cast::<[u32; 2]>().write([bytes as u32, stack]);
            if generated::bpf_probe_read_user(
                base.add(FIXED_BYTES).cast(),
                bytes as u32,
                address as *const core::ffi::c_void,
            ) != 0
            {
                count(Counter::MarkUnreadable);
                return;
            }
            output(Ring::Vital, base.cast_const().cast(), FIXED_BYTES as u64 + bytes);
        }
    });
}

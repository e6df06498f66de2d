//! `sample`: a target thread is on the CPU when the sampling clock fires.

use aya_ebpf::{EbpfContext, Global, macros::perf_event, programs::PerfEventContext};
use tracer_abi::{
    Header, Kind,
    sample::{FIXED_BYTES, KERNEL_MODE},
};

use super::{
    common::{Ring, current_target, header, now_ns, output},
    unwind::{self, record_bytes},
};

#[unsafe(no_mangle)]
static SAMPLE_PERIOD_NS: Global<u64> = Global::new(0);

#[perf_event]
fn sample(ctx: PerfEventContext) -> u32 {
    record(&ctx);
    0
}

#[inline(always)]
fn record(ctx: &PerfEventContext) {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return };
    // SAFETY: `ctx` is this program's context; the low two bits of cs are the privilege level.
    let kernel_mode = unsafe { (*ctx.ctx).regs.cs } & 3 == 0;
    // SAFETY: `ctx` is the context of this program.
    let Some(walk) =
        (unsafe { unwind::walk(ctx.as_ptr(), unwind::SAMPLE, kernel_mode, (&target, tgid, tid)) })
    else {
        return;
    };
    let head = walk.head;
    let size = record_bytes(FIXED_BYTES, &head);
    let flags = if kernel_mode { KERNEL_MODE } else { 0 };
    let base = walk.fixed.as_mut_ptr();
    // SAFETY: the fixed part of a sample and then its stack are at the beginning of a walk, which is longer than any
    // record.
    unsafe {
        base.cast::<Header>().write(header(Kind::Sample, flags, size as usize, now, &target, tgid, tid));
        base.add(40).cast::<u64>().write(SAMPLE_PERIOD_NS.load());
        base.add(48).cast::<tracer_abi::stack::StackHead>().write(head);
        output(Ring::Bulk, base.cast_const().cast(), size);
    }
}

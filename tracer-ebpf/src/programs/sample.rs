//! `sample`: a target thread is on the CPU when the sampling clock fires.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext, Global, bindings::BPF_F_USER_STACK, helpers::generated::bpf_get_stack, macros::perf_event,
    programs::PerfEventContext,
};
use tracer_abi::{
    Counter, Header, Kind, MAX_FRAMES,
    sample::{FIXED_BYTES, KERNEL_MODE},
};

use super::common::{Ring, count, current_target, header, now_ns, output, with_scratch};

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
    with_scratch(|scratch| {
        let base = scratch.as_mut_ptr();
        // SAFETY: the scratch slot is longer than a whole `Sample`.
        unsafe {
            let (kernel, user) = stacks(ctx.as_ptr(), base.add(FIXED_BYTES), kernel_mode);
            let size = FIXED_BYTES + 8 * (kernel + user) as usize;
            let flags = if kernel_mode { KERNEL_MODE } else { 0 };
            base.cast::<Header>().write(header(Kind::Sample, flags, size, now, &target, tgid, tid));
            base.add(40).cast::<u64>().write(SAMPLE_PERIOD_NS.load());
            base.add(48).cast::<[u16; 4]>().write([kernel as u16, user as u16, 0, 0]);
            output(Ring::Bulk, base.cast_const().cast(), size as u64);
        }
    });
}

/// Writes kernel and then user frames at `stack`; returns their numbers.
///
/// # Safety
/// `stack` has room for [`MAX_FRAMES`] addresses, and `ctx` is the context of the running program.
#[inline(always)]
pub(crate) unsafe fn stacks(ctx: *mut c_void, stack: *mut u8, with_kernel: bool) -> (u32, u32) {
    const HALF: u32 = (MAX_FRAMES as u32 / 2) * 8;
    let mut kernel = 0u32;
    if with_kernel {
        // SAFETY: HALF bytes fit; see the caller's promise.
        let bytes = unsafe { bpf_get_stack(ctx, stack.cast(), HALF, 0) };
        if bytes > 0 {
            kernel = bytes as u32 / 8;
        }
    }
    let mut kernel = core::hint::black_box(kernel);
    if kernel > HALF / 8 {
        kernel = HALF / 8;
    }
    // SAFETY: kernel frames take HALF bytes at most, so as many again fit behind them.
    let bytes = unsafe {
        bpf_get_stack(ctx, stack.add(8 * kernel as usize).cast(), HALF, u64::from(BPF_F_USER_STACK))
    };
    let mut user = 0u32;
    if bytes > 0 {
        user = bytes as u32 / 8;
    } else {
        count(Counter::UserStackFailed);
    }
    let mut user = core::hint::black_box(user);
    if user > HALF / 8 {
        user = HALF / 8;
    }
    (kernel, user)
}

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

use super::common::{Ring, count, current_target, header, now_ns, opaque, output, with_scratch};

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
            let size = record_bytes(FIXED_BYTES, kernel, user);
            let flags = if kernel_mode { KERNEL_MODE } else { 0 };
            base.cast::<Header>().write(header(Kind::Sample, flags, size as usize, now, &target, tgid, tid));
            base.add(40).cast::<u64>().write(SAMPLE_PERIOD_NS.load());
            base.add(48).cast::<[u16; 4]>().write([kernel as u16, user as u16, 0, 0]);
            output(Ring::Bulk, base.cast_const().cast(), size);
        }
    });
}

/// Writes kernel and then user frames at `stack`; returns their numbers.
///
/// # Safety
/// `stack` has room for [`MAX_FRAMES`] addresses, and `ctx` is the context of the running program.
#[inline(always)]
pub(crate) unsafe fn stacks(ctx: *mut c_void, stack: *mut u8, with_kernel: bool) -> (u64, u64) {
    const HALF: u64 = MAX_FRAMES as u64 / 2;
    let mut kernel = 0;
    if with_kernel {
        // SAFETY: HALF frames fit; see the caller's promise.
        kernel = opaque(unsafe { bpf_get_stack(ctx, stack.cast(), HALF as u32 * 8, 0) }.max(0) as u64 / 8);
    }
    if kernel > HALF {
        kernel = HALF;
    }
    // SAFETY: kernel frames take HALF at most, so as many again fit behind them.
    let bytes = unsafe {
        let behind = stack.add(8 * kernel as usize);
        bpf_get_stack(ctx, behind.cast(), HALF as u32 * 8, u64::from(BPF_F_USER_STACK))
    };
    if bytes <= 0 {
        count(Counter::UserStackFailed);
    }
    (kernel, bytes.max(0) as u64 / 8)
}

/// Bytes of a record with a stack, in bounds that the verifier can see.
#[inline(always)]
pub(crate) fn record_bytes(fixed: usize, kernel: u64, user: u64) -> u64 {
    let mut frames = opaque(kernel + user);
    if frames > MAX_FRAMES as u64 {
        frames = MAX_FRAMES as u64;
    }
    fixed as u64 + 8 * frames
}

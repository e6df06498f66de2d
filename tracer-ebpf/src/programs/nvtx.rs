//! `nvtx`: functions of NVTX's shared library, as marks that the injected library would have made.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::{self, bpf_get_attach_cookie},
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use tracer_abi::{
    Counter, Header, Kind, call,
    mark::{
        FIXED_BYTES, MAX_NVTX_BYTES, MarkHeader, MarkKind, NVTX_END, NVTX_PAYLOAD_F32, NVTX_START,
        NVTX_STARTED, Nvtx, VERSION,
    },
    nvtx::Function,
};

use super::common::{
    Ring, count, count_hit, current_target, header, now_ns, opaque, output, read_user, with_scratch,
};

const PAYLOAD: usize = size_of::<Nvtx>();
/// `nvtxMessageType_t`: the message is a string.
const ASCII: u32 = 1;
/// Bytes of a `nvtxEventAttributes_t`.
const ATTRIBUTES: u64 = 48;

#[uprobe]
fn nvtx(ctx: ProbeContext) -> u32 {
    // SAFETY: `ctx` is this program's context, the user's registers.
    let (cookie, arguments) =
        unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), [(*ctx.regs).rdi, (*ctx.regs).rsi]) };
    let function = Function::from_cookie(cookie);
    let argument = |number: Option<u8>| match number {
        Some(0) => arguments[0],
        Some(_) => arguments[1],
        None => 0,
    };
    let mut text = argument(function.text);
    let (mut payload, mut payload_kind) = (0, 0);
    if function.attributes.is_some()
        && let Some(said) = read_user::<[u64; 6]>(argument(function.attributes))
        && said[0] >> 16 & 0xffff >= ATTRIBUTES
    {
        payload_kind = said[2] as u16;
        payload = said[3];
        if said[4] as u32 == ASCII {
            text = said[5];
        }
    }
    if payload_kind > NVTX_PAYLOAD_F32 {
        payload_kind = 0;
    }
    let domain = if function.has_domain { arguments[0] } else { 0 };
    let range = match function.action {
        NVTX_END => argument(function.range),
        // Its number comes when the function returns.
        NVTX_START => 0,
        _ => domain,
    };
    let said = Nvtx { range, payload, action: function.action, payload_kind, ..Nvtx::default() };
    emit(cookie, said, text);
    0
}

#[uretprobe]
fn nvtx_return(ctx: RetProbeContext) -> u32 {
    // SAFETY: as above, after the return.
    let (cookie, ret) = unsafe { (bpf_get_attach_cookie(ctx.as_ptr()), (*ctx.regs).rax) };
    emit(cookie, Nvtx { range: ret, action: NVTX_STARTED, ..Nvtx::default() }, 0);
    0
}

/// A mark with the string at `text`, if that is not null.
#[inline(always)]
fn emit(cookie: u64, said: Nvtx, text: u64) {
    let now = now_ns();
    let Some((target, tgid, tid)) = current_target() else { return };
    if said.action != NVTX_STARTED {
        count_hit(call::from_cookie(cookie).0);
    }
    with_scratch(|scratch| {
        let base = scratch.as_mut_ptr();
        let mut name_bytes = 0;
        if text != 0 {
            // SAFETY: the scratch slot has room for the longest mark.
            let read = unsafe {
                generated::bpf_probe_read_user_str(
                    base.add(FIXED_BYTES + PAYLOAD).cast(),
                    MAX_NVTX_BYTES as u32,
                    text as *const core::ffi::c_void,
                )
            };
            if read < 0 {
                count(Counter::MarkUnreadable);
            } else {
                // Without its end.
                name_bytes = (read as u64).saturating_sub(1);
            }
        }
        let mut name_bytes = opaque(name_bytes);
        if name_bytes > MAX_NVTX_BYTES as u64 {
            name_bytes = MAX_NVTX_BYTES as u64;
        }
        let bytes = PAYLOAD + name_bytes as usize;
        let mark = MarkHeader { version: VERSION, kind: MarkKind::Nvtx as u16, size: bytes as u32 };
        // SAFETY: the scratch slot has room for the header, the fixed part, the payload and the name; its places are
        // aligned to 8 bytes.
        unsafe {
            base.cast::<Header>().write(header(Kind::Mark, 0, FIXED_BYTES + bytes, now, &target, tgid, tid));
            base.add(40).cast::<[u32; 2]>().write([bytes as u32, 0]);
            base.add(FIXED_BYTES).cast::<Nvtx>().write(Nvtx {
                header: mark,
                name_bytes: name_bytes as u16,
                ..said
            });
            output(Ring::Vital, base.cast_const().cast(), (FIXED_BYTES + PAYLOAD) as u64 + name_bytes);
        }
    });
}

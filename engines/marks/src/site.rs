//! The probe site: one function whose first instruction is a nop that a tracer replaces.
//!
//! One site for all kinds of marks: whether anybody listens is then one byte to read, whatever is marked. What tells the
//! kinds apart is an argument, so that tracers that do not know payloads can filter by it.
//!
//! It is a USDT probe (`tracer:mark`), described by a note as systemtap's `sys/sdt.h` writes it, so that tracers find it
//! in stripped files. The note is not part of the loaded image; its addresses are final after linking. Both the site
//! and the note's base carry SHF_GNU_RETAIN, since no code refers to the base and linkers do not follow notes.

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    // 0f 1f 44 00 00: the nop that Linux 6.18 and later can turn into a call; all kernels emulate it.
    ".pushsection .text.tracer_mark_site,\"axR\",@progbits",
    ".balign 16",
    ".globl tracer_mark_site",
    ".hidden tracer_mark_site",
    ".type tracer_mark_site,@function",
    "tracer_mark_site:",
    ".byte 0x0f, 0x1f, 0x44, 0x00, 0x00",
    "ret",
    ".size tracer_mark_site, . - tracer_mark_site",
    ".popsection",
    note!("8@%rdi 8@%rsi 8@%rdx 8@%rcx"),
    options(att_syntax)
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.tracer_mark_site,\"axR\",@progbits",
    ".balign 16",
    ".globl tracer_mark_site",
    ".hidden tracer_mark_site",
    ".type tracer_mark_site,@function",
    "tracer_mark_site:",
    "nop",
    "ret",
    ".size tracer_mark_site, . - tracer_mark_site",
    ".popsection",
    note!("8@x0 8@x1 8@x2 8@x3"),
);

/// First byte of the site's nop while nobody probes it.
#[cfg(target_arch = "x86_64")]
const IDLE: u8 = 0x0f;
#[cfg(target_arch = "aarch64")]
const IDLE: u8 = 0x1f;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod imp {
    use tracer_abi::mark::MarkHeader;

    unsafe extern "C" {
        /// Does nothing: it exists to be probed.
        pub(super) safe fn tracer_mark_site(payload: *const u8, bytes: usize, kind: u64, number: u64);
    }

    #[inline(always)]
    pub(crate) fn listening() -> bool {
        let site = tracer_mark_site as *const () as *const u8;
        // SAFETY: the site is mapped and readable as long as this code is. The kernel may rewrite its bytes at any
        // time, hence the volatile read.
        unsafe { site.read_volatile() != super::IDLE }
    }

    #[inline(never)]
    pub(crate) fn hit(payload: &[u8]) {
        const KIND: usize = core::mem::offset_of!(MarkHeader, kind);
        let kind =
            payload.get(KIND..).and_then(|rest| rest.first_chunk()).map_or(0, |b| u16::from_ne_bytes(*b));
        // The request, or the batch id of a batch: whatever comes first after the header.
        let number = payload.get(size_of::<MarkHeader>()..).and_then(|rest| rest.first_chunk());
        let number = number.map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        tracer_mark_site(payload.as_ptr(), payload.len(), kind.into(), number);
    }
}

/// Other architectures have no site yet: nobody ever listens and marks do nothing.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod imp {
    #[inline(always)]
    pub(crate) fn listening() -> bool {
        false
    }

    pub(crate) fn hit(_payload: &[u8]) {}
}

pub(crate) use imp::{hit, listening};

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn site_is_an_aligned_nop_and_a_return() {
        let site = imp::tracer_mark_site as *const () as *const u8;
        assert_eq!(site as usize % 16, 0);
        // SAFETY: the site is six bytes long.
        let bytes = unsafe { core::slice::from_raw_parts(site, 6) };
        assert_eq!(bytes, [0x0f, 0x1f, 0x44, 0, 0, 0xc3]);
        assert!(!listening());
    }
}

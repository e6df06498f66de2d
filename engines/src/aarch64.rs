//! What is read from AArch64 code: the few encodings that the resolver meets, from the Arm Architecture Reference
//! Manual (C4.1).

use crate::Placement;

const NOP: u32 = 0xd503_201f;
const BTI_C: u32 = 0xd503_245f;
const PACIASP: u32 = 0xd503_233f;
const RET: u32 = 0xd65f_03c0;
const BYTES: usize = 4;

fn words(code: &[u8]) -> impl Iterator<Item = u32> {
    code.chunks_exact(BYTES).filter_map(|bytes| bytes.try_into().ok().map(u32::from_le_bytes))
}

/// The instructions without landing pads and the signing of the return address.
fn body(code: &[u8]) -> impl Iterator<Item = u32> {
    words(code).filter(|word| ![NOP, BTI_C, PACIASP].contains(word))
}

const fn destination(word: u32) -> usize {
    (word & 31) as usize
}

const fn source(word: u32) -> usize {
    (word >> 5 & 31) as usize
}

/// The signed 21-bit distance of `adr` and `adrp`.
fn distance(word: u32) -> i64 {
    let value = (word >> 5 & 0x7_ffff) << 2 | word >> 29 & 3;
    i64::from((value << 11) as i32 >> 11)
}

/// `adrp page; add register, page, #offset`, or `adr`, to a wanted address. A page stays known until another takes
/// its register: pages are kept in registers over calls, and a stale one can form a wrong address only by an `add` of
/// just the offset that the wanted address has in its page.
pub(crate) fn forms(code: &[u8], address: u64, wanted: impl Fn(u64) -> bool) -> bool {
    let mut pages = [None::<u64>; 32];
    for (at, word) in (address..).step_by(BYTES).zip(words(code)) {
        if word & 0x9f00_0000 == 0x9000_0000 {
            pages[destination(word)] = Some((at & !0xfff).wrapping_add_signed(distance(word) << 12));
        } else if word & 0x9f00_0000 == 0x1000_0000 {
            if wanted(at.wrapping_add_signed(distance(word))) {
                return true;
            }
        } else if word & 0xff80_0000 == 0x9100_0000 {
            let offset = u64::from(word >> 10 & 0xfff) << if word >> 22 & 1 == 1 { 12 } else { 0 };
            let formed = pages[source(word)].map(|page| page.wrapping_add(offset));
            if formed.is_some_and(&wanted) {
                return true;
            }
            if destination(word) == source(word) {
                pages[destination(word)] = None;
            }
        }
    }
    false
}

/// `ldr x0, [x0, #inner]; ldr v, [x0]; ldr f, [v, #slot]; br f`, also with the target moved to x16 before the jump.
pub(crate) fn forwards(code: &[u8]) -> bool {
    let mut body = body(code);
    let mut next = || body.next().unwrap_or(0);
    let is_load = |word: u32| word & 0xffc0_0000 == 0xf940_0000;
    let (inner, vtable, target) = (next(), next(), next());
    let loads = is_load(inner)
        && (source(inner), destination(inner)) == (0, 0)
        && vtable & 0xffff_ffe0 == 0xf940_0000
        && is_load(target)
        && source(target) == destination(vtable);
    let (mut jump, mut register) = (next(), destination(target));
    // mov x16, register
    if jump & 0xffe0_ffff == 0xaa00_03f0 && (jump >> 16 & 31) as usize == register {
        (jump, register) = (next(), 16);
    }
    loads && jump & 0xffff_fc1f == 0xd61f_0000 && source(jump) == register
}

/// `mov w0, #value; ret`, a value of more than 16 bits in two parts.
pub(crate) fn constant(code: &[u8]) -> Option<u32> {
    let mut body = body(code);
    let value = match body.next()? {
        // mov w0, wzr
        0x2a1f_03e0 => 0,
        word if word & 0xffe0_001f == 0x5280_0000 => word >> 5 & 0xffff,
        _ => return None,
    };
    match body.next()? {
        RET => Some(value),
        // movk w0, #part, lsl #16
        word if word & 0xffe0_001f == 0x72a0_0000 => {
            (body.next()? == RET).then_some((word >> 5 & 0xffff) << 16 | value)
        }
        _ => None,
    }
}

/// The class of the first instruction, after arch/arm64/kernel/probes/decode-insn.c: what reads the program counter is
/// emulated, the rest is single-stepped.
pub(crate) fn at(code: &[u8]) -> Placement {
    let Some(word) = words(code).next() else { return Placement::Stepped };
    let emulated = word & 0x1f00_0000 == 0x1000_0000 // adr, adrp
        || word & 0x7c00_0000 == 0x1400_0000 // b, bl
        || word & 0xff00_0010 == 0x5400_0000 // b.cond
        || word & 0x7c00_0000 == 0x3400_0000 // cbz, cbnz, tbz, tbnz
        || word & 0xff9f_fc1f == 0xd61f_0000 && word & 0x0060_0000 != 0x0060_0000 // br, blr, ret
        || word & 0xbf00_0000 == 0x1800_0000 // ldr literal
        || word & 0xff00_0000 == 0x9800_0000; // ldrsw literal
    if emulated { Placement::Emulated } else { Placement::Stepped }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    // The words are objdump's, from NVIDIA's libnvinfer_lean.so.11.
    #[test]
    fn an_address_in_two_parts() {
        // At 0x2080d20: adrp x27, 5c8000; ldr x0, [x2, #3176]; add x21, x27, #0x270
        let code = code(&[0x90ff_2a5b, 0xf946_3440, 0x9109_c375]);
        assert!(forms(&code, 0x208_0d20, |address| address == 0x5c_8270));
        assert!(!forms(&code, 0x208_0d20, |address| address == 0x5c_8000));
        // adr x0, .-4
        assert!(forms(&[0xe0, 0xff, 0xff, 0x10], 0x1000, |address| address == 0xffc));
    }

    #[test]
    fn a_forwarder() {
        let mut words = [0xf940_0800, 0xf940_0002, 0xf940_9042, 0xaa02_03f0, 0xd61f_0200];
        assert!(forwards(&code(&words)));
        assert!(forwards(&code(&[BTI_C, words[0], words[1], words[2], 0xd61f_0040])));
        // br x1
        words[4] = 0xd61f_0020;
        assert!(!forwards(&code(&words)));
        assert!(!forwards(&code(&words[..3])));
    }

    #[test]
    fn constants() {
        assert_eq!(constant(&code(&[0x5280_0160, RET])), Some(11));
        assert_eq!(constant(&code(&[BTI_C, 0x2a1f_03e0, RET])), Some(0));
        // mov w0, #0xaf40; movk w0, #1, lsl #16
        assert_eq!(constant(&code(&[0x5295_e800, 0x72a0_0020, RET])), Some(0x1_af40));
        assert_eq!(constant(&code(&[0x5280_0161, RET])), None);
        assert_eq!(constant(&code(&[0x5280_0160])), None);
    }

    #[test]
    fn classes() {
        // adrp x2; bl; b.ne; cbz x0; tbz; br x16; ret; ldr x0, literal
        for word in
            [0xf002_d402, 0x9400_0001, 0x5400_0001, 0xb400_0040, 0x3600_0040, 0xd61f_0200, RET, 0x5800_0040]
        {
            assert_eq!(at(&code(&[word])), Placement::Emulated, "{word:#x}");
        }
        // stp x29, x30, [sp, #-96]!; bti c; ldr x0, [x0, #16]; mov w0, #11
        for word in [0xa9ba_7bfd, BTI_C, 0xf940_0800, 0x5280_0160] {
            assert_eq!(at(&code(&[word])), Placement::Stepped, "{word:#x}");
        }
        assert_eq!(at(&[]), Placement::Stepped);
    }

    proptest! {
        #[test]
        fn any_bytes(code in proptest::collection::vec(any::<u8>(), 0..200), address: u64) {
            let _ = (forms(&code, address, |_| false), forwards(&code), constant(&code), at(&code));
        }
    }
}

//! Where in a function a probe costs least without changing what it sees.
//!
//! The kernel runs the instruction under a probe itself when it can (`emulated`), turns a 5-byte nop into a call
//! (`nop5`, from Linux 6.18), and otherwise single-steps a copy of it, which costs 2 to 40 times as much (`stepped`).
//! An instruction after the entry will do as well as the entry if every call reaches it exactly once, with the
//! argument registers and the stack pointer as they were at the entry.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess, OpKind,
    Register,
};

/// What the kernel does with the instruction under the probe, from the cheapest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// A 5-byte nop within one page: a call from Linux 6.18 on, emulated from 6.16 on, single-stepped before.
    Nop5,
    /// The kernel emulates the instruction.
    Emulated,
    /// The kernel single-steps the instruction.
    Stepped,
}

impl Placement {
    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nop5 => "nop5",
            Self::Emulated => "emulated",
            Self::Stepped => "stepped",
        }
    }
}

/// The 5-byte nop that the kernel knows.
const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
const PAGE_BYTES: u64 = 4096;
/// Instructions after the entry that are looked at.
const MAX_INSTRUCTIONS: usize = 16;
/// Longest function whose branches are checked, in bytes; longer ones are probed at their entry.
const MAX_FUNCTION_BYTES: usize = 1 << 20;
/// Registers that the tracer reads: integer arguments and the stack pointer.
const READ: [Register; 7] =
    [Register::RDI, Register::RSI, Register::RDX, Register::RCX, Register::R8, Register::R9, Register::RSP];

/// The cheapest safe place in a function: (bytes after the entry, class).
///
/// `code` is the whole function, which begins at `address`; pass only its first instruction when its extent is
/// unknown: the entry is then the only choice.
pub(crate) fn place(code: &[u8], address: u64) -> (u64, Placement) {
    let entry = (0, at(code, address));
    let candidates = candidates(code, address);
    let Some(farthest) = candidates.iter().map(|(delta, _)| *delta).max().filter(|delta| *delta > 0) else {
        return entry;
    };
    let Some(safe) = safe_until(code, address, farthest) else { return entry };
    let better = candidates
        .into_iter()
        .filter(|(delta, _)| *delta <= safe)
        .min_by_key(|(delta, class)| (*class, *delta));
    better.filter(|(_, class)| *class < entry.1).unwrap_or(entry)
}

/// The class of the first instruction of `code`.
pub(crate) fn at(code: &[u8], address: u64) -> Placement {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    match decoder.iter().next() {
        Some(instruction) => classify(&instruction, code),
        None => Placement::Stepped,
    }
}

/// The instructions that every call reaches with the registers untouched, and that cost less than single-stepping.
fn candidates(code: &[u8], address: u64) -> Vec<(u64, Placement)> {
    let mut found = Vec::new();
    let mut factory = InstructionInfoFactory::new();
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    for instruction in decoder.iter().take(MAX_INSTRUCTIONS) {
        let delta = instruction.ip() - address;
        let class = classify(&instruction, code.get(delta as usize..).unwrap_or_default());
        if class < Placement::Stepped {
            found.push((delta, class));
        }
        if instruction.flow_control() != FlowControl::Next || writes_read_register(&mut factory, &instruction)
        {
            break;
        }
    }
    found
}

/// Follows arch/x86/kernel/uprobes.c (branch_setup_xol_ops, push_setup_xol_ops), taking only what every kernel from
/// 5.15 on emulates. `bytes` begins with the instruction.
fn classify(instruction: &Instruction, bytes: &[u8]) -> Placement {
    let bytes = bytes.get(..instruction.len()).unwrap_or_default();
    if bytes == NOP5 && instruction.ip() % PAGE_BYTES <= PAGE_BYTES - NOP5.len() as u64 {
        return Placement::Nop5;
    }
    match bytes {
        // nop; push register; short jumps; call and long jumps.
        [0x90]
        | [0x50..=0x57]
        | [0x41, 0x50..=0x57]
        | [0xeb | 0x70..=0x7f, _]
        | [0xe8 | 0xe9, _, _, _, _]
        | [0x0f, 0x80..=0x8f, _, _, _, _] => Placement::Emulated,
        _ => Placement::Stepped,
    }
}

fn writes_read_register(factory: &mut InstructionInfoFactory, instruction: &Instruction) -> bool {
    factory.info(instruction).used_registers().iter().any(|used| {
        let writes = !matches!(
            used.access(),
            OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
        );
        writes && READ.contains(&used.register().full_register())
    })
}

/// How far after the entry an instruction may lie so that no branch of the function leads to one after the entry up
/// to and including it. None when the function cannot be decoded as a whole.
fn safe_until(code: &[u8], address: u64, farthest: u64) -> Option<u64> {
    if code.len() > MAX_FUNCTION_BYTES {
        return None;
    }
    let mut safe = farthest;
    for instruction in Decoder::with_ip(64, code, address, DecoderOptions::NONE).iter() {
        if instruction.code() == Code::INVALID {
            return None;
        }
        if matches!(
            instruction.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        ) {
            let target = instruction.near_branch_target().wrapping_sub(address);
            if target > 0 && target <= safe {
                safe = target - 1;
            }
        }
    }
    Some(safe)
}

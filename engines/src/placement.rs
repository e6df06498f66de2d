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
        let delta = instruction.ip().wrapping_sub(address);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ADDRESS: u64 = 0x1000;

    fn place(code: &[u8]) -> (u64, Placement) {
        super::place(code, ADDRESS)
    }

    #[test]
    fn the_drivers_prologue_is_probed_at_its_branch() {
        // cmpl $imm, x(%rip); je +6; jmp *y(%rip); push %rbp; ret
        let code = [0x81, 0x3d, 1, 2, 3, 4, 5, 6, 7, 8, 0x74, 0x06, 0xff, 0x25, 1, 2, 3, 4, 0x55, 0xc3];
        assert_eq!(place(&code), (10, Placement::Emulated));
    }

    #[test]
    fn common_prologues() {
        // endbr64; push %rbp
        assert_eq!(place(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0xc3]), (4, Placement::Emulated));
        // push %r12
        assert_eq!(place(&[0x41, 0x54, 0xc3]), (0, Placement::Emulated));
        // sub $8,%rsp; push %rbp: the stack pointer has changed
        assert_eq!(place(&[0x48, 0x83, 0xec, 0x08, 0x55, 0xc3]), (0, Placement::Stepped));
        // mov %rsi,%rdi; push %rbp: an argument has changed
        assert_eq!(place(&[0x48, 0x89, 0xf7, 0x55, 0xc3]), (0, Placement::Stepped));
        // xor %edi,%edi writes all of rdi
        assert_eq!(place(&[0x31, 0xff, 0x55, 0xc3]), (0, Placement::Stepped));
        // mov %rdi,%rax; push %rbp; jmp to the push: it would be hit more than once per call
        assert_eq!(place(&[0x48, 0x89, 0xf8, 0x55, 0xeb, 0xfd]), (0, Placement::Stepped));
        // the same with a jump to the instruction after the push
        assert_eq!(place(&[0x48, 0x89, 0xf8, 0x55, 0xeb, 0xfe]), (3, Placement::Emulated));
        // a function that does not decode as a whole
        assert_eq!(place(&[0x48, 0x89, 0xf8, 0x55, 0x06]), (0, Placement::Stepped));
        // the 5-byte nop, also behind an instruction that leaves the registers alone
        assert_eq!(place(&[0x0f, 0x1f, 0x44, 0, 0, 0xc3]), (0, Placement::Nop5));
        assert_eq!(
            place(&[0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x1f, 0x44, 0, 0, 0x55, 0xc3]),
            (4, Placement::Nop5)
        );
        // other long nops are single-stepped by older kernels
        assert_eq!(place(&[0x0f, 0x1f, 0x40, 0, 0xc3]), (0, Placement::Stepped));
        assert_eq!(place(&[]), (0, Placement::Stepped));
    }

    #[test]
    fn a_nop_across_pages_is_no_nop5() {
        let code = [0x0f, 0x1f, 0x44, 0, 0, 0xc3];
        assert_eq!(super::at(&code, 0x1ffb), Placement::Nop5);
        assert_eq!(super::at(&code, 0x1ffc), Placement::Stepped);
    }

    /// An instruction of a made-up function, and what the rule must think of it.
    #[derive(Clone, Copy, Debug)]
    enum Op {
        /// Leaves all read registers alone and is single-stepped.
        Plain(&'static [u8]),
        /// Writes a read register and is single-stepped.
        Spoils(&'static [u8]),
        Push,
        Nop5,
        Nop,
        /// jne to the begin of the instruction with this number.
        Branch(usize),
        Ret,
    }

    impl Op {
        fn bytes(self) -> Vec<u8> {
            match self {
                Self::Plain(bytes) | Self::Spoils(bytes) => bytes.to_vec(),
                Self::Push => vec![0x53],
                Self::Nop5 => NOP5.to_vec(),
                Self::Nop => vec![0x90],
                Self::Branch(_) => vec![0x0f, 0x85, 0, 0, 0, 0],
                Self::Ret => vec![0xc3],
            }
        }

        fn class(self) -> Placement {
            match self {
                Self::Nop5 => Placement::Nop5,
                Self::Push | Self::Nop | Self::Branch(_) => Placement::Emulated,
                Self::Plain(_) | Self::Spoils(_) | Self::Ret => Placement::Stepped,
            }
        }

        /// Whether an instruction behind it no longer sees what the entry saw, or is not reached by every call.
        fn ends(self) -> bool {
            matches!(self, Self::Spoils(_) | Self::Push | Self::Branch(_) | Self::Ret)
        }
    }

    fn op() -> impl Strategy<Value = Op> {
        let plain: Vec<&'static [u8]> = vec![
            &[0xf3, 0x0f, 0x1e, 0xfa],             // endbr64
            &[0x48, 0x89, 0xf8],                   // mov %rdi,%rax
            &[0x48, 0x8b, 0x47, 0x08],             // mov 8(%rdi),%rax
            &[0x81, 0x3d, 0, 0, 0, 0, 1, 0, 0, 0], // cmpl $1, 0(%rip)
            &[0xc5, 0xf8, 0x77],                   // vzeroupper
            &[0x62, 0xf1, 0x7c, 0x48, 0x28, 0xc1], // vmovaps %zmm1,%zmm0
            &[0x48, 0x85, 0xff],                   // test %rdi,%rdi
        ];
        let spoils: Vec<&'static [u8]> = vec![
            &[0x48, 0x83, 0xec, 0x08], // sub $8,%rsp
            &[0x31, 0xc9],             // xor %ecx,%ecx
            &[0x41, 0xb0, 0x01],       // mov $1,%r8b
            &[0x5a],                   // pop %rdx
            &[0x48, 0x0f, 0x44, 0xf0], // cmove %rax,%rsi
            &[0xf3, 0xaa],             // rep stosb
            &[0xc9],                   // leave
        ];
        prop_oneof![
            4 => proptest::sample::select(plain).prop_map(Op::Plain),
            1 => proptest::sample::select(spoils).prop_map(Op::Spoils),
            2 => Just(Op::Push),
            1 => Just(Op::Nop5),
            1 => Just(Op::Nop),
            1 => (0..12usize).prop_map(Op::Branch),
            1 => Just(Op::Ret),
        ]
    }

    /// Assembles a function: its bytes and where each instruction begins.
    fn assemble(ops: &[Op]) -> (Vec<u8>, Vec<u64>) {
        let mut starts = Vec::new();
        let mut code = Vec::new();
        for op in ops {
            starts.push(code.len() as u64);
            code.extend(op.bytes());
        }
        for (index, op) in ops.iter().enumerate() {
            if let Op::Branch(target) = op {
                let end = starts[index] + 6;
                let distance = starts[target % ops.len()].wrapping_sub(end) as u32;
                code[end as usize - 4..end as usize].copy_from_slice(&distance.to_le_bytes());
            }
        }
        (code, starts)
    }

    /// The rule, applied to the instructions instead of the bytes.
    fn expected(ops: &[Op], starts: &[u64]) -> (u64, Placement) {
        let targets: Vec<usize> = ops
            .iter()
            .filter_map(|op| if let Op::Branch(to) = op { Some(to % ops.len()) } else { None })
            .collect();
        let mut best = (0, ops[0].class());
        for (index, op) in ops.iter().enumerate().take(MAX_INSTRUCTIONS) {
            let reached_by_branch = targets.iter().any(|target| (1..=index).contains(target));
            if !reached_by_branch && op.class() < best.1 {
                best = (starts[index], op.class());
            }
            if op.ends() {
                break;
            }
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn places_as_the_rule_says(ops in proptest::collection::vec(op(), 1..24)) {
            let (code, starts) = assemble(&ops);
            prop_assert_eq!(place(&code), expected(&ops, &starts));
        }

        #[test]
        fn any_bytes(code in proptest::collection::vec(any::<u8>(), 0..200), address: u64) {
            let (delta, _) = super::place(&code, address);
            prop_assert!(delta == 0 || delta < code.len() as u64);
        }
    }
}

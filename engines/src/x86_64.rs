//! What is read from x86-64 code, placement aside.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

fn decoder(code: &[u8], address: u64) -> Decoder<'_> {
    Decoder::with_ip(64, code, address, DecoderOptions::NONE)
}

/// `lea register, [rip + distance]` to a wanted address.
pub(crate) fn forms(code: &[u8], address: u64, wanted: impl Fn(u64) -> bool) -> bool {
    decoder(code, address).iter().any(|instruction| {
        instruction.code() == Code::Lea_r64_m
            && instruction.is_ip_rel_memory_operand()
            && wanted(instruction.ip_rel_memory_address())
    })
}

/// `mov rdi, [rdi + inner]; mov register, [rdi]; jmp [register + slot]`.
pub(crate) fn forwards(code: &[u8], address: u64) -> bool {
    let mut decoder = decoder(code, address);
    let code: Vec<Instruction> = decoder.iter().filter(|i| i.code() != Code::Endbr64).take(3).collect();
    let [inner, vtable, jump] = &code[..] else { return false };
    let loads = |instruction: &Instruction, to: Option<Register>| {
        instruction.code() == Code::Mov_r64_rm64
            && instruction.memory_base() == Register::RDI
            && instruction.memory_index() == Register::None
            && to.is_none_or(|register| instruction.op0_register() == register)
    };
    loads(inner, Some(Register::RDI))
        && loads(vtable, None)
        && jump.mnemonic() == Mnemonic::Jmp
        && jump.memory_base() == vtable.op0_register()
}

/// `mov eax, value; ret` or `xor eax, eax; ret`.
pub(crate) fn constant(code: &[u8], address: u64) -> Option<u32> {
    let mut value = None;
    for instruction in decoder(code, address).iter().take(4) {
        match instruction.code() {
            Code::Endbr64 | Code::Nopd | Code::Nopw => {}
            Code::Mov_r32_imm32 if instruction.op0_register() == Register::EAX => {
                value = Some(instruction.immediate32());
            }
            _ if instruction.mnemonic() == Mnemonic::Xor
                && instruction.op1_kind() == OpKind::Register
                && instruction.op0_register() == Register::EAX
                && instruction.op1_register() == Register::EAX =>
            {
                value = Some(0);
            }
            _ if instruction.mnemonic() == Mnemonic::Ret => return value,
            _ => return None,
        }
    }
    None
}

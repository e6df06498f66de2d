//! The page from which probes on 5-byte nops enter the kernel (Linux ≥ 6.18): code without a table of its own.

use tracer_abi::unwind::{PAGE_SHIFT, Rule, cfa};

use super::{
    rules::{NO_FUNCTION, of},
    table::{Page, Table},
};

/// `push rcx; push r11; push rax; mov rax, NR; syscall; pop rax; pop r11; pop rcx; ret` (arch/x86/kernel/uprobes.c),
/// and how far from its return address the stack pointer is before each of them.
const CODE: [(&[Option<u8>], i32); 9] = [
    (&[Some(0x51)], 0),
    (&[Some(0x41), Some(0x53)], 8),
    (&[Some(0x50)], 16),
    (&[Some(0x48), Some(0xc7), Some(0xc0), None, None, None, None], 24),
    (&[Some(0x0f), Some(0x05)], 24),
    (&[Some(0x58)], 24),
    (&[Some(0x41), Some(0x5b)], 16),
    (&[Some(0x59)], 8),
    (&[Some(0xc3)], 0),
];

/// The table of such a page, addresses counted from its beginning; `None` where it holds other code.
#[must_use]
pub fn trampoline(bytes: &[u8]) -> Option<Table> {
    let mut table = Table { rules: vec![NO_FUNCTION], ..Table::default() };
    let mut at = 0;
    let mut push = |at: usize, rule: Rule| -> Option<()> {
        let number = u32::try_from(table.rules.len()).ok()?;
        table.rules.push(rule);
        table.rows.push(u32::try_from(at).ok()? << 16 | number);
        Some(())
    };
    for (instruction, pushed) in CODE {
        let there = bytes.get(at..)?.get(..instruction.len())?;
        if !there.iter().zip(instruction).all(|(byte, wanted)| wanted.is_none_or(|wanted| wanted == *byte)) {
            return None;
        }
        push(at, Rule { cfa_offset: 8 + pushed, ..of(cfa::RSP) })?;
        at += instruction.len();
    }
    push(at, NO_FUNCTION)?;
    debug_assert!(at < 1 << PAGE_SHIFT);
    table.pages = vec![Page { first: 0, rows: u32::try_from(table.rows.len()).ok()? }];
    table.notes.functions = 1;
    Some(table)
}

//! Code that has no table of its own and is known by its instructions: the page from which probes on 5-byte nops enter
//! the kernel (Linux ≥ 6.18), and the functions that CPython makes for `perf` (`-X perf`).

use tracer_abi::unwind::{Rule, cfa, rbp};

use super::{
    rules::of,
    table::{Table, Writer},
};

/// Bytes, `None` being any.
type Instruction = &'static [Option<u8>];

/// Instructions, and how what is before each of them lies in its frame.
type Code = &'static [(Instruction, Rule)];

/// `pushed` bytes lie above the return address.
const fn pushed(pushed: i32) -> Rule {
    Rule { cfa_offset: 8 + pushed, ..of(cfa::RSP) }
}

/// The caller's rbp is the only thing that lies above it.
const RBP_PUSHED: Rule = Rule { rbp: rbp::AT_CFA, rbp_offset: -16, ..pushed(8) };

/// `push rcx; push r11; push rax; mov rax, NR; syscall; pop rax; pop r11; pop rcx; ret` (arch/x86/kernel/uprobes.c).
const KERNEL: Code = &[
    (&[Some(0x51)], pushed(0)),
    (&[Some(0x41), Some(0x53)], pushed(8)),
    (&[Some(0x50)], pushed(16)),
    (&[Some(0x48), Some(0xc7), Some(0xc0), None, None, None, None], pushed(24)),
    (&[Some(0x0f), Some(0x05)], pushed(24)),
    (&[Some(0x58)], pushed(24)),
    (&[Some(0x41), Some(0x5b)], pushed(16)),
    (&[Some(0x59)], pushed(8)),
    (&[Some(0xc3)], pushed(0)),
];

/// `sub rsp, 8; call rcx; add rsp, 8; ret` (CPython's Python/asm_trampoline.S).
const PYTHON: Code = &[
    (&[Some(0x48), Some(0x83), Some(0xec), Some(0x08)], pushed(0)),
    (&[Some(0xff), Some(0xd1)], pushed(8)),
    (&[Some(0x48), Some(0x83), Some(0xc4), Some(0x08)], pushed(8)),
    (&[Some(0xc3)], pushed(0)),
];

/// The same of a Python that keeps frame pointers: `push rbp; mov rbp, rsp; call rcx; pop rbp; ret`.
const PYTHON_WITH_FRAME_POINTER: Code = &[
    (&[Some(0x55)], pushed(0)),
    (&[Some(0x48), Some(0x89), Some(0xe5)], RBP_PUSHED),
    (&[Some(0xff), Some(0xd1)], RBP_PUSHED),
    (&[Some(0x5d)], RBP_PUSHED),
    (&[Some(0xc3)], pushed(0)),
];

/// Stands before the first instruction where indirect branches are checked.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Most bytes between two of CPython's: they begin at multiples of 16, or follow one another.
const PADDING: usize = 15;

/// The table of the kernel's page, addresses counted from its beginning; `None` where it holds other code.
#[must_use]
pub fn uprobe_trampoline(bytes: &[u8]) -> Option<Table> {
    table(&[(0, KERNEL)], bytes)
}

/// The table of memory that CPython has filled with such functions; `None` where it holds other code.
#[must_use]
pub fn python_trampolines(bytes: &[u8]) -> Option<Table> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = bytes.get(at..) {
        let skip = if found.is_empty() { 0 } else { PADDING };
        let next = (0..=skip).find_map(|skip| Some((skip, python_code(rest.get(skip..)?)?)));
        let Some((skip, code)) = next else { break };
        found.push((at + skip, code));
        at += skip + end(code, rest.get(skip..)?);
    }
    table(&found, bytes)
}

/// Which of CPython's begins here.
fn python_code(bytes: &[u8]) -> Option<Code> {
    let behind = bytes.strip_prefix(&ENDBR64).unwrap_or(bytes);
    [PYTHON, PYTHON_WITH_FRAME_POINTER].into_iter().find(|code| is_at(code, behind))
}

fn is_at(code: Code, bytes: &[u8]) -> bool {
    let mut wanted = code.iter().flat_map(|(instruction, _)| instruction.iter()).zip(bytes);
    bytes.len() >= length(code) && wanted.all(|(wanted, byte)| wanted.is_none_or(|wanted| wanted == *byte))
}

fn length(code: Code) -> usize {
    code.iter().map(|(instruction, _)| instruction.len()).sum()
}

/// Where code that begins with these bytes ends.
fn end(code: Code, bytes: &[u8]) -> usize {
    length(code) + if bytes.starts_with(&ENDBR64) { ENDBR64.len() } else { 0 }
}

/// The table of code at some places, which is all that is known.
fn table(places: &[(usize, Code)], bytes: &[u8]) -> Option<Table> {
    let mut table = Table::default();
    let mut writer = Writer::new(&mut table);
    for &(begin, code) in places {
        let there = bytes.get(begin..)?;
        let mut at = begin;
        if there.starts_with(&ENDBR64) {
            writer.rule(at as u64, code.first()?.1)?;
            at += ENDBR64.len();
        }
        if !is_at(code, bytes.get(at..)?) {
            return None;
        }
        for (instruction, rule) in code {
            writer.rule(at as u64, *rule)?;
            at += instruction.len();
        }
        writer.unknown(at as u64)?;
    }
    table.notes.functions = places.len() as u64;
    (!places.is_empty()).then_some(table)
}

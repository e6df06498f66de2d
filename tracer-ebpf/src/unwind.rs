//! Tables by which the kernel side walks user stacks, and where they are.
//!
//! `tgid → Space` (a range of `Mapping`s, sorted) → pages of 64 KiB of code → rows, sorted → a `Rule`: what the caller's
//! stack pointer is. A row is a u32: the low 16 bits of the address where it begins to hold, and the number of its rule.

use bytemuck::{Pod, Zeroable};

/// Rows of one chunk (an inner map).
pub const CHUNK_ROWS: u32 = 1 << 16;
/// Most chunks: 256 KiB each, 64 MiB together.
pub const MAX_CHUNKS: u32 = 256;
/// Bytes of code that one page stands for, as a power of two.
pub const PAGE_SHIFT: u32 = 16;
/// Most pages, of all files together: 4 GiB of code.
pub const MAX_PAGES: u32 = 1 << 16;
/// Most different rules.
pub const MAX_RULES: u32 = 1 << 16;
/// Most mappings, of all processes together.
pub const MAX_MAPPINGS: u32 = 1 << 15;
/// Steps of a binary search among the mappings of a process, and among the rows of a page (at most `CHUNK_ROWS`).
pub const MAPPING_STEPS: u32 = 15;
pub const ROW_STEPS: u32 = 17;
/// Most mappings of one process, so that the search ends.
pub const MAX_SPACE: u32 = (1 << MAPPING_STEPS) - 1;

/// What a process maps: `len` of [`Mapping`] from `first`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Space {
    pub first: u32,
    pub len: u32,
    /// The mappings carry it, too; where they differ, they are another process's by now.
    pub id: u32,
    /// 1 + index of the interpreter's [`PythonOffsets`]; 0: no Python that is known.
    pub python: u32,
    /// [`crate::Target::epoch`] when the mappings were read: they are of no other program.
    pub epoch: u32,
}

/// An executable mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Mapping {
    pub begin: u64,
    pub end: u64,
    /// What to take from an address for the file's own.
    pub bias: u64,
    pub first_page: u32,
    pub pages: u32,
    /// See [`Space::id`]; 0: nobody's.
    pub space: u32,
    /// [`WITH_TABLE`], [`WITHOUT_TABLE`] or [`TABLE_PENDING`].
    pub kind: u32,
}

pub const WITH_TABLE: u32 = 1;
/// By frame pointers.
pub const WITHOUT_TABLE: u32 = 2;
pub const TABLE_PENDING: u32 = 3;

/// A page's rows: chunk + 1 in the upper half (0: no rows), then the first row and the number of rows − 1.
#[must_use]
pub const fn page(chunk: u32, first: u32, rows: u32) -> u64 {
    ((chunk as u64 + 1) << 32) | ((first as u64) << 16) | (rows as u64 - 1)
}

/// What the canonical frame address (CFA: the caller's stack pointer) is. The return address is at CFA − 8.
pub mod cfa {
    /// The code is no function that a table describes.
    pub const NONE: u8 = 0;
    /// rsp + offset.
    pub const RSP: u8 = 1;
    /// rbp + offset.
    pub const RBP: u8 = 2;
    /// rsp + 8, and 8 more from byte `offset` of a 16-byte entry of a procedure linkage table.
    pub const PLT: u8 = 3;
    /// There is no caller.
    pub const END: u8 = 4;
    /// The word at rbp + offset, + offset2.
    pub const AT_RBP: u8 = 5;
    /// The word at rsp + offset, + offset2.
    pub const AT_RSP: u8 = 6;
    /// A signal frame: the interrupted registers are in the `ucontext` at rsp.
    pub const SIGNAL: u8 = 7;
    /// Another register + offset: only known of the leaf.
    pub const REGISTER: u8 = 8;
    /// None of these.
    pub const UNSUPPORTED: u8 = 9;
}

/// Where the caller's rbp is.
pub mod rbp {
    /// Where it was.
    pub const SAME: u8 = 0;
    /// At CFA + offset.
    pub const AT_CFA: u8 = 1;
    /// At rbp + offset.
    pub const AT_RBP: u8 = 2;
    /// Nobody knows.
    pub const LOST: u8 = 3;
    /// Added to one of these: the function leaves for an exception's handler (`__builtin_eh_return`). Before it does, it
    /// writes the handler's registers over those that its frame holds, its return address too.
    pub const LEAVES_FOR_HANDLER: u8 = 0x80;
}

/// How to go from a frame to its caller.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Rule {
    /// Of [`cfa`].
    pub cfa: u8,
    /// Of [`rbp`].
    pub rbp: u8,
    /// DWARF number of the register of [`cfa::REGISTER`].
    pub register: u16,
    pub cfa_offset: i32,
    pub cfa_offset2: i32,
    pub rbp_offset: i32,
}

/// Byte offsets in the structures of one version of CPython, of what is needed to follow its frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PythonOffsets {
    /// `PyThreadState`: the current frame, or ([`PythonOffsets::frame_is_inner`]) what holds it.
    pub thread_frame: u32,
    /// 1: `thread_frame` points to a `_PyCFrame`, which has the frame at `inner_frame`.
    pub frame_is_inner: u32,
    pub inner_frame: u32,
    /// `_PyInterpreterFrame`: code object, last instruction, caller.
    pub frame_code: u32,
    pub frame_instruction: u32,
    pub frame_previous: u32,
    /// `_PyInterpreterFrame`: a byte that is `entry_value` where the C function was entered.
    pub frame_entry: u32,
    pub entry_value: u32,
    /// `PyCodeObject.co_firstlineno`.
    pub code_first_line: u32,
}

/// The interpreter's state of a thread: value of [`crate::maps::PYTHON_THREADS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PythonThread {
    /// Address of its `PyThreadState`.
    pub state: u64,
    pub tgid: u32,
    pub _pad: u32,
}

/// Most versions of CPython at once.
pub const MAX_PYTHONS: u32 = 32;

const _: () = assert!(size_of::<Rule>() == 16);
const _: () = assert!(size_of::<Mapping>() == 40);
const _: () = assert!(size_of::<Space>() == 20);

//! Tables for walking stacks: `.eh_frame` of an ELF file → rows that the kernel side can search.
//!
//! In: the bytes of a file, or of the vDSO. Out: a [`Table`], and where its addresses lie. What a file says of itself is
//! never trusted further than the bytes reach: a bad part has no table, the rest does. This folder does no I/O.

mod elf;
mod rules;
mod table;
#[cfg(test)]
mod tests;
mod trampoline;

pub use elf::{Image, ImageError, Segments};
pub use table::{Notes, Page, Table};
pub use trampoline::{python_trampolines, uprobe_trampoline};

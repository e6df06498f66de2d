//! `tensor`: what a program asks an engine, or its execution context, with the answer. The records are marks
//! ([`crate::mark::DataType`], [`crate::mark::Shape`], [`crate::mark::Made`]).

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Question {
    /// An engine, for the data type of a tensor: a number.
    DataType = 1,
    /// A context, for the shape of a tensor: dimensions in memory, whose address is argument 0 and the return value.
    Shape = 2,
    /// An engine, for an execution context: the public object, which has the implementation at offset 8.
    Context = 3,
}

/// Attach cookie: [`crate::shape::cookie`] with a return probe, and what is asked.
#[must_use]
pub const fn cookie(point: u32, question: Question, is_wide: bool) -> u64 {
    crate::shape::cookie(point, is_wide) | 1 << 32 | (question as u64) << 34
}

/// The question in a cookie, as a number.
#[must_use]
pub const fn question(cookie: u64) -> u32 {
    (cookie >> 34 & 3) as u32
}

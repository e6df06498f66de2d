//! `shape`: a program says the shape of an engine's input. The record is a mark ([`crate::mark::Shape`]).

/// Attach cookie: the point's, and whether the engine counts its dimensions in 64 bits (TensorRT 10 and later) or in 32.
#[must_use]
pub const fn cookie(point: u32, is_wide: bool) -> u64 {
    crate::call::cookie(point, false) | (is_wide as u64) << 40
}

/// Whether dimensions have 64 bits.
#[must_use]
pub const fn is_wide(cookie: u64) -> bool {
    cookie >> 40 & 1 == 1
}

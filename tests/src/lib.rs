//! What the benchmarks compute and print, apart from what they measure.

pub mod stats;
pub mod table;

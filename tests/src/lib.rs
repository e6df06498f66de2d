//! What the benchmarks compute and print, apart from what they measure.

pub mod clock_sim;
pub mod random;
pub mod stats;
pub mod table;

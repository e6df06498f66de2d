//! What the benchmarks compute and print, apart from what they measure, and what they share with the kernel tier.

pub mod clock_sim;
pub mod python;
pub mod random;
pub mod stats;
pub mod table;

//! What the benchmarks and tests of the whole share: what is computed, what is printed, recordings that nobody made.

pub mod browser;
pub mod clock_sim;
pub mod python;
pub mod random;
pub mod samples;
pub mod stats;
pub mod synthetic;
pub mod table;

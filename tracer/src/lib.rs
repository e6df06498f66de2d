//! tracer: where did this token's time go?

pub mod capture;
pub mod cli;
pub mod clock;
pub mod event;
pub mod export;
mod gpu;
mod hex;
pub mod host_clock;
pub mod http;
pub mod latency;
pub mod probe;
pub mod python;
pub mod symbol;
pub mod timeline;
pub mod unwind;

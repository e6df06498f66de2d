//! tracer: where did this token's time go?

pub mod capture;
pub mod event;
pub mod probe;
pub mod timeline;

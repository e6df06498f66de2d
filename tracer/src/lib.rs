//! tracer: where did this token's time go?

pub mod clock;
pub mod event;
pub mod timeline;

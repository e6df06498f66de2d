//! What is known of inference engines.

mod role;

pub use role::Role;

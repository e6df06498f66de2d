//! Events → steps, iterations, requests, tokens. Pure.

pub mod rows;
pub mod tables;

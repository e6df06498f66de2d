//! Events → steps, iterations, requests, tokens. Pure.

pub mod rows;

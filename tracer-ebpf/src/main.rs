//! Kernel-side programs. Built for the bpf target by `tracer/build.rs`; on other targets this binary is empty.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(not(target_arch = "bpf"))]
fn main() {}

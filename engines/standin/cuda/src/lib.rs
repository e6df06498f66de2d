//! Stand-in for NVIDIA's driver library: one simulated GPU, for demo and tests. It never measures anything.
//!
//! In: driver API calls. Out: completions on a modelled timeline, and, with `STANDIN_CUDA_LOG=file`, the truth of it.
//! Copied to `libcuda.so.<version>` and found as `libcuda.so.1`; whoever resolves it learns from the exported symbol
//! `tracer_standin` that it is simulated.
//!
//! The end of an operation follows from the model when it is submitted (`timeline`), so there is no worker thread and
//! a query answers as fast as a real driver's. The device clock is a line over CLOCK_MONOTONIC_RAW (`device`). Every
//! export begins with the three instructions of the real library (`export`).
//!
//! Not modelled: implicit synchronisation of the legacy stream, contention for multiprocessors, kernel arithmetic,
//! captures over several streams. Handles are numbers and never dereferenced: a bad one is `CUDA_ERROR_INVALID_HANDLE`.
//!
//! Settings (environment, read once): see [`device::Config`]; faults on demand: see [`fault`].
#![expect(non_snake_case, reason = "exports have the names that others look for")]

mod api;
mod device;
mod error;
mod export;
mod fault;
mod handle;
mod log;
mod memory;
mod pointer;
mod timeline;

/// Says that this library is a simulation; the value is the version of what it offers to tools that know it.
#[unsafe(no_mangle)]
pub static tracer_standin: u32 = 1;

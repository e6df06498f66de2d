//! Stand-in for NVIDIA's management library (NVML): simulated GPUs whose readings a file gives. It never measures.
//!
//! In: NVML calls, and the file that `STANDIN_NVML_FILE` names, read anew at each call ([`readings`] has its format).
//! Out: what the file says, or the error that it says. Copied to `libnvidia-ml.so.<version>` and found as
//! `libnvidia-ml.so.1`; whoever loads it learns from the exported symbol `tracer_standin` that it is simulated. The
//! first GPU has the UUID of the stand-in CUDA driver's.

mod api;
mod pointer;
mod readings;

use std::ffi::c_int;

/// Says that this library is a simulation; the value is the version of what it offers to tools that know it.
#[unsafe(no_mangle)]
pub static tracer_standin: u32 = 1;

/// An nvmlReturn_t other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) c_int);

pub(crate) const UNINITIALIZED: Error = Error(1);
pub(crate) const INVALID_ARGUMENT: Error = Error(2);
pub(crate) const NOT_FOUND: Error = Error(6);
pub(crate) const INSUFFICIENT_SIZE: Error = Error(7);
pub(crate) const ARGUMENT_VERSION_MISMATCH: Error = Error(25);

pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

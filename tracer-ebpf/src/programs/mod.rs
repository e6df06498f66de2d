//! One file per event. In: probes and tracepoints of the kernel. Out: records of `tracer_abi` in two rings.
//! The programs only read the traced process; every path that loses something counts it.

mod call;
mod call_stack;
mod common;
mod mark;
mod nvtx;
mod open;
mod process;
mod python;
mod repeat;
mod sample;
mod sched;
mod shape;
mod socket;
mod syscall;
mod tensor;
mod unwind;

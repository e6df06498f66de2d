//! Library that is loaded into the traced program (LD_PRELOAD, or CUDA_INJECTION64_PATH): it puts two CUDA events around
//! each step of TensorRT, and around each launch of a CUDA graph where that is asked for, and reports, as marks, where the
//! step lay on the GPU's clock and how that compares to the host's.
//!
//! In: the program's own calls of `enqueueV3`, through the vtable slot that this library replaces, and of
//! `cuGraphLaunch`, through the pointer that the program gets when it looks that up. Out: marks (`GpuSpan`, `ClockBurst`,
//! `InjectState`) at its own probe site; only while a tracer probes that site does it do anything else than pass calls on.
//!
//! The same file is an injection for NVTX (NVTX_INJECTION64_PATH): ranges and marks become marks of ours.
//!
//! What it must never do: block or allocate on the program's threads, touch their current context or CUDA error state,
//! let a panic out, or keep going after something that it does not understand.
//!
//! What it does not see, and the tracer counts as steps without a GPU span, since its own probes are in the driver:
//! - steps and launches from before its first look at the driver and its first events;
//! - graph launches in programs that the library is loaded into late (CUDA_INJECTION64_PATH): they have looked
//!   `cuGraphLaunch` up by then, or will do so past it;
//! - graph launches of programs that find the driver without the dynamic `dlsym` (a `dlsym` of their own, or that of the C
//!   library by way of `dlvsym`), of those that call the driver's private tables, and, on AArch64, of those that do not
//!   link libcuda: the shim of `dlsym` is x86-64 code for glibc;
//! - launches that do not come from the host: graphs that launch graphs on the device.
//!
//! A program that asks `dlsym(RTLD_DEFAULT, "cuGraphLaunch")` finds this library's export even where no libcuda is
//! loaded; called then, it answers CUDA_ERROR_NOT_FOUND.
//!
//! - [`start`]: constructor, the thread, fork and exit.
//! - [`find`]: the libraries that the program has mapped; which vtable words to replace.
//! - [`hook`]: replacing and restoring them; the shims.
//! - [`graph`]: the shims for graph launches; [`interpose`]: `dlsym`; [`originals`]: what shims stand for.
//! - [`own`]: steps that the program marks out itself.
//! - [`nvtx`]: ranges and marks of programs that use NVTX; [`names`]: what they register.
//! - [`layers`]: the ranges inside a sampled step, timed.
//! - [`step`]: what a shim does around a step (the program's threads).
//! - [`context`]: per CUDA context, the pool of event pairs.
//! - [`harvest`]: reading finished events, clock bursts (our thread).
//! - [`driver`]: the driver's functions, from the libcuda that the program has mapped.
//! - [`report`]: state, counters and marks.
//! - [`queue`]: the bounded lock-free queue between the two sides.

mod clock;
mod context;
mod driver;
mod find;
mod graph;
mod harvest;
mod hook;
mod interpose;
mod layers;
mod names;
mod nvtx;
mod originals;
mod own;
mod queue;
mod report;
mod start;
mod step;

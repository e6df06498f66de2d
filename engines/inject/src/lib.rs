//! Library that is loaded into the traced program (LD_PRELOAD, or CUDA_INJECTION64_PATH): it puts two CUDA events around
//! each step of TensorRT and reports, as marks, where the step lay on the GPU's clock and how that compares to the host's.
//!
//! In: the program's own calls of `enqueueV3`, through the vtable slot that this library replaces. Out: marks
//! (`GpuSpan`, `ClockBurst`, `InjectState`) at its own probe site; only while a tracer probes that site does it do
//! anything else than pass calls on.
//!
//! What it must never do: block or allocate on the program's threads, touch their current context or CUDA error state,
//! let a panic out, or keep going after something that it does not understand.
//!
//! - [`start`]: constructor, the thread, fork and exit.
//! - [`find`]: the libraries that the program has mapped; which vtable words to replace.
//! - [`hook`]: replacing and restoring them; the shims.
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
mod harvest;
mod hook;
mod queue;
mod report;
mod start;
mod step;

//! Kernel side of a recording: load the programs, attach them to processes, drain their rings.
//!
//! In: which processes, what to record. Out: [`crate::event::Event`]s in time order, and the counters of everything
//! that was lost or refused. This folder never changes a traced process beyond the probes that the kernel places in
//! it for us, and takes those away when it is dropped (or dies: the kernel does it then).

mod attach;
mod bpf;
pub mod btf;
mod engine_files;
mod error;
mod files;
mod kernel;
pub mod object;
pub mod process;
pub mod select;
mod session;
mod stacks;
pub mod trial;
pub mod unwind;
mod uprobe;

pub(crate) use attach::read as read_mapped;
pub use attach::{INJECT_LIBRARY, Notice};
pub use error::ProbeError;
pub use kernel::{Missing, Options, check_privileges};
pub use session::{DRAIN_INTERVAL, Progress, Session, Stopped};

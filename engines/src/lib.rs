//! What is known of inference engines: which libraries they are, where their probe points lie, what these mean.
//!
//! In: profiles ([`Profiles`], TOML data) and the bytes of a file that a process maps. Out: a [`Library`] with the file
//! offsets to probe, each with its role, its cost class and the evidence for it, and the reasons for those that are
//! missing. This crate never loads or runs what it looks at, and trusts nothing in it.
//!
//! ```
//! let profiles = engines::Profiles::builtin();
//! assert!(profiles.matches("libnvinfer.so.10"));
//! // No profile concerns a text file.
//! assert!(profiles.inspect("/etc/motd".as_ref(), b"hello").is_none());
//! ```

mod aarch64;
mod elf;
mod error;
mod frames;
mod library;
mod machine;
mod placement;
mod pointers;
mod profile;
mod role;
mod rtti;
mod usdt;
mod version;
mod x86_64;

pub use error::{ProfileError, Reason};
pub use library::{Found, Library, Point, Refusal};
pub use machine::Machine;
pub use placement::Placement;
pub use profile::Profiles;
pub use role::Role;

//! What can go wrong.

use std::path::PathBuf;

/// A profile could not be used; its source says where and why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    #[error("cannot read the profile {} (a file, cuda_graph, own_steps, or shapes)", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not a profile", path.display())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
}

/// Why a probe point was not found, or may not be used, in a library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    #[error("not an ELF file for 64-bit little-endian machines")]
    NotElf,
    #[error("the file is truncated or malformed ({0})")]
    Malformed(&'static str),
    #[error("built for machine {0} (ELF number); only x86-64 (62) and AArch64 (183) are supported")]
    Machine(u16),
    #[error("built for {}, which this machine does not run", .0.name())]
    OtherMachine(crate::Machine),
    #[error("not a shared library; a statically linked engine is not supported")]
    NotShared,
    #[error("no exported function `{0}`")]
    NoSymbol(String),
    #[error("`{0}` is chosen at run time (an indirect function): its code cannot be known from the file")]
    Indirect(String),
    #[error("`{0}` does not lie in executable code of the file")]
    NotCode(String),
    #[error("no version symbol ({0}…) and no version functions: not the runtime library of this engine")]
    NoVersion(String),
    #[error("no type information for {0}: built without RTTI, or a version that has no such class")]
    NoTypeInfo(String),
    #[error("{0} type-information objects for one class: cannot tell which is used")]
    ManyTypeInfo(usize),
    #[error("a class inherits virtually from the base class: its vtables cannot be followed")]
    VirtualBase,
    #[error("the class hierarchy has more than {0} classes")]
    TooManyClasses(usize),
    #[error("more than {0} relocations")]
    TooManyRelocations(usize),
    #[error("no vtable of a class that implements {0}")]
    NoVtable(String),
    #[error("slots {slots:?} of {class} all name `{method}`")]
    ManySlots { class: String, method: String, slots: Vec<usize> },
    #[error("no slot of {class} names `{method}`, and {why}")]
    Unconfirmed { class: String, method: String, why: String },
    #[error("several classes implement `{method}`: {}", classes.join(", "))]
    ManyImplementations { method: String, classes: Vec<String> },
    #[error(
        "this library only passes `{0}` on: the library that implements it must be mapped too, and is probed there"
    )]
    ForwardsOnly(String),
    #[error("the probe {probe} has the arguments `{found}`, not `{expected}`")]
    Arguments { probe: String, found: String, expected: String },
    /// The profile says so.
    #[error("{0}")]
    Known(String),
    #[error("the probe {0} is guarded by a semaphore, which is not supported")]
    Semaphore(String),
}

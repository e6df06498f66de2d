//! What can go wrong between us and the kernel.

use std::{io, path::PathBuf};

use aya::{EbpfError, maps::MapError, programs::ProgramError};
use thiserror::Error;

/// Why a recording cannot begin or go on. Each says what failed, on what, and what to do.
#[derive(Debug, Error)]
pub enum ProbeError {
    #[error(
        "this tracer was built without its kernel-side program ({why}).\n  \
         Build it again where the toolchain is (`cargo xtask setup`), or use a released binary"
    )]
    Stub { why: &'static str },
    #[error(
        "not enough privileges: eBPF needs root, or the capabilities CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE (missing: {missing}).\n  \
         Run it with sudo"
    )]
    Privileges { missing: String },
    #[error(
        "the kernel offers no BTF ({path}: {source}): the scheduler and process probes cannot be loaded.\n  \
         Use a kernel with CONFIG_DEBUG_INFO_BTF=y (most distributions since 2020)"
    )]
    NoBtf { path: PathBuf, source: io::Error },
    #[error("the kernel's BTF at {path} is damaged: {what}")]
    BadBtf { path: PathBuf, what: String },
    #[error("loading the kernel-side program: {0}.\n  Run `tracer doctor`, and report this with `uname -a`")]
    Load(#[from] EbpfError),
    #[error(
        "the embedded kernel-side program has no {what} `{name}`: it does not fit this tracer; build both again"
    )]
    Absent { what: &'static str, name: &'static str },
    #[error("{what}: {source}")]
    Program { what: String, source: ProgramError },
    #[error("{what} in process {pid}: {source}")]
    Attach { what: String, pid: u32, source: io::Error },
    #[error("the embedded kernel-side program: {what}")]
    Object { what: String },
    #[error("putting tables for walking stacks into the kernel: {source}")]
    Unwind { source: io::Error },
    #[error("map `{name}`: {source}")]
    Map { name: &'static str, source: MapError },
    #[error("process {pid}: {source}")]
    Process { pid: u32, source: io::Error },
    #[error("process {pid} is gone")]
    ProcessGone { pid: u32 },
    #[error(
        "no process is called `{comm}`; `tracer record` without a target lists those that could be traced"
    )]
    NoSuchComm { comm: String },
    #[error(
        "there is no control group `{path}`; /proc/PID/cgroup of the server shows its path, `systemd-cgls` all of them"
    )]
    NoSuchCgroup { path: String },
    #[error(
        "no process is in a container whose id begins with `{id}` (containers here: {running}).\n  \
         A container's name is known to its runtime only: `docker inspect -f '{{{{.Id}}}}' NAME`, `podman ps` or `crictl ps` show ids"
    )]
    NoSuchContainer { id: String, running: String },
    #[error("`{id}` is the beginning of several containers' ids ({candidates}): give more of it")]
    AmbiguousContainer { id: String, candidates: String },
}

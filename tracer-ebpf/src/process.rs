//! `process`: a target process or thread forked, executed a program or exited.

use bytemuck::{Pod, Zeroable};

use crate::Header;

/// `action`: a process or thread began; `header` names the child, `parent_*` who forked it.
pub const FORK: u32 = 1;
/// `action`: the process executes another program.
pub const EXEC: u32 = 2;
/// `action`: the thread ended; the process did when `tid == tgid` (its last thread may end later).
pub const EXIT: u32 = 3;

/// Life of a process or thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Process {
    pub header: Header,
    pub action: u32,
    /// FORK: the forking process; else 0.
    pub parent_tgid: u32,
    /// FORK: the forking thread; EXEC: the thread id before the exec; else 0.
    pub parent_tid: u32,
    pub _pad: u32,
    /// Thread name, NUL-padded.
    pub comm: [u8; 16],
}

const _: () = assert!(size_of::<Process>() == 72);

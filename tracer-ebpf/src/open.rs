//! `open`: a target opens a file that may be an engine.

use bytemuck::{Pod, Zeroable};

use crate::Header;

/// Longest path, its end included; a longer one is cut, and then no engine's.
pub const MAX_PATH_BYTES: usize = 1024;

/// What names of engine files end in: no other opens leave the kernel. At most seven bytes each.
pub const SUFFIXES: [&str; 3] = [".plan", ".engine", ".trt"];

/// `Open::folder`: relative paths begin in the process's working directory (`AT_FDCWD`).
pub const WORKING_DIRECTORY: i32 = -100;

/// A file is to be opened. Tail: `path_bytes` of path as the program says it, without an end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Open {
    pub header: Header,
    pub path_bytes: u32,
    /// The descriptor of the directory that a relative path begins in.
    pub folder: i32,
}

const _: () = assert!(size_of::<Open>() == 48);

/// Attach cookie: the point's, and whether the path is argument 1, after the directory's descriptor.
#[must_use]
pub const fn cookie(point: u32, has_folder: bool) -> u64 {
    crate::call::cookie(point, false) | (has_folder as u64) << 40
}

/// Whether there is a directory's descriptor before the path.
#[must_use]
pub const fn has_folder(cookie: u64) -> bool {
    cookie >> 40 & 1 == 1
}

//! Files that stay open from when they were seen until names are looked up: an open file can be read though its process,
//! the container that it was in, and its name are gone.

use std::{
    collections::HashMap,
    fs::File,
    os::fd::{AsRawFd as _, RawFd},
    path::PathBuf,
    sync::Arc,
};

use crate::event::ProcessId;

/// What a recording keeps open.
#[derive(Debug, Default)]
pub struct HeldFiles {
    /// By number of the mapping. Mappings of one file have the same descriptor.
    pub mapped: HashMap<u32, Arc<File>>,
    /// What processes write about code that they generate.
    pub perf_maps: HashMap<ProcessId, File>,
}

impl HeldFiles {
    /// The descriptor of the file behind a mapping.
    pub(super) fn descriptor(&self, mapping: u32) -> Option<RawFd> {
        self.mapped.get(&mapping).map(|file| file.as_raw_fd())
    }

    pub(super) fn perf_map(&self, process: ProcessId) -> Option<PathBuf> {
        self.perf_maps.get(&process).map(|file| path(file.as_raw_fd()))
    }
}

/// Where an open file of this process can be opened again.
pub(super) fn path(descriptor: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{descriptor}"))
}

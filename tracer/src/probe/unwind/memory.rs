//! Memory of a live process, through /proc.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use crate::{event::ProcessId, python::Memory};

/// Open memory of one process; of no other one that gets its number later.
pub(crate) struct ProcessMemory(File);

impl ProcessMemory {
    /// # Errors
    /// The process is gone, or may not be looked into.
    pub(crate) fn open(process: ProcessId) -> io::Result<Self> {
        File::open(format!("/proc/{}/mem", process.tgid)).map(Self)
    }
}

impl Memory for ProcessMemory {
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(to, address)
    }
}

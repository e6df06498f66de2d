//! Engine files: what a process executes on the GPU, as it lies on the disk.

use super::ProcessId;

/// How it is known that a process uses the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineSeen {
    /// It was opened.
    #[default]
    Opened,
    /// It was open when the process was first looked at.
    Open,
    /// It is mapped.
    Mapped,
}

/// An engine file of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineFile {
    /// When it was opened, or found.
    pub time_ns: u64,
    pub process: ProcessId,
    pub seen: EngineSeen,
    /// As the process sees it.
    pub path: String,
    /// Size; 0 when it could not be looked at.
    pub bytes: u64,
    /// When it was last changed, ns since the epoch (CLOCK_REALTIME of whoever wrote it).
    pub modified_ns: u64,
    /// SHA-256 of its first 4096 bytes, its last 4096 bytes and its size as 8 bytes, most significant first; empty when it
    /// could not be read.
    pub fingerprint: Vec<u8>,
    /// Why it could not be looked at or read; else empty.
    pub problem: String,
}

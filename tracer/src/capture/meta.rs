//! `meta.json`: what a capture is.

use std::collections::BTreeMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::error::{Context, Error, ErrorKind, Result};
use super::folder::Folder;
use crate::event::ProcessId;
use crate::host_clock::monotonic_ns;

/// Version of the capture format: it grows when an older reader would misread a newer capture.
pub const VERSION: u32 = 1;
const SCHEMA: &str = "tracer.capture/";

/// What was recorded, where, when and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// `tracer.capture/` and [`VERSION`].
    pub schema: String,
    /// Version of the tracer that recorded.
    pub tool_version: String,
    pub host: String,
    /// Kernel release, as `uname -r`.
    pub kernel: String,
    pub cpus: u32,
    pub boot_id: String,
    /// CLOCK_REALTIME ns since the epoch, and CLOCK_MONOTONIC ns, at the start of the recording.
    pub started_realtime_ns: u64,
    pub started_monotonic_ns: u64,
    /// CLOCK_MONOTONIC ns at the end; `None` until the recorder has stopped.
    pub ended_monotonic_ns: Option<u64>,
    /// Command line of the recorder.
    pub command: Vec<String>,
    /// What was traced, as the user named it (`pid 4711`, `comm server`, a command line).
    pub target: String,
    /// The processes that were traced from the start.
    pub processes: Vec<MetaProcess>,
    pub options: BTreeMap<String, String>,
    /// What could not be recorded on this machine, and why.
    pub not_recorded: BTreeMap<String, String>,
    /// A traced library was a stand-in: GPU times are simulated.
    pub simulated: bool,
    /// The derived tables are there.
    pub complete: bool,
    /// The recorder did not stop by itself (it was killed, or the machine was): the end may be missing.
    pub recovered: bool,
}

/// A process that was traced from the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetaProcess {
    pub tgid: u32,
    pub start_ticks: u64,
    pub comm: String,
    pub exe: String,
}

impl MetaProcess {
    #[must_use]
    pub fn id(&self) -> ProcessId {
        ProcessId { tgid: self.tgid, start_ticks: self.start_ticks }
    }
}

impl Meta {
    /// This machine, now. What is not known (no /proc) stays empty.
    #[must_use]
    pub fn here(command: Vec<String>, target: String) -> Self {
        Self {
            schema: format!("{SCHEMA}{VERSION}"),
            tool_version: env!("CARGO_PKG_VERSION").into(),
            host: read("/proc/sys/kernel/hostname"),
            kernel: read("/proc/sys/kernel/osrelease"),
            cpus: std::thread::available_parallelism()
                .map_or(0, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
            boot_id: boot_id(),
            started_realtime_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)),
            started_monotonic_ns: monotonic_ns(),
            command,
            target,
            ..Self::default()
        }
    }

    pub(crate) fn read(folder: &Folder) -> Result<Self> {
        const DOING: &str = "read";
        let path = folder.meta();
        let text = fs::read(&path).context(DOING, &path)?;
        // The version is looked at first: a newer file may not parse as this version's.
        #[derive(Deserialize)]
        struct Head {
            schema: String,
        }
        let head: Head = serde_json::from_slice(&text).context(DOING, &path)?;
        match head.schema.strip_prefix(SCHEMA).and_then(|version| version.parse::<u32>().ok()) {
            Some(VERSION) => serde_json::from_slice(&text).context(DOING, &path),
            Some(newer) if newer > VERSION => {
                let detail = format!("its format is version {newer}, this tracer reads version {VERSION}");
                Err(Error::new(ErrorKind::NewerSchema, "open capture", folder.path(), detail))
            }
            _ => {
                let detail = format!("meta.json has the schema `{}`", head.schema.escape_default());
                Err(Error::new(ErrorKind::NotACapture, "open capture", folder.path(), detail))
            }
        }
    }

    pub(crate) fn write(&self, folder: &Folder) -> Result<()> {
        let path = folder.meta();
        let mut text = serde_json::to_vec_pretty(self).context("write", &path)?;
        text.push(b'\n');
        folder.replace(&path, &text)
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Names this boot of the machine; empty when it is not known.
pub(crate) fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id")
}

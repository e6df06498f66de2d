//! Threads by name.

use std::collections::HashMap;

use super::error::Result;
use super::open::Capture;

/// Names of a capture's threads: the last that each had.
#[derive(Clone, Debug, Default)]
pub struct ThreadNames(HashMap<(u32, u32), String>);

impl ThreadNames {
    /// Of a capture.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn read(capture: &Capture) -> Result<Self> {
        let mut names = HashMap::new();
        for process in capture.processes()? {
            let process = process?;
            if !process.comm.is_empty() {
                names.insert((process.origin.process.tgid, process.origin.tid), process.comm);
            }
        }
        Ok(Self(names))
    }

    /// The name of a thread (tgid, tid), where it is known.
    #[must_use]
    pub fn known(&self, thread: (u32, u32)) -> Option<&str> {
        self.0.get(&thread).map(String::as_str)
    }

    /// The name, or what there is instead.
    #[must_use]
    pub fn of(&self, thread: (u32, u32)) -> String {
        self.known(thread).map_or_else(|| format!("thread-{}", thread.1), str::to_owned)
    }
}

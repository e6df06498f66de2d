//! `tracer record` as a child process, and what it uses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::{clock, server::Running};

const PATIENCE: Duration = Duration::from_secs(30);
/// Exit code of a recording that saw neither steps nor tokens.
const NO_TOKENS: i32 = 3;
const POLL: Duration = Duration::from_millis(2);

/// A recording in progress.
pub(crate) struct Recorder {
    running: Running,
    folder: PathBuf,
    clock: libc::clockid_t,
}

/// What the recorder has used so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) cpu_ns: u64,
    /// Most memory so far, in bytes.
    pub(crate) peak_rss: u64,
    /// Size of the raw tables.
    pub(crate) raw_bytes: u64,
}

/// What `tracer record --json` prints.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Summary {
    pub(crate) seconds: f64,
    pub(crate) events: u64,
    pub(crate) tokens: u64,
    pub(crate) dropped: u64,
}

impl Recorder {
    /// Starts recording a process into a new folder, as a user would.
    pub(crate) fn start(pid: u32, folder: &Path, options: &[&str]) -> Result<Self> {
        let program = standin::built("tracer", "tracer")?;
        let output = summary_file(folder);
        let output = File::create(&output).with_context(|| format!("cannot write {}", output.display()))?;
        let mut command = Command::new(program);
        command
            .args(["record", "--quiet", "--json", "--pid", &pid.to_string(), "-o"])
            .arg(folder)
            .args(options);
        let running = Running::start(command.stdin(Stdio::null()).stdout(output))?;
        let clock = clock::process_clock(running.0.id())?;
        Ok(Self { running, folder: folder.to_owned(), clock })
    }

    /// Waits until the recorder has written more rows of a raw table, which it does each second.
    pub(crate) fn wait_for_flush(&mut self, table: &str) -> Result<()> {
        let file = self.folder.join("raw").join(table).with_extension("arrows");
        // What is there without any row: a schema.
        const SCHEMA_BYTES: u64 = 4_096;
        let bytes = || fs::metadata(&file).map_or(0, |metadata| metadata.len()).max(SCHEMA_BYTES);
        let before = bytes();
        let patience = Instant::now() + PATIENCE;
        while bytes() == before {
            let ended = self.running.0.try_wait()?;
            ensure!(ended.is_none(), "the recorder ended ({})", ended.unwrap_or_default());
            ensure!(Instant::now() < patience, "no row of `{table}` within {} s", PATIENCE.as_secs());
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    pub(crate) fn usage(&self) -> Result<Use> {
        let raw = self.folder.join("raw");
        let mut raw_bytes = 0;
        for entry in fs::read_dir(&raw).with_context(|| format!("cannot read {}", raw.display()))? {
            raw_bytes += entry?.metadata()?.len();
        }
        Ok(Use {
            cpu_ns: clock::cpu_ns(self.clock)?,
            peak_rss: clock::peak_rss(self.running.0.id())?,
            raw_bytes,
        })
    }

    /// Ends the recording as Ctrl-C does, and waits for the capture to be finished.
    pub(crate) fn stop(mut self) -> Result<Summary> {
        let pid = self.running.0.id().cast_signed();
        // SAFETY: a plain system call; the child has not been waited for, so that its number is still its own.
        unsafe { libc::kill(pid, libc::SIGINT) };
        let status = self.running.0.wait().context("cannot wait for the recorder")?;
        ensure!(status.success() || status.code() == Some(NO_TOKENS), "the recorder ended with {status}");
        let file = summary_file(&self.folder);
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("what the recorder prints: {text:?}"))
    }
}

fn summary_file(folder: &Path) -> PathBuf {
    folder.with_added_extension("json")
}

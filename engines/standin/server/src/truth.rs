//! The truth log: JSON lines of what really happened. All times are CLOCK_MONOTONIC ns.
//!
//! Threads push records to a list; a thread of its own writes them, so that logging disturbs little. What is pushed less
//! than [`PERIOD`] before the process is killed is lost.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::mem::take;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

use crate::bug::Bug;

const PERIOD: Duration = Duration::from_millis(50);

/// One line.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Record {
    Server {
        pid: u32,
        start_ns: u64,
    },
    /// A request ended. `received_ns`: right after its head was read and parsed.
    Request {
        key: u64,
        id: String,
        tenant_id: String,
        model: String,
        model_version: String,
        received_ns: u64,
        end_ns: u64,
        prompt_tokens: u32,
        output_tokens: u32,
        finish: &'static str,
    },
    /// A token was handed to the client: `stamp_ns` right before its mark, `written_ns` after the write, 0 if it failed.
    Token {
        key: u64,
        index: u32,
        stamp_ns: u64,
        written_ns: u64,
        marked: bool,
    },
    /// A rank ran its step of an iteration. Slots are (request key, generation step, phase), `tokens` what it
    /// processed for each; those of `no_token` are the requests that it gave no token to.
    Step {
        batch_id: u64,
        rank: u32,
        tid: i32,
        enqueue_begin_ns: u64,
        enqueue_end_ns: u64,
        sync_end_ns: u64,
        marked: bool,
        slots: Vec<(u64, u32, u8)>,
        tokens: Vec<u32>,
        no_token: Vec<u64>,
    },
    /// Something was done wrong with a step; `other_batch_id`: and with this one.
    Bug {
        bug: Bug,
        batch_id: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        other_batch_id: Option<u64>,
    },
    /// Something held a step up, or, for cause `client`, the answer to a request (`key`).
    Stall {
        cause: &'static str,
        begin_ns: u64,
        end_ns: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        batch_id: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        key: Option<u64>,
    },
}

/// Where records go; without a file, nowhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct Truth(Option<Arc<Log>>);

#[derive(Debug)]
struct Log {
    records: Mutex<Vec<Record>>,
    file: Mutex<BufWriter<File>>,
}

impl Truth {
    /// Creates the file and starts the thread that writes it.
    pub(crate) fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self(None)) };
        let file =
            File::create(path).with_context(|| format!("cannot create the truth log {}", path.display()))?;
        let log = Arc::new(Log { records: Mutex::default(), file: Mutex::new(BufWriter::new(file)) });
        let writer = Arc::downgrade(&log);
        std::thread::Builder::new()
            .name("truth".to_owned())
            .spawn(move || {
                while let Some(log) = writer.upgrade() {
                    if let Err(error) = log.flush() {
                        eprintln!("truth log: {error}");
                    }
                    drop(log);
                    std::thread::sleep(PERIOD);
                }
            })
            .context("cannot start the truth log's thread")?;
        Ok(Self(Some(log)))
    }

    /// Adds a record, which is made only if there is a log.
    pub(crate) fn push(&self, record: impl FnOnce() -> Record) {
        if let Some(log) = &self.0 {
            let record = record();
            log.records.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        }
    }

    /// Writes everything that was pushed.
    pub(crate) fn flush(&self) -> std::io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |log| log.flush())
    }
}

impl Log {
    fn flush(&self) -> std::io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let records = take(&mut *self.records.lock().unwrap_or_else(PoisonError::into_inner));
        for record in records {
            serde_json::to_writer(&mut *file, &record)?;
            file.write_all(b"\n")?;
        }
        file.flush()
    }
}

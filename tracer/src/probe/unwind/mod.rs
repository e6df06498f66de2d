//! Keeps the kernel side's tables and mappings up to date: how stacks are walked in each target.
//!
//! In: what processes map, as it changes. Out: tables in the kernel, Python's offsets and threads, and figures for the
//! ledger. Reading files takes long, so it happens on a thread of its own; until a file's table is there, stacks end at
//! its code and say so.

mod memory;
mod ranges;
mod store;
mod worker;

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use aya::Ebpf;

pub(super) use memory::ProcessMemory;
use store::{Maps, Store};
use worker::{Task, Worker};

use super::{ProbeError, attach::Notice, process::FileMapping};
use crate::{
    event::ProcessId,
    python::Runtime,
    timeline::tables::LedgerRow,
    unwind::{Image, ImageError, Notes},
};

/// What there is, for the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    /// Files with a table in the kernel; bytes and rows of these tables.
    files: u64,
    bytes: u64,
    rows: u64,
    /// Files (and pieces of code without one) that are walked by frame pointers.
    without: u64,
    /// Tables that went to make room.
    evicted: u64,
    /// Time that building took, in µs.
    build_us: u64,
}

/// What both threads know.
#[derive(Default)]
struct Shared {
    figures: Mutex<Figures>,
    notices: Mutex<Vec<Notice>>,
    pythons: Mutex<HashMap<ProcessId, Arc<Runtime>>>,
    /// Tasks that are done with.
    done: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A thread that panicked while it held the lock has left whole values.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that reads files. Dropping it ends it.
pub(crate) struct Unwinder {
    tasks: Option<Sender<Task>>,
    sent: u64,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Unwinder {
    /// Takes the maps out of the loaded programs and starts. Without `tables` all is walked by frame pointers.
    pub(super) fn start(ebpf: &mut Ebpf, tables: bool) -> Result<Self, ProbeError> {
        let failed = |source: io::Error| ProbeError::Unwind { source };
        let store = Store::new(Maps::take(ebpf)?).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (tasks, receiver) = channel();
        let worker = Worker::new(store, shared.clone(), tables);
        let thread = std::thread::Builder::new().name("tracer-unwind".into());
        let thread = thread.spawn(move || worker.run(&receiver)).map_err(failed)?;
        Ok(Self { tasks: Some(tasks), sent: 0, shared, thread: Some(thread) })
    }

    fn send(&mut self, task: Task) {
        // A thread that is gone has panicked: no tables then, and no harm.
        if self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok()) {
            self.sent += 1;
        }
    }

    /// A process maps these files now, `epoch` being what the kernel side calls its program.
    pub(super) fn scan(&mut self, process: ProcessId, epoch: u32, files: Vec<FileMapping>) {
        self.send(Task::Scan { process, epoch, files });
    }

    /// A process is gone.
    pub(super) fn gone(&mut self, process: ProcessId) {
        self.send(Task::Gone(process));
    }

    /// A thread runs Python and its state is not known.
    pub(super) fn look_for_threads(&mut self, process: ProcessId) {
        self.send(Task::PythonThreads(process));
    }

    /// Waits until every table that was asked for is there, or the time is over.
    pub(super) fn settle(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while self.shared.done.load(Ordering::Acquire) < self.sent {
            if Instant::now() > until || self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// The interpreter of a process that runs a Python which is known.
    pub(super) fn python(&self, process: ProcessId) -> Option<Arc<Runtime>> {
        lock(&self.shared.pythons).get(&process).cloned()
    }

    pub(super) fn take_notices(&self) -> Vec<Notice> {
        std::mem::take(&mut lock(&self.shared.notices))
    }

    pub(super) fn ledger(&self) -> Vec<LedgerRow> {
        let figures = *lock(&self.shared.figures);
        let row = |name: &str, count| LedgerRow { process: None, name: name.into(), count, loss: false };
        vec![
            row("unwind_files", figures.files),
            row("unwind_files_without_table", figures.without),
            row("unwind_rows", figures.rows),
            row("unwind_table_bytes", figures.bytes),
            row("unwind_tables_evicted", figures.evicted),
            row("unwind_build_us", figures.build_us),
        ]
    }
}

impl Drop for Unwinder {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

/// How the frames of a mapped file will be walked, for `tracer doctor`.
#[derive(Clone, Debug)]
pub enum Way {
    /// By its table: rows, and what could not be used of it.
    Table { rows: usize, notes: Notes },
    /// By frame pointers, and why.
    FramePointers(String),
}

/// Looks at a file that a process maps.
#[must_use]
pub fn way(process: ProcessId, file: &FileMapping) -> Way {
    let built = worker::image_bytes(process, file).and_then(|bytes| {
        bytes.read(|bytes| {
            if worker::is_memory(file) {
                return worker::known_code(bytes).ok_or(NoTable::Anonymous);
            }
            Image::parse(bytes).and_then(|image| image.table()).map_err(Into::into)
        })
    });
    match built {
        Ok(table) => Way::Table { rows: table.rows.len(), notes: table.notes },
        Err(why) => Way::FramePointers(why.to_string()),
    }
}

/// The Python that a process runs: its version, or why its frames will not be read; `None` where it runs none.
#[must_use]
pub fn python(process: ProcessId, file: &FileMapping) -> Option<Result<String, String>> {
    worker::python_of(process, file)
        .map(|found| found.map(|runtime| runtime.version).map_err(|why| why.to_string()))
}

/// Why a mapping has no table.
#[derive(Debug, thiserror::Error)]
enum NoTable {
    #[error("generated code, in no file")]
    Anonymous,
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("{0}")]
    Image(#[from] ImageError),
    #[error("{0}")]
    Full(#[from] store::Full),
}

/// Whether a file may hold a Python interpreter, by its name.
fn may_be_python(path: &str) -> bool {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("python") || name.starts_with("libpython")
}

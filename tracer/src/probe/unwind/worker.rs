//! The thread that reads files and tells the kernel side.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::unix::fs::MetadataExt as _,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    },
    time::{Duration, Instant},
};

use tracer_abi::unwind::{TABLE_PENDING, WITHOUT_TABLE};

use super::{
    Figures, NoTable, Shared, lock, may_be_python,
    memory::ProcessMemory,
    store::{Store, TableId, Wanted},
};
use crate::{
    event::ProcessId,
    probe::{
        attach::{self, Notice},
        process::{self, FileMapping},
    },
    python::{Memory as _, Refused, Runtime, Versions},
    unwind::{Image, Segments, Table, python_trampolines, uprobe_trampoline},
};

/// How often the threads of Python processes are looked at: new ones have no state that is known.
const THREADS_EVERY: Duration = Duration::from_millis(200);
/// Also where asked for, since a thread may never get one.
const THREADS_AT_MOST_EVERY: Duration = Duration::from_millis(10);

/// How often mappings are published while tables are still being built.
const PUBLISH_EVERY: Duration = Duration::from_millis(50);

/// What to do.
pub(super) enum Task {
    Scan { process: ProcessId, epoch: u32, files: Vec<FileMapping> },
    Gone(ProcessId),
    PythonThreads(ProcessId),
}

/// A file as it was when it was read: its device and inode, and what changes when it is written anew.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    File {
        device: u64,
        inode: u64,
        bytes: u64,
        changed: (i64, i64),
    },
    /// The kernel's, the same in every process.
    Vdso,
    /// Code in no file that is known by what it does: a hash of it.
    Known(u64),
}

/// What became of a file.
enum Known {
    /// `content` is what tables are shared by.
    Table {
        segments: Segments,
        content: Content,
    },
    None,
}

/// Build-id, and a hash of what the table is made of.
type Content = (Vec<u8>, u64);

/// A process, as far as its stacks are concerned.
struct Target {
    process: ProcessId,
    epoch: u32,
    files: Vec<(FileMapping, Option<Key>)>,
    /// Not all of its files have been read.
    waits: bool,
    published: Instant,
    python: Option<(Arc<Runtime>, ProcessMemory, u32)>,
    threads_looked_at: Option<Instant>,
}

pub(super) struct Worker {
    store: Store,
    shared: Arc<Shared>,
    versions: Versions,
    files: HashMap<Key, Known>,
    tables: HashMap<Content, TableId>,
    targets: HashMap<u32, Target>,
    queue: VecDeque<(ProcessId, FileMapping, Key)>,
    queued: HashSet<Key>,
    /// Files that are left out, for a notice each.
    told: HashSet<String>,
    received: u64,
    build: Duration,
    wants_tables: bool,
}

impl Worker {
    pub(super) fn new(store: Store, shared: Arc<Shared>, wants_tables: bool) -> Self {
        Self {
            wants_tables,
            store,
            shared,
            versions: Versions::builtin(),
            files: HashMap::new(),
            tables: HashMap::new(),
            targets: HashMap::new(),
            queue: VecDeque::new(),
            queued: HashSet::new(),
            told: HashSet::new(),
            received: 0,
            build: Duration::ZERO,
        }
    }

    /// Works until nobody sends any more.
    pub(super) fn run(mut self, tasks: &Receiver<Task>) {
        loop {
            let task = if self.queue.is_empty() {
                self.rest();
                tasks.recv_timeout(THREADS_EVERY)
            } else {
                tasks.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            };
            match task {
                Ok(task) => {
                    self.received += 1;
                    self.handle(task);
                }
                Err(RecvTimeoutError::Timeout) if self.queue.is_empty() => {
                    let pythons: Vec<u32> = self.targets.keys().copied().collect();
                    pythons.into_iter().for_each(|tgid| self.look_at_threads(tgid, THREADS_EVERY / 2));
                }
                Err(RecvTimeoutError::Timeout) => self.build_next(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Nothing is left to do: says so.
    fn rest(&mut self) {
        let without = self.files.values().filter(|known| matches!(known, Known::None)).count();
        *lock(&self.shared.figures) = Figures {
            files: self.tables.len() as u64,
            bytes: self.store.table_bytes(),
            rows: self.store.rows(),
            without: without as u64,
            evicted: self.store.evicted,
            build_us: u64::try_from(self.build.as_micros()).unwrap_or(u64::MAX),
        };
        self.shared.done.store(self.received, Ordering::Release);
    }

    fn handle(&mut self, task: Task) {
        match task {
            Task::Scan { process, epoch, files } => self.scan(process, epoch, files),
            Task::Gone(process) => {
                lock(&self.shared.pythons).remove(&process);
                if self.targets.get(&process.tgid).is_some_and(|target| target.process == process) {
                    self.targets.remove(&process.tgid);
                    self.store.remove(process.tgid);
                }
            }
            Task::PythonThreads(process) => self.look_at_threads(process.tgid, THREADS_AT_MOST_EVERY),
        }
    }

    fn scan(&mut self, process: ProcessId, epoch: u32, files: Vec<FileMapping>) {
        let key = |file: &FileMapping| self.wants_tables.then(|| key(process, file)).flatten();
        let mut target = Target {
            process,
            epoch,
            files: files.into_iter().map(|file| (key(&file), file)).map(|(key, file)| (file, key)).collect(),
            waits: false,
            published: Instant::now(),
            python: None,
            threads_looked_at: None,
        };
        let mut unknown = Vec::new();
        for (file, key) in &target.files {
            let Some(key) = key else { continue };
            // A table may have gone while nobody used it.
            let is_known = match self.files.get(key) {
                Some(Known::Table { content, .. }) => self.table(content).is_some(),
                Some(Known::None) => true,
                None => false,
            };
            if !is_known {
                target.waits = true;
                if self.queued.insert(key.clone()) {
                    unknown.push((process, file.clone(), key.clone()));
                }
            }
        }
        // Small ones first: every stack goes through them.
        unknown.sort_by_key(|(_, _, key)| if let Key::File { bytes, .. } = key { *bytes } else { 0 });
        self.queue.extend(unknown);
        let before = self.targets.remove(&process.tgid);
        let same = before.filter(|before| (before.process, before.epoch) == (process, epoch));
        target.python = same.and_then(|same| same.python);
        self.publish(&target);
        if target.python.is_none() {
            // Its file must be read for it, so this comes second.
            target.python = self.find_python(&target);
            if target.python.is_some() {
                self.publish(&target);
            }
        }
        self.targets.insert(process.tgid, target);
        self.look_at_threads(process.tgid, Duration::ZERO);
    }

    fn table(&self, content: &Content) -> Option<TableId> {
        self.tables.get(content).copied().filter(|table| self.store.holds(*table))
    }

    fn build_next(&mut self) {
        let Some((process, file, key)) = self.queue.pop_front() else { return };
        self.queued.remove(&key);
        let began = cpu_time();
        let known = self.build(process, &file, &key).unwrap_or_else(|why| {
            // What has no file needs no words: it is generated code.
            if self.told.insert(file.path.clone()) && matches!(key, Key::File { .. }) {
                let text = format!("stacks through it go by frame pointers ({why})");
                let notice = Notice { process, library: file.path.clone(), text };
                lock(&self.shared.notices).push(notice);
            }
            Known::None
        });
        self.build += cpu_time().saturating_sub(began);
        self.files.insert(key, known);
        let waiting: Vec<u32> =
            self.targets.iter().filter(|(_, target)| target.waits).map(|(tgid, _)| *tgid).collect();
        for tgid in waiting {
            let Some(mut target) = self.targets.remove(&tgid) else { continue };
            target.waits = !self.is_ready(&target);
            if !target.waits || target.published.elapsed() > PUBLISH_EVERY {
                target.published = Instant::now();
                self.publish(&target);
            }
            self.targets.insert(tgid, target);
        }
    }

    fn is_ready(&self, target: &Target) -> bool {
        target.files.iter().all(|(_, key)| key.as_ref().is_none_or(|key| !self.queued.contains(key)))
    }

    fn build(&mut self, process: ProcessId, file: &FileMapping, key: &Key) -> Result<Known, NoTable> {
        let bytes = image_bytes(process, file)?;
        if let Key::Known(hash) = key {
            let table = bytes.read(|bytes| known_code(bytes).ok_or(NoTable::Anonymous))?;
            return self.put((b"known code".to_vec(), *hash), Segments::flat(table.end()), || Ok(table));
        }
        bytes.read(|bytes| {
            let image = Image::parse(bytes)?;
            let content = (image.build_id.clone(), image.fingerprint());
            self.put(content, image.segments.clone(), || Ok(image.table()?))
        })
    }

    /// Puts a table into the kernel, unless it is there.
    fn put(
        &mut self,
        content: Content,
        segments: Segments,
        table: impl FnOnce() -> Result<Table, NoTable>,
    ) -> Result<Known, NoTable> {
        if self.table(&content).is_none() {
            let table = self.store.add(&table()?)?;
            self.tables.insert(content.clone(), table);
            // What has made room for it.
            let Self { tables, store, .. } = self;
            tables.retain(|_, table| store.holds(*table));
        }
        Ok(Known::Table { segments, content })
    }

    /// Tells the kernel side what a process maps, as far as it is known.
    fn publish(&mut self, target: &Target) {
        let wanted: Vec<Wanted> = target
            .files
            .iter()
            .map(|(file, key)| {
                let bare =
                    Wanted { begin: file.begin, end: file.end, bias: 0, table: None, kind: WITHOUT_TABLE };
                let Some(key) = key else { return bare };
                match self.files.get(key) {
                    _ if self.queued.contains(key) => Wanted { kind: TABLE_PENDING, ..bare },
                    Some(Known::Table { segments, content }) => {
                        match segments.bias(file.begin, file.offset) {
                            Some(bias) => Wanted { bias, table: self.table(content), ..bare },
                            None => bare,
                        }
                    }
                    _ => bare,
                }
            })
            .collect();
        let python = target.python.as_ref().map_or(0, |(_, _, number)| *number);
        if let Err(why) = self.store.publish(target.process.tgid, target.epoch, python, &wanted) {
            let text = format!("its user stacks are not walked: {why}");
            let notice = Notice { process: target.process, library: "stacks".into(), text };
            lock(&self.shared.notices).push(notice);
        }
    }

    /// Finds the interpreter that a process runs, if it is one that is known.
    fn find_python(&mut self, target: &Target) -> Option<(Arc<Runtime>, ProcessMemory, u32)> {
        let process = target.process;
        lock(&self.shared.pythons).remove(&process);
        let candidates = target.files.iter().filter(|(file, _)| may_be_python(&file.path));
        let (found, path) = candidates
            .filter_map(|(file, _)| Some((find_python(process, file, &self.versions)?, &file.path)))
            .next()?;
        match found {
            Ok(runtime) => {
                let number = self.store.python(runtime.offsets.for_kernel()).ok()?;
                let runtime = Arc::new(runtime);
                lock(&self.shared.pythons).insert(process, runtime.clone());
                Some((runtime, ProcessMemory::open(process).ok()?, number))
            }
            Err(why) => {
                let notice = Notice { process, library: path.clone(), text: why.to_string() };
                lock(&self.shared.notices).push(notice);
                None
            }
        }
    }

    /// Tells the kernel side the states of a process's Python threads.
    fn look_at_threads(&mut self, tgid: u32, at_most_every: Duration) {
        let Some(target) = self.targets.get_mut(&tgid) else { return };
        let Some((runtime, memory, _)) = &target.python else { return };
        if target.threads_looked_at.is_some_and(|then| then.elapsed() < at_most_every) {
            return;
        }
        target.threads_looked_at = Some(Instant::now());
        let Ok(threads) = runtime.threads(memory) else { return };
        let names = host_ids(tgid);
        for (id, state) in threads {
            if let Some(id) = names.get(&id) {
                self.store.set_python_thread(*id, tgid, state);
            }
        }
    }
}

/// A process's thread ids as itself sees them → as the host does.
fn host_ids(tgid: u32) -> HashMap<u32, u32> {
    let ids = |(host, _): (u32, String)| {
        let status = fs::read_to_string(format!("/proc/{tgid}/task/{host}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some((line.split_whitespace().next_back()?.parse().ok()?, host))
    };
    process::threads(tgid).into_iter().filter_map(ids).collect()
}

/// Enough to see whether code may be known, and so much of it is.
const KNOWN_BY_BYTES: usize = 32;
const MOST_CODE_BYTES: usize = 1 << 20;

const VDSO: &str = "[vdso]";

/// What names the content of a mapping; `None` for code that has no table in any case.
fn key(process: ProcessId, file: &FileMapping) -> Option<Key> {
    if file.path == VDSO {
        return Some(Key::Vdso);
    }
    if is_memory(file) {
        let is_known = |bytes: &[u8]| known_code(bytes).is_some();
        let begins = memory(process, file, KNOWN_BY_BYTES).ok()?;
        let bytes = is_known(&begins).then(|| memory(process, file, MOST_CODE_BYTES)).and_then(Result::ok)?;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        return Some(Key::Known(hasher.finish()));
    }
    let (opened, _) = attach::open(process, file).ok()?;
    let metadata = opened.metadata().ok().filter(fs::Metadata::is_file)?;
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    let (device, inode, bytes) = (metadata.dev(), metadata.ino(), metadata.len());
    Some(Key::File { device, inode, bytes, changed })
}

/// The bytes of a mapped file, or of code that the kernel has put there.
pub(super) enum Bytes {
    File(memmap2::Mmap),
    Memory(Vec<u8>),
}

impl Bytes {
    pub(super) fn read<T>(&self, f: impl FnOnce(&[u8]) -> T) -> T {
        match self {
            Self::File(map) => f(map),
            Self::Memory(bytes) => f(bytes),
        }
    }
}

/// Whether a mapping holds no image of a file, nor the kernel's own.
pub(super) fn is_memory(file: &FileMapping) -> bool {
    file.inode == 0 && file.path != VDSO
}

/// The table of code that is in no file, where it is known.
pub(super) fn known_code(bytes: &[u8]) -> Option<Table> {
    uprobe_trampoline(bytes).or_else(|| python_trampolines(bytes))
}

/// The first bytes that a process has mapped somewhere.
fn memory(process: ProcessId, file: &FileMapping, at_most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(file.end - file.begin).unwrap_or(0).min(at_most)];
    ProcessMemory::open(process)?.read(file.begin, &mut bytes)?;
    Ok(bytes)
}

pub(super) fn image_bytes(process: ProcessId, file: &FileMapping) -> Result<Bytes, NoTable> {
    if file.inode == 0 {
        return Ok(Bytes::Memory(memory(process, file, MOST_CODE_BYTES)?));
    }
    let (opened, _) = attach::open(process, file)?;
    if !opened.metadata()?.is_file() {
        return Err(NoTable::Anonymous);
    }
    // SAFETY: the map is private and only read; a file that is truncated meanwhile would raise SIGBUS, but then in the
    // process that runs it as code, too.
    Ok(Bytes::File(unsafe { memmap2::Mmap::map(&opened) }?))
}

/// As [`find_python`], for one that asks once.
pub(super) fn python_of(process: ProcessId, file: &FileMapping) -> Option<Result<Runtime, Refused>> {
    may_be_python(&file.path).then(|| find_python(process, file, &Versions::builtin())).flatten()
}

fn find_python(
    process: ProcessId,
    file: &FileMapping,
    versions: &Versions,
) -> Option<Result<Runtime, Refused>> {
    let bytes = image_bytes(process, file).ok()?;
    let memory = ProcessMemory::open(process).ok()?;
    bytes.read(|bytes| {
        let segments = Image::parse(bytes).ok()?.segments;
        let bias = segments.bias(file.begin, file.offset)?;
        Runtime::find(bytes, bias, &memory, versions).transpose()
    })
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is where the result goes.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

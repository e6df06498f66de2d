//! Looks at the engine files of targets: size, time, and a fingerprint of their two ends.
//!
//! On a thread of its own, since a disk may be slow: files that are asked for faster than they can be read are counted,
//! not waited for. It reads regular files only, and of each 8 KiB at most; the target knows nothing of it.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tracer_abi::open::WORKING_DIRECTORY;

use crate::event::record::OpenedFile;
use crate::event::{EngineFile, EngineSeen, Event, ProcessId};

/// Files that wait to be looked at.
const MAX_WAITING: usize = 256;
/// How long the end of a recording waits for the last of them.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes at each end of a file that its fingerprint is of.
const END_BYTES: usize = 4096;

enum Job {
    Opened {
        time_ns: u64,
        process: ProcessId,
        file: OpenedFile,
    },
    /// What the process has open and mapped.
    Look {
        time_ns: u64,
        process: ProcessId,
    },
}

/// The thread, and the way to it.
pub(crate) struct EngineFiles {
    /// `None`: stopped.
    jobs: Option<SyncSender<Job>>,
    found: Receiver<EngineFile>,
    skipped: u64,
}

impl EngineFiles {
    pub(crate) fn start() -> Self {
        let (jobs, todo) = sync_channel(MAX_WAITING);
        let (results, found) = sync_channel(MAX_WAITING);
        let worker = move || {
            let mut known = HashSet::new();
            for job in todo {
                for file in look_at(job) {
                    let key = (
                        file.process,
                        file.path.clone(),
                        file.bytes,
                        file.modified_ns,
                        file.fingerprint.clone(),
                    );
                    if known.insert(key) && results.send(file).is_err() {
                        return;
                    }
                }
            }
        };
        let spawned = std::thread::Builder::new().name("engine-files".into()).spawn(worker);
        Self { jobs: spawned.is_ok().then_some(jobs), found, skipped: 0 }
    }

    /// A target opened a file.
    pub(crate) fn opened(&mut self, time_ns: u64, process: ProcessId, file: &OpenedFile) {
        self.ask(Job::Opened { time_ns, process, file: file.clone() });
    }

    /// A process became a target.
    pub(crate) fn look(&mut self, time_ns: u64, process: ProcessId) {
        self.ask(Job::Look { time_ns, process });
    }

    fn ask(&mut self, job: Job) {
        if self.jobs.as_ref().is_none_or(|jobs| jobs.try_send(job).is_err()) {
            self.skipped += 1;
        }
    }

    /// Files that were not looked at, because too many were opened at a time.
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// What was found since.
    pub(crate) fn drain(&mut self, out: &mut Vec<Event>) {
        out.extend(self.found.try_iter().map(Event::EngineFile));
    }

    /// The rest. A disk that does not answer costs what is left, and no more time than that.
    pub(crate) fn stop(&mut self, out: &mut Vec<Event>) {
        self.jobs = None;
        loop {
            match self.found.recv_timeout(PATIENCE) {
                Ok(file) => out.push(Event::EngineFile(file)),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    self.skipped += 1;
                    return;
                }
            }
        }
    }
}

fn look_at(job: Job) -> Vec<EngineFile> {
    match job {
        Job::Opened { time_ns, process, file } => {
            vec![identify(time_ns, process, EngineSeen::Opened, absolute(process, file))]
        }
        Job::Look { time_ns, process } => {
            let mut found = Vec::new();
            for (seen, path) in open_files(process).chain(mapped_files(process)) {
                if is_engine(&path) && !found.iter().any(|file: &EngineFile| file.path == path) {
                    found.push(identify(time_ns, process, seen, path));
                }
            }
            found
        }
    }
}

fn is_engine(path: &str) -> bool {
    tracer_abi::open::SUFFIXES.iter().any(|suffix| path.ends_with(suffix))
}

fn open_files(process: ProcessId) -> impl Iterator<Item = (EngineSeen, String)> {
    let entries = std::fs::read_dir(format!("/proc/{}/fd", process.tgid)).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.map(|path| (EngineSeen::Open, path.to_string_lossy().into_owned()))
}

fn mapped_files(process: ProcessId) -> impl Iterator<Item = (EngineSeen, String)> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.tgid)).unwrap_or_default();
    let paths: Vec<_> = maps
        .lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)))
        .map(|path| (EngineSeen::Mapped, path.to_owned()))
        .collect();
    paths.into_iter()
}

/// The path as the process sees it, from its root on.
fn absolute(process: ProcessId, file: OpenedFile) -> String {
    if file.path.starts_with('/') {
        return file.path;
    }
    let folder = match file.folder {
        WORKING_DIRECTORY => std::fs::read_link(format!("/proc/{}/cwd", process.tgid)),
        number => std::fs::read_link(format!("/proc/{}/fd/{number}", process.tgid)),
    };
    folder.map_or(file.path.clone(), |folder| folder.join(&file.path).to_string_lossy().into_owned())
}

/// Looks at a file in the root of its process.
fn identify(time_ns: u64, process: ProcessId, seen: EngineSeen, path: String) -> EngineFile {
    let opened = open_in_root(process, &path).and_then(|opened| {
        let metadata = opened.metadata()?;
        let no_file = || io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
        metadata.is_file().then_some((opened, metadata)).ok_or_else(no_file)
    });
    let file = EngineFile { time_ns, process, seen, path, ..EngineFile::default() };
    match opened {
        Ok((opened, metadata)) => {
            let (fingerprint, problem) = match fingerprint(&opened, metadata.len()) {
                Ok(sum) => (sum, String::new()),
                Err(error) => (Vec::new(), format!("cannot be read: {error}")),
            };
            let modified_ns = u64::try_from(metadata.mtime()).unwrap_or(0) * 1_000_000_000
                + u64::try_from(metadata.mtime_nsec()).unwrap_or(0);
            EngineFile { bytes: metadata.len(), modified_ns, fingerprint, problem, ..file }
        }
        Err(error) => EngineFile { problem: format!("cannot be opened: {error}"), ..file },
    }
}

/// Opens a file as the process would: its links lead to places below its own root, which may be a container's.
fn open_in_root(process: ProcessId, path: &str) -> io::Result<File> {
    let root = File::open(format!("/proc/{}/root", process.tgid))?;
    let path = CString::new(path)?;
    // SAFETY: all zero is a valid value of this plain struct.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    // A pipe of that name must not make this wait.
    how.flags = (libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT;
    // SAFETY: the descriptor is open, the path a string, the struct of the size that is said.
    let opened = unsafe {
        libc::syscall(libc::SYS_openat2, root.as_raw_fd(), path.as_ptr(), &raw const how, size_of_val(&how))
    };
    match RawFd::try_from(opened) {
        // SAFETY: the system call has just made this descriptor, for nobody else.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { File::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// SHA-256 of the first and the last [`END_BYTES`] and of the size (8 bytes, most significant first). A shorter file is
/// both ends.
fn fingerprint(file: &File, bytes: u64) -> io::Result<Vec<u8>> {
    let mut sum = Sha256::new();
    let end = usize::try_from(bytes).unwrap_or(END_BYTES).min(END_BYTES);
    let mut part = vec![0; end];
    for at in [0, bytes - end as u64] {
        file.read_exact_at(&mut part, at)?;
        sum.update(&part);
    }
    sum.update(bytes.to_be_bytes());
    Ok(sum.finalize().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> ProcessId {
        ProcessId { tgid: std::process::id(), start_ticks: 0 }
    }

    #[test]
    fn a_fingerprint_is_of_both_ends_and_the_size() {
        let folder = tempfile::tempdir().unwrap();
        let of = |content: &[u8]| {
            let path = folder.path().join("a.plan");
            std::fs::write(&path, content).unwrap();
            identify(5, here(), EngineSeen::Opened, path.to_string_lossy().into_owned())
        };
        let large: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
        let file = of(&large);
        let whole = [&large[..4096], &large[100_000 - 4096..], &100_000u64.to_be_bytes()[..]].concat();
        assert_eq!(file.fingerprint, Sha256::digest(&whole).to_vec());
        assert_eq!((file.bytes, file.problem.as_str(), file.time_ns), (100_000, "", 5));
        assert!(file.modified_ns > 1_600_000_000_000_000_000);
        let mut other = large.clone();
        other[50_000] += 1;
        assert_eq!(of(&other).fingerprint, file.fingerprint, "the middle is not looked at");
        other.push(0);
        assert_ne!(of(&other).fingerprint, file.fingerprint);
        let short = of(b"abc").fingerprint;
        assert_eq!(short, Sha256::digest([&b"abcabc"[..], &3u64.to_be_bytes()].concat()).to_vec());
        assert_eq!(of(b"").fingerprint, Sha256::digest([0; 8]).to_vec());
    }

    #[test]
    fn what_cannot_be_read_says_why_and_nothing_waits() {
        let folder = tempfile::tempdir().unwrap();
        let look = |name: &str| {
            let path = folder.path().join(name).to_string_lossy().into_owned();
            identify(0, here(), EngineSeen::Opened, path)
        };
        assert!(look("missing.plan").problem.contains("No such file"));
        std::fs::create_dir(folder.path().join("folder.plan")).unwrap();
        assert_eq!(look("folder.plan").problem, "cannot be opened: it is no regular file");
        let pipe =
            std::ffi::CString::new(folder.path().join("pipe.plan").to_string_lossy().as_bytes()).unwrap();
        // SAFETY: a valid path.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        assert_eq!(look("pipe.plan").problem, "cannot be opened: it is no regular file");
    }

    #[test]
    fn relative_paths_begin_where_the_program_says_and_links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.plan"), b"engine").unwrap();
        std::os::unix::fs::symlink("a.plan", folder.path().join("link.plan")).unwrap();
        let opened = File::open(folder.path()).unwrap();
        let relative = OpenedFile { folder: opened.as_raw_fd(), path: "link.plan".into() };
        let path = absolute(here(), relative);
        assert_eq!(path, folder.path().join("link.plan").to_string_lossy());
        let (link, file) = (identify(0, here(), EngineSeen::Opened, path), folder.path().join("a.plan"));
        assert_eq!(link.bytes, 6);
        let file = identify(0, here(), EngineSeen::Opened, file.to_string_lossy().into_owned());
        assert_eq!(link.fingerprint, file.fingerprint);
        let working = OpenedFile { folder: WORKING_DIRECTORY, path: "b.plan".into() };
        let here_now = std::env::current_dir().unwrap().join("b.plan");
        assert_eq!(absolute(here(), working), here_now.to_string_lossy());
    }

    #[test]
    fn open_and_mapped_files_are_found_and_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, b"engine").unwrap();
            File::open(path).unwrap()
        };
        let (_open, mapped) = (write("open.engine"), write("mapped.plan"));
        // SAFETY: nobody changes the file.
        let map = unsafe { memmap2::Mmap::map(&mapped) }.unwrap();
        drop(mapped);
        let _other = write("other.bin");
        let mut files = EngineFiles::start();
        files.look(1, here());
        files.look(2, here());
        let mut events = Vec::new();
        files.stop(&mut events);
        drop(map);
        let folder = folder.path().to_string_lossy().into_owned();
        let mut seen: Vec<_> = events
            .into_iter()
            .filter_map(|event| match event {
                Event::EngineFile(file) if file.path.starts_with(&folder) => {
                    Some((file.seen, file.time_ns, file.path))
                }
                _ => None,
            })
            .collect();
        seen.sort_by(|a, b| a.2.cmp(&b.2));
        assert_eq!(
            seen,
            [
                (EngineSeen::Mapped, 1, format!("{folder}/mapped.plan")),
                (EngineSeen::Open, 1, format!("{folder}/open.engine"))
            ]
        );
        assert_eq!(files.skipped(), 0);
    }
}

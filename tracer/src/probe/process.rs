//! Finding processes.

use std::io;

use procfs::process::{MMPermissions, MMapPath, Process as ProcProcess};

use super::ProbeError;
use crate::event::ProcessId;

/// An executable mapping of a live process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMapping {
    pub begin: u64,
    pub end: u64,
    pub offset: u64,
    pub device: (i32, i32),
    pub inode: u64,
    /// Path as the process sees it, without ` (deleted)`; `[vdso]` and the like; empty for memory that is no file's.
    pub path: String,
    pub deleted: bool,
}

/// A process that runs now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: ProcessId,
    pub comm: String,
}

/// Identity and name of a live process.
///
/// # Errors
/// It is gone, or /proc cannot be read.
pub fn find(pid: u32) -> Result<Found, ProbeError> {
    let stat = open(pid)?.stat().map_err(|error| proc_error(pid, error))?;
    Ok(Found { id: ProcessId { tgid: pid, start_ticks: stat.starttime }, comm: stat.comm })
}

/// Whether the process still runs. One that has ended and that its parent has not asked about yet (a zombie) does not.
#[must_use]
pub fn runs(id: ProcessId) -> bool {
    let Ok(stat) =
        open(id.tgid).and_then(|process| process.stat().map_err(|error| proc_error(id.tgid, error)))
    else {
        return false;
    };
    stat.starttime == id.start_ticks && !matches!(stat.state, 'Z' | 'X')
}

/// Whether a process, or its executable, is called so.
#[must_use]
pub fn is_called(found: &Found, comm: &str) -> bool {
    found.comm == comm || executable(found.id.tgid).as_deref() == Some(comm)
}

fn executable(pid: u32) -> Option<String> {
    executable_path(pid)?.rsplit('/').next().map(str::to_owned)
}

/// Path of the program that a process runs, as the process sees it.
#[must_use]
pub fn executable_path(pid: u32) -> Option<String> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok().map(|path| path.to_string_lossy().into_owned())
}

/// All live processes, with the size of their address space in bytes (0: a kernel thread).
///
/// # Errors
/// /proc cannot be read.
pub fn all() -> Result<Vec<(Found, u64)>, ProbeError> {
    let processes = procfs::process::all_processes().map_err(|error| proc_error(0, error))?;
    Ok(processes
        .filter_map(Result::ok)
        .filter_map(|process| process.stat().ok())
        .filter(|stat| !matches!(stat.state, 'Z' | 'X'))
        .map(|stat| {
            let id = ProcessId { tgid: stat.pid.unsigned_abs(), start_ticks: stat.starttime };
            (Found { id, comm: stat.comm }, stat.vsize)
        })
        .collect())
}

/// A process and all its living descendants.
///
/// # Errors
/// It is gone, or /proc cannot be read.
pub fn tree(root: u32) -> Result<Vec<Found>, ProbeError> {
    let mut tree = vec![find(root)?];
    let mut index = 0;
    while let Some(parent) = tree.get(index) {
        // A task that ends meanwhile has no children to follow.
        for task in tasks(parent.id.tgid) {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
                if let Ok(found) = find(child) {
                    tree.push(found);
                }
            }
        }
        index += 1;
    }
    Ok(tree)
}

/// TCP ports on which a process listens; none where that cannot be read.
#[must_use]
pub fn listening_ports(pid: u32) -> Vec<u16> {
    let Ok(process) = open(pid) else { return Vec::new() };
    let sockets: std::collections::HashSet<u64> = process
        .fd()
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter_map(|fd| match fd.target {
            procfs::process::FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
        .collect();
    let entries = [process.tcp(), process.tcp6()].into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.state == procfs::net::TcpState::Listen && sockets.contains(&entry.inode))
        .map(|entry| entry.local_address.port())
        .collect()
}

/// Whether a process has an io_uring; false where that cannot be read.
#[must_use]
pub fn has_ring(pid: u32) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|file| std::fs::read_link(file.path()).ok())
        .any(|to| to.as_os_str() == "anon_inode:[io_uring]")
}

/// Whether a thread of a process is under seccomp (seccomp(2)): then system calls that it never heard of may kill it.
#[must_use]
pub fn is_under_seccomp(pid: u32) -> bool {
    tasks(pid).any(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
        mode.is_some_and(|mode| mode.trim() != "0")
    })
}

/// The folders of a process's threads; none of one that is gone.
fn tasks(pid: u32) -> impl Iterator<Item = std::fs::DirEntry> {
    std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten()
}

/// Ids and names of the threads of a process.
#[must_use]
pub fn threads(pid: u32) -> Vec<(u32, String)> {
    tasks(pid)
        .filter_map(|task| {
            let tid = task.file_name().to_str()?.parse().ok()?;
            let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
            Some((tid, comm.trim_end().to_owned()))
        })
        .collect()
}

/// The executable mappings of a live process.
///
/// # Errors
/// It is gone, or its maps cannot be read.
pub fn mappings(pid: u32) -> Result<Vec<FileMapping>, ProbeError> {
    let maps = open(pid)?.maps().map_err(|error| proc_error(pid, error))?;
    Ok(maps
        .into_iter()
        .filter(|map| map.perms.contains(MMPermissions::EXECUTE))
        .filter_map(|map| {
            let path = match map.pathname {
                MMapPath::Path(path) => path.to_string_lossy().into_owned(),
                MMapPath::Vdso => "[vdso]".to_owned(),
                MMapPath::Heap => "[heap]".to_owned(),
                MMapPath::Stack => "[stack]".to_owned(),
                // Anonymous memory may have a name (prctl(2), PR_SET_VMA_ANON_NAME).
                MMapPath::Other(name) if name.starts_with("anon:") => String::new(),
                MMapPath::Other(name) => format!("[{name}]"),
                MMapPath::Anonymous => String::new(),
                _ => return None,
            };
            let (path, deleted) = match path.strip_suffix(" (deleted)") {
                Some(path) => (path.to_owned(), true),
                None => (path, false),
            };
            Some(FileMapping {
                begin: map.address.0,
                end: map.address.1,
                offset: map.offset,
                device: map.dev,
                inode: map.inode,
                path,
                deleted,
            })
        })
        .collect())
}

/// How many descriptors this process may have.
pub(super) fn descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is where the result goes.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

fn open(pid: u32) -> Result<ProcProcess, ProbeError> {
    let number = i32::try_from(pid).map_err(|_| ProbeError::ProcessGone { pid })?;
    ProcProcess::new(number).map_err(|error| proc_error(pid, error))
}

fn proc_error(pid: u32, error: procfs::ProcError) -> ProbeError {
    match error {
        procfs::ProcError::NotFound(_) => ProbeError::ProcessGone { pid },
        procfs::ProcError::Io(source, _) => ProbeError::Process { pid, source },
        other => ProbeError::Process { pid, source: io::Error::other(other.to_string()) },
    }
}

//! The folder of a capture: making files in it, replacing them as a whole, locking it.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chown, fchown};
use std::path::{Path, PathBuf};

use super::error::{Context, Error, ErrorKind, Result};

/// Folder, inside the capture, of the raw tables as they are recorded.
const RAW: &str = "raw";
const META: &str = "meta.json";

/// The user to whom everything belongs that is made here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    gid: u32,
}

impl Owner {
    /// Under sudo, the user who called it.
    fn from_sudo() -> Option<Self> {
        // SAFETY: geteuid reads the caller's own credentials and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return None;
        }
        let id = |name| std::env::var(name).ok()?.parse().ok();
        Some(Self { uid: id("SUDO_UID")?, gid: id("SUDO_GID")? })
    }
}

/// A capture's folder. Holding a `Folder` from [`Folder::create`] or [`Folder::lock`] keeps others from changing it.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    owner: Option<Owner>,
    /// The open folder, which carries the lock; the kernel releases it when the process ends, however it ends.
    handle: File,
}

impl Folder {
    /// Makes the folder (mode 0700), or takes an empty one that is there, and locks it.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        const DOING: &str = "record into";
        let owner = Owner::from_sudo();
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        match builder.create(path) {
            Ok(()) => own_dir(path, owner).context(DOING, path)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let mut entries = fs::read_dir(path).map_err(|error| match error.kind() {
                    io::ErrorKind::NotADirectory => {
                        Error::new(ErrorKind::Exists, DOING, path, "it exists and is not a folder")
                    }
                    _ => Error::io(error, DOING, path),
                })?;
                if entries.next().is_some() {
                    return Err(Error::new(
                        ErrorKind::Exists,
                        DOING,
                        path,
                        "the folder exists and is not empty",
                    ));
                }
            }
            Err(error) => return Err(Error::io(error, DOING, path)),
        }
        let folder = Self { path: path.into(), owner, handle: File::open(path).context(DOING, path)? };
        folder.take_lock(DOING)?;
        let raw = folder.path.join(RAW);
        builder.create(&raw).and_then(|()| own_dir(&raw, owner)).context("create", &raw)?;
        Ok(folder)
    }

    /// Opens the folder of a capture, for reading.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        const DOING: &str = "open capture";
        let handle = File::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Error::new(ErrorKind::NotACapture, DOING, path, "there is no such folder")
            }
            _ => Error::io(error, DOING, path),
        })?;
        let folder = Self { path: path.into(), owner: Owner::from_sudo(), handle };
        match fs::symlink_metadata(folder.meta()) {
            Ok(_) => Ok(folder),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Err(Error::new(ErrorKind::NotACapture, DOING, path, "it holds no meta.json"))
            }
            Err(error) => Err(Error::io(error, DOING, path)),
        }
    }

    /// Opens the folder of a capture, for changing it.
    pub(crate) fn lock(path: &Path) -> Result<Self> {
        let folder = Self::open(path)?;
        folder.take_lock("finish")?;
        Ok(folder)
    }

    fn take_lock(&self, doing: &'static str) -> Result<()> {
        self.handle.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                Error::new(ErrorKind::InUse, doing, &self.path, "it is being recorded or finished")
            }
            TryLockError::Error(error) => Error::io(error, doing, &self.path),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn meta(&self) -> PathBuf {
        self.path.join(META)
    }

    /// A raw table as it is recorded.
    pub(crate) fn raw(&self, table: &str) -> PathBuf {
        self.path.join(RAW).join(table).with_extension("arrows")
    }

    /// A finished table.
    pub(crate) fn table(&self, table: &str) -> PathBuf {
        self.path.join(table).with_extension("parquet")
    }

    /// Makes a new file, readable by its owner only. A link that someone put there is not followed.
    pub(crate) fn create_file(&self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?;
        if let Some(Owner { uid, gid }) = self.owner {
            fchown(&file, Some(uid), Some(gid))?;
        }
        Ok(file)
    }

    /// Begins a new version of a file, which takes the old one's place as a whole with [`Replacement::commit`].
    pub(crate) fn begin(&self, path: &Path) -> Result<Replacement> {
        let temporary = path.with_added_extension("tmp");
        self.remove(&temporary)?;
        let file = self.create_file(&temporary).context("create", &temporary)?;
        Ok(Replacement { file, temporary, path: path.into(), committed: false })
    }

    /// Replaces a file by these bytes.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut replacement = self.begin(path)?;
        replacement.file.write_all(bytes).context("write", path)?;
        replacement.commit()
    }

    /// Returns when the folder's entries, and so the files that took their places, are on disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.handle.sync_all().context("write", &self.path)
    }

    /// Removes a file that may be missing.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(error, "remove", path)),
            _ => Ok(()),
        }
    }

    /// Removes the folder of raw tables when nothing is left in it.
    pub(crate) fn remove_empty_raw(&self) {
        // Not empty, or already gone: both are fine.
        let _ = fs::remove_dir(self.path.join(RAW));
    }
}

/// A file that is being written beside the one that it will replace. Dropping it leaves the old one.
#[derive(Debug)]
pub(crate) struct Replacement {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    committed: bool,
}

impl Replacement {
    /// A handle to write to.
    pub(crate) fn writer(&self) -> Result<File> {
        self.file.try_clone().context("write", &self.path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place, once its content is on disk: readers see the old content or the new.
    pub(crate) fn commit(mut self) -> Result<()> {
        self.file.sync_all().context("write", &self.path)?;
        fs::rename(&self.temporary, &self.path).context("write", &self.path)?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.committed {
            // What stays behind is removed when the file is next begun.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn own_dir(path: &Path, owner: Option<Owner>) -> io::Result<()> {
    owner.map_or(Ok(()), |Owner { uid, gid }| chown(path, Some(uid), Some(gid)))
}

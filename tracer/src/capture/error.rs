//! Errors of captures.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use arrow::error::ArrowError;
use parquet::errors::ParquetError;

use super::column::ColumnError;

/// Result of an operation on a capture.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of thing went wrong, for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The output folder exists and is not empty.
    Exists,
    /// The folder is missing or holds no capture.
    NotACapture,
    /// A newer version of the tracer wrote it.
    NewerSchema,
    /// A recording, or another command, is working on it.
    InUse,
    /// It was not finished: its derived tables are missing.
    Unfinished,
    /// A file holds something else than it should.
    Damaged,
    /// The disk is full.
    NoSpace,
    /// The user may not read or write it.
    Denied,
    /// Anything else that the system refused.
    Io,
}

/// What failed, on which file, why, and what to do about it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    doing: &'static str,
    path: PathBuf,
    detail: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, doing: &'static str, path: &Path, detail: impl Into<String>) -> Self {
        Self { kind, doing, path: path.into(), detail: Some(detail.into()), source: None }
    }

    fn with_source(
        kind: ErrorKind,
        doing: &'static str,
        path: &Path,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, doing, path: path.into(), detail: None, source: Some(Box::new(source)) }
    }

    pub(crate) fn io(error: io::Error, doing: &'static str, path: &Path) -> Self {
        Self::with_source(io_kind(&error), doing, path, error)
    }

    /// What kind of thing went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The file or folder that it went wrong on.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn advice(&self) -> Option<&'static str> {
        Some(match self.kind {
            ErrorKind::Exists => "choose another folder, or remove this one",
            ErrorKind::NotACapture => "give the folder that `tracer record` wrote",
            ErrorKind::NewerSchema => "read it with the version of tracer that wrote it, or a newer one",
            ErrorKind::InUse => "wait until the recording has ended",
            ErrorKind::Unfinished => "run `tracer recover` on it first",
            ErrorKind::NoSpace => "free some space; what had been written before is intact",
            ErrorKind::Denied => "run as the user who recorded, or as root",
            ErrorKind::Damaged | ErrorKind::Io => return None,
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} {}", self.doing, self.path.display())?;
        match (&self.detail, &self.source) {
            (Some(detail), _) => write!(f, ": {detail}")?,
            (None, Some(source)) => write!(f, ": {source}")?,
            (None, None) => {}
        }
        self.advice().map_or(Ok(()), |advice| write!(f, " ({advice})"))
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

fn io_kind(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            ErrorKind::NoSpace
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Denied,
        _ => ErrorKind::Io,
    }
}

/// Adds to an error what was being done, and on which file.
pub(crate) trait Context<T> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error::io(error, doing, path))
    }
}

impl<T> Context<T> for Result<T, ArrowError> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| match error {
            ArrowError::IoError(_, error) => Error::io(error, doing, path),
            other => Error::with_source(ErrorKind::Damaged, doing, path, other),
        })
    }
}

impl<T> Context<T> for Result<T, ParquetError> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| match error {
            ParquetError::External(source) => match source.downcast::<io::Error>() {
                Ok(error) => Error::io(*error, doing, path),
                Err(source) => Error {
                    kind: ErrorKind::Damaged,
                    doing,
                    path: path.into(),
                    detail: None,
                    source: Some(source),
                },
            },
            other => Error::with_source(ErrorKind::Damaged, doing, path, other),
        })
    }
}

impl<T> Context<T> for Result<T, ColumnError> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error::with_source(ErrorKind::Damaged, doing, path, error))
    }
}

impl<T> Context<T> for Result<T, serde_json::Error> {
    fn context(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| match error.io_error_kind() {
            Some(kind) => Error::with_source(io_kind(&kind.into()), doing, path, error),
            None => Error::with_source(ErrorKind::Damaged, doing, path, error),
        })
    }
}

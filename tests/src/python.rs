//! The Python package `tracer_marks`, importable without being installed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The package's Python files and the extension that was built with this program, in a folder for PYTHONPATH.
pub struct Package(tempfile::TempDir);

impl Package {
    /// Puts it together.
    ///
    /// # Errors
    /// The extension is not built, or the folder cannot be written.
    pub fn make() -> Result<Self> {
        let package = Self(tempfile::tempdir()?);
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/marks/python/src/tracer_marks");
        fs::create_dir(package.folder().join("tracer_marks"))?;
        for entry in fs::read_dir(&sources).with_context(|| sources.display().to_string())? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                fs::copy(entry.path(), package.folder().join("tracer_marks").join(entry.file_name()))?;
            }
        }
        fs::copy(standin::built("libtracer_marks_python.so", "tracer-marks-python")?, package.extension())?;
        Ok(package)
    }

    /// For PYTHONPATH.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// The file that has the probe site.
    #[must_use]
    pub fn extension(&self) -> PathBuf {
        self.folder().join("tracer_marks/_native.abi3.so")
    }
}

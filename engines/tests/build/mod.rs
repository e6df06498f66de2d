//! Compiles small libraries for the tests.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a helper that fails fails its test")]
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

use engines::{Library, Profiles};

/// A folder of libraries; removed with the value.
pub(crate) struct Build {
    folder: tempfile::TempDir,
    count: AtomicUsize,
}

impl Build {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), count: AtomicUsize::new(0) }
    }

    /// Compiles the double of libnvinfer with these flags, stripped.
    pub(crate) fn nvinfer(&self, flags: &[&str]) -> PathBuf {
        self.compile("libnvinfer.so.10", &nvinfer_source(), &[flags, &["-s"]].concat())
    }

    /// Compiles a source file to a shared library of this name, alone in its folder.
    pub(crate) fn compile(&self, name: &str, source: &Path, flags: &[&str]) -> PathBuf {
        let folder = self.folder.path().join(self.count.fetch_add(1, Ordering::Relaxed).to_string());
        std::fs::create_dir(&folder).unwrap();
        let library = folder.join(name);
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-o"]).arg(&library);
        let status = command.args(flags).arg(source).status().expect("g++ is needed: apt-get install g++");
        assert!(status.success(), "{command:?}");
        library
    }

    /// Assembles a text to a shared library of this name.
    pub(crate) fn assemble(&self, name: &str, text: &str) -> PathBuf {
        let source = self.folder.path().join("source.s");
        std::fs::write(&source, text).unwrap();
        self.compile(name, &source, &["-nostdlib"])
    }
}

pub(crate) fn nvinfer_source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_nvinfer.cpp")
}

/// What the built-in profiles say of a file.
pub(crate) fn inspect(path: &Path) -> Option<Library> {
    Profiles::builtin().inspect(path, &std::fs::read(path).unwrap())
}

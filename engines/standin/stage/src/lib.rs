//! Puts the stand-in GPU libraries into a folder, under the names by which programs load them.
//!
//! In: what cargo built (the driver, NVML) and what this crate embeds (libnvinfer). Out: files. A program that is started with
//! `LD_LIBRARY_PATH` set to the folder uses the simulated GPU.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Why staging failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{file} is not in {target} or above: build it with `cargo build -p {package}`", target = target.display())]
    NotBuilt { file: String, package: String, target: PathBuf },
    #[error(
        "this build has no stand-in libnvinfer: install a C++ compiler (apt-get install g++) and build it again"
    )]
    NoCompiler,
}

/// A libnvinfer to stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Nvinfer {
    /// With the vtable layout of TensorRT 8.
    Trt8,
    /// With the vtable layout of TensorRT 10: what the stand-in server uses.
    #[default]
    Trt10,
    /// With the vtable layout of TensorRT 11.
    Trt11,
    /// TensorRT 10 without type information: its `enqueueV3` cannot be found.
    NoRtti,
    /// TensorRT 10 with two different implementations of `enqueueV3`.
    TwoImplementations,
}

impl Nvinfer {
    /// Every variant.
    pub const ALL: [Self; 5] = [Self::Trt8, Self::Trt10, Self::Trt11, Self::NoRtti, Self::TwoImplementations];

    /// The library's bytes; empty when there was no compiler to build it.
    const fn bytes(self) -> &'static [u8] {
        match self {
            Self::Trt8 => include_bytes!(concat!(env!("OUT_DIR"), "/trt8")),
            Self::Trt10 => include_bytes!(concat!(env!("OUT_DIR"), "/trt10")),
            Self::Trt11 => include_bytes!(concat!(env!("OUT_DIR"), "/trt11")),
            Self::NoRtti => include_bytes!(concat!(env!("OUT_DIR"), "/no_rtti")),
            Self::TwoImplementations => include_bytes!(concat!(env!("OUT_DIR"), "/two_impl")),
        }
    }

    /// Its soname.
    #[must_use]
    pub const fn soname(self) -> &'static str {
        match self {
            Self::Trt8 => "libnvinfer.so.8",
            Self::Trt10 | Self::NoRtti | Self::TwoImplementations => "libnvinfer.so.10",
            Self::Trt11 => "libnvinfer.so.11",
        }
    }

    /// Writes it into a folder, under its soname; returns its path. A library of that name there is replaced, and
    /// stays whole for the programs that have it loaded.
    ///
    /// # Errors
    /// When it was not built, or cannot be written.
    pub fn stage(self, dir: &Path) -> Result<PathBuf, Error> {
        if self.bytes().is_empty() {
            return Err(Error::NoCompiler);
        }
        let path = dir.join(self.soname());
        replace(&path, |new| fs::write(new, self.bytes()))?;
        Ok(path)
    }
}

/// Writes the driver, NVML and the default libnvinfer into a folder, which is created if need be.
///
/// # Errors
/// When a library was not built or cannot be written.
pub fn stage(dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(dir).map_err(|source| Error::Write { path: dir.to_owned(), source })?;
    stage_driver(dir)?;
    stage_nvml(dir)?;
    Nvinfer::default().stage(dir)?;
    Ok(())
}

/// Writes the driver into a folder: `libcuda.so.<version>` with the links `libcuda.so.1` and `libcuda.so`.
/// Returns its path.
///
/// # Errors
/// When it was not built, or cannot be written.
pub fn stage_driver(dir: &Path) -> Result<PathBuf, Error> {
    stage_built(dir, "libcuda.so", &built("libstandin_cuda.so", "standin-cuda")?)
}

/// Writes the management library into a folder: `libnvidia-ml.so.<version>` with links, as the driver. Returns its path.
///
/// # Errors
/// When it was not built, or cannot be written.
pub fn stage_nvml(dir: &Path) -> Result<PathBuf, Error> {
    stage_built(dir, "libnvidia-ml.so", &built("libstandin_nvml.so", "standin-nvml")?)
}

/// Copies a library to `<name>.<version>`, and makes the links `<name>.1` and `<name>`: `/proc/PID/maps` shows the name
/// behind links, and some programs look for the name without a number first.
fn stage_built(dir: &Path, name: &str, built: &Path) -> Result<PathBuf, Error> {
    let file = format!("{name}.{}", env!("CARGO_PKG_VERSION"));
    let path = dir.join(&file);
    replace(&path, |new| fs::copy(built, new).map(|_| ()))?;
    for link in [&format!("{name}.1"), name] {
        replace(&dir.join(link), |new| std::os::unix::fs::symlink(&file, new))?;
    }
    Ok(path)
}

/// The newest file of this name that cargo built into the target folder which the running program is in.
///
/// # Errors
/// When there is none; the error says which package to build.
pub fn built(file: &str, package: &str) -> Result<PathBuf, Error> {
    let exe = env::current_exe().unwrap_or_default();
    let not_built = || {
        let target = exe.parent().unwrap_or(Path::new("")).to_owned();
        Error::NotBuilt { file: file.to_owned(), package: package.to_owned(), target }
    };
    // Programs are in target/PROFILE, tests in target/PROFILE/deps, examples in target/PROFILE/examples.
    let folders = exe.ancestors().skip(1).take(2).flat_map(|dir| [dir.to_owned(), dir.join("deps")]);
    folders
        .map(|dir| dir.join(file))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max_by_key(|(modified, _)| *modified)
        .map(|(_, path)| path)
        .ok_or_else(not_built)
}

/// Makes a file under another name, then renames it into place.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), Error> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    make(&new)
        .and_then(|()| fs::rename(&new, path))
        .inspect_err(|_| _ = fs::remove_file(&new))
        .map_err(|source| Error::Write { path: path.to_owned(), source })
}

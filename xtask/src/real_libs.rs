//! `cargo xtask test --real-libs`: NVIDIA's own libraries, and the tests on them.
//!
//! They are fetched by name through pip, apt and npm, once, into `target/real-libs`, a folder for each; of each package
//! only the named files and folders stay. The resolver only reads them; the injected library is tested with NVTX's headers. Of the driver, the kernel tier and the benchmark call
//! functions that need no GPU; nothing else of them is ever loaded.

use crate::command::{cargo, display, root, run as run_command};
use crate::{setup, test};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Which {
    /// The newest lean TensorRT, the CUDA runtime and the CUDA driver: about 55 MB to fetch.
    Small,
    /// All that the tests know: about 3 GB to fetch, 3 GB on disk.
    All,
}

struct Package {
    /// The name that `engines/tests/real`, or `engines/inject/tests/nvtx.rs`, has for it.
    folder: &'static str,
    source: Source,
    files: &'static [&'static str],
}

enum Source {
    /// A requirement, and options that choose another Python or machine.
    Pip(&'static str, &'static [&'static str]),
    /// `libcuda1` in Debian's non-free section: a release and the version there.
    Driver(&'static str, &'static str),
    Npm(&'static str),
}

use Source::{Driver, Npm, Pip};

const fn package(folder: &'static str, source: Source, files: &'static [&'static str]) -> Package {
    Package { folder, source, files }
}

const DRIVER_550: Package =
    package("driver-550", Driver("trixie", "550.163.01-2"), &["libcuda.so.550.163.01"]);

const SMALL: [Package; 4] = [
    package("lean-11.4", Pip("tensorrt-lean-cu12-libs==11.4.0.106", &[]), LEAN_11),
    package("cudart-12.9", Pip("nvidia-cuda-runtime-cu12==12.9.79", &[]), CUDART_12),
    // Headers: all of them, where the package has them.
    package("nvtx-12.9", Pip("nvidia-nvtx-cu12==12.9.79", &[]), &["nvidia"]),
    DRIVER_550,
];

const LARGE: [Package; 19] = [
    package("lean-10.15", Pip("tensorrt-lean-cu12-libs==10.15.1.29", &[]), LEAN_10),
    package("lean-10.16", Pip("tensorrt-lean-cu12-libs==10.16.1.11", &[]), LEAN_10),
    package("lean-11.0", Pip("tensorrt-lean-cu12-libs==11.0.0.114", &[]), LEAN_11),
    package("lean-11.4-aarch64", Pip("tensorrt-lean-cu13-libs==11.4.0.106", AARCH64), LEAN_11),
    package(
        "dispatch-10.15",
        Pip("tensorrt-dispatch-cu12-libs==10.15.1.29", &[]),
        &["libnvinfer_dispatch.so.10"],
    ),
    package(
        "dispatch-11.4",
        Pip("tensorrt-dispatch-cu12-libs==11.4.0.106", &[]),
        &["libnvinfer_dispatch.so.11"],
    ),
    package(
        "bindings-11.4",
        Pip("tensorrt-lean-cu12-bindings==11.4.0.106", PYTHON_3_11),
        &["tensorrt_lean.so"],
    ),
    package("rtx-1.4", Pip("tensorrt-rtx-cu12-libs==1.4.0.76", &[]), RTX),
    package("rtx-1.5", Pip("tensorrt-rtx-cu12-libs==1.5.0.114", &[]), RTX),
    package("rtx-1.6", Pip("tensorrt-rtx-cu12-libs==1.6.1.120", &[]), RTX),
    package("rtx-1.7", Pip("tensorrt-rtx-cu12-libs==1.7.1.116", &[]), RTX),
    package("full-8.5.1", Pip("tensorrt==8.5.1.7", PYTHON_3_10), FULL),
    package("full-8.5.3", Pip("tensorrt==8.5.3.1", PYTHON_3_10), FULL),
    package("full-8.6.0", Pip("tensorrt==8.6.0", PYTHON_3_10), FULL),
    package("cudart-12.1", Pip("nvidia-cuda-runtime-cu12==12.1.105", &[]), CUDART_12),
    package("cudart-13.5", Pip("nvidia-cuda-runtime==13.5.37", &[]), &["libcudart.so.13"]),
    package("onnxruntime", Pip("onnxruntime==1.32.0", PYTHON_3_11), &["libonnxruntime.so.1.32.0"]),
    package("driver-535", Driver("bookworm", "535.261.03-1"), &["libcuda.so.535.261.03"]),
    package("llama", Npm("@node-llama-cpp/linux-x64@3.21.1"), &["libllama.v0.4.0.so"]),
];

const LEAN_10: &[&str] = &["libnvinfer_lean.so.10"];
const LEAN_11: &[&str] = &["libnvinfer_lean.so.11"];
const CUDART_12: &[&str] = &["libcudart.so.12"];
const RTX: &[&str] = &["libtensorrt_rtx.so.1"];
const FULL: &[&str] = &["libnvinfer.so.8", "tensorrt.so"];
const PYTHON_3_10: &[&str] = &["--python-version", "3.10"];
const PYTHON_3_11: &[&str] = &["--python-version", "3.11"];
const AARCH64: &[&str] = &["--platform", "manylinux_2_35_aarch64"];

/// The folder of all libraries.
pub(crate) fn cache() -> PathBuf {
    root().join("target/real-libs")
}

/// Fetches what is not there yet and runs the tests.
///
/// # Errors
/// A package could not be fetched (the others are tested all the same), or a test failed.
pub(crate) fn run(which: Which, require: bool) -> Result<()> {
    setup::run()?;
    let large: &[Package] = if which == Which::All { &LARGE } else { &[] };
    let mut failed = Vec::new();
    for package in SMALL.iter().chain(large) {
        if let Err(error) = fetch(package) {
            eprintln!("real libraries: {}: {error:#}", package.folder);
            failed.push(package.folder);
        }
    }
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--test", "real", "--test", "nvtx"]);
    if which == Which::All {
        // The times mean something only then.
        tests.arg("--release");
    }
    // The same value as for the other tests: the build script would otherwise run again.
    tests.env("TRACER_EBPF", "require").env("TRACER_REAL_LIBS", cache());
    run_command(tests.args(["--", "--nocapture"]))?;
    // The kernel tier loads a library that no test links.
    run_command(cargo().args(["build", "--workspace"]).env("TRACER_EBPF", "require"))?;
    for test in ["placement::functions_of_the_driver", "stacks::real_libraries"] {
        let mut tier = test::kernel_tier(require);
        run_command(tier.env("TRACER_REAL_LIBS", cache()).args(["--", test]))?;
    }
    if failed.is_empty() { Ok(()) } else { bail!("could not be fetched: {}", failed.join(", ")) }
}

/// Fetches the driver that the benchmark calls, where it is not there yet.
///
/// # Errors
/// It could not be fetched.
pub(crate) fn fetch_driver() -> Result<()> {
    fetch(&DRIVER_550)
}

fn fetch(package: &Package) -> Result<()> {
    let cache = cache();
    fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
    let folder = cache.join(package.folder);
    if folder.exists() {
        return Ok(());
    }
    eprintln!("real libraries: fetching {}", package.folder);
    // Hidden, so that a fetch that was cut short is not taken for a library.
    let unpacked = cache.join(format!(".{}", package.folder));
    empty(&unpacked)?;
    match package.source {
        Pip(requirement, options) => pip(requirement, options, &unpacked)?,
        Driver(release, version) => driver(release, version, &unpacked)?,
        Npm(name) => npm(name, &unpacked)?,
    }
    let kept = cache.join(format!(".{}-kept", package.folder));
    empty(&kept)?;
    for file in package.files {
        let path = find(&unpacked, file).with_context(|| format!("the package has no {file}"))?;
        fs::rename(&path, kept.join(file))?;
    }
    fs::remove_dir_all(&unpacked)?;
    fs::rename(&kept, &folder).with_context(|| format!("renaming to {}", folder.display()))
}

fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let (path, kind) = (entry.path(), entry.file_type().ok()?);
        match kind.is_dir() {
            true if entry.file_name() == name => Some(path),
            true => find(&path, name),
            false => (kind.is_file() && entry.file_name() == name).then_some(path),
        }
    })
}

fn pip(requirement: &str, options: &[&str], into: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"]);
    pip.args(["--no-deps", "--no-compile", "--no-cache-dir", "--only-binary=:all:", "--target"]).arg(into);
    run_command(pip.args(options).arg(requirement))
}

fn npm(name: &str, into: &Path) -> Result<()> {
    run_command(Command::new("npm").args(["pack", "--silent", name, "--pack-destination"]).arg(into))?;
    let archive = fs::read_dir(into)?.flatten().next().context("npm left no archive")?.path();
    run_command(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(into))
}

/// `libcuda1` from the non-free section of a Debian release, through a configuration of apt that is ours alone: the
/// machine's own is not touched, only its archive is read from it.
fn driver(release: &str, version: &str, into: &Path) -> Result<()> {
    let mut targets = Command::new("apt-get");
    targets.args(["indextargets", "--format", "$(REPO_URI)"]);
    targets.args(["Created-By: Packages", "Origin: Debian", "Label: Debian"]);
    let output = targets.output().with_context(|| format!("cannot start `{}`", display(&targets)))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let archive = text.lines().next().context("apt knows no Debian archive: run apt-get update on Debian")?;
    for folder in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(into.join(folder))?;
    }
    let sources = into.join("sources.list");
    fs::write(&sources, format!("deb {archive} {release} non-free\n"))?;
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.current_dir(into).args(["-qq", "-o", "Dir::Etc::sourceparts=-", "-o", "APT::Sandbox::User=root"]);
        for (key, path) in
            [("Etc::sourcelist", "sources.list"), ("State::lists", "lists"), ("Cache", "cache")]
        {
            apt.arg("-o").arg(format!("Dir::{key}={}", into.join(path).display()));
        }
        apt
    };
    run_command(apt().arg("update"))?;
    run_command(apt().arg("download").arg(format!("libcuda1={version}")))?;
    let package = fs::read_dir(into)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get left no package")?;
    run_command(Command::new("dpkg-deb").arg("-x").arg(package).arg(into))
}

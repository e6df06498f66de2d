//! `cargo xtask test --real-servers`: servers that people run, unmodified, and the tests that trace them; then the tests
//! of the Python package, in a real server beside the packages that people use with it.
//!
//! They are fetched by name through pip into a virtual environment in `target/real-servers`; Node comes through apt.

use crate::command::{root, run as run_command};
use crate::{setup, test};
use anyhow::Result;
use std::process::Command;

const PACKAGES: [&str; 9] = [
    "fastapi==0.165.0",
    "uvicorn==0.54.0",
    "uvloop",
    "httptools",
    "httpx",
    "pytest",
    "mypy",
    "asgi-correlation-id==5.0.1",
    "opentelemetry-instrumentation-fastapi==0.66b2",
];
const PYTHON_PACKAGE: &str = "engines/marks/python";

/// Fetches what is missing, then runs the tests on it.
///
/// # Errors
/// Something cannot be fetched, or a test failed.
pub(crate) fn run(require: bool) -> Result<()> {
    setup::run()?;
    let folder = root().join("target/real-servers");
    let venv = folder.join("venv");
    if !venv.join("bin/pip").exists() {
        let make = || run_command(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        if make().is_err() {
            setup::install_packages(&["python3-venv"])?;
            make()?;
        }
    }
    let pip = || {
        let mut pip = Command::new(venv.join("bin/pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check"]);
        pip
    };
    // Says that they are there, where they are.
    run_command(pip().args(PACKAGES).arg("opentelemetry-sdk"))?;
    // Whatever its version says, it may have changed.
    run_command(pip().args(["--force-reinstall", "--no-deps"]).arg(root().join(PYTHON_PACKAGE)))?;
    if Command::new("node").arg("--version").output().is_err() {
        setup::install_packages(&["nodejs"])?;
    }
    let mut tests = test::kernel_tier(require);
    tests.env("TRACER_REAL_SERVERS", &folder).args(["--", "servers::"]);
    run_command(&mut tests)?;
    let python = |arguments: &[&str]| {
        let mut python = Command::new(venv.join("bin/python"));
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

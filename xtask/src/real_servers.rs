//! `cargo xtask test --real-servers`: servers that people run, unmodified, and the tests that trace them.
//!
//! They are fetched by name through pip, once, into a virtual environment in `target/real-servers`; Node comes through
//! apt.

use crate::command::{root, run as run_command};
use crate::{setup, test};
use anyhow::Result;
use std::process::Command;

const PACKAGES: [&str; 4] = ["fastapi==0.165.0", "uvicorn==0.54.0", "uvloop", "httptools"];

/// Fetches what is missing, then runs the tests on it.
///
/// # Errors
/// Something cannot be fetched, or a test failed.
pub(crate) fn run(require: bool) -> Result<()> {
    setup::run()?;
    let folder = root().join("target/real-servers");
    let venv = folder.join("venv");
    if !venv.join("bin/uvicorn").exists() {
        let make = || run_command(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        if make().is_err() {
            setup::install_packages(&["python3-venv"])?;
            make()?;
        }
        let mut install = Command::new(venv.join("bin/pip"));
        run_command(install.args(["install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES))?;
    }
    if Command::new("node").arg("--version").output().is_err() {
        setup::install_packages(&["nodejs"])?;
    }
    let mut tests = test::kernel_tier(require);
    tests.env("TRACER_REAL_SERVERS", &folder).args(["--", "servers::"]);
    run_command(&mut tests)
}

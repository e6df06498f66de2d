//! Marks of Python programs: the extension as it was built with these tests, beside the package's Python files.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use tracer_tests::python::Package;

use crate::{
    Test,
    fixture::{Running, numbers},
    marks::{Bpftrace, Stream, hammered, streams},
};

pub(crate) const TESTS: &[(&str, Test)] =
    &[("marks::python_hammer", hammer), ("marks::python_bpftrace", bpftrace)];

fn start(package: &Package, mode: &str) -> Result<Running> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/marks.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(mode).env("PYTHONPATH", package.folder());
    Running::start_command(&mut command).context("running python3 (3.10 or newer)")
}

/// Threads, tasks and children: every mark comes, once.
fn hammer() -> Result<()> {
    let package = Package::make()?;
    let (said, events) = hammered(start(&package, "hammer")?)?;
    ensure!(numbers(&said)? == [0], "the program says {said:?}");
    let streams = streams(&events)?;
    let of = |tokens| streams.values().filter(|stream| **stream == Stream::whole(tokens)).count();
    // Threads, tasks, children.
    ensure!((of(1000), of(200), of(500), streams.len()) == (8, 50, 4, 62), "{streams:?}");
    Ok(())
}

/// The extension has the same probe.
fn bpftrace() -> Result<()> {
    let package = Package::make()?;
    let mut running = start(&package, "heard")?;
    running.tell()?;
    let bpftrace = Bpftrace::start(running.pid(), &package.extension())?;
    running.tell()?;
    let line = running.wait_line()?;
    running.end()?;
    let said = bpftrace.said()?;
    ensure!(line == "done True", "the program says {line:?}; bpftrace: {said:?}");
    for expected in ["@kinds[4]: 200", "@requests[11]: 202", "@ids[py-11]: 1"] {
        ensure!(said.iter().any(|line| line == expected), "no {expected:?} in {said:?}");
    }
    Ok(())
}

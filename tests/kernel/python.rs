//! Python frames, in the same stack as those of C.

use std::{path::Path, process::Command};

use anyhow::{Result, ensure};
use engines::Profiles;
use tracer::probe::Options;

use crate::{
    Test,
    stacks::{Recorded, Seen, record, samples_only},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("python::frames", frames),
    ("python::off_cpu", off_cpu),
    ("python::made_for_perf", made_for_perf),
    ("python::other_versions_are_refused", refused),
];

/// Interpreters of every version that is on this machine.
fn interpreters(versions: &[&str]) -> Vec<(String, String)> {
    let names = versions.iter().map(|version| format!("python{version}"));
    names
        .filter_map(|name| {
            // The real file: a shim would become it only later.
            let asks = "import sys, os; print(sys.version.split()[0], os.path.realpath(sys.executable))";
            let output =
                Command::new(&name).args(["-c", asks]).env("PYENV_VERSION", pyenv(&name)).output().ok()?;
            let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
            text.trim().split_once(' ').map(|(version, path)| (version.to_owned(), path.to_owned()))
        })
        .collect()
}

/// Of pyenv's versions, where it is there, one must be chosen.
fn pyenv(name: &str) -> String {
    let folder = std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv/versions"));
    let found = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let version = name.trim_start_matches("python");
    found
        .filter_map(|entry| entry.file_name().into_string().ok())
        .find(|found| found.starts_with(version))
        .unwrap_or_default()
}

fn run(interpreter: &str, options: Options, ms: &str) -> Result<Recorded> {
    run_with(&mut Command::new(interpreter), options, ms)
}

fn run_with(interpreter: &mut Command, options: Options, ms: &str) -> Result<Recorded> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/stacks.py");
    record(interpreter.arg(script).args(["deep", ms]), options, Profiles::builtin())
}

/// The Python functions, root first.
fn functions(seen: &Seen) -> Vec<&str> {
    seen.names.iter().filter_map(|name| name.strip_suffix(" (stacks.py)")).collect()
}

fn check(version: &str, recorded: &Recorded) -> Result<()> {
    let chain = ["work", "outer", "middle", "middle", "middle", "middle", "middle", "middle", "Keys.key"];
    let at_leaf = |seen: &Seen| functions(seen).last().is_some_and(|last| last.starts_with("leaf"));
    let leaves = recorded.samples(at_leaf);
    let [merged, mismatched, unknown] =
        ["python_stacks_merged", "python_stacks_mismatched", "python_stacks_of_unknown_threads"]
            .map(|name| recorded.count(name));
    println!(
        "  {version}: {merged} merged, {mismatched} not, {unknown} of unknown threads; {leaves} in leaves"
    );
    ensure!(leaves > 50, "{version}: {leaves} samples in leaves");
    for seen in recorded.stacks.iter().filter(|seen| at_leaf(seen)) {
        let functions = functions(seen);
        let begin = functions.iter().position(|name| *name == "work").unwrap_or(0);
        let between = &functions[begin..functions.len() - 1];
        ensure!(between == chain, "{version}: {functions:?}");
        // C between Python and Python.
        let place = |name: &str| seen.names.iter().position(|one| one == name).unwrap_or(0);
        let (middle, key) = (place("middle (stacks.py)"), place("Keys.key (stacks.py)"));
        ensure!(key > middle + 6, "{version}: no C between the functions: {:?}", seen.names);
        ensure!(
            !seen.names.iter().any(|name| name == "_PyEval_EvalFrameDefault"),
            "{version}: {:?}",
            seen.names
        );
    }
    let all = (merged + mismatched) as f64;
    ensure!(merged as f64 >= 0.99 * all, "{version}: {merged} of {all} merged");
    // A thread is known a few samples after it began.
    ensure!(unknown as f64 <= 0.05 * all, "{version}: {unknown} samples of unknown threads");
    Ok(())
}

fn frames() -> Result<()> {
    let found = interpreters(&["3.11", "3.12", "3.13"]);
    ensure!(!found.is_empty(), "no CPython 3.11 to 3.13 here (apt-get install python3)");
    for (version, path) in found {
        let recorded = run(&path, samples_only(499), "2000")?;
        check(&version, &recorded)?;
        recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    }
    Ok(())
}

/// With a function that the interpreter makes for each of Python's, and that keeps no frame pointer (`-X perf`): stacks
/// go through it, and the one that it stands for is there once.
fn made_for_perf() -> Result<()> {
    let found = interpreters(&["3.12", "3.13"]);
    if found.is_empty() {
        println!("  no such version here");
    }
    for (version, path) in found {
        let recorded = run_with(Command::new(&path).args(["-X", "perf"]), samples_only(499), "2000")?;
        std::fs::remove_file(format!("/tmp/perf-{}.map", recorded.pid))?;
        check(&version, &recorded)?;
        recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
        // Where a thread is not known yet, what was made is all that names them.
        recorded.most(0.95, "have each function once", |seen| {
            !seen.names.iter().any(|name| name.starts_with("py::"))
        })?;
        ensure!(
            recorded.samples(|seen| seen.has("py_trampoline_evaluator")) > 50,
            "{version}: none was made"
        );
    }
    Ok(())
}

/// Where Python waits: for its own lock, too.
fn off_cpu() -> Result<()> {
    let found = interpreters(&["3.11", "3.12", "3.13"]);
    ensure!(!found.is_empty(), "no CPython 3.11 to 3.13 here (apt-get install python3)");
    for (version, path) in found {
        let options = Options { sched: true, ..samples_only(0) };
        let recorded = run(&path, options, "1000")?;
        let waits = |seen: &Seen| {
            seen.has("work (stacks.py)") && seen.names.last().is_some_and(|n| n.ends_with("_[k]"))
        };
        println!("  {version}: {} waits below work", recorded.samples(waits));
        ensure!(recorded.samples(waits) > 20, "{version}: {} waits below work", recorded.samples(waits));
    }
    Ok(())
}

fn refused() -> Result<()> {
    let Some((version, path)) = interpreters(&["3.10", "3.9", "3.14"]).into_iter().next() else {
        println!("  no such version here");
        return Ok(());
    };
    let recorded = run(&path, samples_only(499), "500")?;
    let said = recorded.notices.iter().any(|notice| {
        notice.text.contains("is not known to this tracer") && notice.text.contains("3.11, 3.12, 3.13")
    });
    ensure!(said, "{version}: {:?}", recorded.notices);
    ensure!(recorded.samples(|seen| !functions(seen).is_empty()) == 0, "Python frames of {version}");
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)
}

//! Names of generated code, by what programs tell of it; and of programs that are gone with all that was around them.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::capture::Capture;

use crate::{
    Test, faults,
    stacks::{Programs, Seen, record, samples_only, seen_in},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("generated::perf_map", || told("map")),
    ("generated::jitdump", || told("dump")),
    ("generated::jitdump_as_perf_reads_it", jitdump_as_perf_reads_it),
    ("generated::in_a_container", in_a_container),
    ("generated::container_that_is_gone", container_that_is_gone),
    ("generated::few_descriptors", few_descriptors),
];

/// Who calls whom in the program: C, generated code, C.
const CHAIN: [&str; 4] = ["calls_outer", "outer made", "inner_made", "called_by_made"];

/// A container as far as files and process ids go: the program lies in memory that nobody else reaches, which goes with
/// its last process, and has an id of its own.
const CONTAINER: &str =
    "mount -t tmpfs none /mnt && cp \"$0\" /mnt && mount --move /mnt /tmp && exec /tmp/generated \"$@\"";

/// The program that generates code, alone or in a container; it writes what it tells into a folder.
fn program(tells: &str, folder: &Path, ms: &str) -> Result<Command> {
    let mut program = Command::new(Programs::get()?.path("generated"));
    program.args([tells, ms]).arg(folder);
    Ok(program)
}

fn contained(tells: &str, ms: &str) -> Result<Command> {
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", CONTAINER]);
    shell.arg(Programs::get()?.path("generated")).args([tells, ms, "/tmp"]);
    Ok(shell)
}

fn check(stacks: &[Seen]) -> Result<()> {
    let samples = |such: &dyn Fn(&Seen) -> bool| -> u64 {
        stacks.iter().filter(|seen| such(seen)).map(|seen| seen.samples).sum()
    };
    let called = |seen: &Seen| seen.has("called_by_made");
    // When a program has just begun, what it maps is not known yet.
    let spins = |seen: &Seen| seen.cut.is_none() && seen.names.last().is_some_and(|leaf| leaf == "spin_made");
    println!("  {} samples below generated code, {} in it", samples(&called), samples(&spins));
    ensure!(samples(&called) > 50 && samples(&spins) > 50, "{stacks:#?}");
    let in_turn = |seen: &Seen| seen.names.windows(CHAIN.len()).any(|names| names == CHAIN);
    let wrong = stacks.iter().find(|seen| seen.cut.is_none() && called(seen) && !in_turn(seen));
    ensure!(wrong.is_none(), "{wrong:#?}");
    // At its first and last instructions its frame is not there: then its caller is left out.
    let caller = |seen: &Seen| seen.names.iter().rev().nth(1).is_some_and(|name| name == "calls_spin");
    ensure!(
        samples(&|seen| spins(seen) && caller(seen)) as f64 > 0.95 * samples(&spins) as f64,
        "{stacks:#?}"
    );
    let unnamed = |seen: &Seen| seen.names.iter().any(|name| name.starts_with("[anonymous]"));
    ensure!(samples(&unnamed) == 0, "{stacks:#?}");
    Ok(())
}

fn told(tells: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut program = program(tells, folder.path(), "1500")?;
    check(&record(&mut program, samples_only(499), Profiles::builtin())?.stacks)
}

/// What the program writes is what perf demands.
fn jitdump_as_perf_reads_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let program = program("dump", folder.path(), "500")?;
    let perf = |arguments: &[&str]| {
        let mut perf = Command::new("perf");
        perf.args(arguments).current_dir(folder.path()).stdin(std::process::Stdio::null());
        perf
    };
    let mut recorder =
        perf(&["record", "-q", "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock", "--call-graph", "fp", "-o"]);
    let recorded = recorder.arg(at("data")).arg(program.get_program()).args(program.get_args()).output();
    let recorded = recorded.context("running perf (apt-get install linux-perf)")?;
    ensure!(recorded.status.success(), "{}", faults::stderr(&recorded));
    let injected = perf(&["inject", "--jit", "-i", "data", "-o", "named"]).output()?;
    ensure!(injected.status.success(), "{}", faults::stderr(&injected));
    let output = perf(&["script", "-i", "named", "-F", "ip,sym"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    for name in ["outer made", "inner_made", "spin_made"] {
        ensure!(text.contains(name), "perf knows no {name}: {text}");
    }
    Ok(())
}

/// While the container runs.
fn in_a_container() -> Result<()> {
    for tells in ["map", "dump"] {
        check(&record(&mut contained(tells, "1500")?, samples_only(499), Profiles::builtin())?.stacks)?;
    }
    Ok(())
}

/// After its end, when neither its program nor what it has told can be reached any more.
fn container_that_is_gone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for tells in ["map", "dump"] {
        let capture = folder.path().join(tells);
        let mut recorder = faults::tracer()?;
        recorder
            .args(["record", "--quiet", "--no-sched", "--sample-hz", "499", "-o"])
            .arg(&capture)
            .arg("--");
        let contained = contained(tells, "1500")?;
        let output = recorder.arg(contained.get_program()).args(contained.get_args()).output()?;
        // Nothing of an engine was seen.
        ensure!(output.status.code() == Some(3), "{}: {}", output.status, faults::stderr(&output));
        let capture = Capture::open(&capture)?;
        let path = "/tmp/generated";
        let mappings = capture.mappings()?.collect::<tracer::capture::Result<Vec<_>>>()?;
        ensure!(mappings.iter().any(|mapping| mapping.path == path), "the program is not at {path}");
        ensure!(!Path::new(path).exists(), "{path} can be reached");
        check(&seen_in(&capture, |_| true)?)?;
    }
    Ok(())
}

/// A recorder that may have few files open keeps none of its targets', and records all the same.
fn few_descriptors() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    // Some for each CPU; more than half of them are in use before the first target comes.
    let limit = 96 + 2 * std::thread::available_parallelism()?.get();
    let mut recorder = Command::new("prlimit");
    recorder.arg(format!("--nofile={limit}:{limit}")).arg(faults::tracer()?.get_program());
    recorder.args(["record", "--quiet", "--no-sched", "--sample-hz", "499", "-o"]).arg(&capture).arg("--");
    let program = Programs::get()?.path("stacks");
    let output = recorder.arg(program).args(["deep", "1000"]).stdin(std::process::Stdio::null()).output()?;
    ensure!(output.status.code() == Some(3), "{}: {}", output.status, faults::stderr(&output));
    let capture = Capture::open(&capture)?;
    let ledger = capture.tables()?.ledger;
    let left_out = ledger.iter().find(|row| row.name == "mapped_files_not_kept").map_or(0, |row| row.count);
    ensure!(left_out > 0, "all are kept");
    // Its files are where they were.
    let stacks = seen_in(&capture, |_| true)?;
    let named: u64 = stacks.iter().filter(|seen| seen.has("rec_a")).map(|seen| seen.samples).sum();
    println!("  {left_out} mappings without their files, {named} samples with names");
    ensure!(named > 50, "{named} samples have names");
    Ok(())
}

//! A probe that is placed behind the entry sees what one at the entry sees: arguments, results, how often.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::{Call, CallEnd, Event},
    probe::{Session, process},
};

use crate::{
    Test,
    fixture::{Built, Running, Trace, calls_only},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("placement::prologues", prologues),
    ("placement::functions_of_libc", functions_of_libc),
    ("placement::functions_of_the_driver", functions_of_the_driver),
];

/// Calls of each function by the fixture.
const CALLS: usize = 200;

/// As libraries have them; the number is where the probe goes.
const PROLOGUES: [(&str, u64); 6] = [
    ("fixture_placed_driver", 10),
    ("fixture_placed_landing", 4),
    ("fixture_placed_nop", 3),
    ("fixture_placed_argument", 0),
    ("fixture_placed_stack", 0),
    ("fixture_placed_loop", 0),
];

/// Take integers, change nothing, and are called by nothing else in the fixture.
const LIBC: [&str; 9] = [
    "labs",
    "ffsll",
    "gnu_dev_major",
    "gnu_dev_makedev",
    "htons",
    "inet_lnaof",
    "inet_netof",
    "wctob",
    "sched_get_priority_max",
];

/// Without a GPU they say that there is none; those of events read what the handle points at.
const DRIVER: [&str; 6] = [
    "cuGetErrorName",
    "cuStreamSynchronize",
    "cuStreamSynchronize_ptsz",
    "cuGraphLaunch",
    "cuCtxSynchronize",
    "cuLaunchKernel",
];

fn prologues() -> Result<()> {
    let library = Built::get()?.path("libfixture.so");
    let names = PROLOGUES.map(|(name, _)| name);
    let placed = compare(library, &names)?;
    for (name, delta) in PROLOGUES {
        ensure!(placed[name] == delta, "{name} is probed at +{}, not +{delta}", placed[name]);
    }
    Ok(())
}

fn functions_of_libc() -> Result<()> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let Some(library) = paths.find(|path| path.ends_with("/libc.so.6")) else {
        println!("SKIP placement::functions_of_libc: no glibc");
        return Ok(());
    };
    compare(PathBuf::from(library), &LIBC).map(|_| ())
}

/// NVIDIA's own libcuda: in the folder that `TRACER_REAL_LIBS` names, which `cargo xtask test --real-libs` fills, or
/// where that has left it before. Only who names the folder expects a library in it.
fn functions_of_the_driver() -> Result<()> {
    let named = std::env::var_os("TRACER_REAL_LIBS").map(PathBuf::from);
    let expected = named.is_some() && std::env::var_os("TRACER_REQUIRE").is_some();
    let usual = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/real-libs");
    let cache = named.unwrap_or_else(usual);
    let mut found = 0;
    for (folder, file) in [("driver-535", "libcuda.so.535.261.03"), ("driver-550", "libcuda.so.550.163.01")] {
        let library = cache.join(folder).join(file);
        if !library.exists() {
            continue;
        }
        found += 1;
        let placed = compare(library.canonicalize()?, &DRIVER)?;
        ensure!(placed.values().all(|delta| *delta == 10), "{folder}: {placed:?}");
    }
    if found == 0 {
        let why = format!("no libcuda in {}", cache.display());
        ensure!(!expected, "required, but {why}");
        println!("SKIP placement::functions_of_the_driver: {why} (cargo xtask test --real-libs)");
    }
    Ok(())
}

/// Traces calls of the functions twice, placed and at the entry. Returns how far behind the entry each was placed.
fn compare<'a>(library: PathBuf, functions: &[&'a str]) -> Result<BTreeMap<&'a str, u64>> {
    let placed = traced(&library, functions, "cheapest")?;
    let entry = traced(&library, functions, "entry")?;
    ensure!(placed.said == entry.said, "the program computed {} and {}", placed.said, entry.said);
    let mut sum = 0u64;
    let mut deltas = BTreeMap::new();
    for function in functions {
        let (a, b) = (placed.calls(function), entry.calls(function));
        ensure!(a.len() == CALLS && b.len() == CALLS, "{function}: {} and {} calls", a.len(), b.len());
        for (i, (a, b)) in (0u64..).zip(a.iter().zip(&b)) {
            ensure!(what(a) == what(b), "{function}: {a:?} and at the entry {b:?}");
            ensure!(a.args[0] == i && a.args[2..] == [i + 2, i + 3, i + 4, i + 5], "{function}: {a:?}");
            ensure!(a.end == CallEnd::Returned, "{function}: {a:?}");
            sum = sum.wrapping_mul(31).wrapping_add(a.ret);
        }
        deltas.insert(*function, offset(&placed, function)? - offset(&entry, function)?);
    }
    ensure!(placed.said == sum.to_string(), "the program computed {}, we saw {sum}", placed.said);
    Ok(deltas)
}

/// All of a call that does not depend on time and place.
fn what(call: &Call) -> ([u64; 6], u64, CallEnd, u32) {
    (call.args, call.ret, call.end, call.depth)
}

fn offset(trace: &Trace, function: &str) -> Result<u64> {
    let point = trace.points().find(|point| point.name == function);
    Ok(point.with_context(|| format!("{function} is not probed"))?.offset)
}

fn traced(library: &Path, functions: &[&str], place: &str) -> Result<Trace> {
    let name = library.file_name().and_then(|name| name.to_str()).context("a file without a name")?;
    let profile = tempfile::NamedTempFile::new()?;
    let text = format!(
        "engine = \"placed\"\ntitle = \"placement test\"\nfiles = [\"{name}\"]\n[[point]]\n\
         symbols = {functions:?}\nrole = \"other\"\nreturns = \"c\"\nplace = \"{place}\"\n"
    );
    std::fs::write(profile.path(), text)?;
    let mut profiles = Profiles::builtin();
    profiles.load(profile.path())?;

    let path = library.to_str().context("a path that is no text")?;
    let mut arguments = vec!["apply", path];
    arguments.extend(functions);
    let mut running = Running::start(&arguments)?;
    let mut session = Session::start(calls_only(), profiles)?;
    session.add(&process::find(running.pid())?)?;
    let mut events: Vec<Event> = Vec::new();
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    let said = line.strip_prefix("done ").with_context(|| format!("the fixture says {line:?}"))?.to_owned();
    let ledger = session.stop(&mut events).ledger;
    let trace = Trace { pid: running.pid(), said, events, ledger };
    running.end()?;
    trace.lossless()?;
    Ok(trace)
}

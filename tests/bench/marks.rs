//! What a mark costs the program that makes it, from Rust, C and Python: while nobody listens, and while we do.

use std::ffi::c_void;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use engines::Profiles;
use serde::Serialize;
use tracer_tests::{
    python::Package,
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::{
    affinity,
    library::Library,
    probe,
    worker::{self, Worker},
};

/// Of a mark that nobody listens to, in ns.
const NATIVE_AIM: Option<Aim> = Some(Aim::AtMost(5.0));
const PYTHON_AIM: Option<Aim> = Some(Aim::AtMost(150.0));

/// What is called.
#[derive(Clone, Copy, Debug)]
struct Call {
    /// As the caller knows it.
    name: &'static str,
    /// What its loop calls instead for comparison; for Python a loop that calls nothing.
    empty: &'static str,
    language: &'static str,
    mark: &'static str,
    /// Calls in a batch: 1 to 20 ms where somebody listens.
    calls: u32,
    aim: Option<Aim>,
}

const NATIVE: [Call; 2] = [
    Call { name: "rust", empty: "empty", language: "Rust", mark: "token", calls: 20_000, aim: NATIVE_AIM },
    Call { name: "c", empty: "empty", language: "C", mark: "token", calls: 20_000, aim: NATIVE_AIM },
];

const PYTHON: [Call; 4] = [
    Call { name: "token", empty: "loop", language: "Python", mark: "token", calls: 20_000, aim: PYTHON_AIM },
    Call {
        name: "begin",
        empty: "loop",
        language: "Python",
        mark: "request begin, 5 facts",
        calls: 10_000,
        aim: PYTHON_AIM,
    },
    Call {
        name: "batch",
        empty: "loop",
        language: "Python",
        mark: "batch of 32 slots, gathered if listening()",
        calls: 2_000,
        aim: PYTHON_AIM,
    },
    Call {
        name: "gathered",
        empty: "loop",
        language: "Python",
        mark: "batch of 32 slots, gathered before",
        calls: 5_000,
        aim: None,
    },
];

/// What one mark costs, in ns of CPU time per call, over all rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    language: &'static str,
    mark: &'static str,
    empty_ns: f64,
    idle_ns: f64,
    listened_ns: f64,
    /// Idle − empty, round by round.
    added_ns: Option<Estimate>,
    aim: Option<Aim>,
}

extern "C" fn empty(_request: u64, _choice: u32, _index: u32) {}

/// The native program's main function.
pub(crate) fn caller(cpu: usize, library: &Path) -> Result<()> {
    affinity::pin(&[cpu])?;
    let address = Library::load(library)?.address("tracer_mark_token")?;
    // SAFETY: the header says so.
    let c = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u64, u32, u32)>(address) };
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.context("reading what to call")?;
        let (name, calls) = line.split_once(' ').with_context(|| format!("{line:?} is not WHAT CALLS"))?;
        let calls: u32 = calls.parse()?;
        let (c, empty) = (black_box(c), black_box(empty as extern "C" fn(u64, u32, u32)));
        let ns = match name {
            "empty" => worker::timed(calls, || empty(black_box(1), 0, black_box(1)))?,
            "rust" => worker::timed(calls, || tracer_marks::token(black_box(1), 0, black_box(1)))?,
            "c" => worker::timed(calls, || c(black_box(1), 0, black_box(1)))?,
            _ => bail!("what is {name}?"),
        };
        println!("{ns}");
    }
    Ok(())
}

/// Measures from another CPU than the caller's.
pub(crate) fn run(rounds: usize) -> Result<Vec<Cost>> {
    affinity::apart(|cpu| {
        let library = standin::built("libtracer_marks.so", "tracer-marks-c")?;
        let mut native = Command::new(std::env::current_exe()?);
        native.args(["--marks", &cpu.to_string(), "--library"]).arg(library);
        let mut costs = measure(&mut Worker::spawn(&mut native)?, &NATIVE, rounds)?;
        let package = Package::make()?;
        let mut python = Command::new("python3");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/marks.py");
        python.arg(script).arg(cpu.to_string()).env("PYTHONPATH", package.folder());
        let mut python = Worker::spawn(&mut python).context("running python3 (3.10 or newer)")?;
        costs.extend(measure(&mut python, &PYTHON, rounds)?);
        Ok(costs)
    })
}

fn measure(caller: &mut Worker, calls: &[Call], rounds: usize) -> Result<Vec<Cost>> {
    // By call, a row of (empty, idle, listened to) per round.
    let mut measured = vec![Vec::new(); calls.len()];
    for round in 0..rounds {
        crate::progress(&format!("marks: round {} of {rounds}", round + 1));
        for (call, rows) in calls.iter().zip(&mut measured) {
            let empty = caller.median(call.empty, call.calls, &mut || ())?;
            let idle = caller.median(call.name, call.calls, &mut || ())?;
            let listened =
                probe::with_ours(caller, Profiles::builtin(), worker::total(call.calls), |caller, drain| {
                    caller.median(call.name, call.calls, drain)
                })?;
            rows.push([empty, idle, listened]);
        }
    }
    Ok(calls.iter().zip(&measured).map(|(call, rows)| cost(call, rows)).collect())
}

fn cost(call: &Call, rows: &[[f64; 3]]) -> Cost {
    let column = |column: usize| {
        let column: Vec<f64> = rows.iter().map(|row| row[column]).collect();
        stats::median(&column).unwrap_or(f64::NAN)
    };
    let added: Vec<f64> = rows.iter().map(|[empty, idle, _]| idle - empty).collect();
    Cost {
        language: call.language,
        mark: call.mark,
        empty_ns: column(0),
        idle_ns: column(1),
        listened_ns: column(2),
        added_ns: stats::estimate(&added),
        aim: call.aim,
    }
}

pub(crate) fn table(costs: &[Cost]) -> Table {
    let title = "Cost of a mark: CPU ns per call; idle (nobody listens) − a call of an empty function, for Python − an \
                 empty loop; listened to: by us, with its record, rings drained";
    let mut header = vec!["language", "mark", "empty", "idle", "listened to"];
    header.extend(judged("idle adds"));
    let mut table = Table::new(title, &header);
    for cost in costs {
        let mut row = vec![cost.language.to_owned(), cost.mark.to_owned()];
        row.extend([cost.empty_ns, cost.idle_ns].map(|ns| format!("{ns:.1}")));
        row.push(format!("{:.0}", cost.listened_ns));
        row.extend(ratio(cost.added_ns.as_ref(), cost.aim));
        table.rows.push(row);
    }
    table
}

//! Programs whose steps are CUDA graphs: GPU times by the injected library, and what passes it by is counted.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use tracer::{capture::Capture, timeline::tables::Tables};

use crate::{Test, faults, truth};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("graph::every_launch_has_its_gpu_time", every_launch),
    ("graph::hidden_launches_are_counted", hidden),
    ("graph::own_steps_have_their_gpu_time", own_steps),
];

/// Launches of the program; each takes 0.5 ms on the GPU.
const LAUNCHES: usize = 4000;

/// A program of the injected library's tests, compiled into a folder with the stand-in driver.
pub(crate) fn compile(folder: &Path, source: &str) -> Result<PathBuf> {
    compile_with(folder, source, &[])
}

/// As [`compile`], with these options.
pub(crate) fn compile_with(folder: &Path, source: &str, options: &[&str]) -> Result<PathBuf> {
    standin::stage_driver(folder)?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/inject/tests/data");
    let program = folder.join("program");
    let mut compiler = Command::new("g++");
    compiler
        .args(["-std=c++17", "-O2", "-o"])
        .arg(&program)
        .args(options)
        .arg(data.join(source))
        .args(["-ldl", "-lpthread"]);
    let output = compiler.output().context("running g++ (apt-get install g++)")?;
    ensure!(output.status.success(), "g++: {}", faults::stderr(&output));
    Ok(program)
}

/// A shared library of the injected library's tests.
pub(crate) fn compile_library(path: &Path, source: &str) -> Result<()> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/inject/tests/data");
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-o"]).arg(path);
    let output =
        compiler.arg(data.join(source)).arg("-ldl").output().context("running g++ (apt-get install g++)")?;
    ensure!(output.status.success(), "g++: {}", faults::stderr(&output));
    Ok(())
}

/// Records the program; `how`: how it gets `cuGraphLaunch`.
fn run(how: &str) -> Result<Tables> {
    let folder = tempfile::tempdir()?;
    record(folder.path(), how, "")?.tables().map_err(Into::into)
}

/// As [`run`], in a folder, on a driver with this fault; its truth goes to the file `truth`.
pub(crate) fn record(folder: &Path, how: &str, fault: &str) -> Result<Capture> {
    let mut program = Command::new(compile(folder, "graph.cpp")?);
    program.args([how, "1", &LAUNCHES.to_string(), "500000"]);
    let text = record_program(folder, "cuda_graph", "cuGraphLaunch", &program, fault)?;
    ensure!(text.contains(&format!("launches {LAUNCHES}")), "the program says: {text}");
    Ok(Capture::open(&folder.join("capture"))?)
}

/// Records a program with an optional engine into the folder `capture`; it begins once this point is probed. Returns what
/// it printed.
fn record_program(
    folder: &Path,
    engine: &str,
    point: &str,
    program: &Command,
    fault: &str,
) -> Result<String> {
    let capture = folder.join("capture");
    let ready = folder.join("ready");
    let mut recorder = faults::tracer()?
        .args(["record", "--quiet", "--duration", "60s", "--engine", engine, "-o"])
        .arg(&capture)
        .arg("--")
        .arg(program.get_program())
        .args(program.get_args())
        .env("LD_LIBRARY_PATH", folder)
        .env("STANDIN_CUDA_FAULT", fault)
        .env("STANDIN_CUDA_LOG", folder.join("truth"))
        .env("WAIT_FILE", &ready)
        .stdout(Stdio::piped())
        .spawn()?;
    for point in [point.as_bytes(), b"libtracer_inject"] {
        faults::wait_for(|| truth::holds(&capture.join("raw/points.arrows"), point))?;
    }
    std::fs::write(&ready, "")?;
    let text = std::io::read_to_string(recorder.stdout.take().context("no stdout")?)?;
    ensure!(faults::wait(&mut recorder)?.success(), "the recorder failed: {text}");
    Ok(text)
}

/// Steps that a Rust program marks out itself.
fn own_steps() -> Result<()> {
    let folder = tempfile::tempdir()?;
    standin::stage_driver(folder.path())?;
    let tracer = standin::built("tracer", "tracer")?;
    let mut program = Command::new(tracer.parent().context("no folder")?.join("examples/own_steps"));
    program.arg("2000");
    let text = record_program(folder.path(), "own_steps", "tracer_step", &program, "")?;
    ensure!(text.contains("steps 2000"), "the program says: {text}");
    let tables = Capture::open(&folder.path().join("capture"))?.tables()?;
    let timed = tables.steps.iter().filter(|step| step.gpu.is_some()).count();
    println!("  {} steps, {timed} with GPU times", tables.steps.len());
    ensure!(tables.steps.len() == 2000 && timed > 1000, "too few");
    ensure!(ledger(&tables, "gpu_span_without_step") == 0, "a span without its step");
    Ok(())
}

fn ledger(tables: &Tables, name: &str) -> u64 {
    tables.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
}

fn every_launch() -> Result<()> {
    let tables = run("getproc")?;
    let timed: Vec<_> = tables.steps.iter().filter_map(|step| Some((step, step.gpu?))).collect();
    println!("  {} launches, {} steps, {} with GPU times", LAUNCHES, tables.steps.len(), timed.len());
    ensure!(tables.meta.simulated, "the capture does not say that the GPU is simulated");
    // One launch of the program is refused by the driver: a step that failed.
    ensure!(timed.len() > LAUNCHES / 2 && tables.steps.len() <= LAUNCHES + 1, "too few");
    for (step, gpu) in &timed {
        // The begin event is recorded before the driver's function is called.
        let early = step.begin_ns.saturating_sub(gpu.begin_ns);
        ensure!(early < 1_000_000, "a graph ran {early} ns before its launch");
    }
    // The one that was refused has nothing between its events.
    let short = timed.iter().filter(|(_, gpu)| gpu.span_ns < 500_000 - gpu.bound_ns);
    let short: Vec<u64> = short.map(|(_, gpu)| gpu.span_ns).collect();
    ensure!(short.len() <= 1, "graphs ran for {short:?} ns");
    for name in ["gpu_span_without_step", "gpu_span_unaligned"] {
        ensure!(ledger(&tables, name) == 0, "{name}: {}", ledger(&tables, name));
    }
    Ok(())
}

/// Every third launch goes past the library: a step without a GPU span, each of them counted.
fn hidden() -> Result<()> {
    let tables = run("mixed")?;
    let first = tables.steps.iter().position(|step| step.gpu.is_some()).context("no GPU times")?;
    let last = tables.steps.iter().rposition(|step| step.gpu.is_some()).context("no GPU times")?;
    let between = tables.steps[first..last].iter().filter(|step| step.gpu.is_none()).count();
    println!("  {between} of {} steps have no GPU times", last - first);
    ensure!(between.abs_diff((last - first) / 3) <= 1, "not every third");
    ensure!(ledger(&tables, "gpu_span_without_step") == 0, "a span without its step");
    let counted = ledger(&tables, "step_without_gpu_span");
    // Those before the first event are counted too, from when the library said that it is active.
    let without = tables.steps[..last].iter().filter(|step| step.gpu.is_none()).count() as u64;
    ensure!(
        (between as u64..=without).contains(&counted),
        "{counted} counted, {between} to {without} without"
    );
    Ok(())
}

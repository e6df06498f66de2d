//! What the injected library costs the thread that calls `enqueueV3`: idle, and while it times steps.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tracer_tests::{
    stats::{self, Estimate},
    table::Table,
};

/// Slot of `enqueueV3` in the vtable of TensorRT 10's execution context.
const ENQUEUE_V3: usize = 37;
/// Steps that are measured, and how many go between two waits for the GPU: fewer than there are event pairs.
const STEPS: usize = 6_400;
const BETWEEN_WAITS: usize = 64;
/// Calls of an engine that does nothing, and how often they are repeated for the best.
const CALLS: usize = 50_000;
const REPEATS: usize = 9;
/// How long steps run before they are measured: the library makes its events.
const WARM_UP: Duration = Duration::from_millis(500);
/// As `engines/inject/src/report.rs` has it: what goes there counts as being listened to.
const SINK: &str = "TRACER_INJECT_TEST_SINK";

/// The library beside the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alone,
    Idle,
    Active,
    /// It is NVTX's tool, too, and nobody listens; somebody does; somebody does, and each step is sampled.
    NamedIdle,
    Named,
    Sampled,
}

impl State {
    const ALL: [Self; 6] =
        [Self::Alone, Self::Idle, Self::Active, Self::NamedIdle, Self::Named, Self::Sampled];
}

/// Layers, and so kernels, of the larger step.
const LAYERS: u32 = 64;
/// Larger steps that are measured.
const LARGE_STEPS: usize = 1_000;

/// ns of a call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Of an engine that does nothing: mean of many.
    empty: f64,
    /// Of a step of one kernel.
    p50: f64,
    p99: f64,
    /// Of a step of [`LAYERS`] layers, each with a name and a kernel.
    large_p50: f64,
}

/// In each state, by round.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    rounds: Vec<[Cost; 6]>,
}

/// Measures rounds of the three next to each other, each in a process of its own.
pub(crate) fn run(rounds: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    standin::stage(folder.path())?;
    let library = standin::built("libtracer_inject.so", "tracer-inject")?;
    let mut outcome = Outcome { rounds: Vec::new() };
    for round in 0..rounds {
        crate::progress(&format!("injected library: round {} of {rounds}", round + 1));
        let measure = |state| measure(folder.path(), &library, state);
        // In turns, so that what changes over time hits all.
        let mut order = State::ALL;
        if round % 2 == 1 {
            order.reverse();
        }
        let mut costs = order.into_iter().map(measure).collect::<Result<Vec<Cost>>>()?;
        if round % 2 == 1 {
            costs.reverse();
        }
        outcome.rounds.push(costs.try_into().map_err(|_| anyhow::anyhow!("a state was not measured"))?);
    }
    Ok(outcome)
}

fn measure(libraries: &Path, inject: &Path, state: State) -> Result<Cost> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--enqueue").env("LD_LIBRARY_PATH", libraries).stdout(Stdio::piped());
    if state != State::Alone {
        command.env("LD_PRELOAD", inject);
    }
    if matches!(state, State::Active | State::Named | State::Sampled) {
        command.env(SINK, "/dev/null");
    }
    if matches!(state, State::NamedIdle | State::Named | State::Sampled) {
        let every = if state == State::Sampled { "1" } else { "0" };
        command.env("NVTX_INJECTION64_PATH", inject).env("TRACER_INJECT_LAYERS", every);
    }
    let output = command.output().context("cannot start myself")?;
    ensure!(output.status.success(), "{state:?}: {}", output.status);
    serde_json::from_slice(&output.stdout).context("what the caller of enqueueV3 prints")
}

/// Adds a row per figure: with and without, and what the library adds.
pub(crate) fn table(outcome: &Outcome) -> Table {
    let title = "The injected library on the thread that calls enqueueV3 (simulated driver, whose calls cost less than a \
                 real one's: what is added is this library's part and two cheap event records)";
    let mut table = Table::new(title, &["call", "figure", "alone ns", "with ns", "added ns", "95 %"]);
    let mut row = |name: &str, figure_name: &str, state: State, figure: fn(&Cost) -> f64| {
        let median = |state: State| {
            let values: Vec<f64> =
                outcome.rounds.iter().map(|round| figure(&round[state as usize])).collect();
            stats::median(&values).unwrap_or(f64::NAN)
        };
        let added =
            |round: &[Cost; 6]| figure(&round[state as usize]) - figure(&round[State::Alone as usize]);
        let added = stats::estimate(&outcome.rounds.iter().map(added).collect::<Vec<f64>>());
        let text =
            |of: fn(&Estimate) -> f64| added.as_ref().map_or("–".into(), |e| format!("{:.1}", of(e)));
        table.rows.push(vec![
            name.to_owned(),
            figure_name.to_owned(),
            format!("{:.1}", median(State::Alone)),
            format!("{:.1}", median(state)),
            text(|estimate| estimate.median),
            format!("{} … {}", text(|estimate| estimate.low), text(|estimate| estimate.high)),
        ]);
    };
    row("an engine that does nothing, library idle", "mean", State::Idle, |cost| cost.empty);
    row("a step of one kernel, library idle", "p50", State::Idle, |cost| cost.p50);
    row("a step of one kernel, library idle", "p99", State::Idle, |cost| cost.p99);
    row("a step of one kernel, timed", "p50", State::Active, |cost| cost.p50);
    row("a step of one kernel, timed", "p99", State::Active, |cost| cost.p99);
    row("a step of 64 layers, library idle", "p50", State::Idle, |cost| cost.large_p50);
    row("a step of 64 layers, NVTX injected, idle", "p50", State::NamedIdle, |cost| cost.large_p50);
    row("a step of 64 layers, timed", "p50", State::Active, |cost| cost.large_p50);
    row("a step of 64 layers, NVTX injected, timed, not sampled", "p50", State::Named, |cost| cost.large_p50);
    row("a step of 64 layers, sampled", "p50", State::Sampled, |cost| cost.large_p50);
    table
}

type Pointer = *mut c_void;

/// A function by name, as a type.
fn find<F: Copy>(library: Pointer, name: &CStr) -> Result<F> {
    ensure!(size_of::<F>() == size_of::<Pointer>(), "not a function");
    // SAFETY: the library is loaded, and the name is a string.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!function.is_null(), "no {name:?}");
    // SAFETY: of the same size; callers name the function's type.
    Ok(unsafe { std::mem::transmute_copy(&function) })
}

/// Be the process that calls `enqueueV3`; prints a [`Cost`].
pub(crate) fn enqueue() -> Result<()> {
    // SAFETY: strings.
    let [cuda, engine] = [c"libcuda.so.1", c"libnvinfer.so.10"]
        .map(|name| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) });
    ensure!(!cuda.is_null() && !engine.is_null(), "no stand-in libraries in LD_LIBRARY_PATH");
    let init: unsafe extern "C" fn(c_uint) -> c_int = find(cuda, c"cuInit")?;
    let retain: unsafe extern "C" fn(*mut Pointer, c_int) -> c_int = find(cuda, c"cuDevicePrimaryCtxRetain")?;
    let set: unsafe extern "C" fn(Pointer) -> c_int = find(cuda, c"cuCtxSetCurrent")?;
    let create: unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int = find(cuda, c"cuStreamCreate")?;
    let wait: unsafe extern "C" fn(Pointer) -> c_int = find(cuda, c"cuStreamSynchronize")?;
    let make: unsafe extern "C" fn() -> Pointer = find(engine, c"standin_create_context")?;
    let set_step: unsafe extern "C" fn(Pointer, u64, u32, u64) = find(engine, c"standin_set_step")?;
    let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the functions of these names have these types, and the pointers are valid.
    let results = unsafe { [init(0), retain(&raw mut context, 0), set(context), create(&raw mut stream, 1)] };
    ensure!(results == [0; 4], "the device: {results:?}");
    // SAFETY: a context is current.
    let object = unsafe { make() };
    let step = || {
        type Enqueue = unsafe extern "C" fn(Pointer, Pointer) -> bool;
        // SAFETY: as code compiled against TensorRT's header does it: the implementation is at offset 8, its vtable first.
        unsafe {
            let implementation = *object.cast::<Pointer>().add(1);
            let vtable = *implementation.cast::<*const Enqueue>();
            (*vtable.add(ENQUEUE_V3))(implementation, stream)
        }
    };
    // SAFETY: the stream lives as long as the process.
    let synchronize = || unsafe { wait(stream) };

    // SAFETY: the object lives as long as the process; one kernel of 1 µs.
    unsafe { set_step(object, 1_000, 1, 0) };
    let mut took = Vec::with_capacity(STEPS);
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        step();
        synchronize();
    }
    for i in 0..STEPS {
        let begin = Instant::now();
        step();
        took.push(begin.elapsed().as_nanos() as f64);
        if i % BETWEEN_WAITS == BETWEEN_WAITS - 1 {
            synchronize();
            // Event pairs come back every 2 ms.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    took.sort_unstable_by(f64::total_cmp);
    // SAFETY: as above; kernels of 1 µs.
    unsafe { set_step(object, 1_000 * u64::from(LAYERS), LAYERS, 0) };
    let mut large = Vec::with_capacity(LARGE_STEPS);
    for i in 0..LARGE_STEPS {
        let begin = Instant::now();
        step();
        large.push(begin.elapsed().as_nanos() as f64);
        if i % 4 == 3 {
            synchronize();
            // There are events for four sampled steps; they come back every 2 ms.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    large.sort_unstable_by(f64::total_cmp);
    // SAFETY: as above; no kernels.
    unsafe { set_step(object, 0, 0, 0) };
    let mut empty = f64::INFINITY;
    for _ in 0..REPEATS {
        let begin = Instant::now();
        for _ in 0..CALLS {
            step();
        }
        empty = empty.min(begin.elapsed().as_nanos() as f64 / CALLS as f64);
    }
    let cost =
        Cost { empty, p50: took[STEPS / 2], p99: took[STEPS * 99 / 100], large_p50: large[LARGE_STEPS / 2] };
    println!("{}", serde_json::to_string(&cost)?);
    Ok(())
}

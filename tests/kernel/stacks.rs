//! Stacks of programs whose call chains are known.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    capture::Capture,
    event::{Event, Sample, Stack, StackCut, StackId},
    probe::{Notice, Options, Session, process},
    symbol::{FrameKind, SymbolFrame, Symbolizer},
    timeline::tables::LedgerRow,
};

use crate::{
    Test, faults,
    fixture::{Running, calls_only, compile},
    truth::{self, Truth},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("stacks::cpp", cpp),
    ("stacks::rust", rust),
    ("stacks::off_cpu", off_cpu),
    ("stacks::sleeps_in_one_place", sleeps_in_one_place),
    ("stacks::a_hundred_thousand", a_hundred_thousand),
    ("stacks::signals_and_return_probes", signals_and_return_probes),
    ("stacks::generated_code", generated_code),
    ("stacks::generated_code_without_frame_pointers", generated_code_without_frame_pointers),
    ("stacks::other_stacks", other_stacks),
    ("stacks::libraries_that_come_and_go", libraries_that_come_and_go),
    ("stacks::children", children),
    ("stacks::server", server),
    ("stacks::doctor", doctor),
];

/// What needs NVIDIA's libraries.
pub(crate) const REAL: &[(&str, Test)] = &[("stacks::real_libraries", real_libraries)];

/// The built programs.
pub(crate) struct Programs {
    folder: tempfile::TempDir,
}

impl Programs {
    pub(crate) fn get() -> Result<&'static Self> {
        static BUILT: OnceLock<std::result::Result<Programs, String>> = OnceLock::new();
        let built = BUILT.get_or_init(|| Self::build().map_err(|error| format!("{error:?}")));
        built.as_ref().map_err(anyhow::Error::msg)
    }

    fn build() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures");
        let cpp = |source: &str, output: &str, more: &[&str]| {
            let mut compiler = Command::new("g++");
            compiler.args(["-O2", "-fomit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-pthread"]);
            compiler.args(more).arg("-o").arg(folder.path().join(output)).arg(sources.join(source));
            compile(compiler.arg("-ldl"))
        };
        cpp("stacks.cpp", "stacks", &[])?;
        cpp("stacks_lib.cpp", "libstacks.so", &["-shared", "-fPIC"])?;
        let mut framed = Command::new("g++");
        framed.args(["-std=c++20", "-O2", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-o"]);
        compile(framed.arg(folder.path().join("generated")).arg(sources.join("generated.cpp")))?;
        let mut rustc = Command::new("rustc");
        rustc.args(["-O", "--edition", "2024", "-o"]).arg(folder.path().join("stacks-rust"));
        compile(rustc.arg(sources.join("stacks.rs")))?;
        Ok(Self { folder })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A stack, and how often it was seen.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Functions, root first, kernel included, as a flame graph shows them.
    pub(crate) names: Vec<String>,
    pub(crate) modules: Vec<String>,
    pub(crate) cut: Option<StackCut>,
    pub(crate) frame_pointer_steps: u32,
    pub(crate) samples: u64,
}

impl Seen {
    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.iter().any(|one| one == name)
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|one| one == name)
    }

    /// Begins where threads do.
    pub(crate) fn is_whole(&self) -> bool {
        self.cut.is_none()
            && self
                .names
                .first()
                .is_some_and(|root| ["_start", "clone3", "__clone3", "clone"].contains(&root.as_str()))
    }
}

/// What a recording saw of stacks.
#[derive(Default)]
pub(crate) struct Recorded {
    pub(crate) pid: u32,
    pub(crate) stacks: Vec<Seen>,
    pub(crate) ledger: Vec<LedgerRow>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) said: String,
}

impl Recorded {
    pub(crate) fn samples(&self, such: impl Fn(&Seen) -> bool) -> u64 {
        self.stacks.iter().filter(|seen| such(seen)).map(|seen| seen.samples).sum()
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        self.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
    }

    /// At least this share of the samples is so.
    pub(crate) fn most(&self, share: f64, what: &str, such: impl Fn(&Seen) -> bool) -> Result<()> {
        let (all, such_samples) = (self.samples(|_| true), self.samples(&such));
        let others: Vec<_> = self.stacks.iter().filter(|seen| !such(seen)).take(3).collect();
        println!("  {such_samples} of {all} samples {what}");
        ensure!(
            all > 0 && such_samples as f64 >= share * all as f64,
            "{such_samples} of {all} {what}; others: {others:#?}"
        );
        Ok(())
    }

    /// No stack at all is otherwise.
    fn none(&self, what: &str, such: impl Fn(&Seen) -> bool) -> Result<()> {
        let wrong: Vec<_> = self.stacks.iter().filter(|seen| such(seen)).take(3).collect();
        ensure!(wrong.is_empty(), "{what}: {wrong:#?}");
        Ok(())
    }
}

pub(crate) fn samples_only(hz: u64) -> Options {
    Options { sample_hz: hz, sockets: false, ..calls_only() }
}

/// Records a program, with what started it, from "ready" to "done"; names its stacks while it lives.
pub(crate) fn record(command: &mut Command, options: Options, profiles: Profiles) -> Result<Recorded> {
    let mut running = Running::start_command(command)?;
    let mut session = Session::start(options, profiles)?;
    for found in process::tree(running.pid())? {
        session.add(&found)?;
    }
    ensure!(session.wait_for_tables(Duration::from_secs(60)), "tables do not come");
    let mut events = Vec::new();
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    let said = line.strip_prefix("done ").with_context(|| format!("the program says {line:?}"))?.to_owned();
    let notices = session.take_notices();
    let ledger = session.stop(&mut events).ledger;
    let stacks = seen(&events);
    let pid = running.pid();
    running.end()?;
    Ok(Recorded { pid, stacks, ledger, notices, said })
}

/// The stacks of all events, named.
pub(crate) fn seen(events: &[Event]) -> Vec<Seen> {
    let mut symbolizer = Symbolizer::new(tracer::symbol::Options { this_boot: true });
    let mut stacks: HashMap<StackId, &Stack> = HashMap::new();
    let mut samples: BTreeMap<StackId, u64> = BTreeMap::new();
    for event in events {
        match event {
            Event::Mapping(mapping) => symbolizer.add_mapping(mapping.clone()),
            Event::Code(code) => symbolizer.add_code(code.clone()),
            Event::Stack(stack) => _ = stacks.insert(stack.id, stack),
            Event::Sample(sample) => {
                sample.stack.into_iter().for_each(|id| *samples.entry(id).or_default() += 1)
            }
            Event::Sched(sched) => {
                sched.stack.into_iter().for_each(|id| *samples.entry(id).or_default() += 1)
            }
            _ => {}
        }
    }
    let named = samples.into_iter().filter_map(|(id, samples)| {
        let stack = stacks.get(&id)?;
        Some(named(stack, &symbolizer.frames(stack), samples))
    });
    named.collect()
}

/// The stacks of some samples of a capture, by the names that it has for them.
pub(crate) fn seen_in(capture: &Capture, such: impl Fn(&Sample) -> bool) -> Result<Vec<Seen>> {
    let mut samples: BTreeMap<StackId, u64> = BTreeMap::new();
    for sample in capture.samples()? {
        let sample = sample?;
        let stack = sample.stack.filter(|_| such(&sample));
        stack.into_iter().for_each(|id| *samples.entry(id).or_default() += 1);
    }
    let mut frames: HashMap<StackId, Vec<SymbolFrame>> = HashMap::new();
    for frame in capture.frames()? {
        let frame = frame?;
        frames.entry(frame.stack).or_default().push(frame);
    }
    let stacks = capture.stacks()?.collect::<tracer::capture::Result<Vec<_>>>()?;
    let named = stacks.iter().filter_map(|stack| {
        let samples = *samples.get(&stack.id)?;
        Some(named(stack, frames.get(&stack.id)?, samples))
    });
    Ok(named.collect())
}

/// `frames` are of that stack, leaf first.
fn named(stack: &Stack, frames: &[SymbolFrame], samples: u64) -> Seen {
    let name = |frame: &SymbolFrame| {
        let name = frame.label();
        match frame.kind {
            FrameKind::Kernel => format!("{name}_[k]"),
            FrameKind::User if name.contains('/') || frame.module.starts_with('[') => name,
            // What the compiler made of a function is that function.
            FrameKind::User => name.split('.').next().unwrap_or_default().to_owned(),
            FrameKind::Python => name,
        }
    };
    Seen {
        names: frames.iter().rev().map(name).collect(),
        modules: frames.iter().rev().map(|frame| frame.module.clone()).collect(),
        cut: stack.cut,
        frame_pointer_steps: stack.frame_pointer_steps,
        samples,
    }
}

/// Whether what is known of the call chain of `deep` holds: rec_a → rec_b → rec_c → rec_a …, all of them once a leaf is
/// reached.
fn is_true(seen: &Seen) -> bool {
    const TURN: [&str; 3] = ["rec_a", "rec_b", "rec_c"];
    let Some(go) = seen.names.iter().position(|name| name.starts_with("Deep::go")) else {
        return !seen.names.iter().any(|name| TURN.contains(&name.as_str()) || name.starts_with("leaf_"));
    };
    let below = &seen.names[go + 1..];
    let depth = below.iter().take_while(|name| TURN.contains(&name.as_str())).count();
    let rest = &below[depth..];
    let in_turn = below[..depth].iter().zip(TURN.iter().cycle()).all(|(name, turn)| name == turn);
    let again = rest.iter().any(|name| TURN.contains(&name.as_str()) || name.starts_with("Deep::go"));
    let at_leaf = rest.iter().any(|name| name.starts_with("leaf_"));
    let by_work = go > 0 && seen.names[go - 1].starts_with("work");
    let is_full = (31..=58).contains(&depth) && depth % 3 == 1;
    in_turn && !again && by_work && (is_full || !at_leaf) && depth <= 58
}

fn cpp() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["deep", "2000"]), samples_only(499), Profiles::builtin())?;
    ensure!(recorded.samples(|_| true) > 200, "{} samples", recorded.samples(|_| true));
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    recorded.none("wrong", |seen| seen.cut.is_none() && !is_true(seen))?;
    for leaf in ["leaf_math", "leaf_memory", "leaf_system", "leaf_sort"] {
        ensure!(recorded.samples(|seen| seen.has(leaf)) > 0, "no sample in {leaf}");
    }
    Ok(())
}

fn rust() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks-rust"));
    let recorded = record(program.args(["deep", "2000"]), samples_only(499), Profiles::builtin())?;
    ensure!(recorded.samples(|_| true) > 200, "{} samples", recorded.samples(|_| true));
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    let leaf = |seen: &Seen| seen.names.iter().any(|name| name.contains("leaf_"));
    recorded.none("a leaf without its callers", |seen| {
        let count = |part: &str| seen.names.iter().filter(|name| name.ends_with(part)).count();
        let (a, b) = (count("rec_a"), count("rec_b"));
        seen.cut.is_none() && leaf(seen) && !(a == b + 1 && (11..=20).contains(&a))
    })
}

fn off_cpu() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let options = Options { sample_hz: 0, sched: true, sockets: false, ..calls_only() };
    let recorded = record(program.args(["switches", "300"]), options, Profiles::builtin())?;
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    recorded.none("wrong", |seen| seen.cut.is_none() && !is_true(seen))?;
    recorded.most(0.5, "were below leaf_yield", |seen| seen.has("leaf_yield"))
}

/// A thread sleeps in one place again and again, to which two ways lead, and from which two lead on in the kernel.
fn sleeps_in_one_place() -> Result<()> {
    const COUNT: usize = 3_000;
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let options = Options { sample_hz: 0, sched: true, sockets: false, ..calls_only() };
    let recorded = record(program.args(["sleeps", &COUNT.to_string()]), options, Profiles::builtin())?;
    let in_kernel = |seen: &Seen, name: &str| {
        seen.names.iter().any(|frame| frame.ends_with("_[k]") && frame.contains(name))
    };
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    recorded
        .none("of two ways", |seen| seen.has("sleep_here") && seen.has("via_one") == seen.has("via_two"))?;
    recorded.none("of two sleeps", |seen| in_kernel(seen, "timerfd_read") && in_kernel(seen, "pipe_read"))?;
    let said: Vec<u64> = recorded.said.split(' ').filter_map(|count| count.parse().ok()).collect();
    let ways = ["via_one", "via_two"];
    let seen = ways.map(|way| recorded.samples(|seen| seen.has(way) && in_kernel(seen, "timerfd_read")));
    println!("  asleep for the timer by two ways: {seen:?}, {said:?} times");
    for (seen, said) in seen.into_iter().zip(said) {
        // A timer that went off before the thread asked lets it not sleep.
        ensure!(seen <= said && seen * 100 >= said * 95, "{seen} of {said}");
    }
    Ok(())
}

/// Samples and switches together, until there are enough.
fn a_hundred_thousand() -> Result<()> {
    let (mut all, mut whole) = (0, 0);
    for _ in 0..40 {
        let mut program = Command::new(Programs::get()?.path("stacks"));
        let options = Options { sample_hz: 997, sched: true, sockets: false, ..calls_only() };
        let recorded = record(program.args(["switches", "2000"]), options, Profiles::builtin())?;
        recorded.none("wrong", |seen| seen.cut.is_none() && !is_true(seen))?;
        all += recorded.samples(|_| true);
        whole += recorded.samples(Seen::is_whole);
        if all >= 100_000 {
            break;
        }
    }
    println!("  {all} stacks, {whole} whole, none wrong");
    ensure!(all >= 100_000, "{all} stacks");
    ensure!(whole as f64 >= 0.99 * all as f64, "{whole} of {all} are whole");
    Ok(())
}

const PROBED: &str = r#"
engine = "stacks"
title = "program with known stacks"
files = ["stacks"]

[[point]]
symbols = ["probed_inner", "probed_outer"]
role = "other"
returns = "c"
"#;

/// While functions on the stack are probed on return, and signals interrupt them on a stack of their own.
fn signals_and_return_probes() -> Result<()> {
    let profile = Programs::get()?.path("stacks.toml");
    std::fs::write(&profile, PROBED)?;
    let mut profiles = Profiles::builtin();
    profiles.load(&profile)?;
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["signals", "2000"]), samples_only(997), profiles)?;
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    let inner = |seen: &Seen| seen.has("inner");
    ensure!(recorded.samples(inner) > 100, "{} samples in `inner`", recorded.samples(inner));
    let chain = ["probed_outer", "between", "probed_inner", "inner"];
    recorded.none("callers are missing", |seen| {
        let places: Vec<_> = chain.iter().filter_map(|name| seen.position(name)).collect();
        let in_a_row = places.windows(2).all(|pair| pair[1] == pair[0] + 1);
        seen.cut.is_none() && inner(seen) && !(places.len() == chain.len() && in_a_row)
    })?;
    let handled = |seen: &Seen| seen.has("handler_work");
    ensure!(recorded.samples(handled) > 10, "{} samples in the handler", recorded.samples(handled));
    recorded.none("a handler that interrupted nothing", |seen| {
        let below = seen.position("on_signal").unwrap_or(0);
        seen.cut.is_none() && handled(seen) && (below < 3 || seen.position("handler_work") != Some(below + 1))
    })
}

/// Code in no file that keeps frame pointers.
fn generated_code() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["framed", "1000"]), samples_only(997), Profiles::builtin())?;
    let called = |seen: &Seen| seen.has("called_by_generated");
    ensure!(recorded.samples(called) > 100, "{} samples", recorded.samples(called));
    recorded.none("wrong", |seen| {
        let place = seen.position("called_by_generated").unwrap_or(0);
        seen.cut.is_none()
            && called(seen)
            && !(place > 1
                && seen.names[place - 1].starts_with("[anonymous]")
                && seen.names[place - 2] == "calls_generated"
                && seen.frame_pointer_steps == 1)
    })?;
    recorded.most(0.95, "reach the thread's start", Seen::is_whole)
}

/// Code in no file that keeps none: where its callers are cannot be known. Nothing is made up.
fn generated_code_without_frame_pointers() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["frameless", "1000"]), samples_only(997), Profiles::builtin())?;
    let called = |seen: &Seen| seen.has("called_by_generated");
    ensure!(recorded.samples(called) > 100, "{} samples", recorded.samples(called));
    recorded.none("presented as whole", |seen| {
        called(seen) && seen.cut.is_none() && seen.frame_pointer_steps == 0
    })?;
    ensure!(
        recorded.count("stack_cut_frame_pointers") + recorded.count("stack_cut_unmapped") > 0,
        "no cut counted"
    );
    Ok(())
}

/// A coroutine's stack begins where the coroutine does.
fn other_stacks() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["pivot", "1000"]), samples_only(997), Profiles::builtin())?;
    let on_other = |seen: &Seen| seen.has("on_other_stack");
    ensure!(recorded.samples(on_other) > 100, "{} samples", recorded.samples(on_other));
    recorded.none("frames of the other stack", |seen| on_other(seen) && seen.has("main"))
}

fn libraries_that_come_and_go() -> Result<()> {
    let library = Programs::get()?.path("libstacks.so");
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded =
        record(program.args(["load", "2000"]).arg(library), samples_only(997), Profiles::builtin())?;
    let deep = |seen: &Seen| seen.has("fixture_leaf");
    ensure!(recorded.samples(deep) > 100, "{} samples in the library", recorded.samples(deep));
    recorded.none("wrong", |seen| {
        let frames = seen.names.iter().filter(|name| *name == "fixture_deep").count();
        seen.cut.is_none() && deep(seen) && frames != 13
    })?;
    // Each time it comes, the tables follow a little later.
    recorded.most(0.8, "reach the thread's start", Seen::is_whole)
}

fn children() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let recorded = record(program.args(["children", "4000"]), samples_only(499), Profiles::builtin())?;
    ensure!(recorded.said.parse::<u32>().is_ok_and(|rounds| rounds > 1), "{}", recorded.said);
    recorded.none("wrong", |seen| seen.cut.is_none() && !seen.names.is_empty() && !is_true(seen))?;
    // What a program is that has just begun is known a little later.
    recorded.most(0.7, "reach the thread's start", Seen::is_whole)
}

/// NVIDIA's own libraries, which keep no frame pointers and have no symbols: from inside them to the thread's start.
fn real_libraries() -> Result<()> {
    let folder = PathBuf::from(std::env::var_os("TRACER_REAL_LIBS").context("no TRACER_REAL_LIBS")?);
    let libraries =
        ["lean-11.4/libnvinfer_lean.so.11", "rtx-1.7/libtensorrt_rtx.so.1", "full-8.5.1/libnvinfer.so.8"];
    for library in
        libraries.map(|library| folder.join(library)).into_iter().filter(|library| library.exists())
    {
        let mut program = Command::new(Programs::get()?.path("stacks"));
        let recorded =
            record(program.args(["real", "1500"]).arg(&library), samples_only(997), Profiles::builtin())?;
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let inside = |seen: &Seen| seen.modules.iter().any(|module| module.ends_with(&name));
        println!("  {}: {} samples through it", library.display(), recorded.samples(inside));
        ensure!(recorded.samples(inside) > 100, "{} samples in {name}", recorded.samples(inside));
        let handled = |seen: &Seen| seen.cut == Some(StackCut::Exception);
        recorded.none("the way into the library is not whole", |seen| {
            seen.cut.is_none() && inside(seen) && !seen.names.iter().any(|name| name == "calls_library")
        })?;
        // One of them throws all the time.
        recorded.most(0.99, "reach the thread's start, or a handler that is being entered", |seen| {
            seen.is_whole() || handled(seen)
        })?;
    }
    Ok(())
}

/// The engine's threads of the stand-in server, which go through its libraries.
fn server() -> Result<()> {
    let server = ["--ranks", "2", "--zero-gpu", "--host-us", "1000"];
    let load = ["--requests", "60", "--concurrency", "8", "--output-tokens", "50-100"];
    let run = truth::run(&server, &load, &["--sample-hz", "499"])?;
    let engine: HashSet<u32> = run
        .truth
        .iter()
        .filter_map(|line| if let Truth::Step { tid, .. } = line { Some(*tid) } else { None })
        .collect();
    ensure!(engine.len() == 2, "{} threads run steps", engine.len());
    let stacks = seen_in(&run.capture, |sample| engine.contains(&sample.origin.tid))?;
    let recorded = Recorded { stacks, ..Recorded::default() };
    ensure!(recorded.samples(|_| true) > 200, "{} samples", recorded.samples(|_| true));
    recorded.most(0.99, "reach the thread's start", Seen::is_whole)?;
    recorded.most(0.99, "have a name for each function", |seen| {
        !seen.names.iter().any(|name| name.contains("+0x") || name.starts_with("[k]"))
    })?;
    recorded.most(0.99, "are the engine's", |seen| {
        seen.names.iter().any(|name| name.contains("standin_server::engine::"))
    })?;
    let inside = |seen: &Seen| seen.modules.iter().any(|module| module.ends_with("libnvinfer.so.10"));
    ensure!(recorded.samples(inside) > 50, "{} samples go through its library", recorded.samples(inside));
    Ok(())
}

/// `tracer doctor` names the way of each file.
fn doctor() -> Result<()> {
    let mut program = Command::new(Programs::get()?.path("stacks"));
    let running = Running::start_command(program.args(["framed", "1"]))?;
    let output =
        faults::tracer()?.args(["doctor", "--json", "--pid", &running.pid().to_string()]).output()?;
    let text = String::from_utf8(output.stdout)?;
    for part in ["/stacks: by table", "libc.so.6: by table", "[vdso]: by table"] {
        ensure!(text.contains(part), "no {part:?} in {text}");
    }
    Ok(())
}

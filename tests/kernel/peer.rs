//! The same programs, at the same time, as `perf record --call-graph dwarf` sees them.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::{Event, Frame, Mapping, Stack, StackId},
    host_clock::monotonic_ns,
    probe::{Session, process},
    symbol::{FrameKind, SymbolFrame, Symbolizer},
};
use tracer_tests::table::Table;

use crate::{
    Test,
    fixture::Running,
    stacks::{Programs, samples_only},
};

pub(crate) const TESTS: &[(&str, Test)] = &[("peer::perf", perf)];

/// Largest difference of a function's share, in points, and how many functions are compared.
const POINTS: f64 = 2.0;
const HEAVIEST: usize = 10;
/// So many that chance explains no more than that: the share of a function is known to ±0.5 points (σ).
const SAMPLES: u64 = 8000;
const ROUNDS: usize = 4;

/// Shares of functions, and how many stacks begin where threads do.
#[derive(Default)]
struct View {
    samples: u64,
    whole: u64,
    own: BTreeMap<String, u64>,
}

impl View {
    /// Takes a stack by its functions in user space, leaf first.
    fn add(&mut self, names: &[String], samples: u64) {
        let Some(leaf) = names.first() else { return };
        self.samples += samples;
        *self.own.entry(leaf.clone()).or_default() += samples;
        let root = names.last().map_or("", String::as_str);
        if ["_start", "clone3", "__clone3", "clone", "__clone"].contains(&root) {
            self.whole += samples;
        }
    }

    fn percent(&self, name: &str) -> f64 {
        100.0 * self.own.get(name).copied().unwrap_or(0) as f64 / self.samples.max(1) as f64
    }
}

fn perf() -> Result<()> {
    let programs = Programs::get()?;
    let cpp = programs.path("stacks");
    let rust = programs.path("stacks-rust");
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/stacks.py");
    // Two threads of CPython take turns by a clock of 5 ms, with which one that samples can keep step.
    for (what, program, script, mode) in [
        ("C++", cpp, None, "deep"),
        ("Rust", rust, None, "deep"),
        ("CPython", PathBuf::from("/usr/bin/python3"), Some(python), "alone"),
    ] {
        let mut command = Command::new(program);
        command.args(script).args([mode, "600000"]);
        // Chance, and what else the machine does: where shares differ, more samples decide.
        let (mut ours, mut theirs) = (View::default(), View::default());
        for round in 1..=ROUNDS {
            sample(&mut command, &mut ours, &mut theirs)?;
            println!("{}", table(what, &ours, &theirs));
            let (whole, samples) = (ours.whole, ours.samples);
            ensure!(whole as f64 >= 0.99 * samples as f64, "{what}: {whole} of {samples} whole");
            let other = heaviest(&ours)
                .into_iter()
                .find(|name| (ours.percent(name) - theirs.percent(name)).abs() > POINTS);
            let Some(name) = other else { break };
            let (own, their) = (ours.percent(&name), theirs.percent(&name));
            ensure!(round < ROUNDS, "{what}: {name} has {own:.1} % here and {their:.1} % there");
        }
    }
    Ok(())
}

/// Runs the program while both sample it.
fn sample(command: &mut Command, ours: &mut View, theirs: &mut View) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("perf.data");
    let mut running = Running::start_command(command)?;
    let mut session = Session::start(samples_only(499), Profiles::builtin())?;
    session.add(&process::find(running.pid())?)?;
    ensure!(session.wait_for_tables(Duration::from_secs(60)), "tables do not come");
    let mut peer = Perf::start(folder.path(), &data)?;
    running.tell()?;
    let mut events = Vec::new();
    peer.say("enable")?;
    let begin_ns = monotonic_ns();
    let patience = Instant::now() + Duration::from_secs(120);
    let mut samples = 0;
    while samples < SAMPLES && Instant::now() < patience {
        let before = events.len();
        session.drain(&mut events);
        samples += events[before..].iter().filter(|event| matches!(event, Event::Sample(_))).count() as u64;
        std::thread::sleep(Duration::from_millis(5));
    }
    // While perf begins and ends it is busy, and the program has less of the machine: only what both see counts.
    let end_ns = monotonic_ns();
    peer.say("disable")?;
    peer.end()?;
    let stopped = session.stop(&mut events);
    let losses: Vec<_> = stopped.ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(losses.is_empty(), "lost: {losses:?}");
    let is_seen_by_both = |event: &Event| match event {
        Event::Sample(sample) => (begin_ns..end_ns).contains(&sample.origin.time_ns),
        _ => true,
    };
    events.retain(is_seen_by_both);
    let mut names = Names::new(&events);
    names.ours(&events, ours);
    names.theirs(&script(&data, running.pid())?, theirs);
    Ok(())
}

/// `perf record`, which samples between two commands. Dropping it ends it.
struct Perf {
    child: Child,
    commands: File,
    answers: BufReader<File>,
}

impl Perf {
    fn start(folder: &Path, data: &Path) -> Result<Self> {
        let pipe = |name: &str| -> Result<(PathBuf, File)> {
            let path = folder.join(name);
            ensure!(Command::new("mkfifo").arg(&path).status()?.success(), "no pipe {}", path.display());
            // Opened for both, it waits for nobody.
            let file = File::options().read(true).write(true).open(&path)?;
            Ok((path, file))
        };
        let ((commands_path, commands), (answers_path, answers)) = (pipe("commands")?, pipe("answers")?);
        let control = format!("fifo:{},{}", commands_path.display(), answers_path.display());
        let mut perf = Command::new("perf");
        // A clock per CPU, as ours: one per thread begins anew with each switch and so shuns what comes right after it.
        // At another rate: clocks of one rate keep their distance, and may see different parts of a loop throughout.
        perf.args(["record", "-q", "-a", "-e", "cpu-clock", "-F", "421", "--call-graph", "dwarf"]);
        perf.args(["--delay", "-1", "--control", &control, "-o"]).arg(data).stdout(Stdio::null());
        let child = perf.spawn().context("running perf (apt-get install linux-perf)")?;
        Ok(Self { child, commands, answers: BufReader::new(answers) })
    }

    /// Waits until it has done what it is told.
    fn say(&mut self, command: &str) -> Result<()> {
        writeln!(self.commands, "{command}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        ensure!(answer.contains("ack"), "perf answers {answer:?}");
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        // SAFETY: a plain system call on a child that was not waited for; perf writes its file on this signal.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGINT) };
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        // Already gone in the good case.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// A frame of perf's: the file, and the offset in it.
type Place = (String, u64);

/// Each stack that perf recorded, without the kernel's part, leaf first.
fn script(data: &Path, pid: u32) -> Result<Vec<Vec<Place>>> {
    let output = Command::new("perf")
        .args(["script", "--no-inline", "-F", "comm,ip,dso", "--pid", &pid.to_string(), "-i"])
        .arg(data)
        .stderr(Stdio::null())
        .output()
        .context("running perf script")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let place = |line: &str| {
        let (address, file) = line.trim().split_once(" (")?;
        Some((file.trim_end_matches(')').to_owned(), u64::from_str_radix(address.trim(), 16).ok()?))
    };
    let stack = |text: &str| {
        let lines = text.lines().filter(|line| line.starts_with([' ', '\t']));
        lines
            .filter_map(place)
            .filter(|(file, _)| !file.starts_with("[kernel") && !file.starts_with("[guest"))
            .collect()
    };
    Ok(text.split("\n\n").map(stack).collect())
}

/// Names both views alike: what is compared is where programs were, not how their functions are called.
struct Names {
    symbolizer: Symbolizer,
    mappings: Vec<Mapping>,
    known: BTreeMap<(Place, bool), String>,
}

impl Names {
    fn new(events: &[Event]) -> Self {
        let mut symbolizer = Symbolizer::new(tracer::symbol::Options { this_boot: true });
        let mut mappings = Vec::new();
        for event in events {
            if let Event::Mapping(mapping) = event {
                symbolizer.add_mapping(mapping.clone());
                mappings.push(mapping.clone());
            }
            if let Event::Code(code) = event {
                symbolizer.add_code(code.clone());
            }
        }
        Self { symbolizer, mappings, known: BTreeMap::new() }
    }

    fn stack(&mut self, stack: &Stack) -> Vec<String> {
        let frames = self.symbolizer.frames(stack);
        let native = |frame: &SymbolFrame| match frame.kind {
            FrameKind::Kernel => None,
            FrameKind::User if frame.inlined => None,
            FrameKind::User if frame.module.starts_with('[') => Some(frame.module.clone()),
            FrameKind::User => Some(frame.label().split('.').next().unwrap_or_default().to_owned()),
            FrameKind::Python => Some("_PyEval_EvalFrameDefault".to_owned()),
        };
        frames.iter().filter_map(native).collect()
    }

    fn ours(&mut self, events: &[Event], view: &mut View) {
        let mut stacks = BTreeMap::new();
        for event in events {
            match event {
                Event::Stack(stack) => _ = stacks.insert(stack.id, self.stack(stack)),
                Event::Sample(sample) => {
                    if let Some(names) = sample.stack.and_then(|id| stacks.get(&id)) {
                        view.add(names, 1);
                    }
                }
                _ => {}
            }
        }
    }

    fn theirs(&mut self, stacks: &[Vec<Place>], view: &mut View) {
        for stack in stacks {
            let name = |(depth, place)| self.name(place, depth > 0);
            view.add(&stack.iter().enumerate().map(name).collect::<Vec<_>>(), 1);
        }
    }

    fn name(&mut self, place: &Place, is_return: bool) -> String {
        let key = (place.clone(), is_return);
        if let Some(name) = self.known.get(&key) {
            return name.clone();
        }
        let (file, offset) = place;
        let holds = |mapping: &&Mapping| {
            mapping.path == *file
                && (mapping.offset..mapping.offset + (mapping.end - mapping.begin)).contains(offset)
        };
        let name = match self.mappings.iter().find(holds).cloned() {
            Some(mapping) => {
                let frame = |mapping, offset| Frame { mapping, code: None, offset };
                // Return addresses are those behind the leaf.
                let mut user = vec![frame(Some(mapping.id), *offset)];
                if is_return {
                    user.insert(0, frame(None, 0));
                }
                let stack = Stack {
                    id: StackId(0),
                    time_ns: 0,
                    process: mapping.process,
                    kernel: Vec::new(),
                    user,
                    cut: None,
                    frame_pointer_steps: 0,
                };
                self.stack(&stack).pop().unwrap_or_default()
            }
            None => file.clone(),
        };
        self.known.insert(key, name.clone());
        name
    }
}

fn heaviest(view: &View) -> Vec<String> {
    let mut names: Vec<_> = view.own.iter().collect();
    names.sort_by_key(|(_, samples)| std::cmp::Reverse(**samples));
    names.into_iter().take(HEAVIEST).map(|(name, _)| name.clone()).collect()
}

fn table(what: &str, ours: &View, theirs: &View) -> Table {
    let mut table = Table::new(
        &format!("{what}: where it was, by tracer and by `perf record --call-graph dwarf` at the same time"),
        &["function", "tracer %", "perf %"],
    );
    let share = |view: &View| format!("{:.1}", 100.0 * view.whole as f64 / view.samples.max(1) as f64);
    for name in heaviest(ours) {
        let percents = [ours, theirs].map(|view| format!("{:.1}", view.percent(&name)));
        table.rows.push([vec![name], percents.to_vec()].concat());
    }
    table.rows.push(vec!["(stacks that begin where threads do)".into(), share(ours), share(theirs)]);
    table.rows.push(vec!["(samples)".into(), ours.samples.to_string(), theirs.samples.to_string()]);
    table
}

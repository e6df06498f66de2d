//! What stacks cost: a sample, a table, a server that is sampled.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use engines::Profiles;
use memmap2::Mmap;
use serde::Serialize;
use tracer::{
    event::{Event, StackId},
    probe::{Options, Session, process},
    unwind::Image,
};
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::{
    MEMORY, clock, laps,
    part::Part,
    perf::Perf,
    recorder::Recorder,
    server::{Server, Window},
    throughput::{self, Pace},
};

/// Samples per second and CPU where the cost of one is measured.
const HZ: u64 = 999;
/// In ms of CPU time and MiB of heap, for the table of one library.
const CPU_AIM: Aim = Aim::AtMost(300.0);
const HEAP_AIM_MIB: f64 = 120.0;
/// Speed of a server that is sampled, ÷ that of one that is recorded without samples.
const SPEED_AIM: Aim = Aim::AtLeast(0.99);
/// Libraries whose tables are built: the largest.
const LIBRARIES: usize = 4;

/// How stacks are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    FramePointers,
    Tables,
    PerfFramePointers,
    Perf,
}

impl Way {
    const ALL: [Self; 4] = [Self::FramePointers, Self::Tables, Self::PerfFramePointers, Self::Perf];

    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::FramePointers => "tracer, by frame pointers",
            Self::Tables => "tracer, by tables",
            Self::PerfFramePointers => "perf record --call-graph fp",
            Self::Perf => "perf record --call-graph dwarf",
        }
    }

    /// Whether the program that it is measured on keeps frame pointers.
    const fn is_framed(self) -> bool {
        matches!(self, Self::FramePointers | Self::PerfFramePointers)
    }

    /// How perf walks, where it is perf.
    pub(crate) const fn perf(self) -> Option<&'static str> {
        match self {
            Self::FramePointers | Self::Tables => None,
            Self::PerfFramePointers => Some("fp"),
            Self::Perf => Some("dwarf"),
        }
    }
}

/// What one sample costs, by round.
#[derive(Debug, Serialize)]
struct Samples {
    way: Way,
    /// CPU time of the program in the kernel per sample, less what a sample of another process costs; not known of perf.
    kernel_ns: Vec<f64>,
    /// By how much a sample delays a program, whose work is always the same.
    delay_ns: Vec<f64>,
    /// CPU time of the recorder per sample.
    recorder_ns: Vec<f64>,
    /// Bytes that it writes per sample.
    bytes: Vec<f64>,
    /// User frames of a stack.
    frames: f64,
}

/// What the table of a library costs.
#[derive(Debug, Serialize)]
struct Built {
    library: String,
    bytes: u64,
    rows: usize,
    table_bytes: usize,
    cpu_ms: Option<Estimate>,
    peak_heap_bytes: usize,
}

/// A server without samples and with them: windows by round.
#[derive(Debug, Serialize)]
struct Sampled {
    /// At 0, 99 and 999 Hz.
    windows: Vec<[Window; 3]>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    samples: Vec<Samples>,
    built: Part<Vec<Built>>,
    sampled: Sampled,
}

pub(crate) fn run(real_libs: Option<&Path>, rounds: usize, window: Duration) -> Result<Outcome> {
    Ok(Outcome {
        samples: samples(rounds.min(5), window)?,
        built: match real_libs {
            Some(folder) => Part::Measured(built(folder, rounds)?),
            None => Part::LeftOut("`cargo xtask test --real-libs` brings NVIDIA's libraries".into()),
        },
        sampled: sampled(rounds, window)?,
    })
}

/// A program that computes deep in recursion until it is dropped.
pub(crate) struct Deep(Child);

impl Deep {
    /// Also gives what it says, which must be kept as long as it may say something.
    pub(crate) fn start(program: &Path, arguments: &[&str]) -> Result<(Self, BufReader<ChildStdout>)> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting the program")?;
        let mut stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut stdin = child.stdin.take().context("no stdin")?;
        let deep = Self(child);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        ensure!(line.trim() == "ready", "the program says {line:?}");
        stdin.write_all(b"\n")?;
        Ok((deep, stdout))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Deep {
    fn drop(&mut self) {
        // Both fail only where it has ended.
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

fn compile(folder: &Path, name: &str, flag: &str) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/stacks.cpp");
    let program = folder.join(name);
    let mut compiler = Command::new("g++");
    compiler.args(["-O2", flag, "-pthread", "-o"]).arg(&program).arg(source).arg("-ldl");
    ensure!(compiler.status().context("running g++")?.success(), "g++ failed");
    Ok(program)
}

fn samples(rounds: usize, window: Duration) -> Result<Vec<Samples>> {
    let folder = tempfile::tempdir()?;
    let with = compile(folder.path(), "framed", "-fno-omit-frame-pointer")?;
    let without = compile(folder.path(), "frameless", "-fomit-frame-pointer")?;
    let mut all: Vec<Samples> = Way::ALL
        .into_iter()
        .map(|way| Samples {
            way,
            kernel_ns: vec![],
            delay_ns: vec![],
            recorder_ns: vec![],
            bytes: vec![],
            frames: 0.0,
        })
        .collect();
    for round in 0..rounds {
        for samples in &mut all {
            let way = samples.way;
            crate::progress(&format!("stacks, {}: round {} of {rounds}", way.text(), round + 1));
            let program = if way.is_framed() { &with } else { &without };
            samples.delay_ns.push(laps::delay(program, way, round, folder.path(), window)?);
            let (deep, _stdout) = Deep::start(program, &["deep", "600000"])?;
            if way.perf().is_some() {
                by_perf(&deep, samples, folder.path(), window)?;
            } else {
                by_tracer(&deep, samples, window)?;
                on_disk(&deep, samples, folder.path(), window)?;
            }
        }
    }
    Ok(all)
}

pub(crate) fn options(way: Way, hz: u64) -> Options {
    let tables = way == Way::Tables;
    Options { sample_hz: hz, sched: false, sockets: false, tables, ..Options::default() }
}

/// What a sample costs in the kernel: by the kernel's own count of the program's time, in this process.
fn by_tracer(deep: &Deep, samples: &mut Samples, window: Duration) -> Result<()> {
    let _stats = KernelStats::on()?;
    let mut session = Session::start(options(samples.way, HZ), Profiles::builtin())?;
    let program = SampleProgram::find()?;
    let begin = program.read()?;
    std::thread::sleep(Duration::from_millis(500));
    let foreign = program.read()?.since(begin);
    let foreign_ns = foreign.ns as f64 / foreign.runs.max(1) as f64;
    session.add(&process::find(deep.id())?)?;
    ensure!(session.wait_for_tables(Duration::from_secs(60)), "tables do not come");
    let mut events = Vec::new();
    session.drain(&mut events);
    events.clear();
    let (begin, until) = (program.read()?, Instant::now() + window);
    while Instant::now() < until {
        session.drain(&mut events);
        std::thread::sleep(Duration::from_millis(2));
    }
    let spent = program.read()?.since(begin);
    session.stop(&mut events);
    let frames: std::collections::HashMap<StackId, usize> = events
        .iter()
        .filter_map(
            |event| if let Event::Stack(stack) = event { Some((stack.id, stack.user.len())) } else { None },
        )
        .collect();
    let depths: Vec<usize> = events
        .iter()
        .filter_map(|event| if let Event::Sample(sample) = event { sample.stack } else { None })
        .filter_map(|stack| frames.get(&stack).copied())
        .collect();
    ensure!(depths.len() > 100, "{} samples", depths.len());
    let count = depths.len() as f64;
    samples.frames = depths.iter().sum::<usize>() as f64 / count;
    let others = (spent.runs as f64 - count).max(0.0);
    samples.kernel_ns.push((spent.ns as f64 - others * foreign_ns) / count);
    Ok(())
}

/// What a sample costs the recorder, and on disk.
fn on_disk(deep: &Deep, samples: &mut Samples, folder: &Path, window: Duration) -> Result<()> {
    let capture = folder.join("capture");
    let hz = HZ.to_string();
    let mut options = vec!["--no-sched", "--no-sockets", "--sample-hz", &hz];
    if samples.way == Way::FramePointers {
        options.push("--no-tables");
    }
    let mut recorder = Recorder::start(deep.id(), &capture, &options)?;
    recorder.wait_for_flush("samples")?;
    let (begin, began) = (recorder.usage()?, Instant::now());
    std::thread::sleep(window);
    recorder.wait_for_flush("samples")?;
    let (end, seconds) = (recorder.usage()?, began.elapsed().as_secs_f64());
    let summary = recorder.stop()?;
    throughput::remove(&capture)?;
    let count = summary.events as f64 / summary.seconds * seconds;
    samples.recorder_ns.push((end.cpu_ns - begin.cpu_ns) as f64 / count);
    samples.bytes.push((end.raw_bytes - begin.raw_bytes) as f64 / count);
    Ok(())
}

fn by_perf(deep: &Deep, samples: &mut Samples, folder: &Path, window: Duration) -> Result<()> {
    let perf = Perf::start(deep.id(), samples.way, HZ, folder)?;
    let cpu = clock::process_clock(perf.id())?;
    let now = || -> Result<_> { Ok((clock::cpu_ns(cpu)?, perf.bytes())) };
    let begin = now()?;
    std::thread::sleep(window);
    // It writes some hundred kB at a time.
    perf.wait_for_more()?;
    let end = now()?;
    let (bytes, count) = perf.stop()?;
    let bytes = bytes as f64 / count;
    samples.recorder_ns.push((end.0 - begin.0) as f64 / ((end.1 - begin.1) as f64 / bytes));
    samples.bytes.push(bytes);
    Ok(())
}

/// The kernel counts the time of all programs while this lives.
struct KernelStats(String);

impl KernelStats {
    const FILE: &str = "/proc/sys/kernel/bpf_stats_enabled";

    fn on() -> Result<Self> {
        let before = fs::read_to_string(Self::FILE).with_context(|| format!("cannot read {}", Self::FILE))?;
        fs::write(Self::FILE, "1").with_context(|| format!("cannot write {}", Self::FILE))?;
        Ok(Self(before))
    }
}

impl Drop for KernelStats {
    fn drop(&mut self) {
        // It was written before.
        let _written = fs::write(Self::FILE, self.0.trim());
    }
}

/// What the kernel has counted of a program.
#[derive(Clone, Copy, Default)]
struct Runs {
    ns: u64,
    runs: u64,
}

impl Runs {
    fn since(self, before: Self) -> Self {
        Self { ns: self.ns - before.ns, runs: self.runs - before.runs }
    }
}

/// The sampling program of this process: the only one of its type.
struct SampleProgram(PathBuf);

impl SampleProgram {
    fn find() -> Result<Self> {
        // BPF_PROG_TYPE_PERF_EVENT
        let is_it =
            |path: &PathBuf| fs::read_to_string(path).is_ok_and(|text| text.contains("prog_type:\t7\n"));
        let entries = fs::read_dir("/proc/self/fdinfo")?.flatten().map(|entry| entry.path());
        Ok(Self(entries.into_iter().find(is_it).context("no sampling program")?))
    }

    fn read(&self) -> Result<Runs> {
        let text = fs::read_to_string(&self.0)?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':').trim().parse().ok()
        };
        let runs = field("run_time_ns").zip(field("run_cnt"));
        let (ns, runs) = runs.with_context(|| format!("the kernel does not count: {text}"))?;
        Ok(Runs { ns, runs })
    }
}

fn built(folder: &Path, rounds: usize) -> Result<Vec<Built>> {
    let mut files = Vec::new();
    for folder in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        for file in fs::read_dir(folder?.path()).into_iter().flatten() {
            let path = file?.path();
            let metadata = fs::metadata(&path)?;
            if metadata.is_file() {
                files.push((metadata.len(), path));
            }
        }
    }
    files.sort_unstable_by(|a, b| b.cmp(a));
    let mut all = Vec::new();
    for (bytes, path) in files {
        if all.len() == LIBRARIES {
            break;
        }
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: nobody writes to the cache of libraries meanwhile.
        let map = unsafe { Mmap::map(&file) }?;
        // Not for this machine, or no library.
        let Ok(image) = Image::parse(&map) else { continue };
        let (mut times, mut peak_heap_bytes) = (Vec::new(), 0);
        let mut table = image.table()?;
        for round in 0..rounds {
            crate::progress(&format!("tables, {}: round {} of {rounds}", path.display(), round + 1));
            drop(std::mem::take(&mut table));
            let before = MEMORY.restart();
            let began = clock::cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID)?;
            table = Image::parse(&map)?.table()?;
            times.push((clock::cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID)? - began) as f64 / 1e6);
            peak_heap_bytes = peak_heap_bytes.max(MEMORY.peak() - before);
        }
        let parts: Vec<_> = path.iter().rev().take(2).map(|part| part.to_string_lossy()).collect();
        all.push(Built {
            library: parts.iter().rev().map(AsRef::as_ref).collect::<Vec<&str>>().join("/"),
            bytes,
            rows: table.rows.len(),
            table_bytes: 4 * table.rows.len() + 8 * table.pages.len() + 16 * table.rules.len(),
            cpu_ms: stats::estimate(&times),
            peak_heap_bytes,
        });
    }
    Ok(all)
}

const RATES: [&str; 3] = ["0", "99", "999"];

fn sampled(rounds: usize, window: Duration) -> Result<Sampled> {
    let folder = tempfile::tempdir()?;
    let libraries = folder.path().join("libraries");
    standin::stage(&libraries)?;
    let server = Server::start(&libraries, None, &Pace::Cpu.options())?;
    let mut outcome = Sampled { windows: Vec::new() };
    let mut order = [0, 1, 2];
    for round in 0..rounds {
        crate::progress(&format!("a server that is sampled: round {} of {rounds}", round + 1));
        let mut windows = [None; 3];
        for index in order {
            let load = server.load(8)?;
            let capture = folder.path().join("capture");
            let options = ["--sample-hz", RATES[index], "--no-sched", "--no-sockets"];
            let mut recorder = Recorder::start(server.pid(), &capture, &options)?;
            recorder.wait_for_flush("calls")?;
            windows[index] = Some(server.watch(window)?);
            recorder.stop()?;
            throughput::remove(&capture)?;
            drop(load);
            server.wait_idle()?;
        }
        if let [Some(none), Some(some), Some(many)] = windows {
            outcome.windows.push([none, some, many]);
        }
        order.rotate_left(1);
    }
    Ok(outcome)
}

fn median(values: &[f64]) -> String {
    stats::median(values).map_or_else(|| "–".to_owned(), |value| format!("{value:.0}"))
}

impl Outcome {
    pub(crate) fn text(&self) -> String {
        format!(
            "{}\n{}\n{}",
            self.samples(),
            self.built.text(TABLES, |built| tables(built).to_string()),
            self.sampled()
        )
    }

    fn samples(&self) -> Table {
        let title = format!("A sample of a C++ program deep in recursion, {HZ} Hz: medians");
        let mut table = Table::new(
            &title,
            &[
                "by",
                "ns in the kernel",
                "delay of the program, ns",
                "user frames",
                "recorder CPU ns",
                "bytes written",
            ],
        );
        for samples in &self.samples {
            let frames = if samples.frames > 0.0 { format!("{:.1}", samples.frames) } else { "–".into() };
            table.rows.push(vec![
                samples.way.text().into(),
                median(&samples.kernel_ns),
                median(&samples.delay_ns),
                frames,
                median(&samples.recorder_ns),
                median(&samples.bytes),
            ]);
        }
        table
    }

    fn sampled(&self) -> Table {
        let mut header = vec!["samples per second and CPU"];
        header.extend(judged("speed ÷ speed without samples"));
        header.push("server CPU per token ÷ without");
        let mut table =
            Table::new("The stand-in server, CPU-bound, recorded with and without samples", &header);
        for (index, rate) in RATES.into_iter().enumerate().skip(1) {
            let ratios = |of: fn(&Window) -> f64| {
                let each = self.sampled.windows.iter().map(|windows| of(&windows[index]) / of(&windows[0]));
                stats::estimate(&each.collect::<Vec<f64>>())
            };
            let mut row = vec![rate.to_owned()];
            row.extend(ratio(ratios(|window| window.tokens_per_s).as_ref(), Some(SPEED_AIM)));
            row.push(ratio(ratios(|window| window.cpu_ns_per_token).as_ref(), None)[0].clone());
            table.rows.push(row);
        }
        table
    }
}

const TABLES: &str = "Tables of the largest libraries, once per build-id (from the page cache)";

fn tables(built: &[Built]) -> Table {
    let mut header = vec!["library", "MB", "rows", "table MB"];
    header.extend(judged("CPU ms"));
    header.extend(["peak heap MiB", "aim"]);
    let mut table = Table::new(TABLES, &header);
    for built in built {
        let mut row = vec![built.library.clone(), format!("{:.0}", built.bytes as f64 / 1e6)];
        row.extend([built.rows.to_string(), format!("{:.2}", built.table_bytes as f64 / 1e6)]);
        row.extend(ratio(built.cpu_ms.as_ref(), Some(CPU_AIM)));
        let heap = built.peak_heap_bytes as f64 / f64::from(1 << 20);
        row.extend([format!("{heap:.1}"), format!("≤ {HEAP_AIM_MIB}")]);
        table.rows.push(row);
    }
    table
}

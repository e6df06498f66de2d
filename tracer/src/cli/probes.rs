//! `tracer probes`: what would be probed in a file or a process, how it was found, and what is missing.

mod text;

use std::{
    collections::BTreeMap,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use engines::{Library, Machine, Point, Profiles, Refusal, Role};
use serde::Serialize;

use super::report::style_of_stdout;
use crate::hex::hex;
use crate::{
    event::ProcessId,
    probe::{process, read_mapped},
};

/// Show the probe points of libraries and processes: where they are, how they were found, what is missing
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer probes /usr/lib/x86_64-linux-gnu/libcuda.so.1
  tracer probes --pid 4711
  tracer probes libllama.so --engine my.toml --json

Nothing is attached and nothing of a file is run. Where an instruction is probed decides what a probe costs:
nop5 (Linux 6.18: a call) and emulated cost about 0.2-0.5 us, stepped 1-17 us.
Exit code 1: there is no probe point but the dynamic loader's.")]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
pub(crate) struct Args {
    /// Libraries or programs
    #[arg(group = "what", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Processes, with their children
    #[arg(long, group = "what", value_name = "PID", value_delimiter = ',')]
    pid: Vec<u32>,
    /// Another engine profile: a file, cuda_graph, own_steps, or shapes (repeatable)
    #[arg(long, value_name = "FILE")]
    engine: Vec<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// What was found in one file.
pub(super) struct Seen {
    pub(super) library: Library,
    /// Processes that map it.
    pub(super) pids: Vec<u32>,
}

/// Files of processes, each looked at once.
#[derive(Default)]
pub(super) struct Libraries {
    pub(super) seen: Vec<Seen>,
    known: BTreeMap<((i32, i32), u64), Option<usize>>,
    /// What could not be read.
    pub(super) messages: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut profiles = Profiles::builtin();
    for file in &args.engine {
        profiles.load(file)?;
    }
    let mut libraries = Libraries::default();
    for path in &args.files {
        match of_file(&profiles, path)? {
            Some(library) => libraries.seen.push(Seen { library, pids: Vec::new() }),
            None => {
                let text = format!("{}: no engine profile is about files of this name", path.display());
                libraries.messages.push(text);
            }
        }
    }
    for pid in &args.pid {
        of_tree(&profiles, *pid, &mut libraries)?;
    }
    let Libraries { seen, messages, .. } = libraries;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &json(&seen))?;
        writeln!(out)?;
    } else {
        out.write_all(text::page(&seen, style_of_stdout()).as_bytes())?;
    }
    for message in messages {
        eprintln!("tracer: {message}");
    }
    let mut points = seen.iter().flat_map(|seen| &seen.library.points);
    let found = points.any(|point| point.role != Role::Loader);
    Ok(if found { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A file by its own name, or else by the name of the link to it.
fn of_file(profiles: &Profiles, path: &Path) -> Result<Option<Library>> {
    let real = path.canonicalize().with_context(|| format!("looking for {}", path.display()))?;
    let file = File::open(&real).with_context(|| format!("opening {}", real.display()))?;
    // SAFETY: the map is private and only read; who truncates the file meanwhile ends this command, nothing else.
    let data = unsafe { memmap2::Mmap::map(&file) }.with_context(|| format!("reading {}", real.display()))?;
    let by_name = profiles.examine(&real, &data);
    let found = by_name.or_else(|| profiles.examine(path, &data));
    Ok(found.map(|library| Library { path: real, ..library }))
}

/// The files that a process and its children map.
fn of_tree(profiles: &Profiles, pid: u32, libraries: &mut Libraries) -> Result<()> {
    let before = libraries.seen.len();
    for found in process::tree(pid)? {
        libraries.add(profiles, found.id);
    }
    if !libraries.seen.iter().skip(before).any(|seen| is_engine(profiles, &seen.library)) {
        let text = format!("process {pid} and its children map no inference engine and no CUDA driver");
        libraries.messages.push(text);
    }
    Ok(())
}

impl Libraries {
    /// The files that a process maps; none of one that has ended meanwhile.
    pub(super) fn add(&mut self, profiles: &Profiles, process: ProcessId) {
        for file in process::mappings(process.tgid).unwrap_or_default() {
            let key = (file.device, file.inode);
            if file.inode == 0 {
                continue;
            }
            if let Some(index) = self.known.get(&key) {
                let pids = index.and_then(|index| self.seen.get_mut(index)).map(|seen| &mut seen.pids);
                if let Some(pids) = pids.filter(|pids| pids.last() != Some(&process.tgid)) {
                    pids.push(process.tgid);
                }
                continue;
            }
            let inspected = read_mapped(process, &file, |data| profiles.inspect(Path::new(&file.path), data));
            let index = match inspected {
                Ok(library) => library.map(|library| {
                    self.seen.push(Seen { library, pids: vec![process.tgid] });
                    self.seen.len() - 1
                }),
                Err(error) => {
                    self.messages.push(format!("process {}: {}: {error}", process.tgid, file.path));
                    None
                }
            };
            self.known.insert(key, index);
        }
    }
}

pub(super) fn is_engine(profiles: &Profiles, library: &Library) -> bool {
    let name = library.path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| profiles.engine_of(name).is_some())
}

#[derive(Serialize)]
struct LibraryJson<'a> {
    path: &'a Path,
    engine: &'a str,
    title: &'a str,
    version: Option<&'a str>,
    machine: Option<&'static str>,
    build_id: String,
    simulated: bool,
    pids: &'a [u32],
    points: Vec<PointJson<'a>>,
    refusals: Vec<RefusalJson<'a>>,
}

#[derive(Serialize)]
struct PointJson<'a> {
    name: &'a str,
    engine: &'a str,
    role: &'static str,
    found: &'static str,
    evidence: &'a str,
    /// File offsets, in bytes.
    function_offset: u64,
    offset: u64,
    placement: &'static str,
    return_probe: bool,
    default: bool,
    args: &'a BTreeMap<String, u8>,
}

#[derive(Serialize)]
struct RefusalJson<'a> {
    name: &'a str,
    engine: &'a str,
    reason: String,
    default: bool,
}

fn json(seen: &[Seen]) -> serde_json::Value {
    let libraries: Vec<LibraryJson> = seen.iter().map(library_json).collect();
    serde_json::json!({ "schema": "tracer.probes/1", "libraries": libraries })
}

fn library_json(seen: &Seen) -> LibraryJson<'_> {
    let library = &seen.library;
    LibraryJson {
        path: &library.path,
        engine: &library.engine,
        title: &library.title,
        version: library.version.as_deref(),
        machine: library.machine.map(Machine::name),
        build_id: hex(&library.build_id),
        simulated: library.simulated,
        pids: &seen.pids,
        points: library.points.iter().map(point_json).collect(),
        refusals: library.refusals.iter().map(refusal_json).collect(),
    }
}

fn point_json(point: &Point) -> PointJson<'_> {
    PointJson {
        name: &point.name,
        engine: &point.engine,
        role: point.role.name(),
        found: point.found.name(),
        evidence: &point.evidence,
        function_offset: point.function_offset,
        offset: point.offset,
        placement: point.placement.name(),
        return_probe: point.return_probe,
        default: point.default,
        args: &point.args,
    }
}

fn refusal_json(refusal: &Refusal) -> RefusalJson<'_> {
    RefusalJson {
        name: &refusal.point,
        engine: &refusal.engine,
        reason: refusal.reason.to_string(),
        default: refusal.default,
    }
}

//! `tracer record`: probes on, events into a capture, probes off.

use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use engines::Profiles;
use serde::Serialize;

use super::{EXIT_NOTHING_SEEN, duration, target};
use crate::{
    capture::{self, Meta, MetaProcess, Writer},
    event::{Event, Point},
    gpu::Gpus,
    host_clock::monotonic_ns,
    http,
    probe::{DRAIN_INTERVAL, INJECT_LIBRARY, Options, Progress, Session, Stopped, process, select::Watch},
    timeline::coverage,
};

/// Record what a model server does into a capture
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer record                              list what could be traced
  tracer record --pid 4711 --duration 10s    trace a running server
  tracer record --comm trtllm-serve -o trace
  tracer record --container 4f1d7a0c9be2     trace a container, also what starts in it later
  tracer record --all --duration 1m          trace every engine on this machine
  tracer record -- ./server --port 8000      start a server and trace it, GPU times included

Ctrl-C ends a recording; the capture is complete then, too. Next: tracer report DIR")]
pub(crate) struct Args {
    #[command(flatten)]
    target: target::Target,
    /// Stop after this long (10s, 500ms, 2m); without it: at Ctrl-C, or when the targets are gone
    #[arg(long, value_parser = duration::parse)]
    duration: Option<Duration>,
    /// Folder to make for the capture [default: tracer-DATE-TIME]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// On-CPU samples per second and CPU; 0 for none
    #[arg(long, value_name = "HZ", default_value_t = 99, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    sample_hz: u64,
    /// Readings of every GPU per second (NVML: utilisation, clocks, power, memory); 0 for none
    #[arg(long, value_name = "HZ", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=100))]
    gpu_hz: u32,
    /// The kernel log, from which Xids come
    #[arg(long, value_name = "FILE", default_value = "/dev/kmsg", hide = true)]
    kernel_log: PathBuf,
    /// Walk stacks by frame pointers alone: code built without them ends them
    #[arg(long)]
    no_tables: bool,
    /// Do not record the scheduler: no off-CPU time
    #[arg(long)]
    no_sched: bool,
    /// Do not read HTTP from sockets: requests and tokens are known from marks only
    #[arg(long)]
    no_sockets: bool,
    /// Follow sockets by system calls, as is done on kernels before 6.3
    #[arg(long, conflicts_with = "no_sockets")]
    socket_syscalls: bool,
    /// Header that names a request (repeatable) [default: x-request-id, x-correlation-id, request-id]
    #[arg(long, value_name = "HEADER", conflicts_with = "no_sockets")]
    id_header: Vec<String>,
    /// Off-CPU intervals shorter than this are not recorded
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    min_off_cpu: Option<Duration>,
    /// Do not follow children of the targets
    #[arg(long)]
    no_follow: bool,
    /// Probe entries of functions only: calls then have no end. For targets that must not get return probes
    #[arg(long)]
    no_returns: bool,
    /// Also probe this function, or all of this role: launch, copy, event_record (repeatable; see `tracer probes`)
    #[arg(long, value_name = "NAME")]
    point: Vec<String>,
    /// Another engine profile: a file, cuda_graph, own_steps, or shapes (repeatable)
    #[arg(long, value_name = "FILE")]
    engine: Vec<PathBuf>,
    /// With a command: do not load the library that takes GPU times
    #[arg(long)]
    no_inject: bool,
    /// With a command: where that library is [default: beside tracer, or in ../lib]
    #[arg(long, value_name = "FILE", conflicts_with = "no_inject")]
    inject: Option<PathBuf>,
    /// With a command: one step in so many has its layers timed, where the engine names them by NVTX; 0 for none
    #[arg(long, value_name = "N", default_value_t = 200, conflicts_with = "no_inject")]
    layers: u32,
    /// Show messages of the kernel-side programs
    #[arg(long)]
    log_kernel: bool,
    /// No progress, only errors
    #[arg(short, long)]
    quiet: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

/// Stacks of a recording's first moments are whole if their tables are there; longer than this nobody should wait, and
/// the rings hold as much.
const WAIT_FOR_TABLES: Duration = Duration::from_millis(500);

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut profiles = Profiles::builtin();
    for file in &args.engine {
        profiles.load(file)?;
    }
    for name in &args.point {
        if !profiles.enable(name) {
            bail!("--point {name}: no profile names such a function or role; `tracer probes` shows them");
        }
    }
    if !args.target.is_named() {
        return target::list_candidates(&profiles, args.json);
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("catching Ctrl-C")?;
    }
    let mut session = Session::start(options(args), profiles.clone())?;
    let inject =
        injection(args)?.map(|library| target::Inject { library, layers: args.layers, quiet: args.quiet });
    let mut chosen = args.target.choose(&profiles, inject.as_ref())?;
    let folder = args.output.clone().unwrap_or_else(default_folder);
    let writer = Writer::create(&folder, meta(args, &chosen))?;
    for found in &chosen.processes {
        if chosen.is_held() { session.add_before_exec(found)? } else { session.add(found)? }
    }
    // What a held process maps now is not what it will run.
    if !chosen.is_held() && !session.wait_for_tables(WAIT_FOR_TABLES) {
        tracing::debug!("the recording begins before all tables for stacks are there");
    }
    chosen.let_go()?;
    let mut recording = Recording {
        session,
        gpus: Gpus::start(args.gpu_hz, &args.kernel_log),
        writer,
        events: Vec::new(),
        points: Vec::new(),
        watch: chosen.watch.take().map(|watch| (watch, profiles)),
        quiet: args.quiet,
        coverage: (0, 0),
        failed: None,
    };
    recording.say_missing();
    let began = Instant::now();
    recording.run(&stop, args.duration, began)?;
    let summary = recording.finish(&folder, began.elapsed())?;
    chosen.say_left_running(args.quiet);
    print_summary(&summary, args)?;
    let code = if summary.steps + summary.tokens == 0 { EXIT_NOTHING_SEEN } else { 0 };
    if summary.nvml_hung {
        std::io::stdout().flush()?;
        // SAFETY: everything is written; the destructors that this leaves out may wait for the thread inside NVML.
        unsafe { libc::_exit(code.into()) };
    }
    Ok(ExitCode::from(code))
}

/// A session and the capture that it goes into.
struct Recording {
    session: Session,
    gpus: Gpus,
    writer: Writer,
    events: Vec<Event>,
    points: Vec<Point>,
    /// For processes that come later.
    watch: Option<(Watch, Profiles)>,
    quiet: bool,
    /// Step functions and mark sites that are probed, as last said.
    coverage: (usize, usize),
    /// Why nothing can be written any more.
    failed: Option<capture::Error>,
}

/// What `record` prints at the end.
#[derive(Debug, Serialize)]
struct Summary {
    schema: &'static str,
    capture: PathBuf,
    seconds: f64,
    events: u64,
    steps: u64,
    tokens: u64,
    dropped: u64,
    simulated: bool,
    #[serde(skip)]
    nvml_hung: bool,
}

impl Recording {
    fn run(&mut self, stop: &AtomicBool, duration: Option<Duration>, began: Instant) -> Result<()> {
        let progress = !self.quiet && std::io::stderr().is_terminal();
        let mut next_second = began + Duration::from_secs(1);
        let mut next_look = began;
        while !stop.load(Ordering::Relaxed) && duration.is_none_or(|limit| began.elapsed() < limit) {
            self.session.drain(&mut self.events);
            self.gpus.drain(&mut self.events);
            self.write();
            self.say_notices();
            let now = Instant::now();
            if now >= next_second {
                next_second = now + Duration::from_secs(1);
                self.flush();
            }
            if now >= next_look {
                next_look = now + Duration::from_millis(250);
                if progress {
                    show_progress(&self.session.progress(), began.elapsed());
                }
                self.look_for_more();
                let waits = self.watch.as_ref().is_some_and(|(watch, _)| watch.selector().waits());
                if !waits && self.session.live() == 0 {
                    self.say("every target has exited");
                    break;
                }
            }
            if let Some(error) = self.failed.take() {
                eprintln!();
                return Err(error).context(
                    "the recording ends here; what was written before is kept (see `tracer recover`)",
                );
            }
            std::thread::sleep(DRAIN_INTERVAL);
        }
        if progress {
            eprintln!();
        }
        Ok(())
    }

    fn look_for_more(&mut self) {
        let Some((watch, profiles)) = &mut self.watch else { return };
        for found in watch.again(profiles) {
            // Gone again before it could be traced.
            let _gone = self.session.add(&found);
        }
    }

    fn write(&mut self) {
        for event in self.events.drain(..) {
            if let Event::Point(point) = &event {
                self.points.push(point.clone());
            }
            if let Err(error) = self.writer.write(&event) {
                self.failed.get_or_insert(error);
            }
        }
    }

    fn flush(&mut self) {
        let mut ledger = self.session.ledger();
        ledger.extend(self.gpus.ledger());
        let result = self.writer.ledger(monotonic_ns(), &ledger).and_then(|()| self.writer.flush());
        if let Err(error) = result {
            self.failed.get_or_insert(error);
        }
    }

    fn finish(mut self, folder: &Path, elapsed: Duration) -> Result<Summary> {
        if !self.quiet && std::io::stderr().is_terminal() {
            eprintln!("taking the probes away and finishing the capture …");
        }
        let coverage = self.session.coverage();
        self.writer.set_ended(monotonic_ns());
        let mut rest = Vec::new();
        self.gpus.stop(&mut rest);
        self.note_absences();
        let Stopped { mut ledger, progress, files } = self.session.stop(&mut rest);
        ledger.extend(self.gpus.ledger());
        for event in rest {
            self.writer.write(&event)?;
        }
        self.writer.ledger(monotonic_ns(), &ledger)?;
        for process in coverage::of(&self.points, &ledger) {
            for silent in process.silent.iter().filter(|_| !self.quiet) {
                eprintln!("tracer: process {}: {silent}", process.tgid);
            }
        }
        let simulated = self.writer.meta().simulated;
        self.writer.close()?;
        capture::finish_with(folder, files)?;
        if !self.quiet && coverage == (0, 0) {
            eprintln!(
                "tracer: no engine function and no mark site was found in the targets: there are no steps and no \
                 tokens in this capture"
            );
        }
        Ok(Summary {
            schema: "tracer.record/1",
            capture: folder.to_owned(),
            seconds: elapsed.as_secs_f64(),
            events: progress.events,
            steps: progress.steps,
            tokens: progress.tokens,
            dropped: progress.dropped,
            simulated,
            nvml_hung: self.gpus.is_hung(),
        })
    }

    /// Says what of the GPUs is not recorded, and keeps it in the capture.
    fn note_absences(&mut self) {
        for absence in self.gpus.take_absences() {
            self.say(&format!("{} not recorded: {}", absence.what, absence.why));
            let noted = self.writer.update_meta(|meta| {
                let reasons = meta.not_recorded.entry(absence.what.into()).or_default();
                reasons.push_str(if reasons.is_empty() { "" } else { "; " });
                reasons.push_str(&absence.why);
            });
            if let Err(error) = noted {
                self.failed.get_or_insert(error);
            }
        }
    }

    fn say_missing(&self) {
        for missing in self.session.missing() {
            eprintln!("tracer: {} not recorded ({}): {}", missing.what, missing.consequence, missing.why);
        }
    }

    fn say_notices(&mut self) {
        self.note_absences();
        let coverage = self.session.coverage();
        if coverage != self.coverage {
            self.coverage = coverage;
            self.say(&format!("probing {} step functions and {} mark sites", coverage.0, coverage.1));
        }
        for notice in self.session.take_notices() {
            self.say(&format!("process {}: {}: {}", notice.process.tgid, notice.library, notice.text));
        }
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            eprintln!("tracer: {text}");
        }
    }
}

fn options(args: &Args) -> Options {
    Options {
        sample_hz: args.sample_hz,
        tables: !args.no_tables,
        sched: !args.no_sched,
        min_off_cpu_ns: args.min_off_cpu.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        sockets: !args.no_sockets,
        http: http_config(&args.id_header),
        socket_syscalls: args.socket_syscalls,
        follow: !args.no_follow,
        returns: !args.no_returns,
        log_kernel: args.log_kernel,
    }
}

fn http_config(id_headers: &[String]) -> http::Config {
    if id_headers.is_empty() {
        return http::Config::default();
    }
    http::Config { id_headers: id_headers.iter().map(|name| name.to_ascii_lowercase()).collect() }
}

fn meta(args: &Args, chosen: &target::Chosen) -> Meta {
    let command = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let mut meta = Meta::here(command, chosen.name.clone());
    meta.processes = chosen
        .processes
        .iter()
        .map(|found| MetaProcess {
            tgid: found.id.tgid,
            start_ticks: found.id.start_ticks,
            comm: found.comm.clone(),
            exe: process::executable_path(found.id.tgid).unwrap_or_default(),
        })
        .collect();
    meta.options.insert("sample_hz".into(), args.sample_hz.to_string());
    meta.options.insert("gpu_hz".into(), args.gpu_hz.to_string());
    meta.options.insert("layers".into(), args.layers.to_string());
    meta.options.insert("sched".into(), (!args.no_sched).to_string());
    meta.options.insert("follow".into(), (!args.no_follow).to_string());
    meta
}

/// The library to preload into a command, if it is wanted and there.
fn injection(args: &Args) -> Result<Option<PathBuf>> {
    if args.no_inject || args.target.command.is_empty() {
        return Ok(None);
    }
    if let Some(file) = &args.inject {
        if !file.is_file() {
            bail!("--inject {}: no such file", file.display());
        }
        return Ok(Some(file.canonicalize()?));
    }
    let found = target::injected_library().context("finding myself")?;
    if found.is_none() && !args.quiet {
        eprintln!(
            "tracer: {INJECT_LIBRARY} is not beside tracer nor in ../lib: GPU times will be host-observed"
        );
    }
    found.map(|file| file.canonicalize()).transpose().map_err(Into::into)
}

fn default_folder() -> PathBuf {
    PathBuf::from(format!("tracer-{}", jiff::ZonedDateTime::now().strftime("%Y%m%d-%H%M%S")))
}

fn show_progress(progress: &Progress, elapsed: Duration) {
    let mut err = std::io::stderr();
    // A terminal that went away is no reason to stop recording.
    let _ignored = write!(
        err,
        "\r\x1b[Krecording {:.0} s · {} steps · {} tokens · {} events · {} lost · Ctrl-C to stop",
        elapsed.as_secs_f64(),
        progress.steps,
        progress.tokens,
        progress.events,
        progress.dropped,
    );
    let _ignored = err.flush();
}

fn print_summary(summary: &Summary, args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    if args.json {
        serde_json::to_writer_pretty(&mut out, summary)?;
        writeln!(out)?;
    } else if !args.quiet {
        writeln!(
            out,
            "{}: {:.1} s, {} steps, {} tokens, {} events, {} lost{}\nnext: tracer report {}",
            summary.capture.display(),
            summary.seconds,
            summary.steps,
            summary.tokens,
            summary.events,
            summary.dropped,
            if summary.simulated { " (simulated GPU)" } else { "" },
            summary.capture.display(),
        )?;
    }
    Ok(())
}

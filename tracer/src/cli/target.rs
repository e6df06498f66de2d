//! What to trace.

use std::{
    ffi::{OsStr, OsString},
    io::Write,
    os::fd::{AsRawFd, OwnedFd},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
};

use anyhow::{Context, Result};
use engines::Profiles;
use serde::Serialize;

use crate::probe::{
    INJECT_LIBRARY,
    process::{self, Found},
    select::{Selector, Watch, engines_of},
};

/// The processes to trace, and the command that was started for it.
pub(crate) struct Chosen {
    /// As the user named it.
    pub(crate) name: String,
    pub(crate) processes: Vec<Found>,
    /// For processes that come later.
    pub(crate) watch: Option<Watch>,
    started: Option<Started>,
}

struct Started {
    child: Child,
    go: Option<std::io::PipeWriter>,
}

impl Chosen {
    /// Whether the process waits to become the command.
    pub(crate) fn is_held(&self) -> bool {
        self.started.is_some()
    }

    /// Lets the command begin, once its process is a target.
    pub(crate) fn let_go(&mut self) -> Result<()> {
        if let Some(mut go) = self.started.as_mut().and_then(|started| started.go.take()) {
            go.write_all(&[1]).context("starting the command")?;
        }
        Ok(())
    }

    /// A command that outlives its recording goes on.
    pub(crate) fn say_left_running(&mut self, quiet: bool) {
        if let Some(started) = &mut self.started
            && matches!(started.child.try_wait(), Ok(None))
            && !quiet
        {
            eprintln!("tracer: the command goes on as process {}", started.child.id());
        }
    }
}

/// By this NVTX finds the tool that it reports to.
const NVTX_INJECTION: &str = "NVTX_INJECTION64_PATH";

/// What a command gets loaded.
pub(crate) struct Inject {
    pub(crate) library: PathBuf,
    /// One step in so many has its layers timed.
    pub(crate) layers: u32,
    pub(crate) quiet: bool,
}

/// How a user names what to trace.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Target {
    /// Trace this process and its children (repeatable)
    #[arg(long, value_name = "PID", value_delimiter = ',')]
    pid: Vec<u32>,
    /// Trace all processes of this name (process or executable), also those that start later
    #[arg(long, value_name = "NAME")]
    comm: Option<String>,
    /// Trace what runs in this control group or below it, now and later
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
    /// Trace what runs in this container, now and later; the beginning of its id is enough
    #[arg(long, value_name = "ID")]
    container: Option<String>,
    /// Trace every process that maps an engine's library, now and later
    #[arg(long)]
    all: bool,
    /// Start this command and trace it
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

impl Target {
    /// What to look for; `None` for a command, and where nothing is named.
    fn selector(&self) -> Option<Selector> {
        let pids = (!self.pid.is_empty()).then(|| Selector::Pids(self.pid.clone()));
        pids.or_else(|| self.comm.clone().map(Selector::Comm))
            .or_else(|| self.cgroup.clone().map(Selector::Cgroup))
            .or_else(|| self.container.clone().map(Selector::Container))
            .or_else(|| self.all.then_some(Selector::Engines))
    }

    pub(crate) fn is_named(&self) -> bool {
        self.selector().is_some() || !self.command.is_empty()
    }

    /// Finds or starts the processes.
    ///
    /// # Errors
    /// There is no such process, or the command cannot be started.
    pub(crate) fn choose(&self, profiles: &Profiles, inject: Option<&Inject>) -> Result<Chosen> {
        let Some(selector) = self.selector() else { return start(&self.command, inject, profiles) };
        let mut watch = Watch::new(selector);
        let processes = watch.first(profiles)?;
        Ok(Chosen { name: watch.selector().name(), processes, watch: Some(watch), started: None })
    }
}

fn start(command: &[OsString], inject: Option<&Inject>, profiles: &Profiles) -> Result<Chosen> {
    let (reader, writer) = std::io::pipe().context("making a pipe")?;
    let reader = OwnedFd::from(reader);
    let fd = reader.as_raw_fd();
    let mut hold = Command::new(std::env::current_exe().context("finding myself")?);
    hold.arg("hold").arg(fd.to_string()).arg("--").args(command).stdin(Stdio::inherit());
    if let Some(Inject { library, layers, quiet }) = inject {
        let mut preload = library.clone().into_os_string();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        hold.env("LD_PRELOAD", preload);
        if profiles.is_step("cuGraphLaunch") {
            hold.env("TRACER_INJECT_GRAPHS", "1");
        }
        match std::env::var_os(NVTX_INJECTION).filter(|path| !path.is_empty()) {
            // Another tool takes the program's ranges; NVTX has room for one.
            Some(other) if !quiet => eprintln!(
                "tracer: {NVTX_INJECTION} names another tool ({}), which stays: no NVTX ranges and no layers",
                other.to_string_lossy()
            ),
            Some(_) => {}
            None => {
                hold.env(NVTX_INJECTION, library).env("TRACER_INJECT_LAYERS", layers.to_string());
            }
        }
    }
    // SAFETY: fcntl is safe to call between fork and exec; the descriptor is open in the child.
    unsafe {
        hold.pre_exec(move || {
            if libc::fcntl(fd, libc::F_SETFD, 0) == -1 {
                Err(std::io::Error::last_os_error())
            } else {
                Ok(())
            }
        });
    }
    let child = hold.spawn().context("starting the command")?;
    let found = process::find(child.id())?;
    // Reports and pictures show it: where the program lies would only push its arguments out of sight.
    let program = Path::new(&command[0]).file_name().unwrap_or(&command[0]);
    let arguments = command.iter().skip(1).map(OsString::as_os_str);
    let name: Vec<_> = std::iter::once(program).chain(arguments).map(OsStr::to_string_lossy).collect();
    Ok(Chosen {
        name: name.join(" "),
        processes: vec![found],
        watch: None,
        started: Some(Started { child, go: Some(writer) }),
    })
}

/// The library that takes GPU times: beside this program, or in `../lib`.
///
/// # Errors
/// This program does not know where it is.
pub(crate) fn injected_library() -> std::io::Result<Option<PathBuf>> {
    let here = std::env::current_exe()?;
    let folder = here.parent().unwrap_or(Path::new("."));
    let candidates = [folder.join(INJECT_LIBRARY), folder.join("../lib").join(INJECT_LIBRARY)];
    Ok(candidates.into_iter().find(|file| file.is_file()))
}

/// A process that maps an engine.
#[derive(Debug, Serialize)]
struct Candidate {
    pid: u32,
    comm: String,
    engines: Vec<String>,
}

/// Prints the processes that could be traced.
///
/// # Errors
/// /proc cannot be read, or stdout is gone.
pub(crate) fn list_candidates(profiles: &Profiles, json: bool) -> Result<ExitCode> {
    let candidates = candidates(profiles)?;
    let mut out = std::io::stdout();
    if json {
        let value = serde_json::json!({ "schema": "tracer.candidates/1", "processes": candidates });
        serde_json::to_writer_pretty(&mut out, &value)?;
        writeln!(out)?;
        return Ok(ExitCode::SUCCESS);
    }
    if candidates.is_empty() {
        writeln!(
            out,
            "No running process maps an inference engine or the CUDA driver{}.\n\
             Name a target yourself: tracer record --pid PID, --comm NAME, --container ID or -- CMD…; --all waits for one.",
            // SAFETY: a plain system call.
            if unsafe { libc::geteuid() } == 0 {
                ""
            } else {
                " (other users' processes need root to be looked at)"
            },
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "Processes that could be traced:\n{:>8}  {:<16} ENGINES", "PID", "NAME")?;
    for candidate in &candidates {
        writeln!(out, "{:>8}  {:<16} {}", candidate.pid, candidate.comm, candidate.engines.join(", "))?;
    }
    writeln!(out, "\nnext: tracer record --pid PID --duration 10s")?;
    Ok(ExitCode::SUCCESS)
}

fn candidates(profiles: &Profiles) -> Result<Vec<Candidate>> {
    let mut candidates = Vec::new();
    for (found, _) in process::all()? {
        let engines = engines_of(profiles, found.id.tgid);
        if !engines.is_empty() {
            candidates.push(Candidate { pid: found.id.tgid, comm: found.comm, engines });
        }
    }
    Ok(candidates)
}

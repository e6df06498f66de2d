//! The traced process: functions that exist to be probed, called in batches whose CPU time it tells.
//!
//! Each line on its input, `FUNCTION CALLS`, is answered by a line with the CPU time of its thread, in ns. The functions
//! are those of [`SITES`], by the names of their points, system calls, and those of a library that it loads on request.

use std::ffi::c_int;
use std::hint::black_box;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tracer_tests::stats;

use crate::{affinity, library::Library, syscalls::Ends};

/// Longest that a batch may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Batches of a function in one round, after one that is not counted; their median is what counts.
const BATCHES: usize = 5;

// One function per kind of first instruction, which is what decides the cost of a probe.
std::arch::global_asm!(
    ".macro bench_function name:req, first:vararg",
    "  .balign 64",
    "  .globl \\name",
    "  .type \\name,@function",
    "  \\name:",
    "  .cfi_startproc",
    "  \\first",
    ".endm",
    ".macro bench_end name:req",
    "  ret",
    "  .cfi_endproc",
    "  .size \\name, . - \\name",
    ".endm",
    ".pushsection .text.bench,\"ax\",@progbits",
    "bench_function bench_push, pushq %rbp",
    "  .cfi_adjust_cfa_offset 8",
    "  popq %rbp",
    "  .cfi_adjust_cfa_offset -8",
    "bench_end bench_push",
    "bench_function bench_nop5, .byte 0x0f, 0x1f, 0x44, 0x00, 0x00",
    "bench_end bench_nop5",
    "bench_function bench_sub, subq $8, %rsp",
    "  .cfi_adjust_cfa_offset 8",
    "  addq $8, %rsp",
    "  .cfi_adjust_cfa_offset -8",
    "bench_end bench_sub",
    "bench_function bench_entry, pushq %rbp",
    "  .cfi_adjust_cfa_offset 8",
    "  popq %rbp",
    "  .cfi_adjust_cfa_offset -8",
    "bench_end bench_entry",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    safe fn bench_push();
    safe fn bench_nop5();
    safe fn bench_sub();
    safe fn bench_entry();
}

extern "C" fn mark() {
    tracer_marks::token(black_box(1), 0, black_box(1));
}

/// A probed place of this program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    /// Name of its probe point.
    pub(crate) point: &'static str,
    pub(crate) what: &'static str,
    pub(crate) instruction: &'static str,
    /// Calls in a batch: 5 to 20 ms where probed.
    pub(crate) calls: u32,
    call: extern "C" fn(),
}

/// Everything that is measured.
pub(crate) const SITES: [Site; 5] = [
    Site { point: "bench_push", what: "entry + return", instruction: "push", calls: 10_000, call: call_push },
    Site {
        point: "bench_nop5",
        what: "entry + return",
        instruction: "5-byte nop",
        calls: 10_000,
        call: call_nop5,
    },
    Site { point: "bench_sub", what: "entry + return", instruction: "sub rsp", calls: 500, call: call_sub },
    Site { point: "bench_entry", what: "entry only", instruction: "push", calls: 20_000, call: call_entry },
    Site { point: "mark", what: "mark of a token", instruction: "5-byte nop", calls: 20_000, call: mark },
];

extern "C" fn call_push() {
    bench_push();
}
extern "C" fn call_nop5() {
    bench_nop5();
}
extern "C" fn call_sub() {
    bench_sub();
}
extern "C" fn call_entry() {
    bench_entry();
}

/// Profile of the functions above; marks have theirs.
pub(crate) fn profile(program: &Path) -> Result<String> {
    let name = program.file_name().context("this program has no name")?.to_string_lossy();
    Ok(format!(
        r#"
engine = "bench"
title = "functions of the benchmark"
files = ["{name}"]

[[point]]
symbols = ["bench_push", "bench_nop5", "bench_sub"]
role = "other"
returns = "c"

[[point]]
symbols = ["bench_entry"]
role = "other"
returns = "never"
"#
    ))
}

/// The traced process's main function.
pub(crate) fn run(cpu: usize, library: Option<&Path>) -> Result<()> {
    affinity::pin(&[cpu])?;
    let library = library.map(Library::load).transpose()?;
    let mut ends = Ends::open()?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.context("reading what to call")?;
        let (name, calls) =
            line.split_once(' ').with_context(|| format!("{line:?} is not FUNCTION CALLS"))?;
        let calls: u32 = calls.parse()?;
        let site = SITES.iter().find(|site| site.point == name);
        let ns = match (site, ends.measure(name, calls)?) {
            (Some(site), _) => {
                let call = black_box(site.call);
                timed(calls, || call())?
            }
            (None, Some(ns)) => ns,
            (None, None) => {
                let library = library.with_context(|| format!("no function {name}"))?;
                // SAFETY: the benchmark names only functions that are this.
                let function = unsafe { library.function(name) }?;
                let mut result: c_int = 0;
                // SAFETY: `result` is valid for writing.
                timed(calls, || _ = unsafe { function(&raw mut result) })?
            }
        };
        println!("{ns}");
    }
    Ok(())
}

/// ns of CPU time of this thread.
pub(crate) fn timed(calls: u32, mut call: impl FnMut()) -> Result<u64> {
    let begin_ns = thread_cpu_ns()?;
    for _ in 0..calls {
        call();
    }
    Ok(thread_cpu_ns()? - begin_ns)
}

/// All calls that [`Worker::median`] makes.
pub(crate) const fn total(calls: u32) -> usize {
    calls as usize * (BATCHES + 1)
}

/// Those of them that count.
pub(crate) const fn counted(calls: u32) -> u64 {
    calls as u64 * BATCHES as u64
}

pub(crate) fn thread_cpu_ns() -> Result<u64> {
    crate::clock::cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The traced process, as seen by the one that measures. Dropping it ends it.
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Worker {
    /// Starts it on a CPU, maybe with a library to load, and waits until it is ready.
    pub(crate) fn start(cpu: usize, library: Option<&Path>) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(program);
        command.args(["--worker", &cpu.to_string()]);
        if let Some(library) = library {
            command.arg("--library").arg(library);
        }
        Self::spawn(&mut command)
    }

    /// Starts a program that answers in the same way, and waits until it is ready.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the traced process")?;
        let stdin = child.stdin.take().context("no pipe to the traced process")?;
        let stdout = child.stdout.take().context("no pipe from the traced process")?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let worker = Self { child, stdin, lines };
        let line = worker.lines.recv_timeout(PATIENCE).context("the traced process does not start")?;
        ensure!(line == "ready", "the traced process says {line:?}");
        Ok(worker)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Median ns of CPU time per call over some batches of calls, calling `meanwhile` over and over.
    pub(crate) fn median(&mut self, function: &str, calls: u32, meanwhile: &mut dyn FnMut()) -> Result<f64> {
        self.batch(function, calls, meanwhile)?;
        let batches = (0..BATCHES).map(|_| self.batch(function, calls, meanwhile));
        stats::median(&batches.collect::<Result<Vec<f64>>>()?).context("no batches")
    }

    /// Runs a batch, calling `meanwhile` over and over; returns ns of CPU time per call.
    fn batch(&mut self, function: &str, calls: u32, meanwhile: &mut dyn FnMut()) -> Result<f64> {
        writeln!(self.stdin, "{function} {calls}").context("the traced process is gone")?;
        let patience = Instant::now() + PATIENCE;
        loop {
            meanwhile();
            match self.lines.recv_timeout(tracer::probe::DRAIN_INTERVAL) {
                Ok(line) => {
                    let ns: u64 =
                        line.parse().with_context(|| format!("the traced process says {line:?}"))?;
                    return Ok(ns as f64 / f64::from(calls));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < patience => {}
                Err(error) => bail!("the traced process is silent: {error}"),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails only where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

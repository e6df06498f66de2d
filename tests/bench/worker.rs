//! The traced process: functions that exist to be probed, called in batches whose CPU time it tells.
//!
//! Each line on its input, `SITE CALLS`, is answered by a line with the CPU time of its thread, in ns.

use std::hint::black_box;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::affinity;

/// Longest that a batch may take.
const PATIENCE: Duration = Duration::from_secs(60);

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
pub(crate) fn run(cpu: usize) -> Result<()> {
    affinity::pin(&[cpu])?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.context("reading what to call")?;
        let (site, calls) = line.split_once(' ').with_context(|| format!("{line:?} is not SITE CALLS"))?;
        let (site, calls): (usize, u32) = (site.parse()?, calls.parse()?);
        let call = black_box(SITES.get(site).with_context(|| format!("no site {site}"))?.call);
        let begin_ns = thread_cpu_ns()?;
        for _ in 0..calls {
            call();
        }
        println!("{}", thread_cpu_ns()? - begin_ns);
    }
    Ok(())
}

fn thread_cpu_ns() -> Result<u64> {
    crate::clock::cpu_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The traced process, as seen by the one that measures. Dropping it ends it.
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Worker {
    /// Starts it on a CPU, and waits until it is ready.
    pub(crate) fn start(cpu: usize) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut child = Command::new(program)
            .args(["--worker", &cpu.to_string()])
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

    /// Runs a batch, calling `meanwhile` over and over; returns ns of CPU time per call.
    pub(crate) fn batch(&mut self, site: usize, meanwhile: &mut dyn FnMut()) -> Result<f64> {
        let calls = SITES.get(site).with_context(|| format!("no site {site}"))?.calls;
        writeln!(self.stdin, "{site} {calls}").context("the traced process is gone")?;
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

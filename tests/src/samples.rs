//! Samples of a program that never ran: as a capture, and as `perf script` prints such ones. Deep stacks that share their
//! roots and part towards their leaves, as those of real programs do.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use tracer::capture::{Meta, Writer, finish};
use tracer::event::{Code, Event, Frame, Origin, Process, ProcessAction, ProcessId, Sample, Stack, StackId};

use crate::random::SplitMix;
use crate::synthetic::START_NS;

const PROCESS: ProcessId = ProcessId { tgid: 40, start_ticks: 7 };
const THREADS: u32 = 16;
const PERIOD_NS: u64 = 1_000_000;
/// Different stacks, and functions that are on them.
const STACKS: usize = 5_000;
const FUNCTIONS: usize = 3_000;
const DEPTHS: std::ops::Range<usize> = 20..60;
const FILE: &str = "engine.py";

/// Functions of each stack, leaf first.
fn stacks() -> Vec<Vec<usize>> {
    let mut random = SplitMix::new(11);
    let one = |number: usize, random: &mut SplitMix| {
        let depth = DEPTHS.start + random.below(DEPTHS.len());
        // From the root on: the farther, the more ways there are.
        let function = |level: usize| {
            let ways = 1 << (level / 3).min(12);
            (level * 977 + number % ways * 7919) % FUNCTIONS
        };
        (0..depth).rev().map(function).collect()
    };
    (0..STACKS).map(|number| one(number, &mut random)).collect()
}

fn function(number: usize) -> String {
    format!("engine.module_{}.Component.function_{number}", number % 97)
}

/// The thread and the stack of each sample.
fn samples(count: usize) -> impl Iterator<Item = (u32, usize, u64)> {
    let mut random = SplitMix::new(13);
    (0..count).map(move |number| {
        let thread = u32::try_from(random.below(THREADS as usize)).unwrap_or(0);
        (thread, random.below(STACKS), START_NS + number as u64 * PERIOD_NS / u64::from(THREADS))
    })
}

/// Writes a capture with so many samples.
///
/// # Errors
/// When it cannot be written.
pub fn record(dir: &Path, count: usize) -> Result<()> {
    let mut meta = Meta::here(vec!["tracer".into()], "synthetic program".into());
    // Its addresses mean nothing in the running kernel.
    meta.boot_id = String::new();
    meta.started_monotonic_ns = START_NS;
    let mut writer = Writer::create(dir, meta)?;
    for thread in 0..THREADS {
        let (origin, action) = (origin(thread, START_NS), ProcessAction::Found);
        let comm = comm(thread);
        writer.write(&Event::Process(Process { origin, action, parent_tgid: 1, parent_tid: 1, comm }))?;
    }
    for number in 0..FUNCTIONS {
        writer.write(&Event::Code(Code {
            id: u32::try_from(number)?,
            time_ns: START_NS,
            process: PROCESS,
            function: function(number),
            file: FILE.into(),
            first_line: 1,
        }))?;
    }
    for (id, functions) in (0..).zip(stacks()) {
        let frame = |number: usize| Frame { mapping: None, code: u32::try_from(number).ok(), offset: 1 };
        writer.write(&Event::Stack(Stack {
            id: StackId(id),
            time_ns: START_NS,
            process: PROCESS,
            kernel: Vec::new(),
            user: functions.into_iter().map(frame).collect(),
            cut: None,
            frame_pointer_steps: 0,
        }))?;
    }
    let mut last_ns = START_NS;
    for (thread, stack, time_ns) in samples(count) {
        last_ns = time_ns;
        writer.write(&Event::Sample(Sample {
            origin: origin(thread, time_ns),
            period_ns: PERIOD_NS,
            kernel_mode: false,
            stack: Some(StackId(stack as u64)),
        }))?;
    }
    writer.set_ended(last_ns + PERIOD_NS);
    writer.close()?;
    finish(dir)?;
    Ok(())
}

/// Writes the same samples as `perf script` prints them.
///
/// # Errors
/// When nobody reads them.
pub fn script(out: &mut impl Write, count: usize) -> io::Result<()> {
    let stack = |functions: Vec<usize>| {
        let line = |number: usize| format!("\t{:16x} {} ({FILE})\n", number << 12, function(number));
        functions.into_iter().map(line).collect::<String>() + "\n"
    };
    let stacks: Vec<String> = stacks().into_iter().map(stack).collect();
    for (thread, stack, time_ns) in samples(count) {
        let (comm, tid) = (comm(thread), PROCESS.tgid + thread);
        let seconds = time_ns as f64 / 1e9;
        writeln!(out, "{comm} {}/{tid} {seconds:.6}: {PERIOD_NS} cpu-clock: ", PROCESS.tgid)?;
        out.write_all(stacks[stack].as_bytes())?;
    }
    out.flush()
}

fn comm(thread: u32) -> String {
    format!("worker-{thread}")
}

const fn origin(thread: u32, time_ns: u64) -> Origin {
    Origin { time_ns, process: PROCESS, tid: PROCESS.tgid + thread, cpu: 0 }
}

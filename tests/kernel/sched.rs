//! The scheduler and the sampling clock.

use anyhow::{Context, Result, ensure};
use tracer::{event::Event, probe::Options};

use crate::{
    Test,
    fixture::{numbers, trace},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("sched::wake_up_and_waker", wake_up_and_waker),
    ("sched::preemption", preemption),
    ("sched::open_at_stop", open_at_stop),
    ("sched::samples", samples),
];

fn no_samples() -> Options {
    Options { sample_hz: 0, ..Options::default() }
}

fn wake_up_and_waker() -> Result<()> {
    let trace = trace(&["futex"], no_samples())?;
    trace.lossless()?;
    let said = numbers(&trace.said)?;
    let (sleeper, waker, woke_ns) = (u32::try_from(said[0])?, u32::try_from(said[1])?, said[2]);
    let sleeps = trace.sched();
    let sleep = sleeps
        .iter()
        .filter(|event| event.origin.tid == sleeper)
        .max_by_key(|event| event.origin.time_ns - event.off_ns)
        .context("the sleeper never slept")?;
    ensure!(!sleep.preempted && !sleep.open, "{sleep:?}");
    ensure!(sleep.origin.time_ns - sleep.off_ns > 25_000_000, "{sleep:?}");
    ensure!((sleep.waker_tgid, sleep.waker_tid) == (trace.pid, waker), "{sleep:?}, waker {waker}");
    let wake_ns = sleep.wake_ns.context("no wake-up")?;
    ensure!(woke_ns <= wake_ns && wake_ns <= sleep.origin.time_ns, "woken at {wake_ns}, said {woke_ns}");
    ensure!(sleep.runqueue_ns() == Some(sleep.origin.time_ns - wake_ns), "{sleep:?}");
    let stack = trace.events.iter().find_map(|event| match event {
        Event::Stack(stack) if Some(stack.id) == sleep.stack => Some(stack),
        _ => None,
    });
    let stack = stack.context("no stack")?;
    ensure!(!stack.kernel.is_empty() && !stack.user.is_empty(), "{stack:?}");
    ensure!(stack.user.iter().all(|frame| frame.mapping.is_some()), "frames outside of mappings: {stack:?}");
    Ok(())
}

fn preemption() -> Result<()> {
    let trace = trace(&["compete"], no_samples())?;
    let sleeps = trace.sched();
    let preempted: Vec<_> = sleeps.iter().filter(|event| event.preempted).collect();
    ensure!(preempted.len() > 10, "{} preemptions in 0.8 s of two threads on one CPU", preempted.len());
    let waited: u64 = preempted.iter().filter_map(|event| event.runqueue_ns()).sum();
    // Each of the two waits while the other one runs.
    ensure!(waited > 300_000_000, "waited {waited} ns for the CPU");
    ensure!(preempted.iter().all(|event| event.wake_ns.is_none()), "preempted threads need no wake-up");
    Ok(())
}

fn open_at_stop() -> Result<()> {
    let trace = trace(&["block"], no_samples())?;
    let open: Vec<_> = trace.sched().into_iter().filter(|event| event.open).copied().collect();
    ensure!(!open.is_empty(), "a blocked thread is not reported");
    ensure!(open.iter().all(|event| event.origin.process.tgid == trace.pid), "{open:?}");
    Ok(())
}

fn samples() -> Result<()> {
    let options = Options { sample_hz: 997, sched: false, ..Options::default() };
    let trace = trace(&["burn"], options)?;
    trace.lossless()?;
    let samples: Vec<_> = trace
        .events
        .iter()
        .filter_map(|event| if let Event::Sample(sample) = event { Some(sample) } else { None })
        .collect();
    let cpu_ns: u64 = samples.iter().map(|sample| sample.period_ns).sum();
    // Half a second of computing, on a machine that may be busy with something else.
    ensure!((200_000_000..700_000_000).contains(&cpu_ns), "{} samples, {cpu_ns} ns", samples.len());
    let with_stack = samples.iter().filter(|sample| sample.stack.is_some()).count();
    ensure!(with_stack == samples.len(), "{with_stack} of {} have a stack", samples.len());
    Ok(())
}

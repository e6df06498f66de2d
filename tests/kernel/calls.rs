//! The generic call probe: pairing, nesting, everything that leaves a function without returning.

use anyhow::{Result, ensure};
use tracer::{
    event::CallEnd,
    probe::{Session, process},
};

use crate::{
    Test,
    fixture::{Built, Running, calls_only, numbers, returned, trace},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("calls::arguments_and_results", arguments_and_results),
    ("calls::nesting", nesting),
    ("calls::too_deep_is_counted", too_deep_is_counted),
    ("calls::longjmp", longjmp),
    ("calls::exceptions", exceptions),
    ("calls::open_at_stop", open_at_stop),
    ("calls::thread_ends_inside", thread_ends_inside),
    ("calls::only_the_target", only_the_target),
    ("calls::full_ring_is_counted", full_ring_is_counted),
];

fn arguments_and_results() -> Result<()> {
    let trace = trace(&["calls"], calls_only())?;
    trace.lossless()?;
    let calls = trace.calls("fixture_work");
    ensure!(calls.len() == 1000, "{} calls of 1000", calls.len());
    let mut sum = 0;
    for (i, call) in (0u64..).zip(&calls) {
        ensure!(call.end == CallEnd::Returned && call.depth == 0 && call.parent_point.is_none(), "{call:?}");
        ensure!(call.args == [i, i + 1, i + 2, i + 3, i + 4, i + 5] && call.ret == i * 3 + 1, "{call:?}");
        ensure!(call.begin_ns < call.end_ns, "{call:?}");
        sum += call.ret;
    }
    ensure!(calls.is_sorted_by_key(|call| call.begin_ns), "calls of one thread overlap");
    ensure!(trace.said == sum.to_string(), "the program computed {}, we saw {sum}", trace.said);
    ensure!(trace.count("hits:fixture:fixture_work") == 1000, "hits differ from calls");
    Ok(())
}

fn nesting() -> Result<()> {
    let trace = trace(&["nested"], calls_only())?;
    trace.lossless()?;
    let (outer, inner) = (trace.calls("fixture_outer"), trace.calls("fixture_work"));
    ensure!(outer.len() == 1 && inner.len() == 1, "{outer:?} {inner:?}");
    ensure!(inner[0].parent_point == Some(trace.point("fixture_outer")?) && inner[0].depth == 1, "{inner:?}");
    ensure!(
        outer[0].begin_ns <= inner[0].begin_ns && inner[0].end_ns <= outer[0].end_ns,
        "not nested in time"
    );
    ensure!(inner[0].sp < outer[0].sp, "the stack grows down");
    let recursion = trace.calls("fixture_recurse");
    let depths: Vec<_> = recursion.iter().map(|call| (call.depth, call.args[0], call.ret)).collect();
    ensure!(depths == [(5, 0, 1), (4, 1, 2), (3, 2, 3), (2, 3, 4), (1, 4, 5), (0, 5, 6)], "{depths:?}");
    Ok(())
}

fn too_deep_is_counted() -> Result<()> {
    let trace = trace(&["deep"], calls_only())?;
    let calls = trace.calls("fixture_recurse");
    ensure!(trace.said == "41", "the program computed {}", trace.said);
    ensure!(returned(&calls) == 16 && calls.len() == 16, "{} calls", calls.len());
    ensure!(trace.count("call_too_deep") == 25, "{} too deep", trace.count("call_too_deep"));
    Ok(())
}

fn longjmp() -> Result<()> {
    let trace = trace(&["jump"], calls_only())?;
    ensure!(trace.said == "14", "the program computed {}", trace.said);
    let (setters, jumpers) = (trace.calls("fixture_set_jump"), trace.calls("fixture_jump"));
    ensure!(setters.len() == 2 && returned(&setters) == 2, "{setters:?}");
    ensure!(jumpers.iter().all(|call| call.end == CallEnd::Unwound) && jumpers.len() == 2, "{jumpers:?}");
    ensure!(trace.count("call_unwound") == 2, "{} unwound", trace.count("call_unwound"));
    Ok(())
}

fn exceptions() -> Result<()> {
    let trace = trace(&["throw"], calls_only())?;
    ensure!(trace.said == "42", "the program computed {}", trace.said);
    let thrown = trace.calls("fixture_throw");
    ensure!(thrown.len() == 1 && thrown[0].end == CallEnd::EntryOnly, "{thrown:?}");
    let caught = trace.calls("fixture_catch");
    ensure!(caught.len() == 1 && caught[0].end == CallEnd::Returned && caught[0].ret == 42, "{caught:?}");
    Ok(())
}

fn open_at_stop() -> Result<()> {
    let trace = trace(&["block"], calls_only())?;
    let calls = trace.calls("fixture_block");
    ensure!(calls.len() == 1 && calls[0].end == CallEnd::Open, "{calls:?}");
    let began = numbers(&trace.said)?[0];
    ensure!(calls[0].begin_ns >= began && calls[0].end_ns > calls[0].begin_ns, "{calls:?}");
    Ok(())
}

fn thread_ends_inside() -> Result<()> {
    let trace = trace(&["exit"], calls_only())?;
    ensure!(trace.said == "cancelled", "{}", trace.said);
    let calls = trace.calls("fixture_block");
    ensure!(calls.len() == 1 && calls[0].end == CallEnd::Exited, "{calls:?}");
    Ok(())
}

/// A second process maps the same library: it must not trap, and nothing of it may appear.
fn only_the_target() -> Result<()> {
    let mut other = Running::start(&["calls"])?;
    let mut target = Running::start(&["calls"])?;
    let mut session = Session::start(calls_only(), Built::get()?.profiles()?)?;
    session.add(&process::find(target.pid())?)?;
    let mut events = Vec::new();
    other.tell()?;
    other.line(&mut session, &mut events)?;
    target.tell()?;
    target.line(&mut session, &mut events)?;
    let ledger = session.stop(&mut events).ledger;
    let hits: u64 =
        ledger.iter().filter(|row| row.name == "hits:fixture:fixture_work").map(|row| row.count).sum();
    ensure!(hits == 1000, "{hits} hits");
    let strangers = events.iter().filter(
        |event| matches!(event, tracer::event::Event::Call(call) if call.origin.process.tgid != target.pid()),
    );
    ensure!(strangers.count() == 0, "calls of another process");
    other.end()?;
    target.end()
}

/// Nobody drains: what does not fit is counted, and written + dropped is all there was.
fn full_ring_is_counted() -> Result<()> {
    let mut running = Running::start(&["flood"])?;
    let mut session = Session::start(calls_only(), Built::get()?.profiles()?)?;
    session.add(&process::find(running.pid())?)?;
    let mut events = Vec::new();
    running.tell()?;
    running.wait_line()?;
    let ledger = session.stop(&mut events).ledger;
    let count = |name: &str| ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum::<u64>();
    let calls = events.iter().filter(|event| matches!(event, tracer::event::Event::Call(_))).count() as u64;
    ensure!(count("vital_dropped") > 0, "nothing was dropped: the test needs a smaller ring");
    ensure!(calls + count("vital_dropped") >= 300_000, "{calls} calls, {} dropped", count("vital_dropped"));
    ensure!(count("hits:fixture:fixture_work") == 300_000, "hits {}", count("hits:fixture:fixture_work"));
    running.end()
}

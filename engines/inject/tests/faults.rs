//! A driver that misbehaves (the stand-in does, on demand): the program computes what it computes without the library,
//! and what was not timed is counted, by its own name.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use common::{Marks, Stage, output};
use tracer_abi::mark::{INJECT_ACTIVE, INJECT_DISABLED, InjectState};

/// Two threads, 2 × 1,500 steps of 1 ms: long enough for the library to report after the fault.
const RUN: [&str; 4] = ["run", "2", "1500", "1000000"];

/// What the library reported of a program that ran well on a driver with this fault.
fn with_fault(fault: &str, arguments: &[&str], says: &str) -> (Marks, InjectState, String) {
    let stage = Stage::new(&[]);
    let mut command = stage.heard(arguments);
    command.env("WAIT_HOOK", "1").env("STANDIN_CUDA_FAULT", fault);
    assert_eq!(output(&mut command), says, "{fault}");
    let mut marks = stage.marks();
    let (state, reason) = marks.states.pop().unwrap();
    (marks, state, reason)
}

fn run(fault: &str) -> (Marks, InjectState, String) {
    with_fault(fault, &RUN, "steps 3000\n")
}

#[test]
fn events_that_never_complete_use_the_pool_up() {
    let (marks, state, reason) = run("not_ready@800");
    assert_eq!((state.state, reason.as_str(), state.skipped_error), (INJECT_ACTIVE, "", 0));
    assert!(state.skipped_pool > 500, "{state:?}");
    // Those that were timed before: the first records are the library's own.
    assert!((100..400).contains(&marks.spans.len()), "{}", marks.spans.len());
}

#[test]
fn an_unknown_error_of_a_record_turns_it_off() {
    let (_, state, reason) = run("record_error=999@800");
    assert_eq!((state.state, reason.as_str()), (INJECT_DISABLED, "the CUDA driver answered with error 999"));
    assert!(state.timed > 100 && state.skipped_error >= 1, "{state:?}");
    // Once off, the slot is put back: steps do not even come by.
    assert!(state.steps < 2000, "{state:?}");
}

#[test]
fn an_unknown_error_of_a_query_turns_it_off() {
    let (_, state, reason) = run("query_error=719@800");
    assert_eq!((state.state, reason.as_str()), (INJECT_DISABLED, "the CUDA driver answered with error 719"));
}

#[test]
fn no_memory_for_events_turns_it_off() {
    let (marks, state, reason) = run("create_error=2@100");
    assert_eq!((state.state, reason.as_str()), (INJECT_DISABLED, "the CUDA driver answered with error 2"));
    assert_eq!((state.timed, marks.spans.len()), (0, 0));
}

#[test]
fn a_lost_context_is_given_up_and_what_was_under_way_is_counted() {
    let (_, state, reason) = run("query_error=709@800");
    assert_eq!((state.state, reason.as_str()), (INJECT_ACTIVE, ""));
    assert!(state.abandoned > 0 && state.timed > 100, "{state:?}");
    assert!(state.skipped_pool > 500, "{state:?}");
    let all = state.timed + state.skipped_pool + state.skipped_error + state.abandoned;
    assert!(state.steps.abs_diff(all) <= 2, "{state:?}");
}

#[test]
fn a_late_answer_delays_only_its_own_step() {
    // The library records 8 events per burst, of 3 to 6 until then; the rest are of steps.
    let (marks, state, reason) = run("record_late_us=50000@801");
    assert_eq!((state.state, reason.as_str(), state.skipped_error), (INJECT_ACTIVE, "", 0));
    let late =
        |ns| marks.spans.iter().filter(|span| span.enqueue_end_ns - span.enqueue_begin_ns > ns).count();
    assert!(late(45_000_000) <= 1 && marks.spans.len() > 2000, "{}", marks.spans.len());
}

#[test]
fn preemption_within_bursts_is_no_error() {
    let (marks, state, _) = run("query_late_us=5000");
    assert_eq!((state.state, state.skipped_error), (INJECT_ACTIVE, 0));
    let (mut long, mut short) = (0, 0);
    for (_, readings) in &marks.bursts {
        for reading in readings {
            *(if reading.h1_raw_ns - reading.h0_raw_ns > 5_000_000 { &mut long } else { &mut short }) += 1;
        }
    }
    assert!(long > 0 && short > long, "{long} long readings, {short} short ones");
}

#[test]
fn a_clock_that_misbehaves_is_reported_as_it_reads() {
    for fault in
        ["clock_step_ns=3000000@800", "glitch_ns=-400000@800", "quantum_ns=32000@800", "wander_ns=20000"]
    {
        let (marks, state, reason) = run(fault);
        assert_eq!((state.state, reason.as_str(), state.skipped_error), (INJECT_ACTIVE, "", 0), "{fault}");
        assert!(marks.spans.len() > 2000, "{fault}: {}", marks.spans.len());
    }
}

#[test]
fn steps_beyond_the_pool_go_untimed() {
    let (marks, state, _) = with_fault("", &["flood", "1", "3000", "1000000"], "steps 3000\n");
    assert_eq!((state.state, state.skipped_error), (INJECT_ACTIVE, 0));
    assert!(state.skipped_pool > 1000 && marks.spans.len() > 200, "{state:?} {}", marks.spans.len());
}

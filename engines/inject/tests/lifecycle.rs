//! Programs that begin, end and change in the middle of it: the same results as without the library, always.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use common::{Marks, Stage, output};
use tracer_abi::mark::INJECT_ACTIVE;

/// Runs the program without the library, with it idle and with it listened to: the results agree.
fn same(arguments: &[&str]) -> Marks {
    let stage = Stage::new(&[]);
    let without = output(&mut stage.command(arguments));
    assert_eq!(output(stage.injected(arguments).env("WAIT_HOOK", "1")), without, "{arguments:?}, idle");
    assert_eq!(output(stage.heard(arguments).env("WAIT_HOOK", "1")), without, "{arguments:?}, heard");
    stage.marks()
}

#[test]
fn exec_while_steps_run() {
    let marks = same(&["exec", "2", "1200", "500000"]);
    // Of both programs.
    let epochs = marks.bursts.iter().filter(|(burst, _)| burst.epoch == 0 && burst.base == 0).count();
    assert!(epochs >= 2 && marks.spans.len() > 1000, "{epochs} {}", marks.spans.len());
}

#[test]
fn exit_while_steps_run() {
    for _ in 0..3 {
        assert!(same(&["exit", "3", "600", "500000"]).spans.len() > 100);
    }
}

#[test]
fn contexts_that_come_and_go() {
    // 3 × 2 contexts after each other, and the threads' own next to each other.
    let marks = same(&["contexts", "3", "300", "1000000"]);
    assert_eq!(marks.states.last().map_or(INJECT_ACTIVE, |(state, _)| state.state), INJECT_ACTIVE);
    let contexts: std::collections::HashSet<u64> = marks.spans.iter().map(|span| span.context).collect();
    assert!(contexts.len() >= 3, "{} contexts, {} spans", contexts.len(), marks.spans.len());
}

#[test]
fn more_contexts_than_there_are_places_for() {
    let marks = same(&["contexts", "2", "1800", "100000"]);
    assert!(marks.states.iter().all(|(state, reason)| state.state == INJECT_ACTIVE && reason.is_empty()));
}

#[test]
fn streams_that_come_and_go() {
    let marks = same(&["streams", "3", "1600", "200000"]);
    let streams: std::collections::HashSet<u64> = marks.spans.iter().map(|span| span.stream).collect();
    assert!(streams.len() >= 3 && marks.spans.len() > 1000, "{} {}", streams.len(), marks.spans.len());
}

#[test]
fn an_engine_that_is_unloaded_and_loaded_again() {
    let marks = same(&["reload", "2", "700", "500000"]);
    assert!(marks.spans.len() > 1400, "{} spans", marks.spans.len());
}

#[test]
fn an_engine_that_is_loaded_late() {
    let marks = same(&["late", "2", "700", "500000"]);
    assert!(marks.spans.len() > 400, "{} spans", marks.spans.len());
}

/// 8 threads × 4 streams; `TRACER_HAMMER_STEPS` per thread.
#[test]
fn hammered_from_many_threads() {
    let steps = std::env::var("TRACER_HAMMER_STEPS").unwrap_or_else(|_| "50000".to_owned());
    let stage = Stage::new(&[]);
    let arguments = ["hammer", "8", &steps, "0"];
    let run = |mut command: std::process::Command| {
        // The truth of so many events would fill the disk.
        output(command.env_remove("STANDIN_CUDA_LOG").env("STANDIN_CUDA_ZERO", "1").env("WAIT_HOOK", "1"))
    };
    let mut plain = stage.command(&arguments);
    plain.env_remove("WAIT_HOOK");
    let without = output(plain.env_remove("STANDIN_CUDA_LOG").env("STANDIN_CUDA_ZERO", "1"));
    assert_eq!(without.lines().count(), 8);
    assert_eq!(run(stage.injected(&arguments)), without, "idle");
    assert_eq!(run(stage.heard(&arguments)), without, "heard");
    let marks = stage.marks();
    assert!(!marks.spans.is_empty());
    let reasons: Vec<_> = marks.states.iter().filter(|(state, _)| state.state != INJECT_ACTIVE).collect();
    assert!(reasons.is_empty(), "{reasons:?}");
}

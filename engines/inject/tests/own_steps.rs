//! Steps that a Rust program marks out itself: those of the example.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use std::process::Command;

use common::{Stage, built, output};
use tracer_abi::mark::INJECT_ACTIVE;

const STEPS: usize = 1500;

#[test]
fn steps_of_the_program_are_timed() {
    let stage = Stage::with_program("graph.cpp", &[]);
    let example = built("libtracer_inject.so").ancestors().find_map(|folder| {
        let path = folder.join("examples/own_steps");
        path.exists().then_some(path)
    });
    let example = example.expect("cargo builds examples with tests");
    let program = || {
        let mut command = Command::new(&example);
        command.arg(STEPS.to_string()).env("LD_LIBRARY_PATH", stage.folder.path());
        // Filling 4 MiB takes 0.33 ms.
        command.env("STANDIN_CUDA_COPY_NS_PER_KIB", "800");
        command
    };
    let without = output(&mut program());
    let mut heard = program();
    heard.env("LD_PRELOAD", built("libtracer_inject.so")).env("TRACER_INJECT_TEST_SINK", stage.path("marks"));
    assert_eq!(output(&mut heard), without);
    let marks = stage.marks();
    assert!(marks.spans.len() > STEPS / 2, "{} spans", marks.spans.len());
    let (state, _) = marks.states.last().unwrap();
    assert_eq!((state.state, state.skipped_error), (INJECT_ACTIVE, 0));
    let short = marks.spans.iter().filter(|span| f32::from_bits(span.span_ms_bits) < 0.32).count();
    assert_eq!(short, 0);
}

//! Graph launches: however the program gets `cuGraphLaunch`, it is timed when asked for, and nothing else changes.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use std::process::Command;

use common::{Stage, output};
use tracer_abi::mark::INJECT_ACTIVE;

/// Launches, and waits for the device in each: over the first, the library makes its events.
const LAUNCHES: usize = 1500;

/// With the library in it, listened to, graphs asked for.
fn heard(stage: &Stage, how: &str, threads: usize) -> Command {
    let mut command = stage.heard(&[how, &threads.to_string(), &LAUNCHES.to_string(), "300000"]);
    command.env("TRACER_INJECT_GRAPHS", "1");
    command
}

/// Every span lies around one launch: its two events are in the driver's log, around the graph's kernel.
fn check_spans(stage: &Stage, threads: usize) {
    let (marks, events) = (stage.marks(), stage.events());
    assert!(marks.spans.len() > LAUNCHES / 5, "{} spans", marks.spans.len());
    let mut refused = 0;
    for span in &marks.spans {
        // The log's times are converted between clocks, so that a neighbour's event may seem to lie inside.
        let around = span.enqueue_begin_ns - 5_000..=span.enqueue_end_ns + 5_000;
        let inside: Vec<_> = events
            .iter()
            .filter(|event| event.tid == u64::from(span.tid) && around.contains(&event.record_ns))
            .collect();
        let ms = f32::from_bits(span.span_ms_bits);
        let distance = |pair: &[&common::Event]| {
            (pair[1].complete_ns - pair[0].complete_ns) as f64 * (1.0 + common::DRIFT_PPM * 1e-6)
        };
        let nearest = inside.windows(2).map(distance).min_by(|one, other| {
            let far = |ns: f64| (ns - f64::from(ms) * 1e6).abs();
            far(*one).total_cmp(&far(*other))
        });
        common::assert_near(ms, nearest.expect("two events"));
        refused += usize::from(ms < 0.3);
    }
    // Each thread has one launch that the driver refuses.
    assert!(refused <= threads, "{refused} spans without a kernel");
    let (state, reason) = marks.states.last().unwrap();
    assert_eq!(
        (state.state, reason.as_str(), state.skipped_error, state.abandoned),
        (INJECT_ACTIVE, "", 0, 0)
    );
}

#[test]
fn launches_are_timed_however_the_function_was_found() {
    let stage = Stage::with_program("graph.cpp", &[]);
    for how in ["dlsym", "getproc", "getproc1", "ptsz"] {
        _ = std::fs::remove_file(stage.path("marks"));
        assert_eq!(output(&mut heard(&stage, how, 1)), format!("launches {LAUNCHES}\n"), "{how}");
        check_spans(&stage, 1);
    }
    // From several threads.
    _ = std::fs::remove_file(stage.path("marks"));
    assert_eq!(output(&mut heard(&stage, "getproc", 3)), format!("launches {}\n", 3 * LAUNCHES));
    check_spans(&stage, 3);
}

#[test]
fn launches_of_programs_that_link_the_driver_are_timed() {
    let stage = Stage::new(&[]);
    let folder = format!("-L{}", stage.folder.path().display());
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/graph.cpp");
    common::compile(
        &stage.path("program"),
        &source,
        &["-DLINKED", &folder, "-Wl,--no-as-needed", "-l:libcuda.so.1"],
    );
    assert_eq!(output(&mut heard(&stage, "linked", 1)), format!("launches {LAUNCHES}\n"));
    check_spans(&stage, 1);
}

#[test]
fn nothing_is_timed_unless_asked_for() {
    let stage = Stage::with_program("graph.cpp", &[]);
    let mut plain = stage.heard(&["dlsym", "1", "200", "100000"]);
    assert_eq!(output(&mut plain), "launches 200\n");
    let mut idle = stage.injected(&["getproc", "1", "200", "100000"]);
    assert_eq!(output(idle.env("TRACER_INJECT_GRAPHS", "1")), "launches 200\n");
    assert_eq!((stage.events().len(), stage.marks().spans.len()), (0, 0));
}

#[test]
fn what_passes_the_library_by_is_not_timed() {
    let stage = Stage::with_program("graph.cpp", &[]);
    assert_eq!(output(&mut heard(&stage, "hidden", 1)), format!("launches {LAUNCHES}\n"));
    assert_eq!(stage.marks().spans.len(), 0);
}

#[test]
fn lookups_mean_what_they_mean_without_the_library() {
    let stage = Stage::with_program("graph.cpp", &[]);
    let (first, second) = (stage.path("libfirst.so"), stage.path("libsecond.so"));
    for (library, text) in [
        (
            &first,
            "#include <dlfcn.h>\nextern \"C\" const char* who() { return \"first\"; }\n\
             extern \"C\" const char* next_who() { return ((const char* (*)())dlsym(RTLD_NEXT, \"who\"))(); }",
        ),
        (&second, "extern \"C\" const char* who() { return \"second\"; }"),
    ] {
        let source = library.with_extension("cpp");
        std::fs::write(&source, text).unwrap();
        common::compile(library, &source, &["-shared", "-fPIC"]);
    }
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/graph.cpp");
    let folder = format!("-L{}", stage.folder.path().display());
    let flags = [folder.as_str(), "-Wl,--no-as-needed", "-lfirst", "-lsecond"];
    common::compile(&stage.path("program"), &source, &flags);
    let arguments = ["lookups", "0", "0", "0"];
    let without = output(&mut stage.command(&arguments));
    assert_eq!(
        without,
        "next second, default first\nerror after success: no\nmissing: 1, named in the error: 1\n\
         elsewhere: 1, named in the error: 1, once: 1\n"
    );
    for graphs in ["0", "1"] {
        assert_eq!(output(stage.injected(&arguments).env("TRACER_INJECT_GRAPHS", graphs)), without);
    }
}

#[test]
fn a_launch_within_a_step_is_part_of_it() {
    let stage = Stage::new(&[]);
    let mut command = stage.heard(&["inner", "2", "700", "500000"]);
    command.env("WAIT_HOOK", "1").env("TRACER_INJECT_GRAPHS", "1");
    assert_eq!(output(&mut command), "steps 1400\n");
    let marks = stage.marks();
    let (state, _) = marks.states.last().unwrap();
    assert!(state.steps <= 1400 && marks.spans.len() > 300, "{state:?} {}", marks.spans.len());
    assert!(marks.spans.iter().all(|span| f32::from_bits(span.span_ms_bits) >= 0.5));
}

#[test]
fn another_library_that_replaces_dlsym_gets_along() {
    let stage = Stage::with_program("graph.cpp", &[]);
    let (source, other) = (stage.path("other.cpp"), stage.path("libother.so"));
    let text = "#include <dlfcn.h>\n#include <cstdio>\nstatic int calls;\n\
        extern \"C\" void* dlsym(void* library, const char* name) noexcept {\n\
          static auto real = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, \"dlsym\", \"GLIBC_2.2.5\");\n\
          ++calls;\n  return real(library, name);\n}\n\
        __attribute__((destructor)) static void end() { printf(\"seen: %d\\n\", calls > 10); }";
    std::fs::write(&source, text).unwrap();
    common::compile(&other, &source, &["-shared", "-fPIC"]);
    let (ours, other) = (common::built("libtracer_inject.so"), other.display().to_string());
    for preload in [format!("{}:{other}", ours.display()), format!("{other}:{}", ours.display())] {
        let mut command = heard(&stage, "dlsym", 1);
        assert_eq!(output(command.env("LD_PRELOAD", &preload)), format!("launches {LAUNCHES}\nseen: 1\n"));
    }
}

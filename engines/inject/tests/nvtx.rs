//! NVTX through the injected library: programs with version 3 of the headers, as the stand-in has them and, where they
//! were fetched (`cargo xtask test --real-libs`), NVIDIA's own; and layers of steps that are launched by hand.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use std::{path::PathBuf, process::Command};

use common::{Stage, built, output};
use tracer_abi::mark::{NVTX_END, NVTX_MARK, NVTX_POP, NVTX_PUSH, NVTX_START, NvtxState};

/// Action, name, domain and payload.
type Call = (u16, String, String, u64);

/// Each call, and numbers of ranges that start and end.
fn calls(stage: &Stage) -> (Vec<Call>, Vec<u64>, Vec<NvtxState>) {
    let marks = stage.marks();
    let ranges = marks.nvtx.iter().map(|(nvtx, ..)| nvtx.range).filter(|range| *range != 0).collect();
    let calls = marks
        .nvtx
        .into_iter()
        .map(|(nvtx, name, domain)| (nvtx.action, name, domain, nvtx.payload))
        .collect();
    (calls, ranges, marks.nvtx_states)
}

fn run(stage: &Stage, arguments: &[&str]) -> String {
    let library = built("libtracer_inject.so");
    let mut command = stage.command(arguments);
    command.env("NVTX_INJECTION64_PATH", library).env("TRACER_INJECT_TEST_SINK", stage.path("marks"));
    output(&mut command)
}

fn check_calls(stage: &Stage) {
    assert_eq!(run(stage, &[]), "done\n");
    let (calls, ranges, states) = calls(stage);
    let call =
        |action, name: &str, domain: &str, payload| (action, name.to_owned(), domain.to_owned(), payload);
    assert_eq!(
        calls,
        [
            call(NVTX_PUSH, "request:req-1", "", 0),
            call(NVTX_PUSH, "request", "serving", 42),
            call(NVTX_POP, "", "serving", 0),
            call(NVTX_PUSH, "préfill", "", 0),
            call(NVTX_MARK, "first token", "", 0),
            call(NVTX_POP, "", "", 0),
            call(NVTX_PUSH, "a registered name", "", 0),
            call(NVTX_POP, "", "", 0),
            call(NVTX_START, "request:req-2", "", 0),
            call(NVTX_START, "background", "", 0),
            call(NVTX_END, "", "", 0),
            call(NVTX_END, "", "", 0),
            call(NVTX_POP, "", "", 0),
        ]
    );
    assert_eq!(ranges.len(), 4);
    assert_eq!((ranges[0], ranges[1]), (ranges[2], ranges[3]));
    let state = states.last().expect("no state");
    assert_eq!((state.clients, state.refused, state.limited, state.names_lost), (1, 0, 0, 0));
}

#[test]
fn a_program_with_version_3_is_heard() {
    check_calls(&Stage::with_program("nvtx.cpp", &[]));
}

/// The header that programs and TensorRT are compiled with.
#[test]
fn nvidias_own_header_is_heard() {
    let Some(folder) = std::env::var_os("TRACER_REAL_LIBS").map(PathBuf::from) else {
        eprintln!("SKIP: TRACER_REAL_LIBS is not set (cargo xtask test --real-libs sets it)");
        return;
    };
    let include = folder.join("nvtx-12.9/nvidia/nvtx/include");
    assert!(include.join("nvtx3/nvToolsExt.h").exists(), "{} has no header", include.display());
    check_calls(&Stage::with_program("nvtx.cpp", &["-DREAL", &format!("-I{}", include.display())]));
}

#[test]
fn a_flood_is_limited_and_counted() {
    let stage = Stage::with_program("nvtx.cpp", &[]);
    assert_eq!(run(&stage, &["flood"]), "");
    let (calls, _, states) = calls(&stage);
    let state = states.last().expect("no state");
    let pushes = calls.iter().filter(|(action, ..)| *action == NVTX_PUSH).count();
    let pops = calls.iter().filter(|(action, ..)| *action == NVTX_POP).count();
    assert_eq!(pushes, pops, "what was reported to begin is reported to end");
    assert!(state.limited > 0 && pushes as u64 + state.limited == 50_000, "{pushes}, {state:?}");
    assert_eq!(state.reported, (pushes + pops) as u64);
}

#[test]
fn a_program_does_not_notice_while_nobody_listens() {
    let stage = Stage::with_program("nvtx.cpp", &[]);
    let mut command: Command = stage.command(&["idle", "100000"]);
    command.env("NVTX_INJECTION64_PATH", built("libtracer_inject.so"));
    assert_eq!(output(&mut command), "");
}

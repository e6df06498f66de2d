//! `tracer-gpu-check` on the stand-in: that it works and says what it is. No figure here is one of a GPU.

use std::io;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn check(arguments: &[&str], environment: &[(&str, &Path)]) -> io::Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tracer-gpu-check"));
    command.args(arguments).envs(environment.iter().copied()).output()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_stand_in_is_checked_and_everything_says_simulated() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("check.json");
    let output = check(&["--simulated", "--seconds", "3", "--json", file.to_str().unwrap()], &[]).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    println!("{out}");
    // 1: a time was beyond its aim, which a busy machine is free to cause.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{:?}: {err}", output.status);
    assert!(out.contains("SIMULATED"), "{out}");
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(json["schema"], "tracer.gpu_check/1");
    assert_eq!(json["simulated_gpu"], true);
    assert!(json["bursts"].as_array().unwrap().len() > 5);
    let lines = json["lines"].as_array().unwrap();
    let rows = out.lines().filter(|line| line.starts_with("| ") && line.contains("(simulated)")).count();
    assert_eq!(rows, lines.len(), "{out}");
    let value = |name: &str| {
        let line = lines.iter().find(|line| line["name"] == name);
        line.unwrap_or_else(|| panic!("no line {name}"))["value"].as_f64()
    };
    for none in [
        "causality violations",
        "hold-out readings outside the bound",
        "interruptions of the clock",
        "elapsed times that are no rounded whole ns",
        "elapsed times against their sum by bases",
    ] {
        // A busy machine may leave too few readings to say anything.
        assert!(value(none).is_none_or(|count| count == 0.0), "{none}\n{out}");
    }
    // The stand-in's clock steps by 0.5 µs. Few readings, at even intervals, may all be on a coarser grid; none is finer.
    let quantum_us = value("event quantum").unwrap();
    assert!(quantum_us >= 0.5 && (quantum_us / 0.5).fract() == 0.0, "{out}");
    // It runs no kernels, and 3 s show no wander.
    assert_eq!(value("events and %globaltimer disagree"), None);
    assert_eq!(value("wander of the device's rate"), None);
    assert!(value("round trip of a reading, floor") > Some(0.0));
    assert!(value("event pair per launch ÷ launch alone") > Some(0.0));
}

#[test]
fn the_stand_in_is_refused_unless_it_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    standin::stage_driver(dir.path()).unwrap();
    let output = check(&["--seconds", "1"], &[("LD_LIBRARY_PATH", dir.path())]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("--simulated"), "{}", text(&output.stderr));
}

#[test]
fn a_machine_without_a_gpu_is_told_what_to_do() {
    let output =
        check(&["--simulated", "--seconds", "1"], &[("STANDIN_CUDA_NO_DEVICE", Path::new("1"))]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("nvidia-smi"), "{}", text(&output.stderr));
}

//! The truth log agrees with what the events say, and the device clock with its settings.

mod common;

use std::process::Command;

use common::{Driver, Handle, SUCCESS, call};
use serde_json::Value;

/// Kernel times of the child, in ns.
const KERNELS: [u64; 5] = [3_000_000, 250_000, 1_000_000, 0, 20_000_000];

/// Not a test of its own: the program that the test below runs with settings.
#[test]
fn child() {
    if std::env::var_os("STANDIN_CUDA_LOG").is_none() {
        return;
    }
    let driver = Driver::new();
    let (stream, kernel, mut last) = (driver.stream(), driver.busy_kernel(), driver.event(0));
    let mut elapsed = Vec::new();
    assert_eq!(driver.record(last, stream), SUCCESS);
    for ns in KERNELS {
        let event = driver.event(0);
        assert_eq!(driver.launch(kernel, ns, stream), SUCCESS);
        assert_eq!(driver.record(event, stream), SUCCESS);
        assert_eq!(call!(driver, cuEventSynchronize(event => Handle)), SUCCESS);
        elapsed.push(driver.elapsed(last, event).unwrap());
        last = event;
    }
    println!("\nELAPSED {}", serde_json::to_string(&elapsed).unwrap());
}

#[test]
fn log_agrees_with_events() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("truth.jsonl");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("STANDIN_CUDA_LOG", &log)
        .env("STANDIN_CUDA_DRIFT_PPM", "1000")
        .env("STANDIN_CUDA_OFFSET_NS", "-123456789")
        .env("STANDIN_CUDA_QUANTUM_NS", "32")
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}");
    let line = stdout.lines().find_map(|line| line.strip_prefix("ELAPSED ")).expect("child did not run");
    let elapsed: Vec<f64> = serde_json::from_str(line).unwrap();

    let lines: Vec<Value> = std::fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |kind: &str| lines.iter().filter(|v| v["kind"] == kind).collect::<Vec<_>>();
    let ns = |value: &Value, key: &str| value[key].as_u64().unwrap();
    let (kernels, events) = (of("kernel"), of("event"));
    assert_eq!((kernels.len(), events.len()), (KERNELS.len(), KERNELS.len() + 1));
    for (kernel, expected) in kernels.iter().zip(KERNELS) {
        assert!(ns(kernel, "submit_ns") < ns(kernel, "begin_ns"));
        let took = ns(kernel, "end_ns") - ns(kernel, "begin_ns");
        // Monotonic may run a little fast or slow against the raw clock that the model runs on.
        assert!(took.abs_diff(expected) <= 2 + expected / 1_000, "{took} {expected}");
    }
    for (pair, ms) in events.windows(2).zip(&elapsed) {
        let truth = (ns(pair[1], "complete_ns") - ns(pair[0], "complete_ns")) as f64;
        // The device clock runs 1,000 ppm fast; monotonic is good to 500 ppm.
        let device = ms * 1e6;
        assert!((device - truth * 1.001).abs() <= 40.0 + truth * 5e-4, "{device} {truth}");
    }
}

//! What is tried out before it is done to others: probes under seccomp, their cost; and what is said about them.

use std::fs;

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use serde_json::Value;
use tracer::{
    event::CallEnd,
    probe::{Options, trial},
    timeline::coverage::{self, Silent},
};

use crate::{
    Test,
    faults::tracer,
    fixture::{Built, calls_only, returned, trace, trace_with},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("trial::costs_and_seccomp", costs_and_seccomp),
    ("trial::under_seccomp", under_seccomp),
    ("trial::without_returns", without_returns),
    ("trial::coverage", coverage),
    ("trial::doctor", doctor),
];

fn costs_and_seccomp() -> Result<()> {
    let outcome = trial::run()?;
    let classes: Vec<_> = outcome.costs.iter().map(|cost| cost.placement).collect();
    ensure!(classes == ["nop5", "emulated", "stepped"], "{classes:?}");
    // A probe that does not fire costs nothing.
    ensure!(outcome.costs.iter().all(|cost| cost.entry_ns > 0.0 && cost.pair_ns > 0.0), "{outcome:?}");
    Ok(())
}

/// The fixture ends by itself and with success, whatever this kernel does to probes under seccomp.
fn under_seccomp() -> Result<()> {
    let survives = trial::run()?.seccomp;
    // Guarded before the probes come; and, where that is harmless, while they are there.
    let modes: &[&str] = if survives.returns && survives.nop5 { &["guarded", "guard"] } else { &["guarded"] };
    for mode in modes {
        let trace = trace(&[mode], calls_only())?;
        ensure!(trace.said == "14950", "{mode}: {}", trace.said);
        let calls = trace.calls("fixture_work");
        ensure!(calls.len() == 100, "{mode}: {} calls", calls.len());
        let withheld = trace.count("return_probes_withheld");
        if survives.returns {
            ensure!(returned(&calls) == 100 && withheld == 0, "{mode}: {withheld} withheld");
        } else {
            ensure!(returned(&calls) == 0 && withheld > 0, "{mode}: {withheld} withheld");
        }
    }
    Ok(())
}

fn without_returns() -> Result<()> {
    let trace = trace(&["guarded"], Options { returns: false, ..calls_only() })?;
    let calls = trace.calls("fixture_work");
    let entries = calls.iter().filter(|call| call.end == CallEnd::EntryOnly).count();
    ensure!(calls.len() == 100 && entries == 100, "{} calls, {entries} entries", calls.len());
    ensure!(trace.count("return_probes_withheld") > 0 && trace.points().all(|point| !point.has_return));
    trace.lossless()
}

/// The fixture as an engine whose steps are CUDA graphs: its step function stands by while another launches.
const GRAPHS: &str = r#"
engine = "fixture"
title = "test fixture"
files = ["libfixture.so"]

[[point]]
symbols = ["fixture_recurse"]
role = "step"
returns = "c"

[[point]]
symbols = ["fixture_work"]
role = "graph_launch"
returns = "c"
"#;

fn coverage() -> Result<()> {
    let file = Built::get()?.path("graphs.toml");
    fs::write(&file, GRAPHS)?;
    let mut profiles = Profiles::builtin();
    profiles.load(&file)?;
    let trace = trace_with(&["guarded"], calls_only(), profiles)?;
    let points: Vec<_> = trace.points().cloned().collect();
    let of_fixture = coverage::of(&points, &trace.ledger).into_iter().find(|one| one.tgid == trace.pid);
    let one = of_fixture.context("the process is not in the ledger")?;
    // Besides the two: the loader's point, and the marks library's.
    ensure!(one.found == one.attached && one.attached >= 3 && one.fired == 1, "{one:?}");
    ensure!(one.silent == [Silent::Graphs { point: "fixture_recurse".into(), launches: 100 }], "{one:?}");
    Ok(())
}

fn doctor() -> Result<()> {
    let output = tracer()?.args(["doctor", "--json"]).output()?;
    ensure!(output.status.success(), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout)?;
    let checks = value["checks"].as_array().context("no checks")?;
    let status = |name: &str| checks.iter().find(|check| check["name"] == name).map(|check| &check["status"]);
    for name in ["kernel", "privileges", "BTF", "probe cost", "engines", "toolchain"] {
        ensure!(status(name).is_some_and(|status| status == "ok"), "{name}: {checks:?}");
    }
    ensure!(value["probe_costs"].as_array().is_some_and(|costs| costs.len() == 3), "{value}");
    let text = String::from_utf8(tracer()?.arg("doctor").output()?.stdout)?;
    ensure!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    ensure!(text.contains("probe cost") && text.contains("A recording works"), "{text}");
    Ok(())
}

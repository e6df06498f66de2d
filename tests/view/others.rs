//! What other tools make of what is exported: speedscope, and Perfetto's own schema. `cargo xtask test --real-servers` brings
//! them. (Perfetto's trace processor is only on a server of its makers', which not everyone reaches.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use serde::Deserialize;
use serde_json::json;
use tracer::capture::Capture;
use tracer::event::GpuSample;
use tracer::export::{Material, perfetto};
use tracer_tests::browser::Browser;

use crate::{Exhibit, Test};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("others::pprof_in_speedscope", pprof),
    ("others::folded_stacks_in_speedscope", folded_stacks),
    ("others::trace_in_perfettos_schema", perfetto_trace),
];

/// Where `cargo xtask test --real-servers` has put it.
pub(crate) fn folder() -> Option<PathBuf> {
    std::env::var_os("TRACER_REAL_SERVERS").map(PathBuf::from)
}

/// Opens a file in speedscope, as its own command does; returns what its table of functions says: the time of each, with
/// what it called.
fn functions(browser: &mut Browser, file: &Path) -> Result<BTreeMap<String, String>> {
    let folder = folder().context("no TRACER_REAL_SERVERS")?;
    let page = folder.join("speedscope/node_modules/speedscope/dist/release/index.html");
    ensure!(page.exists(), "{} is not there", page.display());
    let name = file.file_name().context("no name")?.to_string_lossy();
    let bytes = base64::prelude::BASE64_STANDARD.encode(std::fs::read(file)?);
    let script = file.with_added_extension("js");
    std::fs::write(&script, format!("speedscope.loadFileFromBase64({}, {})", json!(name), json!(bytes)))?;
    let url = format!("file://{}#localProfilePath={}", page.display(), script.display());
    browser.call("Page.navigate", &json!({ "url": url }))?;
    browser.wait(&format!("document.title.includes({})", json!(name)))?;
    let table =
        "[...document.querySelectorAll('div')].findLast((one) => one.textContent.endsWith('Sandwich'))";
    browser.evaluate(&format!("{table}.click()"))?;
    browser.wait("document.querySelectorAll('td').length > 0")?;
    let rows = browser.evaluate(
        "[...document.querySelectorAll('tr')].filter((row) => row.cells.length === 3 && row.querySelector('td'))\
         .map((row) => [row.cells[2].textContent, row.cells[0].textContent])",
    )?;
    browser.screenshot("speedscope")?;
    Ok(serde_json::from_value::<Vec<(String, String)>>(rows)?.into_iter().collect())
}

/// ns of the tokens by part.
fn parts(exhibit: &Exhibit) -> BTreeMap<&'static str, u64> {
    let mut parts = BTreeMap::new();
    for token in &exhibit.material.tables.tokens {
        for part in exhibit.material.budgets.segments(token) {
            *parts.entry(part.label.name()).or_default() += part.end_ns - part.begin_ns;
        }
    }
    parts
}

/// Its times of parts are the capture's, as exactly as it says them.
fn agree(exhibit: &Exhibit, said: &BTreeMap<String, String>, ns: impl Fn(&str) -> Option<f64>) -> Result<()> {
    let parts = parts(exhibit);
    // It shows what there is room for.
    let shown: Vec<_> = parts.iter().filter_map(|(name, ns)| Some((name, *ns, said.get(*name)?))).collect();
    ensure!(shown.len() >= 5 && said.contains_key("gpu_span"), "{said:?}");
    for (name, right_ns, text) in shown {
        let value = text.split(" (").next().unwrap_or_default();
        let shown_ns = ns(value).with_context(|| format!("{name}: {text}"))?;
        ensure!(
            (shown_ns - right_ns as f64).abs() <= 0.006 * right_ns as f64,
            "{name}: {text}, not {right_ns} ns"
        );
    }
    Ok(())
}

fn pprof(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    let file = exhibit.folder.path().join("tokens.pb.gz");
    std::fs::write(&file, tracer::export::profile(&exhibit.material, &exhibit.caption)?)?;
    agree(exhibit, &functions(browser, &file)?, |text| {
        let units = [("ms", 1e6), ("µs", 1e3), ("ns", 1.0), ("s", 1e9)];
        units.iter().find_map(|(unit, ns)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * ns))
    })
}

fn folded_stacks(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    let file = exhibit.folder.path().join("tokens.folded.txt");
    let mut draw = Command::new(standin::built("tracer", "tracer")?);
    draw.args(["flamegraph", "--tokens", "-o", "/dev/null", "--folded"]).arg(&file);
    let drawn = draw.arg(exhibit.folder.path().join("capture")).output()?;
    ensure!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    agree(exhibit, &functions(browser, &file)?, |text| text.replace(',', "").parse().ok())
}

/// What `read_perfetto.py` says of a trace.
#[derive(Debug, Deserialize)]
struct Trace {
    wrong: BTreeMap<String, u64>,
    /// By name of the outermost track.
    slices: BTreeMap<String, u64>,
    counters: BTreeMap<String, u64>,
    flows: u64,
    arguments: BTreeMap<String, u64>,
    clocks: Vec<u32>,
}

fn perfetto_trace(_: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    let capture = Capture::open(&exhibit.folder.path().join("capture"))?;
    let mut material = Material::load(&capture, None)?;
    let reading = GpuSample {
        time_ns: material.tables.meta.started_ns + 1,
        gpu_percent: Some(90),
        power_mw: Some(400_000),
        ..GpuSample::default()
    };
    material.tables.gpu_samples =
        vec![reading.clone(), GpuSample { time_ns: reading.time_ns + 1, ..reading }];
    let file = exhibit.folder.path().join("trace.pftrace");
    perfetto::trace(std::fs::File::create(&file)?, &material, &exhibit.caption, capture.offcpu()?)?;
    let python = folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/python");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("view/read_perfetto.py");
    let output = Command::new(python).arg(script).arg(&file).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let trace: Trace = serde_json::from_slice(&output.stdout)?;
    println!("  {trace:?}");
    ensure!(trace.wrong.is_empty(), "{:?}", trace.wrong);
    // CLOCK_REALTIME and CLOCK_MONOTONIC.
    ensure!(trace.clocks.contains(&1) && trace.clocks.contains(&3), "{:?}", trace.clocks);
    let tables = &material.tables;
    let made = tables.tokens.iter().filter(|token| token.step.is_some()).count() as u64;
    ensure!(made > 0 && trace.flows == made, "{} flows, {made} tokens with a step", trace.flows);
    let spans = tables.steps.iter().filter(|step| step.gpu.is_some()).count() as u64;
    let on_gpus: Vec<_> = trace.slices.iter().filter(|(name, _)| name.starts_with("GPU")).collect();
    ensure!(on_gpus.iter().map(|(_, count)| **count).sum::<u64>() == spans, "{on_gpus:?}, not {spans}");
    let expected = [("GPU busy", 2), ("power", 2)].map(|(name, count)| (name.to_owned(), count));
    ensure!(trace.counters == BTreeMap::from(expected), "{:?}", trace.counters);
    ensure!(trace.arguments.contains_key("bound_ns"), "{:?}", trace.arguments);
    Ok(())
}

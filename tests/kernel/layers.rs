//! NVTX, layers and engine files on real processes: what the capture says is what the stand-ins say.

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use tracer::{
    capture::Capture,
    event::{Event, Mark},
    timeline::{
        rows::{Layer, Phase, Source},
        tables::Tables,
    },
};

use crate::{
    Test, faults, graph,
    truth::{self, Driver, Run},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("layers::times_are_the_truth", times_are_the_truth),
    ("layers::none_when_not_wanted", none_when_not_wanted),
    ("layers::another_tool_stays", another_tool_stays),
    ("layers::ranges_are_phases_and_requests", ranges_injected),
    ("layers::ranges_of_the_shared_library", ranges_probed),
    ("layers::shapes_of_a_step", shapes),
    ("layers::data_types_of_a_step", data_types),
    ("layers::data_types_that_were_asked_for_before", data_types_before),
    ("layers::engine_file_of_a_step", engine_file),
    ("layers::several_engine_files", several_engine_files),
    ("layers::engine_file_open_before", engine_file_open_before),
];

const KERNELS: usize = 8;
const LOAD: &[&str] = &["--requests", "60", "--concurrency", "8", "--output-tokens", "20-60"];

/// Each layer of a sampled step lies between the true times of its two events, and holds its kernel.
fn times_are_the_truth() -> Result<()> {
    let run =
        truth::run(&["--kernels", &KERNELS.to_string(), "--step-us", "3000"], LOAD, &["--layers", "4"])?;
    let tables = &run.tables;
    let sampled = tables.steps.iter().filter(|step| step.sampled).count();
    println!("  {sampled} of {} steps sampled", tables.steps.len());
    ensure!(sampled * 12 > tables.steps.len() && sampled * 2 < tables.steps.len(), "{sampled} steps sampled");
    let mut errors = Vec::new();
    let mut checked = 0;
    for span in spans(&run)? {
        let inside = |time: u64| (span.enqueue_begin_ns..=span.enqueue_end_ns).contains(&time);
        let step = tables.steps.iter().find(|step| step.tid == span.tid && inside(step.begin_ns));
        let step = step.context("a span without its step")?;
        ensure!(step.sampled == span.sampled, "step {} is not marked as its span", step.id);
        let layers: Vec<&Layer> = tables.layers.iter().filter(|layer| layer.step == step.id).collect();
        if !span.sampled {
            ensure!(layers.is_empty(), "step {} is not sampled and has layers", step.id);
            continue;
        }
        ensure!(layers.len() == 1 + KERNELS, "{} layers in step {}", layers.len(), step.id);
        let (events, kernels) = of_driver(&run, span.tid, &inside);
        ensure!(events.len() == 2 + 2 * layers.len(), "{} events in a sampled step", events.len());
        ensure!(kernels.len() == KERNELS, "{} kernels in a step", kernels.len());
        let Some(gpu) = step.gpu else { continue };
        // Begin of the step, of the whole, of the first layer, its end, …, end of the whole, of the step.
        let whole = layers[0];
        ensure!(
            (whole.name.as_str(), whole.parent, whole.depth) == ("ExecutionContext::enqueue", None, 0),
            "{whole:?}"
        );
        errors.push(whole.gpu_span_ns.abs_diff(events[events.len() - 2] - events[1]));
        for (number, layer) in layers[1..].iter().enumerate() {
            ensure!(layer.name.starts_with("/model/layers.0/") && layer.parent == Some(0), "{layer:?}");
            let (begin, end) = (events[2 + 2 * number], events[3 + 2 * number]);
            errors.push(layer.gpu_span_ns.abs_diff(end - begin));
            let (at, until) = (layer.gpu_begin_ns.context("no time")?, layer.gpu_end_ns.context("no time")?);
            let bound = layer.gpu_bound_ns.context("no bound")? + 1_000;
            ensure!(
                at.abs_diff(begin) <= bound && until.abs_diff(end) <= bound,
                "{layer:?} is not {begin} to {end}"
            );
            let kernel = kernels[number];
            ensure!(
                at <= kernel.0 + bound && kernel.1 <= until + bound,
                "{layer:?} without its kernel {kernel:?}"
            );
        }
        ensure!(
            layers.iter().map(|layer| layer.gpu_self_ns).sum::<u64>() <= gpu.span_ns,
            "layers beyond their step"
        );
        checked += 1;
    }
    truth::report("layer time error", &mut errors);
    ensure!(checked > 20, "{checked} sampled steps with GPU times");
    // Two events of a clock with steps of 0.5 µs, as f32 milliseconds of some ms.
    ensure!(truth::p99(&mut errors) <= 1_500, "layer times differ from the truth");
    ensure!(run.ledger("layers_cut") == 0 && run.ledger("evicted") == 0, "layers are missing");
    let report = tracer(&["report", &run.folder().display().to_string()])?;
    ensure!(report.contains("Layers on the GPU") && report.contains("/model/layers.0/"), "{report}");
    let svg = run.folder().join("gpu.svg");
    let folded = run.folder().join("gpu.folded");
    tracer(&[
        "flamegraph",
        &run.folder().display().to_string(),
        "--gpu",
        "-o",
        &svg.display().to_string(),
        "--folded",
        &folded.display().to_string(),
    ])?;
    let folded = fs::read_to_string(folded)?;
    ensure!(folded.contains(";ExecutionContext::enqueue;/model/layers.0/mlp/down_proj "), "{folded}");
    Ok(())
}

fn tracer(arguments: &[&str]) -> Result<String> {
    let output = faults::tracer()?.args(arguments).output()?;
    ensure!(output.status.success(), "tracer {}: {}", arguments.join(" "), faults::stderr(&output));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn spans(run: &Run) -> Result<Vec<tracer::event::mark::GpuSpan>> {
    let spans = run.capture.events()?.filter_map(|event| match event {
        Ok(Event::Mark(event)) => match event.mark {
            Mark::GpuSpan(span) => Some(span),
            _ => None,
        },
        _ => None,
    });
    Ok(spans.collect())
}

/// When the events that a thread recorded in an interval were complete, and the kernels that were submitted in it, both
/// in order of the calls.
fn of_driver(run: &Run, tid: u32, inside: &dyn Fn(u64) -> bool) -> (Vec<u64>, Vec<(u64, u64)>) {
    let (mut events, mut kernels) = (Vec::new(), Vec::new());
    for line in &run.driver {
        match *line {
            Driver::Event { tid: of, record_ns, complete_ns } if of == tid && inside(record_ns) => {
                events.push((record_ns, complete_ns));
            }
            Driver::Kernel { submit_ns, begin_ns, end_ns } if inside(submit_ns) => {
                kernels.push((submit_ns, (begin_ns, end_ns)));
            }
            _ => {}
        }
    }
    events.sort_unstable();
    kernels.sort_unstable();
    (events.into_iter().map(|(_, at)| at).collect(), kernels.into_iter().map(|(_, kernel)| kernel).collect())
}

fn none_when_not_wanted() -> Result<()> {
    let run = truth::run(&[], &["--requests", "20"], &["--layers", "0"])?;
    ensure!(
        run.tables.layers.is_empty() && run.tables.steps.iter().all(|step| !step.sampled),
        "sampled all the same"
    );
    Ok(())
}

/// Records the program of NVTX's tests; `library`: it uses this shared one.
fn record_ranges(library: Option<&str>, environment: &[(&str, &str)]) -> Result<(Tables, String)> {
    let folder = tempfile::tempdir()?;
    let program =
        graph::compile_with(folder.path(), "nvtx.cpp", if library.is_some() { &["-DSHARED"] } else { &[] })?;
    let (capture, ready) = (folder.path().join("capture"), folder.path().join("ready"));
    let mut recorder = faults::tracer()?;
    recorder.args(["record", "--duration", "60s", "-o"]).arg(&capture);
    if let Some(library) = library {
        let path = folder.path().join(library);
        graph::compile_library(&path, "nvtx_shared.cpp")?;
        recorder.arg("--no-inject").env("NVTX_LIBRARY", path);
    }
    let recorder = recorder
        .arg("--")
        .arg(program)
        .env("WAIT_FILE", &ready)
        .envs(environment.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let probed: &[u8] = if library.is_some() { b"nvtxRangePushA" } else { b"libtracer_inject" };
    faults::wait_for(|| truth::holds(&capture.join("raw/points.arrows"), probed))?;
    fs::write(&ready, "")?;
    let output = recorder.wait_with_output()?;
    // 3: no engine was seen, of which there is none.
    ensure!(output.status.code() == Some(3), "{}: {}", output.status, faults::stderr(&output));
    ensure!(String::from_utf8_lossy(&output.stdout).contains("done"), "the program did not end by itself");
    Ok((Capture::open(&capture)?.tables()?, faults::stderr(&output)))
}

fn ranges_injected() -> Result<()> {
    let (tables, _) = record_ranges(None, &[])?;
    let requests = check_ranges(&tables, "serving", "préfill", "a registered name")?;
    ensure!(requests == ["42", "req-1", "req-2"], "requests {requests:?}");
    let background = tables.phases.iter().find(|phase| phase.name == "background");
    ensure!(
        background.is_some_and(|phase| phase.end_ns.is_some()),
        "a range that starts and ends: {background:?}"
    );
    Ok(())
}

fn ranges_probed() -> Result<()> {
    let (tables, _) = record_ranges(Some("libnvToolsExt.so.1"), &[])?;
    // Domains and registered names are handles, which the tracer does not follow.
    let requests = check_ranges(&tables, "", "prefill", "")?;
    ensure!(requests == ["42", "req-1", "req-2"], "requests {requests:?}");
    let background = tables.phases.iter().find(|phase| phase.name == "background");
    ensure!(
        background.is_some_and(|phase| phase.end_ns.is_some()),
        "a range that starts and ends: {background:?}"
    );
    Ok(())
}

/// The phases of the program; names of its requests, sorted.
fn check_ranges(tables: &Tables, domain: &str, phase: &str, registered: &str) -> Result<Vec<String>> {
    let mut requests: Vec<String> =
        tables.requests.iter().map(|request| request.request_id.clone()).collect();
    requests.sort();
    for request in &tables.requests {
        ensure!(request.source == Source::Nvtx && request.end_ns.is_some(), "{request:?}");
        let took = request.end_ns.unwrap_or(0) - request.received_ns;
        ensure!((2_000_000..5_000_000_000).contains(&took), "a request of {took} ns");
    }
    let named = |name: &str| -> Result<&Phase> {
        let found = tables.phases.iter().find(|phase| phase.name == name);
        found.with_context(|| format!("no phase {name:?} in {:?}", tables.phases))
    };
    for name in [phase, registered] {
        let phase = named(name)?;
        ensure!(phase.request_id == "req-1" && phase.source == Source::Nvtx && !phase.is_mark, "{phase:?}");
        ensure!(phase.end_ns.is_some_and(|end| end - phase.begin_ns >= 2_000_000), "{phase:?}");
    }
    let mark = named("first token")?;
    ensure!(mark.is_mark && mark.request_id == "req-1" && mark.end_ns == Some(mark.begin_ns), "{mark:?}");
    ensure!(
        tables.phases.iter().all(|phase| phase.domain.is_empty() || phase.domain == domain),
        "other domains"
    );
    Ok(requests)
}

/// What another tool has put in the environment stays, and is said.
fn another_tool_stays() -> Result<()> {
    let other = [("NVTX_INJECTION64_PATH", "/nonexistent/libother_tool.so")];
    let (tables, said) = record_ranges(None, &other)?;
    ensure!(tables.phases.is_empty() && tables.requests.is_empty(), "{:?}", tables.phases);
    ensure!(said.contains("names another tool (/nonexistent/libother_tool.so), which stays"), "{said}");
    Ok(())
}

/// Each step has the shape that was set for it.
fn shapes() -> Result<()> {
    let run = truth::run(&[], &["--requests", "40", "--concurrency", "6"], &["--engine", "shapes"])?;
    let mut seen = std::collections::BTreeSet::new();
    for step in run.tables.steps.iter().filter(|step| !step.slots.is_empty()) {
        let longest = step.slots.iter().map(|slot| slot.tokens).max().unwrap_or(0);
        let truth = format!("input_ids:{}x{longest}", step.slots.len());
        ensure!(step.input_shapes == truth, "step {} of {}, not {truth}", step.id, step.input_shapes);
        let asked = format!("logits:{}x32000", step.slots.len());
        ensure!(step.output_shapes == asked, "step {} of {}, not {asked}", step.id, step.output_shapes);
        seen.insert(truth);
    }
    ensure!(seen.len() > 3, "{seen:?}");
    Ok(())
}

/// Two engines, one for each rank, whose contexts are known to be theirs.
fn data_types() -> Result<()> {
    let arguments = ["--engine", "shapes", "--no-inject"];
    let run = truth::run(&["--ranks", "2"], &["--requests", "20", "--concurrency", "6"], &arguments)?;
    for step in &run.tables.steps {
        ensure!(
            step.data_types == "input_ids:int64 logits:fp16" && step.quantization == "fp16",
            "step {} of rank {}: {:?}, {:?}",
            step.id,
            step.rank,
            step.data_types,
            step.quantization
        );
    }
    ensure!(run.tables.steps.iter().any(|step| step.rank == 1), "one rank only");
    let report = tracer(&["report", &run.folder().display().to_string()])?;
    ensure!(report.contains("Engines") && report.contains("fp16"), "{report}");
    Ok(())
}

/// Without the profile no question is heard: a recorder that comes later knows as little.
fn data_types_before() -> Result<()> {
    let run = truth::run(&[], &["--requests", "10"], &["--no-inject"])?;
    for step in &run.tables.steps {
        ensure!(step.data_types.is_empty() && step.quantization == "unknown", "{step:?}");
    }
    Ok(())
}

/// An engine's file of some size.
fn engine_at(folder: &std::path::Path, name: &str, fill: u8) -> Result<String> {
    let path = folder.join(name);
    fs::write(&path, vec![fill; 100_000])?;
    Ok(path.canonicalize()?.display().to_string())
}

fn engine_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = engine_at(folder.path(), "rank0.engine", 7)?;
    let other = engine_at(folder.path(), "weights.bin", 8)?;
    let server = ["--engine-file", &path, "--engine-file", &other];
    let run = truth::run(&server, &["--requests", "20"], &[])?;
    for step in &run.tables.steps {
        let engine = step.engine.as_ref().with_context(|| format!("step {} has no engine", step.id))?;
        ensure!(
            engine.path == path && engine.bytes == 100_000 && engine.fingerprint.len() == 32,
            "{engine:?}"
        );
        ensure!(engine.modified_ns > 1_600_000_000_000_000_000, "{engine:?}");
        ensure!(step.engine_version == "10.13.3.9", "version {}", step.engine_version);
    }
    ensure!(run.tables.engine_files.len() == 1, "{:?}", run.tables.engine_files);
    let report = tracer(&["report", &run.folder().display().to_string()])?;
    ensure!(report.contains("rank0.engine") && report.contains("10.13.3.9"), "{report}");
    Ok(())
}

/// Which one a step ran is not known, and not guessed.
fn several_engine_files() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (one, two) = (engine_at(folder.path(), "a.plan", 1)?, engine_at(folder.path(), "b.plan", 2)?);
    let run = truth::run(&["--engine-file", &one, "--engine-file", &two], &["--requests", "20"], &[])?;
    ensure!(run.tables.engine_files.len() == 2, "{:?}", run.tables.engine_files);
    ensure!(run.tables.steps.iter().all(|step| step.engine.is_none()), "an engine was guessed");
    Ok(())
}

/// A process that has its engine open when the recording begins.
fn engine_file_open_before() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = engine_at(folder.path(), "open.plan", 3)?;
    let capture = folder.path().join("capture");
    let mut holder = Command::new("sleep").arg("30").stdin(fs::File::open(&path)?).spawn()?;
    let recorded = faults::tracer()?
        .args(["record", "--quiet", "--duration", "1s", "--pid", &holder.id().to_string(), "-o"])
        .arg(&capture)
        .output();
    holder.kill()?;
    holder.wait()?;
    ensure!(recorded?.status.code() == Some(3), "the recording failed");
    let files = Capture::open(&capture)?.tables()?.engine_files;
    ensure!(files.len() == 1 && files[0].path == path && files[0].fingerprint.len() == 32, "{files:?}");
    Ok(())
}

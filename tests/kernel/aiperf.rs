//! What NVIDIA's load generator measured of servers, and what was recorded of them at the same time:
//! `cargo xtask test --aiperf` brings it and them.
//!
//! Both must count the same tokens of the same requests. Times are of two clocks in two processes that share a machine, so
//! they are printed, and held against a bound only where a mistake of ours would show: at the median.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tracer::{
    capture::Capture,
    probe::process,
    timeline::{
        rows::{Request, Source, Token},
        tables::Tables,
    },
};

use crate::{
    Test, faults,
    servers::{self, Server},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("aiperf::uvicorn_asyncio", || uvicorn(&["--loop", "asyncio"])),
    ("aiperf::uvicorn_uvloop", || uvicorn(&["--loop", "uvloop"])),
    ("aiperf::uvicorn_workers", || uvicorn(&["--loop", "asyncio", "--workers", "2"])),
    ("aiperf::node", || against(servers::node()?, Source::Socket)),
    ("aiperf::standin", || standin(&["--no-marks"], Source::Socket)),
    ("aiperf::standin_with_marks", || standin(&[], Source::Mark)),
];

/// Where `cargo xtask test --aiperf` has installed it.
pub(crate) fn folder() -> Option<PathBuf> {
    std::env::var_os("TRACER_AIPERF").map(PathBuf::from)
}

const REQUESTS: usize = 60;
/// So that its connections are there: how long it takes to make them is its own business.
const WARM_UP: usize = 8;
const TOKENS: u32 = 32;
/// How much mean gaps may differ at the median, in ns: AIPerf shares two CPUs with the server and the recorder, and takes
/// its time stamps in an event loop. On an idle machine it is below 100 µs.
const GAP_BOUND_NS: f64 = 1_000_000.0;
/// The same of TTFT, where AIPerf's event loop has a whole request to send and a response to open.
const TTFT_BOUND_NS: f64 = 5_000_000.0;

fn uvicorn(arguments: &[&str]) -> Result<()> {
    against(servers::uvicorn(arguments)?, Source::Socket)
}

fn standin(arguments: &[&str], source: Source) -> Result<()> {
    let libraries = tempfile::tempdir()?;
    standin::stage(libraries.path())?;
    let port = servers::free_port()?;
    let mut command = Command::new(standin::built("standin-server", "standin-server")?);
    command.args(["--port", &port.to_string(), "--step-us", "3000"]).args(arguments);
    command.env("LD_LIBRARY_PATH", libraries.path()).stdout(Stdio::null());
    against((servers::start(&mut command, port)?, port), source)
}

/// Records a server while AIPerf measures it.
fn against((server, port): (Server, u16), source: Source) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    let mut record = faults::tracer()?;
    record.args(["record", "--quiet", "--duration", "120s", "-o"]).arg(at("capture"));
    for found in process::tree(server.id())? {
        record.args(["--pid", &found.id.tgid.to_string()]);
    }
    let mut recorder = record.stdout(Stdio::null()).spawn().context("starting the recorder")?;
    faults::wait_for(|| at("capture/raw/clock_host.arrows").exists())?;
    let measured = profile(port, &at("aiperf"))?;
    // SAFETY: a plain system call; the child has not been waited for.
    unsafe { libc::kill(recorder.id().cast_signed(), libc::SIGINT) };
    let status = faults::wait(&mut recorder)?;
    ensure!(status.success(), "the recorder ended with {status}");
    drop(server);
    compare(&measured, &Capture::open(&at("capture"))?.tables()?, source)
}

/// One line of `profile_export.jsonl`; times in ms.
#[derive(Debug, Deserialize)]
struct Measured {
    metadata: Metadata,
    metrics: Metrics,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    x_request_id: String,
    benchmark_phase: String,
}

#[derive(Debug, Deserialize)]
struct Metrics {
    output_sequence_length: Value<f64>,
    time_to_first_token: Value<f64>,
    http_req_connecting: Value<f64>,
    /// Until its event loop has handed the request over.
    http_req_sending: Value<f64>,
    inter_token_latency: Value<f64>,
}

#[derive(Debug, Deserialize)]
struct Value<T> {
    value: T,
}

fn profile(port: u16, output: &Path) -> Result<Vec<Measured>> {
    let folder = folder().context("no TRACER_AIPERF")?;
    let text = |number: usize| number.to_string();
    let status = Command::new(folder.join("venv/bin/aiperf"))
        .args(["profile", "--model", "demo", "--endpoint-type", "completions", "--streaming"])
        .args(["--url", &format!("127.0.0.1:{port}"), "--tokenizer"])
        .arg(folder.join("tokenizer"))
        .args(["--concurrency", "4", "--request-count", &text(REQUESTS), "--warmup-request-count"])
        .arg(text(WARM_UP))
        .args(["--isl", "20", "--osl", &text(TOKENS as usize), "--workers-max", "1"])
        .args(["--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--output-artifact-dir"])
        .arg(output)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("starting AIPerf")?;
    ensure!(status.success(), "AIPerf ended with {status}");
    let file = output.join("profile_export.jsonl");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// When a token was on the wire.
fn left_ns(token: &Token) -> Result<u64> {
    token.wire_ns.or(token.written_ns).with_context(|| format!("no write of {token:?}"))
}

/// Every request under its id, with every token; and how the times differ, in µs.
fn compare(measured: &[Measured], tables: &Tables, source: Source) -> Result<()> {
    ensure!(measured.len() == WARM_UP + REQUESTS, "AIPerf tells of {} requests", measured.len());
    let mut requests: HashMap<&str, Vec<&Request>> = HashMap::new();
    for request in tables.requests.iter().filter(|request| request.tokens > 0) {
        requests.entry(&request.request_id).or_default().push(request);
    }
    let mut tokens: HashMap<u64, Vec<&Token>> = HashMap::new();
    tables.tokens.iter().for_each(|token| tokens.entry(token.request).or_default().push(token));
    let (mut gaps, mut ttfts, mut rests, mut lags) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for Measured { metadata: Metadata { x_request_id: id, benchmark_phase }, metrics } in measured {
        let [request] = requests.get(id.as_str()).map_or(&[][..], Vec::as_slice) else {
            anyhow::bail!("{id} is not there once: {:?}", requests.get(id.as_str()));
        };
        ensure!(request.source == source, "{id} comes from {:?}", request.source);
        let mut tokens = tokens.get(&request.id).with_context(|| format!("no tokens of {id}"))?.clone();
        tokens.sort_by_key(|token| token.index);
        let [first, .., last] = tokens.as_slice() else { anyhow::bail!("{id} has one token") };
        let seen = (request.tokens, tokens.len() as f64, last.index + 1);
        let counted = metrics.output_sequence_length.value;
        ensure!(seen == (TOKENS, counted, TOKENS), "{id}: {seen:?} tokens, AIPerf counted {counted}");
        let arrived_ns = request.arrived_ns.with_context(|| format!("when {id} arrived was not seen"))?;
        let read_ns = request.read_ns.with_context(|| format!("when {id} was read was not seen"))?;
        if benchmark_phase == "warmup" {
            continue;
        }
        let (first_ns, last_ns) = (left_ns(first)?, left_ns(last)?);
        let gap_ns = (last_ns - first_ns) as f64 / f64::from(TOKENS - 1);
        gaps.push((metrics.inter_token_latency.value * 1e6 - gap_ns).abs());
        let ttft_ns = metrics.time_to_first_token.value * 1e6;
        ttfts.push(ttft_ns - (first.delivered_ns - read_ns) as f64);
        let asking_ns = (metrics.http_req_connecting.value + metrics.http_req_sending.value) * 1e6;
        rests.push(ttft_ns - asking_ns - (first_ns - arrived_ns) as f64);
        lags.push((read_ns - arrived_ns) as f64);
    }
    let gap_ns = print("mean gap, AIPerf – wire", &mut gaps);
    print("TTFT, AIPerf – (read → write)", &mut ttfts);
    let rest_ns = print("… without connecting and sending, – (arrival → wire)", &mut rests);
    print("of which arrival → read", &mut lags);
    ensure!(gap_ns <= GAP_BOUND_NS, "mean gaps differ by {gap_ns:.0} ns at the median");
    ensure!(rest_ns.abs() <= TTFT_BOUND_NS, "TTFTs differ by {rest_ns:.0} ns at the median");
    Ok(())
}

/// Prints quantiles; returns the median.
fn print(name: &str, ns: &mut [f64]) -> f64 {
    ns.sort_by(f64::total_cmp);
    let at = |share: usize| ns.get((ns.len() * share / 100).min(ns.len().saturating_sub(1))).copied();
    let us = |share| at(share).unwrap_or(f64::NAN) / 1e3;
    println!("  {name}: p50 {:.0} µs, p90 {:.0} µs, max {:.0} µs", us(50), us(90), us(100));
    us(50) * 1e3
}

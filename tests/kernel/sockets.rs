//! Tokens at the socket: a server that makes no marks, against its own truth.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
};

use anyhow::{Context, Result, ensure};
use tracer::timeline::rows::{Join, Source};

use crate::{
    Test,
    truth::{self, Run, Truth, p99, report},
};

pub(crate) const TESTS: &[(&str, Test)] = &[("sockets::truth", every_token)];

fn every_token() -> Result<()> {
    let run = truth::run(
        &["--no-marks", "--step-us", "3000"],
        &["--requests", "150", "--concurrency", "32", "--prompt-word", SECRET],
        &[],
    )?;
    check_tokens(&run)?;
    check_steps(&run)?;
    check_latencies(&run)?;
    ensure!(run.ledger("http_lost") == 0 && run.ledger("vital_dropped") == 0, "{:?}", run.tables.ledger);
    keeps_no_secret(&run)
}

/// What a client might not want to be found anywhere.
const SECRET: &str = "correct-horse-battery-staple";

fn keeps_no_secret(run: &Run) -> Result<()> {
    for entry in fs::read_dir(run.folder())? {
        let path = entry?.path();
        let bytes = fs::read(&path)?;
        let found = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
        ensure!(!found, "{} holds a prompt", path.display());
    }
    Ok(())
}

/// Every token of every request, under the right id, and none invented.
fn check_tokens(run: &Run) -> Result<()> {
    let ids = run.ids();
    let mut expected: BTreeMap<&str, u32> = BTreeMap::new();
    for (key, _) in run.true_tokens().into_keys() {
        *expected.entry(ids[&key].as_str()).or_default() += 1;
    }
    let seen: BTreeMap<&str, u32> = run
        .tables
        .requests
        .iter()
        .filter(|request| request.tokens > 0)
        .map(|request| (request.request_id.as_str(), request.tokens))
        .collect();
    ensure!(seen == expected, "requests and their tokens differ from the truth: {seen:?} {expected:?}");
    ensure!(run.tables.tokens.iter().all(|token| token.source == Source::Socket));
    Ok(())
}

/// At least 99 % of the tokens on the step that generated them; the rest says that it is inferred, or has none.
fn check_steps(run: &Run) -> Result<()> {
    let names: HashMap<u64, &str> =
        run.tables.requests.iter().map(|request| (request.id, request.request_id.as_str())).collect();
    let ids = run.ids();
    let mut generated: HashMap<(&str, u32), (u64, u64)> = HashMap::new();
    for line in &run.truth {
        let Truth::Step { enqueue_begin_ns, enqueue_end_ns, slots, no_token, .. } = line else { continue };
        for (key, index, _) in slots.iter().filter(|(key, ..)| !no_token.contains(key)) {
            generated.insert((ids[key].as_str(), *index), (*enqueue_begin_ns, *enqueue_end_ns));
        }
    }
    let (mut right, mut wrong, mut without) = (0u64, 0u64, 0u64);
    for token in &run.tables.tokens {
        let Some(step) = token.step else {
            without += 1;
            continue;
        };
        let step = run.tables.steps.iter().find(|one| one.id == step).context("a token of no step")?;
        let name = names.get(&token.request).context("a token of no request")?;
        let (begin, end) = generated.get(&(*name, token.index)).context("a token that no step generated")?;
        if (*begin..=*end).contains(&step.begin_ns) { right += 1 } else { wrong += 1 }
    }
    let counted = run.tables.tokens.iter().filter(|token| token.join == Join::Count).count();
    println!("  steps: {right} right, {wrong} wrong, {without} without; {counted} by counting");
    ensure!(right >= (right + wrong + without) * 99 / 100, "too many tokens on a wrong step");
    Ok(())
}

/// Against the server's stamps: 20 µs at the median, 300 µs at p99 (p90 for the few first tokens). The server takes its first stamp when it has parsed
/// the head, which takes an unoptimised one about as long again.
fn check_latencies(run: &Run) -> Result<()> {
    let ids = run.ids();
    let truth: HashMap<(&str, u32), u64> = run
        .true_tokens()
        .into_iter()
        .map(|((key, index), (stamp, _))| ((ids[&key].as_str(), index), stamp))
        .collect();
    let received: HashMap<&str, u64> = run
        .truth
        .iter()
        .filter_map(|line| match line {
            Truth::Request { id, received_ns, .. } => Some((id.as_str(), *received_ns)),
            _ => None,
        })
        .collect();
    let requests: HashMap<u64, _> = run.tables.requests.iter().map(|request| (request.id, request)).collect();
    let (mut ttft, mut itl, mut lag) = (Vec::new(), Vec::new(), Vec::new());
    for token in &run.tables.tokens {
        let request = requests.get(&token.request).context("a token of no request")?;
        let name = request.request_id.as_str();
        let stamp = truth[&(name, token.index)];
        if token.index == 0 {
            let read_ns = request.read_ns.context("no time of reading")?;
            ttft.push((token.delivered_ns - read_ns).abs_diff(stamp - received[name]));
            lag.push(read_ns - request.received_ns);
        } else {
            let latency = token.latency_ns.context("no latency")?;
            itl.push(latency.abs_diff(stamp - truth[&(name, token.index - 1)]));
        }
    }
    for (name, errors) in [("ttft error", &mut ttft), ("itl error", &mut itl), ("arrival → read", &mut lag)]
    {
        report(name, errors);
    }
    let p50 = |errors: &[u64]| errors.get(errors.len() / 2).copied().unwrap_or(0);
    ensure!(p50(&ttft) <= 60_000 && p50(&itl) <= 20_000, "latencies differ from the truth at the median");
    let p90 = |errors: &[u64]| errors.get(errors.len() * 9 / 10).copied().unwrap_or(0);
    ensure!(p90(&ttft) <= 300_000 && p99(&mut itl) <= 300_000, "latencies differ from the truth at p99");
    let arrivals = run.tables.requests.iter().filter(|request| Some(request.received_ns) != request.read_ns);
    ensure!(arrivals.count() * 10 >= run.tables.requests.len() * 9, "arrivals were not seen");
    Ok(())
}

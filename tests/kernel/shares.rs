//! Whose time a step is: shares of requests and tenants against what the stand-ins say, and marks against sockets.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result, ensure};
use tracer::timeline::pair::FAR_NS;

use crate::{
    Test,
    truth::{self, Driver, Run, Truth},
};

pub(crate) const TESTS: &[(&str, Test)] = &[("shares::of_mixed_tenants", of_mixed_tenants)];

/// By how much a share may differ from the truth, in parts of it.
const MOST: f64 = 1e-3;

/// 64 streams of 5 tenants: each token is on its request, tenant and step, each share is the truth within 0.1 %, and marks
/// and sockets agree.
fn of_mixed_tenants() -> Result<()> {
    let run = truth::run(
        &["--max-batch", "64", "--step-us", "3000"],
        &["--requests", "256", "--concurrency", "64", "--tenants", "5", "--model-versions", "3"],
        &["--layers", "0"],
    )?;
    run.check_requests()?;
    truth::check_batches(&run)?;
    check_tenants_of_tokens(&run)?;
    check_shares(&run)?;
    check_both_sides(&run)
}

/// Tenants of requests: as the server says, by the program's key.
fn tenants(run: &Run) -> HashMap<u64, &str> {
    let of = |line| match line {
        &Truth::Request { key, ref tenant_id, .. } => Some((key, tenant_id.as_str())),
        _ => None,
    };
    run.truth.iter().filter_map(of).collect()
}

fn check_tenants_of_tokens(run: &Run) -> Result<()> {
    let truth = tenants(run);
    let seen: HashMap<u64, (u64, &str)> = run
        .tables
        .requests
        .iter()
        .map(|request| (request.id, (request.program_request, request.tenant_id.as_str())))
        .collect();
    let mut tokens = run.true_tokens();
    let all = tokens.len();
    for token in &run.tables.tokens {
        let (key, tenant) = seen[&token.request];
        ensure!(truth[&key] == tenant, "token {} of {key} is of {tenant}", token.index);
        ensure!(tokens.remove(&(key, token.index)).is_some(), "token {} of {key} is invented", token.index);
    }
    println!("  {all} tokens, {} without a row", tokens.len());
    ensure!(tokens.is_empty() && all > 10_000, "{} of {all} tokens are missing", tokens.len());
    Ok(())
}

/// How long a batch took on the device, between its two events, and the tokens that it processed by request.
type Batch = (u64, Vec<(u64, u32)>);

/// The batches that were timed.
fn true_batches(run: &Run) -> Result<HashMap<u64, Batch>> {
    let mut events: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    for line in &run.driver {
        if let Driver::Event { tid, record_ns, complete_ns } = *line {
            events.insert((tid, record_ns), complete_ns);
        }
    }
    let mut batches = HashMap::new();
    for line in &run.truth {
        let Truth::Step { batch_id, tid, enqueue_begin_ns, enqueue_end_ns, slots, tokens, .. } = line else {
            continue;
        };
        ensure!(
            slots.len() == tokens.len(),
            "batch {batch_id}: {} slots, {} numbers",
            slots.len(),
            tokens.len()
        );
        let of_step = events.range((*tid, *enqueue_begin_ns)..=(*tid, *enqueue_end_ns));
        let times: Vec<u64> = of_step.map(|(_, complete_ns)| *complete_ns).collect();
        if let [begin_ns, end_ns] = times[..] {
            let by_request = slots.iter().map(|slot| slot.0).zip(tokens.iter().copied()).collect();
            batches.insert(*batch_id, (end_ns - begin_ns, by_request));
        }
    }
    Ok(batches)
}

fn check_shares(run: &Run) -> Result<()> {
    let batches = true_batches(run)?;
    let keys: HashMap<u64, u64> =
        run.tables.requests.iter().map(|request| (request.id, request.program_request)).collect();
    let mut of_step: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for share in run.capture.shares()? {
        let share = share?;
        let key = keys[&share.request.context("a share of nobody")?];
        of_step.entry(share.step).or_default().extend(share.gpu_ns.map(|ns| (key, ns)));
    }
    let (mut truth, mut seen) = (BTreeMap::<u64, f64>::new(), BTreeMap::<u64, f64>::new());
    let mut compared = 0;
    for step in &run.tables.steps {
        let Some((gpu, (true_ns, tokens))) =
            step.gpu.zip(step.batch_id.and_then(|batch_id| batches.get(&batch_id)))
        else {
            continue;
        };
        let shares = &of_step[&step.id];
        let sum: u64 = shares.iter().map(|(_, ns)| ns).sum();
        ensure!(sum == gpu.span_ns, "shares of step {} sum to {sum} of {}", step.id, gpu.span_ns);
        ensure!(shares.len() == tokens.len(), "{} shares of {}", shares.len(), tokens.len());
        let all: f64 = tokens.iter().map(|(_, tokens)| f64::from(*tokens)).sum();
        for (key, tokens) in tokens {
            *truth.entry(*key).or_default() += *true_ns as f64 * f64::from(*tokens) / all;
        }
        for (key, ns) in shares {
            *seen.entry(*key).or_default() += *ns as f64;
        }
        compared += 1;
    }
    println!("  {compared} of {} steps compared", run.tables.steps.len());
    ensure!(compared * 100 > run.tables.steps.len() * 98, "{compared} of {}", run.tables.steps.len());
    let by_request = worst("request", &truth, &seen)?;
    let names = tenants(run);
    let by_tenant = |of: &BTreeMap<u64, f64>| {
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        of.iter().for_each(|(key, ns)| *sums.entry(names[key]).or_default() += ns);
        sums
    };
    let tenants = worst("tenant", &by_tenant(&truth), &by_tenant(&seen))?;
    ensure!(by_request <= MOST && tenants <= MOST, "shares differ from the truth");
    Ok(())
}

/// The largest difference from the truth, in parts of it.
fn worst<K: Ord + std::fmt::Debug>(
    what: &str,
    truth: &BTreeMap<K, f64>,
    seen: &BTreeMap<K, f64>,
) -> Result<f64> {
    ensure!(truth.keys().eq(seen.keys()), "{what}s: {:?}, not {:?}", seen.keys(), truth.keys());
    let differences = truth.values().zip(seen.values()).map(|(truth, seen)| (seen - truth).abs() / truth);
    let worst = differences.fold(0.0, f64::max);
    println!("  shares by {what}: {} of them, at most {:.4} % from the truth", truth.len(), worst * 100.0);
    Ok(worst)
}

/// Marks and sockets tell of the same tokens; one that was written long after its mark is counted as that.
fn check_both_sides(run: &Run) -> Result<()> {
    let tokens = &run.tables.tokens;
    let unwritten = tokens.iter().filter(|token| token.written_ns.is_none()).count() as u64;
    let far = tokens.iter().filter(|token| {
        token.written_ns.is_some_and(|written_ns| written_ns.abs_diff(token.delivered_ns) > FAR_NS)
    });
    let far = far.count() as u64;
    println!(
        "  marks and sockets: {unwritten} tokens of {} without a write, {far} far from it",
        tokens.len()
    );
    for (name, expected) in [
        ("exchange_without_request", 0),
        ("write_without_mark", 0),
        ("mark_without_write", unwritten),
        ("mark_far_from_write", far),
    ] {
        ensure!(run.ledger(name) == expected, "{name}: {}, not {expected}", run.ledger(name));
    }
    ensure!(unwritten == 0, "{unwritten} tokens have no write");
    Ok(())
}

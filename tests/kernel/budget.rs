//! The budget of every token against what really happened.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result, ensure};
use tracer::timeline::budget::{Blocked, Budget, Label};
use tracer_abi::mark::PREFILL;

use crate::{
    Test,
    truth::{self, Driver, Run, Truth},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("budget::by_marks", by_marks),
    ("budget::by_sockets", by_sockets),
    ("budget::causes_on_top", causes_on_top),
    ("budget::two_ranks", two_ranks),
];

const LOAD: &[&str] = &["--requests", "150", "--concurrency", "16"];

/// A step as it really was; CLOCK_MONOTONIC ns.
struct TrueStep {
    enqueue: (u64, u64),
    gpu: (u64, u64),
    sync_end_ns: u64,
    serves: Vec<u64>,
    /// It has prompts.
    prefills: bool,
}

/// Steps by batch, the slowest of each, with the times of the events around them.
fn true_steps(run: &Run) -> Result<BTreeMap<u64, TrueStep>> {
    let mut events: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
    for line in &run.driver {
        if let Driver::Event { tid, record_ns, complete_ns } = line {
            events.entry(*tid).or_default().push((*record_ns, *complete_ns));
        }
    }
    let mut steps: BTreeMap<u64, TrueStep> = BTreeMap::new();
    for line in &run.truth {
        let Truth::Step { batch_id, tid, enqueue_begin_ns, enqueue_end_ns, sync_end_ns, slots, .. } = line
        else {
            continue;
        };
        let enqueue = (*enqueue_begin_ns, *enqueue_end_ns);
        let of_step = events.get(tid).into_iter().flatten();
        let times: Vec<u64> =
            of_step.filter(|(at, _)| (enqueue.0..=enqueue.1).contains(at)).map(|(_, done)| *done).collect();
        // Before the injected library began, there were none.
        let [begin, end] = times.as_slice() else { continue };
        let serves = slots.iter().map(|(key, ..)| *key).collect();
        let prefills = slots.iter().any(|(.., phase)| *phase == PREFILL);
        let step = TrueStep { enqueue, gpu: (*begin, *end), sync_end_ns: *sync_end_ns, serves, prefills };
        if steps.get(batch_id).is_none_or(|other| other.gpu.1 < step.gpu.1) {
            steps.insert(*batch_id, step);
        }
    }
    ensure!(steps.len() > 100, "{} true steps", steps.len());
    Ok(steps)
}

fn overlap((begin, end): (u64, u64), (from, to): (u64, u64)) -> u64 {
    end.min(to).saturating_sub(begin.max(from))
}

/// A budget with its token's key (the program's number of the request, index) and its interval.
type Cut = ((u64, u32), (u64, u64), Budget);

fn tokens(run: &Run) -> Result<Vec<Cut>> {
    let keys: HashMap<u64, u64> =
        run.tables.requests.iter().map(|request| (request.id, request.program_request)).collect();
    let mut budgets = run.tables.budgets.iter();
    let mut tokens = Vec::new();
    for token in run.tables.tokens.iter().filter(|token| token.latency_ns.is_some()) {
        let budget = budgets.next().context("a token without a budget")?;
        ensure!(
            (budget.request, budget.choice, budget.index) == (token.request, token.choice, token.index),
            "budgets are in another order"
        );
        let latency = token.latency_ns.unwrap_or(0);
        ensure!(budget.latency_ns == latency && budget.parts_ns.iter().sum::<u64>() == latency, "{budget:?}");
        let key = *keys.get(&token.request).context("a token of no request")?;
        tokens.push(((key, token.index), (token.delivered_ns - latency, token.delivered_ns), budget.clone()));
    }
    ensure!(budgets.next().is_none() && tokens.len() > 500, "{} tokens", tokens.len());
    Ok(tokens)
}

/// Share of the latency, in millionths, for which nothing is known: median, and of the slowest hundredth the mean.
fn unattributed(tokens: &[Cut]) -> (u64, u64) {
    let share = |budget: &Budget| budget.part_ns(Label::Unattributed) * 1_000_000 / budget.latency_ns.max(1);
    let mut shares: Vec<u64> = tokens.iter().map(|(.., budget)| share(budget)).collect();
    shares.sort_unstable();
    let mut slowest: Vec<&Budget> = tokens.iter().map(|(.., budget)| budget).collect();
    slowest.sort_by_key(|budget| std::cmp::Reverse(budget.latency_ns));
    slowest.truncate(tokens.len().div_ceil(100));
    let mean = slowest.iter().map(|budget| share(budget)).sum::<u64>() / slowest.len() as u64;
    (shares[shares.len() / 2], mean)
}

/// Errors of parts against the truth: those of which the server and the driver tell when they began and ended.
fn check_parts(run: &Run, gpu: bool) -> Result<()> {
    let steps = true_steps(run)?;
    let iterations: HashMap<u64, u64> =
        run.tables.iterations.iter().map(|iteration| (iteration.id, iteration.batch_id)).collect();
    let batches: HashMap<(u64, u64, u32), u64> = run
        .tables
        .tokens
        .iter()
        .filter_map(|token| {
            Some(((token.request, token.delivered_ns, token.index), *iterations.get(&token.iteration?)?))
        })
        .collect();
    let mut errors: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for ((key, index), interval, budget) in tokens(run)? {
        let Some(batch) = batches.get(&(budget.request, interval.1, index)) else { continue };
        let Some(own) = steps.get(batch) else { continue };
        let serving: Vec<&TrueStep> = steps
            .range(..=batch)
            .rev()
            .map(|(_, step)| step)
            .take_while(|step| step.sync_end_ns > interval.0)
            .filter(|step| step.serves.contains(&key))
            .collect();
        let sum = |part: &dyn Fn(&TrueStep) -> (u64, u64)| -> u64 {
            serving.iter().map(|step| overlap(part(step), interval)).sum()
        };
        let span = sum(&|step| step.gpu);
        let mut check =
            |name, seen: u64, real: u64| errors.entry(name).or_default().push((seen.abs_diff(real), real));
        let starved = budget.part_ns(Label::HostRunqueue);
        if gpu {
            // While a step is enqueued, the host may be what holds the GPU up.
            let after = sum(&|step| (step.gpu.0.max(step.enqueue.1), step.gpu.1));
            let seen = budget.part_ns(Label::GpuSpan) + budget.part_ns(Label::NeighbourPrefill);
            let host = starved + budget.part_ns(Label::HostBlocked);
            check("gpu_span", seen, seen.clamp(span.saturating_sub(host).max(after), span));
            let wait = sum(&|step| (step.enqueue.1.min(step.gpu.0), step.gpu.0));
            check("gpu_wait", budget.part_ns(Label::GpuWait), wait);
        } else {
            let observed = sum(&|step| (step.enqueue.1, step.sync_end_ns));
            check("host_observed", budget.part_ns(Label::HostObserved), observed);
        }
        if index > 0 {
            // Of that, the time without a CPU is a part of its own.
            let (seen, real) = (budget.part_ns(Label::OtherSteps), other(&steps, own, key, interval));
            check("other_steps", seen, seen.clamp(real.saturating_sub(starved), real));
        } else {
            let first = serving.last().map_or(interval.1, |step| step.enqueue.0);
            let waited = other(&steps, own, key, (interval.0, first.max(interval.0)));
            let seen = budget.part_ns(Label::Queue);
            check("queue", seen, seen.clamp(waited.saturating_sub(starved), waited));
        }
    }
    for (name, mut errors) in errors {
        let mut beyond = 0;
        for (error, real) in &errors {
            beyond += usize::from(*error > (real / 20).max(100_000));
        }
        errors.sort_unstable();
        let at = |share: usize| {
            errors.get(errors.len() * share / 100).or(errors.last()).map_or(0, |e| e.0 / 1_000)
        };
        let n = errors.len();
        println!(
            "  {name}: n={n} error p50 {} µs, p95 {} µs, max {} µs; {beyond} beyond",
            at(50),
            at(95),
            at(100)
        );
        ensure!(beyond * 20 <= n, "{name}: {beyond} of {n} are off by more than 5 % and 100 µs");
    }
    Ok(())
}

/// How long others' steps ran in an interval.
fn other(steps: &BTreeMap<u64, TrueStep>, own: &TrueStep, key: u64, interval: (u64, u64)) -> u64 {
    steps
        .values()
        .filter(|step| step.enqueue.0 < own.enqueue.0 && !step.serves.contains(&key))
        .map(|step| overlap((step.enqueue.0, step.sync_end_ns), interval))
        .sum()
}

fn by_marks() -> Result<()> {
    let run = truth::run(&["--step-us", "3000"], LOAD, &[])?;
    let (median, slowest) = unattributed(&tokens(&run)?);
    println!("  unattributed: median {median} ppm, of the slowest hundredth {slowest} ppm");
    ensure!(median <= 10_000 && slowest <= 20_000, "too much is unattributed");
    check_parts(&run, true)
}

fn by_sockets() -> Result<()> {
    let run = truth::run(&["--step-us", "3000", "--no-marks"], LOAD, &["--no-inject"])?;
    let mut shares: Vec<u64> = Vec::new();
    for budget in &run.tables.budgets {
        ensure!(budget.parts_ns.iter().sum::<u64>() == budget.latency_ns, "{budget:?}");
        shares.push(budget.part_ns(Label::Unattributed) * 1_000_000 / budget.latency_ns.max(1));
    }
    shares.sort_unstable();
    ensure!(shares.len() > 500, "{} budgets", shares.len());
    let median = shares[shares.len() / 2];
    println!("  unattributed: n={} median {median} ppm", shares.len());
    ensure!(median <= 50_000, "too much is unattributed");
    Ok(())
}

fn two_ranks() -> Result<()> {
    let run = truth::run(&["--ranks", "2", "--step-us", "3000"], LOAD, &[])?;
    let (median, slowest) = unattributed(&tokens(&run)?);
    println!("  unattributed: median {median} ppm, of the slowest hundredth {slowest} ppm");
    ensure!(median <= 10_000 && slowest <= 20_000, "too much is unattributed");
    check_parts(&run, true)
}

/// When the planted causes were at work; CLOCK_MONOTONIC ns.
#[derive(Default)]
struct Planted {
    /// By batch.
    steps: BTreeMap<u64, Vec<Cause>>,
    /// By the program's number of the request.
    clients: Vec<(u64, (u64, u64))>,
}

/// What took `ns` of the time from `when.0` to `when.1`.
struct Cause {
    name: &'static str,
    label: Label,
    ns: u64,
    when: (u64, u64),
}

impl Planted {
    fn new(run: &Run, steps: &BTreeMap<u64, TrueStep>) -> Self {
        /// What the server makes a stalled step take longer on the GPU, and on the CPU before it.
        const GPU_NS: u64 = 30_000_000;
        const CPU_NS: u64 = 10_000_000;
        let mut planted = Self::default();
        for line in &run.truth {
            let Truth::Stall { cause, batch_id, key, begin_ns, end_ns } = line else { continue };
            let when = (*begin_ns, *end_ns);
            if let ("client", Some(key)) = (cause.as_str(), key) {
                planted.clients.push((*key, when));
            }
            let Some((batch, step)) = batch_id.and_then(|batch| Some((batch, steps.get(&batch)?))) else {
                continue;
            };
            // What it took to enqueue beyond the time for which it needed the CPU.
            let starved_ns = (step.enqueue.1 - step.enqueue.0).saturating_sub(CPU_NS);
            let (name, label, ns, when) = match cause.as_str() {
                "gpu" => ("gpu", Label::GpuSpan, GPU_NS, step.gpu),
                "lock" => ("lock", Label::HostBlocked, end_ns - begin_ns, when),
                "cpu" => ("cpu", Label::HostRunqueue, starved_ns, step.enqueue),
                _ => continue,
            };
            planted.steps.entry(batch).or_default().push(Cause { name, label, ns, when });
        }
        let span = |step: &TrueStep| step.gpu.1.saturating_sub(step.gpu.0);
        let mut usual: Vec<u64> = steps.values().filter(|step| !step.prefills).map(span).collect();
        usual.sort_unstable();
        let usual_ns = usual.get(usual.len() / 2).copied().unwrap_or(0);
        for (batch, step) in steps.iter().filter(|(_, step)| step.prefills) {
            let (label, ns) = (Label::NeighbourPrefill, span(step).saturating_sub(usual_ns));
            planted.steps.entry(*batch).or_default().push(Cause {
                name: "prefill",
                label,
                ns,
                when: step.gpu,
            });
        }
        planted
    }

    /// What took more than half of an interval, if one thing did; a step with several says nothing.
    fn of(&self, key: u64, batch: u64, interval: (u64, u64)) -> Option<(&'static str, Label)> {
        let is_most = |ns: u64| ns * 2 > interval.1 - interval.0;
        let client = self.clients.iter().filter(|(of, _)| *of == key);
        if is_most(client.map(|(_, held)| overlap(*held, interval)).sum()) {
            return Some(("client", Label::HostBlocked));
        }
        let [cause] = self.steps.get(&batch)?.as_slice() else { return None };
        // A client that reads again gets tokens of steps that are long over.
        is_most(overlap(cause.when, interval).min(cause.ns)).then_some((cause.name, cause.label))
    }
}

/// What was planted is the longest part of the tokens that it hit.
fn causes_on_top() -> Result<()> {
    let server = [
        ["--stall", "gpu:every:60"],
        ["--stall", "lock:every:70"],
        ["--stall", "cpu:every:50"],
        ["--step-us", "3000"],
        ["--prefill-token-us", "40"],
    ];
    let load =
        ["--requests", "200", "--concurrency", "12", "--slow-clients", "0.3", "--output-tokens", "40-200"];
    let run = truth::run(server.as_flattened(), &load, &[])?;
    let steps = true_steps(&run)?;
    let planted = Planted::new(&run, &steps);
    let iterations: HashMap<u64, u64> =
        run.tables.iterations.iter().map(|iteration| (iteration.id, iteration.batch_id)).collect();
    let batches: HashMap<(u64, u64), u64> = run
        .tables
        .tokens
        .iter()
        .filter_map(|token| Some(((token.request, token.delivered_ns), *iterations.get(&token.iteration?)?)))
        .collect();
    let mut tops: BTreeMap<(&str, &str), BTreeMap<&str, usize>> = BTreeMap::new();
    for ((key, index), interval, budget) in tokens(&run)? {
        let Some(batch) = batches.get(&(budget.request, interval.1)).filter(|_| index > 0) else { continue };
        let Some((cause, label)) = planted.of(key, *batch, interval) else { continue };
        let held = budget.blocked == Some(Blocked::SocketWrite);
        let top = if cause == "client" && !held { "not the client" } else { budget.top().name() };
        *tops.entry((cause, label.name())).or_default().entry(top).or_default() += 1;
    }
    println!("  longest parts by planted cause: {tops:?}");
    ensure!(tops.len() == 5, "only some causes hit anything");
    for ((cause, label), tops) in tops {
        let (right, all) = (tops.get(label).copied().unwrap_or(0), tops.values().sum::<usize>());
        ensure!(all >= 20 && right * 20 >= all * 19, "{cause}: {right} of {all} have {label} on top");
    }
    Ok(())
}

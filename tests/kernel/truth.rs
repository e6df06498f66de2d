//! The stand-in server says what really happened; the capture must say the same.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tracer::{capture::Capture, event::Event, event::Mark, timeline::tables::Tables};

use crate::{Test, faults};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("truth::every_token_and_step", every_token_and_step),
    ("truth::two_ranks", two_ranks),
    ("truth::mixed_tenants", mixed_tenants),
    ("truth::withheld_marks", withheld_marks),
    ("truth::host_observed", host_observed),
];

/// The program's key of a request, and the index of its token.
type TokenKey = (u64, u32);

/// One line of the server's truth log.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Truth {
    Request {
        key: u64,
        id: String,
        tenant_id: String,
        model: String,
        model_version: String,
        received_ns: u64,
        output_tokens: u32,
    },
    Token {
        key: u64,
        index: u32,
        stamp_ns: u64,
        marked: bool,
    },
    Step {
        batch_id: u64,
        rank: u32,
        tid: u32,
        enqueue_begin_ns: u64,
        enqueue_end_ns: u64,
        sync_end_ns: u64,
        marked: bool,
        slots: Vec<(u64, u32, u8)>,
        tokens: Vec<u32>,
        #[serde(default)]
        no_token: Vec<u64>,
    },
    Bug {
        batch_id: u64,
        other_batch_id: Option<u64>,
    },
    Stall {
        cause: String,
        begin_ns: u64,
        end_ns: u64,
        /// Of a step; a slow client has none.
        batch_id: Option<u64>,
        /// Of the request whose client is slow.
        key: Option<u64>,
    },
    #[serde(other)]
    Other,
}

/// One line of the stand-in driver's truth log.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Driver {
    Event {
        tid: u32,
        record_ns: u64,
        complete_ns: u64,
    },
    Kernel {
        begin_ns: u64,
        end_ns: u64,
        submit_ns: u64,
    },
    #[serde(other)]
    Other,
}

pub(crate) struct Run {
    pub(crate) tables: Tables,
    pub(crate) capture: Capture,
    pub(crate) truth: Vec<Truth>,
    pub(crate) driver: Vec<Driver>,
    folder: tempfile::TempDir,
}

/// Records the stand-in server from before its first request until after its last one.
pub(crate) fn run(server: &[&str], load: &[&str], record: &[&str]) -> Result<Run> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    standin::stage(&at("lib"))?;
    let mut recorder = faults::tracer()?
        .args(["record", "--quiet", "--duration", "90s", "-o"])
        .arg(at("capture"))
        .args(record)
        .arg("--")
        .arg(standin::built("standin-server", "standin-server")?)
        .arg("--truth")
        .arg(at("truth.jsonl"))
        .args(server)
        .env("LD_LIBRARY_PATH", at("lib"))
        .env("STANDIN_CUDA_LOG", at("driver.jsonl"))
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(recorder.stdout.take().context("no stdout")?).lines();
    let port = loop {
        let line = lines.next().context("the server says nothing")??;
        if let Some(port) = line.strip_prefix("listening on 127.0.0.1:") {
            break port.to_owned();
        }
    };
    // What is traced is a matter of time: the probes come when the recorder sees the libraries, and the injected
    // library begins when it sees its probe.
    faults::wait_for(|| holds(&at("capture/raw/points.arrows"), b"enqueueV3"))?;
    if !record.contains(&"--no-inject") {
        faults::wait_for(|| holds(&at("capture/raw/points.arrows"), b"libtracer_inject"))?;
        let is_timed =
            || fs::metadata(at("capture/raw/mark_gpu_span.arrows")).is_ok_and(|meta| meta.len() > 4096);
        // The library looks ten times a second whether it is listened to: on a busy machine steps may come before.
        let mut tries = 0..5;
        while tries.next().is_some_and(|_| !is_timed()) {
            warm_up(&port, tries.len())?;
            _ = faults::wait_for_at_most(Duration::from_secs(6), is_timed);
        }
        ensure!(is_timed(), "no step is timed");
    }
    let loaded = Command::new(standin::built("standin-server", "standin-server")?)
        .args(["load", "--port", &port])
        .args(load)
        .output()?;
    ensure!(loaded.status.success(), "load: {}", faults::stderr(&loaded));
    stop(&mut recorder, &port)?;
    let capture = Capture::open(&at("capture"))?;
    Ok(Run {
        tables: capture.tables()?,
        capture,
        truth: parse(&at("truth.jsonl"))?,
        driver: parse(&at("driver.jsonl"))?,
        folder,
    })
}

/// A first request, for which the injected library makes its first events.
fn warm_up(port: &str, number: usize) -> Result<()> {
    let output = Command::new(standin::built("standin-server", "standin-server")?)
        .args(["load", "--port", port, "--requests", "2", "--concurrency", "1"])
        .args(["--id-prefix", &format!("warm{number}"), "--output-tokens", "5-10"])
        .output()?;
    ensure!(output.status.success(), "warm-up: {}", faults::stderr(&output));
    Ok(())
}

pub(crate) fn holds(file: &Path, needle: &[u8]) -> bool {
    fs::read(file).is_ok_and(|bytes| bytes.windows(needle.len()).any(|window| window == needle))
}

/// Ends the server; the recorder ends with its target.
fn stop(recorder: &mut Child, port: &str) -> Result<()> {
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}"))?;
    std::io::Write::write_all(
        &mut stream,
        b"POST /shutdown HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    )?;
    let status = faults::wait(recorder)?;
    ensure!(status.success(), "the recorder ended with {status}");
    Ok(())
}

fn parse<T: for<'a> Deserialize<'a>>(file: &Path) -> Result<Vec<T>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

impl Run {
    /// The folder of the capture.
    pub(crate) fn folder(&self) -> std::path::PathBuf {
        self.folder.path().join("capture")
    }

    /// Names of the requests, by key.
    pub(crate) fn ids(&self) -> HashMap<u64, String> {
        let requests = self.truth.iter().filter_map(|line| match line {
            Truth::Request { key, id, .. } => Some((*key, id.clone())),
            _ => None,
        });
        requests.collect()
    }

    /// (key, index) → (time, marked).
    pub(crate) fn true_tokens(&self) -> BTreeMap<TokenKey, (u64, bool)> {
        self.truth
            .iter()
            .filter_map(|line| match *line {
                Truth::Token { key, index, stamp_ns, marked } => Some(((key, index), (stamp_ns, marked))),
                _ => None,
            })
            .collect()
    }

    /// (program's key, index) → (time, latency).
    fn seen_tokens(&self) -> Result<BTreeMap<TokenKey, (u64, Option<u64>)>> {
        let keys: HashMap<u64, u64> =
            self.tables.requests.iter().map(|request| (request.id, request.program_request)).collect();
        let mut seen = BTreeMap::new();
        for token in &self.tables.tokens {
            let key = *keys.get(&token.request).context("a token of no request")?;
            let before = seen.insert((key, token.index), (token.delivered_ns, token.latency_ns));
            ensure!(before.is_none(), "token {} of {key} is there twice", token.index);
        }
        Ok(seen)
    }

    pub(crate) fn ledger(&self, name: &str) -> u64 {
        self.tables.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
    }

    /// Request ids, and every token and request, none invented.
    pub(crate) fn check_requests(&self) -> Result<()> {
        let mut requests = 0;
        for line in &self.truth {
            let Truth::Request { key, id, tenant_id, model, model_version, received_ns, output_tokens } =
                line
            else {
                continue;
            };
            requests += 1;
            let seen: Vec<_> =
                self.tables.requests.iter().filter(|request| request.program_request == *key).collect();
            ensure!(seen.len() == 1, "request {key} is there {} times", seen.len());
            ensure!(seen[0].request_id == *id, "request {key} is {id}, not {}", seen[0].request_id);
            let served = (&seen[0].tenant_id, &seen[0].model, &seen[0].model_version);
            ensure!(served == (tenant_id, model, model_version), "request {key} is for {served:?}");
            ensure!(seen[0].received_ns.abs_diff(*received_ns) < 1_000, "request {key}: received");
            ensure!(seen[0].declared_tokens == Some(*output_tokens), "request {key}: {:?}", seen[0]);
        }
        ensure!(
            requests == self.tables.requests.len(),
            "{requests} requests, not {}",
            self.tables.requests.len()
        );
        Ok(())
    }

    /// TTFT and ITL against the server's own stamps: 50 µs at p99.
    fn check_latencies(&self) -> Result<()> {
        let truth = self.true_tokens();
        let received: HashMap<u64, u64> = self
            .truth
            .iter()
            .filter_map(|line| match line {
                Truth::Request { key, received_ns, .. } => Some((*key, *received_ns)),
                _ => None,
            })
            .collect();
        let mut ttft = Vec::new();
        let mut itl = Vec::new();
        for ((key, index), (_, latency)) in self.seen_tokens()? {
            let (stamp, _) =
                *truth.get(&(key, index)).with_context(|| format!("token {index} of {key} is invented"))?;
            let origin = if index == 0 { received[&key] } else { truth[&(key, index - 1)].0 };
            let Some(latency) = latency else { continue };
            let error = latency.abs_diff(stamp - origin);
            if index == 0 { ttft.push(error) } else { itl.push(error) }
        }
        report("ttft error", &mut ttft);
        report("itl error", &mut itl);
        ensure!(p99(&mut ttft) <= 50_000 && p99(&mut itl) <= 50_000, "latencies differ from the truth");
        Ok(())
    }

    /// gpu_span against the true completion of the two events: 2 µs at p99, and always within the stated bound.
    fn check_gpu_times(&self) -> Result<()> {
        let mut events: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for line in &self.driver {
            if let Driver::Event { tid, record_ns, complete_ns } = line {
                events.entry(*tid).or_default().push((*record_ns, *complete_ns));
            }
        }
        let (mut begins, mut ends, mut outside, mut gaps) = (Vec::new(), Vec::new(), 0, Vec::new());
        let kernels: BTreeMap<u64, (u64, u64)> = self
            .driver
            .iter()
            .filter_map(|line| match *line {
                Driver::Kernel { begin_ns, end_ns, submit_ns } => Some((submit_ns, (begin_ns, end_ns))),
                _ => None,
            })
            .collect();
        for span in self.capture.events()?.filter_map(|event| match event {
            Ok(Event::Mark(event)) => match event.mark {
                Mark::GpuSpan(span) => Some(span),
                _ => None,
            },
            _ => None,
        }) {
            let inside = |time: u64| (span.enqueue_begin_ns..=span.enqueue_end_ns).contains(&time);
            let pair: Vec<_> =
                events.get(&span.tid).into_iter().flatten().filter(|(record, _)| inside(*record)).collect();
            // A sampled step has more of them, at its layers.
            ensure!(pair.len() == 2 || span.sampled && pair.len() > 2, "{} events in a step", pair.len());
            let first = pair.iter().min().context("no event")?;
            let last = pair.iter().max().context("no event")?;
            let step = self.tables.steps.iter().find(|step| step.tid == span.tid && inside(step.begin_ns));
            let Some(gpu) = step.context("a span without its step")?.gpu else { continue };
            let errors = (gpu.begin_ns.abs_diff(first.1), gpu.end_ns.abs_diff(last.1));
            outside += usize::from(errors.0.max(errors.1) > gpu.bound_ns);
            begins.push(errors.0);
            ends.push(errors.1);
            let busy: u64 = kernels
                .range(span.enqueue_begin_ns..=span.enqueue_end_ns)
                .map(|(_, (begin, end))| end - begin)
                .sum();
            gaps.push(gpu.span_ns.saturating_sub(busy));
        }
        report("gpu begin error", &mut begins);
        report("gpu end error", &mut ends);
        report("gpu_span beyond kernel-busy time", &mut gaps);
        ensure!(begins.len() > 100, "{} spans only", begins.len());
        ensure!(p99(&mut begins) <= 2_000 && p99(&mut ends) <= 2_000, "GPU times differ from the truth");
        ensure!(outside == 0, "{outside} GPU times are outside of their bound");
        Ok(())
    }
}

pub(crate) fn p99(errors: &mut [u64]) -> u64 {
    errors.sort_unstable();
    errors.get(errors.len() * 99 / 100).copied().unwrap_or(0)
}

/// What was measured, for whoever runs this.
pub(crate) fn report(name: &str, errors: &mut [u64]) {
    errors.sort_unstable();
    let at = |share: usize| errors.get(errors.len() * share / 100).or(errors.last()).copied().unwrap_or(0);
    println!("  {name}: n={} p50 {} ns, p99 {} ns, max {} ns", errors.len(), at(50), at(99), at(100));
}

const LOAD: &[&str] = &["--requests", "150", "--concurrency", "20"];

fn every_token_and_step() -> Result<()> {
    let run = run(
        &[
            "--stall",
            "gpu:every:60",
            "--stall",
            "lock:every:70",
            "--stall",
            "cpu:every:80",
            "--step-us",
            "3000",
        ],
        LOAD,
        &[],
    )?;
    ensure!(run.tables.meta.simulated, "the capture does not say that the GPU is simulated");
    run.check_requests()?;
    let truth: BTreeSet<_> = run.true_tokens().into_keys().collect();
    let seen: BTreeSet<_> = run.seen_tokens()?.into_keys().collect();
    ensure!(truth == seen, "{} tokens, not {}", seen.len(), truth.len());
    run.check_latencies()?;
    run.check_gpu_times()?;
    check_writes(&run)?;
    let true_steps = run.truth.iter().filter(|line| matches!(line, Truth::Step { .. })).count();
    ensure!(run.tables.steps.len() == true_steps, "{} steps of {true_steps}", run.tables.steps.len());
    for name in ["step_without_batch", "token_without_step", "token_not_delivered", "unknown_request"] {
        ensure!(run.ledger(name) == 0, "{name}: {}", run.ledger(name));
    }
    check_batches(&run)?;
    check_stalls(&run)
}

/// Each token is on the iteration whose batch generated it; each step has its true slots and times.
pub(crate) fn check_batches(run: &Run) -> Result<()> {
    let iterations: HashMap<u64, u64> =
        run.tables.iterations.iter().map(|iteration| (iteration.id, iteration.batch_id)).collect();
    let keys: HashMap<u64, u64> =
        run.tables.requests.iter().map(|request| (request.id, request.program_request)).collect();
    let mut generated = HashMap::new();
    for line in &run.truth {
        let Truth::Step { batch_id, rank, tid, enqueue_begin_ns, enqueue_end_ns, slots, no_token, .. } = line
        else {
            continue;
        };
        let step =
            run.tables.steps.iter().find(|step| step.batch_id == Some(*batch_id) && step.rank == *rank);
        let step = step.with_context(|| format!("batch {batch_id} has no step of rank {rank}"))?;
        ensure!(step.tid == *tid, "thread of batch {batch_id}");
        ensure!(
            *enqueue_begin_ns <= step.begin_ns && step.end_ns <= *enqueue_end_ns,
            "batch {batch_id} is outside of its call"
        );
        let seen: Vec<_> =
            step.slots.iter().map(|slot| (slot.request, slot.generation_step, slot.phase)).collect();
        ensure!(seen == *slots, "slots of batch {batch_id}: {seen:?}, not {slots:?}");
        for (key, index, _) in slots {
            if !no_token.contains(key) {
                generated.insert((*key, *index), *batch_id);
            }
        }
    }
    for token in &run.tables.tokens {
        let key = (keys[&token.request], token.index);
        let iteration = token.iteration.with_context(|| format!("token {key:?} has no iteration"))?;
        ensure!(
            generated.get(&key) == iterations.get(&iteration),
            "token {key:?} is on iteration {iteration}"
        );
    }
    Ok(())
}

/// Every marked token is in a write of its request's response, right after its mark.
fn check_writes(run: &Run) -> Result<()> {
    for request in &run.tables.requests {
        let (arrived, read) =
            request.arrived_ns.zip(request.read_ns).with_context(|| format!("no exchange of {request:?}"))?;
        ensure!(arrived <= read && read <= request.received_ns, "{request:?}");
    }
    let mut apart = Vec::new();
    for token in &run.tables.tokens {
        let written_ns = token.written_ns.with_context(|| format!("no write of {token:?}"))?;
        apart.push(written_ns.checked_sub(token.delivered_ns).context("written before it was marked")?);
    }
    report("mark → write", &mut apart);
    for name in ["exchange_without_request", "mark_without_write", "write_without_mark"] {
        ensure!(run.ledger(name) == 0, "{name}: {}", run.ledger(name));
    }
    Ok(())
}

/// The tokens that a stall hit are the slowest ones.
fn check_stalls(run: &Run) -> Result<()> {
    let mut causes: BTreeMap<&str, usize> = BTreeMap::new();
    let mut stalled = BTreeSet::new();
    for line in &run.truth {
        if let Truth::Stall { cause, batch_id: Some(batch_id), .. } = line {
            *causes.entry(cause).or_default() += 1;
            stalled.insert(*batch_id);
        }
    }
    println!("  stalls: {causes:?}");
    ensure!(causes.len() == 3, "the server stalled only by {causes:?}");
    let iterations: HashMap<u64, u64> =
        run.tables.iterations.iter().map(|iteration| (iteration.id, iteration.batch_id)).collect();
    let mut gaps: Vec<(u64, bool)> = run
        .tables
        .tokens
        .iter()
        .filter(|token| token.index > 0)
        .filter_map(|token| Some((token.latency_ns?, stalled.contains(iterations.get(&token.iteration?)?))))
        .collect();
    gaps.sort_unstable_by(|one, other| other.cmp(one));
    let hit = gaps.iter().filter(|(_, stalled)| *stalled).count();
    let among_slowest = gaps.iter().take(hit).filter(|(_, stalled)| *stalled).count();
    println!("  {among_slowest} of the {hit} slowest gaps are tokens of stalled steps");
    ensure!(hit > 50 && among_slowest * 10 >= hit * 9, "the stalled tokens are not the slowest");
    Ok(())
}

/// Two steps in each iteration, on two threads.
fn two_ranks() -> Result<()> {
    let run = run(&["--ranks", "2", "--step-us", "3000"], &["--requests", "60", "--concurrency", "16"], &[])?;
    run.check_requests()?;
    run.check_gpu_times()?;
    check_batches(&run)?;
    let pairs = run.tables.iterations.iter().filter(|iteration| iteration.steps == 2).count();
    ensure!(pairs == run.tables.iterations.len() && pairs > 50, "{pairs} of {}", run.tables.iterations.len());
    Ok(())
}

/// 64 streams of mixed tenants: every token is on the right request, tenant and step.
fn mixed_tenants() -> Result<()> {
    let run = run(
        &["--max-batch", "64", "--step-us", "3000"],
        &["--requests", "256", "--concurrency", "64", "--tenants", "5", "--model-versions", "3"],
        &["--no-inject"],
    )?;
    run.check_requests()?;
    check_batches(&run)?;
    let tenant_of = |key: u64| {
        run.truth.iter().find_map(|line| match line {
            Truth::Request { key: its, tenant_id, .. } if *its == key => Some(tenant_id.clone()),
            _ => None,
        })
    };
    // Tokens by tenant, as the server delivered them and as the capture has them.
    let mut truth: BTreeMap<String, usize> = BTreeMap::new();
    for (key, _) in run.true_tokens().into_keys() {
        *truth.entry(tenant_of(key).context("a token of no request")?).or_default() += 1;
    }
    let tenants: HashMap<u64, &String> =
        run.tables.requests.iter().map(|request| (request.id, &request.tenant_id)).collect();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for token in &run.tables.tokens {
        *seen.entry(tenants[&token.request].clone()).or_default() += 1;
    }
    println!("  tokens by tenant: {seen:?}");
    ensure!(seen == truth && seen.len() == 5, "tokens by tenant: {seen:?}, not {truth:?}");
    // The batches were shared, or the tenants were not mixed.
    let keys: HashMap<u64, &String> =
        run.tables.requests.iter().map(|request| (request.program_request, &request.tenant_id)).collect();
    let mixed =
        run.tables.steps.iter().filter(|step| {
            step.slots.iter().map(|slot| keys[&slot.request]).collect::<BTreeSet<_>>().len() == 5
        });
    let mixed = mixed.count();
    ensure!(mixed * 2 > run.tables.steps.len(), "{mixed} of {} steps", run.tables.steps.len());
    Ok(())
}

/// Marks that were not made are missed, each kind by its own name, and nothing else is.
fn withheld_marks() -> Result<()> {
    let run = run(
        &["--withhold-tokens", "20", "--withhold-batches", "20", "--step-us", "3000"],
        LOAD,
        &["--no-inject"],
    )?;
    run.check_requests()?;
    let tokens = run.true_tokens();
    let withheld_tokens = tokens.values().filter(|(_, marked)| !marked).count();
    let marked: BTreeSet<_> = tokens.iter().filter(|(_, (_, marked))| *marked).map(|(key, _)| *key).collect();
    let seen: BTreeSet<_> = run.seen_tokens()?.into_keys().collect();
    ensure!(marked == seen, "{} tokens were seen, {} were marked", seen.len(), marked.len());
    let (mut withheld_batches, mut homeless) = (0, 0);
    for line in &run.truth {
        if let Truth::Step { marked: false, slots, no_token, .. } = line {
            withheld_batches += 1;
            homeless += slots
                .iter()
                .filter(|(key, index, _)| !no_token.contains(key) && marked.contains(&(*key, *index)))
                .count();
        }
    }
    println!(
        "  withheld: {withheld_tokens} tokens, {withheld_batches} batches, {homeless} tokens without a step"
    );
    ensure!(withheld_tokens > 100 && withheld_batches > 20, "too little was withheld");
    for (name, expected) in [
        ("token_not_delivered", withheld_tokens),
        ("step_without_batch", withheld_batches),
        ("token_without_step", homeless),
        ("batch_without_step", 0),
        ("unknown_request", 0),
        // What marks do not tell of, the sockets do.
        ("write_without_mark", withheld_tokens),
        ("mark_without_write", 0),
        ("exchange_without_request", 0),
    ] {
        ensure!(run.ledger(name) == expected as u64, "{name}: {}, not {expected}", run.ledger(name));
    }
    Ok(())
}

/// Without the injected library there are no GPU times, and the host's view is there.
fn host_observed() -> Result<()> {
    let run = run(&["--step-us", "3000"], &["--requests", "40", "--concurrency", "10"], &["--no-inject"])?;
    run.check_requests()?;
    run.check_latencies()?;
    ensure!(run.tables.steps.iter().all(|step| step.gpu.is_none()), "GPU times out of nothing");
    let observed = run.tables.steps.iter().filter(|step| step.observed_end_ns.is_some()).count();
    ensure!(observed == run.tables.steps.len(), "{observed} of {} were observed", run.tables.steps.len());
    Ok(())
}

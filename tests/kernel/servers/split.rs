//! An HTTP server and its engines in two processes, over ZeroMQ: each token is joined to the step of the other process that
//! made it, though that one runs two models, and a third process runs more steps than both.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::Event,
    probe::{Options, Session, process},
    timeline::rows::{Join, Step},
};

use super::{Server, clients, folder, free_port, joined, post, sources, start};
use crate::fixture::calls_only;

const CONNECTIONS: usize = 12;
const REQUESTS: usize = 5;

/// How the processes reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    Tcp,
    Unix,
}

/// Thread and number of the step that made a token, as its text says; by request and index.
type Truth = BTreeMap<(String, u32), (u32, usize)>;

pub(super) fn engines_elsewhere(hop: Hop) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    standin::stage(scratch.path())?;
    let addresses = match hop {
        Hop::Unix => ["a", "b"].map(|name| format!("ipc://{}", scratch.path().join(name).display())),
        Hop::Tcp => [free_port()?, free_port()?].map(|port| format!("tcp://127.0.0.1:{port}")),
    };
    let engine = run_engine(scratch.path(), &[&addresses[0], &addresses[1]])?;
    let busy = run_engine(scratch.path(), &["busy"])?;
    let port = free_port()?;
    let mut command = Command::new(folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/uvicorn"));
    command.args(["split_app:app", "--log-level", "warning", "--port", &port.to_string()]);
    command.env("SPLIT_A", &addresses[0]).env("SPLIT_B", &addresses[1]).current_dir(sources());
    let front = start(&mut command, port)?;

    let options = Options { sockets: true, sched: true, ..calls_only() };
    let mut session = Session::start(options, Profiles::builtin())?;
    for server in [&front, &engine, &busy] {
        session.add(&process::find(server.id())?)?;
    }
    let client = std::thread::spawn(move || load(port));
    let mut events = Vec::new();
    while !client.is_finished() {
        session.drain(&mut events);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let truth = client.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    let _stopped = session.stop(&mut events);
    // Who woke whom is all that there is to tell.
    let untold = joined(events.iter().filter(|event| !matches!(event, Event::Sched(_))));
    ensure!(untold.tokens.iter().all(|token| token.step.is_none()), "steps were guessed");
    let rows = joined(&events);

    let mut steps: BTreeMap<u32, Vec<&Step>> = BTreeMap::new();
    for step in rows.steps.iter().filter(|step| step.process.tgid == engine.id()) {
        steps.entry(step.tid).or_default().push(step);
    }
    let names: BTreeMap<u64, &str> =
        rows.requests.iter().map(|request| (request.id, request.request_id.as_str())).collect();
    let (mut right, mut counted, mut counted_right, mut seen) = (0, 0, 0, 0);
    for token in &rows.tokens {
        let name = (*names.get(&token.request).context("a token without a request")?).to_owned();
        let Some((tid, number)) = truth.get(&(name, token.index)) else { continue };
        let made_by = steps.get(tid).and_then(|steps| steps.get(number - 1)).map(|step| step.id);
        ensure!(made_by.is_some(), "step {number} of thread {tid} was not seen");
        let (is_right, is_counted) = (token.step == made_by, token.join == Join::Count);
        seen += 1;
        right += usize::from(is_right);
        counted += usize::from(is_counted);
        counted_right += usize::from(is_right && is_counted);
    }
    let others = rows.steps.iter().filter(|step| step.process.tgid == busy.id()).count();
    println!(
        "  {hop:?}: {seen} tokens of {} steps of 2 models, {right} on the right step; {counted} by counting, \
         {counted_right} of them right; {others} steps of others",
        steps.values().map(Vec::len).sum::<usize>()
    );
    ensure!(steps.len() == 2 && seen == truth.len(), "{} threads, {} tokens", steps.len(), truth.len());
    ensure!(counted_right * 100 >= counted * 98, "{counted_right} of {counted} that were counted are right");
    // A short request in a loop that is behind has no rhythm, and is said to be inferred.
    ensure!(counted * 100 >= seen * 80, "{counted} of {seen} were counted");
    Ok(())
}

/// The engines' process, with its steps about to begin.
fn run_engine(libraries: &Path, arguments: &[&str]) -> Result<Server> {
    let python = folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/python");
    let mut command = Command::new(python);
    command.arg(sources().join("split_engine.py")).args(arguments).env("LD_LIBRARY_PATH", libraries);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
    ensure!(line == "ready\n", "the engine said {line:?}");
    Ok(Server(child))
}

fn load(port: u16) -> Result<Truth> {
    clients(port, CONNECTIONS, |client, stream| {
        let mut truth = Truth::new();
        for number in 0..REQUESTS {
            let (name, tokens) = (format!("r{client}-{number}"), 8 + client * 3 + number * 5);
            let model = if (client + number) % 2 == 0 { "a" } else { "b" };
            let body = format!("{{\"model\":\"{model}\",\"max_tokens\":{tokens}}}");
            let made_by = made_by(&post(stream, &name, &body)?)?;
            ensure!(made_by.len() == tokens, "{name}: {} tokens, not {tokens}", made_by.len());
            truth.extend((0..).zip(made_by).map(|(index, made_by)| ((name.clone(), index), made_by)));
        }
        Ok(truth)
    })
}

/// Thread and number of the step of each token of an answer.
fn made_by(answer: &str) -> Result<Vec<(u32, usize)>> {
    let texts = answer.split("\"text\":\"").skip(1).filter_map(|rest| rest.split_once('"'));
    let made_by = texts.map(|(text, _)| {
        let (tid, step) = text.split_once(':').context("no step in a token")?;
        Ok((tid.parse()?, step.parse()?))
    });
    made_by.collect()
}

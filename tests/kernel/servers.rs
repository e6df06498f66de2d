//! Servers that people run, unmodified: `cargo xtask test --real-servers` brings them.

mod rust;
mod split;
mod tiers;

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::{Event, HttpFinish},
    probe::{Options, Session, process},
    timeline::{Config, NoClock, Output, Timeline, tables::LedgerRow},
};
use tracer_abi::mark::FINISH_STOP;

use crate::{
    Test, faults,
    fixture::calls_only,
    stacks::{Seen, record, samples_only},
};
use tiers::Hop;

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("servers::uvicorn_asyncio", || every_token(uvicorn(&["--loop", "asyncio", "--http", "h11"])?)),
    ("servers::uvicorn_uvloop", || every_token(uvicorn(&["--loop", "uvloop", "--http", "httptools"])?)),
    ("servers::uvicorn_workers", || every_token(uvicorn(&["--loop", "asyncio", "--workers", "2"])?)),
    ("servers::node", || every_token(node()?)),
    ("servers::node_functions", node_functions),
    ("servers::java_functions", java_functions),
    ("servers::axum", axum),
    ("servers::fastapi_marks", fastapi_marks),
    ("servers::endpoint_in_the_flame_graph", endpoint_in_the_flame_graph),
    ("servers::nginx_in_front", || tiers::both(Hop::Tcp)),
    ("servers::nginx_in_front_by_unix_sockets", || tiers::both(Hop::Unix)),
    ("servers::engines_in_another_process", || split::engines_elsewhere(split::Hop::Tcp)),
    ("servers::engines_in_another_process_by_unix_sockets", || split::engines_elsewhere(split::Hop::Unix)),
];

/// Where `cargo xtask test --real-servers` has installed them.
pub(crate) fn folder() -> Option<PathBuf> {
    std::env::var_os("TRACER_REAL_SERVERS").map(PathBuf::from)
}

const CONNECTIONS: usize = 8;
const REQUESTS: usize = 6;

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/servers")
}

pub(crate) fn uvicorn(arguments: &[&str]) -> Result<(Server, u16)> {
    let port = free_port()?;
    let mut command = uvicorn_command()?;
    command.args(["--port", &port.to_string()]).args(arguments);
    Ok((start(&mut command, port)?, port))
}

fn uvicorn_command() -> Result<Command> {
    let mut command = Command::new(folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/uvicorn"));
    command.args(["app:app", "--log-level", "warning"]).current_dir(sources());
    Ok(command)
}

pub(crate) fn node() -> Result<(Server, u16)> {
    let port = free_port()?;
    let server = start(Command::new("node").arg(sources().join("app.js")).arg(port.to_string()), port)?;
    Ok((server, port))
}

pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A server, with its workers. Dropping it ends them.
pub(crate) struct Server(Child);

impl Server {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for found in process::tree(self.0.id()).unwrap_or_default() {
            // SAFETY: a plain system call.
            unsafe { libc::kill(found.id.tgid.cast_signed(), libc::SIGKILL) };
        }
        let _gone = self.0.wait();
    }
}

pub(crate) fn start(command: &mut Command, port: u16) -> Result<Server> {
    let mut server = Server(command.stdin(Stdio::null()).spawn().context("starting the server")?);
    let patience = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(server.0.try_wait()?.is_none(), "the server ended");
        ensure!(Instant::now() < patience, "the server does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    // A worker that comes later would be missed at its first connection.
    std::thread::sleep(Duration::from_millis(500));
    Ok(server)
}

/// Tokens per request id, as this client counts them.
fn load(port: u16) -> Result<BTreeMap<String, u32>> {
    clients(port, CONNECTIONS, |client, stream| {
        let ask = |(number, stream): (usize, &mut TcpStream)| {
            let (name, tokens) = (format!("r{client}-{number}"), 5 + client * 3 + number);
            let seen =
                post(stream, &name, &format!("{{\"max_tokens\":{tokens}}}"))?.matches("\"text\":").count();
            ensure!(seen == tokens, "{name}: {seen} tokens, not {tokens}");
            Ok((name, u32::try_from(seen)?))
        };
        (0..REQUESTS).map(|number| ask((number, &mut *stream))).collect()
    })
}

/// What so many clients say at the same time, each of its number and on a connection of its own.
fn clients<T: Default + Extend<I> + IntoIterator<Item = I> + Send + 'static, I>(
    port: u16,
    count: usize,
    client: impl Fn(usize, &mut TcpStream) -> Result<T> + Copy + Send + 'static,
) -> Result<T> {
    let clients: Vec<_> = (0..count)
        .map(|number| {
            std::thread::spawn(move || client(number, &mut TcpStream::connect(("127.0.0.1", port))?))
        })
        .collect();
    let mut all = T::default();
    for client in clients {
        all.extend(client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
    }
    Ok(all)
}

/// The answer to one request, on a connection that stays open.
fn post(stream: &mut TcpStream, name: &str, body: &str) -> Result<String> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: {name}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes())?;
    let mut answer = Vec::new();
    let mut buffer = [0; 8192];
    while !answer.ends_with(b"\r\n0\r\n\r\n") {
        let count = stream.read(&mut buffer)?;
        ensure!(count > 0, "the server closed the connection");
        answer.extend_from_slice(&buffer[..count]);
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The rows that the timeline makes of events.
fn joined<'a>(events: impl IntoIterator<Item = &'a Event>) -> Output {
    let mut timeline = Timeline::new(Config::default(), NoClock);
    events.into_iter().for_each(|event| timeline.feed(event));
    timeline.finish();
    timeline.drain()
}

/// Functions that Node compiles while they run, by the perf map that it writes.
fn node_functions() -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/stacks.js");
    let folder = tempfile::tempdir()?;
    let mut program = Command::new("node");
    // It writes another log where it is.
    program.current_dir(folder.path());
    // Compiled at once, and nothing put into its caller.
    program.args(["--perf-basic-prof", "--always-sparkplug", "--max-inlined-bytecode-size=0"]);
    program.arg(&script).args(["deep", "2000"]);
    let recorded = record(&mut program, samples_only(499), Profiles::builtin())?;
    std::fs::remove_file(format!("/tmp/perf-{}.map", recorded.pid))?;
    let chain = [("work", 22, 14), ("call", 17, 7), ("middle", 12, 16), ("leaf", 4, 14)]
        .map(|(name, line, column)| format!("{name} {}:{line}:{column}", script.display()));
    // Behind `JS:` is how it was compiled.
    let function =
        |name: &str| Some(name.strip_prefix("JS:")?.trim_start_matches(['~', '^', '*']).to_owned());
    let in_leaf = |seen: &Seen| seen.names.last().and_then(|leaf| function(leaf)).as_ref() == chain.last();
    let callers = |seen: &Seen| {
        let from = seen.names.len().saturating_sub(chain.len());
        seen.names[from..].iter().map(|name| function(name)).collect::<Vec<_>>()
    };
    let all = recorded.samples(in_leaf);
    let whole = recorded.samples(|seen| in_leaf(seen) && callers(seen) == chain.clone().map(Some));
    println!("  {all} samples in `leaf`, {whole} of them with all of its callers");
    ensure!(all > 100 && whole as f64 > 0.9 * all as f64, "{all} samples in `leaf`, {whole} of them whole");
    // In the place of one that was not compiled yet is the interpreter.
    let right = |seen: &Seen| {
        let mut pairs = callers(seen).into_iter().zip(&chain);
        pairs.all(|(name, one)| name.is_none_or(|name| name == *one))
    };
    // In the first instructions of a function rbp is still its caller's, who is left out then: see `docs/stacks.md`.
    let is_wrong = |seen: &Seen| seen.cut.is_none() && in_leaf(seen) && !right(seen);
    let wrong = recorded.samples(is_wrong);
    let one = recorded.stacks.iter().find(|seen| is_wrong(seen));
    ensure!(wrong as f64 <= 0.01 * all as f64, "{wrong} of {all}: {one:#?}");
    Ok(())
}

/// Functions that Java compiles, by the perf map that it writes when asked.
fn java_functions() -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/fixtures/Stacks.java");
    let mut program = Command::new("java");
    // Frame pointers are what stacks go by in generated code; nothing is put into its caller.
    program.args(["-XX:+PreserveFramePointer", "-XX:CompileCommand=quiet"]);
    program.args(["-XX:CompileCommand=dontinline,Stacks*::*"]).arg(&source).args(["deep", "2000"]);
    let recorded = record(&mut program, samples_only(499), Profiles::builtin())?;
    std::fs::remove_file(format!("/tmp/perf-{}.map", recorded.pid))?;
    let chain =
        ["int Stacks$Outer.call(int)", "int Stacks.middle(int)", "int Stacks.leaf(int)"].map(str::to_owned);
    let in_leaf = |seen: &Seen| seen.names.last() == chain.last();
    // The loop that calls them is compiled while it runs: until then it is the interpreter's.
    let callers = |seen: &Seen| match seen.names.strip_suffix(&chain).and_then(<[_]>::last) {
        Some(caller) => ["int Stacks.work(long)", "Interpreter"].contains(&caller.as_str()),
        None => false,
    };
    let all = recorded.samples(in_leaf);
    let whole = recorded.samples(callers);
    let to_start = recorded.samples(|seen| in_leaf(seen) && seen.is_whole());
    println!(
        "  {all} samples in `leaf`, {whole} of them with all of its callers, {to_start} to the thread's start"
    );
    let one = recorded.stacks.iter().find(|seen| in_leaf(seen));
    ensure!(
        all > 100 && whole as f64 > 0.98 * all as f64,
        "{all} samples in `leaf`, {whole} whole: {one:#?}"
    );
    ensure!(to_start as f64 > 0.98 * all as f64, "{to_start} of {all} reach the thread's start: {one:#?}");
    Ok(())
}

/// The package's middleware in a real server: every request and token by marks, of the right tenant.
fn fastapi_marks() -> Result<()> {
    let port = free_port()?;
    let mut command = Command::new(folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/uvicorn"));
    command.args(["marks_app:app", "--log-level", "warning", "--port", &port.to_string()]);
    let server = start(command.current_dir(sources()), port)?;
    let (events, ledger, expected) = trace(&process::tree(server.id())?, move || load(port))?;
    let rows = joined(&events);
    let seen: BTreeMap<String, u32> =
        rows.requests.iter().map(|request| (request.request_id.clone(), request.tokens)).collect();
    ensure!(seen == expected && rows.requests.len() == expected.len(), "seen {seen:?}, not {expected:?}");
    for request in &rows.requests {
        ensure!(request.declared_tokens == Some(request.tokens), "{request:?}");
        ensure!(request.finish_reason == FINISH_STOP && request.trace_id.is_some(), "{request:?}");
        let served = (request.tenant_id.as_str(), request.model.as_str(), request.prompt_tokens);
        let client = request.request_id.split('-').next().unwrap_or_default();
        ensure!(served == (client, "app", Some(request.tokens)), "{request:?}");
    }
    let losses: Vec<_> = ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(losses.is_empty(), "{losses:?}");
    println!("  {} requests, {} tokens", seen.len(), seen.values().sum::<u32>());
    Ok(())
}

/// The flame graph of a server shows the endpoint between the functions that lead to it and those that it calls.
fn endpoint_in_the_flame_graph() -> Result<()> {
    let port = free_port()?;
    let mut command = Command::new(folder().context("no TRACER_REAL_SERVERS")?.join("venv/bin/uvicorn"));
    command.args(["app:app", "--log-level", "warning", "--loop", "asyncio", "--port", &port.to_string()]);
    let server = start(command.current_dir(sources()), port)?;
    let output = tempfile::tempdir()?;
    let (capture, folded) = (output.path().join("capture"), output.path().join("cpu.folded"));
    let mut recorder = faults::tracer()?
        .args([
            "record",
            "--quiet",
            "--sample-hz",
            "997",
            "--duration",
            "6s",
            "--pid",
            &server.0.id().to_string(),
            "-o",
        ])
        .arg(&capture)
        .stdout(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_secs(1));
    while recorder.try_wait()?.is_none() {
        load(port)?;
    }
    let mut draw = faults::tracer()?;
    draw.arg("flamegraph").arg(&capture).arg("-o").arg(output.path().join("cpu.svg"));
    let drawn = draw.arg("--folded").arg(&folded).output()?;
    ensure!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let folded = std::fs::read_to_string(&folded)?;
    let lines = folded.lines().filter_map(|line| line.rsplit_once(' '));
    let stacks: Vec<(Vec<&str>, u64)> =
        lines.filter_map(|(stack, count)| Some((stack.split(';').collect(), count.parse().ok()?))).collect();
    let all: u64 = stacks.iter().map(|(_, count)| count).sum();
    let share = |such: &dyn Fn(&[&str]) -> bool| {
        let of: u64 = stacks.iter().filter(|(stack, _)| such(stack)).map(|(_, count)| count).sum();
        of as f64 / all as f64
    };
    let position = |stack: &[&str], name: &str| stack.iter().position(|frame| *frame == name);
    // The event loop calls the framework, which calls the endpoint.
    let endpoint = share(&|stack| {
        let chain = ["BaseEventLoop._run_once (base_events.py)", "completions (app.py)"];
        let [Some(event_loop), Some(endpoint)] = chain.map(|name| position(stack, name)) else {
            return false;
        };
        event_loop + 3 < endpoint
    });
    let tokens = share(&|stack| stack.iter().any(|frame| frame.ends_with("events (app.py)")));
    let cut = share(&|stack| stack.iter().any(|frame| frame.starts_with("[truncated")));
    let interpreter = share(&|stack| position(stack, "_PyEval_EvalFrameDefault").is_some());
    println!(
        "  endpoint {:.1} %, its events {:.1} %, cut {:.1} %, interpreter without names {:.1} %",
        100.0 * endpoint,
        100.0 * tokens,
        100.0 * cut,
        100.0 * interpreter
    );
    ensure!(endpoint > 0.0 && tokens > 0.0, "no endpoint in {} stacks", stacks.len());
    // The first samples may come before the tables do, on a machine that is busy.
    let late = ["[truncated: table not ready]", "[truncated: code that was not known]"];
    let is_late = |stack: &[&str]| stack.iter().any(|frame| late.contains(frame));
    ensure!(share(&is_late) < 0.5, "tables came late");
    let wrong = |stack: &[&str]| {
        let is_wrong = |frame: &&str| frame.starts_with("[truncated") || *frame == "_PyEval_EvalFrameDefault";
        !is_late(stack) && stack.iter().any(is_wrong)
    };
    let some: Vec<_> = stacks.iter().filter(|(stack, _)| wrong(stack)).take(2).collect();
    ensure!(share(&wrong) < 0.01, "{some:?}");
    Ok(())
}

/// Every request under its id, with every token, whichever way the server reads and writes.
fn every_token((server, port): (Server, u16)) -> Result<()> {
    every_token_of(&process::tree(server.id())?, port)
}

fn axum() -> Result<()> {
    let (_runtime, port) = rust::serve()?;
    every_token_of(&[process::find(std::process::id())?], port)
}

/// Traces processes while a client does something. Returns the events, the ledger, and what the client says.
fn trace<T: Send + 'static>(
    processes: &[process::Found],
    client: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<(Vec<Event>, Vec<LedgerRow>, T)> {
    let mut session = Session::start(Options { sockets: true, ..calls_only() }, Profiles::builtin())?;
    for found in processes {
        session.add(found)?;
    }
    let client = std::thread::spawn(client);
    let mut events = Vec::new();
    while !client.is_finished() {
        session.drain(&mut events);
        std::thread::sleep(Duration::from_millis(2));
    }
    let said = client.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    let stopped = session.stop(&mut events);
    Ok((events, stopped.ledger, said))
}

fn every_token_of(processes: &[process::Found], port: u16) -> Result<()> {
    let (events, ledger, expected) = trace(processes, move || load(port))?;
    let names: BTreeMap<u64, &str> = events
        .iter()
        .filter_map(|event| match event {
            Event::HttpBegin(begin) if begin.method == "POST" => {
                Some((begin.exchange, begin.request_id.as_str()))
            }
            _ => None,
        })
        .collect();
    let mut seen = BTreeMap::new();
    for event in &events {
        if let Event::HttpEnd(end) = event
            && let Some(name) = names.get(&end.exchange)
        {
            ensure!(end.finish == HttpFinish::Done && end.status == 200, "{name}: {end:?}");
            ensure!(seen.insert((*name).to_owned(), end.tokens).is_none(), "{name} ended twice");
        }
    }
    ensure!(seen == expected, "seen {seen:?}, not {expected:?}");
    let losses: Vec<_> = ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(losses.is_empty(), "{losses:?}");
    let held = events.iter().filter(|event| matches!(event, Event::HttpWire(_))).count();
    println!("  {} requests, {} tokens, {held} writes held", seen.len(), seen.values().sum::<u32>());
    Ok(())
}

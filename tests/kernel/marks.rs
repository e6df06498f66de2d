//! Marks of a C program, as we and as bpftrace see them.

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tracer::{
    event::{Event, Mark, ProcessId},
    probe::{Session, process},
};

use crate::{
    Test,
    fixture::{Built, Running, calls_only, numbers, trace},
};

pub(crate) const TESTS: &[(&str, Test)] =
    &[("marks::from_c", from_c), ("marks::hammer", hammer), ("marks::bpftrace", bpftrace)];

fn from_c() -> Result<()> {
    let trace = trace(&["marks"], calls_only())?;
    trace.lossless()?;
    ensure!(trace.said == "1", "the program thinks that nobody listens");
    let marks: Vec<&Mark> = trace.marks().into_iter().map(|event| &event.mark).collect();
    let Some(Mark::RequestBegin(begin)) = marks.first() else { bail!("{marks:?}") };
    ensure!((begin.request, begin.prompt_tokens) == (11, Some(5)), "{begin:?}");
    ensure!(begin.request_id.starts_with("fixture-") && begin.request_id.ends_with("-id"), "{begin:?}");
    ensure!(!begin.request_id.chars().any(char::is_control), "control characters came through: {begin:?}");
    ensure!(begin.tenant_id == "tenant" && begin.trace_id.is_none(), "{begin:?}");
    let served = [&begin.model, &begin.model_version, &begin.engine_hash, &begin.adapters];
    ensure!(served == ["model", "2", "e3b0c442", "legal,french"], "{begin:?}");
    ensure!(begin.kv_cache_strategy == "paged", "{begin:?}");
    let slots: Vec<_> = marks
        .iter()
        .filter_map(|mark| if let Mark::Batch(batch) = mark { Some(batch) } else { None })
        .flat_map(|batch| {
            let first = batch.first_slot;
            batch.slots.iter().zip(first..).map(|(slot, index)| (index, slot.sample_offset))
        })
        .collect();
    ensure!(
        slots.len() == 300 && slots.iter().all(|(index, offset)| index == offset),
        "{} slots",
        slots.len()
    );
    let tokens: Vec<u32> = marks
        .iter()
        .filter_map(|mark| if let Mark::Token(token) = mark { Some(token.index) } else { None })
        .collect();
    ensure!(tokens == (0..100).collect::<Vec<_>>(), "{tokens:?}");
    ensure!(matches!(marks.last(), Some(Mark::RequestEnd(end)) if end.output_tokens == 100), "{marks:?}");
    Ok(())
}

/// What marks say of one request: its tokens, each index once and without a gap, and what its end declares.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) begins: u32,
    pub(crate) tokens: u32,
    pub(crate) declared: Option<u32>,
}

impl Stream {
    pub(crate) fn whole(tokens: u32) -> Self {
        Self { begins: 1, tokens, declared: Some(tokens) }
    }
}

/// By process and the program's number of a request.
pub(crate) fn streams(events: &[Event]) -> Result<BTreeMap<(ProcessId, u64), Stream>> {
    let mut streams: BTreeMap<(ProcessId, u64), Stream> = BTreeMap::new();
    let mut indexes: BTreeMap<(ProcessId, u64), Vec<u32>> = BTreeMap::new();
    for event in events {
        let Event::Mark(event) = event else { continue };
        let request = match &event.mark {
            Mark::RequestBegin(begin) => begin.request,
            Mark::RequestEnd(end) => end.request,
            Mark::Token(token) => token.request,
            _ => continue,
        };
        let key = (event.origin.process, request);
        let stream = streams.entry(key).or_default();
        match &event.mark {
            Mark::RequestBegin(_) => stream.begins += 1,
            Mark::RequestEnd(end) => stream.declared = Some(end.output_tokens),
            Mark::Token(token) => {
                stream.tokens += 1;
                indexes.entry(key).or_default().push(token.index);
            }
            _ => {}
        }
    }
    for (request, mut seen) in indexes {
        seen.sort_unstable();
        ensure!(seen.iter().copied().eq(0..seen.len() as u32), "tokens of {request:?} are lost or repeated");
    }
    Ok(streams)
}

/// A program that makes marks on its threads, then forks and says "forked", and has its children make marks when told.
/// Returns what it said at the end, and all marks.
pub(crate) fn hammered(mut running: Running) -> Result<(String, Vec<Event>)> {
    let mut session = Session::start(calls_only(), Built::get()?.profiles()?)?;
    session.add(&process::find(running.pid())?)?;
    let mut events = Vec::new();
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    ensure!(line == "forked", "the program says {line:?}");
    // Their forks have happened before this was said; one more drain acts on them.
    session.drain(&mut events);
    running.tell()?;
    let line = running.line(&mut session, &mut events)?;
    let said = line.strip_prefix("done ").with_context(|| format!("the program says {line:?}"))?.to_owned();
    let ledger = session.stop(&mut events).ledger;
    let losses: Vec<_> = ledger.iter().filter(|row| row.loss && row.count > 0).collect();
    ensure!(losses.is_empty(), "lost: {losses:?}");
    running.end()?;
    Ok((said, events))
}

/// Threads, a signal handler among them, and children: every mark comes, once.
fn hammer() -> Result<()> {
    let (said, events) = hammered(Running::start(&["hammer"])?)?;
    let [failed, interrupted] = numbers(&said)?[..] else { bail!("the fixture says {said:?}") };
    ensure!(failed == 0 && interrupted > 0, "{failed} children failed, {interrupted} interruptions");
    let mut streams = streams(&events)?;
    let by_handler = streams.iter().find(|((_, request), _)| *request == 1000).map(|(key, _)| *key);
    let by_handler = streams.remove(&by_handler.context("no mark of the signal handler")?);
    ensure!(by_handler.map(|stream| u64::from(stream.tokens)) == Some(interrupted), "of {interrupted} marks");
    println!("  {interrupted} marks by a signal handler");
    let threads = streams.values().filter(|stream| **stream == Stream::whole(3000)).count();
    let children = streams.values().filter(|stream| **stream == Stream::whole(1000)).count();
    ensure!((threads, children, streams.len()) == (8, 4, 12), "{streams:?}");
    Ok(())
}

/// bpftrace, on the marks of a process. Dropping it ends it.
pub(crate) struct Bpftrace {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Bpftrace {
    /// Longest that it may take to attach, and to print.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Starts it on a program that asks by marks whether somebody is there, and waits until one is seen.
    pub(crate) fn start(pid: u32, library: &Path) -> Result<Self> {
        let probe = format!("usdt:\"{}\":tracer:mark /pid == {pid}", library.display());
        // By kind and by request; and a request's id and its length, read from the payload of its begin.
        let program = format!(
            r#"{probe} && arg2 != 5/ {{ @kinds[arg2] = count(); @requests[arg3] = count(); }}
               {probe} && arg2 == 1/ {{ @ids[str(arg0 + 72, (uint64)*(uint16*)(arg0 + 56))] = count(); }}
               {probe} && arg2 == 5/ {{ printf("there\n"); }}"#,
        );
        let mut child = Command::new("bpftrace")
            .args(["-B", "none", "-e", &program])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting bpftrace (apt-get install bpftrace)")?;
        let lines = crate::fixture::lines(child.stdout.take().context("no stdout")?);
        let mut bpftrace = Self { child, lines };
        // They are attached in their order: the last one speaks.
        while let Ok(line) = bpftrace.lines.recv_timeout(Self::PATIENCE) {
            if line == "there" {
                return Ok(bpftrace);
            }
        }
        let _gone = bpftrace.child.kill();
        let stderr = std::io::read_to_string(bpftrace.child.stderr.take().context("no stderr")?)?;
        bail!("bpftrace sees no mark: {stderr}");
    }

    /// Ends it: what it printed.
    pub(crate) fn said(self) -> Result<Vec<String>> {
        // SAFETY: a plain system call on a child that was not waited for.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGINT) };
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(Self::PATIENCE) {
                Ok(line) if line == "there" => {}
                Ok(line) => said.push(line),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(said),
                Err(mpsc::RecvTimeoutError::Timeout) => bail!("bpftrace does not end; it said {said:?}"),
            }
        }
    }
}

impl Drop for Bpftrace {
    fn drop(&mut self) {
        // Already gone in the good case.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// bpftrace sees every mark, its kind and its request, and can read its payload.
fn bpftrace() -> Result<()> {
    let mut running = Running::start(&["heard"])?;
    running.tell()?;
    let bpftrace = Bpftrace::start(running.pid(), &Built::get()?.path("libtracer_marks.so"))?;
    running.tell()?;
    let line = running.wait_line()?;
    running.end()?;
    let said = bpftrace.said()?;
    ensure!(line == "done 1", "the fixture says {line:?}; bpftrace: {said:?}");
    // Of request 11: its begin, its tokens, its end; the parts of batch 77.
    for expected in [
        "@kinds[1]: 1",
        "@kinds[2]: 1",
        "@kinds[3]: 3",
        "@kinds[4]: 100",
        "@requests[11]: 102",
        "@requests[77]: 3",
    ] {
        ensure!(said.iter().any(|line| line == expected), "no {expected:?} in {said:?}");
    }
    ensure!(
        said.iter().any(|line| line.starts_with("@ids[fixture-") && line.ends_with("-id]: 1")),
        "{said:?}"
    );
    Ok(())
}

//! The three pictures of a small capture, from its events to the SVG files.

use super::super::{flamegraph, heatmap, histogram, request};
use super::{grown, subtitle};
use crate::capture::{self, Counter, Meta, Writer};
use crate::event::mark::{Batch, RequestBegin, Token};
use crate::event::{
    Call, CallEnd, Event, Frame, Mark, MarkEvent, Origin, Point, ProcessId, Role, Sample, Sched, Stack,
    StackCut, StackId,
};
use crate::timeline::tables::{LedgerRow, Tables};
use anyhow::Result;
use clap::Parser;
use flamegraphs::Loss;
use std::path::Path;
use tracer_abi::mark::{DECODE, PREFILL, Slot};

const PROCESS: ProcessId = ProcessId { tgid: 10, start_ticks: 77 };
const ENGINE: u32 = 11;
const REQUESTS: u64 = 3;
const TOKENS: u32 = 40;

fn origin(time_ns: u64) -> Origin {
    Origin { time_ns, process: PROCESS, tid: ENGINE, cpu: 0 }
}

fn mark(time_ns: u64, mark: Mark) -> Event {
    Event::Mark(MarkEvent { origin: origin(time_ns), mark })
}

fn definitions(time_ns: u64) -> Vec<Event> {
    let point = Point {
        id: 1,
        time_ns,
        process: PROCESS,
        engine: "test".into(),
        name: "step".into(),
        role: Role::Step,
        library: String::new(),
        version: String::new(),
        build_id: Vec::new(),
        offset: 0,
        placement: "nop5".into(),
        has_return: true,
        stream_arg: None,
        simulated: true,
    };
    let stack = Stack {
        id: StackId(5),
        time_ns,
        process: PROCESS,
        kernel: Vec::new(),
        user: vec![Frame { mapping: None, code: None, offset: 0x1000 }],
        cut: Some(StackCut::FramePointers),
        frame_pointer_steps: 0,
    };
    vec![Event::Point(point), Event::Stack(stack)]
}

/// A batch of all requests, sampled once, and the tokens that it yields.
fn step(time_ns: u64, index: u32) -> Vec<Event> {
    let phase = if index == 0 { PREFILL } else { DECODE };
    let slot = |request| Slot { request, generation_step: index, tokens: 1, phase, ..Slot::default() };
    let slots: Vec<Slot> = (0..REQUESTS).map(slot).collect();
    let batch = Batch { batch_id: u64::from(index), rank: 0, slot_count: 3, first_slot: 0, slots };
    let sample = Sample {
        origin: origin(time_ns + 10),
        period_ns: 1_000_001,
        kernel_mode: false,
        stack: Some(StackId(5)),
    };
    let call = Call {
        origin: origin(time_ns + 100_000),
        point: 1,
        parent_point: None,
        depth: 0,
        begin_ns: time_ns + 1,
        end_ns: time_ns + 100_000,
        end: CallEnd::Returned,
        sp: 0,
        args: [0; 6],
        ret: 1,
        stack: None,
    };
    // Between two steps the thread sleeps 1 ms, and then waits 200 µs for a CPU; a thread of no name wakes it.
    let sleep = Sched {
        origin: origin(time_ns + 2_000_000),
        off_ns: time_ns + 800_000,
        wake_ns: Some(time_ns + 1_800_000),
        waker_tgid: 10,
        waker_tid: 99,
        prev_state: 1,
        syscall: None,
        preempted: false,
        open: false,
        stack: Some(StackId(5)),
    };
    let mut events = vec![mark(time_ns, Mark::Batch(batch)), Event::Sample(sample), Event::Call(call)];
    events.extend((0..REQUESTS).map(|request| {
        mark(
            time_ns + 200_000 + request * 1_000,
            Mark::Token(Token { request, choice: 0, index, stack: None }),
        )
    }));
    events.push(Event::Sched(sleep));
    events
}

/// Writes a capture of a server that lived in the ten seconds before now.
fn record(folder: &Path) -> Result<()> {
    let mut meta = Meta::here(vec!["tracer".into()], "pid 10".into());
    meta.started_monotonic_ns = meta.started_monotonic_ns.saturating_sub(10_000_000_000);
    let start = meta.started_monotonic_ns;
    let mut writer = Writer::create(folder, meta)?;
    let mut events = definitions(start);
    for (request, id) in (0..).zip(["req-a", "<b>&\u{1b}[31m", ""]) {
        let begin = RequestBegin { request, request_id: id.into(), ..RequestBegin::default() };
        events.push(mark(start + 1_000, Mark::RequestBegin(begin.into())));
    }
    for index in 0..TOKENS {
        events.extend(step(start + 1_000_000 + u64::from(index) * 5_000_000, index));
    }
    events.iter().try_for_each(|event| writer.write(event))?;
    let lost = LedgerRow { process: None, name: "bulk_ring_full".into(), count: 4, loss: true };
    writer.ledger(start + 2_000_000_000, &[lost])?;
    writer.close()?;
    capture::finish(folder)?;
    Ok(())
}

/// Arguments of a command as the command line would give them.
fn parse<T: clap::Args>(capture: &Path, rest: &[&str]) -> Result<T> {
    #[derive(Parser)]
    struct Alone<T: clap::Args> {
        #[command(flatten)]
        args: T,
    }
    let words = ["tracer".as_ref(), capture.as_os_str()].into_iter().chain(rest.iter().map(|s| s.as_ref()));
    Ok(Alone::<T>::try_parse_from(words)?.args)
}

#[test]
fn the_subtitle_says_what_is_missing() {
    let mut tables = Tables::default();
    tables.meta.target = "/usr/bin/server --path /a/b".to_owned();
    tables.meta.started_realtime_ns = 1_772_359_200_000_000_000;
    tables.meta.ended_ns = 20_000_000_000;
    assert_eq!(
        subtitle(&tables, &["n=3".to_owned()]),
        "2026-03-01T10:00:00.000Z · 20 s · n=3 · nothing lost · server --path /a/b"
    );
    let row = |name: &str, count, loss| LedgerRow { process: None, name: name.to_owned(), count, loss };
    tables.ledger = vec![row("a", 3, true), row("b", 0, true), row("c", 9, false)];
    assert_eq!(subtitle(&tables, &[]), "2026-03-01T10:00:00.000Z · 20 s · lost: 3 a · server --path /a/b");
}

#[test]
fn pictures_of_a_capture() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    record(&capture)?;
    let draw = |name: &str, run: &dyn Fn(&str) -> Result<std::process::ExitCode>| -> Result<String> {
        let file = folder.path().join(name);
        run(&file.to_string_lossy())?;
        Ok(std::fs::read_to_string(file)?)
    };

    let flames = draw("f.svg", &|file| flamegraph::run(&parse(&capture, &["-o", file])?))?;
    for part in
        ["simulated GPU", "req-a (13,333 µs on CPU, 33.33%)", "prefill", "decode", "request #2", "[truncated"]
    {
        assert!(flames.contains(part), "no {part} in the flame graph");
    }
    assert!(flames.contains("40 samples · 40 truncated"), "wrong counts");

    let heat = draw("h.svg", &|file| heatmap::run(&parse(&capture, &["-o", file])?))?;
    for part in
        ["simulated GPU", "n=117 tokens", "req-a", "&lt;b&gt;&amp;", "4 bulk_ring_full", "events lost"]
    {
        assert!(heat.contains(part), "no {part} in the heatmap");
    }
    let by_token =
        draw("t.svg", &|file| heatmap::run(&parse(&capture, &["--by", "token-log", "-o", file])?))?;
    assert!(by_token.contains("token index (log)") && by_token.contains("n=120 tokens"));

    let histogram = draw("g.svg", &|file| histogram::run(&parse(&capture, &["-o", file])?))?;
    for part in ["simulated GPU", "n = 117", "n = 3 · p50 – (n=3)", "gpu_span", "no values", "3 requests"]
    {
        assert!(histogram.contains(part), "no {part} in the histogram");
    }
    Ok(())
}

/// The folded stacks of a small capture, by the flags of the flame graph.
fn folded(capture: &Path, flags: &[&str]) -> Result<String> {
    let file = capture.with_extension("folded");
    let svg = capture.with_extension("svg");
    let (file_name, svg) = (file.to_string_lossy(), svg.to_string_lossy());
    let words: Vec<&str> = [&["-o", &svg, "--folded", &file_name], flags].concat();
    flamegraph::run(&parse(capture, &words)?)?;
    Ok(std::fs::read_to_string(file)?)
}

fn sum_ns(folded: &str) -> u64 {
    folded.lines().filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[test]
fn flame_graphs_weigh_what_they_say() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    record(&capture)?;
    let tables = capture::Capture::open(&capture)?.tables()?;
    let latency = |such: &dyn Fn(&crate::timeline::rows::Token) -> bool| -> u64 {
        tables.tokens.iter().filter(|token| such(token)).filter_map(|token| token.latency_ns).sum()
    };

    let tokens = folded(&capture, &["--tokens"])?;
    assert_eq!(sum_ns(&tokens), latency(&|_| true), "{tokens}");
    assert!(tokens.contains("req-a;decode;") && tokens.contains("req-a;prefill;"), "{tokens}");
    let decode = folded(&capture, &["--tokens", "--phase", "decode", "--request", "req-a"])?;
    let id = tables.requests.iter().find(|request| request.request_id == "req-a").map(|request| request.id);
    assert_eq!(sum_ns(&decode), latency(&|token| Some(token.request) == id && token.index > 0));

    let off = folded(&capture, &["--off-cpu"])?;
    let (waited, slept): (Vec<&str>, Vec<&str>) =
        off.lines().partition(|line| line.contains("waited for a CPU"));
    assert_eq!(sum_ns(&slept.join("\n")), u64::from(TOKENS) * 1_000_000, "{off}");
    assert_eq!(sum_ns(&waited.join("\n")), u64::from(TOKENS) * 200_000, "{off}");
    // Every token waits for that thread to wake up, but the first ones: they are there before it sleeps.
    let off = folded(&capture, &["--off-cpu", "--phase", "decode"])?;
    assert!(sum_ns(&off) <= u64::from(TOKENS) * 1_200_000, "{off}");
    assert!(folded(&capture, &["--off-cpu", "--thread", "nobody"]).is_err());

    let window = folded(&capture, &["--from", "1ms", "--to", "11ms"])?;
    assert_eq!(sum_ns(&window), 2 * 1_000_001, "{window}");
    let slow = folded(&capture, &["--slow=1us"])?;
    assert!(slow.lines().all(|line| line.rsplit(' ').take(2).all(|n| n.parse::<u64>().is_ok())), "{slow}");
    let error = format!("{:#}", folded(&capture, &["--slow=10s"]).unwrap_err());
    assert!(error.contains("too few"), "{error}");
    Ok(())
}

#[test]
fn a_request_and_the_other_heatmaps_are_drawn() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    record(&capture)?;
    let file = folder.path().join("x.svg");
    let name = file.to_string_lossy();
    request::run(&parse(&capture, &["<b>&\u{1b}[31m", "-o", &name])?)?;
    let svg = std::fs::read_to_string(&file)?;
    for part in
        ["Request &lt;b&gt;&amp;", "Latency of each token", "Where threads had no CPU", "simulated GPU"]
    {
        assert!(svg.contains(part), "no {part} in the request");
    }
    assert!(!svg.contains("<b>"));
    for (flags, part) in [
        (["--by", "offset"], "Tokens by offset in the second"),
        (["--by", "request"], "in time: 3 requests"),
        (["--latency", "ttft"], "n=3 tokens"),
    ] {
        heatmap::run(&parse(&capture, &[&flags[..], &["-o", &name]].concat())?)?;
        let svg = std::fs::read_to_string(&file)?;
        assert!(svg.contains(part) && svg.contains("events lost"), "no {part}");
    }
    assert!(heatmap::run(&parse(&capture, &["--by", "token", "--latency", "step"])?).is_err());

    let both = [capture.to_string_lossy(), "-o".into(), name];
    histogram::run(&parse(&capture, &both.iter().map(AsRef::as_ref).collect::<Vec<_>>())?)?;
    assert!(std::fs::read_to_string(&file)?.contains("2 captures"));
    let log = folder.path().join("x.hlog");
    histogram::run(&parse(&capture, &["-o", &log.to_string_lossy()])?)?;
    assert!(std::fs::read_to_string(log)?.contains("Tag=itl,0.000,10."));
    Ok(())
}

#[test]
fn what_cannot_be_drawn_says_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let nothing = folder.path().join("nothing");
    let error = heatmap::run(&parse(&nothing, &["-o", "-"])?).unwrap_err();
    assert!(format!("{error:#}").contains("nothing"), "{error:#}");

    let capture = folder.path().join("capture");
    Writer::create(&capture, Meta::here(vec![], String::new()))?.close()?;
    let error = format!("{:#}", histogram::run(&parse(&capture, &["-o", "-"])?).unwrap_err());
    assert!(error.contains("tracer recover"), "{error}");
    capture::finish(&capture)?;
    let error = format!("{:#}", flamegraph::run(&parse(&capture, &["-o", "-"])?).unwrap_err());
    assert!(error.contains("no samples"), "{error}");
    let error = format!("{:#}", heatmap::run(&parse(&capture, &["-o", "-"])?).unwrap_err());
    assert!(error.contains("no latencies"), "{error}");
    Ok(())
}

#[test]
fn a_loss_lies_between_two_flushes() {
    let counter = |time_ns, name: &str, count, loss| Counter {
        time_ns,
        row: LedgerRow { process: None, name: name.to_owned(), count, loss },
    };
    let counters = vec![
        counter(0, "torn", 7, true),
        counter(1_100, "calls", 5, false),
        counter(1_200, "dropped", 0, true),
        counter(1_200, "calls", 9, false),
        counter(1_300, "calls", 12, false),
        counter(1_400, "dropped", 3, true),
        counter(1_500, "dropped", 4, true),
    ];
    let expected = [(300..400, "3 dropped"), (400..500, "1 dropped")];
    let expected = expected.map(|(range, what)| Loss { range, what: what.to_owned() });
    assert_eq!(grown(counters, 1_000), expected);
}

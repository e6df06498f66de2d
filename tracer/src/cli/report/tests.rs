use super::*;
use crate::cli::testing::tables;
use crate::event::ProcessId;
use crate::timeline::tables::{LedgerRow, Tables};

fn page(tables: &Tables) -> String {
    let text = text(&Summary::new(tables, 10, None), Style::default());
    println!("{text}");
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    text
}

/// The row of a latency.
fn row(text: &str, name: &str) -> String {
    let table = text.split("Latency\n").nth(1).unwrap();
    table.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_owned()
}

fn lose(tables: &mut Tables, name: &str, count: u64) {
    let process = Some(ProcessId { tgid: 10, start_ticks: 1 });
    tables.ledger.push(LedgerRow { process, name: name.into(), count, loss: true });
}

#[test]
fn a_page() {
    let tables = tables();
    let text = page(&tables);
    for part in [
        "comm server  simulated GPU",
        "2026-11-30T00:53:20.000Z on node-1",
        "GPU times: injected (simulated GPU); bound 1 ns (worst 1 ns)",
        "abababab…       10      0         1    4.90 µs    5.80 µs  -210.25 ppm   500 ns",
        "0 of 1 000",
        "40 requests\n",
        "1 000 tokens",
        "nothing lost",
        "vital_written 12 345",
        "waited longest for",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    // 960 gaps: p90 is honest, p99 and p99.9 are not; 40 first tokens: only the median.
    let line = |name: &str| row(&text, name);
    assert_eq!(line("itl").matches('–').count(), 2, "{text}");
    assert_eq!(line("ttft").matches('–').count(), 3, "{text}");
    assert!(!text.contains('~') && !text.contains("LOST"));
}

#[test]
fn losses_come_first_and_what_they_could_move_is_marked() {
    let mut tables = tables();
    tables.ledger.push(LedgerRow { process: None, name: "unknown_request".into(), count: 3, loss: false });
    lose(&mut tables, "token_not_delivered", 20);
    let text = page(&tables);
    let ledger: Vec<&str> = text.split("Ledger\n").nth(1).unwrap().lines().collect();
    assert!(ledger[0].contains("LOST") && ledger[0].contains("token_not_delivered"), "{text}");
    assert!(ledger[1].contains("unmatched") && ledger[1].contains("unknown_request"), "{text}");
    let line = |name: &str| row(&text, name);
    // 20 of 960: enough for p90 and beyond, not for the median.
    assert_eq!(line("itl").matches('~').count(), 2, "{text}");
    assert_eq!(line("step").matches('~').count(), 0, "{text}");
    assert!(text.contains("3 more from before the recording"));
}

#[test]
fn losses_of_the_bulk_ring_move_no_latency_and_unknown_ones_may_move_all() {
    let mut tables = tables();
    lose(&mut tables, "bulk_dropped", 1_000_000);
    let summary = Summary::new(&tables, 0, None);
    assert!(summary.has_loss());
    assert!(summary.latencies.iter().all(|row| row.lost == 0 && row.doubtful_from.is_none()));
    lose(&mut tables, "something_new", 1_000_000);
    assert!(Summary::new(&tables, 0, None).latencies.iter().all(|row| row.doubtful_from == Some(0.5)));
}

#[test]
fn hostile_names_and_an_empty_capture_do_no_harm() {
    let mut tables = tables();
    tables.meta.complete = false;
    tables.meta.target = "\x1b]0;evil\x07".repeat(40);
    for request in &mut tables.requests {
        request.request_id = "\x1b[31m\u{202e}".repeat(1000);
    }
    let text = page(&tables);
    assert!(!text.contains('\x1b') && !text.contains('\u{202e}'));
    assert!(text.contains("did not end by itself"));
    let empty = page(&Tables::default());
    assert!(empty.contains("0 requests") && empty.contains("no engine"), "{empty}");
}

#[test]
fn without_injected_times_the_page_says_so() {
    let mut tables = tables();
    tables.steps.iter_mut().for_each(|step| step.gpu = None);
    let text = page(&tables);
    assert!(text.contains("GPU times: host-observed (simulated GPU)"), "{text}");
    assert!(text.contains("enqueue → host wait returns") && text.contains("host-observed only"), "{text}");
    tables.steps[0].gpu = super::super::testing::tables().steps[0].gpu;
    assert!(page(&tables).contains("partly injected for 1 of"));
}

#[test]
fn contradicted_clocks_are_loud() {
    let mut tables = tables();
    assert!(!page(&tables).contains("contradict"));
    tables.clocks[0].quality.causality_violations = 3;
    let text = page(&tables);
    assert!(text.contains("3 of 1 000") && text.contains("3 launches or waits contradict"), "{text}");
    tables.clocks.clear();
    assert!(!page(&tables).contains("Device clocks"));
}

#[test]
fn steps_whose_bound_exceeds_their_span_are_marked() {
    let mut tables = tables();
    assert!(!page(&tables).contains("is not known"));
    for gpu in tables.steps.iter_mut().filter_map(|step| step.gpu.as_mut()) {
        gpu.bound_ns = gpu.span_ns + 1;
    }
    let text = page(&tables);
    assert!(text.contains("s!") && text.contains("where in the step the GPU worked is not known"), "{text}");
    let json = serde_json::to_value(Summary::new(&tables, 1, None)).unwrap();
    let token = &json["slowest_tokens"][0];
    assert_eq!(token["gpu_is_vague"], true);
    assert_eq!(token["gpu_bound_ns"].as_u64(), token["gpu_span_ns"].as_u64().map(|ns| ns + 1));
}

#[test]
fn tokens_and_steps_have_a_wall_clock_time() {
    let json = serde_json::to_value(Summary::new(&tables(), 1, None)).unwrap();
    let token = &json["slowest_tokens"][0];
    for at in [&token["delivered_at"], &token["step_begin_at"]] {
        assert!(at.as_str().is_some_and(|at| at.starts_with("2026-11-30T00:53:2")), "{token}");
    }
    let mut summary = Summary::new(&tables(), 1, None);
    summary.recording.reclocked = true;
    assert!(text(&summary, Style::default()).contains("mapped anew for this report"));
}

#[test]
fn json() {
    let json = serde_json::to_value(Summary::new(&tables(), 3, None)).unwrap();
    assert_eq!(json["schema"], "tracer.report/1");
    assert_eq!(json["slowest_tokens"].as_array().unwrap().len(), 3);
    assert_eq!(json["latencies"][0]["name"], "ttft");
    assert!(json["latencies"][0]["p50_ns"].is_u64() && json["latencies"][0]["p99_ns"].is_null());
    assert_eq!(json["recording"]["simulated_gpu"], true);
    assert_eq!(json["clocks"][0]["median_bound_ns"], 4_900);
    assert_eq!(json["clocks"][0]["device_uuid"], "ab".repeat(16));
    let sorted: Vec<u64> = json["slowest_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["latency_ns"].as_u64().unwrap())
        .collect();
    assert!(sorted.is_sorted_by(|a, b| a >= b));
}

#[test]
fn colour_only_where_asked() {
    let summary = Summary::new(&tables(), 3, None);
    assert!(text(&summary, Style { color: true }).contains("\x1b[1m"));
    assert!(!text(&summary, Style::default()).contains('\x1b'));
}

#[test]
fn what_sockets_tell_and_what_was_not_read_on_them() {
    let mut tables = tables();
    assert!(!page(&tables).contains("Sockets"));
    for (name, count) in [("socket_io_uring", 3), ("socket_tls", 2), ("http_encoded", 0)] {
        tables.ledger.push(LedgerRow { process: None, name: name.into(), count, loss: false });
    }
    for token in &mut tables.tokens {
        token.written_ns = Some(token.delivered_ns + 7_000);
    }
    let text = page(&tables);
    for part in [
        "Sockets",
        "not read: 3 reads and writes through an io_uring",
        "not read: 2 encrypted connections (TLS)",
        "mark of a token – its write: n 1 000, p50 7.00 µs",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("compressed"), "{text}");
}

#[test]
fn hazards_come_first_and_only_if_there_are_some() {
    use crate::timeline::rows::{Hazard, HazardKind};
    let mut tables = tables();
    assert!(!page(&tables).contains("\nHazards\n"));
    let process = ProcessId { tgid: 10, start_ticks: 77 };
    let hazard = Hazard {
        kind: HazardKind::SharedStream,
        process,
        time_ns: tables.meta.started_ns + 1_000_000,
        step: 7,
        other_step: Some(6),
        request: Some(1),
        other_request: Some(999),
        stream: 0x7f00,
        tid: 101,
        stack: None,
        other_tid: 100,
        other_stack: None,
    };
    tables.hazards = vec![hazard; 3];
    let mut count = |name: &str, count| {
        tables.ledger.push(LedgerRow { process: Some(process), name: name.into(), count, loss: false });
    };
    count(HazardKind::SharedStream.counter(), 1_500);
    count(crate::timeline::hazard::STEPS_CHECKED, 9_000);
    let mut summary = Summary::new(&tables, 0, None);
    summary.hazards.as_mut().unwrap().name(&Stacks::default());
    let text = text(&summary, Style::default());
    println!("{text}");
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    for part in [
        "1 500  shared_stream: two threads gave one stream",
        "3 ×, first at +0.001 s, stream 0x7f00: step #7 of req-1 after step #6 of #999",
        "step #7 of req-1: thread 101, in",
        "[no stack]",
        "9 000 of them against the step before",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(text.find("\nHazards\n") < text.find("\nLatency\n"), "{text}");
    assert!(!text.contains("records were lost"));
}

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tracer_abi::mark::{DECODE, FINISH_STOP, PREFILL, Slot};

use super::testing::{events, tempdir};
use super::*;
use crate::event::mark::{self, Mark};
use crate::event::*;
use crate::symbol::{FrameKind, SymbolFrame};
use crate::timeline::rows::{Engine, GpuTime, Iteration, Layer, Phase, Request, Source, Step, Token};
use crate::timeline::tables::LedgerRow;

const PROCESS: ProcessId = ProcessId { tgid: 40, start_ticks: 7 };

fn origin(time_ns: u64) -> Origin {
    Origin { time_ns, process: PROCESS, tid: 41, cpu: 1 }
}

fn said(time_ns: u64, mark: Mark) -> Event {
    Event::Mark(MarkEvent { origin: origin(time_ns), mark })
}

fn step(index: u32, begin_ns: u64) -> [Event; 3] {
    let slot = Slot {
        request: 5,
        generation_step: index,
        tokens: 1,
        phase: if index == 0 { PREFILL } else { DECODE },
        ..Slot::default()
    };
    let batch =
        mark::Batch { batch_id: index.into(), rank: 0, slot_count: 1, first_slot: 0, slots: vec![slot] };
    let call = Call {
        origin: origin(begin_ns + 50),
        point: 1,
        parent_point: None,
        depth: 0,
        begin_ns,
        end_ns: begin_ns + 50,
        end: CallEnd::Returned,
        sp: 0,
        args: [1, 2, 3, 4, 5, 6],
        ret: 1,
        stack: None,
    };
    [
        said(begin_ns - 10, Mark::Batch(batch)),
        Event::Call(call),
        said(begin_ns + 90, Mark::Token(mark::Token { request: 5, choice: 0, index, stack: None })),
    ]
}

/// One request of three tokens, a sleep, a stack, and counters.
fn history() -> Vec<Event> {
    let point = Point {
        id: 1,
        time_ns: 10,
        process: PROCESS,
        engine: "tensorrt".into(),
        name: "enqueueV3".into(),
        role: Role::Step,
        library: "libnvinfer.so.10".into(),
        version: String::new(),
        build_id: vec![7; 20],
        offset: 64,
        placement: "emulated".into(),
        has_return: true,
        stream_arg: Some(1),
        simulated: true,
    };
    let begin = mark::RequestBegin {
        request: 5,
        received_ns: Some(90),
        trace_id: Some([0xab; 16]),
        request_id: "req-1".into(),
        model: "m".into(),
        ..Default::default()
    };
    let sched = Sched {
        origin: origin(1400),
        off_ns: 1200,
        wake_ns: Some(1370),
        waker_tgid: 40,
        waker_tid: 42,
        prev_state: 1,
        syscall: None,
        preempted: false,
        open: false,
        stack: Some(StackId(3)),
    };
    let stack = Stack {
        id: StackId(3),
        time_ns: 1400,
        process: PROCESS,
        kernel: vec![],
        user: vec![Frame { mapping: None, code: None, offset: 0x77 }],
        cut: Some(StackCut::FramePointers),
        frame_pointer_steps: 0,
    };
    let end = mark::RequestEnd { request: 5, output_tokens: 3, finish_reason: FINISH_STOP };
    let mut events = vec![Event::Point(point), said(100, Mark::RequestBegin(begin.into()))];
    events.extend([200, 400, 600].iter().zip(0..).flat_map(|(&begin_ns, index)| step(index, begin_ns)));
    events.extend([said(800, Mark::RequestEnd(end)), Event::Stack(stack), Event::Sched(sched)]);
    events
}

fn dropped(count: u64) -> LedgerRow {
    LedgerRow { process: None, name: "vital_dropped".into(), count, loss: true }
}

fn record(dir: &Path, events: &[Event]) -> Writer {
    let mut writer = Writer::create(dir, Meta::here(vec!["tracer".into()], "pid 40".into())).unwrap();
    events.iter().for_each(|event| writer.write(event).unwrap());
    writer.ledger(1, &[dropped(0)]).unwrap();
    writer.ledger(2, &[dropped(3)]).unwrap();
    writer.flush().unwrap();
    writer
}

fn events_of(dir: &Path) -> Vec<Event> {
    Reader::open(dir).unwrap().events().unwrap().map(Result::unwrap).collect()
}

/// Every table's content.
fn content(dir: &Path) -> (BTreeMap<&'static str, String>, Vec<Event>) {
    let capture = Capture::open(dir).unwrap();
    let all = |rows: &mut dyn Iterator<Item = String>| rows.collect::<Vec<_>>().join("\n");
    macro_rules! text {
        ($($name:ident)*) => {
            BTreeMap::from([$((
                stringify!($name),
                all(&mut capture.$name().unwrap().map(|row| format!("{:?}", row.unwrap()))),
            )),*])
        };
    }
    let tables =
        text!(steps iterations requests request_ids tokens offcpu frames ledger samples stacks mappings);
    (tables, events_of(dir))
}

#[test]
fn a_finished_capture_has_events_and_tables() {
    let dir = tempdir();
    record(dir.path(), &history()).close().unwrap();
    assert_eq!(Capture::open(dir.path()).err().map(|e| e.kind()), Some(ErrorKind::Unfinished));
    let before = events_of(dir.path());
    let finished = finish(dir.path()).unwrap();
    assert_eq!(events_of(dir.path()), before);
    assert!(!dir.path().join("raw").exists());

    let capture = Capture::open(dir.path()).unwrap();
    assert!(capture.meta().complete && !capture.meta().recovered && capture.meta().simulated);
    assert_eq!(capture.meta(), &finished.meta);
    let tables = capture.tables().unwrap();
    assert_eq!((tables.steps.len(), tables.iterations.len(), tables.requests.len()), (3, 3, 1));
    let latencies: Vec<_> = tables.tokens.iter().map(|token| token.latency_ns).collect();
    assert_eq!(latencies, [Some(200), Some(200), Some(200)]);
    assert_eq!(tables.meta.engines, ["tensorrt"]);
    assert!(tables.meta.complete && tables.meta.simulated);

    let ids: Vec<_> = capture.request_ids().unwrap().map(|id| id.unwrap().value).collect();
    assert_eq!(ids, ["5".to_owned(), "req-1".into(), "ab".repeat(16)]);
    let off: Vec<_> = capture.offcpu().unwrap().map(Result::unwrap).collect();
    assert_eq!(
        (off[0].blocked_ns, off[0].runqueue_ns, off[0].reason),
        (Some(170), Some(30), OffReason::Sleeping)
    );
    let frames: Vec<_> = capture.frames().unwrap().map(Result::unwrap).collect();
    assert_eq!((frames.len(), frames[0].stack, frames[0].offset), (1, StackId(3), 0x77));

    let count =
        |name: &str| tables.ledger.iter().find(|row| row.name == name).map(|row| (row.count, row.loss));
    assert_eq!(count("vital_dropped"), Some((3, true)));
    assert_eq!(count("captured_calls"), Some((3, false)));
    assert_eq!(finished.rows["tokens"], 3);
    assert_eq!(finished.rows["counters"], 2);
    assert_eq!(finished.torn, []);
}

#[test]
fn finishing_again_changes_nothing() {
    let dir = tempdir();
    record(dir.path(), &history()).close().unwrap();
    let first = finish(dir.path()).unwrap();
    let tables = content(dir.path());
    let second = finish(dir.path()).unwrap();
    assert_eq!(content(dir.path()), tables);
    assert_eq!((second.rows, second.ledger, second.meta), (first.rows, first.ledger, first.meta));
}

#[test]
fn a_capture_is_not_finished_while_it_is_recorded() {
    let dir = tempdir();
    let writer = record(dir.path(), &history());
    assert_eq!(finish(dir.path()).err().map(|e| e.kind()), Some(ErrorKind::InUse));
    // It may be read meanwhile.
    assert_eq!(events_of(dir.path()).len(), history().len());
    drop(writer);
    finish(dir.path()).unwrap();
}

#[test]
fn a_killed_recording_is_recovered_with_what_it_lost() {
    let dir = tempdir();
    // Dropping a writer leaves what killing it does: no end in meta.json.
    drop(record(dir.path(), &history()));
    let calls = dir.path().join("raw/calls.arrows");
    let bytes = fs::read(&calls).unwrap();
    fs::write(&calls, [&bytes[..], &bytes[bytes.len() - 300..]].concat()).unwrap();
    let finished = finish(dir.path()).unwrap();
    assert!(finished.meta.recovered && finished.meta.complete);
    assert_eq!(finished.meta.ended_monotonic_ns, Some(finished.meta.started_monotonic_ns.max(1400)));
    assert_eq!(finished.torn, [Torn { table: "calls", rows: 3, bytes: 300 }]);
    let lost = LedgerRow { process: None, name: "torn_bytes_calls".into(), count: 300, loss: true };
    assert!(finished.ledger.contains(&lost));
    assert!(!Capture::open(dir.path()).unwrap().tables().unwrap().meta.complete);
    // What was lost is still known when it is derived again.
    assert!(finish(dir.path()).unwrap().ledger.contains(&lost));
    assert_eq!(events_of(dir.path()).len(), history().len());
}

/// Makes every file in turn impossible to put in its place, as if finishing were killed there.
#[test]
fn finishing_may_stop_anywhere_and_begin_again() {
    let whole = tempdir();
    record(whole.path(), &history()).close().unwrap();
    finish(whole.path()).unwrap();
    let expected = content(whole.path());
    let tables = fs::read_dir(whole.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut stopped = 0;
    for table in tables.filter(|name| name.to_str().is_some_and(|name| name.ends_with(".parquet"))) {
        let dir = tempdir();
        record(dir.path(), &history()).close().unwrap();
        let obstacle = dir.path().join(&table);
        fs::create_dir(&obstacle).unwrap();
        fs::write(obstacle.join("file"), "").unwrap();
        let failed = finish(dir.path());
        fs::remove_dir_all(&obstacle).unwrap();
        // `frames` is kept when it is there, whatever it is.
        if failed.is_err() {
            stopped += 1;
            assert!(!Reader::open(dir.path()).unwrap().meta().complete);
            assert_eq!(events_of(dir.path()), expected.1, "{table:?}");
            finish(dir.path()).unwrap();
            assert_eq!(content(dir.path()), expected, "{table:?}");
        }
        assert!(
            fs::read_dir(dir.path()).unwrap().all(|e| !e.unwrap().path().to_str().unwrap().ends_with("tmp"))
        );
    }
    assert!(stopped > 20, "{stopped}");
}

#[test]
fn finishing_may_be_killed_while_streams_are_removed() {
    let dir = tempdir();
    let keep = tempdir();
    drop(record(dir.path(), &history()));
    let raw = dir.path().join("raw");
    let calls = fs::read(raw.join("calls.arrows")).unwrap();
    fs::write(raw.join("calls.arrows"), &calls[..calls.len() - 5]).unwrap();
    fs::copy(raw.join("calls.arrows"), keep.path().join("calls.arrows")).unwrap();
    finish(dir.path()).unwrap();
    let expected = content(dir.path());
    // The counters' stream was removed, that of the calls was not.
    fs::create_dir(&raw).unwrap();
    fs::copy(keep.path().join("calls.arrows"), raw.join("calls.arrows")).unwrap();
    finish(dir.path()).unwrap();
    assert_eq!(content(dir.path()), expected);
}

#[test]
fn a_damaged_table_is_named() {
    let dir = tempdir();
    record(dir.path(), &history()).close().unwrap();
    finish(dir.path()).unwrap();
    let tokens = dir.path().join("tokens.parquet");
    let bytes = fs::read(&tokens).unwrap();
    for damaged in [&b""[..], b"PAR1", &bytes[..bytes.len() / 2], &vec![0xff; 500]] {
        fs::write(&tokens, damaged).unwrap();
        let error = Capture::open(dir.path()).unwrap().tables().err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Damaged);
        assert!(error.to_string().contains("tokens.parquet"), "{error}");
    }
    // It is derived, so it can be made again.
    finish(dir.path()).unwrap();
    assert_eq!(fs::read(&tokens).unwrap().len(), bytes.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_recording_can_be_finished(events in events(80)) {
        let dir = tempdir();
        record(dir.path(), &events).close().unwrap();
        let before = events_of(dir.path());
        finish(dir.path()).unwrap();
        prop_assert_eq!(events_of(dir.path()), before);
        let tables = content(dir.path());
        finish(dir.path()).unwrap();
        prop_assert_eq!(content(dir.path()), tables);
    }
}

/// Writes rows as a finished table and reads them back.
fn through_parquet<T: super::raw::Table>(rows: &[T]) -> Vec<T> {
    let dir = tempdir();
    let writer = Writer::create(dir.path(), Meta::here(vec![], String::new())).unwrap();
    drop(writer);
    let folder = folder::Folder::lock(dir.path()).unwrap();
    let mut table = table::TableFile::<T>::begin(&folder).unwrap();
    rows.iter().for_each(|row| table.push(row).unwrap());
    assert_eq!(table.commit().unwrap(), rows.len() as u64);
    let mut batches = reader::Batches::<T>::open(&folder).unwrap();
    let mut read = Vec::new();
    while let Some(rows) = batches.next_rows().unwrap() {
        read.extend(rows);
    }
    read
}

#[test]
fn rows_come_back_as_they_were() {
    let gpu = GpuTime { begin_ns: 1, end_ns: 3, span_ns: 2, bound_ns: 9 };
    let slots = vec![Slot {
        request: 1,
        sample_offset: 2,
        tokens: 3,
        choice: 4,
        phase: 1,
        flags: 1,
        ..Slot::default()
    }];
    let step = Step {
        id: 0,
        process: PROCESS,
        tid: 1,
        point: 2,
        rank: 3,
        batch_id: Some(4),
        iteration: None,
        stream: 5,
        begin_ns: 6,
        end_ns: 7,
        end: CallEnd::Open,
        observed_end_ns: Some(8),
        device_uuid: Some([9; 16]),
        gpu: Some(gpu),
        sampled: true,
        engine: Some(std::sync::Arc::new(Engine {
            path: "/models/a.plan".into(),
            bytes: 1,
            modified_ns: 2,
            fingerprint: vec![3; 32],
        })),
        engine_version: "10.13.3.9".into(),
        nvtx_request: "req".into(),
        nvtx_range: "decode".into(),
        input_shapes: "input_ids:4x1".into(),
        output_shapes: "logits:4x1".into(),
        data_types: "logits:fp16".into(),
        quantization: "fp16".into(),
        slots,
    };
    let bare = Step {
        engine: None,
        gpu: None,
        device_uuid: None,
        observed_end_ns: None,
        slots: vec![],
        ..step.clone()
    };
    let steps = [step.clone(), bare, step];
    assert_eq!(through_parquet(&steps), steps);

    let request = Request {
        id: 1,
        process: PROCESS,
        program_request: 2,
        request_id: "é\u{1f980}".into(),
        trace_id: Some([1; 16]),
        span_id: None,
        tenant_id: String::new(),
        model: "m".into(),
        model_version: "2".into(),
        engine_hash: "e3b0".into(),
        adapters: "a,b".into(),
        kv_cache_strategy: "paged".into(),
        prompt_tokens: None,
        received_ns: 3,
        arrived_ns: Some(2),
        read_ns: None,
        source: Source::Mark,
        end_ns: None,
        finish_reason: 4,
        declared_tokens: Some(5),
        tokens: 6,
        ttft_ns: Some(7),
        tpot_ns: Some(8.5),
    };
    assert_eq!(through_parquet(std::slice::from_ref(&request)), [request]);

    // More rows than a batch and a row group hold.
    let token = |index| Token {
        request: 1,
        choice: 0,
        index,
        process: crate::event::ProcessId::default(),
        tid: 0,
        delivered_ns: u64::from(index) * 1000,
        written_ns: Some(9),
        wire_ns: None,
        latency_ns: (index % 3 > 0).then_some(5),
        source: Source::Mark,
        iteration: Some(1),
        step: None,
        join: crate::timeline::rows::Join::Mark,
        prefill: index == 0,
    };
    let tokens: Vec<_> = (0..150_000).map(token).collect();
    assert_eq!(through_parquet(&tokens), tokens);

    let iteration = Iteration {
        id: 1,
        process: PROCESS,
        batch_id: 2,
        begin_ns: 3,
        end_ns: 4,
        steps: 5,
        slowest_rank: 6,
        requests: 7,
        prefill_requests: 8,
        tokens: 9,
    };
    assert_eq!(through_parquet(std::slice::from_ref(&iteration)), [iteration]);
    let frame = SymbolFrame {
        stack: StackId(1),
        position: 2,
        kind: FrameKind::Kernel,
        function: None,
        module: "[kernel]".into(),
        offset: u64::MAX,
        inlined: true,
    };
    assert_eq!(through_parquet(std::slice::from_ref(&frame)), [frame]);
    assert_eq!(through_parquet::<LedgerRow>(&[]), []);
    let layer = Layer {
        step: 1,
        number: 2,
        parent: Some(0),
        depth: 1,
        name: "/model/layers.0/mlp".into(),
        gpu_begin_ns: Some(3),
        gpu_end_ns: None,
        gpu_span_ns: 4,
        gpu_self_ns: 5,
        gpu_bound_ns: Some(6),
    };
    assert_eq!(through_parquet(std::slice::from_ref(&layer)), [layer]);
    let phase = Phase {
        process: PROCESS,
        tid: 1,
        source: Source::Nvtx,
        request: None,
        request_id: "req".into(),
        name: "prefill".into(),
        domain: "d".into(),
        payload: "7".into(),
        is_mark: true,
        begin_ns: 2,
        end_ns: Some(3),
    };
    assert_eq!(through_parquet(std::slice::from_ref(&phase)), [phase]);
}

#[test]
fn off_cpu_time_is_split_where_the_wake_up_was_seen() {
    let sched = |wake_ns, preempted, open, prev_state| Sched {
        origin: origin(100),
        off_ns: 40,
        wake_ns,
        waker_tgid: 0,
        waker_tid: 0,
        prev_state,
        syscall: None,
        preempted,
        open,
        stack: None,
    };
    let of = |sched: Sched| {
        let off = OffCpu::from(&sched);
        (off.reason, off.blocked_ns, off.runqueue_ns)
    };
    assert_eq!(of(sched(Some(90), false, false, 1)), (OffReason::Sleeping, Some(50), Some(10)));
    assert_eq!(of(sched(Some(90), false, false, 2)), (OffReason::Uninterruptible, Some(50), Some(10)));
    assert_eq!(of(sched(None, true, false, 0)), (OffReason::Preempted, Some(0), Some(60)));
    assert_eq!(of(sched(None, false, false, 4)), (OffReason::Other, None, None));
    assert_eq!(of(sched(None, false, true, 1)), (OffReason::Sleeping, Some(60), None));
}

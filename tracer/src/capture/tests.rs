use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::testing::{event, events, tempdir};
use super::*;
use crate::event::mark::{ClockBurst, GpuSpan, Mark};
use crate::event::{Event, MarkEvent, Origin, ProcessId, Role};
use crate::timeline::tables::LedgerRow;

fn meta() -> Meta {
    Meta::here(vec!["tracer".into(), "record".into()], "pid 1".into())
}

fn write(dir: &Path, events: &[Event], flush_every: usize) {
    let mut writer = Writer::create(dir, meta()).unwrap();
    for (i, event) in events.iter().enumerate() {
        writer.write(event).unwrap();
        if (i + 1) % flush_every == 0 {
            writer.flush().unwrap();
        }
    }
    writer.close().unwrap();
}

fn read(dir: &Path) -> (Vec<Event>, Vec<Torn>) {
    let mut events = Reader::open(dir).unwrap().events().unwrap();
    let read = events.by_ref().map(Result::unwrap).collect();
    (read, events.torn())
}

/// The same events whatever order those of one time have.
fn normal(events: &[Event]) -> Vec<String> {
    let mut texts: Vec<_> = events.iter().map(|e| format!("{:020} {e:?}", e.time_ns())).collect();
    texts.sort();
    texts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn events_come_back_as_they_were(events in events(60), flush_every in 1..30usize) {
        let dir = tempdir();
        write(dir.path(), &events, flush_every);
        let (read, torn) = read(dir.path());
        prop_assert_eq!(normal(&read), normal(&events));
        prop_assert!(read.is_sorted_by_key(Event::time_ns));
        prop_assert_eq!(torn, vec![]);
    }

    #[test]
    fn events_written_out_of_order_all_come_back(events in prop::collection::vec(event(), 0..60)) {
        let dir = tempdir();
        write(dir.path(), &events, 7);
        prop_assert_eq!(normal(&read(dir.path()).0), normal(&events));
    }

    #[test]
    fn damaged_streams_never_panic(
        events in events(40),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let dir = tempdir();
        write(dir.path(), &events, 10);
        for path in raw_files(dir.path()) {
            let mut bytes = fs::read(&path).unwrap();
            for (index, value) in &damage {
                let index = index.index(bytes.len());
                bytes[index] = *value;
            }
            fs::write(&path, bytes).unwrap();
        }
        prop_assert!(read(dir.path()).0.len() <= events.len() + 1000);
    }

    #[test]
    fn random_bytes_are_an_empty_torn_table(bytes in prop::collection::vec(any::<u8>(), 1..400)) {
        let dir = tempdir();
        write(dir.path(), &[], 1);
        fs::write(dir.path().join("raw/calls.arrows"), &bytes).unwrap();
        let (events, torn) = read(dir.path());
        prop_assert_eq!(events, vec![]);
        prop_assert_eq!(torn, vec![Torn { table: "calls", rows: 0, bytes: bytes.len() as u64 }]);
    }
}

fn raw_files(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir.join("raw")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn burst(time_ns: u64) -> Event {
    let origin = Origin { time_ns, ..Origin::default() };
    let readings = vec![tracer_abi::mark::ClockReading::default(); 3];
    let mark = ClockBurst { device_uuid: [1; 16], context: 2, epoch: 3, base: 4, rebase_ms: None, readings };
    Event::Mark(MarkEvent { origin, mark: Mark::ClockBurst(mark) })
}

#[test]
fn a_stream_torn_anywhere_yields_its_whole_batches() {
    let dir = tempdir();
    let events: Vec<_> = (0..6).map(burst).collect();
    write(dir.path(), &events, 2);
    let path = dir.path().join("raw/clock_bursts.arrows");
    let bytes = fs::read(&path).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for length in 0..=bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        let (read, torn) = read(dir.path());
        assert_eq!(read, events[..read.len()], "cut at {length}");
        let lost: u64 = torn.iter().map(|t| t.bytes).sum();
        assert!(lost <= length as u64 && (lost > 0 || read.len() % 2 == 0), "cut at {length}: {torn:?}");
        seen.insert((read.len(), lost == 0));
    }
    // Whole after no, one, two and three batches; torn after no, one and two.
    let expected = [(0, false), (0, true), (2, false), (2, true), (4, false), (4, true), (6, true)];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn huge_lengths_in_a_stream_cost_no_memory() {
    let dir = tempdir();
    write(dir.path(), &[burst(1)], 1);
    let path = dir.path().join("raw/clock_bursts.arrows");
    let bytes = fs::read(&path).unwrap();
    for offset in (0..bytes.len() - 8).step_by(4) {
        for huge in [i64::MAX, i64::from(i32::MAX), -1] {
            let mut bytes = bytes.clone();
            bytes[offset..offset + 8].copy_from_slice(&huge.to_le_bytes());
            fs::write(&path, bytes).unwrap();
            assert!(read(dir.path()).0.len() <= 1);
        }
    }
}

#[test]
fn not_a_number_keeps_its_bits() {
    let dir = tempdir();
    let bits = 0x7fc1_2345;
    let span = GpuSpan {
        device_uuid: [0xab; 16],
        context: 0,
        stream: 0,
        sequence: 0,
        enqueue_begin_ns: 0,
        enqueue_end_ns: 0,
        tid: 7,
        epoch: 0,
        base: 0,
        begin_ms: f32::from_bits(bits),
        span_ms: 1.0,
        sampled: false,
    };
    write(dir.path(), &[Event::Mark(MarkEvent { origin: Origin::default(), mark: Mark::GpuSpan(span) })], 1);
    let (read, _) = read(dir.path());
    let [Event::Mark(MarkEvent { mark: Mark::GpuSpan(span), .. })] = read[..] else { panic!("{read:?}") };
    assert_eq!(span.begin_ms.to_bits(), bits);
}

#[test]
fn definitions_come_before_what_uses_them() {
    let dir = tempdir();
    let origin = Origin { time_ns: 5, ..Origin::default() };
    let call = crate::event::Call {
        origin,
        point: 1,
        parent_point: None,
        depth: 0,
        begin_ns: 1,
        end_ns: 5,
        end: crate::event::CallEnd::Returned,
        sp: 0,
        args: [0; 6],
        ret: 0,
        stack: None,
    };
    let point = point(5, false);
    write(dir.path(), &[Event::Call(call), point.clone()], 1);
    assert_eq!(read(dir.path()).0, [point, Event::Call(call)]);
}

fn point(time_ns: u64, simulated: bool) -> Event {
    Event::Point(crate::event::Point {
        id: 1,
        time_ns,
        process: ProcessId::default(),
        engine: "tensorrt".into(),
        name: "enqueueV3".into(),
        role: Role::Step,
        library: "libnvinfer.so.10".into(),
        version: String::new(),
        build_id: vec![1, 2],
        offset: 16,
        placement: "nop5".into(),
        has_return: true,
        stream_arg: Some(1),
        simulated,
    })
}

#[test]
fn roles_are_stored_under_their_names() {
    let dir = tempdir();
    use super::column::Scalar;
    for role in [
        Role::Step,
        Role::Launch,
        Role::GraphLaunch,
        Role::Wait,
        Role::Copy,
        Role::EventRecord,
        Role::ContextEnd,
        Role::Loader,
        Role::Mark,
        Role::Open,
        Role::Shape,
        Role::Nvtx,
        Role::Other,
    ] {
        let mut builder = Default::default();
        Role::append(Some(&role), &mut builder);
        assert_eq!(Role::array(&mut builder).value(0), role.name());
    }
    drop(dir);
}

#[test]
fn a_simulated_point_makes_the_capture_simulated() {
    let dir = tempdir();
    let mut writer = Writer::create(dir.path(), meta()).unwrap();
    writer.write(&point(1, false)).unwrap();
    assert!(!Reader::open(dir.path()).unwrap().meta().simulated);
    writer.write(&point(2, true)).unwrap();
    assert!(Reader::open(dir.path()).unwrap().meta().simulated);
}

#[test]
fn the_folder_is_private_and_only_taken_when_empty() {
    let parent = tempdir();
    let dir = parent.path().join("new");
    write(&dir, &[burst(1)], 1);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(&dir), mode(&dir.join("raw"))], [0o700; 2]);
    assert_eq!([mode(&dir.join("meta.json")), mode(&dir.join("raw/clock_bursts.arrows"))], [0o600; 2]);

    let before = fs::read(dir.join("meta.json")).unwrap();
    let error = Writer::create(&dir, meta()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Exists);
    assert!(
        error.to_string().contains("not empty") && error.to_string().contains("another folder"),
        "{error}"
    );
    assert_eq!(fs::read(dir.join("meta.json")).unwrap(), before);

    fs::write(parent.path().join("file"), "x").unwrap();
    let error = Writer::create(&parent.path().join("file"), meta()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Exists);
    let error = Writer::create(&parent.path().join("no/where"), meta()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Io);
}

#[test]
fn what_is_not_a_capture_is_refused_by_name() {
    let dir = tempdir();
    let kind = |dir: &Path| Reader::open(dir).err().map(|e| e.kind());
    assert_eq!(kind(dir.path()), Some(ErrorKind::NotACapture));
    assert_eq!(kind(&dir.path().join("gone")), Some(ErrorKind::NotACapture));
    for (text, expected) in [
        ("{}", ErrorKind::Damaged),
        ("", ErrorKind::Damaged),
        (r#"{"schema": "tracer.capture/2", "host": 5}"#, ErrorKind::NewerSchema),
        (r#"{"schema": "tracer.capture/0"}"#, ErrorKind::NotACapture),
        (r#"{"schema": "other"}"#, ErrorKind::NotACapture),
    ] {
        fs::write(dir.path().join("meta.json"), text).unwrap();
        assert_eq!(kind(dir.path()), Some(expected), "{text}");
    }
    fs::write(dir.path().join("meta.json"), r#"{"schema": "tracer.capture/1", "unknown": 1}"#).unwrap();
    assert_eq!(kind(dir.path()), None);
    fs::write(dir.path().join("file"), "").unwrap();
    assert_eq!(kind(&dir.path().join("file")), Some(ErrorKind::NotACapture));
}

#[test]
fn a_full_disk_is_said_and_loses_nothing_that_was_written() {
    let dir = tempdir();
    let mut writer = Writer::create(dir.path(), meta()).unwrap();
    writer.write(&burst(1)).unwrap();
    writer.flush().unwrap();
    writer.write(&burst(2)).unwrap();
    writer.write(&point(2, false)).unwrap();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let kept = writer.replace_file_of_bursts(full);
    let error = writer.flush().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("clock_bursts"), "{error}");
    assert_eq!(writer.rows_lost(), 1);

    // The other tables were written, and writing goes on once there is space.
    writer.replace_file_of_bursts(kept);
    writer.write(&burst(3)).unwrap();
    writer.close().unwrap();
    let (events, torn) = read(dir.path());
    assert_eq!(events, [burst(1), point(2, false), burst(3)]);
    assert_eq!(torn, []);
}

#[test]
fn the_ledger_is_written_when_it_changes() {
    let dir = tempdir();
    let mut writer = Writer::create(dir.path(), meta()).unwrap();
    let row = |count| LedgerRow { process: None, name: "vital_dropped".into(), count, loss: true };
    for (time_ns, count) in [(1, 0), (2, 0), (3, 4), (4, 4)] {
        writer.ledger(time_ns, &[row(count)]).unwrap();
    }
    writer.close().unwrap();
    let folder = folder::Folder::open(dir.path()).unwrap();
    let mut batches = reader::Batches::<raw::Counter>::open(&folder).unwrap();
    let rows = batches.next_rows().unwrap().unwrap();
    let expected = [(1, 0), (3, 4)].map(|(time_ns, count)| raw::Counter { time_ns, row: row(count) });
    assert_eq!(rows, expected);
}

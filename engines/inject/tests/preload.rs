//! The library inside a program, on the stand-in driver: it changes nothing, does nothing while nobody listens, and
//! what it reports is the truth that the driver logs.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a helper that fails fails its test"
)]

mod common;

use std::{
    collections::{HashMap, HashSet},
    process::Command,
};

use common::{DRIFT_PPM, Stage, assert_near, built, output};
use tracer_abi::mark::{ClockReading, INJECT_ACTIVE, INJECT_DISABLED};

/// Readings of a burst.
const READINGS: usize = 8;

#[test]
fn nothing_changes_while_nobody_listens() {
    let stage = Stage::new(&[]);
    let arguments = ["run", "2", "200", "50000"];
    let without = output(&mut stage.command(&arguments));
    assert_eq!(without, "steps 400\n");
    let with = output(stage.injected(&arguments).env("WAIT_HOOK", "1"));
    assert_eq!(with, without);
    let truth = stage.truth();
    assert!(truth.iter().any(|entry| entry["kind"] == "kernel"));
    assert_eq!(stage.events().len(), 0, "events were recorded");
}

#[test]
fn spans_are_the_truth() {
    let stage = Stage::new(&[]);
    let text = output(stage.heard(&["run", "2", "1600", "1500000"]).env("WAIT_HOOK", "1"));
    assert_eq!(text, "steps 3200\n");
    let (marks, events) = (stage.marks(), stage.events());
    let rate = 1.0 + DRIFT_PPM * 1e-6;

    // A base is known by the event of our own thread that completed within its first reading.
    let stepping: HashSet<u64> = marks.spans.iter().map(|span| u64::from(span.tid)).collect();
    let ours: Vec<u64> =
        events.iter().filter(|e| !stepping.contains(&e.tid)).map(|e| e.complete_ns).collect();
    let raw_ahead = raw_minus_monotonic();
    let truth_of = |reading: &ClockReading| {
        let middle = u64::midpoint(reading.h0_raw_ns, reading.h1_raw_ns).wrapping_add_signed(-raw_ahead);
        ours.iter().copied().min_by_key(|complete| complete.abs_diff(middle)).unwrap() as f64
    };
    let mut bases: HashMap<(u32, u32), f64> = HashMap::new();
    for (burst, readings) in &marks.bursts {
        assert_eq!((&burst.device_uuid[..6], readings.len()), (b"SIMGPU".as_slice(), READINGS));
        let rebase_ms = f32::from_bits(burst.rebase_ms_bits);
        let key = (burst.epoch, burst.base);
        if bases.contains_key(&key) {
            assert!(rebase_ms.is_nan());
        } else {
            let truth = truth_of(&readings[0]);
            assert_eq!(readings[0].elapsed_ms_bits, 0f32.to_bits());
            match burst.base.checked_sub(1).map(|last| bases[&(burst.epoch, last)]) {
                None => assert!(rebase_ms.is_nan()),
                Some(last) => assert_near(rebase_ms, (truth - last) * rate),
            }
            bases.insert(key, truth);
        }
        for reading in readings {
            assert!(reading.h0_raw_ns < reading.h1_raw_ns);
            let elapsed = f32::from_bits(reading.elapsed_ms_bits);
            assert_near(elapsed, (truth_of(reading) - bases[&key]) * rate);
        }
    }
    assert!(bases.len() >= 3, "a new base each second: {}", bases.len());

    // Every span: its two events in the log, their distance, and the distance from the base.
    assert!(marks.spans.len() > 2500, "{} spans", marks.spans.len());
    for (index, span) in marks.spans.iter().enumerate() {
        let inside = events.iter().filter(|event| {
            event.tid == u64::from(span.tid)
                && (span.enqueue_begin_ns..=span.enqueue_end_ns).contains(&event.record_ns)
        });
        let [begin, end] = inside.collect::<Vec<_>>()[..] else { panic!("not two events in {span:?}") };
        let (begin, end) = (begin.complete_ns as f64, end.complete_ns as f64);
        assert!(end - begin >= 1_500_000.0);
        assert_near(f32::from_bits(span.span_ms_bits), (end - begin) * rate);
        let begin_ms = f32::from_bits(span.begin_ms_bits);
        assert!((0.0..2500.0).contains(&begin_ms), "step {index} counts from an old base: {begin_ms} ms");
        assert_near(begin_ms, (begin - bases[&(span.epoch, span.base)]) * rate);
    }

    let (state, reason) = marks.states.last().unwrap();
    assert_eq!((state.state, reason.as_str()), (INJECT_ACTIVE, ""));
    assert_eq!((state.skipped_error, state.abandoned), (0, 0));
    assert!(state.timed > 0 && state.timed <= state.steps);
}

/// CLOCK_MONOTONIC_RAW − CLOCK_MONOTONIC, ns.
fn raw_minus_monotonic() -> i64 {
    let read = |clock| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for writes.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    read(libc::CLOCK_MONOTONIC_RAW) - read(libc::CLOCK_MONOTONIC)
}

#[test]
fn captured_steps_are_counted_and_left_alone() {
    let stage = Stage::new(&[]);
    let text = output(stage.heard(&["capture", "1", "1", "10000"]).env("WAIT_HOOK", "1"));
    assert_eq!(text, "captured 1\n");
    let (state, _) = stage.marks().states.pop().unwrap();
    assert_eq!((state.state, state.steps, state.skipped_capturing), (INJECT_ACTIVE, 3, 2));
}

#[test]
fn a_forked_worker_is_timed_too() {
    let stage = Stage::new(&[]);
    let text = output(stage.heard(&["fork", "2", "300", "1000000"]).env("WAIT_HOOK", "1"));
    assert_eq!(text, "steps 600\n");
    let marks = stage.marks();
    assert!(marks.spans.len() > 200, "{} spans", marks.spans.len());
}

#[test]
fn an_engine_that_is_not_understood_is_left_alone() {
    let stage = Stage::new(&["-DNO_VERSION"]);
    let text = output(&mut stage.heard(&["run", "1", "300", "1000000"]));
    assert_eq!(text, "steps 300\n");
    assert_eq!(stage.events().len(), 0);
    let (state, reason) = stage.marks().states.pop().unwrap();
    assert_eq!(state.state, INJECT_DISABLED);
    assert!(reason.contains("libnvinfer.so.10: enqueueV3 not found"), "{reason}");
}

#[test]
fn programs_without_an_engine_do_not_notice() {
    let folder = tempfile::tempdir().unwrap();
    let sink = folder.path().join("marks");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo one; (echo two); exec /bin/echo three"]);
    command.env("LD_PRELOAD", built("libtracer_inject.so")).env("TRACER_INJECT_TEST_SINK", &sink);
    assert_eq!(output(&mut command), "one\ntwo\nthree\n");
    assert_eq!(std::fs::read(sink).unwrap(), b"");
}

#[test]
fn needs_libc_only() {
    use object::{
        LittleEndian as LE, elf,
        read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _},
    };
    let data = std::fs::read(built("libtracer_inject.so")).unwrap();
    let data = data.as_slice();
    let header = elf::FileHeader64::<LE>::parse(data).unwrap();
    let sections = header.sections(LE, data).unwrap();
    let (entries, strings) = sections.dynamic(LE, data).unwrap().unwrap();
    let strings = sections.strings(LE, data, strings).unwrap();
    let needed = entries.iter().filter(|entry| entry.tag(LE) == elf::DT_NEEDED);
    let needed: Vec<String> = needed
        .map(|entry| String::from_utf8_lossy(strings.get(entry.val32(LE).unwrap()).unwrap()).into_owned())
        .collect();
    let others: Vec<&String> =
        needed.iter().filter(|name| !name.starts_with("libc.so") && !name.starts_with("ld-linux")).collect();
    assert!(others.is_empty(), "{needed:?}");
    let flags = entries.iter().find(|entry| entry.tag(LE) == elf::DT_FLAGS_1).unwrap();
    // DF_1_NODELETE
    assert_eq!(flags.d_val.get(LE) & 8, 8);
    assert!(header.program_headers(LE, data).unwrap().iter().any(|p| p.p_type(LE) == elf::PT_DYNAMIC));
}

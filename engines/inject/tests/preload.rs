//! The library inside a program, on the stand-in driver: it changes nothing, does nothing while nobody listens, and
//! what it reports is the truth that the driver logs.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a helper that fails fails its test")]

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;
use tracer_abi::mark::{
    ClockBurst, ClockReading, GpuSpan, INJECT_ACTIVE, INJECT_DISABLED, InjectState, MarkHeader, MarkKind,
};

/// Device clock of the tests: 0.5 µs steps, 40 ppm fast.
const QUANTUM_NS: f64 = 500.0;
const DRIFT_PPM: f64 = 40.0;

/// A folder with the program and its libraries.
struct Stage {
    folder: tempfile::TempDir,
}

/// A library that cargo built with this test.
fn built(name: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().skip(1).map(|folder| folder.join(name)).find(|path| path.exists()).unwrap()
}

fn compile(output: &Path, source: &Path, flags: &[&str]) {
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O2", "-o"]).arg(output).args(flags).arg(source).args(["-ldl", "-lpthread"]);
    assert!(command.status().expect("g++ is needed: apt-get install g++").success(), "{command:?}");
}

impl Stage {
    fn new(engine_flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        std::fs::copy(built("libstandin_cuda.so"), folder.path().join("libcuda.so.1")).unwrap();
        let flags = [&["-shared", "-fPIC", "-fvisibility=hidden", "-s"], engine_flags].concat();
        compile(
            &folder.path().join("libnvinfer.so.10"),
            &here.join("../tests/data/fake_nvinfer.cpp"),
            &flags,
        );
        compile(&folder.path().join("program"), &here.join("tests/data/program.cpp"), &[]);
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("program"));
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("STANDIN_CUDA_DRIFT_PPM", DRIFT_PPM.to_string())
            .env("STANDIN_CUDA_OFFSET_NS", "123456789012345")
            .env("STANDIN_CUDA_LOG", self.path("truth"));
        command
    }

    /// With the library in it.
    fn injected(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env("LD_PRELOAD", built("libtracer_inject.so"));
        command
    }

    /// With the library in it, listened to.
    fn heard(&self, arguments: &[&str]) -> Command {
        let mut command = self.injected(arguments);
        command.env("TRACER_INJECT_TEST_SINK", self.path("marks"));
        command
    }

    fn truth(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("truth")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn events(&self) -> Vec<Value> {
        self.truth().into_iter().filter(|entry| entry["kind"] == "event").collect()
    }

    fn marks(&self) -> Marks {
        Marks::read(&std::fs::read(self.path("marks")).unwrap_or_default())
    }
}

fn output(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    assert_eq!(String::from_utf8_lossy(&stderr), "");
    String::from_utf8(stdout).unwrap()
}

/// What the library reported.
#[derive(Default)]
struct Marks {
    spans: Vec<GpuSpan>,
    bursts: Vec<(ClockBurst, Vec<ClockReading>)>,
    states: Vec<(InjectState, String)>,
}

impl Marks {
    fn read(mut bytes: &[u8]) -> Self {
        let mut marks = Self::default();
        while !bytes.is_empty() {
            let header: MarkHeader = bytemuck::pod_read_unaligned(&bytes[..size_of::<MarkHeader>()]);
            let (payload, rest) = bytes.split_at(header.size as usize);
            bytes = rest;
            match MarkKind::try_from(header.kind).unwrap() {
                MarkKind::GpuSpan => marks.spans.push(bytemuck::pod_read_unaligned(payload)),
                MarkKind::ClockBurst => {
                    let (fixed, tail) = payload.split_at(size_of::<ClockBurst>());
                    let burst: ClockBurst = bytemuck::pod_read_unaligned(fixed);
                    let readings: Vec<ClockReading> = tail
                        .chunks_exact(size_of::<ClockReading>())
                        .map(bytemuck::pod_read_unaligned)
                        .collect();
                    assert_eq!(readings.len(), burst.readings as usize);
                    marks.bursts.push((burst, readings));
                }
                MarkKind::InjectState => {
                    let (fixed, reason) = payload.split_at(size_of::<InjectState>());
                    marks.states.push((
                        bytemuck::pod_read_unaligned(fixed),
                        String::from_utf8(reason.into()).unwrap(),
                    ));
                }
                other => panic!("unexpected mark {other:?}"),
            }
        }
        marks
    }
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap()
}

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
    let text = output(stage.heard(&["run", "2", "1200", "1500000"]).env("WAIT_HOOK", "1"));
    assert_eq!(text, "steps 2400\n");
    let (marks, events) = (stage.marks(), stage.events());
    let rate = 1.0 + DRIFT_PPM * 1e-6;

    // Readings bracket the truth, and count from their base.
    let mut bases: HashMap<(u32, u32), f64> = HashMap::new();
    let raw_to_monotonic = raw_minus_monotonic();
    for (burst, readings) in &marks.bursts {
        assert_eq!(&burst.device_uuid[..6], b"SIMGPU");
        assert_eq!(readings.len(), 8);
        let mut truths = Vec::new();
        for reading in readings {
            let (h0, h1) = (
                reading.h0_raw_ns as i64 - raw_to_monotonic - 20_000,
                reading.h1_raw_ns as i64 - raw_to_monotonic + 20_000,
            );
            // Readings follow each other by microseconds: of the events near by, the one nearest to the bracket.
            let middle = f64::midpoint(h0 as f64, h1 as f64);
            let near = events.iter().map(|event| number(event, "complete_ns") as f64);
            truths.push(near.min_by(|a, b| (a - middle).abs().total_cmp(&(b - middle).abs())).unwrap());
        }
        let key = (burst.epoch, burst.base);
        let rebase_ms = f32::from_bits(burst.rebase_ms_bits);
        match bases.get(&key) {
            Some(_) => assert!(rebase_ms.is_nan()),
            None => {
                assert_eq!(readings[0].elapsed_ms_bits, 0f32.to_bits());
                if burst.base == 0 {
                    assert!(rebase_ms.is_nan());
                } else {
                    let since = truths[0] - bases[&(burst.epoch, burst.base - 1)];
                    assert!(
                        (f64::from(rebase_ms) * 1e6 - since * rate).abs() < 40_000.0,
                        "{rebase_ms} {since}"
                    );
                }
                bases.insert(key, truths[0]);
            }
        }
    }
    assert!(bases.len() >= 3, "a new base each second: {}", bases.len());

    // Every span: its two events in the log, their distance, and its host interval.
    let mut by_event: HashMap<u64, Vec<&Value>> = HashMap::new();
    for event in &events {
        by_event.entry(number(event, "event")).or_default().push(event);
    }
    assert!(marks.spans.len() > 2000, "{} spans", marks.spans.len());
    let mut errors = Vec::new();
    for span in &marks.spans {
        let inside = events.iter().filter(|event| {
            number(event, "tid") == u64::from(span.tid)
                && (span.enqueue_begin_ns..=span.enqueue_end_ns).contains(&number(event, "record_ns"))
        });
        let [begin, end] = inside.collect::<Vec<_>>()[..] else { panic!("not two events in {span:?}") };
        let (begin, end) = (number(begin, "complete_ns") as f64, number(end, "complete_ns") as f64);
        let span_ns = f64::from(f32::from_bits(span.span_ms_bits)) * 1e6;
        assert!((span_ns - (end - begin) * rate).abs() <= QUANTUM_NS + 200.0, "{span_ns} {}", end - begin);
        assert!(span_ns >= 1_500_000.0 - QUANTUM_NS);
        let begin_ns = f64::from(f32::from_bits(span.begin_ms_bits)) * 1e6;
        assert!(begin_ns > 0.0 && begin_ns < 2.5e9, "counted from a base that is not the last: {begin_ns}");
        errors.push(begin_ns - (begin - bases[&(span.epoch, span.base)]) * rate);
    }
    errors.sort_by(f64::total_cmp);
    let worst = errors[0].abs().max(errors[errors.len() - 1].abs());
    // The base's truth is known from its bracket, which tells neighbouring readings apart.
    assert!(worst < 60_000.0, "begin is off by {worst} ns");
    assert!(errors[errors.len() / 2].abs() < 1_000.0, "median {}", errors[errors.len() / 2]);

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
    assert_eq!(state.state, INJECT_ACTIVE);
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

//! A folder with a program and the libraries that it uses, and what the injected library reported.
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;
use tracer_abi::mark::{
    ClockBurst, ClockReading, GpuLayer, GpuLayers, GpuSpan, InjectState, MarkHeader, MarkKind, Nvtx,
    NvtxState,
};

/// Device clock of the tests: 0.5 µs steps, 40 ppm fast.
pub(crate) const QUANTUM_NS: f64 = 500.0;
pub(crate) const DRIFT_PPM: f64 = 40.0;

/// A folder with the program and its libraries.
pub(crate) struct Stage {
    pub(crate) folder: tempfile::TempDir,
}

/// A library that cargo built with this test.
pub(crate) fn built(name: &str) -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().skip(1).map(|folder| folder.join(name)).find(|path| path.exists()).unwrap()
}

pub(crate) fn compile(output: &Path, source: &Path, flags: &[&str]) {
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O2", "-o"]).arg(output).args(flags).arg(source).args(["-ldl", "-lpthread"]);
    assert!(command.status().expect("g++ is needed: apt-get install g++").success(), "{command:?}");
}

impl Stage {
    pub(crate) fn new(engine_flags: &[&str]) -> Self {
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

    /// With the driver and a program of its own alone.
    pub(crate) fn with_program(source: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let driver = folder.path().join("libcuda.so.1");
        std::fs::copy(built("libstandin_cuda.so"), &driver).unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        compile(&folder.path().join("program"), &here.join(source), flags);
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
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
    pub(crate) fn injected(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env("LD_PRELOAD", built("libtracer_inject.so"));
        command
    }

    /// With the library in it, listened to.
    pub(crate) fn heard(&self, arguments: &[&str]) -> Command {
        let mut command = self.injected(arguments);
        command.env("TRACER_INJECT_TEST_SINK", self.path("marks"));
        command
    }

    pub(crate) fn truth(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("truth")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.truth().iter().filter(|entry| entry["kind"] == "event").map(Event::from).collect()
    }

    pub(crate) fn marks(&self) -> Marks {
        Marks::read(&std::fs::read(self.path("marks")).unwrap_or_default())
    }
}

pub(crate) fn output(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&stderr));
    assert_eq!(String::from_utf8_lossy(&stderr), "");
    String::from_utf8(stdout).unwrap()
}

/// What the library reported.
#[derive(Default)]
pub(crate) struct Marks {
    pub(crate) spans: Vec<GpuSpan>,
    pub(crate) bursts: Vec<(ClockBurst, Vec<ClockReading>)>,
    pub(crate) states: Vec<(InjectState, String)>,
    /// With name and domain.
    pub(crate) nvtx: Vec<(Nvtx, String, String)>,
    pub(crate) nvtx_states: Vec<NvtxState>,
    /// Of each sampled step, the parts of its mark.
    pub(crate) layers: Vec<(GpuLayers, Vec<(GpuLayer, String)>)>,
}

impl Marks {
    pub(crate) fn read(mut bytes: &[u8]) -> Self {
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
                MarkKind::Nvtx => {
                    let (fixed, tail) = payload.split_at(size_of::<Nvtx>());
                    let nvtx: Nvtx = bytemuck::pod_read_unaligned(fixed);
                    let (name, domain) = tail.split_at(nvtx.name_bytes.into());
                    assert_eq!(domain.len(), usize::from(nvtx.domain_bytes));
                    let text = |bytes: &[u8]| String::from_utf8(bytes.into()).unwrap();
                    marks.nvtx.push((nvtx, text(name), text(domain)));
                }
                MarkKind::NvtxState => marks.nvtx_states.push(bytemuck::pod_read_unaligned(payload)),
                MarkKind::GpuLayers => {
                    let (fixed, tail) = payload.split_at(size_of::<GpuLayers>());
                    let mark: GpuLayers = bytemuck::pod_read_unaligned(fixed);
                    let (layers, mut names) = tail.split_at(mark.layers as usize * size_of::<GpuLayer>());
                    let layers = layers.chunks_exact(size_of::<GpuLayer>()).map(|bytes| {
                        let layer: GpuLayer = bytemuck::pod_read_unaligned(bytes);
                        let (name, rest) = names.split_at(layer.name_bytes.into());
                        names = rest;
                        (layer, String::from_utf8(name.into()).unwrap())
                    });
                    let layers: Vec<_> = layers.collect();
                    assert_eq!(names, b"");
                    marks.layers.push((mark, layers));
                }
                other => panic!("unexpected mark {other:?}"),
            }
        }
        marks
    }
}

/// A recorded event, as the driver logged it; CLOCK_MONOTONIC ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) tid: u64,
    pub(crate) record_ns: u64,
    pub(crate) complete_ns: u64,
}

impl From<&Value> for Event {
    fn from(value: &Value) -> Self {
        let number = |key: &str| value[key].as_u64().unwrap();
        Self { tid: number("tid"), record_ns: number("record_ns"), complete_ns: number("complete_ns") }
    }
}

/// A device time against the truth: the device's clock has steps, f32 milliseconds have 0.12 µs at 2 s, and the log's
/// times are converted from CLOCK_MONOTONIC_RAW.
pub(crate) fn assert_near(ms: f32, truth_ns: f64) {
    let ns = f64::from(ms) * 1e6;
    assert!((ns - truth_ns).abs() <= QUANTUM_NS + 300.0, "{ns} ns, not {truth_ns}");
}

//! NVML beside the trace: a stand-in library says what a file says, and the capture must say the same.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tracer::{capture::Capture, event::GpuSample, timeline::tables::Tables};

use crate::{Test, faults, fixture::Built};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("nvml::readings_in_order", readings_in_order),
    ("nvml::absent", absent),
    ("nvml::hangs", hangs),
    ("nvml::fails", fails),
    ("nvml::driver_agrees", driver_agrees),
];

const UUID: [u8; 16] = *b"SIMGPU\0\0\0\0\0\0\0\0\0\x01";

/// A server that is recorded, and what the stand-in library and the kernel log say.
struct Recorded {
    folder: tempfile::TempDir,
    recorder: Child,
    port: String,
}

impl Recorded {
    /// Starts the recorder with a stand-in NVML (or none) in its way, and waits for the server.
    fn start(nvml: bool, record: &[&str], readings: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name);
        standin::stage(&at("lib"))?;
        if !nvml {
            for name in ["libnvidia-ml.so", "libnvidia-ml.so.1"] {
                fs::remove_file(at("lib").join(name))?;
            }
        }
        fs::write(at("readings"), readings)?;
        fs::write(at("kmsg"), "")?;
        let mut recorder = faults::tracer()?
            .args(["record", "--duration", "60s", "--no-sched", "--sample-hz", "0", "--kernel-log"])
            .arg(at("kmsg"))
            .args(record)
            .arg("-o")
            .arg(at("capture"))
            .arg("--")
            .arg(standin::built("standin-server", "standin-server")?)
            .env("LD_LIBRARY_PATH", at("lib"))
            .env("STANDIN_NVML_FILE", at("readings"))
            .stdout(Stdio::piped())
            .stderr(fs::File::create(at("stderr"))?)
            .spawn()?;
        let mut lines = BufReader::new(recorder.stdout.take().context("no stdout")?).lines();
        let port = loop {
            let line = lines.next().context("the server says nothing")??;
            if let Some(port) = line.strip_prefix("listening on 127.0.0.1:") {
                break port.to_owned();
            }
        };
        // Nobody reads what it prints later; a closed pipe would be an error.
        std::thread::spawn(move || lines.for_each(drop));
        let recorded = Self { folder, recorder, port };
        let points = recorded.at("capture/raw/points.arrows");
        faults::wait_for(|| {
            fs::read(&points).is_ok_and(|bytes| bytes.windows(9).any(|w| w == b"enqueueV3"))
        })?;
        Ok(recorded)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the readings as a whole, and gives the sampler time for some.
    fn say(&self, readings: &str) -> Result<()> {
        fs::write(self.at("new"), readings)?;
        fs::rename(self.at("new"), self.at("readings"))?;
        std::thread::sleep(Duration::from_millis(600));
        Ok(())
    }

    /// A few requests, so that there is something to see.
    fn load(&self) -> Result<()> {
        let loaded = Command::new(standin::built("standin-server", "standin-server")?)
            .args(["load", "--port", &self.port, "--requests", "4", "--concurrency", "2"])
            .args(["--output-tokens", "5-10"])
            .output()?;
        ensure!(loaded.status.success(), "load: {}", faults::stderr(&loaded));
        Ok(())
    }

    /// Ends the server and with it the recording, which must succeed; how long that took.
    fn end(&mut self) -> Result<Duration> {
        let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{}", self.port))?;
        stream.write_all(b"POST /shutdown HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")?;
        let begun = Instant::now();
        let status = faults::wait(&mut self.recorder)?;
        ensure!(status.success(), "the recorder ended with {status}: {}", self.stderr());
        Ok(begun.elapsed())
    }

    fn stderr(&self) -> String {
        fs::read_to_string(self.at("stderr")).unwrap_or_default()
    }

    fn tables(&self) -> Result<Tables> {
        Ok(Capture::open(&self.at("capture"))?.tables()?)
    }

    fn report(&self, arguments: &[&str]) -> Result<String> {
        let output = faults::tracer()?.arg("report").arg(self.at("capture")).args(arguments).output()?;
        ensure!(output.status.success(), "report: {}", faults::stderr(&output));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // Already gone in the good case.
        let _gone = self.recorder.kill();
        let _gone = self.recorder.wait();
    }
}

fn ledger(tables: &Tables, name: &str) -> u64 {
    tables.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum()
}

/// What a reading was, in order, each value once.
fn course<T: PartialEq>(samples: &[GpuSample], reading: impl Fn(&GpuSample) -> T) -> Vec<T> {
    let mut course: Vec<T> = samples.iter().map(reading).collect();
    course.dedup();
    course
}

fn readings_in_order() -> Result<()> {
    let own = std::process::id();
    let mut recorded = Recorded::start(true, &["--gpu-hz", "50"], "gpu_percent=10\npower_mw=!3\n")?;
    recorded.load()?;
    recorded.say(&format!(
        "gpu_percent=20\nsm_clock_mhz=1200\npower_mw=300000\nthrottle_reasons=68\nprocesses={own}:4096:30:4\n"
    ))?;
    let mut log = fs::OpenOptions::new().append(true).open(recorded.at("kmsg"))?;
    log.write_all(
        b"6,1,100,-;something else\n4,2,200,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1, it fell off the bus.\n",
    )?;
    recorded.say(
        "gpu_percent=30\nsm_clock_mhz=1980\npower_mw=310000\ntemperature_c=!3\nmemory_used_bytes=12345\n",
    )?;
    recorded.end()?;

    let tables = recorded.tables()?;
    let samples = &tables.gpu_samples;
    ensure!(samples.len() > 30, "{} samples: {}", samples.len(), recorded.stderr());
    ensure!(course(samples, |s| s.gpu_percent) == [Some(10), Some(20), Some(30)]);
    ensure!(course(samples, |s| s.sm_clock_mhz) == [Some(1500), Some(1200), Some(1980)]);
    // What is not supported is no zero.
    ensure!(course(samples, |s| s.power_mw) == [None, Some(300_000), Some(310_000)]);
    ensure!(course(samples, |s| s.temperature_c) == [Some(55), None]);
    ensure!(course(samples, |s| s.throttle_reasons) == [Some(0), Some(0x44), Some(0)]);
    ensure!(course(samples, |s| s.memory_used_bytes) == [Some(1 << 30), Some(12_345)]);
    ensure!(
        samples.iter().all(|s| s.device_uuid == UUID && s.simulated && s.device_name.contains("simulated"))
    );
    ensure!(samples.is_sorted_by_key(|s| s.time_ns), "not in order");
    let (begin, end) = (tables.meta.started_ns, tables.meta.ended_ns + 1_000_000_000);
    ensure!(samples.iter().all(|s| (begin..end).contains(&s.time_ns) && s.bound_ns < 1_000_000_000), "times");
    let mut bounds: Vec<u64> = samples.iter().map(|s| s.bound_ns).collect();
    bounds.sort_unstable();
    println!(
        "{} samples, bound p50 {} µs, max {} µs",
        bounds.len(),
        bounds[bounds.len() / 2] / 1000,
        bounds[bounds.len() - 1] / 1000
    );

    let process =
        tables.gpu_processes.iter().find(|p| p.sm_percent.is_some()).context("no use by a process")?;
    ensure!((process.process.tgid, process.memory_used_bytes) == (own, Some(4_096)), "{process:?}");
    ensure!((process.sm_percent, process.memory_percent) == (Some(30), Some(4)), "{process:?}");
    ensure!(process.process.start_ticks > 0, "{process:?}");

    let [xid] = tables.xids.as_slice() else { anyhow::bail!("{:?}", tables.xids) };
    ensure!((xid.xid, xid.pci.as_str(), xid.kernel_log_ns) == (79, "0000:01:00", 200_000), "{xid:?}");
    let during = samples.iter().filter(|s| s.gpu_percent == Some(20)).map(|s| s.time_ns).max().unwrap_or(0);
    ensure!(xid.time_ns < during + 200_000_000, "{xid:?} came after {during}");

    ensure!(tables.meta.simulated && tables.meta.not_recorded.is_empty(), "{:?}", tables.meta);
    for name in ["nvml_failed", "nvml_dropped", "nvml_hung", "nvml_absent", "kmsg_overrun"] {
        ensure!(ledger(&tables, name) == 0, "{name}");
    }
    let report = recorded.report(&[])?;
    for part in ["SimGPU (simulated)", "SM clock 1200…1980 MHz", "SwPowerCap", "XID 79"] {
        ensure!(report.contains(part), "{part:?} is not in {report}");
    }
    let json: serde_json::Value = serde_json::from_str(&recorded.report(&["--json"])?)?;
    ensure!(json["gpus"]["devices"][0]["power_mw_max"] == 310_000, "{}", json["gpus"]);
    let svg = recorded.at("heatmap.svg");
    ensure!(heatmap(&recorded.at("capture"), &svg)?.contains("GPU 0 · SimGPU (simulated)"));
    Ok(())
}

fn heatmap(capture: &Path, svg: &Path) -> Result<String> {
    let output = faults::tracer()?.arg("heatmap").arg(capture).arg("-o").arg(svg).output()?;
    ensure!(output.status.success(), "heatmap: {}", faults::stderr(&output));
    Ok(fs::read_to_string(svg)?)
}

/// Whether this machine has an NVML of its own, which the recorder would find.
fn has_nvml() -> bool {
    Command::new("ldconfig")
        .arg("-p")
        .output()
        .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("libnvidia-ml.so.1"))
}

fn absent() -> Result<()> {
    if has_nvml() {
        println!("SKIP nvml::absent: this machine has libnvidia-ml.so.1");
        return Ok(());
    }
    let mut recorded = Recorded::start(false, &[], "")?;
    recorded.load()?;
    recorded.end()?;
    let said = recorded.stderr();
    ensure!(said.matches("GPU readings not recorded: NVML: ").count() == 1, "{said}");
    let tables = recorded.tables()?;
    ensure!(tables.gpu_samples.is_empty() && ledger(&tables, "nvml_absent") == 1);
    ensure!(tables.meta.not_recorded.contains_key("GPU readings"), "{:?}", tables.meta);
    ensure!(recorded.report(&[])?.contains("GPU readings not recorded"));
    let svg = recorded.at("heatmap.svg");
    ensure!(!heatmap(&recorded.at("capture"), &svg)?.contains("SM clock"), "a strip without samples");

    // Not asked for, it is not missed; and nothing is said where nothing is to be said.
    for arguments in [&["--gpu-hz", "0"][..], &["--quiet"][..]] {
        let mut recorded = Recorded::start(false, arguments, "")?;
        recorded.load()?;
        recorded.end()?;
        ensure!(!recorded.stderr().contains("NVML"), "{arguments:?}: {}", recorded.stderr());
    }
    Ok(())
}

/// A call that does not come back neither delays the events nor the end.
fn hangs() -> Result<()> {
    let mut recorded = Recorded::start(true, &[], "")?;
    recorded.say("sleep_ms=100000\n")?;
    recorded.load()?;
    let took = recorded.end()?;
    ensure!(took < Duration::from_secs(10), "the end took {took:?}");
    let tables = recorded.tables()?;
    ensure!(!tables.tokens.is_empty() && !tables.gpu_samples.is_empty());
    ensure!(ledger(&tables, "nvml_hung") == 1, "{:?}", tables.ledger);
    ensure!(recorded.stderr().contains("did not answer"), "{}", recorded.stderr());
    Ok(())
}

/// A GPU that is lost (a driver reset) is said once, counted, and seen again when it comes back.
fn fails() -> Result<()> {
    let keys = [
        "gpu_percent",
        "memory_total_bytes",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "power_mw",
        "temperature_c",
        "throttle_reasons",
        "processes",
    ];
    let lost: String = keys.iter().map(|key| format!("{key}=!15\n")).collect();
    let mut recorded = Recorded::start(true, &["--gpu-hz", "20"], "gpu_percent=1\n")?;
    recorded.say(&lost)?;
    recorded.load()?;
    recorded.say("gpu_percent=2\n")?;
    recorded.end()?;
    let tables = recorded.tables()?;
    ensure!(course(&tables.gpu_samples, |s| s.gpu_percent) == [Some(1), Some(2)]);
    ensure!(ledger(&tables, "nvml_failed") > 3, "{:?}", tables.ledger);
    ensure!(recorded.stderr().matches("GPU 0: ").count() == 1, "{}", recorded.stderr());
    Ok(())
}

/// An Xid, and what the driver answered to the program at about that time.
fn driver_agrees() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("lib"))?;
    standin::stage_driver(&at("lib"))?;
    fs::write(at("kmsg"), "")?;
    let mut recorder = faults::tracer()?
        .args([
            "record",
            "--duration",
            "60s",
            "--no-sched",
            "--sample-hz",
            "0",
            "--gpu-hz",
            "0",
            "--kernel-log",
        ])
        .arg(at("kmsg"))
        .arg("-o")
        .arg(at("capture"))
        .arg("--")
        .arg(Built::get()?.path("fixture"))
        .arg("lose")
        .arg(at("kmsg"))
        .env("LD_LIBRARY_PATH", at("lib"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(at("stderr"))?)
        .spawn()?;
    let mut stdin = recorder.stdin.take().context("no stdin")?;
    let points = at("capture/raw/points.arrows");
    faults::wait_for(|| {
        fs::read(&points).is_ok_and(|bytes| bytes.windows(19).any(|w| w == b"cuStreamSynchronize"))
    })?;
    stdin.write_all(b"\n")?;
    let mut lines = BufReader::new(recorder.stdout.take().context("no stdout")?).lines();
    ensure!(lines.any(|line| line.is_ok_and(|line| line == "done 0")), "the program failed");
    drop(stdin);
    let status = faults::wait(&mut recorder)?;
    // It did what was asked, and says that the program made no step.
    ensure!(status.code() == Some(3), "{status}: {}", fs::read_to_string(at("stderr"))?);

    let tables = Capture::open(&at("capture"))?.tables()?;
    let said: Vec<_> =
        tables.driver_events.iter().map(|event| (event.function.as_str(), event.code, event.count)).collect();
    ensure!(said == [("cuDevicePrimaryCtxReset_v2", 0, 1), ("cuStreamSynchronize", 400, 3)], "{said:?}");
    let [xid] = tables.xids.as_slice() else { anyhow::bail!("{:?}", tables.xids) };
    let apart: Vec<i64> = tables.driver_events.iter().map(|event| event.after_ns(xid.time_ns)).collect();
    println!("the driver answered {apart:?} ns after the Xid was read");
    let report = faults::tracer()?.arg("report").arg(at("capture")).output()?;
    let report = String::from_utf8_lossy(&report.stdout).into_owned();
    for part in [
        "XID 79",
        "it: cuDevicePrimaryCtxReset_v2 ended a context in pid",
        "3 times: cuStreamSynchronize: INVALID_HANDLE (400)",
    ] {
        ensure!(report.contains(part), "{part:?} is not in {report}");
    }
    Ok(())
}

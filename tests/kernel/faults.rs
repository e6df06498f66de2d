//! Wrong usage and missing pieces: each a clear message, and nobody harmed.

use std::{
    fs,
    path::Path,
    process::{Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tracer::capture::Capture;

use crate::{
    Test,
    fixture::{Built, Running},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("faults::no_root", no_root),
    ("faults::no_btf", no_btf),
    ("faults::no_tracefs", no_tracefs),
    ("faults::wrong_usage", wrong_usage),
    ("faults::process_is_gone", process_is_gone),
    ("faults::process_without_engine", process_without_engine),
    ("faults::engine_without_type_information", engine_without_type_information),
    ("faults::command_not_found", command_not_found),
    ("faults::output_exists", output_exists),
    ("faults::output_not_writable", output_not_writable),
    ("faults::full_disk", full_disk),
    ("faults::target_killed", target_killed),
    ("faults::recorder_killed", recorder_killed),
    ("faults::interrupted", interrupted),
];

/// The `tracer` command that was built with these tests.
pub(crate) fn tracer() -> Result<Command> {
    let mut command = Command::new(standin::built("tracer", "tracer")?);
    command.stdin(Stdio::null()).env_remove("TRACER_LOG");
    Ok(command)
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The command fails with this code, and says this.
fn refuses(output: &Output, code: i32, says: &[&str]) -> Result<()> {
    let text = stderr(output);
    ensure!(output.status.code() == Some(code), "{}: {text}", output.status);
    for part in says {
        ensure!(text.contains(part), "{part:?} is not in: {text}");
    }
    ensure!(!text.contains("panicked"), "{text}");
    Ok(())
}

fn no_root() -> Result<()> {
    // Where everyone can run it.
    let folder = tempfile::tempdir_in("/tmp")?;
    let copy = folder.path().join("tracer");
    fs::copy(standin::built("tracer", "tracer")?, &copy)?;
    let mut open = fs::metadata(folder.path())?.permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut open, 0o755);
    fs::set_permissions(folder.path(), open)?;
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&copy)
        .args(["record", "--pid", "1", "--duration", "1s"])
        .current_dir("/tmp")
        .output()?;
    refuses(&output, 1, &["privileges", "CAP_BPF", "sudo"])
}

/// Runs a shell command in mounts of its own.
fn with_own_mounts(prepare: &str, arguments: &[&str]) -> Result<Output> {
    let tracer = standin::built("tracer", "tracer")?;
    let script = format!("{prepare} && exec \"$0\" \"$@\"");
    Ok(Command::new("unshare").args(["-m", "sh", "-c", &script]).arg(tracer).args(arguments).output()?)
}

fn no_btf() -> Result<()> {
    let output = with_own_mounts(
        "mount -t tmpfs nodev /sys/kernel/btf",
        &["record", "--pid", "1", "--duration", "1s"],
    )?;
    refuses(&output, 1, &["BTF", "/sys/kernel/btf/vmlinux", "CONFIG_DEBUG_INFO_BTF"])
}

/// tracefs is not needed at all.
fn no_tracefs() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let mut running = Running::start(&["burn"])?;
    let pid = running.pid().to_string();
    let hide = "for fs in /sys/kernel/tracing /sys/kernel/debug/tracing; do \
                while mountpoint -q $fs; do umount -l $fs; done; done";
    let output = with_own_mounts(
        hide,
        &["record", "--pid", &pid, "--duration", "500ms", "-o", &capture.to_string_lossy()],
    )?;
    ensure!(output.status.code() == Some(3), "{}: {}", output.status, stderr(&output));
    ensure!(Capture::open(&capture)?.processes()?.count() > 0, "nothing was recorded");
    running.tell()?;
    running.wait_line()?;
    running.end()
}

fn wrong_usage() -> Result<()> {
    for (arguments, says) in [
        (&["record", "--pid", "x"][..], "invalid value 'x'"),
        (&["record", "--pid", "1", "--duration", "0"], "not a usable duration"),
        (&["record", "--pid", "1", "--comm", "x"], "cannot be used with"),
        (&["frobnicate"], "unrecognized subcommand"),
    ] {
        refuses(&tracer()?.args(arguments).output()?, 2, &[says])?;
    }
    let nothing = tracer()?.args(["report", "/nonexistent/capture"]).output()?;
    refuses(&nothing, 1, &["/nonexistent/capture"])
}

fn process_is_gone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let output = tracer()?.args(["record", "--pid", "4194303", "-o"]).arg(&capture).output()?;
    refuses(&output, 1, &["process 4194303 is gone"])?;
    ensure!(!capture.exists(), "a capture of nothing was left");
    let output = tracer()?.args(["record", "--comm", "no-such-name", "-o"]).arg(&capture).output()?;
    refuses(&output, 1, &["no-such-name"])
}

fn process_without_engine() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let output = tracer()?
        .args(["record", "--duration", "500ms", "-o"])
        .arg(&capture)
        .args(["--", "sleep", "3"])
        .output()?;
    refuses(&output, 3, &["no engine function", "no mark site"])?;
    Capture::open(&capture)?;
    Ok(())
}

fn engine_without_type_information() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let library = standin::Nvinfer::NoRtti.stage(folder.path())?;
    let output = tracer()?
        .args(["record", "--no-inject", "--duration", "1s", "-o"])
        .arg(folder.path().join("capture"))
        .args(["--", "env"])
        .arg(format!("LD_PRELOAD={}", library.display()))
        .args(["sleep", "2"])
        .output()?;
    refuses(&output, 3, &["libnvinfer.so.10", "enqueueV3", "RTTI"])
}

fn command_not_found() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let output = tracer()?
        .args(["record", "-o"])
        .arg(folder.path().join("capture"))
        .args(["--", "/nonexistent/server"])
        .output()?;
    refuses(&output, 3, &["/nonexistent/server", "No such file"])
}

fn output_exists() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let precious = folder.path().join("precious");
    fs::write(&precious, "mine")?;
    let output = tracer()?
        .args(["record", "--pid", &std::process::id().to_string(), "--duration", "1s", "-o"])
        .arg(folder.path())
        .output()?;
    refuses(&output, 1, &[&folder.path().to_string_lossy(), "empty"])?;
    ensure!(fs::read_to_string(&precious)? == "mine", "what was there is gone");
    ensure!(fs::read_dir(folder.path())?.count() == 1, "something was added");
    Ok(())
}

fn output_not_writable() -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let me = std::process::id().to_string();
    for place in [file.path().join("capture"), Path::new("/proc/capture").to_owned()] {
        let output =
            tracer()?.args(["record", "--pid", &me, "--duration", "1s", "-o"]).arg(&place).output()?;
        refuses(&output, 1, &[&place.to_string_lossy()])?;
    }
    Ok(())
}

/// The disk fills up while a recording writes: it ends with a clear message, and the target goes on.
fn full_disk() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mounted = Mounted::tmpfs(folder.path(), "size=1m")?;
    let mut running = Running::start(&["flood"])?;
    let profile = Built::get()?.path("fixture.toml");
    let mut recorder = tracer()?
        .args(["record", "--pid", &running.pid().to_string(), "--duration", "20s", "--engine"])
        .arg(profile)
        .arg("-o")
        .arg(folder.path().join("capture"))
        .stderr(Stdio::piped())
        .spawn()?;
    wait_for(|| folder.path().join("capture/meta.json").exists())?;
    // The first flush comes after a second; by then the probes are in.
    wait_for(|| folder.path().join("capture/raw/points.arrows").exists())?;
    running.tell()?;
    running.wait_line()?;
    let status = wait(&mut recorder)?;
    let output = Output { status, stdout: Vec::new(), stderr: read_all(recorder.stderr.take())? };
    refuses(&output, 1, &["space"])?;
    running.end()?;
    drop(mounted);
    Ok(())
}

fn target_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let mut running = Running::start(&["burn"])?;
    let mut recorder = start_recorder(running.pid(), &capture)?;
    running.child.kill()?;
    running.child.wait()?;
    let status = wait(&mut recorder)?;
    ensure!(status.code() == Some(3), "{status}");
    Capture::open(&capture)?;
    Ok(())
}

/// kill -9 of the recorder: the target goes on unharmed, and what was recorded is recovered.
fn recorder_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let mut running = Running::start(&["calls"])?;
    let mut recorder = start_recorder(running.pid(), &capture)?;
    running.tell()?;
    running.wait_line()?;
    let calls = capture.join("raw/calls.arrows");
    wait_for(|| fs::metadata(&calls).is_ok_and(|meta| meta.len() > 50_000))?;
    recorder.kill()?;
    recorder.wait()?;
    let report = tracer()?.arg("report").arg(&capture).output()?;
    refuses(&report, 1, &["recover"])?;
    let recovered = tracer()?.arg("recover").arg(&capture).output()?;
    ensure!(recovered.status.success(), "{}", stderr(&recovered));
    let calls = Capture::open(&capture)?.calls()?.count();
    ensure!(calls == 1000, "{calls} calls of 1000 were recovered");
    running.end()
}

fn interrupted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    let mut running = Running::start(&["calls"])?;
    let mut recorder = start_recorder(running.pid(), &capture)?;
    running.tell()?;
    running.wait_line()?;
    let pid = i32::try_from(recorder.id())?;
    // SAFETY: a plain system call, to a child that was not waited for.
    ensure!(unsafe { libc::kill(pid, libc::SIGINT) } == 0, "kill");
    let status = wait(&mut recorder)?;
    ensure!(status.code() == Some(3), "{status}");
    let calls = Capture::open(&capture)?.calls()?.count();
    ensure!(calls == 1000, "{calls} calls of 1000");
    running.end()
}

/// Records a fixture; returns when its probes are in place.
fn start_recorder(pid: u32, capture: &Path) -> Result<std::process::Child> {
    let recorder = tracer()?
        .args(["record", "--quiet", "--pid", &pid.to_string(), "--duration", "60s", "--engine"])
        .arg(Built::get()?.path("fixture.toml"))
        .arg("-o")
        .arg(capture)
        .spawn()?;
    let points = capture.join("raw/points.arrows");
    // A stream's schema alone is shorter.
    wait_for(|| fs::metadata(&points).is_ok_and(|meta| meta.len() > 3500))?;
    Ok(recorder)
}

pub(crate) fn wait_for(condition: impl FnMut() -> bool) -> Result<()> {
    wait_for_at_most(Duration::from_secs(30), condition)
}

pub(crate) fn wait_for_at_most(most: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    let patience = Instant::now() + most;
    while !condition() {
        ensure!(Instant::now() < patience, "waited in vain");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

pub(crate) fn wait(child: &mut std::process::Child) -> Result<ExitStatus> {
    let mut status = None;
    wait_for(|| {
        status = child.try_wait().ok().flatten();
        status.is_some()
    })
    .inspect_err(|_| {
        let _gone = child.kill();
    })?;
    status.context("no status")
}

fn read_all(pipe: Option<impl std::io::Read>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// A file system that is unmounted when this is dropped.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn tmpfs(at: &'a Path, options: &str) -> Result<Self> {
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", options, "nodev"]).arg(at).status()?;
        ensure!(status.success(), "mount: {status}");
        Ok(Self(at))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // What is left mounted is gone with the machine.
        let _left = Command::new("umount").args(["-l"]).arg(self.0).status();
    }
}

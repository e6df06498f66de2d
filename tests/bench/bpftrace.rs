//! bpftrace as a peer: it counts the calls of a function, with a probe at the function's entry.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tracer::probe::process;

use crate::server::Running;

/// It compiles its program when it starts.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(2);

/// A function of a library.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) library: PathBuf,
    pub(crate) name: &'static str,
    /// File offset of its first instruction.
    pub(crate) offset: u64,
}

/// What it says that it is; `None` where it is not installed.
pub(crate) fn version() -> Option<String> {
    let output = Command::new("bpftrace").arg("--version").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// bpftrace, counting.
pub(crate) struct Bpftrace(Running);

impl Bpftrace {
    /// Starts it, and waits until its probe is in the process.
    pub(crate) fn count(pid: u32, function: &Function) -> Result<Self> {
        let first = FirstByte::of(pid, function)?;
        let before = first.read()?;
        let program =
            format!("uprobe:\"{}\":{} {{ @ = count(); }}", function.library.display(), function.name);
        let mut command = Command::new("bpftrace");
        command.args(["-e", &program, "-p", &pid.to_string()]);
        // It says more there than what went wrong: shown only where it ends too early.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = Running::start(&mut command)?;
        let patience = Instant::now() + PATIENCE;
        // The kernel writes a breakpoint over the instruction.
        while first.read()? == before {
            if let Some(status) = running.0.try_wait()? {
                let said = running.0.stderr.take().map(std::io::read_to_string).transpose()?;
                let said = said.unwrap_or_default();
                bail!("bpftrace ended ({status}) without probing {}: {}", function.name, said.trim());
            }
            ensure!(
                Instant::now() < patience,
                "bpftrace does not probe {} within {} s",
                function.name,
                PATIENCE.as_secs()
            );
            std::thread::sleep(POLL);
        }
        Ok(Self(running))
    }

    /// Ends it as Ctrl-C does; returns what it has counted.
    pub(crate) fn stop(mut self) -> Result<u64> {
        let child = &mut self.0.0;
        // SAFETY: a plain system call; the child has not been waited for, so that its number is still its own.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) };
        let mut stdout = child.stdout.take().context("no pipe from bpftrace")?;
        let text = std::io::read_to_string(&mut stdout).context("reading what bpftrace prints")?;
        child.wait().context("cannot wait for bpftrace")?;
        let count = text.lines().find_map(|line| line.strip_prefix("@: ")?.parse().ok());
        count.with_context(|| format!("bpftrace prints no count, but {text:?}"))
    }
}

/// The first byte of a function in the memory of a process.
struct FirstByte {
    memory: File,
    address: u64,
}

impl FirstByte {
    fn of(pid: u32, function: &Function) -> Result<Self> {
        let path = function.library.to_string_lossy();
        let mappings = process::mappings(pid)?;
        let inside = |map: &&process::FileMapping| {
            map.path == path && (map.offset..map.offset + (map.end - map.begin)).contains(&function.offset)
        };
        let mapping = mappings.iter().find(inside);
        let mapping = mapping.with_context(|| format!("process {pid} has not loaded {path}"))?;
        let file = format!("/proc/{pid}/mem");
        let memory = File::open(&file).with_context(|| format!("cannot open {file}"))?;
        Ok(Self { memory, address: mapping.begin + (function.offset - mapping.offset) })
    }

    fn read(&self) -> Result<u8> {
        let mut byte = [0];
        let read = self.memory.read_exact_at(&mut byte, self.address);
        read.with_context(|| format!("cannot read the traced process's code at {:#x}", self.address))?;
        Ok(byte[0])
    }
}

//! perf as a child process.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{server::Running, stacks::Way};

/// `perf record` of a process.
pub(crate) struct Perf {
    running: Running,
    data: PathBuf,
}

impl Perf {
    /// Starts it and waits until it writes: how it starts is none of a sample's cost.
    pub(crate) fn start(pid: u32, way: Way, hz: u64, folder: &Path) -> Result<Self> {
        let data = folder.join("perf.data");
        // Of the round before.
        if data.exists() {
            fs::remove_file(&data).with_context(|| format!("cannot remove {}", data.display()))?;
        }
        let mut command = Command::new("perf");
        command.args(["record", "-e", "cpu-clock", "-F", &hz.to_string(), "--call-graph"]);
        command.args(way.perf()).arg("-p").arg(pid.to_string()).arg("-o").arg(&data).stderr(Stdio::piped());
        let running = Running(command.spawn().context("running perf (apt-get install linux-perf)")?);
        let perf = Self { running, data };
        perf.wait_for_more()?;
        Ok(perf)
    }

    pub(crate) fn id(&self) -> u32 {
        self.running.0.id()
    }

    pub(crate) fn bytes(&self) -> u64 {
        fs::metadata(&self.data).map_or(0, |metadata| metadata.len())
    }

    /// Until it has written more, beyond the file's beginning.
    pub(crate) fn wait_for_more(&self) -> Result<()> {
        const HEAD_BYTES: u64 = 1 << 16;
        let (before, patience) = (self.bytes().max(HEAD_BYTES), Instant::now() + Duration::from_secs(30));
        while self.bytes() <= before {
            ensure!(Instant::now() < patience, "perf records nothing");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Bytes and samples that it has written.
    pub(crate) fn stop(mut self) -> Result<(u64, f64)> {
        // SAFETY: a plain system call; the child has not been waited for.
        unsafe { libc::kill(self.running.0.id().cast_signed(), libc::SIGINT) };
        let stderr = self.running.0.stderr.take().context("no stderr")?;
        let said: Vec<String> = BufReader::new(stderr).lines().collect::<std::io::Result<_>>()?;
        self.running.0.wait()?;
        let text = said.join(" ");
        let count = text.split('(').nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        Ok((self.bytes(), count.with_context(|| format!("perf says {text:?}"))?))
    }
}

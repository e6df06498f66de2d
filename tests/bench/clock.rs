//! CPU clocks, and the little that is read of other processes.

use anyhow::{Context as _, Result, bail, ensure};

/// Reads a CPU-time clock, in ns.
pub(crate) fn cpu_ns(clock: libc::clockid_t) -> Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        bail!("cannot read CPU clock {clock}: {}", std::io::Error::last_os_error());
    }
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The clock of the CPU time of all threads of a process.
pub(crate) fn process_clock(pid: u32) -> Result<libc::clockid_t> {
    let mut clock = 0;
    // SAFETY: `clock` is valid for writing.
    let error = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) };
    ensure!(error == 0, "process {pid} has no CPU clock: {}", std::io::Error::from_raw_os_error(error));
    Ok(clock)
}

/// Most memory that a process has had so far, in bytes (VmHWM).
pub(crate) fn peak_rss(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse().ok());
    let kib: u64 = kib.with_context(|| format!("{path} has no VmHWM"))?;
    Ok(kib << 10)
}

//! Which CPUs a thread may run on.

use anyhow::{Context as _, Result, bail};

/// The CPUs of the current thread.
pub(crate) fn cpus() -> Result<Vec<usize>> {
    // SAFETY: zeroes are an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writing and as long as said.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0 {
        bail!("cannot read the CPUs of this thread: {}", std::io::Error::last_os_error());
    }
    // SAFETY: the index is below the number of CPUs that a set holds.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Keeps the current thread, and what it starts, on these CPUs.
pub(crate) fn pin(cpus: &[usize]) -> Result<()> {
    // SAFETY: zeroes are an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the index is below the number of CPUs that a set holds.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is valid and as long as said.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } != 0 {
        bail!("cannot keep a thread on CPUs {cpus:?}: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

/// Runs a measurement on a thread of its own, away from one CPU, which it is given for the traced process.
pub(crate) fn apart<T: Send>(measure: impl FnOnce(usize) -> Result<T> + Send) -> Result<T> {
    let mut others = cpus()?;
    let cpu = others.pop().context("no CPU")?;
    std::thread::scope(|scope| {
        let measuring = scope.spawn(move || {
            if !others.is_empty() {
                pin(&others)?;
            }
            measure(cpu)
        });
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

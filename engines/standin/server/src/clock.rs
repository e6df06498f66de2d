//! Times of the truth log: CLOCK_MONOTONIC, as the tracer's.

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid; the clocks used here exist on every Linux.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CLOCK_MONOTONIC now, in ns.
pub(crate) fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CPU time of this process so far, user and system, in ns.
pub(crate) fn cpu_ns() -> u64 {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Id of the calling thread.
pub(crate) fn gettid() -> i32 {
    // SAFETY: has no preconditions.
    unsafe { libc::gettid() }
}

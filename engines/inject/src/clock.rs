//! The host's clocks, in ns.

/// CLOCK_MONOTONIC: what the tracer stamps events with.
pub(crate) fn monotonic() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CLOCK_MONOTONIC_RAW: what the GPU's clock is compared with, since no time server bends it.
pub(crate) fn raw() -> u64 {
    read(libc::CLOCK_MONOTONIC_RAW)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes. Both clocks exist on every Linux, so that the call cannot fail.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

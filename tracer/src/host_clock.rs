//! Reads the host's clocks close together.

use crate::event::HostClock;

/// CLOCK_MONOTONIC ns.
#[must_use]
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CLOCK_MONOTONIC_RAW ns.
#[must_use]
pub fn raw_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC_RAW)
}

/// One bracket; with REALTIME and BOOTTIME if `wall`.
#[must_use]
pub fn bracket(wall: bool) -> HostClock {
    let raw_before_ns = read(libc::CLOCK_MONOTONIC_RAW);
    let monotonic_ns = read(libc::CLOCK_MONOTONIC);
    let raw_after_ns = read(libc::CLOCK_MONOTONIC_RAW);
    HostClock {
        raw_before_ns,
        monotonic_ns,
        raw_after_ns,
        realtime_ns: wall.then(|| read(libc::CLOCK_REALTIME)),
        boottime_ns: wall.then(|| read(libc::CLOCK_BOOTTIME)),
    }
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing, and the clocks above exist on every kernel that is supported.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

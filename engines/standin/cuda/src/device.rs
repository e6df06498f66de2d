//! The simulated device: its settings, its clock, and waiting for it.
//!
//! The model runs on CLOCK_MONOTONIC_RAW nanoseconds ("raw"), so that device times are exactly a line over raw,
//! whatever an NTP daemon does to CLOCK_MONOTONIC.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::OnceLock;

/// UUID of the only device.
pub(crate) const UUID: [u8; 16] = *b"SIMGPU\0\0\0\0\0\0\0\0\0\x01";
/// Its name.
pub(crate) const NAME: &str = "SimGPU (simulated)";

/// How a host thread waits for the device (`STANDIN_CUDA_WAIT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Sleeps until shortly before the end, then spins.
    Hybrid,
    /// Sleeps only.
    Sleep,
    /// Spins only.
    Spin,
}

impl FromStr for Wait {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "hybrid" => Ok(Self::Hybrid),
            "sleep" => Ok(Self::Sleep),
            "spin" => Ok(Self::Spin),
            _ => Err("must be hybrid, sleep or spin".to_owned()),
        }
    }
}

/// Settings; each is the environment variable `STANDIN_CUDA_` and the field's name in capitals.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Device clock at raw time 0, in ns (0).
    pub(crate) offset_ns: i64,
    /// How much faster the device clock runs than raw, in ppm (0).
    pub(crate) drift_ppm: f64,
    /// Step of the device clock, in ns (500).
    pub(crate) quantum_ns: i64,
    /// From the submission of a kernel on an idle stream to its begin, in ns (2,000).
    pub(crate) launch_ns: u64,
    /// From the record of an event on an idle stream to its completion, in ns (1,500).
    pub(crate) event_ns: u64,
    /// Time of a kernel that does not say how long it takes, in ns (10,000).
    pub(crate) kernel_ns: u64,
    /// Time of a copy, in ns per KiB (80, about 12 GiB/s).
    pub(crate) copy_ns_per_kib: u64,
    /// 1: kernels take no time and begin at once (0).
    pub(crate) zero: u8,
    /// 1: kernels of different streams run one after the other (0).
    pub(crate) serialise: u8,
    /// `hybrid`, `sleep` or `spin` (hybrid).
    pub(crate) wait: Wait,
    /// Hybrid wait: how long it spins at the end, in ns (80,000).
    pub(crate) spin_ns: u64,
    /// 1: there is no device (0).
    pub(crate) no_device: u8,
}

/// The value of `STANDIN_CUDA_<name>`; says so on stderr when it cannot be used.
fn setting<T: FromStr<Err: Display>>(name: &str, default: T) -> T {
    let Ok(text) = std::env::var(format!("STANDIN_CUDA_{name}")) else { return default };
    text.parse().unwrap_or_else(|error| {
        eprintln!("standin libcuda: STANDIN_CUDA_{name}={text} is ignored: {error}");
        default
    })
}

/// The settings of this process.
pub(crate) fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config {
        offset_ns: setting("OFFSET_NS", 0),
        drift_ppm: setting("DRIFT_PPM", 0.0),
        quantum_ns: setting("QUANTUM_NS", 500),
        launch_ns: setting("LAUNCH_NS", 2_000),
        event_ns: setting("EVENT_NS", 1_500),
        kernel_ns: setting("KERNEL_NS", 10_000),
        copy_ns_per_kib: setting("COPY_NS_PER_KIB", 80),
        zero: setting("ZERO", 0),
        serialise: setting("SERIALISE", 0),
        wait: setting("WAIT", Wait::Hybrid),
        spin_ns: setting("SPIN_NS", 80_000),
        no_device: setting("NO_DEVICE", 0),
    })
}

impl Config {
    /// Reading of the device clock at a raw time, in ns, a multiple of the quantum.
    pub(crate) fn stamp(&self, raw: u64) -> i64 {
        // In parts per 10^12, so that the product is exact in 128 bits.
        let drift = (self.drift_ppm * 1e6).round() as i128;
        let ahead = (i128::from(raw) * drift).div_euclid(1_000_000_000_000);
        let time = self.offset_ns.wrapping_add(raw as i64).wrapping_add(ahead as i64);
        time - time.rem_euclid(self.quantum_ns.max(1))
    }
}

fn now(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid; both clocks used here exist on every Linux.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CLOCK_MONOTONIC_RAW now, in ns.
pub(crate) fn raw_now() -> u64 {
    now(libc::CLOCK_MONOTONIC_RAW)
}

/// One instant on both clocks, (raw, monotonic) in ns: the tightest of a few brackets.
pub(crate) fn both_now() -> (u64, u64) {
    (0..5)
        .map(|_| {
            let before = raw_now();
            let monotonic = now(libc::CLOCK_MONOTONIC);
            let after = raw_now();
            (after - before, before + (after - before) / 2, monotonic)
        })
        .min()
        .map_or((0, 0), |(_, raw, monotonic)| (raw, monotonic))
}

fn sleep(ns: u64) {
    let time = libc::timespec { tv_sec: (ns / 1_000_000_000) as _, tv_nsec: (ns % 1_000_000_000) as _ };
    // SAFETY: `time` is valid. An early return is fine: the caller looks at the clock again.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

/// Returns once a raw time has come.
pub(crate) fn wait_until(raw: u64) {
    let config = config();
    loop {
        let left = raw.saturating_sub(raw_now());
        match config.wait {
            _ if left == 0 => return,
            Wait::Sleep => sleep(left),
            Wait::Hybrid if left > config.spin_ns => sleep(left - config.spin_ns),
            Wait::Hybrid | Wait::Spin => std::hint::spin_loop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn device_clock_is_a_quantised_line(raw in 0u64..1 << 60, offset in -(1i64 << 60)..1 << 60,
                                            ppm in -500i32..500, quantum in 1i64..2_000) {
            let config = Config { offset_ns: offset, drift_ppm: f64::from(ppm), quantum_ns: quantum, ..config().clone() };
            let stamp = config.stamp(raw);
            let exact = i128::from(offset) + (i128::from(raw) * i128::from(1_000_000 + ppm)).div_euclid(1_000_000);
            prop_assert_eq!(stamp.rem_euclid(quantum), 0);
            prop_assert!((0..i128::from(quantum)).contains(&(exact - i128::from(stamp))), "{} {}", exact, stamp);
        }
    }
}

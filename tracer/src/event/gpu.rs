//! What the GPUs' management library (NVML) said beside the trace.

use super::ProcessId;

/// Readings of one GPU; `None` is a reading that the library did not give.
///
/// Utilisation is an average over the library's own window before `time_ns` (a sixth of a second to a second, as the
/// GPU has it); the other readings are of the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSample {
    /// Middle of the library's calls; they lay within [`bound_ns`](Self::bound_ns) before and after it.
    pub time_ns: u64,
    pub bound_ns: u64,
    /// As the CUDA driver and GPU spans have it.
    pub device_uuid: [u8; 16],
    /// The library's number of the device, in order of the PCI bus.
    pub device_index: u32,
    pub device_name: String,
    /// Domain, bus and device, as in [`Xid::pci`](super::Xid::pci): `0000:3b:00`.
    pub pci: String,
    /// Share of the window in which a kernel ran, and in which memory was read or written, in percent.
    pub gpu_percent: Option<u32>,
    pub memory_percent: Option<u32>,
    pub memory_used_bytes: Option<u64>,
    pub memory_total_bytes: Option<u64>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub temperature_c: Option<u32>,
    /// Bits of `nvmlClocksThrottleReason*`; see [`throttle_reasons`].
    pub throttle_reasons: Option<u64>,
    /// The library is a stand-in.
    pub simulated: bool,
}

/// What a process used of a GPU. See [`GpuSample`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuProcess {
    pub time_ns: u64,
    pub bound_ns: u64,
    pub device_uuid: [u8; 16],
    /// `start_ticks` is 0 where no such process is seen from here (it has ended, or another PID namespace counts it).
    pub process: ProcessId,
    pub memory_used_bytes: Option<u64>,
    /// Its share of the multiprocessors and of the memory's time since the sample before, in percent.
    pub sm_percent: Option<u32>,
    pub memory_percent: Option<u32>,
}

/// A bit of [`GpuSample::throttle_reasons`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleReason {
    pub bit: u64,
    /// As NVML calls it, without its prefix `nvmlClocksThrottleReason`.
    pub name: &'static str,
    /// Something took speed away that the GPU was set to have; otherwise it is a setting, or nothing to do.
    pub slows: bool,
}

const fn reason(bit: u64, name: &'static str, slows: bool) -> ThrottleReason {
    ThrottleReason { bit, name, slows }
}

/// The reasons that NVML knows.
pub const THROTTLE_REASONS: [ThrottleReason; 9] = [
    reason(0x001, "GpuIdle", false),
    reason(0x002, "ApplicationsClocksSetting", false),
    reason(0x004, "SwPowerCap", true),
    reason(0x008, "HwSlowdown", true),
    reason(0x010, "SyncBoost", true),
    reason(0x020, "SwThermalSlowdown", true),
    reason(0x040, "HwThermalSlowdown", true),
    reason(0x080, "HwPowerBrakeSlowdown", true),
    reason(0x100, "DisplayClockSetting", false),
];

/// What the bits say; bits that are not known here count as slowing, under the name `Unknown`.
pub fn throttle_reasons(bits: u64) -> impl Iterator<Item = ThrottleReason> {
    let known = THROTTLE_REASONS.iter().fold(0, |known, reason| known | reason.bit);
    let unknown = reason(bits & !known, "Unknown", true);
    THROTTLE_REASONS.into_iter().chain([unknown]).filter(move |reason| bits & reason.bit != 0)
}

impl GpuSample {
    /// Whether something slowed the GPU down; `None` where that is not known.
    #[must_use]
    pub fn is_throttled(&self) -> Option<bool> {
        self.throttle_reasons.map(|bits| throttle_reasons(bits).any(|reason| reason.slows))
    }
}

/// The bytes of a UUID as NVML writes it: `GPU-53494d47-5055-0000-0000-000000000001`.
#[must_use]
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn uuids_are_bytes() {
        let uuid = parse_uuid("GPU-53494d47-5055-0000-0000-000000000001");
        assert_eq!(uuid, Some(*b"SIMGPU\0\0\0\0\0\0\0\0\0\x01"));
        for bad in
            ["", "GPU-", "MIG-53494d47-5055-0000-0000-000000000001", "GPU-+3494d47505500000000000000000001"]
        {
            assert_eq!(parse_uuid(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_setting_does_not_slow_and_what_is_unknown_does() {
        let names = |bits| throttle_reasons(bits).map(|reason| reason.name).collect::<Vec<_>>();
        assert_eq!(names(0), [""; 0]);
        assert_eq!(names(0x44), ["SwPowerCap", "HwThermalSlowdown"]);
        assert_eq!(names(1 << 40 | 1), ["GpuIdle", "Unknown"]);
        let sample = |bits| GpuSample { throttle_reasons: bits, ..GpuSample::default() }.is_throttled();
        assert_eq!([sample(None), sample(Some(0x103)), sample(Some(0x200))], [None, Some(false), Some(true)]);
    }

    proptest! {
        #[test]
        fn reasons_cover_the_bits(bits: u64) {
            prop_assert_eq!(throttle_reasons(bits).fold(0, |all, reason| all | reason.bit & bits), bits);
        }

        #[test]
        fn a_uuid_never_panics(text in "(GPU-)?\\PC{0,40}") {
            let _ = parse_uuid(&text);
        }
    }
}

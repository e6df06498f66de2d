//! The readings, as the file gives them.
//!
//! Lines `key=value`; `N.key=value` is about GPU N alone. `key=!3` makes the calls for that reading fail with NVML's
//! error 3 (not supported). Keys: those of [`crate::api`]'s readings, and
//!
//! - `devices`: how many GPUs there are (1)
//! - `sleep_ms`: how long each call for a reading takes (0)
//! - `processes`: `PID:BYTES:SM_PERCENT:MEMORY_PERCENT`, separated by commas (none)

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{Error, Result};

/// A process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) sm_percent: u32,
    pub(crate) memory_percent: u32,
}

/// What the file says at the moment.
pub(crate) struct Readings(String);

impl Readings {
    /// Reads the file; without one, everything has its default.
    pub(crate) fn now() -> Self {
        let file = std::env::var_os("STANDIN_NVML_FILE");
        Self(file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default())
    }

    fn text(&self, device: u32, key: &str) -> Option<&str> {
        let own = format!("{device}.{key}");
        let find = |key: &str| self.0.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        find(&own).or_else(|| find(key)).map(str::trim)
    }

    fn value(&self, device: u32, key: &str) -> Result<Option<&str>> {
        let text = self.text(device, key);
        match text.and_then(|text| text.strip_prefix('!')?.parse().ok()) {
            Some(code) => Err(Error(code)),
            None => Ok(text),
        }
    }

    /// A number; `default` where the file says nothing of it, or no number.
    pub(crate) fn number(&self, device: u32, key: &str, default: u64) -> Result<u64> {
        Ok(self.value(device, key)?.and_then(|text| text.parse().ok()).unwrap_or(default))
    }

    pub(crate) fn devices(&self) -> u32 {
        self.text(0, "devices").and_then(|text| text.parse().ok()).unwrap_or(1)
    }

    pub(crate) fn processes(&self, device: u32) -> Result<Vec<Process>> {
        let list = self.value(device, "processes")?.unwrap_or_default();
        Ok(list.split(',').filter_map(process).collect())
    }

    /// Takes as long as a call is said to take.
    pub(crate) fn sleep(&self, device: u32) {
        if let Some(ms) =
            self.text(device, "sleep_ms").and_then(|text| text.parse().ok()).filter(|ms| *ms > 0)
        {
            std::thread::sleep(Duration::from_millis(ms));
        }
    }
}

fn process(text: &str) -> Option<Process> {
    let mut parts = text.trim().split(':');
    let pid = parts.next()?.parse().ok()?;
    let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).unwrap_or(0);
    Some(Process {
        pid,
        memory_bytes: number(),
        sm_percent: number() as u32,
        memory_percent: number() as u32,
    })
}

/// CLOCK_REALTIME in µs: NVML's stamp of a process's utilisation.
pub(crate) fn stamp_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gpu_may_differ_and_a_reading_may_fail() {
        let readings = Readings("power_mw=7\n1.power_mw=9\ntemperature_c=!3\ndevices=2\nbad=x\n".into());
        assert_eq!(readings.number(0, "power_mw", 1), Ok(7));
        assert_eq!(readings.number(1, "power_mw", 1), Ok(9));
        assert_eq!(readings.number(1, "temperature_c", 1), Err(Error(3)));
        assert_eq!(readings.number(0, "bad", 5), Ok(5));
        assert_eq!(readings.number(0, "absent", 5), Ok(5));
        assert_eq!(readings.devices(), 2);
    }

    #[test]
    fn processes_are_a_list() {
        let readings = Readings("processes= 12:1024:30:4, 13:9,x\n".into());
        let (pid, memory_bytes, sm_percent, memory_percent) = (12, 1024, 30, 4);
        let first = Process { pid, memory_bytes, sm_percent, memory_percent };
        let second = Process { pid: 13, memory_bytes: 9, sm_percent: 0, memory_percent: 0 };
        assert_eq!(readings.processes(0), Ok(vec![first, second]));
        assert_eq!(Readings(String::new()).processes(0), Ok(vec![]));
    }
}

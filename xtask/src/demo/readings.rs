//! What the stand-in NVML says during the demo: made up, as its GPU is.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How often the readings change.
const PERIOD: Duration = Duration::from_millis(100);

/// Writes the readings until it is dropped.
pub(super) struct Readings {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Readings {
    /// Begins; `length` is that of the recording.
    pub(super) fn start(file: PathBuf, length: Duration) -> Result<Self> {
        let begun = Instant::now();
        write(&file, 0.0).with_context(|| format!("cannot write {}", file.display()))?;
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                // The demo goes on without new readings.
                let _ = write(&file, begun.elapsed().as_secs_f64() / length.as_secs_f64());
            }
        });
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Readings {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Readings at a share of the recording: the GPU warms up under load, and its power cap slows it for a while.
fn at(share: f64) -> String {
    const BUSY: std::ops::Range<f64> = 0.05..0.86;
    const CAPPED: std::ops::Range<f64> = 0.50..0.62;
    let (busy, capped) = (BUSY.contains(&share), CAPPED.contains(&share));
    let wave = (share * 60.0).sin();
    let gpu_percent = if busy { 84.0 + 8.0 * wave } else { 2.0 };
    let sm_clock_mhz = match (busy, capped) {
        (_, true) => 1_290.0 + 45.0 * wave,
        (true, false) => 1_980.0,
        (false, false) => 1_200.0,
    };
    let power_mw = if busy { 310_000.0 + 20_000.0 * wave } else { 75_000.0 };
    let temperature_c = 45.0 + 30.0 * share.min(0.86);
    // SwPowerCap, GpuIdle, nothing
    let throttle_reasons = if capped { 4 } else { u32::from(!busy) };
    let memory_used_bytes = if busy { 6u64 << 30 } else { 5 << 30 };
    format!(
        "gpu_percent={gpu_percent:.0}\nmemory_percent={:.0}\nsm_clock_mhz={sm_clock_mhz:.0}\n\
         power_mw={power_mw:.0}\ntemperature_c={temperature_c:.0}\nthrottle_reasons={throttle_reasons}\n\
         memory_used_bytes={memory_used_bytes}\n",
        gpu_percent / 2.0,
    )
}

/// Replaces the file as a whole: a reader sees the old one or the new one.
fn write(file: &Path, share: f64) -> std::io::Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, at(share))?;
    fs::rename(&new, file)
}

//! What a report says about the GPUs themselves: NVML's readings, and Xids.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::Serialize;

use super::wrap;
use crate::cli::table::{Style, WIDTH, cut};
use crate::cli::units::{clean, count, duration, offset};
use crate::event::gpu::{THROTTLE_REASONS, throttle_reasons};
use crate::event::{GpuSample, Xid};
use crate::hex::hex;
use crate::timeline::tables::Tables;
use crate::timeline::{DriverEvent, driver_error};

/// An Xid and what the driver answered are about the same thing when they are this close, in ns.
const AGREES_NS: u64 = 50_000_000;
/// Most lines about the driver's answers, of each Xid and in all.
const DRIVER_LINES: usize = 5;

/// GPUs as NVML saw them beside the trace.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Gpus {
    pub(crate) devices: Vec<Device>,
    /// Errors that the driver wrote to the kernel log.
    pub(crate) xids: Vec<XidLine>,
    /// What the CUDA driver answered: errors, and contexts that ended.
    pub(crate) driver_events: Vec<DriverLine>,
    /// What could not be recorded, and why.
    pub(crate) not_recorded: BTreeMap<String, String>,
}

/// One GPU over the recording; what was never read is `null`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Device {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) pci: String,
    pub(crate) simulated: bool,
    pub(crate) samples: u64,
    pub(crate) gpu_percent_mean: Option<f64>,
    pub(crate) memory_percent_mean: Option<f64>,
    pub(crate) sm_clock_mhz_min: Option<u32>,
    pub(crate) sm_clock_mhz_max: Option<u32>,
    pub(crate) power_mw_mean: Option<f64>,
    pub(crate) power_mw_max: Option<u32>,
    pub(crate) temperature_c_max: Option<u32>,
    pub(crate) memory_used_bytes_max: Option<u64>,
    pub(crate) memory_total_bytes: Option<u64>,
    /// Share of the samples in which something slowed it down.
    pub(crate) throttled_share: Option<f64>,
    /// Share of the samples by reason, as NVML calls it; settings and idleness too.
    pub(crate) throttle_reasons: BTreeMap<&'static str, f64>,
    /// Processes that were seen on it.
    pub(crate) processes: Vec<Process>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Process {
    pub(crate) tgid: u32,
    pub(crate) memory_used_bytes_max: Option<u64>,
    pub(crate) sm_percent_mean: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct XidLine {
    /// CLOCK_MONOTONIC, when the recorder read it.
    pub(crate) time_ns: u64,
    pub(crate) pci: String,
    pub(crate) xid: u32,
    pub(crate) message: String,
    /// Errors of the driver and ends of contexts within [`AGREES_NS`]; empty: nothing that was traced agrees.
    pub(crate) agrees: Vec<Agreement>,
}

/// An answer of the driver that came close to an Xid.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Agreement {
    /// ns after the Xid was read; negative: before.
    pub(crate) after_ns: i64,
    #[serde(flatten)]
    pub(crate) event: DriverLine,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct DriverLine {
    pub(crate) tgid: u32,
    pub(crate) function: String,
    /// `CUresult`; 0: a context ended.
    pub(crate) code: u32,
    pub(crate) error: Option<&'static str>,
    pub(crate) count: u64,
    /// CLOCK_MONOTONIC, when the first and the last of them returned.
    pub(crate) first_ns: u64,
    pub(crate) last_ns: u64,
}

impl From<&DriverEvent> for DriverLine {
    fn from(event: &DriverEvent) -> Self {
        Self {
            tgid: event.process.tgid,
            function: event.function.clone(),
            code: event.code,
            error: driver_error(event.code),
            count: event.count,
            first_ns: event.first_ns,
            last_ns: event.last_ns,
        }
    }
}

impl fmt::Display for DriverLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = clean(&self.function, 60);
        match (self.code, self.error) {
            (0, _) => write!(f, "{function} ended a context")?,
            (code, Some(error)) => write!(f, "{function}: {error} ({code})")?,
            (code, None) => write!(f, "{function}: CUresult {code}")?,
        }
        write!(f, " in pid {}", self.tgid)
    }
}

impl Gpus {
    pub(crate) fn new(tables: &Tables) -> Self {
        let mut samples: BTreeMap<(u32, [u8; 16]), Vec<&GpuSample>> = BTreeMap::new();
        for sample in &tables.gpu_samples {
            samples.entry((sample.device_index, sample.device_uuid)).or_default().push(sample);
        }
        let xid = |xid: &Xid| XidLine {
            time_ns: xid.time_ns,
            pci: xid.pci.clone(),
            xid: xid.xid,
            message: xid.message.clone(),
            agrees: tables
                .driver_events
                .iter()
                .map(|event| Agreement { after_ns: event.after_ns(xid.time_ns), event: event.into() })
                .filter(|agreement| agreement.after_ns.unsigned_abs() <= AGREES_NS)
                .collect(),
        };
        Self {
            devices: samples.values().filter_map(|samples| Device::new(samples, tables)).collect(),
            xids: tables.xids.iter().map(xid).collect(),
            driver_events: tables.driver_events.iter().map(DriverLine::from).collect(),
            not_recorded: tables.meta.not_recorded.clone(),
        }
    }

    /// Whether there is nothing to say.
    pub(super) fn is_empty(&self) -> bool {
        let no_error = self.driver_events.iter().all(|event| event.code == 0);
        self.devices.is_empty() && self.xids.is_empty() && no_error && self.not_recorded.is_empty()
    }

    pub(super) fn text(&self, started_ns: u64, style: Style, out: &mut String) {
        for device in &self.devices {
            let simulated = if device.simulated { style.note("  simulated GPU") } else { String::new() };
            let name = clean(&device.name, 40);
            let place = clean(&device.pci, 32);
            let _ = writeln!(
                out,
                "  GPU {}  {name}  {place}  n={}{simulated}",
                device.index,
                count(device.samples)
            );
            wrap(device.facts().into_iter(), WIDTH - 4)
                .iter()
                .for_each(|line| _ = writeln!(out, "    {line}"));
            let slowed = device.throttled_share.is_some_and(|share| share > 0.0);
            for line in wrap(device.throttling().into_iter(), WIDTH - 4) {
                let line = format!("    {line}");
                let _ = writeln!(out, "{}", if slowed { style.note(&line) } else { line });
            }
        }
        for xid in &self.xids {
            let at = offset(xid.time_ns, started_ns);
            let line =
                format!("  XID {} at {at} on {}: {}", xid.xid, clean(&xid.pci, 32), clean(&xid.message, 200));
            let _ = writeln!(out, "{}", style.alarm(&cut(&line, WIDTH)));
            if xid.agrees.is_empty() {
                let _ =
                    writeln!(out, "{}", style.faint("    no traced call of the driver failed within 50 ms"));
            }
            for Agreement { after_ns, event } in xid.agrees.iter().take(DRIVER_LINES) {
                let side = if *after_ns < 0 { "before" } else { "after" };
                let line = format!("    {} {side} it: {event}", duration(after_ns.unsigned_abs()));
                let _ = writeln!(out, "{}", cut(&line, WIDTH));
            }
        }
        self.driver_errors(started_ns, style, out);
        for (what, why) in &self.not_recorded {
            let line = format!("  {} not recorded: {}", clean(what, 30), clean(why, 200));
            let _ = writeln!(out, "{}", style.faint(&cut(&line, WIDTH)));
        }
    }
}

impl Gpus {
    fn driver_errors(&self, started_ns: u64, style: Style, out: &mut String) {
        let errors = || self.driver_events.iter().filter(|event| event.code != 0);
        for event in errors().take(DRIVER_LINES) {
            let at = offset(event.first_ns, started_ns);
            let again = match event.count {
                1 => String::new(),
                n => format!(", {} times", count(n)),
            };
            let line = format!("  CUDA error at {at}{again}: {event}");
            let _ = writeln!(out, "{}", style.alarm(&cut(&line, WIDTH)));
        }
        let more = errors().count().saturating_sub(DRIVER_LINES);
        if more > 0 {
            let _ = writeln!(out, "  and {more} more kinds of CUDA errors (--json has all)");
        }
    }
}

impl Device {
    fn new(samples: &[&GpuSample], tables: &Tables) -> Option<Self> {
        let last = samples.last()?;
        let known = samples.iter().filter_map(|sample| sample.throttle_reasons);
        let share = |condition: &dyn Fn(u64) -> bool| {
            let n = known.clone().count();
            (n > 0).then(|| known.clone().filter(|bits| condition(*bits)).count() as f64 / n as f64)
        };
        let names = THROTTLE_REASONS.iter().map(|reason| reason.name).chain(["Unknown"]);
        let by_reason = |name| {
            let share = share(&|bits| throttle_reasons(bits).any(|reason| reason.name == name));
            share.filter(|share| *share > 0.0).map(|share| (name, share))
        };
        Some(Self {
            index: last.device_index,
            name: last.device_name.clone(),
            uuid: hex(&last.device_uuid),
            pci: last.pci.clone(),
            simulated: samples.iter().any(|sample| sample.simulated),
            samples: samples.len() as u64,
            gpu_percent_mean: mean(samples.iter().map(|sample| sample.gpu_percent)),
            memory_percent_mean: mean(samples.iter().map(|sample| sample.memory_percent)),
            sm_clock_mhz_min: samples.iter().filter_map(|sample| sample.sm_clock_mhz).min(),
            sm_clock_mhz_max: samples.iter().filter_map(|sample| sample.sm_clock_mhz).max(),
            power_mw_mean: mean(samples.iter().map(|sample| sample.power_mw)),
            power_mw_max: samples.iter().filter_map(|sample| sample.power_mw).max(),
            temperature_c_max: samples.iter().filter_map(|sample| sample.temperature_c).max(),
            memory_used_bytes_max: samples.iter().filter_map(|sample| sample.memory_used_bytes).max(),
            memory_total_bytes: samples.iter().filter_map(|sample| sample.memory_total_bytes).max(),
            throttled_share: mean(samples.iter().map(|sample| Some(u32::from(sample.is_throttled()?)))),
            throttle_reasons: names.filter_map(by_reason).collect(),
            processes: processes(last.device_uuid, tables),
        })
    }

    fn facts(&self) -> Vec<String> {
        let mut facts = Vec::new();
        let mut add = |fact: Option<String>| facts.extend(fact);
        add(self.gpu_percent_mean.map(|mean| format!("utilisation {mean:.0} % (mean)")));
        add(self
            .sm_clock_mhz_min
            .zip(self.sm_clock_mhz_max)
            .map(|(low, high)| format!("SM clock {low}…{high} MHz")));
        let watts = |mw: f64| format!("{:.0} W", mw / 1e3);
        add(self
            .power_mw_mean
            .zip(self.power_mw_max)
            .map(|(mean, max)| format!("power {} (mean), {} (max)", watts(mean), watts(max.into()))));
        add(self.temperature_c_max.map(|max| format!("{max} °C (max)")));
        add(self.memory_used_bytes_max.map(|used| {
            let total = self.memory_total_bytes.map_or(String::new(), |total| format!(" of {}", gib(total)));
            format!("memory {}{total} (max)", gib(used))
        }));
        facts
    }

    /// How often it was slowed down, and by what; then the settings that held it, as they are no throttling.
    fn throttling(&self) -> Vec<String> {
        let share = |share: f64| match share * 100.0 {
            percent if percent > 0.0 && percent < 1.0 => "<1 %".to_owned(),
            percent => format!("{percent:.0} %"),
        };
        let Some(throttled) = self.throttled_share else { return Vec::new() };
        let known = |name: &str| THROTTLE_REASONS.iter().find(|reason| reason.name == name);
        let slows = |name: &str| known(name).is_none_or(|reason| reason.slows);
        // That it had nothing to do is what utilisation says.
        let worth_saying = self.throttle_reasons.iter().filter(|(name, _)| **name != "GpuIdle");
        let (reasons, settings): (Vec<_>, Vec<_>) = worth_saying.partition(|(name, _)| slows(name));
        let mut items = vec![format!("throttled in {} of the samples", share(throttled))];
        let named = |(name, part): (&&str, &f64)| format!("{name} {}", share(*part));
        items.extend(reasons.into_iter().chain(settings).map(named));
        items
    }
}

fn processes(device: [u8; 16], tables: &Tables) -> Vec<Process> {
    let mut by_tgid: BTreeMap<u32, Vec<&crate::event::GpuProcess>> = BTreeMap::new();
    for process in tables.gpu_processes.iter().filter(|process| process.device_uuid == device) {
        by_tgid.entry(process.process.tgid).or_default().push(process);
    }
    let process = |(tgid, samples): (u32, Vec<&crate::event::GpuProcess>)| Process {
        tgid,
        memory_used_bytes_max: samples.iter().filter_map(|sample| sample.memory_used_bytes).max(),
        sm_percent_mean: mean(samples.iter().map(|sample| sample.sm_percent)),
    };
    by_tgid.into_iter().map(process).collect()
}

/// Mean of what is known.
fn mean(values: impl Iterator<Item = Option<u32>>) -> Option<f64> {
    let (sum, n) = values.flatten().fold((0.0, 0u64), |(sum, n), value| (sum + f64::from(value), n + 1));
    (n > 0).then(|| sum / n as f64)
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{GpuProcess, ProcessId};

    fn tables() -> Tables {
        let mut tables = Tables::default();
        for i in 0..10u32 {
            tables.gpu_samples.push(GpuSample {
                time_ns: u64::from(i) * 100_000_000,
                device_uuid: [1; 16],
                device_name: "SimGPU (simulated)".into(),
                pci: "0000:01:00".into(),
                gpu_percent: Some(10 * i),
                memory_used_bytes: Some(u64::from(i) << 30),
                memory_total_bytes: Some(80 << 30),
                sm_clock_mhz: (i % 2 == 0).then_some(1_000 + i),
                power_mw: Some(300_000 + i * 10_000),
                throttle_reasons: Some(if i < 3 { 0x44 } else { 0x3 }),
                simulated: true,
                ..GpuSample::default()
            });
        }
        tables.gpu_processes.push(GpuProcess {
            device_uuid: [1; 16],
            process: ProcessId { tgid: 7, start_ticks: 1 },
            memory_used_bytes: Some(5),
            ..GpuProcess::default()
        });
        tables.xids.push(Xid {
            time_ns: 3_271_000_000,
            kernel_log_ns: 1,
            pci: "0000:01:00".into(),
            xid: 79,
            message: "GPU has fallen off the bus.\x1b[31m".into(),
        });
        for (function, code, first_ns) in [
            ("cuCtxDestroy_v2", 0, 3_250_000_000),
            ("cuStream\x1bSynchronize", 700, 3_275_000_000),
            ("far", 77, 4_000_000_000),
        ] {
            tables.driver_events.push(DriverEvent {
                process: ProcessId { tgid: 7, start_ticks: 1 },
                function: function.into(),
                code,
                count: 12,
                first_ns,
                last_ns: first_ns + 1_000_000_000,
            });
        }
        tables.meta.not_recorded.insert("Something".into(), "it is \x1b[2Jnot there".into());
        tables
    }

    #[test]
    fn a_section() {
        let gpus = Gpus::new(&tables());
        let mut text = String::new();
        gpus.text(0, Style::default(), &mut text);
        println!("{text}");
        for part in [
            "GPU 0  SimGPU (simulated)  0000:01:00  n=10  simulated GPU",
            "utilisation 45 % (mean) · SM clock 1000…1008 MHz · power 345 W (mean), 390 W (max)",
            "memory 9.0 GiB of 80.0 GiB (max)",
            "throttled in 30 % of the samples · HwThermalSlowdown 30 % · SwPowerCap 30 %",
            "ApplicationsClocksSetting 70 %",
            "XID 79 at +3.271 s on 0000:01:00: GPU has fallen off the bus.",
            "21.0 ms before it: cuCtxDestroy_v2 ended a context in pid 7",
            "4.00 ms after it: cuStream",
            "CUDA error at +3.275 s, 12 times: cuStream",
            "ILLEGAL_ADDRESS (700) in pid 7",
            "CUDA error at +4.000 s, 12 times: far: CUresult 77 in pid 7",
            "Something not recorded",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains('\x1b') && !text.contains("°C") && !text.contains("GpuIdle"));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }

    #[test]
    fn json_has_nulls_for_what_was_not_read() {
        let json = serde_json::to_value(Gpus::new(&tables())).unwrap();
        let device = &json["devices"][0];
        assert!(device["temperature_c_max"].is_null() && device["memory_percent_mean"].is_null());
        assert_eq!(device["sm_clock_mhz_max"], 1_008);
        assert_eq!(
            (&device["throttled_share"], &device["throttle_reasons"]["GpuIdle"]),
            (&0.3.into(), &0.7.into())
        );
        assert_eq!(device["processes"][0]["tgid"], 7);
        assert_eq!(json["xids"][0]["xid"], 79);
        let agrees = &json["xids"][0]["agrees"];
        assert_eq!((agrees[0]["after_ns"].as_i64(), &agrees[1]["code"]), (Some(-21_000_000), &700.into()));
        assert_eq!(agrees.as_array().map(Vec::len), Some(2));
        assert!(Gpus::new(&Tables::default()).is_empty());
    }
}

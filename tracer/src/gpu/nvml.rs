//! One look at one GPU through NVML.

use std::collections::HashMap;

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::{Bits, NvmlError};
use nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample;
use nvml_wrapper::{Device, Nvml};

use crate::event::gpu::parse_uuid;
use crate::event::{Event, GpuProcess, GpuSample, ProcessId};
use crate::host_clock::monotonic_ns;
use crate::probe::process;

/// A GPU that is sampled.
pub(super) struct Gpu<'a> {
    device: Device<'a>,
    /// What is the same in every sample.
    identity: GpuSample,
    /// Stamp of the last utilisation of a process, µs of the library's own clock.
    seen_us: u64,
}

/// Answers to the questions of one look.
#[derive(Default)]
struct Answers {
    given: u32,
    error: Option<NvmlError>,
}

impl Answers {
    fn of<T>(&mut self, answer: Result<T, NvmlError>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.given += 1;
                Some(value)
            }
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }
}

impl<'a> Gpu<'a> {
    /// The GPU of that number.
    pub(super) fn new(nvml: &'a Nvml, index: u32, simulated: bool) -> Result<Self, String> {
        let device = nvml.device_by_index(index).map_err(|error| error.to_string())?;
        let uuid = device.uuid().map_err(|error| error.to_string())?;
        let identity = GpuSample {
            device_uuid: parse_uuid(&uuid).ok_or_else(|| format!("its UUID is `{}`", uuid.escape_debug()))?,
            device_index: index,
            device_name: device.name().unwrap_or_default(),
            pci: device.pci_info().map_or_else(
                |_| String::new(),
                |pci| format!("{:04x}:{:02x}:{:02x}", pci.domain, pci.bus, pci.device),
            ),
            simulated,
            ..GpuSample::default()
        };
        Ok(Self { device, identity, seen_us: 0 })
    }

    /// Looks once: the GPU, then its processes.
    ///
    /// # Errors
    /// No question was answered: the first refusal.
    pub(super) fn look(&mut self) -> Result<Vec<Event>, NvmlError> {
        let mut answers = Answers::default();
        let device = &self.device;
        let before_ns = monotonic_ns();
        let utilization = answers.of(device.utilization_rates());
        let memory = answers.of(device.memory_info());
        let sm_clock_mhz = answers.of(device.clock_info(Clock::SM));
        let memory_clock_mhz = answers.of(device.clock_info(Clock::Memory));
        let power_mw = answers.of(device.power_usage());
        let temperature_c = answers.of(device.temperature(TemperatureSensor::Gpu));
        let throttle_reasons = answers.of(all_bits(device));
        let processes = answers.of(device.running_compute_processes()).unwrap_or_default();
        let used = answers.of(device.process_utilization_stats(self.seen_us)).unwrap_or_default();
        let after_ns = monotonic_ns();
        if answers.given == 0 {
            return Err(answers.error.unwrap_or(NvmlError::Unknown));
        }
        let sample = GpuSample {
            time_ns: before_ns.midpoint(after_ns),
            bound_ns: (after_ns - before_ns).div_ceil(2),
            gpu_percent: utilization.as_ref().map(|rates| rates.gpu),
            memory_percent: utilization.map(|rates| rates.memory),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.map(|memory| memory.total),
            sm_clock_mhz,
            memory_clock_mhz,
            power_mw,
            temperature_c,
            throttle_reasons,
            ..self.identity.clone()
        };
        let used = self.since_last(used);
        let processes = processes.into_iter().map(|info| {
            let used = used.get(&info.pid);
            Event::GpuProcess(GpuProcess {
                time_ns: sample.time_ns,
                bound_ns: sample.bound_ns,
                device_uuid: sample.device_uuid,
                process: process::find(info.pid)
                    .map_or(ProcessId { tgid: info.pid, start_ticks: 0 }, |found| found.id),
                memory_used_bytes: match info.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
                sm_percent: used.map(|used| used.sm_util),
                memory_percent: used.map(|used| used.mem_util),
            })
        });
        let processes: Vec<Event> = processes.collect();
        Ok(std::iter::once(Event::Gpu(sample)).chain(processes).collect())
    }

    /// The latest utilisation of each process. The first time it may be from before the recording, and none is given.
    fn since_last(
        &mut self,
        mut used: Vec<ProcessUtilizationSample>,
    ) -> HashMap<u32, ProcessUtilizationSample> {
        used.sort_by_key(|sample| sample.timestamp);
        let before = self.seen_us;
        self.seen_us = used.last().map_or(before, |last| last.timestamp.max(before));
        let is_new = |sample: &ProcessUtilizationSample| before > 0 && sample.timestamp > before;
        used.into_iter().filter(is_new).map(|sample| (sample.pid, sample)).collect()
    }
}

/// All bits of the throttle reasons, those too that the wrapper has no name for.
fn all_bits(device: &Device<'_>) -> Result<u64, NvmlError> {
    match device.current_throttle_reasons_strict() {
        Ok(reasons) => Ok(reasons.bits()),
        Err(NvmlError::IncorrectBits(Bits::U64(bits))) => Ok(bits),
        Err(error) => Err(error),
    }
}

/// Whether the management library in this process is a stand-in, which says so by a symbol.
pub(super) fn is_standin() -> bool {
    // SAFETY: the name is a string; with RTLD_NOLOAD nothing is loaded, only a library that is there is found.
    let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return false;
    }
    // SAFETY: the library is loaded, and is let go of once; the symbol's address is only compared with null.
    unsafe {
        let symbol = libc::dlsym(library, c"tracer_standin".as_ptr());
        libc::dlclose(library);
        !symbol.is_null()
    }
}

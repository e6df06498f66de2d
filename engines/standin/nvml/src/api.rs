//! The exports.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::pointer::{Out, Text};
use crate::readings::{Readings, stamp_us};
use crate::{ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, NOT_FOUND, Result, UNINITIALIZED};

/// How often the library was initialised and not shut down.
static USERS: AtomicU32 = AtomicU32::new(0);

/// A device as callers see it: a number, never dereferenced.
type Device = usize;
const FIRST_DEVICE: Device = 0x6e76_6d00;

/// nvmlMemory_t
#[repr(C)]
#[derive(Clone, Copy)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// nvmlMemory_v2_t
#[repr(C)]
#[derive(Clone, Copy)]
struct Memory2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const MEMORY_2: c_uint = size_of::<Memory2>() as c_uint | 2 << 24;

/// nvmlUtilization_t
#[repr(C)]
#[derive(Clone, Copy)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// nvmlPciInfo_t
#[repr(C)]
#[derive(Clone, Copy)]
struct Pci {
    bus_id_legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [u8; 32],
}

/// nvmlProcessInfo_t
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo {
    pid: c_uint,
    used_memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// nvmlProcessUtilizationSample_t
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessUtilization {
    pid: c_uint,
    stamp_us: u64,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

fn initialized() -> Result {
    if USERS.load(Ordering::Acquire) > 0 { Ok(()) } else { Err(UNINITIALIZED) }
}

/// The number of a device.
fn index(device: Device) -> Result<u32> {
    initialized()?;
    let number = device.checked_sub(FIRST_DEVICE).and_then(|number| u32::try_from(number).ok());
    number.filter(|number| *number < Readings::now().devices()).ok_or(INVALID_ARGUMENT)
}

/// What the file says of a device; takes as long as it says.
fn readings(device: Device) -> Result<(u32, Readings)> {
    let (index, readings) = (index(device)?, Readings::now());
    readings.sleep(index);
    Ok((index, readings))
}

fn reading(device: Device, key: &str, default: u64) -> Result<c_uint> {
    let (index, readings) = readings(device)?;
    Ok(c_uint::try_from(readings.number(index, key, default)?).unwrap_or(c_uint::MAX))
}

/// As the stand-in CUDA driver's, for the first device.
fn uuid(index: u32) -> String {
    format!("GPU-53494d47-5055-0000-0000-{:012x}", u64::from(index) + 1)
}

fn memory(device: Device) -> Result<Memory> {
    let (index, readings) = readings(device)?;
    let total = readings.number(index, "memory_total_bytes", 8 << 30)?;
    let used = readings.number(index, "memory_used_bytes", 1 << 30)?;
    Ok(Memory { total, free: total.saturating_sub(used), used })
}

/// A string in a field of fixed size.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    field.iter_mut().zip(text.bytes().take(N - 1)).for_each(|(to, from)| *to = from);
    field
}

/// Defines exports: for each `fn name(args) { body }`, where the body is a [`Result`].
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            fn run($($arg: $type),*) -> Result $body
            match run($($arg),*) {
                Ok(()) => 0,
                Err(error) => error.0,
            }
        }
    )*};
}

exports! {
    fn nvmlInit_v2() {
        USERS.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
    fn nvmlInitWithFlags(flags: c_uint) {
        /// NVML_INIT_FLAG_NO_GPUS and _NO_ATTACH
        const KNOWN: c_uint = 3;
        if flags & !KNOWN != 0 {
            return Err(INVALID_ARGUMENT);
        }
        USERS.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
    fn nvmlShutdown() {
        let less = |users: u32| users.checked_sub(1);
        USERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).map(|_| ()).map_err(|_| UNINITIALIZED)
    }
    fn nvmlSystemGetDriverVersion(version: Out<c_char>, len: c_uint) {
        initialized()?;
        version.set_text(len, "0.0 (simulated)")
    }
    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, len: c_uint) {
        initialized()?;
        version.set_text(len, "12.0.0 (simulated)")
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) {
        initialized()?;
        version.set(12_080)
    }
    fn nvmlDeviceGetCount_v2(count: Out<c_uint>) {
        initialized()?;
        count.set(Readings::now().devices())
    }
    fn nvmlDeviceGetHandleByIndex_v2(number: c_uint, device: Out<Device>) {
        let handle = FIRST_DEVICE + number as usize;
        index(handle)?;
        device.set(handle)
    }
    fn nvmlDeviceGetHandleByUUID(wanted: Text, device: Out<Device>) {
        initialized()?;
        let wanted = wanted.get()?;
        let number = (0..Readings::now().devices()).find(|index| uuid(*index) == wanted).ok_or(NOT_FOUND)?;
        device.set(FIRST_DEVICE + number as usize)
    }
    fn nvmlDeviceGetIndex(device: Device, number: Out<c_uint>) {
        number.set(index(device)?)
    }
    fn nvmlDeviceGetName(device: Device, name: Out<c_char>, len: c_uint) {
        index(device)?;
        name.set_text(len, "SimGPU (simulated)")
    }
    fn nvmlDeviceGetUUID(device: Device, text: Out<c_char>, len: c_uint) {
        text.set_text(len, &uuid(index(device)?))
    }
    fn nvmlDeviceGetPciInfo_v3(device: Device, pci: Out<Pci>) {
        let bus = index(device)?.saturating_add(1);
        pci.set(Pci {
            bus_id_legacy: padded(&format!("0000:{bus:02X}:00.0")),
            domain: 0,
            bus,
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: padded(&format!("00000000:{bus:02X}:00.0")),
        })
    }
    fn nvmlDeviceGetMemoryInfo(device: Device, info: Out<Memory>) {
        info.set(memory(device)?)
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, info: Out<Memory2>) {
        if info.get()?.version != MEMORY_2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let Memory { total, free, used } = memory(device)?;
        info.set(Memory2 { version: MEMORY_2, total, reserved: 0, free, used })
    }
    fn nvmlDeviceGetUtilizationRates(device: Device, rates: Out<Utilization>) {
        let gpu = reading(device, "gpu_percent", 37)?;
        rates.set(Utilization { gpu, memory: reading(device, "memory_percent", 12)? })
    }
    fn nvmlDeviceGetTemperature(device: Device, sensor: c_uint, celsius: Out<c_uint>) {
        /// NVML_TEMPERATURE_GPU
        const GPU: c_uint = 0;
        if sensor != GPU {
            return Err(INVALID_ARGUMENT);
        }
        celsius.set(reading(device, "temperature_c", 55)?)
    }
    fn nvmlDeviceGetPowerUsage(device: Device, mw: Out<c_uint>) {
        mw.set(reading(device, "power_mw", 42_000)?)
    }
    fn nvmlDeviceGetClockInfo(device: Device, clock: c_uint, mhz: Out<c_uint>) {
        // NVML_CLOCK_GRAPHICS, _SM, _MEM
        mhz.set(match clock {
            0 | 1 => reading(device, "sm_clock_mhz", 1_500)?,
            2 => reading(device, "memory_clock_mhz", 5_000)?,
            _ => return Err(INVALID_ARGUMENT),
        })
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: Device, reasons: Out<u64>) {
        let (index, readings) = readings(device)?;
        reasons.set(readings.number(index, "throttle_reasons", 0)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: Out<c_uint>, infos: Out<ProcessInfo>) {
        /// Not a part of a GPU.
        const WHOLE: c_uint = c_uint::MAX;
        let (index, readings) = readings(device)?;
        let processes = readings.processes(index)?.into_iter();
        let info = |p: crate::readings::Process| ProcessInfo {
            pid: p.pid,
            used_memory: p.memory_bytes,
            gpu_instance: WHOLE,
            compute_instance: WHOLE,
        };
        infos.set_all(count, &processes.map(info).collect::<Vec<_>>())
    }
    fn nvmlDeviceGetProcessUtilization(device: Device, samples: Out<ProcessUtilization>, count: Out<c_uint>,
                                       after_us: u64) {
        let (index, readings) = readings(device)?;
        let stamp_us = stamp_us();
        if stamp_us <= after_us {
            return Err(NOT_FOUND);
        }
        let sample = |p: crate::readings::Process| ProcessUtilization {
            pid: p.pid,
            stamp_us,
            sm: p.sm_percent,
            memory: p.memory_percent,
            encoder: 0,
            decoder: 0,
        };
        samples.set_all(count, &readings.processes(index)?.into_iter().map(sample).collect::<Vec<_>>())
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        15 => c"GPU is lost",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
    .as_ptr()
}

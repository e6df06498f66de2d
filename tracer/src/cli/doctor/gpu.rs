//! The NVIDIA driver, its management library, and the library that takes GPU times.

use nvml_wrapper::{Nvml, error::NvmlError};

use super::Check;
use crate::{cli::target, probe::INJECT_LIBRARY};

pub(super) fn check(checks: &mut Vec<Check>) {
    checks.push(driver());
    checks.push(match management() {
        Ok(found) => Check::ok("NVML", found),
        Err(error) => Check::warn(
            "NVML",
            error.to_string(),
            "GPUs have no names here",
            "install the NVIDIA driver with libnvidia-ml.so.1, if this machine has a GPU",
        ),
    });
    checks.push(match target::injected_library() {
        Ok(Some(path)) => {
            Check::ok("GPU times", format!("{} is there for commands that tracer starts", path.display()))
        }
        _ => Check::warn(
            "GPU times",
            format!("{INJECT_LIBRARY} is not beside tracer nor in ../lib"),
            "when a step ends is known only from the host's waits",
            format!("install {INJECT_LIBRARY} beside tracer"),
        ),
    });
}

fn driver() -> Check {
    match std::fs::read_to_string("/proc/driver/nvidia/version") {
        Ok(text) => Check::ok("NVIDIA driver", text.lines().next().unwrap_or_default().to_owned()),
        Err(_) => Check::warn(
            "NVIDIA driver",
            "not loaded",
            "no program can use a GPU here; what happens on CPUs can be traced",
            "modprobe nvidia, if this machine has a GPU",
        ),
    }
}

fn management() -> Result<String, NvmlError> {
    let nvml = Nvml::init()?;
    let cuda = nvml.sys_cuda_driver_version()?;
    let mut names = Vec::new();
    for index in 0..nvml.device_count()? {
        names.push(nvml.device_by_index(index)?.name()?);
    }
    let names = if names.is_empty() { "no GPU".to_owned() } else { names.join(", ") };
    Ok(format!("driver {}, CUDA {}.{}: {names}", nvml.sys_driver_version()?, cuda / 1000, cuda % 1000 / 10))
}

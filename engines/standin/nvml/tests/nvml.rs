//! The stand-in as a program sees it: through the wrapper that tracer uses, and as a file.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use object::{Object, ObjectSymbol, SymbolKind};

/// The library built with this test.
fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().skip(1).map(|dir| dir.join("libstandin_nvml.so")).find(|path| path.exists()).unwrap()
}

#[test]
fn exports_share_no_address() {
    let data = std::fs::read(library()).unwrap();
    let file = object::File::parse(&*data).unwrap();
    let mut at: HashMap<u64, String> = HashMap::new();
    for symbol in file.dynamic_symbols().filter(|s| s.is_definition() && s.kind() == SymbolKind::Text) {
        let name = symbol.name().unwrap().to_owned();
        assert!(name.starts_with("nvml"), "{name}");
        if let Some(other) = at.insert(symbol.address(), name.clone()) {
            panic!("{name} and {other} are one");
        }
    }
    assert!(at.len() > 20, "{}", at.len());
    assert!(file.dynamic_symbols().any(|s| s.name() == Ok("tracer_standin")));
}

/// Not a test of its own: the program that the test below runs with a file of readings.
#[test]
fn child() {
    let Some(file) = std::env::var_os("STANDIN_NVML_FILE") else { return };
    let write = |text: &str| std::fs::write(Path::new(&file), text).unwrap();
    let nvml = Nvml::builder().lib_path(library().as_os_str()).init().unwrap();
    assert!(nvml.sys_driver_version().unwrap().contains("simulated"));
    assert_eq!(nvml.device_count().unwrap(), 1);
    let device = nvml.device_by_index(0).unwrap();
    assert!(device.name().unwrap().contains("simulated"));
    assert_eq!(device.uuid().unwrap(), "GPU-53494d47-5055-0000-0000-000000000001");
    assert_eq!(nvml.device_by_uuid(device.uuid().unwrap()).unwrap().index().unwrap(), 0);
    assert_eq!(device.pci_info().unwrap().bus_id, "00000000:01:00.0");
    assert_eq!(device.utilization_rates().unwrap().gpu, 37);
    assert!(device.running_compute_processes().unwrap().is_empty());
    assert!(device.process_utilization_stats(None).unwrap().is_empty());

    write(
        "gpu_percent=90\nsm_clock_mhz=1200\npower_mw=!3\ntemperature_c=!15\nthrottle_reasons=4\nprocesses=7:4096:50:5,8:1:2:3\n",
    );
    assert_eq!(device.utilization_rates().unwrap().gpu, 90);
    assert_eq!(
        (device.clock_info(Clock::SM).unwrap(), device.clock_info(Clock::Memory).unwrap()),
        (1_200, 5_000)
    );
    assert!(matches!(device.power_usage(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.temperature(TemperatureSensor::Gpu), Err(NvmlError::GpuLost)));
    assert_eq!(device.current_throttle_reasons_strict().unwrap().bits(), 4);
    assert_eq!(device.memory_info().unwrap().total, 8 << 30);
    let processes = device.running_compute_processes().unwrap();
    assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [7, 8]);
    assert_eq!(processes[0].used_gpu_memory, UsedGpuMemory::Used(4096));
    let used = device.process_utilization_stats(1).unwrap();
    assert_eq!((used[0].pid, used[0].sm_util, used[1].mem_util), (7, 50, 3));

    write("devices=2\n1.gpu_percent=5\n");
    assert_eq!(nvml.device_by_index(1).unwrap().utilization_rates().unwrap().gpu, 5);
    assert!(matches!(nvml.device_by_index(2), Err(NvmlError::InvalidArg)));
    nvml.shutdown().unwrap();
}

#[test]
fn a_program_reads_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child"])
        .env("STANDIN_NVML_FILE", folder.path().join("readings"))
        .status()
        .unwrap();
    assert!(status.success());
}

//! The kernel, what it offers, and what this process may do.

use std::{fs, path::Path};

use super::{Check, toolchain};
use crate::probe::{self, ProbeError, btf, object};

/// Everything but the probes themselves.
pub(super) fn checks() -> Vec<Check> {
    let mut checks = vec![program(), kernel(), privileges(), types()];
    checks.extend([pid_namespace(), lockdown(), paranoid(), tracefs(), clock_source(), rings()]);
    checks
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn program() -> Check {
    match object::bytes() {
        Ok(bytes) => Check::ok(
            "program",
            format!("kernel side built in: {} ({} bytes)", object::DESCRIPTION, bytes.len()),
        ),
        Err(error) => Check::fail(
            "program",
            error.to_string(),
            "nothing can be recorded",
            "build it again with the toolchain, or use a released binary",
        ),
    }
}

/// The oldest kernel with attach cookies for uprobes (5.15), which say which point fired.
const OLDEST: (u32, u32) = (5, 15);

fn kernel() -> Check {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let found = format!("Linux {release}, {}", std::env::consts::ARCH);
    match version(&release) {
        Some(version) if version < OLDEST => Check::fail(
            "kernel",
            found,
            "probes cannot say which point fired: nothing can be recorded",
            "use Linux 5.15 or newer",
        ),
        _ if std::env::consts::ARCH != "x86_64" => Check::fail(
            "kernel",
            found,
            "the kernel side reads x86-64 registers: nothing can be recorded",
            "trace on x86-64; `tracer probes` and reports work here, too",
        ),
        _ => Check::ok("kernel", found),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn privileges() -> Check {
    match probe::check_privileges() {
        Ok(()) => Check::ok("privileges", "enough to load eBPF and to look into other processes"),
        Err(ProbeError::Privileges { missing }) => Check::fail(
            "privileges",
            format!("missing: {missing}"),
            "nothing can be recorded, and other users' processes cannot be looked at",
            "run it with sudo, or as a container with these capabilities",
        ),
        Err(error) => {
            Check::fail("privileges", error.to_string(), "nothing can be recorded", "run it with sudo")
        }
    }
}

fn types() -> Check {
    match btf::offsets(Path::new(btf::VMLINUX)) {
        Ok(_) => Check::ok("BTF", format!("{} has all that is needed", btf::VMLINUX)),
        Err(error) => Check::fail(
            "BTF",
            error.to_string(),
            "the scheduler and process probes cannot be loaded",
            "use a kernel with CONFIG_DEBUG_INFO_BTF=y (most distributions since 2020)",
        ),
    }
}

/// Inode of the first pid namespace (include/linux/proc_ns.h).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

fn pid_namespace() -> Check {
    let namespace = fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned());
    match namespace.as_deref() {
        Ok(FIRST_PID_NAMESPACE) => Check::ok("pid namespace", "the host's"),
        Ok(_) => Check::fail(
            "pid namespace",
            "a container's",
            "the kernel tells of processes by the host's ids: no target will be found",
            "run it on the host, or in a container with its pid namespace (docker --pid=host, hostPID: true)",
        ),
        Err(error) => Check::warn(
            "pid namespace",
            format!("unknown: {error}"),
            "inside a container's pid namespace no target would be found",
            "mount /proc",
        ),
    }
}

fn lockdown() -> Check {
    let modes = read("/sys/kernel/security/lockdown");
    let mode = modes.as_deref().and_then(|modes| modes.split(['[', ']']).nth(1)).unwrap_or("none");
    match mode {
        "confidentiality" => Check::fail(
            "lockdown",
            mode,
            "the kernel lets no eBPF program read memory: neither marks nor stacks",
            "boot with lockdown=integrity or none",
        ),
        _ => Check::ok("lockdown", mode),
    }
}

fn paranoid() -> Check {
    match read("/proc/sys/kernel/perf_event_paranoid") {
        Some(level) => Check::ok(
            "perf events",
            format!("perf_event_paranoid {level}: no matter to those with CAP_PERFMON"),
        ),
        None => Check::warn(
            "perf events",
            "the kernel has none",
            "no on-CPU samples, and before Linux 6.6 no probes",
            "use a kernel with CONFIG_PERF_EVENTS=y",
        ),
    }
}

fn tracefs() -> Check {
    let mounted = ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"];
    let found = mounted.into_iter().find(|path| Path::new(path).exists());
    Check::ok(
        "tracefs",
        match found {
            Some(path) => format!("mounted ({path})"),
            None => "not mounted, and not needed".to_owned(),
        },
    )
}

/// What programs read and write through an io_uring is not followed.
fn rings() -> Check {
    let found = match read("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") => "allowed",
        Some("1") => "allowed to some (io_uring_disabled is 1)",
        Some("2") => "switched off",
        _ => "this kernel has none, or cannot switch it off (before 6.6)",
    };
    let note = "what a server reads and writes on sockets through one is counted, not followed";
    Check::ok("io_uring", format!("{found}; {note}"))
}

fn clock_source() -> Check {
    let Some(source) = read("/sys/devices/system/clocksource/clocksource0/current_clocksource") else {
        return Check::ok("clock source", "unknown");
    };
    if matches!(source.as_str(), "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") {
        let found = format!("{source}: reading it takes a microsecond or more");
        let consequence = "every probe is slower, and GPU times are less exact";
        let fix =
            "boot with clocksource=tsc where the CPU has an invariant one (dmesg says why it was refused)";
        return Check::warn("clock source", found, consequence, fix);
    }
    Check::ok("clock source", source)
}

/// What builds the kernel side: no matter to who only runs tracer.
pub(super) fn toolchain() -> Check {
    Check::ok(
        "toolchain",
        match toolchain::find() {
            Ok(found) => {
                format!("{}, {} (only builds of tracer need it)", found.version, found.linker.display())
            }
            Err(missing) => format!("{} is not here (only builds of tracer need it)", missing.what),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version("6.18.0-2-amd64"), Some((6, 18)));
        assert_eq!(version("5.4.0"), Some((5, 4)));
        assert_eq!(version("6.1-rc3+"), Some((6, 1)));
        assert_eq!(version(""), None);
        assert!(version("5.10.0").unwrap() < OLDEST);
    }
}

//! The kernel tier: real probes on real processes. Runs only when asked (`cargo xtask test` asks), as root, one test
//! at a time; a test that this machine cannot run says SKIP and why, which `TRACER_REQUIRE=1` turns into a failure.

mod aiperf;
mod budget;
mod calls;
mod faults;
mod fixture;
mod follow;
mod generated;
mod graph;
mod hazards;
mod hostile;
mod http;
mod inject;
mod layers;
mod marks;
mod marks_python;
mod nvml;
mod peer;
mod placement;
mod python;
mod sched;
mod servers;
mod shares;
mod sockets;
mod stacks;
mod targets;
mod trial;
mod truth;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// A test: passes, fails with a reason, or says why it cannot run here.
type Test = fn() -> anyhow::Result<()>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let asked = std::env::var_os("TRACER_KERNEL_TIER").is_some();
    let trials = if asked { trials() } else { Vec::new() };
    if !asked {
        println!("SKIP kernel tier: run `cargo xtask test` (needs root and sets up what it needs)");
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trials() -> Vec<Trial> {
    let require = std::env::var_os("TRACER_REQUIRE").is_some();
    let missing = missing();
    let groups = [
        budget::TESTS,
        calls::TESTS,
        follow::TESTS,
        targets::TESTS,
        trial::TESTS,
        sched::TESTS,
        stacks::TESTS,
        if std::env::var_os("TRACER_REAL_LIBS").is_some() { stacks::REAL } else { &[] },
        generated::TESTS,
        python::TESTS,
        peer::TESTS,
        marks::TESTS,
        marks_python::TESTS,
        truth::TESTS,
        http::TESTS,
        hostile::TESTS,
        sockets::TESTS,
        if servers::folder().is_some() { servers::TESTS } else { &[] },
        if aiperf::folder().is_some() { aiperf::TESTS } else { &[] },
        graph::TESTS,
        inject::TESTS,
        layers::TESTS,
        hazards::TESTS,
        shares::TESTS,
        faults::TESTS,
        nvml::TESTS,
        placement::TESTS,
    ];
    groups
        .into_iter()
        .flatten()
        .map(|(name, test)| {
            let missing = missing.clone();
            Trial::test(*name, move || match missing {
                Some(why) if require => Err(Failed::from(format!("required, but {why}"))),
                Some(why) => {
                    println!("SKIP {name}: {why}");
                    Ok(())
                }
                None => test().map_err(|error| Failed::from(format!("{error:#}"))),
            })
        })
        .collect()
}

/// Why no kernel test can run here.
fn missing() -> Option<String> {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        return Some("not root".into());
    }
    if let Err(error) = tracer::probe::object::bytes() {
        return Some(error.to_string());
    }
    if !std::path::Path::new(tracer::probe::btf::VMLINUX).exists() {
        return Some("the kernel has no BTF".into());
    }
    None
}

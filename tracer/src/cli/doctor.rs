//! `tracer doctor`: whether this machine can be traced, what is missing, what that costs and how to mend it.

mod engine;
mod gpu;
mod host;
mod stacks;
#[path = "../../build/toolchain.rs"]
mod toolchain;

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use anyhow::Result;
use engines::Profiles;
use serde::Serialize;

use super::{
    report::{style_of_stdout, wrap_words},
    table::{Style, WIDTH},
};
use crate::probe::{Options, Session, trial};

/// Check this machine: what can be traced, what is missing, what a probe costs
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  tracer doctor
  tracer doctor --pid 4711
  tracer doctor --json | jq '.checks[] | select(.status != \"ok\")'

Probes a process of its own for less than a second; touches no other.
Exit code 0: a recording will work (warnings say what it will lack); 1: it will not.")]
pub(crate) struct Args {
    /// Another engine profile: a file, cuda_graph, own_steps, or shapes (repeatable)
    #[arg(long, value_name = "FILE")]
    engine: Vec<PathBuf>,
    /// Also tell how the stacks of this process will be walked, library by library (repeatable)
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    /// A recording works and lacks something.
    Warn,
    /// A recording does not work.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    /// What is the case.
    found: String,
    /// What that means for a recording; of a check that is not ok.
    consequence: Option<String>,
    fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), consequence: None, fix: None }
    }

    fn warn(
        name: &'static str,
        found: impl Into<String>,
        consequence: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        let (consequence, fix) = (Some(consequence.into()), Some(fix.into()));
        Self { name, status: Status::Warn, found: found.into(), consequence, fix }
    }

    fn fail(
        name: &'static str,
        found: impl Into<String>,
        consequence: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self { status: Status::Fail, ..Self::warn(name, found, consequence, fix) }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut profiles = Profiles::builtin();
    for file in &args.engine {
        profiles.load(file)?;
    }
    let mut checks = host::checks();
    let costs = probes(&mut checks);
    gpu::check(&mut checks);
    engine::check(&profiles, &costs, &mut checks);
    args.pid.iter().for_each(|pid| stacks::check(*pid, &mut checks));
    checks.push(host::toolchain());
    let mut out = std::io::stdout().lock();
    if args.json {
        let value =
            serde_json::json!({ "schema": "tracer.doctor/1", "checks": checks, "probe_costs": costs });
        serde_json::to_writer_pretty(&mut out, &value)?;
        writeln!(out)?;
    } else {
        out.write_all(page(&checks, style_of_stdout()).as_bytes())?;
    }
    let failed = checks.iter().any(|check| check.status == Status::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Loads everything that a recording loads, and measures what a probe costs.
fn probes(checks: &mut Vec<Check>) -> Vec<trial::ClassCost> {
    let tried = Session::start(Options::default(), Profiles::builtin())
        .map(|session| session.missing().to_vec())
        .and_then(|missing| Ok((missing, trial::run()?)));
    let (missing, outcome) = match tried {
        Ok(tried) => tried,
        Err(error) => {
            checks.push(Check::fail("probes", error.to_string(), "nothing can be recorded", "see above"));
            return Vec::new();
        }
    };
    for missing in missing {
        let found = format!("{} cannot be recorded: {}", missing.what, missing.why);
        checks.push(Check::warn("probes", found, missing.consequence, "use a newer kernel"));
    }
    let costs: Vec<String> = outcome.costs.iter().map(cost).collect();
    checks.push(Check::ok("probe cost", format!("{} (entry / with return)", costs.join(", "))));
    if outcome.batches {
        checks.push(Check::ok("probe links", "probes of a library come and go together"));
    } else {
        checks.push(Check::warn(
            "probe links",
            "one by one (Linux before 6.6)",
            "ending a recording takes about 0.1 s for each probe",
            "use a newer kernel, if that matters",
        ));
    }
    checks.push(seccomp(outcome.seccomp));
    outcome.costs
}

fn cost(cost: &trial::ClassCost) -> String {
    let us = |ns: f64| format!("{:.2}", ns / 1000.0);
    format!("{} {} / {} µs", cost.placement, us(cost.entry_ns), us(cost.pair_ns))
}

fn seccomp(survived: trial::Seccomp) -> Check {
    let lost = match (survived.returns, survived.nop5) {
        (true, true) => {
            return Check::ok("seccomp", "a process under a strict filter survives every kind of probe");
        }
        (false, true) => "return probes end a process under a strict filter",
        (true, false) => "probes on 5-byte nops end a process under a strict filter",
        (false, false) => "return probes, and probes on 5-byte nops, end a process under a strict filter",
    };
    Check::warn(
        "seccomp",
        lost,
        "processes under seccomp (containers usually are) get none of these: their calls have no end",
        "use Linux 6.14 or newer, or one that has \"seccomp: passthrough uretprobe systemcall\" backported",
    )
}

fn page(checks: &[Check], style: Style) -> String {
    let mut out = String::new();
    let names = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in checks {
        let (word, paint): (_, fn(Style, &str) -> String) = match check.status {
            Status::Ok => ("ok  ", Style::faint),
            Status::Warn => ("warn", Style::note),
            Status::Fail => ("FAIL", Style::alarm),
        };
        let indent = " ".repeat(6 + names + 2);
        // Errors may have several lines; here each is one paragraph.
        let found = check.found.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines = wrap_words(&crate::cli::units::clean(&found, 600), WIDTH - indent.len());
        out.push_str(&format!("{}  {:<names$}  ", paint(style, word), check.name));
        out.push_str(&lines.join(&format!("\n{indent}")));
        out.push('\n');
        for (what, text) in [("so", &check.consequence), ("fix", &check.fix)] {
            let Some(text) = text else { continue };
            let lines = wrap_words(&format!("{what}: {text}"), WIDTH - indent.len());
            out.push_str(&format!("{indent}{}\n", lines.join(&format!("\n{indent}"))));
        }
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    out.push_str(&match (count(Status::Fail), count(Status::Warn)) {
        (0, 0) => "\nEverything is there.\n".to_owned(),
        (0, warnings) => format!("\nA recording works; {warnings} of the above say what it will lack.\n"),
        (failures, _) => {
            format!("\nA recording does not work here: {failures} of the above must be mended.\n")
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_tells_what_is_wrong_and_what_to_do() {
        let checks = [
            Check::ok("kernel", "Linux 6.18"),
            Check::warn(
                "seccomp",
                "a \x1b[31mhostile\x1b[0m word ".repeat(9),
                "less is seen",
                "a newer kernel",
            ),
            Check::fail("BTF", "none,\n  really", "nothing works", "CONFIG_DEBUG_INFO_BTF=y"),
        ];
        let page = page(&checks, Style::default());
        assert!(page.lines().all(|line| line.chars().count() <= WIDTH), "{page}");
        assert!(!page.contains('\x1b'), "{page:?}");
        for part in [
            "ok    kernel   Linux 6.18",
            "FAIL  BTF",
            "none, really",
            "fix: CONFIG_DEBUG_INFO_BTF=y",
            "1 of the above must",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
    }

    #[test]
    fn what_seccomp_forbids_is_said() {
        let check = |returns, nop5| seccomp(trial::Seccomp { returns, nop5 });
        assert_eq!(check(true, true).status, Status::Ok);
        assert!(check(false, true).found.starts_with("return probes end"));
        assert_eq!(check(false, false).status, Status::Warn);
    }
}

//! The engines that run now, and what of them can be probed.

use std::collections::BTreeMap;

use engines::{Placement, Profiles, Role};

use super::Check;
use crate::{
    cli::probes::{Libraries, Seen, is_engine},
    probe::{process, select::engines_of, trial::ClassCost},
};

/// A call of a function that a server makes for every step, probed by single-stepping, costs too much beyond this.
const DEAR_NS: f64 = 2_000.0;

pub(super) fn check(profiles: &Profiles, costs: &[ClassCost], checks: &mut Vec<Check>) {
    let mut libraries = Libraries::default();
    let mut names = BTreeMap::new();
    for (found, _) in process::all().unwrap_or_default() {
        if !engines_of(profiles, found.id.tgid).is_empty() {
            libraries.add(profiles, found.id);
            names.insert(found.id.tgid, found.comm);
        }
    }
    if names.is_empty() {
        checks.push(Check::ok("engines", "no process maps an inference engine or the CUDA driver now"));
    }
    let stepped = costs.iter().find(|cost| cost.placement == Placement::Stepped.name());
    for seen in libraries.seen.iter().filter(|seen| is_engine(profiles, &seen.library)) {
        checks.push(library(seen, &names, stepped));
    }
    for message in libraries.messages {
        checks.push(Check::warn("engines", message, "its probe points are not known", "run it as root"));
    }
}

fn library(seen: &Seen, names: &BTreeMap<u32, String>, stepped: Option<&ClassCost>) -> Check {
    let library = &seen.library;
    let processes: Vec<String> = seen
        .pids
        .iter()
        .map(|pid| format!("{pid} ({})", names.get(pid).map_or("?", String::as_str)))
        .collect();
    let wanted: Vec<_> = library.points.iter().filter(|point| point.default).collect();
    let refused: Vec<_> = library.refusals.iter().filter(|refusal| refusal.default).collect();
    let version = library.version.as_ref().map_or(String::new(), |version| format!(" {version}"));
    let found = format!(
        "{}{version}{}: {} of {} points can be probed, in process {}",
        library.title,
        if library.simulated { " (SIMULATED)" } else { "" },
        wanted.len(),
        wanted.len() + refused.len(),
        processes.join(", ")
    );
    if let Some(refusal) = refused.first() {
        let consequence = format!("{}: {}", refusal.point, refusal.reason);
        let fix = format!(
            "tracer probes {} tells all; a profile of your own can name others (--engine)",
            library.path.display()
        );
        return Check::warn("engines", found, consequence, fix);
    }
    let dear = wanted.iter().find(|point| {
        point.placement == Placement::Stepped && !matches!(point.role, Role::Loader | Role::Other)
    });
    if let (Some(point), Some(cost)) = (dear, stepped.filter(|cost| cost.entry_ns > DEAR_NS)) {
        let consequence = format!(
            "the kernel single-steps {}: each call takes {:.0} µs more",
            point.name,
            cost.pair_ns / 1000.0
        );
        return Check::warn("engines", found, consequence, "leave it out where it is called often");
    }
    Check::ok("engines", found)
}

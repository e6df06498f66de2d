//! Which probe points of a process were found, attached and fired, and which silence means something.

use std::collections::BTreeMap;

use serde::Serialize;

use super::tables::LedgerRow;
use crate::event::{Point, ProcessId, Role};

/// Names of the ledger's lines about the points of a process.
pub const FOUND: &str = "points_found";
pub const ATTACHED: &str = "points_attached";
pub const FIRED: &str = "points_fired";
/// Prefix of the lines that say how often a point fired: `hits:engine:name`.
pub const HITS: &str = "hits:";

/// The probe points of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Coverage {
    pub tgid: u32,
    /// Probe points that its libraries have and that were wanted.
    pub found: u64,
    pub attached: u64,
    /// Of those: called at least once.
    pub fired: u64,
    pub silent: Vec<Silent>,
}

/// A step function that never ran in a process that clearly worked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Silent {
    /// `point` never ran, but CUDA graphs were launched.
    Graphs { point: String, launches: u64 },
    /// `point` never ran, but `busiest` did.
    OtherWork { point: String, busiest: String, calls: u64 },
    /// No step function is known in the process, but CUDA graphs were launched.
    NoStep { launches: u64 },
}

impl std::fmt::Display for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const ADVICE: &str = "if each launch is a step, record with `--engine cuda_graph`";
        match self {
            Self::Graphs { point, launches } => {
                write!(f, "{point} never ran, but CUDA graphs were launched {launches} times: {ADVICE}")
            }
            Self::OtherWork { point, busiest, calls } => write!(
                f,
                "{point} never ran, but {busiest} ran {calls} times: the steps are those of another library, or were not \
                 run while this was recorded"
            ),
            Self::NoStep { launches } => {
                write!(
                    f,
                    "no step function is known here, but CUDA graphs were launched {launches} times: {ADVICE}"
                )
            }
        }
    }
}

/// What points fired how often, and what was found and attached, by process.
#[must_use]
pub fn of(points: &[Point], ledger: &[LedgerRow]) -> Vec<Coverage> {
    let mut processes: BTreeMap<ProcessId, (Coverage, Vec<Use<'_>>)> = BTreeMap::new();
    for row in ledger {
        let Some(process) = row.process else { continue };
        let field: fn(&mut Coverage) -> &mut u64 = match row.name.as_str() {
            FOUND => |coverage| &mut coverage.found,
            ATTACHED => |coverage| &mut coverage.attached,
            FIRED => |coverage| &mut coverage.fired,
            _ => continue,
        };
        *field(&mut processes.entry(process).or_default().0) += row.count;
    }
    let hits = |point: &Point| {
        let name = format!("{HITS}{}:{}", point.engine, point.name);
        let rows = ledger.iter().filter(|row| row.process == Some(point.process) && row.name == name);
        rows.map(|row| row.count).sum::<u64>()
    };
    for point in points {
        let (_, uses) = processes.entry(point.process).or_default();
        // One function in several libraries: the ledger counts them together.
        if !uses.iter().any(|known| known.point.name == point.name && known.point.engine == point.engine) {
            uses.push(Use { point, hits: hits(point) });
        }
    }
    let finish = |(process, (coverage, uses)): (ProcessId, (Coverage, Vec<Use<'_>>))| Coverage {
        tgid: process.tgid,
        silent: silent(&uses),
        ..coverage
    };
    processes.into_iter().map(finish).collect()
}

struct Use<'a> {
    point: &'a Point,
    hits: u64,
}

fn silent(uses: &[Use<'_>]) -> Vec<Silent> {
    let of_role = |role: Role| uses.iter().filter(move |one| one.point.role == role);
    if of_role(Role::Step).any(|step| step.hits > 0) {
        return Vec::new();
    }
    let launches: u64 = of_role(Role::GraphLaunch).map(|one| one.hits).sum();
    let work = uses.iter().filter(|one| {
        !matches!(
            one.point.role,
            Role::Loader
                | Role::Mark
                | Role::Open
                | Role::Shape
                | Role::AskedShape
                | Role::DataType
                | Role::CreatesContext
                | Role::Nvtx
        )
    });
    let busiest = work.max_by_key(|one| one.hits).filter(|one| one.hits > 0);
    let silent = |step: &Use<'_>| {
        let point = step.point.name.clone();
        match busiest {
            _ if launches > 0 => Some(Silent::Graphs { point, launches }),
            Some(busiest) => {
                Some(Silent::OtherWork { point, busiest: busiest.point.name.clone(), calls: busiest.hits })
            }
            None => None,
        }
    };
    let steps: Vec<Silent> = of_role(Role::Step).filter_map(silent).collect();
    if of_role(Role::Step).next().is_none() && launches > 0 {
        return vec![Silent::NoStep { launches }];
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: ProcessId = ProcessId { tgid: 7, start_ticks: 1 };

    fn point(name: &str, role: Role) -> Point {
        Point {
            id: 0,
            time_ns: 0,
            process: PROCESS,
            engine: "e".into(),
            name: name.into(),
            role,
            library: "lib.so".into(),
            version: String::new(),
            build_id: Vec::new(),
            offset: 0,
            placement: "nop5".into(),
            has_return: true,
            stream_arg: None,
            simulated: false,
        }
    }

    fn row(name: &str, count: u64) -> LedgerRow {
        LedgerRow { process: Some(PROCESS), name: name.into(), count, loss: false }
    }

    fn silent_of(points: &[Point], hits: &[(&str, u64)]) -> Vec<Silent> {
        let ledger: Vec<_> = hits.iter().map(|(name, hits)| row(&format!("hits:e:{name}"), *hits)).collect();
        of(points, &ledger).remove(0).silent
    }

    #[test]
    fn a_replayed_graph_is_told_from_other_work_and_from_idleness() {
        let points = [
            point("enqueueV3", Role::Step),
            point("cuGraphLaunch", Role::GraphLaunch),
            point("cuStreamSynchronize", Role::Wait),
            point("_dl_debug_state", Role::Loader),
        ];
        let graphs = silent_of(&points, &[("cuGraphLaunch", 90), ("cuStreamSynchronize", 100)]);
        assert_eq!(graphs, [Silent::Graphs { point: "enqueueV3".into(), launches: 90 }]);
        assert!(graphs[0].to_string().contains("--engine cuda_graph"));
        let other = silent_of(&points, &[("cuStreamSynchronize", 100)]);
        let busiest = "cuStreamSynchronize".to_owned();
        assert_eq!(other, [Silent::OtherWork { point: "enqueueV3".into(), busiest, calls: 100 }]);
        assert_eq!(silent_of(&points, &[("_dl_debug_state", 5)]), []);
        assert_eq!(silent_of(&points, &[("enqueueV3", 1), ("cuGraphLaunch", 90)]), []);
        assert_eq!(silent_of(&points[1..], &[("cuGraphLaunch", 3)]), [Silent::NoStep { launches: 3 }]);
    }

    #[test]
    fn counts_are_per_process() {
        let other = ProcessId { tgid: 8, start_ticks: 2 };
        let ledger = [
            row(FOUND, 4),
            row(ATTACHED, 3),
            row(FIRED, 2),
            LedgerRow { process: Some(other), ..row(FOUND, 9) },
            LedgerRow { process: None, ..row(FOUND, 100) },
        ];
        let coverage = of(&[], &ledger);
        assert_eq!(coverage.len(), 2);
        let one = &coverage[0];
        assert_eq!((one.tgid, one.found, one.attached, one.fired), (7, 4, 3, 2));
        assert_eq!((coverage[1].tgid, coverage[1].found), (8, 9));
    }
}

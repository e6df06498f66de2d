//! Which processes to trace, as users name them; asked again while a recording runs, for processes that come later.

mod cgroup;

use std::collections::{BTreeMap, HashMap};

use engines::Profiles;

use super::{
    ProbeError,
    process::{self, Found},
};
use crate::event::ProcessId;

/// A choice of processes. Their children belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Pids(Vec<u32>),
    /// Name of the process, or file name of its executable.
    Comm(String),
    /// A control group and those below it: its path, with or without the mount point.
    Cgroup(String),
    /// A container, by the beginning of its id.
    Container(String),
    /// Every process that maps an engine's library.
    Engines,
}

/// A [`Selector`] that is asked again and again.
#[derive(Debug)]
pub struct Watch {
    selector: Selector,
    /// Size of the address space of each process when its mappings were looked at: they have not changed while that
    /// has not, but for rare coincidences.
    sizes: HashMap<ProcessId, u64>,
}

impl Selector {
    /// For people.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Pids(pids) => {
                format!("pid {}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
            }
            Self::Comm(comm) => format!("comm {comm}"),
            Self::Cgroup(path) => format!("cgroup {path}"),
            Self::Container(id) => format!("container {id}"),
            Self::Engines => "all engines".to_owned(),
        }
    }

    /// Whether there is what is named.
    fn check(&self) -> Result<(), ProbeError> {
        match self {
            Self::Cgroup(path) if !cgroup::exists(path) => {
                Err(ProbeError::NoSuchCgroup { path: path.clone() })
            }
            Self::Container(id) => {
                let running = cgroup::containers()?;
                let mut candidates = running.clone();
                candidates.retain(|known, _| cgroup::is_id(known, id));
                match candidates.len() {
                    0 => Err(ProbeError::NoSuchContainer { id: id.clone(), running: list(&running) }),
                    1 => Ok(()),
                    _ => {
                        Err(ProbeError::AmbiguousContainer { id: id.clone(), candidates: list(&candidates) })
                    }
                }
            }
            _ => Ok(()),
        }
    }

    /// Whether to wait for new processes when none is left (or there).
    #[must_use]
    pub const fn waits(&self) -> bool {
        matches!(self, Self::Engines | Self::Cgroup(_))
    }
}

impl Watch {
    #[must_use]
    pub fn new(selector: Selector) -> Self {
        Self { selector, sizes: HashMap::new() }
    }

    #[must_use]
    pub const fn selector(&self) -> &Selector {
        &self.selector
    }

    /// The processes now, with their children.
    ///
    /// # Errors
    /// There is none (but where the selector waits for them), the name fits several containers, or /proc cannot be
    /// read.
    pub fn first(&mut self, profiles: &Profiles) -> Result<Vec<Found>, ProbeError> {
        self.selector.check()?;
        let roots = match &self.selector {
            Selector::Pids(pids) => pids.iter().map(|pid| process::find(*pid)).collect::<Result<_, _>>()?,
            _ => self.matching(profiles)?,
        };
        if let (Selector::Comm(comm), true) = (&self.selector, roots.is_empty()) {
            return Err(ProbeError::NoSuchComm { comm: comm.clone() });
        }
        let mut processes = BTreeMap::new();
        for root in roots {
            // Gone already: nothing to trace.
            let Ok(tree) = process::tree(root.id.tgid) else { continue };
            processes.extend(tree.into_iter().map(|found| (found.id, found)));
        }
        if let (Selector::Pids(pids), true) = (&self.selector, processes.is_empty()) {
            return Err(ProbeError::ProcessGone { pid: pids.first().copied().unwrap_or_default() });
        }
        Ok(processes.into_values().collect())
    }

    /// The processes that fit now, those that are known included; none where only the first ones count.
    pub fn again(&mut self, profiles: &Profiles) -> Vec<Found> {
        // A /proc that cannot be read now may be later; nothing that is traced is lost meanwhile.
        if matches!(self.selector, Selector::Pids(_)) {
            Vec::new()
        } else {
            self.matching(profiles).unwrap_or_default()
        }
    }

    fn matching(&mut self, profiles: &Profiles) -> Result<Vec<Found>, ProbeError> {
        let mut all = process::all()?;
        all.retain(|(found, _)| found.id.tgid != std::process::id());
        let fitting = |all: Vec<(Found, u64)>, fits: &dyn Fn(&Found) -> bool| {
            all.into_iter().map(|(found, _)| found).filter(|found| fits(found)).collect()
        };
        Ok(match &self.selector {
            Selector::Engines => self.with_engines(profiles, all),
            Selector::Pids(pids) => fitting(all, &|found| pids.contains(&found.id.tgid)),
            Selector::Comm(comm) => fitting(all, &|found| process::is_called(found, comm)),
            Selector::Cgroup(path) => {
                let inside = cgroup::inside(path);
                fitting(all, &|found| cgroup::holds(&inside, found.id.tgid))
            }
            Selector::Container(id) => fitting(all, &|found| cgroup::is_in_container(id, found.id.tgid)),
        })
    }

    fn with_engines(&mut self, profiles: &Profiles, all: Vec<(Found, u64)>) -> Vec<Found> {
        let before = std::mem::take(&mut self.sizes);
        let mut found = Vec::new();
        for (process, bytes) in all {
            // A kernel thread has no address space.
            if bytes == 0 {
                continue;
            }
            let unchanged = before.get(&process.id) == Some(&bytes);
            self.sizes.insert(process.id, bytes);
            if !unchanged && !engines_of(profiles, process.id.tgid).is_empty() {
                found.push(process);
            }
        }
        found
    }
}

/// Titles of the engines whose libraries a process maps; none where it is gone or not ours to look at.
#[must_use]
pub fn engines_of(profiles: &Profiles, pid: u32) -> Vec<String> {
    let mappings = process::mappings(pid).unwrap_or_default();
    let mut engines: Vec<String> = mappings
        .iter()
        .filter_map(|mapping| profiles.engine_of(mapping.path.rsplit('/').next()?))
        .map(str::to_owned)
        .collect();
    engines.sort();
    engines.dedup();
    engines
}

/// `id (comm), …`, the ids as short as users see them.
fn list(containers: &BTreeMap<String, String>) -> String {
    if containers.is_empty() {
        return "none".to_owned();
    }
    let text: Vec<String> =
        containers.iter().map(|(id, comm)| format!("{} ({comm})", id.get(..12).unwrap_or(id))).collect();
    text.join(", ")
}

//! Control groups and containers, from /proc/PID/cgroup: one line `hierarchy:controllers:/path` per hierarchy, of which
//! cgroup v2 has one (cgroups(7)). No container runtime is asked: an id is in the path of the container's group.

use std::{collections::BTreeMap, fs};

use crate::probe::{ProbeError, process};

/// What runtimes put before and behind the id of a container.
const PREFIXES: [&str; 6] = ["docker-", "cri-containerd-", "crio-", "libpod-", "nerdctl-", "lxc-"];
const SUFFIX: &str = ".scope";
/// Ids of containers are SHA-256 sums in hexadecimal; users write at least so much of one.
const MIN_DIGITS: usize = 4;
const DIGITS: usize = 64;
const ROOT: &str = "/sys/fs/cgroup";

/// A group's path inside its hierarchy: what [`holds`] compares with.
pub(super) fn inside(path: &str) -> String {
    without_mount(path, &mounts())
}

/// Whether a process is in a group or below it.
pub(super) fn holds(inside: &str, pid: u32) -> bool {
    is_below(&text_of(pid), inside)
}

/// Whether there is such a group, with or without processes.
pub(super) fn exists(path: &str) -> bool {
    let mounts = mounts();
    let inside = without_mount(path, &mounts);
    let inside = inside.trim_start_matches('/');
    mounts.iter().any(|mount| std::path::Path::new(mount).join(inside).is_dir())
}

/// Whether a process is in the container whose id begins like this.
pub(super) fn is_in_container(id: &str, pid: u32) -> bool {
    ids(&text_of(pid)).any(|known| is_id(known, id))
}

/// Whether `wanted`, as a user writes it, is the beginning of an id.
pub(super) fn is_id(id: &str, wanted: &str) -> bool {
    // As Kubernetes prints it: containerd://0123….
    let wanted = wanted.rsplit("://").next().unwrap_or(wanted);
    wanted.len() >= MIN_DIGITS && id.starts_with(wanted)
}

/// Ids of the containers that run here, each with the name of a process in it.
pub(super) fn containers() -> Result<BTreeMap<String, String>, ProbeError> {
    let mut containers = BTreeMap::new();
    for (found, _) in process::all()? {
        for id in ids(&text_of(found.id.tgid)) {
            containers.entry(id.to_owned()).or_insert_with(|| found.comm.clone());
        }
    }
    Ok(containers)
}

/// Empty for a process that is gone.
fn text_of(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default()
}

/// Where hierarchies are mounted.
fn mounts() -> Vec<String> {
    let mounts = procfs::process::Process::myself().and_then(|process| process.mountinfo());
    let mut mounts: Vec<String> = mounts
        .into_iter()
        .flatten()
        .filter(|mount| mount.fs_type.starts_with("cgroup"))
        .map(|mount| mount.mount_point.to_string_lossy().into_owned())
        .collect();
    // The longest first: a hierarchy may be mounted below another.
    mounts.sort_by_key(|mount| std::cmp::Reverse(mount.len()));
    mounts
}

/// The path of a group inside its hierarchy, with a slash before and none behind.
fn without_mount(path: &str, mounts: &[String]) -> String {
    let path = path.trim_end_matches('/');
    let below =
        |mount: &str| path.strip_prefix(mount).filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut all = mounts.iter().map(String::as_str).chain([ROOT]);
    let rest = all.find_map(below).unwrap_or(path);
    format!("/{}", rest.trim_start_matches('/'))
}

fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

fn is_below(text: &str, group: &str) -> bool {
    let group = group.trim_end_matches('/');
    paths(text)
        .any(|path| path.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

fn ids(text: &str) -> impl Iterator<Item = &str> {
    paths(text).flat_map(|path| path.split('/')).filter_map(|part| {
        let part = part.strip_suffix(SUFFIX).unwrap_or(part);
        let id = PREFIXES.iter().find_map(|prefix| part.strip_prefix(prefix)).unwrap_or(part);
        // containerd's own layout: `kubepods-burstable-pod….slice:cri-containerd:ID`.
        let id = id.rsplit(':').next().unwrap_or(id);
        (id.len() == DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4f1d7a0c9be24c1d8a6f0e3b5d7c9a1f2e4b6d8c0a1f3e5d7c9b1a3f5e7d9c0b";

    #[test]
    fn ids_of_the_usual_runtimes() {
        for path in [
            format!("0::/system.slice/docker-{ID}.scope"),
            format!("4:memory:/docker/{ID}"),
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope"),
            format!("0::/kubepods/burstable/pod1/{ID}"),
            format!("0::/kubepods.slice/crio-{ID}.scope/container"),
            format!("0::/machine.slice/libpod-{ID}.scope"),
            format!(
                "1:name=systemd:/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}"
            ),
        ] {
            assert_eq!(ids(&path).collect::<Vec<_>>(), [ID], "{path}");
        }
        assert_eq!(ids("0::/user.slice/session-1.scope\n").count(), 0);
        assert!(is_id(ID, "4f1d7a0c9be2") && is_id(ID, &format!("containerd://{ID}")));
        assert!(!is_id(ID, "4f1") && !is_id(ID, "4f1d7b"));
    }

    #[test]
    fn groups_with_and_without_their_mount() {
        let mounts = ["/sys/fs/cgroup/unified".to_owned(), "/sys/fs/cgroup".to_owned()];
        for path in ["/sys/fs/cgroup/unified/a/b/", "/sys/fs/cgroup/a/b", "/a/b", "a/b"] {
            assert_eq!(without_mount(path, &mounts), "/a/b");
        }
        assert_eq!(without_mount("/sys/fs/cgroupies", &[]), "/sys/fs/cgroupies");
        let text = "4:memory:/other\n0::/a/b/c\n";
        assert!(is_below(text, "/a/b") && is_below(text, "/a/b/c") && is_below(text, "/"));
        assert!(!is_below(text, "/a/bc") && !is_below(text, "/a/b/c/d"));
    }
}

//! Targets as users name them, and the places where their libraries may be.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use engines::Profiles;
use tracer::{
    event::{CallEnd, Event, Point},
    probe::{
        Session, process,
        select::{Selector, Watch},
    },
};

use crate::{
    Test,
    fixture::{Built, Running, calls_only},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("targets::containers_and_groups", containers_and_groups),
    ("targets::engines_that_come_later", engines_that_come_later),
    ("targets::by_name", by_name),
    ("targets::deleted_library", deleted_library),
    ("targets::other_mounts", other_mounts),
    ("targets::two_versions_at_once", two_versions_at_once),
];

const ID: &str = "4f1d7a0c9be24c1d8a6f0e3b5d7c9a1f2e4b6d8c0a1f3e5d7c9b1a3f5e7d9c0b";

/// A control group as a container runtime would name it. Dropping it removes it, once it is empty.
struct Group {
    folder: PathBuf,
}

impl Group {
    fn make() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ');
                let (_, mount, kind) = (words.next()?, words.next()?, words.next()?);
                kind.starts_with("cgroup").then(|| (kind == "cgroup2", mount.to_owned()))
            })
            .max();
        let (_, mount) =
            mount.context("no control groups are mounted: mount -t cgroup2 nodev /sys/fs/cgroup")?;
        let folder = Path::new(&mount).join(format!("tracer-test/docker-{ID}.scope"));
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self { folder })
    }

    fn take(&self, pid: u32) -> Result<()> {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string())
            .context("moving a process into the group")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What still runs in it keeps it.
        for folder in [Some(self.folder.as_path()), self.folder.parent()].into_iter().flatten() {
            let _busy = fs::remove_dir(folder);
        }
    }
}

fn pids(watch: &mut Watch, profiles: &Profiles) -> Result<Vec<u32>> {
    Ok(watch.first(profiles)?.into_iter().map(|found| found.id.tgid).collect())
}

fn containers_and_groups() -> Result<()> {
    let profiles = Built::get()?.profiles()?;
    let group = Group::make()?;
    let (first, second) = (Running::start(&["calls"])?, Running::start(&["calls"])?);
    group.take(first.pid())?;
    let mut by_id = Watch::new(Selector::Container(ID[..12].to_owned()));
    let mut by_path = Watch::new(Selector::Cgroup(group.folder.display().to_string()));
    let mut by_parent = Watch::new(Selector::Cgroup("/tracer-test".to_owned()));
    for watch in [&mut by_id, &mut by_path, &mut by_parent] {
        ensure!(pids(watch, &profiles)? == [first.pid()], "{:?}", watch.selector());
    }
    group.take(second.pid())?;
    for watch in [&mut by_id, &mut by_path, &mut by_parent] {
        let now: Vec<u32> = watch.again(&profiles).into_iter().map(|found| found.id.tgid).collect();
        ensure!(now == [first.pid(), second.pid()], "{:?}: {now:?}", watch.selector());
    }
    for (selector, says) in [
        (Selector::Container("ffff".into()), "docker inspect"),
        (Selector::Container("4f1".into()), &ID[..12]),
        (Selector::Cgroup("/tracer-test/none".into()), "systemd-cgls"),
    ] {
        let error =
            Watch::new(selector).first(&profiles).err().context("found what is not there")?.to_string();
        ensure!(error.contains(says), "{error}");
    }
    Ok(())
}

/// The fixture's late library is an engine here.
const ENGINE: &str = r#"
engine = "late"
title = "Late Engine"
files = ["libfixture_late.so"]

[[point]]
symbols = ["fixture_work"]
role = "step"
returns = "c"
"#;

fn engines_that_come_later() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("late.toml");
    fs::write(&file, ENGINE)?;
    let mut profiles = Profiles::builtin();
    profiles.load(&file)?;
    let library = Built::get()?.path("libfixture_late.so");
    let mut running = Running::start(&["late", &library.to_string_lossy()])?;
    let mut watch = Watch::new(Selector::Engines);
    let fits = |found: &process::Found| found.id.tgid == running.pid();
    ensure!(!watch.first(&profiles)?.iter().any(fits), "an engine before it was opened");
    ensure!(!watch.again(&profiles).iter().any(fits), "an engine before it was opened");
    let pid = running.pid();
    running.tell()?;
    ensure!(running.wait_line()? == "opened");
    let found = watch.again(&profiles).into_iter().find(|found| found.id.tgid == pid);
    let mut session = Session::start(calls_only(), profiles)?;
    session.add(&found.context("the engine was not noticed")?)?;
    let mut events = Vec::new();
    running.tell()?;
    running.line(&mut session, &mut events)?;
    let stopped = session.stop(&mut events);
    ensure!(stopped.progress.steps == 10, "{} steps", stopped.progress.steps);
    running.end()
}

fn by_name() -> Result<()> {
    let profiles = Profiles::builtin();
    let (first, second) = (Running::start(&["calls"])?, Running::start(&["calls"])?);
    let found = pids(&mut Watch::new(Selector::Comm("fixture".into())), &profiles)?;
    ensure!([first.pid(), second.pid()].iter().all(|pid| found.contains(pid)), "{found:?}");
    let error = Watch::new(Selector::Comm("no-such-name".into())).first(&profiles).err();
    ensure!(error.is_some_and(|error| error.to_string().contains("no-such-name")));
    Ok(())
}

/// Runs `late` fixtures that have opened their library, and counts the calls of its function in each.
fn trace_opened(mut running: Vec<Running>) -> Result<Vec<(Vec<Point>, usize)>> {
    for one in &mut running {
        one.tell()?;
        let line = one.wait_line()?;
        ensure!(line == "opened", "{line}");
    }
    trace_calls(running)
}

fn trace_calls(mut running: Vec<Running>) -> Result<Vec<(Vec<Point>, usize)>> {
    let mut session = Session::start(calls_only(), Built::get()?.profiles()?)?;
    let mut events = Vec::new();
    for one in &running {
        session.add(&process::find(one.pid())?)?;
    }
    for one in &mut running {
        one.tell()?;
        one.line(&mut session, &mut events)?;
    }
    let notices = session.take_notices();
    ensure!(notices.is_empty(), "{notices:?}");
    session.stop(&mut events);
    let pids: Vec<u32> = running.iter().map(Running::pid).collect();
    running.into_iter().try_for_each(Running::end)?;
    let of_process = |pid: u32| {
        let points: Vec<Point> = events
            .iter()
            .filter_map(|event| match event {
                Event::Point(point) if point.process.tgid == pid && point.name == "fixture_work" => {
                    Some(point.clone())
                }
                _ => None,
            })
            .filter(|point| !point.library.ends_with("libfixture.so"))
            .collect();
        let returned = |event: &&Event| matches!(event, Event::Call(call) if call.end == CallEnd::Returned && points.iter().any(|point| point.id == call.point));
        let calls = events.iter().filter(returned).count();
        (points, calls)
    };
    Ok(pids.into_iter().map(of_process).collect())
}

fn deleted_library() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let library = folder.path().join("libfixture_gone.so");
    fs::copy(Built::get()?.path("libfixture_late.so"), &library)?;
    let mut running = Running::start(&["late", &library.to_string_lossy()])?;
    running.tell()?;
    ensure!(running.wait_line()? == "opened");
    // As an upgrade does: another file under the name, while the old one still runs.
    fs::remove_file(&library)?;
    fs::copy(Built::get()?.path("libfixture_other.so"), &library)?;
    let traced = trace_calls(vec![running])?;
    ensure!(traced[0].1 == 10, "{traced:?}");
    Ok(())
}

/// As in a container: the library's path means nothing on the host.
fn other_mounts() -> Result<()> {
    let root = tempfile::tempdir()?;
    let copy = |path: &Path, to: &str| -> Result<()> {
        let to = root.path().join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().context("no folder")?)?;
        fs::copy(path, &to).with_context(|| format!("copying {}", path.display()))?;
        Ok(())
    };
    let built = Built::get()?;
    for name in ["fixture", "libfixture.so", "libtracer_marks.so", "libfixture_late.so"] {
        copy(&built.path(name), &format!("/app/{name}"))?;
    }
    let needed = Command::new("ldd").arg(built.path("fixture")).output()?;
    for path in String::from_utf8(needed.stdout)?.split_whitespace().filter(|word| word.starts_with('/')) {
        if !path.contains("libfixture") && !path.contains("libtracer_marks") {
            copy(&Path::new(path).canonicalize()?, path)?;
        }
    }
    let mut command = Command::new("/app/fixture");
    // $ORIGIN means nothing where there is no /proc.
    command.env("LD_LIBRARY_PATH", "/app");
    let inside = std::ffi::CString::new(root.path().to_string_lossy().as_bytes())?;
    // SAFETY: system calls only.
    unsafe {
        command.args(["late", "/app/libfixture_late.so"]).pre_exec(move || enter(&inside));
    }
    let traced = trace_opened(vec![Running::start_command(&mut command)?])?;
    ensure!(traced[0].1 == 10 && traced[0].0[0].library == "/app/libfixture_late.so", "{traced:?}");
    Ok(())
}

/// Makes a folder the root of a mount namespace, as container runtimes do.
fn enter(root: &std::ffi::CStr) -> std::io::Result<()> {
    let (none, here) = (std::ptr::null(), c".".as_ptr());
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: plain system calls on valid strings.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, c"/".as_ptr(), none, private, none.cast()) == 0
            && libc::mount(root.as_ptr(), root.as_ptr(), none, libc::MS_BIND, none.cast()) == 0
            && libc::chdir(root.as_ptr()) == 0
            && libc::syscall(libc::SYS_pivot_root, here, here) == 0
            && libc::umount2(here, libc::MNT_DETACH) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn two_versions_at_once() -> Result<()> {
    let built = Built::get()?;
    let start = |name: &str| Running::start(&["late", &built.path(name).to_string_lossy()]);
    let traced = trace_opened(vec![start("libfixture_late.so")?, start("libfixture_other.so")?])?;
    let offsets: Vec<u64> = traced.iter().flat_map(|(points, _)| points).map(|point| point.offset).collect();
    ensure!(offsets.len() == 2 && offsets[0] != offsets[1], "{traced:?}");
    ensure!(traced.iter().all(|(_, calls)| *calls == 10), "{traced:?}");
    Ok(())
}

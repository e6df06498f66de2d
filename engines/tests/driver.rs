//! The driver's profile on a made-up libcuda: exports with the real one's prologue.
#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod build;

use build::{Build, inspect};
use engines::{Machine, Placement, Point, Profiles, Reason, Role};

/// A function that begins as 605 of the 636 exports of libcuda 550 do.
fn export(name: &str) -> String {
    format!(
        ".globl {name}\n.type {name},@function\n{name}:\n\
         cmpl $0x41535046, switch(%rip)\nje 1f\njmp *other(%rip)\n1: push %rbx\npop %rbx\nret\n.size {name}, .-{name}\n"
    )
}

fn driver(names: &[&str], tail: &str) -> String {
    let functions: String = names.iter().map(|name| export(name)).collect();
    format!(".text\n{functions}{tail}\n.data\nswitch: .long 0\n.balign 8\nother: .quad 0\n")
}

const WANTED: [&str; 12] = [
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cuMemcpyDtoH_v2",
    "cuGraphLaunch",
    "cuGraphLaunch_ptsz",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamDestroy_v2",
    "cuCtxDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
];

fn point<'a>(points: &'a [Point], name: &str) -> &'a Point {
    points.iter().find(|point| point.name == name).unwrap()
}

#[test]
fn exports_are_probed_at_the_branch_of_their_prologue() {
    let build = Build::new();
    let tail = ".globl tracer_standin\n.type tracer_standin,@object\ntracer_standin: .long 1\n";
    let library = inspect(&build.assemble("libcuda.so.550.163.01", &driver(&WANTED, tail))).unwrap();
    assert_eq!((library.engine.as_str(), library.version.as_deref()), ("cuda", Some("550.163.01")));
    // Launches, copies and event records are for closer looks: they are missing here, and said to be.
    assert!(library.simulated && library.refusals.iter().all(|refusal| !refusal.default));
    assert!(library.refusals.iter().any(|refusal| refusal.point == "cuLaunchKernel"));
    assert_eq!(library.points.len(), WANTED.len());
    for point in &library.points {
        assert_eq!((point.offset - point.function_offset, point.placement), (10, Placement::Emulated));
        assert!(point.return_probe && point.default);
    }
    let launch = point(&library.points, "cuGraphLaunch_ptsz");
    assert_eq!((launch.role, launch.stream_arg()), (Role::GraphLaunch, Some(1)));
    assert_eq!(point(&library.points, "cuStreamSynchronize").stream_arg(), Some(0));
    assert_eq!(point(&library.points, "cuCtxSynchronize").stream_arg(), None);
}

#[test]
fn what_is_missing_is_named_and_twins_and_aliases_are_not_counted_twice() {
    let build = Build::new();
    let alias = ".globl cuStreamSynchronize_ptsz\n.set cuStreamSynchronize_ptsz, cuStreamSynchronize\n\
                 .globl cuEventSynchronize\n.type cuEventSynchronize,@gnu_indirect_function\n\
                 cuEventSynchronize: ret\n.globl cuLaunchKernel\n.data\ncuLaunchKernel: .long 0\n.text\n";
    let text = driver(&["cuStreamSynchronize", "cuGraphLaunch"], alias);
    let library = inspect(&build.assemble("libcuda.so.1", &text)).unwrap();
    assert_eq!(library.version, None);
    let names: Vec<&str> = library.points.iter().map(|point| point.name.as_str()).collect();
    assert_eq!(names, ["cuStreamSynchronize", "cuGraphLaunch"]);
    assert!(library.points[0].evidence.contains("also named cuStreamSynchronize_ptsz"));
    let reason = |name: &str| &library.refusals.iter().find(|refusal| refusal.point == name).unwrap().reason;
    let missing = |name: &str| library.refusals.iter().filter(|refusal| refusal.point == name).count();
    assert!(missing("cuCtxSynchronize") == 1 && missing("cuMemcpyBatchAsync") == 1, "{:?}", library.refusals);
    // A driver need not have the twins.
    assert_eq!(missing("cuGraphLaunch_ptsz"), 0);
    assert_eq!(reason("cuCtxSynchronize"), &Reason::NoSymbol("cuCtxSynchronize".into()));
    assert!(matches!(reason("cuEventSynchronize"), Reason::Indirect(_)));
    assert!(matches!(reason("cuLaunchKernel"), Reason::NotCode(_)));
}

#[test]
fn a_users_engine_needs_a_file_only() {
    let build = Build::new();
    let library = build.assemble("libmine.so.3", &driver(&["mine_decode"], ""));
    let profile = library.with_file_name("mine.toml");
    let text = "engine = \"mine\"\ntitle = \"Mine\"\nfiles = [\"libmine.so*\"]\n[[point]]\n\
                symbols = [\"mine_decode\", \"mine_encode\"]\nrole = \"step\"\nreturns = \"throws\"\n";
    std::fs::write(&profile, text).unwrap();
    let mut profiles = Profiles::builtin();
    profiles.load(&profile).unwrap();
    let found = profiles.inspect(&library, &std::fs::read(&library).unwrap()).unwrap();
    assert_eq!((found.engine.as_str(), found.points.len(), found.refusals.len()), ("mine", 1, 1));
    assert!(!found.points[0].return_probe, "an exception may cross it");
    assert!(found.refusals[0].reason.to_string().contains("mine_encode"));
}

#[test]
fn two_profiles_of_one_file_probe_a_function_once() {
    let build = Build::new();
    let library = build.assemble("libcuda.so.550.163.01", &driver(&WANTED, ""));
    let mut profiles = Profiles::builtin();
    profiles.load("cuda_graph".as_ref()).unwrap();
    let found = profiles.inspect(&library, &std::fs::read(&library).unwrap()).unwrap();
    assert_eq!(found.points.len(), WANTED.len());
    assert_eq!(found.version.as_deref(), Some("550.163.01"));
    let launch = point(&found.points, "cuGraphLaunch");
    assert_eq!((launch.role, launch.engine.as_str()), (Role::Step, "cuda_graph"));
    assert_eq!(point(&found.points, "cuStreamSynchronize").engine, "cuda");
}

#[test]
fn a_call_of_the_runtime_is_probed_at_the_driver_only() {
    let build = Build::new();
    let library = inspect(&build.assemble("libcudart.so.12", &driver(&["cudaGraphLaunch"], ""))).unwrap();
    assert_eq!((library.engine.as_str(), library.points.len()), ("cudart", 1));
    assert!(!library.points[0].default && library.points[0].role == Role::GraphLaunch);
}

#[test]
fn a_library_for_another_machine_is_looked_at_and_not_probed() {
    let build = Build::new();
    let path = build.assemble("libcuda.so.1", &driver(&WANTED, ""));
    let mut data = std::fs::read(&path).unwrap();
    let (here, other) = match Machine::HOST {
        Some(Machine::Aarch64) => (183, 62),
        _ => (62, 183),
    };
    assert_eq!(data[18], here);
    data[18] = other;
    let profiles = Profiles::builtin();
    let refused = profiles.inspect(&path, &data).unwrap();
    assert!(refused.points.is_empty());
    let reasons = refused.refusals.iter().filter(|refusal| matches!(refusal.reason, Reason::OtherMachine(_)));
    assert_eq!(reasons.count(), WANTED.len());
    // On AArch64 every function is probed at its entry.
    let seen = profiles.examine(&path, &data).unwrap();
    assert!(seen.points.iter().all(|point| point.offset == point.function_offset));
    assert_eq!(seen.points.len(), WANTED.len());
}

#[test]
fn the_loader_of_this_machine() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let path = path.into_iter().find(|path| path.rsplit('/').next().unwrap_or("").starts_with("ld-"));
    // A static test program has no loader.
    let Some(path) = path else { return };
    let library = inspect(path.as_ref()).unwrap();
    assert_eq!((library.engine.as_str(), library.points.len()), ("loader", 1));
    assert_eq!((library.points[0].role, library.points[0].return_probe), (Role::Loader, false));
}

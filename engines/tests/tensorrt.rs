//! The resolver on test doubles of libnvinfer: same type names, layout and slots as the real one, stripped.
#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod build;

use std::{path::Path, process::Command};

use build::{Build, nvinfer_source};
use engines::{Library, Placement, Point, Profiles, Reason, Role};

fn inspect(build: &Build, flags: &[&str]) -> Library {
    build::inspect(&build.nvinfer(flags)).unwrap()
}

fn only_point(library: &Library) -> &Point {
    assert!(library.refusals.is_empty(), "{:?}", library.refusals);
    assert_eq!(library.points.len(), 1, "{:?}", library.points);
    &library.points[0]
}

fn only_reason(library: &Library) -> &Reason {
    assert!(library.points.is_empty(), "{:?}", library.points);
    assert_eq!(library.refusals.len(), 1);
    assert_eq!(library.refusals[0].point, "enqueueV3");
    &library.refusals[0].reason
}

/// File offset of `enqueueV3` by the symbol table of an unstripped build with the same flags.
fn truth(build: &Build, flags: &[&str]) -> u64 {
    let full = build.compile("libnvinfer.so.full", &nvinfer_source(), flags);
    let symbols = Command::new("nm").arg(&full).output().unwrap();
    let symbols = String::from_utf8(symbols.stdout).unwrap();
    let line =
        symbols.lines().find(|line| line.ends_with("rt16ExecutionContext9enqueueV3EP11CUstream_st")).unwrap();
    // In these small libraries the code segment's address is its file offset.
    u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
}

#[test]
fn layouts_of_versions_8_10_and_11() {
    let build = Build::new();
    for (flag, version, slot) in
        [("-DTRT=8", "8.6.1.6", 44), ("-DTRT=10", "10.13.3.9", 37), ("-DTRT=11", "11.4.0.106", 36)]
    {
        let library = inspect(&build, &["-O2", flag]);
        assert_eq!(library.engine, "tensorrt");
        assert_eq!(library.version.as_deref(), Some(version));
        assert!(!library.simulated && !library.build_id.is_empty());
        let point = only_point(&library);
        assert_eq!((point.name.as_str(), point.role, point.stream_arg()), ("enqueueV3", Role::Step, Some(1)));
        assert!(point.return_probe && point.default);
        assert_eq!(point.vtable_words.len(), 1);
        let expected = format!("slot {slot} names itself and is the version's slot, its neighbours agree");
        assert!(point.evidence.starts_with(&expected), "{}", point.evidence);
        assert_eq!(point.function_offset, truth(&build, &["-O2", flag]));
    }
}

#[test]
fn ways_of_building() {
    let build = Build::new();
    for flags in [
        &["-O2", "-fcf-protection=full"] as &[&str],
        &["-O2", "-Wl,-z,pack-relative-relocs"],
        &["-O2", "-Wl,--no-eh-frame-hdr"],
        &["-O2", "-DWITH_DISPATCH"],
        &["-O0"],
        &["-Os", "-Wl,-z,now", "-Wl,--hash-style=sysv"],
    ] {
        let library = inspect(&build, flags);
        assert_eq!(only_point(&library).function_offset, truth(&build, flags), "{flags:?}");
    }
    // Where the bases have vtables too, each that holds the function is listed: the injected library patches all.
    assert!(only_point(&inspect(&build, &["-O0"])).vtable_words.len() > 1);
}

#[test]
fn without_its_own_name_the_neighbours_decide() {
    let build = Build::new();
    let library = inspect(&build, &["-O2", "-DNO_SELFNAME"]);
    let point = only_point(&library);
    assert!(
        point.evidence.contains("slot 37 is the version's slot, its neighbours agree"),
        "{}",
        point.evidence
    );
    assert_eq!(point.function_offset, truth(&build, &["-O2", "-DNO_SELFNAME"]));
}

#[test]
fn refusals() {
    let build = Build::new();
    let two = inspect(&build, &["-O2", "-DTWO_IMPL"]);
    assert!(matches!(only_reason(&two), Reason::ManyImplementations { classes, .. } if classes.len() == 2));
    assert!(matches!(only_reason(&inspect(&build, &["-O2", "-fno-rtti"])), Reason::NoTypeInfo(_)));
    // Interprocedural constants take the names out of the functions: nothing is left to confirm the slot.
    assert!(matches!(only_reason(&inspect(&build, &["-O3", "-flto"])), Reason::Unconfirmed { .. }));
    // Its version is not exported: some other library that has the classes.
    assert!(matches!(only_reason(&inspect(&build, &["-O2", "-DNO_VERSION"])), Reason::NoVersion(_)));
}

#[test]
fn another_machine_or_no_library() {
    let build = Build::new();
    let path = build.nvinfer(&["-O2"]);
    let data = std::fs::read(&path).unwrap();
    let profiles = Profiles::builtin();
    let reason = |data: &[u8]| only_reason(&profiles.inspect(&path, data).unwrap()).clone();
    let mut other = data.clone();
    other[18] = 3;
    assert_eq!(reason(&other), Reason::Machine(3));
    let mut executable = data.clone();
    executable[16] = 2;
    assert_eq!(reason(&executable), Reason::NotShared);
    assert_eq!(reason(b""), Reason::NotElf);
    assert_eq!(reason(b"#!/bin/sh"), Reason::NotElf);
    assert!(profiles.inspect(Path::new("/x/other.so"), &data).is_none());
}

#[test]
fn a_truncated_file_is_refused() {
    let build = Build::new();
    let path = build.nvinfer(&["-O2"]);
    let data = std::fs::read(&path).unwrap();
    let profiles = Profiles::builtin();
    for length in (0..data.len()).step_by(97) {
        let library = profiles.inspect(&path, &data[..length]).unwrap();
        // The section headers come last: a file that lacks only them is whole as far as a process is concerned.
        if let Some(point) = library.points.first() {
            assert!(length > data.len() - 4096, "a point at {:#x} in {length} bytes", point.offset);
        }
    }
}

#[test]
fn the_probe_is_on_the_entry_or_a_cheaper_instruction() {
    let library = inspect(&Build::new(), &["-O0"]);
    let point = only_point(&library);
    // -O0 begins with `push %rbp`.
    assert_eq!((point.placement, point.offset), (Placement::Emulated, point.function_offset));
}

//! The resolver on NVIDIA's own libraries: `cargo xtask test --real-libs` fetches them and runs this.
//!
//! `TRACER_REAL_LIBS` names a folder that holds one folder for each entry of [`expected::LIBRARIES`]. Without it there
//! is nothing to look at, and one line says so. The time and the memory of each library are printed, not asserted.
#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod expected;
mod memory;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Instant,
};

use engines::{Library, Point, Profiles};
use expected::{Expected, LIBRARIES, Site, What};

#[global_allocator]
static MEMORY: memory::Peak = memory::Peak::new();

#[test]
fn nvidias_own_libraries() {
    let Some(folder) = std::env::var_os("TRACER_REAL_LIBS").map(PathBuf::from) else {
        eprintln!("SKIP: TRACER_REAL_LIBS is not set (cargo xtask test --real-libs sets it)");
        return;
    };
    let profiles = Profiles::builtin();
    let mut seen = 0;
    for expected in LIBRARIES {
        let Some(path) = find(&folder.join(expected.folder), expected.file) else { continue };
        seen += 1;
        let library = timed(&profiles, &path, expected);
        check(&library, expected, &path);
    }
    assert!(seen > 0, "{} holds none of the libraries", folder.display());
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // Headers of NVTX are for the tests of the injected library.
        let known = name.starts_with('.')
            || name.starts_with("nvtx-")
            || LIBRARIES.iter().any(|expected| expected.folder == name);
        assert!(known, "nothing is expected of {name}");
    }
    eprintln!("{seen} of {} libraries were there", LIBRARIES.len());
}

/// What programs ask of tensors, by slots of several classes. The offsets of functions are not looked up by other means, but
/// each names itself, in the slot of the public headers (of 10.x; in 11.x where it was found).
#[test]
fn tensors_of_nvidias_own_libraries() {
    let Some(folder) = std::env::var_os("TRACER_REAL_LIBS").map(PathBuf::from) else {
        eprintln!("SKIP: TRACER_REAL_LIBS is not set (cargo xtask test --real-libs sets it)");
        return;
    };
    let mut profiles = Profiles::builtin();
    profiles.load(Path::new("shapes")).unwrap();
    for expected in LIBRARIES.iter().filter(|one| one.engine == "tensorrt" && one.machine == "x86_64") {
        let Some(path) = find(&folder.join(expected.folder), expected.file) else { continue };
        if !matches!(expected.what, What::Points(_)) || expected.file == "tensorrt.so" {
            continue;
        }
        let library = profiles.inspect(&path, &std::fs::read(&path).unwrap()).unwrap();
        for name in ["setInputShape", "getTensorShape", "getTensorDataType", "createExecutionContext"] {
            let point = library.points.iter().find(|point| point.name == name);
            let point =
                point.unwrap_or_else(|| panic!("{}: no {name}: {:?}", expected.folder, library.refusals));
            eprintln!("{:<20} {name}: {}", expected.folder, point.evidence);
            let evidence = &point.evidence;
            assert!(evidence.contains("names itself and is the version's slot"), "{name}: {evidence}");
        }
    }
}

/// The file of this name under a folder.
fn find(folder: &Path, file: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter().find_map(|path| {
        if path.is_dir() {
            return find(&path, file);
        }
        (path.file_name()? == file && !path.is_symlink()).then_some(path)
    })
}

fn timed(profiles: &Profiles, path: &Path, expected: &Expected) -> Library {
    let file = File::open(path).unwrap();
    // SAFETY: nobody writes to the cache of libraries meanwhile.
    let data = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut best = f64::INFINITY;
    let mut library = None;
    let before = MEMORY.restart();
    // The first run reads the file from the disk.
    for _ in 0..3 {
        let begin = Instant::now();
        library = profiles.examine(path, &data);
        best = best.min(begin.elapsed().as_secs_f64() * 1e3);
    }
    let heap = (MEMORY.peak() - before) as f64 / f64::from(1 << 20);
    let library = library.unwrap_or_else(|| panic!("no profile concerns {}", path.display()));
    eprintln!(
        "{:<20} {:>5} MB {best:>7.1} ms {heap:>6.1} MiB heap  {} points, {} refused",
        expected.folder,
        data.len() / 1_000_000,
        library.points.len(),
        library.refusals.len(),
    );
    library
}

fn check(library: &Library, expected: &Expected, path: &Path) {
    let context = || format!("{} {}: {:?}", expected.folder, expected.file, library.refusals);
    assert_eq!(
        (library.engine.as_str(), library.machine.map(engines::Machine::name)),
        (expected.engine, Some(expected.machine))
    );
    assert_eq!(library.version.as_deref(), expected.version, "{}", context());
    let data = std::fs::read(path).unwrap();
    for site in expected.sites {
        let point =
            point(library, site).unwrap_or_else(|| panic!("{} is missing in {}", site.name, context()));
        assert_eq!(point.function_offset, site.function, "{} in {}", site.name, context());
        assert_eq!(point.offset - point.function_offset, site.delta, "{} in {}", site.name, context());
        assert_eq!(point.placement.name(), site.class, "{} in {}", site.name, context());
        let at = usize::try_from(point.offset).unwrap();
        assert_eq!(data[at..at + site.bytes.len()], *site.bytes, "{} in {}", site.name, context());
    }
    match expected.what {
        What::Points(count) => assert_eq!(library.points.len(), count, "{}", context()),
        What::Refused(reason) => {
            assert!(library.points.is_empty(), "{}", context());
            assert!(library.refusals[0].reason.to_string().contains(reason), "{}", context());
        }
    }
    let missing: Vec<&str> = library.refusals.iter().map(|refusal| refusal.point.as_str()).collect();
    if let What::Points(_) = expected.what {
        assert_eq!(missing, expected.missing, "{}", context());
    }
}

fn point<'a>(library: &'a Library, site: &Site) -> Option<&'a Point> {
    library.points.iter().find(|point| point.name == site.name)
}

//! How long the resolver takes on real libraries, and how much memory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};
use engines::{Machine, Profiles};
use memmap2::Mmap;
use serde::Serialize;
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::{MEMORY, part::Part};

/// In ms.
const AIM: Aim = Aim::AtMost(100.0);

/// The resolver on one library.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    /// Folder and file in the cache.
    library: String,
    bytes: u64,
    points: usize,
    /// Mapping the file and reading all of it.
    read_ms: f64,
    /// Mapping the file and finding its points.
    inspect_ms: Option<Estimate>,
    aim: Aim,
    /// Finding ÷ reading.
    ratio: Option<Estimate>,
    peak_heap_bytes: usize,
}

/// Looks at the largest library of each engine, the largest of all first.
pub(crate) fn run(libraries: Option<&Path>, rounds: usize) -> Result<Part<Vec<Cost>>> {
    let Some(cache) = libraries else {
        return Ok(Part::LeftOut("no folder of real libraries was given (--real-libs)".into()));
    };
    let profiles = Profiles::builtin();
    let files = largest(cache, &profiles)?;
    if files.is_empty() {
        return Ok(Part::LeftOut(format!("{} holds none: cargo xtask test --real-libs", cache.display())));
    }
    files.iter().map(|file| measure(file, &profiles, rounds)).collect::<Result<_>>().map(Part::Measured)
}

fn largest(cache: &Path, profiles: &Profiles) -> Result<Vec<PathBuf>> {
    let mut largest: BTreeMap<String, (u64, PathBuf)> = BTreeMap::new();
    // A cache that is not there holds nothing.
    for folder in fs::read_dir(cache).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        // Hidden while it is being fetched.
        if folder.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        for file in fs::read_dir(folder.path()).with_context(|| format!("cannot read {:?}", folder.path()))? {
            let path = file?.path();
            // Headers are in folders of their own.
            if !path.is_file() {
                continue;
            }
            let library = profiles.inspect(&path, &map(&path)?);
            let Some(library) = library.filter(|library| library.machine == Machine::HOST) else {
                continue;
            };
            let bytes = fs::metadata(&path)?.len();
            let known = largest.entry(library.engine).or_default();
            *known = known.clone().max((bytes, path));
        }
    }
    let mut files: Vec<_> = largest.into_values().collect();
    files.sort_unstable_by(|a, b| b.cmp(a));
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

fn measure(file: &Path, profiles: &Profiles, rounds: usize) -> Result<Cost> {
    let parts: Vec<_> = file.iter().rev().take(2).map(|part| part.to_string_lossy()).collect();
    let library = parts.iter().rev().map(AsRef::as_ref).collect::<Vec<&str>>().join("/");
    // From here on it is in the page cache.
    read_all(&map(file)?);
    let (mut reading, mut inspecting) = (Vec::new(), Vec::new());
    let (mut points, mut peak_heap_bytes) = (0, 0);
    for round in 0..rounds {
        crate::progress(&format!("resolver, {library}: round {} of {rounds}", round + 1));
        let mut inspect = || -> Result<()> {
            let before = MEMORY.restart();
            let (ms, found) = timed(file, |bytes| profiles.inspect(file, bytes))?;
            peak_heap_bytes = peak_heap_bytes.max(MEMORY.peak() - before);
            points = found.map_or(0, |library| library.points.len());
            inspecting.push(ms);
            Ok(())
        };
        if round % 2 == 0 {
            inspect()?;
            reading.push(timed(file, read_all)?.0);
        } else {
            reading.push(timed(file, read_all)?.0);
            inspect()?;
        }
    }
    let ratios: Vec<f64> = inspecting.iter().zip(&reading).map(|(inspect, read)| inspect / read).collect();
    Ok(Cost {
        library,
        bytes: fs::metadata(file)?.len(),
        points,
        read_ms: stats::median(&reading).context("no rounds")?,
        inspect_ms: stats::estimate(&inspecting),
        aim: AIM,
        ratio: stats::estimate(&ratios),
        peak_heap_bytes,
    })
}

/// Maps a file anew, as the tracer does, and runs `f` on it: ms, and the result.
fn timed<T>(file: &Path, f: impl FnOnce(&[u8]) -> T) -> Result<(f64, T)> {
    let begin = Instant::now();
    let bytes = map(file)?;
    let result = std::hint::black_box(f(&bytes));
    Ok((begin.elapsed().as_secs_f64() * 1e3, result))
}

fn map(file: &Path) -> Result<Mmap> {
    let opened = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    // SAFETY: nobody writes to the cache of libraries meanwhile.
    unsafe { Mmap::map(&opened) }.with_context(|| format!("cannot map {}", file.display()))
}

/// The least that looking at every byte can cost.
fn read_all(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)))
}

const TITLE: &str = "The resolver on the largest library of each engine: finding all probe points, against reading the \
                     whole file (both map it anew from the page cache)";

fn table(costs: &[Cost]) -> Table {
    let mut header = vec!["library", "MB", "points", "reading ms"];
    header.extend(judged("finding ms"));
    header.extend(["finding ÷ reading", "peak heap MiB"]);
    let mut table = Table::new(TITLE, &header);
    for cost in costs {
        let mut row = vec![cost.library.clone(), format!("{:.1}", cost.bytes as f64 / 1e6)];
        row.extend([cost.points.to_string(), format!("{:.1}", cost.read_ms)]);
        row.extend(ratio(cost.inspect_ms.as_ref(), Some(cost.aim)));
        row.push(ratio(cost.ratio.as_ref(), None)[0].clone());
        row.push(format!("{:.2}", cost.peak_heap_bytes as f64 / f64::from(1 << 20)));
        table.rows.push(row);
    }
    table
}

pub(crate) fn text(costs: &Part<Vec<Cost>>) -> String {
    costs.text(TITLE, |costs| table(costs).to_string())
}

//! The file behind a mapping.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use object::read::ReadCache;
use object::{Object, ObjectSection, ObjectSymbol, SectionKind};

use super::held;
use crate::event::{Mapping, ProcessId};
use crate::hex::hex;

/// A file that was mapped, or the fact that it is not there any more.
pub(crate) struct Module {
    path: Option<PathBuf>,
    /// What was split off it: symbols and debug information.
    separate: Option<PathBuf>,
    sections: Vec<Section>,
    /// Functions of the kernel's library in every process: address, size, name.
    vdso: Vec<(u64, u64, String)>,
}

/// Where files lie by build-id.
pub(super) struct Places {
    /// What was split off files of this machine: `ab/cdef….debug`.
    pub(super) separate: PathBuf,
    /// perf's copies of files that it has recorded: `ab/cdef…/elf`.
    pub(super) copies: Option<PathBuf>,
}

impl Places {
    pub(super) fn here() -> Self {
        let home = std::env::var_os("HOME");
        Self {
            separate: PathBuf::from("/usr/lib/debug/.build-id"),
            copies: home.map(|home| Path::new(&home).join(".debug/.build-id")),
        }
    }
}

/// A section of code.
struct Section {
    name: String,
    address: u64,
    offset: u64,
    bytes: u64,
}

impl Module {
    /// Looks for the file: through the process while it lives, which also reaches into its container and to deleted
    /// files; then through the descriptor that was kept of it; then at its path; then among perf's copies.
    pub(crate) fn find(mapping: &Mapping, this_boot: bool, held: Option<RawFd>, places: &Places) -> Self {
        let none = Self { path: None, separate: None, sections: Vec::new(), vdso: Vec::new() };
        if mapping.path == "[vdso]" && this_boot {
            return Self { vdso: own_vdso().unwrap_or_default(), ..none };
        }
        if !mapping.path.starts_with('/') {
            return none;
        }
        let mut candidates = Vec::new();
        if this_boot && is_alive(mapping.process) {
            let process = PathBuf::from(format!("/proc/{}", mapping.process.tgid));
            let Mapping { begin, end, path, .. } = mapping;
            // The path comes first: separate debug files are looked for beside it.
            candidates.push(process.join("root").join(path.trim_start_matches('/')));
            candidates.push(process.join(format!("map_files/{begin:x}-{end:x}")));
        }
        candidates.extend(held.map(held::path));
        candidates.push(PathBuf::from(&mapping.path));
        let (folder, rest) = match mapping.build_id.split_first() {
            Some((first, rest)) => (hex(&[*first]), hex(rest)),
            None => Default::default(),
        };
        candidates.extend(places.copies.iter().map(|copies| copies.join(&folder).join(&rest).join("elf")));
        let found = candidates.into_iter().find_map(|path| Some((open(&path, mapping)?, path)));
        let Some((sections, path)) = found else { return none };
        let separate = places.separate.join(folder).join(format!("{rest}.debug"));
        let separate = open(&separate, mapping).is_some().then_some(separate);
        Self { path: Some(path), separate, sections, vdso: Vec::new() }
    }

    /// `None` when no file was found that is certainly the one that was mapped.
    pub(crate) fn path(&self) -> Option<&PathBuf> {
        self.path.as_ref()
    }

    /// The file that was split off, and the address in it of what lies at an offset.
    pub(crate) fn separate(&self, offset: u64) -> Option<(&PathBuf, u64)> {
        let section = self.section(offset)?;
        Some((self.separate.as_ref()?, offset - section.offset + section.address))
    }

    fn section(&self, offset: u64) -> Option<&Section> {
        self.sections.iter().find(|s| offset >= s.offset && offset - s.offset < s.bytes)
    }

    /// The function at an offset, where this is the kernel's library.
    pub(crate) fn vdso_function(&self, offset: u64) -> Option<&str> {
        let holds = |(begin, bytes, _): &&(u64, u64, String)| offset >= *begin && offset - begin < *bytes;
        self.vdso.iter().find(holds).map(|(_, _, name)| name.as_str())
    }

    /// Whether the address of a symbol without a size lies in the same section as the code at `offset`: beyond its
    /// section it cannot reach, though it is the nearest symbol (`_init` before the PLT).
    pub(crate) fn same_section(&self, address: u64, offset: u64) -> bool {
        self.section(offset).is_some_and(|s| address >= s.address && address - s.address < s.bytes)
    }

    /// Name of the procedure linkage table that holds `offset`, if one does.
    pub(crate) fn plt(&self, offset: u64) -> Option<&'static str> {
        self.section(offset)?.name.starts_with(".plt").then_some("[plt]")
    }
}

/// Opens a file if it is the one that was mapped; returns its sections of code.
fn open(path: &Path, mapping: &Mapping) -> Option<Vec<Section>> {
    let file = File::open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() {
        return None;
    }
    let cache = ReadCache::new(file);
    let elf = object::File::parse(&cache).ok()?;
    let same = match mapping.build_id.as_slice() {
        [] => mapping.inode != 0 && metadata.ino() == mapping.inode,
        build_id => elf.build_id().ok().flatten() == Some(build_id),
    };
    same.then(|| elf.sections().filter(|s| s.kind() == SectionKind::Text).filter_map(section).collect())
}

fn section<'data>(section: impl ObjectSection<'data>) -> Option<Section> {
    let (offset, bytes) = section.file_range()?;
    Some(Section { name: section.name().ok()?.into(), address: section.address(), offset, bytes })
}

/// Functions of the vDSO, which is the same in every process of this boot.
fn own_vdso() -> Option<Vec<(u64, u64, String)>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"))?;
    let (begin, end) = line.split(' ').next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (begin, end) = (hex(begin)?, hex(end)?);
    let mut bytes = vec![0; usize::try_from(end - begin).ok()?];
    File::open("/proc/self/mem").ok()?.read_exact_at(&mut bytes, begin).ok()?;
    let elf = object::File::parse(&*bytes).ok()?;
    let mut functions: Vec<_> = elf
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition() && symbol.size() > 0)
        .filter_map(|symbol| Some((symbol.address(), symbol.size(), symbol.name().ok()?.to_owned())))
        .collect();
    // Several names of one function: the longest says most.
    functions.sort_by_key(|(begin, _, name)| (*begin, std::cmp::Reverse(name.len())));
    functions.dedup_by_key(|(begin, _, _)| *begin);
    Some(functions)
}

/// Whether the process lives, and is not another that got its pid.
pub(super) fn is_alive(process: ProcessId) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", process.tgid)) else { return false };
    // The name in parentheses may hold anything; fields are counted from its end. Field 22 is the start time.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    fields.split_ascii_whitespace().nth(19).and_then(|ticks| ticks.parse().ok()) == Some(process.start_ticks)
}

/// Whether kallsyms tells addresses; to users who may not know them it tells zeros.
pub(crate) fn kallsyms_readable() -> bool {
    let Ok(file) = File::open("/proc/kallsyms") else { return false };
    let mut lines = BufReader::new(file).lines().map_while(Result::ok);
    lines
        .next()
        .is_some_and(|line| line.split(' ').next().is_some_and(|a| a.bytes().any(|digit| digit != b'0')))
}

//! Names of code that a program generates while it runs, from the files in which it tells of it: perf maps and jitdump.

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use super::{HeldFiles, held, module::is_alive};
use crate::event::{Mapping, ProcessId};

/// Functions by address. Of two that were at one place, the later one counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generated {
    /// Begin → (end, name); they do not overlap.
    functions: BTreeMap<u64, (u64, String)>,
}

/// No more of a file is read.
const MOST_BYTES: u64 = 256 << 20;

impl Generated {
    /// What a process has told of its code. Its jitdump is a file that it maps; a perf map is at a place of its name.
    pub(super) fn of(process: ProcessId, jitdumps: &[Mapping], files: &HeldFiles) -> Self {
        let mut generated = Self::default();
        let alive = is_alive(process);
        let candidates = [
            alive.then(|| own_perf_map(process)),
            files.perf_map(process),
            Some(PathBuf::from(format!("/tmp/perf-{}.map", process.tgid))),
        ];
        if let Some(bytes) = candidates.iter().flatten().find_map(|path| read(path, process)) {
            generated.add_map(&String::from_utf8_lossy(&bytes));
        }
        for dump in jitdumps {
            let candidates = [
                alive.then(|| inside(process, &dump.path)),
                files.descriptor(dump.id).map(held::path),
                Some(PathBuf::from(&dump.path)),
            ];
            if let Some(bytes) = candidates.iter().flatten().find_map(|path| read(path, process)) {
                generated.add_dump(&bytes);
            }
        }
        generated
    }

    /// Adds the lines `BEGIN SIZE NAME` (hexadecimal) of a perf map.
    pub fn add_map(&mut self, text: &str) {
        for line in text.lines() {
            let mut fields = line.splitn(3, ' ');
            let mut hex = || u64::from_str_radix(fields.next()?.trim_start_matches("0x"), 16).ok();
            if let (Some(begin), Some(bytes)) = (hex(), hex()) {
                self.add(begin, bytes, fields.next().unwrap_or_default());
            }
        }
    }

    /// Adds the functions of a jitdump (tools/perf/Documentation/jitdump-specification.txt); up to where it is torn.
    pub fn add_dump(&mut self, bytes: &[u8]) {
        const MAGIC: u32 = 0x4a69_5444;
        const LOAD: u32 = 0;
        const MOVE: u32 = 1;
        if word(bytes, 0) != Some(MAGIC) {
            return;
        }
        let mut at = word(bytes, 8).unwrap_or(u32::MAX) as usize;
        // Numbers of functions → where they are, for those that move.
        let mut names: BTreeMap<u64, String> = BTreeMap::new();
        while let (Some(kind), Some(length)) = (word(bytes, at), word(bytes, at.saturating_add(4))) {
            let Some(record) = bytes.get(at..at.saturating_add(length as usize)) else { return };
            // The head is 16 bytes; pid and tid follow.
            if kind == LOAD {
                let fields = [32, 40, 48].map(|offset| long(record, offset));
                let name = record.get(56..).unwrap_or_default();
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                let name = String::from_utf8_lossy(name);
                if let [Some(begin), Some(bytes), Some(index)] = fields {
                    self.add(begin, bytes, &name);
                    names.insert(index, name.into_owned());
                }
            } else if kind == MOVE
                && let [Some(begin), Some(bytes), Some(index)] =
                    [40, 48, 56].map(|offset| long(record, offset))
                && let Some(name) = names.get(&index)
            {
                self.add(begin, bytes, &name.clone());
            }
            if length < 16 {
                return;
            }
            at += length as usize;
        }
    }

    fn add(&mut self, begin: u64, bytes: u64, name: &str) {
        let (Some(end), false) = (begin.checked_add(bytes), name.trim().is_empty() || bytes == 0) else {
            return;
        };
        // What was there is gone.
        while let Some((&before, &(its_end, _))) = self.functions.range(..end).next_back() {
            if its_end <= begin {
                break;
            }
            self.functions.remove(&before);
        }
        self.functions.insert(begin, (end, name.trim().to_owned()));
    }

    /// The function at an address.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&str> {
        let (_, (end, name)) = self.functions.range(..=address).next_back()?;
        (address < *end).then_some(name.as_str())
    }
}

/// Whether a mapping is there to tell tools of a jitdump.
pub(crate) fn is_dump(mapping: &Mapping) -> bool {
    let name = mapping.path.rsplit('/').next().unwrap_or_default();
    name.starts_with("jit-") && name.ends_with(".dump")
}

/// The perf map of a process that lives, if it writes one.
pub(crate) fn perf_map(process: ProcessId) -> Option<fs::File> {
    open(&own_perf_map(process), process)
}

/// Where a process that lives writes its perf map: by its own name, in its own folder.
fn own_perf_map(process: ProcessId) -> PathBuf {
    inside(process, &format!("/tmp/perf-{}.map", own_id(process).unwrap_or(process.tgid)))
}

/// A path as a process sees it.
fn inside(process: ProcessId, path: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/root{path}", process.tgid))
}

/// The id that a process has for itself.
fn own_id(process: ProcessId) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.tgid)).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

/// Opens a file that was written while the process ran: an older one is of another that had its number.
fn open(path: &Path, process: ProcessId) -> Option<fs::File> {
    let file = fs::File::open(path).ok()?;
    let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
    // USER_HZ is 100 on every architecture that is supported.
    let started = booted()? + i64::try_from(process.start_ticks / 100).ok()?;
    (metadata.mtime() + 1 >= started).then_some(file)
}

fn read(path: &Path, process: ProcessId) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, process)?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// When the machine was booted, in seconds since the epoch.
fn booted() -> Option<i64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(word(bytes, at)?) | u64::from(word(bytes, at + 4)?) << 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_perf_map_names_addresses() {
        let mut generated = Generated::default();
        generated.add_map(
            "1000 20 py::main:/srv/app.py\n1020 10 Lazy Function\nnonsense\n2000 0 empty\n0x3000 8 hex\n",
        );
        let names: Vec<_> =
            [0xfff, 0x1000, 0x101f, 0x1020, 0x1030, 0x2000, 0x3007].map(|a| generated.name(a)).to_vec();
        let main = Some("py::main:/srv/app.py");
        assert_eq!(names, [None, main, main, Some("Lazy Function"), None, None, Some("hex")]);
        // Collected, and something else in its place.
        generated.add_map("1010 20 later");
        assert_eq!([0x1000, 0x1018, 0x1028].map(|a| generated.name(a)), [None, Some("later"), Some("later")]);
    }

    fn load(index: u64, begin: u64, bytes: u64, name: &str) -> Vec<u8> {
        let mut record = vec![0; 24];
        for field in [begin, begin, bytes, index] {
            record.extend(field.to_le_bytes());
        }
        record.extend(name.as_bytes());
        record.push(0);
        record.resize(record.len() + bytes as usize, 0x90);
        let length = record.len() as u32;
        record[4..8].copy_from_slice(&length.to_le_bytes());
        record
    }

    fn dump(records: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 40];
        bytes[..4].copy_from_slice(&0x4a69_5444_u32.to_le_bytes());
        bytes[8..12].copy_from_slice(&40u32.to_le_bytes());
        records.iter().for_each(|record| bytes.extend(record));
        bytes
    }

    #[test]
    fn a_jitdump_names_addresses() {
        let mut moved = vec![0; 64];
        moved[0] = 1;
        moved[4] = 64;
        for (at, field) in [(40, 0x9000u64), (48, 16), (56, 7)] {
            moved[at..at + 8].copy_from_slice(&field.to_le_bytes());
        }
        let mut bytes = dump(&[load(7, 0x5000, 16, "hot"), load(8, 0x6000, 32, "cold"), moved]);
        // Torn while it was written.
        bytes.extend(&load(9, 0x7000, 16, "late")[..30]);
        let mut generated = Generated::default();
        generated.add_dump(&bytes);
        let names = [0x5008, 0x601f, 0x6020, 0x9001, 0x7001].map(|address| generated.name(address));
        assert_eq!(names, [Some("hot"), Some("cold"), None, Some("hot"), None]);
        generated.add_dump(b"something else");
    }

    proptest! {
        #[test]
        fn any_file_is_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300), tail in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut generated = Generated::default();
            generated.add_map(&String::from_utf8_lossy(&bytes));
            generated.add_dump(&bytes);
            generated.add_dump(&dump(&[tail]));
            let mut last = 0;
            for (begin, (end, _)) in &generated.functions {
                prop_assert!(last <= *begin && begin < end);
                last = *end;
            }
        }
    }
}

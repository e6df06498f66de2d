use std::{collections::BTreeMap, io};

use proptest::prelude::*;

use super::*;

/// Memory that holds words at addresses.
#[derive(Default)]
struct Words(BTreeMap<u64, u8>);

impl Words {
    fn put(&mut self, address: u64, bytes: &[u8]) {
        self.0.extend((address..).zip(bytes.iter().copied()));
    }

    fn word(&mut self, address: u64, word: u64) {
        self.put(address, &word.to_ne_bytes());
    }
}

impl Memory for Words {
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
        for (at, byte) in (address..).zip(to) {
            *byte = *self.0.get(&at).ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(())
    }
}

fn offsets() -> Offsets {
    let versions = Versions::builtin();
    let version = versions.find(3, 11).unwrap();
    version.offsets(version.offsets.unwrap())
}

/// A `str` of CPython 3.11: state is kind << 2 | compact << 5 | ascii << 6.
fn put_string(memory: &mut Words, address: u64, text: &str) {
    memory.word(address + 16, text.chars().count() as u64);
    if text.is_ascii() {
        memory.put(address + 32, &(1u32 << 2 | 1 << 5 | 1 << 6).to_ne_bytes());
        memory.put(address + 48, text.as_bytes());
    } else {
        memory.put(address + 32, &(4u32 << 2 | 1 << 5).to_ne_bytes());
        let wide: Vec<u8> = text.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect();
        memory.put(address + 72, &wide);
    }
}

fn put_code(memory: &mut Words, address: u64, name: &str, lines: &[u8]) {
    memory.put(address + 72, &7u32.to_ne_bytes());
    for (offset, at) in [(112, 0x10_000), (128, 0x20_000), (136, 0x30_000)] {
        memory.word(address + offset, at);
    }
    put_string(memory, 0x10_000, "/srv/app.py");
    put_string(memory, 0x20_000, name);
    memory.word(0x30_000 + 16, lines.len() as u64);
    memory.put(0x30_000 + 32, lines);
}

#[test]
fn all_versions_are_there() {
    let versions = Versions::builtin();
    assert_eq!(versions.names(), "3.11, 3.12, 3.13");
    assert!(versions.find(3, 10).is_none() && versions.find(3, 14).is_none());
    for minor in 11..=13 {
        let version = versions.find(3, minor).unwrap();
        assert!(version.offsets.is_some() != version.described.is_some(), "3.{minor}");
    }
}

#[test]
fn code_objects_have_names_files_and_lines() {
    let mut memory = Words::default();
    // Two instructions of the first line, one of the next.
    put_code(&mut memory, 0x1000, "Größe.berechne", &[0x80 | 10 << 3 | 1, 0, 0, 0x80 | 11 << 3, 0, 0]);
    let code = Code::read(&memory, &offsets(), 0x1000, 7).unwrap();
    assert_eq!((code.name.as_str(), code.file.as_str()), ("Größe.berechne", "/srv/app.py"));
    let lines: Vec<u32> = [184, 186, 188, 190].map(|at| code.line(at)).to_vec();
    // Behind its end, the first line stands for the function.
    assert_eq!(lines, [7, 7, 8, 7]);
    // Another function has taken its place.
    assert!(Code::read(&memory, &offsets(), 0x1000, 9).is_err());
    assert!(Code::read(&memory, &offsets(), 0x5000, 7).is_err());
}

/// `def f(): …` of three lines, as CPython 3.11 compiles it; the lines are what `co_lines()` says.
#[test]
fn lines_are_those_that_cpython_says() {
    // RESUME (line 1), then a long form that goes on to line 3 and a form without columns that goes back to line 2.
    let table = [0x80 | 10 << 3, 0, 0, 0x80 | 14 << 3 | 1, 4, 0, 1, 5, 0x80 | 13 << 3, 3, 0x80 | 15 << 3];
    let lines: Vec<_> = (0..6).map(|instruction| line(&table, 1, instruction)).collect();
    assert_eq!(lines, [Some(1), Some(3), Some(3), Some(2), None, None]);
}

proptest! {
    #[test]
    fn any_line_table_is_no_harm(table in prop::collection::vec(any::<u8>(), 0..200), first: u32, at: u32) {
        let _line = line(&table, first, at % 4096);
    }

    #[test]
    fn any_memory_is_no_harm(words in prop::collection::vec(any::<u64>(), 0..40), address in 0u64..256) {
        let mut memory = Words::default();
        words.iter().enumerate().for_each(|(index, word)| memory.word(8 * index as u64, word % 320));
        let _error = Code::read(&memory, &offsets(), address, 7);
    }
}

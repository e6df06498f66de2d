//! The probe site can be found in a linked file, also after `strip`.
#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use object::{Object, ObjectSection};

/// What the one `tracer:mark` note of a file says, after checking that its address holds the nop.
fn note(path: &Path) -> String {
    let data = std::fs::read(path).unwrap();
    let file = object::File::parse(&*data).unwrap();
    let note = file.section_by_name(".note.stapsdt").expect("no .note.stapsdt").data().unwrap();
    let base_section = file.section_by_name(".stapsdt.base").expect("no .stapsdt.base");
    let base = base_section.address();
    let word = |at: usize| u64::from_le_bytes(note[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_le_bytes(note[at..at + 4].try_into().unwrap());
    let (name_bytes, descriptor_bytes, kind) = (half(0), half(4) as usize, half(8));
    assert_eq!((name_bytes, kind, &note[12..20]), (8, 3, &b"stapsdt\0"[..]));
    assert_eq!(note.len(), (20 + descriptor_bytes).next_multiple_of(4), "more than one note");
    let (site, note_base, semaphore) = (word(20), word(28), word(36));
    assert_eq!((note_base, semaphore), (base, 0));
    let text = file.sections().find(|s| (s.address()..s.address() + s.size()).contains(&site)).unwrap();
    let offset = (site - text.address()) as usize;
    // As perf finds it in the file.
    let in_file = site.wrapping_sub(base).wrapping_add(base_section.file_range().unwrap().0);
    assert_eq!(in_file, text.file_range().unwrap().0 + offset as u64);
    assert_eq!(text.data().unwrap()[offset..offset + 6], [0x0f, 0x1f, 0x44, 0, 0, 0xc3]);
    String::from_utf8(note[44..20 + descriptor_bytes].to_vec()).unwrap()
}

#[test]
fn site_is_found_with_and_without_symbols() {
    // This test is itself a program that uses marks: position-independent, linked with --gc-sections.
    tracer_marks::token(1, 0, 0);
    let exe = std::env::current_exe().unwrap();
    let expected = "tracer\0mark\08@%rdi 8@%rsi 8@%rdx 8@%rcx\0";
    assert_eq!(note(&exe), expected);
    let dir = tempfile::tempdir().unwrap();
    let stripped = dir.path().join("stripped");
    let status = Command::new("strip").arg("-s").arg("-o").args([&stripped, &exe]).status().unwrap();
    assert!(status.success());
    assert_eq!(note(&stripped), expected);
}

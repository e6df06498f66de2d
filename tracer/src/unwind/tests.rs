use std::{fs, process::Command};

use gimli::{BaseAddresses, EhFrame, LittleEndian, UnwindContext, UnwindSection as _};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use proptest::prelude::*;
use tracer_abi::unwind::{Rule, cfa, rbp};

use super::{rules::of, *};

/// Rows of each page are sorted and begin where the page does; every rule is there.
fn check(table: &Table) {
    for page in table.pages.iter().filter(|page| page.rows > 0) {
        let rows = &table.rows[page.first as usize..][..page.rows as usize];
        assert_eq!(rows[0] >> 16, 0, "a page begins with what holds there");
        assert!(rows.windows(2).all(|pair| pair[0] >> 16 < pair[1] >> 16), "{rows:x?}");
        assert!(rows.len() <= 1 << 16);
    }
    assert!(table.rows.iter().all(|row| ((row & 0xffff) as usize) < table.rules.len()));
}

/// A library of a few functions, with frames of all kinds; `None` where there is no compiler.
fn library() -> Option<Vec<u8>> {
    const SOURCE: &str = r#"
#include <alloca.h>
#include <csetjmp>
#include <cstring>
extern "C" void other(void *);
extern "C" int plain(int n) { char big[3000]; memset(big, n, sizeof big); other(big); return big[n & 1023]; }
extern "C" int dynamic(int n) { void *p = alloca(n); other(p); return n; }
extern "C" int caught(int n) { try { other(&n); } catch (int) { return 1; } return n; }
extern "C" int aligned(int n) { alignas(64) char b[64]; other(b); void *p = alloca(n); other(p); return b[n & 63]; }
"#;
    let folder = tempfile::tempdir().ok()?;
    let (source, library) = (folder.path().join("a.cc"), folder.path().join("a.so"));
    fs::write(&source, SOURCE).ok()?;
    let mut compiler = Command::new("g++");
    compiler.args(["-O2", "-fomit-frame-pointer", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    match compiler.status() {
        Ok(status) if status.success() => fs::read(library).ok(),
        _ => {
            println!("SKIP: no C++ compiler");
            None
        }
    }
}

/// Every address of every function of this very program has the rule that gimli finds for it.
#[test]
fn every_rule_is_the_one_that_the_file_says() {
    let bytes = fs::read(std::env::current_exe().unwrap()).unwrap();
    let image = Image::parse(&bytes).unwrap();
    let table = image.table().unwrap();
    check(&table);
    assert_eq!((table.notes.refused, table.notes.torn), (0, false), "{:?}", table.notes);
    assert!(table.notes.functions > 1000, "{:?}", table.notes);

    let file = object::File::parse(&*bytes).unwrap();
    let section = file.section_by_name(".eh_frame").unwrap();
    let data = section.data().unwrap();
    let eh_frame = EhFrame::new(data, LittleEndian);
    let bases = BaseAddresses::default()
        .set_eh_frame(section.address())
        .set_text(file.section_by_name(".text").unwrap().address());
    let mut context = UnwindContext::new();
    let mut entries = eh_frame.entries(&bases);
    let mut seen = 0;
    while let Some(entry) = entries.next().unwrap() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(|section, bases, offset| section.cie_from_offset(bases, offset)).unwrap();
        if fde.len() == 0 || fde.initial_address() == 0 || fde.is_signal_trampoline() {
            continue;
        }
        let encoding = fde.cie().encoding();
        let mut rows = fde.rows(&eh_frame, &bases, &mut context).unwrap();
        while let Some(row) = rows.next_row().unwrap() {
            let expected = super::rules::rule(row, &eh_frame, encoding);
            let end = row.end_address().min(fde.end_address());
            for address in [row.start_address(), row.start_address().midpoint(end), end - 1] {
                let found = table
                    .rule(address)
                    .map(|rule| Rule { rbp: rule.rbp & !rbp::LEAVES_FOR_HANDLER, ..*rule });
                assert_eq!(found, Some(expected), "{address:#x}");
            }
            seen += 1;
        }
    }
    assert!(seen > 10_000, "{seen} rows");
}

#[test]
fn all_kinds_of_frames_have_rules() {
    let Some(bytes) = library() else { return };
    let image = Image::parse(&bytes).unwrap();
    let table = image.table().unwrap();
    check(&table);
    assert_eq!(table.notes.unsupported, 0, "{:?}", table.notes);
    for kind in [cfa::RSP, cfa::RBP, cfa::PLT] {
        assert!(table.rules.iter().any(|rule| rule.cfa == kind), "kind {kind}: {:?}", table.rules);
    }
    // A realigned stack: by another register at first, then through memory.
    let realigned = [cfa::REGISTER, cfa::AT_RBP, cfa::AT_RSP];
    assert!(table.rules.iter().any(|rule| realigned.contains(&rule.cfa)), "{:?}", table.rules);
    assert!(!table.rules.iter().any(|rule| rule.rbp == rbp::LOST));
    // Outside of all functions nothing holds.
    assert_eq!(table.rule(0).map_or(cfa::NONE, |rule| rule.cfa), cfa::NONE);
    assert_eq!(table.rule(table.end() - 1).map_or(cfa::NONE, |rule| rule.cfa), cfa::NONE);
}

#[test]
fn a_file_without_section_headers_has_the_same_table() {
    let Some(bytes) = library() else { return };
    let whole = Image::parse(&bytes).unwrap().table().unwrap();
    // e_shoff, and e_shnum with e_shstrndx.
    let mut stripped = bytes;
    stripped[0x28..0x30].fill(0);
    stripped[0x3c..0x40].fill(0);
    assert_eq!(Image::parse(&stripped).unwrap().table().unwrap().rows, whole.rows);
}

#[test]
fn what_has_no_table_says_why() {
    assert!(matches!(Image::parse(b"no library"), Err(ImageError::NotElf(_))));
    let Some(bytes) = library_once() else { return };
    let mut without = bytes.clone();
    without[0x28..0x30].fill(0);
    without[0x3c..0x40].fill(0);
    // Program headers, 56 bytes each, begin behind the file's own: the one of the loader's index becomes none.
    let index = (64..).step_by(56).find(|at| without[*at..][..4] == 0x6474_e550_u32.to_le_bytes()).unwrap();
    without[index..][..4].fill(0);
    assert!(matches!(Image::parse(&without), Err(ImageError::NoTables)));
    let mut foreign = bytes.clone();
    foreign[0x12] = 183;
    assert!(matches!(Image::parse(&foreign), Err(ImageError::Machine(_))));
}

#[test]
fn only_executable_segments_count() {
    let Some(bytes) = library() else { return };
    let image = Image::parse(&bytes).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let text = file.section_by_name(".text").unwrap();
    let (offset, _) = text.file_range().unwrap();
    let begin = 0x7f00_0000_0000 + offset;
    let bias = image.segments.bias(begin & !0xfff, offset & !0xfff).unwrap();
    assert_eq!(begin - bias, text.address());
    assert_eq!(image.segments.bias(begin, 0), None, "headers and read-only data are no code");
}

#[test]
fn the_kernels_trampoline_is_known_by_its_code() {
    let mut code = vec![
        0x51, 0x41, 0x53, 0x50, 0x48, 0xc7, 0xc0, 0x50, 1, 0, 0, 0x0f, 0x05, 0x58, 0x41, 0x5b, 0x59, 0xc3,
    ];
    code.resize(4096, 0xcc);
    let table = uprobe_trampoline(&code).unwrap();
    check(&table);
    let offset = |at| table.rule(at).map(|rule| (rule.cfa, rule.cfa_offset));
    let expected = [(0, 8), (1, 16), (3, 24), (4, 32), (11, 32), (13, 32), (14, 24), (16, 16), (17, 8)];
    for (at, wanted) in expected {
        assert_eq!(offset(at), Some((cfa::RSP, wanted)), "at {at}");
    }
    assert_eq!(offset(18), Some((cfa::NONE, 0)));
    code[3] = 0x90;
    assert_eq!(uprobe_trampoline(&code), None);
}

/// As versions of CPython lay them out: one behind another, or from multiples of 16 on; some check indirect branches.
#[test]
fn pythons_trampolines_are_known_by_their_code() {
    let plain: &[u8] = &[0x48, 0x83, 0xec, 0x08, 0xff, 0xd1, 0x48, 0x83, 0xc4, 0x08, 0xc3];
    let checked = [&[0xf3, 0x0f, 0x1e, 0xfa], plain].concat();
    let framed: &[u8] = &[0x55, 0x48, 0x89, 0xe5, 0xff, 0xd1, 0x5d, 0xc3];
    // Where the call returns to, and what is known there.
    let (no_rbp, rbp_above) = ((rbp::SAME, 0), (rbp::AT_CFA, -16));
    for (code, returns_to, expected) in [(plain, 6, no_rbp), (&checked, 10, no_rbp), (framed, 6, rbp_above)] {
        for stride in [code.len(), 16] {
            let mut memory = vec![0; 3 << 16];
            let copies = memory.len() / stride;
            for at in (0..copies).map(|copy| copy * stride) {
                memory[at..at + code.len()].copy_from_slice(code);
            }
            let table = python_trampolines(&memory).unwrap();
            check(&table);
            assert_eq!(table.notes.functions, copies as u64);
            for begin in (0..copies).map(|copy| (copy * stride) as u64) {
                let rule = table.rule(begin + returns_to).unwrap();
                let found = (rule.cfa, rule.cfa_offset, (rule.rbp, rule.rbp_offset));
                assert_eq!(found, (cfa::RSP, 16, expected), "copy at {begin}");
                let leaves = table.rule(begin + code.len() as u64 - 1).unwrap();
                assert_eq!((leaves.cfa_offset, leaves.rbp), (8, rbp::SAME));
            }
        }
        assert_eq!(python_trampolines(&code[1..]), None);
    }
}

/// `_Unwind_RaiseException` and its like, in the library that C++ programs throw with.
#[test]
fn functions_that_leave_for_a_handler_are_known() {
    let Ok(bytes) = fs::read("/usr/lib/x86_64-linux-gnu/libgcc_s.so.1") else {
        println!("SKIP: no libgcc_s.so.1");
        return;
    };
    let table = Image::parse(&bytes).unwrap().table().unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    for symbol in file.dynamic_symbols().filter(|symbol| symbol.is_definition() && symbol.size() > 0) {
        let name = symbol.name().unwrap();
        let rules = (symbol.address()..symbol.address() + symbol.size()).filter_map(|at| table.rule(at));
        let leaves = rules.into_iter().any(|rule| rule.rbp & rbp::LEAVES_FOR_HANDLER != 0);
        let expected =
            ["_Unwind_RaiseException", "_Unwind_ForcedUnwind", "_Unwind_Resume", "_Unwind_Resume_or_Rethrow"];
        assert_eq!(leaves, expected.contains(&name), "{name}");
    }
}

#[test]
fn rules_are_exact() {
    let bytes = fs::read(std::env::current_exe().unwrap()).unwrap();
    let table = Image::parse(&bytes).unwrap().table().unwrap();
    let entry = object::File::parse(&*bytes).unwrap().entry();
    // `_start` says itself that nobody has called it.
    assert_eq!(table.rule(entry), Some(&of(cfa::END)));
    assert!(table.rules.contains(&Rule { cfa_offset: 8, ..of(cfa::RSP) }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_give_tables_that_hold_together(
        changes in prop::collection::vec((any::<u32>(), any::<u8>()), 1..40)
    ) {
        let Some(bytes) = library_once() else { return Ok(()) };
        let mut bytes = bytes.clone();
        let section = object::File::parse(&*bytes).unwrap();
        let (offset, length) = section.section_by_name(".eh_frame").unwrap().file_range().unwrap();
        for (at, value) in changes {
            bytes[offset as usize + at as usize % length as usize] = value;
        }
        if let Ok(table) = Image::parse(&bytes).and_then(|image| image.table()) {
            check(&table);
        }
    }

    #[test]
    fn any_bytes_are_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _error = Image::parse(&bytes);
        if let Some(table) = uprobe_trampoline(&bytes).or_else(|| python_trampolines(&bytes)) {
            check(&table);
        }
    }
}

fn library_once() -> Option<&'static Vec<u8>> {
    static BUILT: std::sync::OnceLock<Option<Vec<u8>>> = std::sync::OnceLock::new();
    BUILT.get_or_init(library).as_ref()
}

//! The probe site of marks: in this very program, and in made-up libraries.

mod build;

use build::{Build, inspect};
use engines::{Placement, Reason, Role};

#[test]
fn the_site_in_a_program_that_links_the_marks() {
    // Keeps the site in the program.
    tracer_marks::token(1, 0, 0);
    let program = std::env::current_exe().unwrap();
    let library = inspect(&program).unwrap();
    assert_eq!((library.engine.as_str(), library.points.len()), ("marks", 1));
    let point = &library.points[0];
    assert_eq!((point.role, point.placement, point.return_probe), (Role::Mark, Placement::Nop5, false));
    let data = std::fs::read(&program).unwrap();
    let at = usize::try_from(point.offset).unwrap();
    assert_eq!(data[at..at + 6], [0x0f, 0x1f, 0x44, 0, 0, 0xc3]);
}

/// A library with one note: `base` is what the note says of its base section, `arguments` its argument string.
fn site(base: &str, semaphore: &str, arguments: &str) -> String {
    format!(
        ".text\n.globl first\nfirst: ret\n.balign 16\nsite: nopl 0(%rax,%rax)\nret\n\
         .section .stapsdt.base,\"aG\",\"progbits\",.stapsdt.base,comdat\n_.stapsdt.base: .space 1\n\
         .section .note.stapsdt,\"\",\"note\"\n.balign 4\n.4byte 8, 2f-1f, 3\n.asciz \"stapsdt\"\n\
         1: .8byte site, {base}, {semaphore}\n.asciz \"tracer\"\n.asciz \"mark\"\n.asciz \"{arguments}\"\n2: .balign 4\n"
    )
}

const ARGUMENTS: &str = "8@%rdi 8@%rsi 8@%rdx 8@%rcx";

#[test]
fn a_prelinked_file_has_moved() {
    let build = Build::new();
    let offset = |text: &str, name: &str| {
        let library = inspect(&build.assemble(name, text)).unwrap();
        assert!(library.refusals.is_empty(), "{:?}", library.refusals);
        library.points[0].function_offset
    };
    let plain = offset(&site("_.stapsdt.base", "0", ARGUMENTS), "plain.so");
    assert_eq!(plain % 16, 0);
    // The note was written when everything lay 0x40 lower.
    let moved = site("_.stapsdt.base - 0x40", "0", ARGUMENTS).replace(".8byte site", ".8byte site - 0x40");
    assert_eq!(offset(&moved, "moved.so"), plain);
}

#[test]
fn sites_that_may_not_be_used_are_named() {
    let build = Build::new();
    let reason = |text: &str| inspect(&build.assemble("x.so", text)).unwrap().refusals[0].reason.clone();
    assert!(matches!(reason(&site("0", "0", "8@%rax -4@%esi")), Reason::Arguments { .. }));
    assert!(matches!(reason(&site("0", "1", ARGUMENTS)), Reason::Semaphore(_)));
    let nowhere = site("0", "0", ARGUMENTS).replace(".8byte site", ".8byte 0x7fffffff");
    assert!(matches!(reason(&nowhere), Reason::NotCode(_)));
    // Another probe is no concern.
    let other = site("0", "0", ARGUMENTS).replace("\"mark\"", "\"other\"");
    assert!(inspect(&build.assemble("x.so", &other)).is_none());
}

//! A C program and a C++ program compile against the header, run, and find the same layouts.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Offsets and sizes as the ABI has them, so that a drift of header or ABI does not compile.
const PROGRAM: &str = r#"
#include "tracer_marks.h"
#ifdef __cplusplus
#define CHECK static_assert
#else
#define CHECK _Static_assert
#endif
CHECK(sizeof(struct tracer_slot) == SLOT_BYTES, "slot");
CHECK(offsetof(struct tracer_slot, phase) == SLOT_PHASE, "slot phase");
CHECK(offsetof(struct tracer_request_begin, request_id) == 48, "request begin");
CHECK(offsetof(struct tracer_request_begin, kv_cache_strategy) == 96, "request begin");
CHECK(sizeof(struct tracer_request_begin) == 104, "request begin");

int main(void) {
    struct tracer_request_begin begin = { 7 };
    struct tracer_slot slot = { 7 };
    tracer_mark_request_begin(&begin);
    tracer_mark_request_begin(NULL);
    tracer_mark_batch(1, 0, &slot, 1);
    tracer_mark_batch(1, 0, NULL, 1000);
    tracer_mark_token(7, 0, 0);
    tracer_mark_phase_begin(7, NULL);
    tracer_mark_phase_end(7, "tokenize");
    tracer_mark_attr_number(7, 0, NULL, 0.5);
    tracer_mark_attr_string(7, 0, "adapter", NULL);
    tracer_mark_request_end(7, 1, 99);
    return tracer_mark_listening();
}
"#;

/// The library built with this test: beside it, or one folder up.
fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().skip(1).map(|dir| dir.join("libtracer_marks.so")).find(|path| path.exists()).unwrap()
}

fn compile_and_run(compiler: &str, source: &str, dir: &Path) {
    let program = dir.join(source).with_extension("out");
    std::fs::write(dir.join(source), PROGRAM).unwrap();
    let library = library();
    let status = Command::new(compiler)
        .args(["-Wall", "-Werror", "-Wno-missing-field-initializers"])
        .arg(format!("-DSLOT_BYTES={}", size_of::<marks::Slot>()))
        .arg(format!("-DSLOT_PHASE={}", std::mem::offset_of!(marks::Slot, phase)))
        .arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../include"))
        .arg(dir.join(source))
        .arg(&library)
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(status.success(), "{compiler} failed");
    let status = Command::new(&program).env("LD_LIBRARY_PATH", library.parent().unwrap()).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn header_compiles_links_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    compile_and_run("cc", "program.c", dir.path());
    compile_and_run("c++", "program.cc", dir.path());
}

#[test]
fn library_holds_the_site() {
    use object::{Object, ObjectSection, ObjectSymbol};
    let data = std::fs::read(library()).unwrap();
    let file = object::File::parse(&*data).unwrap();
    let note = file.section_by_name(".note.stapsdt").expect("no .note.stapsdt").data().unwrap();
    assert!(note.windows(12).any(|w| w == b"tracer\0mark\0"));
    let mut exports = file.dynamic_symbols().filter(|s| s.is_definition()).map(|s| s.name().unwrap());
    assert!(exports.all(|name| name.starts_with("tracer_mark_") && name != "tracer_mark_site"));
}

//! Unwind information of files that a process maps.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tracer::unwind::{Image, python_trampolines, uprobe_trampoline};

fuzz_target!(|bytes: &[u8]| {
    let _ = (uprobe_trampoline(bytes), python_trampolines(bytes));
    let Ok(image) = Image::parse(bytes) else { return };
    let _ = image.segments.bias(0x7f00_0000_0000, 0x1000);
    let Ok(table) = image.table() else { return };
    // What the kernel side relies on.
    for page in table.pages.iter().filter(|page| page.rows > 0) {
        let rows = &table.rows[page.first as usize..][..page.rows as usize];
        assert_eq!(rows[0] >> 16, 0);
        assert!(rows.windows(2).all(|pair| pair[0] >> 16 < pair[1] >> 16));
        assert!(rows.iter().all(|row| ((row & 0xffff) as usize) < table.rules.len()));
    }
});

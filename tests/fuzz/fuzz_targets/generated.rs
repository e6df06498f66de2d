//! What programs tell of the code that they generate, and line tables of Python's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tracer::{python, symbol::Generated};

fuzz_target!(|bytes: &[u8]| {
    let mut generated = Generated::default();
    generated.add_map(&String::from_utf8_lossy(bytes));
    generated.add_dump(bytes);
    let _ = generated.name(0x1000);
    let _ = python::line(bytes, 1, 40);
});

//! Records of the kernel's rings, marks of programs included.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tracer::event::{Mark, record::Record};

fuzz_target!(|bytes: &[u8]| {
    let _ = Record::decode(bytes);
    let _ = Mark::decode(bytes);
});

//! A raw table of a capture, torn or worse.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tracer::capture::{Meta, Reader, Writer};

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let capture = folder.path().join("capture");
    Writer::create(&capture, Meta::here(Vec::new(), "fuzz".into())).expect("a capture").close().expect("closing it");
    for table in ["calls", "mark_batch", "stacks"] {
        std::fs::write(capture.join("raw").join(format!("{table}.arrows")), bytes).expect("writing a table");
    }
    let Ok(events) = Reader::open(&capture).and_then(|reader| reader.events()) else { return };
    for event in events {
        if event.is_err() {
            return;
        }
    }
});

//! A user's engine profile.
#![no_main]

use engines::Profiles;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("writing it");
    let _ = Profiles::builtin().load(file.path());
});

//! Files that a process maps: ELF, type information, USDT notes.
#![no_main]

use std::path::Path;

use engines::Profiles;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let profiles = Profiles::builtin();
    for name in ["/lib/libnvinfer.so.10", "/lib/libcuda.so.1", "/bin/server"] {
        let _ = profiles.examine(Path::new(name), bytes);
    }
});

//! Files that a process maps: ELF, type information, USDT notes.
#![no_main]

use std::{path::Path, sync::LazyLock};

use engines::Profiles;
use libfuzzer_sys::fuzz_target;

/// Parsed once: what is fuzzed is what is done with them.
static PROFILES: LazyLock<Profiles> = LazyLock::new(Profiles::builtin);

fuzz_target!(|bytes: &[u8]| {
    for name in ["/lib/libnvinfer.so.10", "/lib/libcuda.so.1", "/bin/server"] {
        let _ = PROFILES.examine(Path::new(name), bytes);
    }
});

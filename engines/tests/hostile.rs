//! Files that are not what they seem: whatever the bytes, an answer and no panic.
#![expect(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod build;

use std::{path::Path, sync::LazyLock};

use build::Build;
use engines::Profiles;
use proptest::prelude::*;

static PROFILES: LazyLock<Profiles> = LazyLock::new(Profiles::builtin);

/// Libraries to damage: (name, bytes).
static FILES: LazyLock<Vec<(&str, Vec<u8>)>> = LazyLock::new(|| {
    let build = Build::new();
    let read = |flags: &[&str]| std::fs::read(build.nvinfer(flags)).unwrap();
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    vec![
        ("libnvinfer.so.10", read(&["-O2"])),
        ("libnvinfer.so.10", read(&["-O0", "-Wl,-z,pack-relative-relocs", "-Wl,--no-eh-frame-hdr"])),
        ("libnvinfer.so.10", for_aarch64(read(&["-O2"]))),
        ("libcuda.so.1", read(&["-O2", "-Wl,--hash-style=sysv"])),
        // The start of a larger file, its notes lost.
        ("ld-linux-x86-64.so.2", program[..program.len().min(1 << 16)].to_vec()),
    ]
});

/// The file, as if it were for AArch64.
fn for_aarch64(mut data: Vec<u8>) -> Vec<u8> {
    data[18] = 183;
    data
}

/// Offsets that matter more than others: the headers and the dynamic section come first or last.
fn place(length: usize) -> impl Strategy<Value = usize> {
    prop_oneof![0..length.min(0x400), length.saturating_sub(0x1800)..length, 0..length]
}

fn damage() -> impl Strategy<Value = (&'static str, Vec<u8>)> {
    (0..FILES.len()).prop_flat_map(|index| {
        let (name, data) = &FILES[index];
        let value = prop_oneof![Just(0u64), Just(u64::MAX), Just(1 << 63), Just(0x1000), any::<u64>()];
        let edit = (place(data.len()), value, 1..=8usize);
        proptest::collection::vec(edit, 1..8).prop_map(move |edits| {
            let mut data = data.clone();
            for (at, value, bytes) in edits {
                let end = (at + bytes).min(data.len());
                data[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            (*name, data)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn damaged_libraries((name, data) in damage()) {
        let library = PROFILES.examine(Path::new(name), &data);
        for point in library.iter().flat_map(|library| &library.points) {
            prop_assert!(point.offset < data.len() as u64);
        }
    }

    #[test]
    fn any_bytes(data in proptest::collection::vec(any::<u8>(), 0..4096), header: bool) {
        let mut data = data;
        if header {
            let start = &FILES[0].1[..data.len().min(64)];
            data[..start.len()].copy_from_slice(start);
        }
        for name in ["libnvinfer.so", "libcuda.so.1", "other", ""] {
            let _ = PROFILES.examine(Path::new(name), &data);
        }
    }
}

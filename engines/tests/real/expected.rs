//! What is to be found in each library, by evidence of other kinds than the resolver's own.

/// One library.
pub(crate) struct Expected {
    /// Its folder in the cache.
    pub(crate) folder: &'static str,
    pub(crate) file: &'static str,
    pub(crate) engine: &'static str,
    pub(crate) machine: &'static str,
    pub(crate) version: Option<&'static str>,
    pub(crate) what: What,
    pub(crate) sites: &'static [Site],
    /// Points that the profile names and that this library does not have.
    pub(crate) missing: &'static [&'static str],
}

pub(crate) enum What {
    /// This many points.
    Points(usize),
    /// No point, for a reason with this text.
    Refused(&'static str),
}

/// One point.
pub(crate) struct Site {
    pub(crate) name: &'static str,
    /// File offset of the function.
    pub(crate) function: u64,
    /// Bytes from there to the probe.
    pub(crate) delta: u64,
    pub(crate) class: &'static str,
    /// The code at the probe.
    pub(crate) bytes: &'static [u8],
}

/// `enqueueV3`. The offsets are where objdump shows a function that loads the address of the string `enqueueV3` before
/// it calls anything (on x86-64 at +0xb in 8.5, +0x27 in 8.6, +0x2c later), and that the vtable of
/// `Wrapper<IExecutionContext, rt::ExecutionContext>` has in the slot of the public headers, between those that name
/// `getTemporaryStorageAllocator` and `setPersistentCacheLimit`, by the relocations that readelf prints. The library for
/// AArch64 has its symbol table: nm names the function.
const fn enqueue(function: u64, class: &'static str, bytes: &'static [u8]) -> Site {
    Site { name: "enqueueV3", function, delta: 0, class, bytes }
}

const fn library(
    folder: &'static str,
    file: &'static str,
    engine: &'static str,
    version: &'static str,
    sites: &'static [Site],
) -> Expected {
    let what = What::Points(1);
    Expected { folder, file, engine, machine: "x86_64", version: Some(version), what, sites, missing: &[] }
}

/// push %r15
const PUSH_R15: &[u8] = &[0x41, 0x57];
/// push %rbp
const PUSH_RBP: &[u8] = &[0x55];
const LEAN_10: &str = "libnvinfer_lean.so.10";
const LEAN_11: &str = "libnvinfer_lean.so.11";
const RTX: &str = "libtensorrt_rtx.so.1";

pub(crate) const LIBRARIES: &[Expected] = &[
    library(
        "full-8.5.1",
        "libnvinfer.so.8",
        "tensorrt",
        "8.5.1.7",
        &[enqueue(0x181_bce0, "emulated", PUSH_R15)],
    ),
    library(
        "full-8.5.3",
        "libnvinfer.so.8",
        "tensorrt",
        "8.5.3.1",
        &[enqueue(0x181_f3d0, "emulated", PUSH_R15)],
    ),
    library(
        "full-8.6.0",
        "libnvinfer.so.8",
        "tensorrt",
        "8.6.0.12",
        &[enqueue(0x144_f270, "emulated", PUSH_R15)],
    ),
    library("lean-10.15", LEAN_10, "tensorrt", "10.15.1.29", &[enqueue(0x63_cc10, "emulated", PUSH_RBP)]),
    library("lean-10.16", LEAN_10, "tensorrt", "10.16.1.11", &[enqueue(0x5c_ac50, "emulated", PUSH_RBP)]),
    library("lean-11.0", LEAN_11, "tensorrt", "11.0.0.114", &[enqueue(0x5c_a960, "emulated", PUSH_RBP)]),
    library("lean-11.4", LEAN_11, "tensorrt", "11.4.0.106", &[enqueue(0x59_d1c0, "emulated", PUSH_RBP)]),
    Expected {
        machine: "aarch64",
        // stp x29, x30, [sp, #-96]!
        ..library(
            "lean-11.4-aarch64",
            LEAN_11,
            "tensorrt",
            "11.4.0.106",
            &[enqueue(0x207_0cf0, "stepped", &[0xfd, 0x7b, 0xba, 0xa9])],
        )
    },
    library("rtx-1.4", RTX, "tensorrt_rtx", "1.4.0.76", &[enqueue(0x10f_4dc0, "emulated", PUSH_RBP)]),
    library("rtx-1.5", RTX, "tensorrt_rtx", "1.5.0.114", &[enqueue(0x114_f4b0, "emulated", PUSH_RBP)]),
    library("rtx-1.6", RTX, "tensorrt_rtx", "1.6.1.120", &[enqueue(0x100_53d0, "emulated", PUSH_RBP)]),
    library("rtx-1.7", RTX, "tensorrt_rtx", "1.7.1.116", &[enqueue(0xf6_0ab0, "emulated", PUSH_RBP)]),
];

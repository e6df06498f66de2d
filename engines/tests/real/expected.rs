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
    forwarder("dispatch-10.15", "libnvinfer_dispatch.so.10", "10.15.1.29"),
    forwarder("dispatch-11.4", "libnvinfer_dispatch.so.11", "11.4.0.106"),
    driver(
        "driver-535",
        "libcuda.so.535.261.03",
        "535.261.03",
        59,
        &[
            cheap("cuCtxSynchronize", 0x2c_a2b0),
            cheap("cuGraphLaunch", 0x32_fd60),
            cheap("cuGraphLaunch_ptsz", 0x30_2df0),
            cheap("cuStreamSynchronize", 0x32_f800),
            cheap("cuEventQuery", 0x2e_c640),
            cheap("cuMemcpyDtoH_v2_ptds", 0x2d_5920),
        ],
    ),
    driver(
        "driver-550",
        "libcuda.so.550.163.01",
        "550.163.01",
        // With cuStreamBeginCaptureToGraph.
        61,
        &[
            cheap("cuCtxSynchronize", 0x28_6ac0),
            cheap("cuGraphLaunch", 0x2f_8340),
            cheap("cuGraphLaunch_ptsz", 0x2b_fd40),
            cheap("cuStreamSynchronize", 0x2e_cc90),
            cheap("cuEventQuery", 0x2a_9000),
            cheap("cuMemcpyDtoH_v2_ptds", 0x29_2770),
        ],
    ),
    runtime(
        "cudart-12.1",
        "libcudart.so.12",
        &[function("cudaGraphLaunch", 0x6_d740, "emulated", &[0x41, 0x55])],
    ),
    runtime("cudart-12.9", "libcudart.so.12", &[function("cudaGraphLaunch", 0x7_ef90, "emulated", PUSH_RBP)]),
    runtime("cudart-13.5", "libcudart.so.13", &[function("cudaGraphLaunch", 0x8_80e0, "emulated", PUSH_RBP)]),
    binding("full-8.5.1", "tensorrt.so", &[function(EXECUTE, 0x4_4990, "stepped", LOAD_INNER)]),
    binding("full-8.5.3", "tensorrt.so", &[function(EXECUTE, 0x4_49c0, "stepped", LOAD_INNER)]),
    binding("full-8.6.0", "tensorrt.so", &[function(EXECUTE, 0x4_5ac0, "stepped", LOAD_INNER)]),
    binding("bindings-11.4", "tensorrt_lean.so", &[function(EXECUTE, 0x7_3d20, "stepped", LOAD_INNER)]),
    Expected {
        version: None,
        what: What::Points(6),
        // endbr64; push %r12
        ..library(
            "llama",
            "libllama.v0.4.0.so",
            "llama",
            "",
            &[Site { delta: 4, ..function("llama_decode", 0x10_a190, "emulated", &[0x41, 0x54]) }],
        )
    },
    Expected {
        version: None,
        what: What::Refused("only OrtGetApiBase"),
        ..library("onnxruntime", "libonnxruntime.so.1.32.0", "onnxruntime", "", &[])
    },
];

/// A function where nm has it.
const fn function(name: &'static str, function: u64, class: &'static str, bytes: &'static [u8]) -> Site {
    Site { name, function, delta: 0, class, bytes }
}

/// A function of the driver where nm has it. objdump shows `cmpl $imm,x(%rip); je .+12` there: 10 bytes, and the branch.
const fn cheap(name: &'static str, function: u64) -> Site {
    Site { name, function, delta: 10, class: "emulated", bytes: &[0x74, 0x0c] }
}

const fn driver(
    folder: &'static str,
    file: &'static str,
    version: &'static str,
    points: usize,
    sites: &'static [Site],
) -> Expected {
    // The names of the profile, twins included, that nm finds. The missing one came with driver 570.
    let (what, missing) = (What::Points(points), &["cuMemcpyBatchAsync"] as &[&str]);
    Expected { what, missing, ..library(folder, file, "cuda", version, sites) }
}

const fn runtime(folder: &'static str, file: &'static str, sites: &'static [Site]) -> Expected {
    Expected { version: None, what: What::Points(25), ..library(folder, file, "cudart", "", sites) }
}

const fn forwarder(folder: &'static str, file: &'static str, version: &'static str) -> Expected {
    let what = What::Refused("only passes `enqueueV3` on: the library that implements it");
    Expected { what, ..library(folder, file, "tensorrt", version, &[]) }
}

/// The bindings are not stripped: nm names the function.
const EXECUTE: &str = "_ZN8tensorrt7lambdas16execute_async_v3ERN8nvinfer117IExecutionContextEm";
/// mov 8(%rdi),%rdi: the argument changes in the first instruction, so that no other place will do.
const LOAD_INNER: &[u8] = &[0x48, 0x8b, 0x7f, 0x08];

const fn binding(folder: &'static str, file: &'static str, sites: &'static [Site]) -> Expected {
    Expected { version: None, ..library(folder, file, "tensorrt_python", "", sites) }
}

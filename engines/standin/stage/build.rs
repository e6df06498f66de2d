//! Compiles the C++ stand-in for libnvinfer in all its variants; the crate embeds them.

use std::env;
use std::path::Path;
use std::process::Command;

/// Name of the file, and what distinguishes the variant.
const VARIANTS: [(&str, &[&str]); 5] = [
    ("trt8", &["-DTRT=8"]),
    ("trt10", &["-DTRT=10"]),
    ("trt11", &["-DTRT=11"]),
    ("no_rtti", &["-DTRT=10", "-fno-rtti"]),
    ("two_impl", &["-DTRT=10", "-DTWO_IMPL"]),
];

fn main() {
    let source = Path::new("../nvinfer");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", source.display());
    println!("cargo:rerun-if-env-changed=CXX");
    let out = env::var_os("OUT_DIR").unwrap_or_default();
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    for (name, flags) in VARIANTS {
        let library = Path::new(&out).join(name);
        let soname = format!("-Wl,-soname,libnvinfer.so.{}", name.strip_prefix("trt").unwrap_or("10"));
        // Stripped and with hidden symbols, as NVIDIA's; with frame pointers, so that sampled stacks reach the caller.
        let status = Command::new(&compiler)
            .args(["-shared", "-fPIC", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Wl,-s"])
            .arg("-fno-omit-frame-pointer")
            .args(["-fvisibility=hidden", "-fvisibility-inlines-hidden", &soname])
            .args(flags)
            .arg(source.join("nvinfer.cpp"))
            .arg("-o")
            .arg(&library)
            .arg("-ldl")
            .status();
        if !status.is_ok_and(|status| status.success()) {
            // Everything else can be built and used without it: an empty file stands for a missing one.
            println!(
                "cargo:warning=no stand-in libnvinfer: the C++ compiler {compiler:?} is missing or failed"
            );
            if let Err(error) = std::fs::write(&library, b"") {
                println!("cargo::error=cannot write {}: {error}", library.display());
            }
        }
    }
}

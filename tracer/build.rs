//! Builds the kernel-side program and puts its path into the environment of the crate.
//!
//! `TRACER_EBPF=auto` (default): build it where the toolchain is found, else embed an empty object whose loading is a
//! typed error that names what was missing. `require`: fail the build instead. `stub`: never build it.

#[path = "build/toolchain.rs"]
mod toolchain;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, exit},
};

use toolchain::{Compiler, Toolchain};

fn main() {
    println!("cargo::rerun-if-env-changed=TRACER_EBPF");
    println!("cargo::rerun-if-env-changed=PATH");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/toolchain.rs");
    let manifest = PathBuf::from(var("CARGO_MANIFEST_DIR"));
    let kernel_crate = manifest.join("../tracer-ebpf");
    println!("cargo::rerun-if-changed={}", kernel_crate.join("src").display());
    println!("cargo::rerun-if-changed={}", kernel_crate.join("Cargo.toml").display());

    let mode = env::var("TRACER_EBPF").unwrap_or_else(|_| "auto".into());
    let found = match mode.as_str() {
        "stub" => Err("built with TRACER_EBPF=stub".to_owned()),
        "auto" | "require" => {
            toolchain::find().map_err(|missing| format!("{} is missing; {}", missing.what, missing.bring))
        }
        other => fail(&format!("TRACER_EBPF={other}: expected auto, require or stub")),
    };
    match found {
        Ok(toolchain) => {
            let object = build(&kernel_crate, &toolchain);
            embed(&object, &format!("built by {}", toolchain.version), "");
        }
        Err(why) if mode == "require" => fail(&format!("TRACER_EBPF=require: {why}")),
        Err(why) => {
            let object = PathBuf::from(var("OUT_DIR")).join("stub.o");
            if let Err(error) = fs::write(&object, b"") {
                fail(&format!("writing {}: {error}", object.display()));
            }
            embed(&object, "none", &why);
        }
    }
}

fn embed(object: &Path, description: &str, missing: &str) {
    println!("cargo::rustc-env=TRACER_EBPF_OBJECT={}", object.display());
    println!("cargo::rustc-env=TRACER_EBPF_DESCRIPTION={description}");
    println!("cargo::rustc-env=TRACER_EBPF_MISSING={missing}");
}

fn build(kernel_crate: &Path, toolchain: &Toolchain) -> PathBuf {
    let mut command = match &toolchain.compiler {
        Compiler::System { cargo, rustc } => {
            let mut command = Command::new(cargo);
            command.env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1");
            command
        }
        Compiler::Nightly => {
            let mut command = Command::new("rustup");
            command.args(["run", "nightly", "cargo"]).env_remove("RUSTC");
            command
        }
    };
    // Variables of the outer cargo (clippy's wrapper, flags for the host) must not reach the inner one.
    for variable in
        ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_ENCODED_RUSTFLAGS", "RUSTUP_TOOLCHAIN"]
    {
        command.env_remove(variable);
    }
    let linker_folder = toolchain.linker.parent().map(Path::to_path_buf);
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(env::split_paths(&path).chain(linker_folder))
        .unwrap_or_else(|error| fail(&format!("PATH: {error}")));
    let target_dir = target_dir().join("bpf");
    let arch = var("CARGO_CFG_TARGET_ARCH");
    let status = command
        .env("PATH", path)
        .env("RUSTFLAGS", format!("--cfg bpf_target_arch=\"{arch}\" -C debuginfo=2 -C link-arg=--btf"))
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "--target",
            "bpfel-unknown-none",
            "-Z",
            "build-std=core",
        ])
        .args(["--bin", "tracer-probes", "--manifest-path"])
        .arg(kernel_crate.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target_dir)
        .status();
    match status {
        Ok(status) if status.success() => target_dir.join("bpfel-unknown-none/release/tracer-probes"),
        Ok(status) => fail(&format!("building the kernel-side program with {}: {status}", toolchain.version)),
        Err(error) => fail(&format!("running cargo for the kernel-side program: {error}")),
    }
}

/// The workspace's target folder: OUT_DIR is `<target>/<profile>/build/<package>/out`.
fn target_dir() -> PathBuf {
    let out = PathBuf::from(var("OUT_DIR"));
    out.ancestors().nth(4).map_or_else(|| out.clone(), Path::to_path_buf)
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set: run this through cargo")))
}

fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    exit(1)
}

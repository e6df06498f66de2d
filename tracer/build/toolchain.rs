//! Finds what builds the kernel-side program. Shared by `tracer/build.rs` and `cargo xtask setup`; std only.
//!
//! Two kinds of machine are supported: Debian's packages (`rustc-web`, `cargo-web`, `rust-web-src`: a rustc in
//! /usr/bin with the sources of `core`), and rustup with a nightly that has the `rust-src` component. Both need
//! `bpf-linker`.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// A compiler for the bpf target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// rustc and cargo of the system, used with RUSTC_BOOTSTRAP=1.
    System { cargo: PathBuf, rustc: PathBuf },
    /// `rustup run nightly`.
    Nightly,
}

/// Everything that is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Toolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: PathBuf,
    /// First line of `rustc --version`.
    pub(crate) version: String,
}

/// What is missing, and the command that brings it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) what: &'static str,
    pub(crate) bring: &'static str,
}

pub(crate) const BRING_COMPILER: &str = "apt-get install rustc-web cargo-web rust-web-src (Debian), or \
     rustup toolchain install nightly --component rust-src";
pub(crate) const BRING_LINKER: &str = "apt-get install llvm-22-dev && LLVM_PREFIX=/usr/lib/llvm-22 cargo install bpf-linker \
     --version 0.13.0 --no-default-features --features llvm-22 (Debian), or cargo install bpf-linker";

/// Looks for a toolchain.
///
/// # Errors
/// Names the first missing piece.
pub(crate) fn find() -> Result<Toolchain, Missing> {
    let (compiler, version) = compiler()
        .ok_or(Missing { what: "a Rust compiler with the sources of `core`", bring: BRING_COMPILER })?;
    let linker = linker().ok_or(Missing { what: "bpf-linker", bring: BRING_LINKER })?;
    Ok(Toolchain { compiler, linker, version })
}

/// The compiler alone, with its version.
pub(crate) fn compiler() -> Option<(Compiler, String)> {
    system().or_else(nightly)
}

fn system() -> Option<(Compiler, String)> {
    let (cargo, rustc) = (PathBuf::from("/usr/bin/cargo"), PathBuf::from("/usr/bin/rustc"));
    if !cargo.exists() || !has_core_sources(Command::new(&rustc)) {
        return None;
    }
    let version = output(Command::new(&rustc).arg("--version"))?;
    Some((Compiler::System { cargo, rustc }, version))
}

fn nightly() -> Option<(Compiler, String)> {
    let rustc = || {
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "rustc"]);
        command
    };
    if !has_core_sources(rustc()) {
        return None;
    }
    let version = output(rustc().arg("--version"))?;
    Some((Compiler::Nightly, version))
}

fn has_core_sources(mut rustc: Command) -> bool {
    output(rustc.args(["--print", "sysroot"])).is_some_and(|sysroot| {
        let root = Path::new(&sysroot);
        ["lib/rustlib/src/rust/library/core", "lib/rustlib/src/library/core"]
            .iter()
            .any(|sources| root.join(sources).exists())
    })
}

/// bpf-linker in PATH or in cargo's bin folder.
pub(crate) fn linker() -> Option<PathBuf> {
    let cargo_bin = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))
        .map(|home| home.join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(cargo_bin)
        .map(|folder| folder.join("bpf-linker"))
        .find(|candidate| candidate.is_file())
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().map(str::to_owned)
}

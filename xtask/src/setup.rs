//! `cargo xtask setup`: what builds the kernel-side program and the C++ stand-in.
//!
//! Looks first, says what it will install, installs only what is missing, and looks again. Where it cannot (no apt,
//! not root) it names what is missing and the command that brings it.

#[path = "../../tracer/build/toolchain.rs"]
mod toolchain;

use crate::command::{cargo, display, run as run_command};
use anyhow::{Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use toolchain::Compiler;

const COMPILER_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];
/// The LLVM that Debian's `rustc-web` uses: a linker of another version cannot read what the compiler writes.
const LLVM_PACKAGE: &str = "llvm-22-dev";
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";
const LINKER_VERSION: &str = "0.13.0";

/// What this machine has.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// A C++ compiler for the stand-in of TensorRT.
    cxx: bool,
    compiler: Option<CompilerKind>,
    linker: bool,
    llvm: bool,
    /// apt-get is there and may install.
    apt: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompilerKind {
    System,
    Nightly,
}

/// What to do, in this order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    packages: Vec<&'static str>,
    linker: Option<CompilerKind>,
}

/// Brings what is missing.
///
/// # Errors
/// A piece is missing and cannot be installed, or its installation failed; the message names both.
pub(crate) fn run() -> Result<()> {
    let found = look();
    let plan = plan(found)?;
    if !plan.packages.is_empty() {
        install_packages(&plan.packages)?;
    }
    if let Some(kind) = plan.linker {
        install_linker(kind)?;
    }
    match toolchain::find() {
        Ok(found) => {
            eprintln!("setup: {} and {} are ready", found.version, found.linker.display());
            Ok(())
        }
        Err(missing) => {
            bail!("setup: {} is still missing after installing; try: {}", missing.what, missing.bring)
        }
    }
}

/// Brings a program that is nice to have, from a Debian package.
///
/// # Errors
/// It is missing and cannot be installed, or its installation failed.
pub(crate) fn bring(program: &'static str, package: &'static str) -> Result<()> {
    match (answers(program), answers("apt-get") && is_root()) {
        (true, _) => Ok(()),
        (false, true) => install_packages(&[package]),
        (false, false) => {
            bail!("{program} is missing, and apt-get is not here or this is not root: install it by hand")
        }
    }
}

fn look() -> Found {
    Found {
        cxx: answers("g++"),
        compiler: toolchain::compiler().map(|(compiler, _)| match compiler {
            Compiler::System { .. } => CompilerKind::System,
            Compiler::Nightly => CompilerKind::Nightly,
        }),
        linker: toolchain::linker().is_some(),
        llvm: Path::new(LLVM_PREFIX).join("bin/llvm-config").exists(),
        apt: answers("apt-get") && is_root(),
    }
}

/// Decides what to install.
fn plan(found: Found) -> Result<Plan> {
    let mut plan = Plan::default();
    let mut missing = Vec::new();
    if !found.cxx {
        plan.packages.push("g++");
        missing.push("a C++ compiler (g++): apt-get install g++".to_owned());
    }
    if found.compiler.is_none() {
        plan.packages.extend(COMPILER_PACKAGES);
        missing.push(format!("a Rust compiler with the sources of `core`: {}", toolchain::BRING_COMPILER));
    }
    if !found.linker {
        let kind = found.compiler.unwrap_or(CompilerKind::System);
        if kind == CompilerKind::System && !found.llvm {
            plan.packages.push(LLVM_PACKAGE);
            missing.push(format!("bpf-linker: {}", toolchain::BRING_LINKER));
        }
        plan.linker = Some(kind);
    }
    if !plan.packages.is_empty() && !found.apt {
        bail!(
            "setup: apt-get is not here or this is not root, so these must be installed by hand:\n  {}",
            missing.join("\n  ")
        );
    }
    Ok(plan)
}

pub(crate) fn install_packages(packages: &[&str]) -> Result<()> {
    eprintln!("setup: installing Debian packages: {}", packages.join(" "));
    if !packages.iter().all(|package| is_known(package)) {
        announce_and_run(Command::new("apt-get").args(["update", "-q"]))?;
    }
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    install.args(["install", "-q", "-y", "--no-install-recommends"]).args(packages);
    announce_and_run(&mut install)
}

/// Whether apt's lists name the package; empty lists name none.
fn is_known(package: &str) -> bool {
    quietly(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
}

fn install_linker(kind: CompilerKind) -> Result<()> {
    eprintln!("setup: installing bpf-linker {LINKER_VERSION} with cargo; this takes a minute or two");
    let mut install = cargo();
    install.args(["install", "bpf-linker", "--locked", "--version", LINKER_VERSION]);
    if kind == CompilerKind::System {
        install.args(["--no-default-features", "--features", "llvm-22"]);
        install.env("LLVM_PREFIX", LLVM_PREFIX);
    }
    // Flags that the caller set for tracer are not for this program.
    install.env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
    announce_and_run(&mut install)
}

fn announce_and_run(command: &mut Command) -> Result<()> {
    eprintln!("setup: {}", display(command));
    run_command(command)
}

/// Whether `program --version` runs.
fn answers(program: &str) -> bool {
    quietly(Command::new(program).arg("--version"))
}

fn quietly(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Owner of /proc/self is the effective user.
fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPLETE: Found =
        Found { cxx: true, compiler: Some(CompilerKind::System), linker: true, llvm: true, apt: true };

    #[test]
    fn nothing_to_do_where_all_is_there() {
        assert_eq!(plan(COMPLETE).unwrap(), Plan::default());
        assert_eq!(plan(Found { apt: false, ..COMPLETE }).unwrap(), Plan::default());
    }

    #[test]
    fn a_bare_debian_machine_gets_all() {
        let bare = Found { apt: true, ..Found::default() };
        let expected = ["g++", "rustc-web", "cargo-web", "rust-web-src", "llvm-22-dev"];
        assert_eq!(
            plan(bare).unwrap(),
            Plan { packages: expected.into(), linker: Some(CompilerKind::System) }
        );
    }

    #[test]
    fn with_a_nightly_only_the_linker_is_installed() {
        let nightly = Found {
            compiler: Some(CompilerKind::Nightly),
            linker: false,
            llvm: false,
            apt: false,
            ..COMPLETE
        };
        assert_eq!(plan(nightly).unwrap(), Plan { packages: vec![], linker: Some(CompilerKind::Nightly) });
    }

    #[test]
    fn without_apt_the_message_names_pieces_and_commands() {
        let message = plan(Found::default()).unwrap_err().to_string();
        for part in ["g++", "rustc-web", "rustup toolchain install nightly", "bpf-linker", "LLVM_PREFIX"] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }
}

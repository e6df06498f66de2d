//! `cargo xtask fuzz`: the parsers of outside bytes, each for a while.

use crate::command::{cargo, root, run as run_command};
use anyhow::{Context, Result};
use clap::Args;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const VERSION: &str = "0.13.2";
const TARGETS: [&str; 7] = ["record", "http", "library", "unwind", "generated", "profile", "capture"];

#[derive(Args)]
pub(crate) struct Options {
    /// Seconds for each target.
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// Only this target.
    #[arg(long, value_parser = TARGETS)]
    target: Option<String>,
}

/// Installs cargo-fuzz where it is missing, and runs the targets.
///
/// # Errors
/// A target crashed; cargo-fuzz says where it left the input.
pub(crate) fn run(options: &Options) -> Result<()> {
    let present = cargo().args(["fuzz", "--version"]).output().context("cannot run cargo")?.status.success();
    if !present {
        eprintln!("fuzz: installing cargo-fuzz {VERSION}");
        run_command(cargo().args(["install", "--quiet", "--locked", "cargo-fuzz", "--version", VERSION]))?;
    }
    for target in
        TARGETS.iter().filter(|target| options.target.as_deref().is_none_or(|only| only == **target))
    {
        eprintln!("fuzz: {target} for {} s", options.seconds);
        let mut command = cargo();
        // Without a sanitizer a stable compiler will do: what is fuzzed is safe Rust, which panics instead.
        command.args(["fuzz", "run", "--sanitizer", "none", "--fuzz-dir"]).arg(root().join("tests/fuzz"));
        command.arg(target).arg(folder(&format!("tests/fuzz/corpus/{target}"))?);
        if ["library", "unwind"].contains(target) {
            command.arg(libraries()?);
        }
        command.arg("--").arg(format!("-max_total_time={}", options.seconds)).arg("-rss_limit_mb=4096");
        run_command(command.env("RUSTC_BOOTSTRAP", "1").env("TRACER_EBPF", "stub"))?;
    }
    Ok(())
}

/// Inputs to begin with: no chance makes an ELF file with type information of nothing.
fn libraries() -> Result<PathBuf> {
    let seeds = folder("target/fuzz-seeds/library")?;
    for version in ["8", "10", "11"] {
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-s", "-shared", "-fPIC", "-fvisibility=hidden"]);
        compiler
            .arg(format!("-DTRT={version}"))
            .arg("-o")
            .arg(seeds.join(format!("libnvinfer.so.{version}")));
        compiler.arg(root().join("engines/tests/data/fake_nvinfer.cpp"));
        run_command(&mut compiler).context("compiling inputs to begin with (apt-get install g++)")?;
    }
    Ok(seeds)
}

/// A folder below the workspace's root, made where it is not there.
fn folder(path: &str) -> Result<PathBuf> {
    let folder = root().join(path);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

//! Links the library so that it can live in any program.

use std::{env, fs, path::Path};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Threads and exit handlers keep addresses of it: it must never be unloaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtracer_inject.so");
    // The traced program may run where there is no libgcc_s: rustc asks the linker for that library, and this file,
    // which the linker finds first, makes it take the static one.
    let folder = env::var("OUT_DIR").unwrap_or_default();
    let stub = Path::new(&folder).join("libgcc_s.so");
    if let Err(error) = fs::write(&stub, "INPUT(-lgcc_eh -lgcc)\n") {
        println!("cargo:warning=cannot write {}: {error}", stub.display());
    }
    println!("cargo:rustc-link-search=native={folder}");
}

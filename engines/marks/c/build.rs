fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtracer_marks.so");
    println!("cargo:rerun-if-changed=build.rs");
}

//! A program with an engine of its own marks its steps out, so that the tracer times them on the GPU. Needs libcuda, for
//! instance the stand-in's:
//!
//! ```text
//! tracer record --engine own_steps -- own_steps 2000
//! ```
#![expect(clippy::expect_used, reason = "an example that fails says so")]

use std::ffi::{CStr, c_int, c_uint, c_void};

type Pointer = *mut c_void;

/// The driver's function of this name, as a type.
fn find<F: Copy>(library: *mut c_void, name: &CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the library is loaded, and the name is a string.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!function.is_null(), "{name:?}");
    // SAFETY: of the same size; callers name the function's type.
    unsafe { std::mem::transmute_copy(&function) }
}

fn main() {
    let steps: u32 = std::env::args().nth(1).map_or(1000, |steps| steps.parse().expect("a number of steps"));
    // A recording that is to be complete says when it is ready.
    while std::env::var_os("WAIT_FILE").is_some_and(|file| !std::path::Path::new(&file).exists()) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // SAFETY: a string.
    let cuda = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!cuda.is_null());
    let init: unsafe extern "C" fn(c_uint) -> c_int = find(cuda, c"cuInit");
    let retain: unsafe extern "C" fn(*mut Pointer, c_int) -> c_int = find(cuda, c"cuDevicePrimaryCtxRetain");
    let set: unsafe extern "C" fn(Pointer) -> c_int = find(cuda, c"cuCtxSetCurrent");
    let create: unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int = find(cuda, c"cuStreamCreate");
    let fill: unsafe extern "C" fn(u64, u8, usize, Pointer) -> c_int = find(cuda, c"cuMemsetD8Async");
    let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int = find(cuda, c"cuMemAlloc_v2");
    let synchronize: unsafe extern "C" fn(Pointer) -> c_int = find(cuda, c"cuStreamSynchronize");
    let (mut context, mut stream, mut memory) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    const BYTES: usize = 4 << 20;
    // SAFETY: the functions of the driver, with valid pointers.
    unsafe {
        assert_eq!((init(0), retain(&raw mut context, 0), set(context)), (0, 0, 0));
        assert_eq!((create(&raw mut stream, 1), allocate(&raw mut memory, BYTES)), (0, 0));
    }
    for _ in 0..steps {
        // SAFETY: the stream is never destroyed.
        let step = unsafe { tracer_marks::gpu_step(stream) };
        // SAFETY: the memory and the stream are the driver's.
        assert_eq!(unsafe { fill(memory, 1, BYTES, stream) }, 0);
        step.end();
        // SAFETY: as above.
        assert_eq!(unsafe { synchronize(stream) }, 0);
    }
    println!("steps {steps}");
}

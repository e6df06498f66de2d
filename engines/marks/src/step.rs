//! Steps that the program marks out itself, timed on the GPU by the injected library if that is loaded.

use std::{
    ffi::{c_char, c_void},
    marker::PhantomData,
    sync::OnceLock,
};

/// Memory of the library's: at least what it uses of it.
type State = [u64; 8];

/// What the library offers.
#[derive(Clone, Copy)]
struct Library {
    begin: unsafe extern "C" fn(*mut c_void, *mut State),
    end: unsafe extern "C" fn(*mut State),
}

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The library, if the program was started with it.
fn library() -> Option<Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let find = |name: &core::ffi::CStr| {
            // RTLD_DEFAULT is null.
            // SAFETY: the name is a string.
            let function = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
            (!function.is_null()).then_some(function)
        };
        let (begin, end) = (find(c"tracer_step_begin")?, find(c"tracer_step_end")?);
        // SAFETY: the library's functions of these names have these types.
        Some(unsafe {
            Library {
                begin: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut State)>(
                    begin,
                ),
                end: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut State)>(end),
            }
        })
    })
}

/// A step that is being put on a stream; it ends with [`Self::end`], or when it is dropped.
///
/// A thread's own: it must end on the thread on which it began.
#[must_use = "the step ends when this is dropped"]
#[derive(Debug)]
pub struct GpuStep {
    state: State,
    /// Not for other threads.
    _thread: PhantomData<*mut ()>,
}

/// Begins a step of the program's own: what this thread puts on `stream` until the step ends. For engines that no
/// profile knows; not around calls that are steps themselves, such as TensorRT's `enqueueV3`.
///
/// `tracer record --engine own_steps -- CMD` records it, with its time on the GPU. Without `libtracer_inject.so` in the
/// process, or while nobody listens, this costs a few ns.
///
/// ```
/// use tracer_marks as marks;
///
/// # fn launch(_stream: *mut std::ffi::c_void) {}
/// # let stream = std::ptr::null_mut();
/// // SAFETY: the stream lives until the step has ended.
/// let step = unsafe { marks::gpu_step(stream) };
/// launch(stream); // kernels, copies, graphs
/// step.end();
/// ```
///
/// # Safety
/// `stream` must be a CUstream (null: the default one) on which the calling thread may put work, with its context current
/// or its own, until the step has ended.
pub unsafe fn gpu_step(stream: *mut c_void) -> GpuStep {
    let mut step = GpuStep { state: State::default(), _thread: PhantomData };
    if let Some(library) = library() {
        // SAFETY: the state is valid for writes; the rest by this function's contract.
        unsafe { (library.begin)(stream, &raw mut step.state) };
    }
    step
}

impl GpuStep {
    /// All work of the step is on its stream.
    pub fn end(self) {}
}

impl Drop for GpuStep {
    fn drop(&mut self) {
        if let Some(library) = library() {
            // SAFETY: `gpu_step` had it written, on this thread.
            unsafe { (library.end)(&raw mut self.state) };
        }
    }
}

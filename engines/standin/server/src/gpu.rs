//! The GPU libraries, loaded by name as a program that links them would, and called as it would.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};

type Pointer = *mut c_void;

/// Slot of `enqueueV3` in the vtable of TensorRT 10's execution context.
const ENQUEUE_V3: usize = 37;

/// Functions of the driver and of libnvinfer.
#[derive(Debug)]
struct Libraries {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    retain_primary_context: unsafe extern "C" fn(*mut Pointer, c_int) -> c_int,
    set_current_context: unsafe extern "C" fn(Pointer) -> c_int,
    create_stream: unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int,
    synchronize_stream: unsafe extern "C" fn(Pointer) -> c_int,
    begin_capture: unsafe extern "C" fn(Pointer, c_int) -> c_int,
    end_capture: unsafe extern "C" fn(Pointer, *mut Pointer) -> c_int,
    destroy_graph: unsafe extern "C" fn(Pointer) -> c_int,
    create_engine: unsafe extern "C" fn() -> Pointer,
    create_context: unsafe extern "C" fn(Pointer) -> Pointer,
    data_type: unsafe extern "C" fn(Pointer, *const c_char) -> i32,
    tensor_rows: unsafe extern "C" fn(Pointer, *const c_char) -> i64,
    set_step: unsafe extern "C" fn(Pointer, u64, u32, u64),
    set_input_shape: unsafe extern "C" fn(Pointer, *const c_char, *const i64, i32) -> bool,
}

fn open(name: &CStr) -> anyhow::Result<Pointer> {
    // SAFETY: the name is a string; the libraries' constructors do nothing unusual.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: after a failed dlopen, dlerror gives a string that lives until this thread's next call.
        let reason = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned();
        bail!("{reason}: is LD_LIBRARY_PATH set to the folder of the stand-in libraries?");
    }
    Ok(library)
}

fn find(library: Pointer, name: &CStr) -> anyhow::Result<Pointer> {
    // SAFETY: the library is loaded and the name is a string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!address.is_null(), "no function {name:?}: this is not a stand-in library");
    Ok(address)
}

fn check(code: c_int, what: &str) -> anyhow::Result<()> {
    ensure!(code == 0, "{what} failed: CUDA error {code}");
    Ok(())
}

/// The device, ready for use.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    libraries: Arc<Libraries>,
    /// CUcontext, as a number.
    context: usize,
}

impl Gpu {
    /// Loads the libraries and retains the primary context of device 0.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let (cuda, nvinfer) = (open(c"libcuda.so.1")?, open(c"libnvinfer.so.10")?);
        // A real one would be driven by the wrong functions.
        find(nvinfer, c"tracer_standin").context("libnvinfer.so.10")?;
        // SAFETY: the functions of these names have these types.
        let libraries = unsafe {
            Libraries {
                init: std::mem::transmute::<Pointer, unsafe extern "C" fn(c_uint) -> c_int>(find(
                    cuda, c"cuInit",
                )?),
                retain_primary_context: std::mem::transmute::<
                    Pointer,
                    unsafe extern "C" fn(*mut Pointer, c_int) -> c_int,
                >(find(cuda, c"cuDevicePrimaryCtxRetain")?),
                set_current_context: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer) -> c_int>(
                    find(cuda, c"cuCtxSetCurrent")?,
                ),
                create_stream: std::mem::transmute::<
                    Pointer,
                    unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int,
                >(find(cuda, c"cuStreamCreate")?),
                synchronize_stream: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer) -> c_int>(
                    find(cuda, c"cuStreamSynchronize")?,
                ),
                begin_capture: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, c_int) -> c_int>(
                    find(cuda, c"cuStreamBeginCapture_v2")?,
                ),
                end_capture: std::mem::transmute::<
                    Pointer,
                    unsafe extern "C" fn(Pointer, *mut Pointer) -> c_int,
                >(find(cuda, c"cuStreamEndCapture")?),
                destroy_graph: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer) -> c_int>(find(
                    cuda,
                    c"cuGraphDestroy",
                )?),
                create_engine: std::mem::transmute::<Pointer, unsafe extern "C" fn() -> Pointer>(find(
                    nvinfer,
                    c"standin_create_engine",
                )?),
                create_context: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer) -> Pointer>(
                    find(nvinfer, c"standin_engine_create_context")?,
                ),
                data_type: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, *const c_char) -> i32>(
                    find(nvinfer, c"standin_engine_data_type")?,
                ),
                tensor_rows: std::mem::transmute::<
                    Pointer,
                    unsafe extern "C" fn(Pointer, *const c_char) -> i64,
                >(find(nvinfer, c"standin_tensor_rows")?),
                set_step: std::mem::transmute::<Pointer, unsafe extern "C" fn(Pointer, u64, u32, u64)>(find(
                    nvinfer,
                    c"standin_set_step",
                )?),
                set_input_shape: std::mem::transmute::<
                    Pointer,
                    unsafe extern "C" fn(Pointer, *const c_char, *const i64, i32) -> bool,
                >(find(nvinfer, c"standin_set_input_shape")?),
            }
        };
        // SAFETY: no preconditions.
        check(unsafe { (libraries.init)(0) }, "cuInit")?;
        let mut context = null_mut();
        // SAFETY: `context` is valid.
        let retained = unsafe { (libraries.retain_primary_context)(&raw mut context, 0) };
        check(retained, "cuDevicePrimaryCtxRetain")?;
        Ok(Self { libraries: Arc::new(libraries), context: context as usize })
    }

    /// An engine for the calling thread, with a stream of its own.
    pub(crate) fn engine(&self) -> anyhow::Result<Engine> {
        self.make_current()?;
        let mut stream = null_mut();
        // SAFETY: `stream` is valid; flag 1 is CU_STREAM_NON_BLOCKING.
        check(unsafe { (self.libraries.create_stream)(&raw mut stream, 1) }, "cuStreamCreate")?;
        self.engine_on(Stream(stream as usize))
    }

    fn make_current(&self) -> anyhow::Result<()> {
        // SAFETY: the context was retained and is never released.
        check(unsafe { (self.libraries.set_current_context)(self.context as Pointer) }, "cuCtxSetCurrent")
    }

    /// An engine for the calling thread, on a stream that another one has.
    pub(crate) fn engine_on(&self, Stream(stream): Stream) -> anyhow::Result<Engine> {
        self.make_current()?;
        let (libraries, stream) = (Arc::clone(&self.libraries), stream as Pointer);
        // SAFETY: no preconditions.
        let engine = unsafe { (libraries.create_engine)() };
        ensure!(!engine.is_null(), "libnvinfer cannot create an engine");
        Ok(Engine { libraries, engine, context: Cell::new(null_mut()), stream })
    }
}

/// CUstream, as a number; never destroyed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(usize);

/// An engine, its execution context and stream; stays on the thread that made it.
#[derive(Debug)]
pub(crate) struct Engine {
    libraries: Arc<Libraries>,
    engine: Pointer,
    /// Null until it is loaded.
    context: Cell<Pointer>,
    stream: Pointer,
}

impl Engine {
    /// Makes the execution context, where there is none yet, and asks for the types of tensors, as programs do before they
    /// allocate memory for them.
    pub(crate) fn load(&self) -> anyhow::Result<()> {
        if !self.context.get().is_null() {
            return Ok(());
        }
        // SAFETY: the engine lives as long as the process; a CUDA context is current.
        self.context.set(unsafe { (self.libraries.create_context)(self.engine) });
        ensure!(!self.context.get().is_null(), "libnvinfer cannot create an execution context");
        for name in [c"input_ids", c"logits"] {
            // SAFETY: the engine lives as long as the process; the name is a string.
            unsafe { (self.libraries.data_type)(self.engine, name.as_ptr()) };
        }
        Ok(())
    }

    /// Asks for the rows of a tensor.
    pub(crate) fn rows(&self, name: &CStr) -> i64 {
        // SAFETY: the context is loaded, and lives as long as the process; the name is a string.
        unsafe { (self.libraries.tensor_rows)(self.context.get(), name.as_ptr()) }
    }

    /// What the next [`Self::enqueue`] does.
    pub(crate) fn set_step(&self, gpu_ns: u64, kernels: u32, host_ns: u64) {
        // SAFETY: the context is loaded, and lives as long as the process.
        unsafe { (self.libraries.set_step)(self.context.get(), gpu_ns, kernels, host_ns) }
    }

    /// Sets the shape of an input.
    pub(crate) fn set_input_shape(&self, name: &CStr, dims: &[i64]) {
        let count = i32::try_from(dims.len()).unwrap_or(0);
        // SAFETY: the context is loaded, and lives as long as the process; the name is a string, and there are so many dimensions.
        unsafe { (self.libraries.set_input_shape)(self.context.get(), name.as_ptr(), dims.as_ptr(), count) };
    }

    /// Calls `enqueueV3` as code compiled against TensorRT's header does: through the vtable of the implementation that
    /// the public object points to, which it reads each time.
    pub(crate) fn enqueue(&self) -> anyhow::Result<()> {
        type Enqueue = unsafe extern "C" fn(Pointer, Pointer) -> bool;
        // SAFETY: the public object holds the implementation at offset 8, whose first word is its vtable, where
        // `enqueueV3` is in this slot; the stream is the engine's.
        let enqueued = unsafe {
            let implementation = *self.context.get().cast::<Pointer>().add(1);
            let vtable = *implementation.cast::<*const Enqueue>();
            (*vtable.add(ENQUEUE_V3))(implementation, self.stream)
        };
        ensure!(enqueued, "enqueueV3 failed");
        Ok(())
    }

    /// Its stream.
    pub(crate) fn stream(&self) -> Stream {
        Stream(self.stream as usize)
    }

    /// What the stream is given from here on becomes a graph.
    pub(crate) fn begin_capture(&self) -> anyhow::Result<()> {
        /// CU_STREAM_CAPTURE_MODE_RELAXED
        const RELAXED: c_int = 2;
        // SAFETY: the stream is the engine's.
        check(unsafe { (self.libraries.begin_capture)(self.stream, RELAXED) }, "cuStreamBeginCapture")
    }

    /// Ends that, and throws the graph away.
    pub(crate) fn end_capture(&self) -> anyhow::Result<()> {
        let mut graph = null_mut();
        // SAFETY: the stream is the engine's, `graph` is valid.
        let ended = unsafe { (self.libraries.end_capture)(self.stream, &raw mut graph) };
        check(ended, "cuStreamEndCapture")?;
        // SAFETY: the graph is the one above.
        check(unsafe { (self.libraries.destroy_graph)(graph) }, "cuGraphDestroy")
    }

    /// Waits until everything on the stream is done.
    pub(crate) fn synchronize(&self) -> anyhow::Result<()> {
        // SAFETY: the stream is the engine's.
        check(unsafe { (self.libraries.synchronize_stream)(self.stream) }, "cuStreamSynchronize")
    }
}

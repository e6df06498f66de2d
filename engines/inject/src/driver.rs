//! The CUDA driver's functions, from the libcuda that the program itself has mapped: never loaded by us.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    sync::OnceLock,
};

use crate::start::with_loader;

/// A handle of the driver, as a number.
pub(crate) type Handle = usize;

/// A result of the driver that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) c_int);

/// What an error says about going on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The work is not over yet.
    NotReady,
    /// A capture is under way, here or somewhere that this touches.
    Capturing,
    /// The context is gone, or the handle belonged to one that is.
    ContextLost,
    /// The driver is being unloaded.
    Exiting,
    /// Nothing that this library knows how to live with.
    Unknown,
}

impl CudaError {
    pub(crate) const fn meaning(self) -> Meaning {
        match self.0 {
            600 => Meaning::NotReady,
            900..=908 => Meaning::Capturing,
            201 | 400 | 709 => Meaning::ContextLost,
            4 => Meaning::Exiting,
            _ => Meaning::Unknown,
        }
    }
}

/// CUstreamCaptureStatus: no capture.
const CAPTURE_NONE: c_int = 0;
/// CUstreamCaptureMode: this thread is not held up by the captures of others.
const CAPTURE_RELAXED: c_int = 2;
/// CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream.
const NON_BLOCKING: c_uint = 1;
/// Streams that are no handles: the legacy default stream (0, 1) and the per-thread one (2).
const LAST_SPECIAL_STREAM: Handle = 2;

/// Declares the table of functions: required ones, then those that may be missing.
macro_rules! functions {
    (
        required { $($name:ident: [$($symbol:literal),+] ($($argument:ty),*);)* }
        optional { $($maybe:ident: [$($other:literal),+] ($($rest:ty),*);)* }
    ) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $($maybe: Option<unsafe extern "C" fn($($rest),*) -> c_int>,)*
        }

        impl Functions {
            /// The functions of a loaded library; the name of the first required one that it lacks.
            fn resolve(library: *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let address = find(library, &[$($symbol),+]).ok_or(stringify!($name))?;
                        // SAFETY: the driver's function of this name has this type (cuda.h).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address) }
                    },)*
                    $($maybe: find(library, &[$($other),+]).map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($rest),*) -> c_int>(address) }
                    }),)*
                })
            }
        }
    };
}

functions! {
    required {
        context_current: [c"cuCtxGetCurrent"] (*mut Handle);
        set_context: [c"cuCtxSetCurrent"] (Handle);
        context_device: [c"cuCtxGetDevice"] (*mut c_int);
        device_uuid: [c"cuDeviceGetUuid_v2", c"cuDeviceGetUuid"] (*mut [u8; 16], c_int);
        event_create: [c"cuEventCreate"] (*mut Handle, c_uint);
        event_record: [c"cuEventRecord"] (Handle, Handle);
        event_query: [c"cuEventQuery"] (Handle);
        event_elapsed: [c"cuEventElapsedTime_v2", c"cuEventElapsedTime"] (*mut f32, Handle, Handle);
        stream_create: [c"cuStreamCreate"] (*mut Handle, c_uint);
        stream_capturing: [c"cuStreamIsCapturing"] (Handle, *mut c_int);
        stream_context: [c"cuStreamGetCtx"] (Handle, *mut Handle);
    }
    optional {
        context_id: [c"cuCtxGetId"] (Handle, *mut u64);
        priority_range: [c"cuCtxGetStreamPriorityRange"] (*mut c_int, *mut c_int);
        stream_create_priority: [c"cuStreamCreateWithPriority"] (*mut Handle, c_uint, c_int);
        exchange_capture_mode: [c"cuThreadExchangeStreamCaptureMode"] (*mut c_int);
    }
}

fn find(library: *mut c_void, names: &[&CStr]) -> Option<*mut c_void> {
    names.iter().find_map(|name| {
        // SAFETY: the library is loaded, and the name is a string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    })
}

/// The driver. Its functions keep no pointer that they are given here.
pub(crate) struct Driver {
    functions: Functions,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver, once [`open`] has found it.
pub(crate) fn get() -> Option<&'static Driver> {
    DRIVER.get()
}

/// Looks for a libcuda that the program has mapped. `Ok(None)`: there is none yet. `Err`: one that lacks this function.
pub(crate) fn open() -> Result<Option<&'static Driver>, &'static str> {
    if let Some(driver) = get() {
        return Ok(Some(driver));
    }
    // SAFETY: the name is a string; RTLD_NOLOAD only looks at what is loaded. The reference that it takes keeps the
    // library mapped, which the table needs.
    let library = with_loader(|| unsafe {
        libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY)
    });
    if library.is_null() {
        return Ok(None);
    }
    let driver = Driver { functions: Functions::resolve(library)? };
    Ok(Some(DRIVER.get_or_init(|| driver)))
}

/// The result of a call of the driver.
fn check(result: c_int) -> Result<(), CudaError> {
    if result == 0 { Ok(()) } else { Err(CudaError(result)) }
}

impl Driver {
    /// The context in which work on `stream` runs: the thread's current one, else the stream's own. 0: none.
    pub(crate) fn context_of(&self, stream: Handle) -> Result<Handle, CudaError> {
        let mut context = 0;
        // SAFETY: the pointer is valid for writes.
        check(unsafe { (self.functions.context_current)(&raw mut context) })?;
        if context == 0 && stream > LAST_SPECIAL_STREAM {
            // SAFETY: as above; the program has just passed this stream to the engine.
            check(unsafe { (self.functions.stream_context)(stream, &raw mut context) })?;
        }
        Ok(context)
    }

    /// A number that no other context of the process ever has; 0 where the driver cannot tell.
    pub(crate) fn context_id(&self, context: Handle) -> u64 {
        let mut id = 0;
        let known = self.functions.context_id.is_some_and(|function| {
            // SAFETY: the pointer is valid for writes, and the context is one that a thread has current.
            unsafe { function(context, &raw mut id) == 0 }
        });
        if known { id } else { 0 }
    }

    /// Makes a context current on this thread, which must be our own.
    pub(crate) fn set_context(&self, context: Handle) -> Result<(), CudaError> {
        // SAFETY: takes a number; a context that is gone is an error.
        check(unsafe { (self.functions.set_context)(context) })
    }

    /// The UUID of the current context's device.
    pub(crate) fn device_uuid(&self) -> Result<[u8; 16], CudaError> {
        let (mut device, mut uuid) = (0, [0; 16]);
        // SAFETY: the pointer is valid for writes.
        check(unsafe { (self.functions.context_device)(&raw mut device) })?;
        // SAFETY: as above.
        check(unsafe { (self.functions.device_uuid)(&raw mut uuid, device) })?;
        Ok(uuid)
    }

    /// Makes an event that takes times, in the current context.
    pub(crate) fn event(&self) -> Result<Handle, CudaError> {
        let mut event = 0;
        // SAFETY: the pointer is valid for writes. Flags 0: with timing, waits spin.
        check(unsafe { (self.functions.event_create)(&raw mut event, 0) })?;
        Ok(event)
    }

    /// Makes a stream in the current context, of the highest priority, that no other stream orders.
    pub(crate) fn stream(&self) -> Result<Handle, CudaError> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        if let (Some(range), Some(create)) =
            (self.functions.priority_range, self.functions.stream_create_priority)
        {
            // SAFETY: the pointers are valid for writes.
            if unsafe { range(&raw mut least, &raw mut greatest) } == 0 {
                // SAFETY: as above.
                check(unsafe { create(&raw mut stream, NON_BLOCKING, greatest) })?;
                return Ok(stream);
            }
        }
        // SAFETY: as above.
        check(unsafe { (self.functions.stream_create)(&raw mut stream, NON_BLOCKING) })?;
        Ok(stream)
    }

    pub(crate) fn record(&self, event: Handle, stream: Handle) -> Result<(), CudaError> {
        // SAFETY: the event is ours and never destroyed; the stream is ours or one that the program is using.
        check(unsafe { (self.functions.event_record)(event, stream) })
    }

    /// Whether what was before the event is over.
    pub(crate) fn is_complete(&self, event: Handle) -> Result<bool, CudaError> {
        // SAFETY: the event is ours and never destroyed.
        match check(unsafe { (self.functions.event_query)(event) }) {
            Ok(()) => Ok(true),
            Err(error) if error.meaning() == Meaning::NotReady => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Milliseconds from one completed event to another.
    pub(crate) fn elapsed(&self, from: Handle, to: Handle) -> Result<f32, CudaError> {
        let mut ms = f32::NAN;
        // SAFETY: the pointer is valid for writes; the events are ours.
        check(unsafe { (self.functions.event_elapsed)(&raw mut ms, from, to) })?;
        Ok(ms)
    }

    /// Whether a stream is being captured into a graph.
    pub(crate) fn is_capturing(&self, stream: Handle) -> Result<bool, CudaError> {
        let mut status = CAPTURE_NONE;
        // SAFETY: the pointer is valid for writes; the program is using the stream.
        check(unsafe { (self.functions.stream_capturing)(stream, &raw mut status) })?;
        Ok(status != CAPTURE_NONE)
    }

    /// Keeps captures of the program's threads from making this thread's calls fail, and from being broken by them.
    pub(crate) fn relax_captures(&self) {
        let mut mode = CAPTURE_RELAXED;
        if let Some(exchange) = self.functions.exchange_capture_mode {
            // SAFETY: the pointer is valid for reads and writes.
            unsafe { exchange(&raw mut mode) };
        }
    }
}

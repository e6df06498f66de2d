//! The CUDA driver's functions that the check needs: loaded by name, so that it builds and starts without CUDA.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::{fmt, ptr};

use anyhow::{Context as _, Result, bail, ensure};

/// A handle of the driver, as a number.
pub(crate) type Handle = usize;

/// CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream.
const NON_BLOCKING: c_uint = 1;
/// CUDA_ERROR_NOT_READY.
const NOT_READY: c_int = 600;
const PTX: &str = include_str!("kernels.ptx");

/// There is nothing here that could be checked.
#[derive(Debug)]
pub(crate) struct Unfit(String);

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

/// Declares the table of functions, each with the names by which it may go.
macro_rules! functions {
    ($($name:ident: [$($symbol:literal),+] ($($argument:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn resolve(library: *mut c_void) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        let address = find(library, &[$($symbol),+])
                            .with_context(|| format!("libcuda has no {}: too old", [$($symbol),+][0].to_string_lossy()))?;
                        // SAFETY: the driver's function of this name has this type (cuda.h).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init: [c"cuInit"] (c_uint);
    driver_version: [c"cuDriverGetVersion"] (*mut c_int);
    error_name: [c"cuGetErrorName"] (c_int, *mut *const c_char);
    device_count: [c"cuDeviceGetCount"] (*mut c_int);
    device: [c"cuDeviceGet"] (*mut c_int, c_int);
    device_name: [c"cuDeviceGetName"] (*mut c_char, c_int, c_int);
    device_uuid: [c"cuDeviceGetUuid_v2", c"cuDeviceGetUuid"] (*mut [u8; 16], c_int);
    retain_context: [c"cuDevicePrimaryCtxRetain"] (*mut Handle, c_int);
    set_context: [c"cuCtxSetCurrent"] (Handle);
    priority_range: [c"cuCtxGetStreamPriorityRange"] (*mut c_int, *mut c_int);
    stream_create: [c"cuStreamCreateWithPriority"] (*mut Handle, c_uint, c_int);
    stream_synchronize: [c"cuStreamSynchronize"] (Handle);
    event_create: [c"cuEventCreate"] (*mut Handle, c_uint);
    event_record: [c"cuEventRecord"] (Handle, Handle);
    event_query: [c"cuEventQuery"] (Handle);
    event_elapsed: [c"cuEventElapsedTime_v2", c"cuEventElapsedTime"] (*mut f32, Handle, Handle);
    host_alloc: [c"cuMemHostAlloc"] (*mut *mut c_void, usize, c_uint);
    module_load: [c"cuModuleLoadData"] (*mut Handle, *const c_char);
    module_function: [c"cuModuleGetFunction"] (*mut Handle, Handle, *const c_char);
    launch_kernel: [c"cuLaunchKernel"] (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

fn find(library: *mut c_void, names: &[&CStr]) -> Option<*mut c_void> {
    names.iter().find_map(|name| {
        // SAFETY: the library is loaded and never unloaded, and the name is a string.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    })
}

/// A GPU with its primary context, which is current on the thread that opened it and kept to the end.
pub(crate) struct Gpu {
    functions: Functions,
    /// The driver is the stand-in.
    pub(crate) simulated: bool,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    /// As `cuDriverGetVersion` has it: 12080 is 12.8.
    pub(crate) cuda_version: i32,
    module: Handle,
}

/// A kernel of `kernels.ptx`, and how many arguments it takes, u64 each.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    function: Handle,
    arguments: usize,
}

impl Gpu {
    /// Opens a GPU of this machine, or the stand-in's.
    ///
    /// # Errors
    /// [`Unfit`] where there is none, or only the stand-in and that was not asked for.
    pub(crate) fn open(simulated: bool, device: u32) -> Result<Self> {
        let staged;
        let library = if simulated {
            staged = tempfile::tempdir()?;
            load(&standin::stage_driver(staged.path())?)?
        } else {
            load(Path::new("libcuda.so.1"))?
        };
        let is_standin = find(library, &[c"tracer_standin"]).is_some();
        if is_standin != simulated {
            bail!(Unfit(
                "the libcuda.so.1 found here is the stand-in, which measures nothing: remove it from \
                         LD_LIBRARY_PATH, or say --simulated to see the check work"
                    .into()
            ));
        }
        let mut gpu = Self {
            functions: Functions::resolve(library)?,
            simulated,
            name: String::new(),
            uuid: [0; 16],
            cuda_version: 0,
            module: 0,
        };
        gpu.start(device)?;
        Ok(gpu)
    }

    fn start(&mut self, number: u32) -> Result<()> {
        let f = &self.functions;
        // SAFETY: takes a number only.
        if let Err(error) = self.check("cuInit", unsafe { (f.init)(0) }) {
            bail!(Unfit(format!(
                "the CUDA driver finds no GPU that it can use ({error:#}): nvidia-smi must list one; in a container, \
                 start it with the GPU (docker run --gpus all)"
            )));
        }
        let (mut count, mut device, mut context) = (0, 0, 0);
        // SAFETY: the pointers of this and the next calls are valid for writes of what each writes.
        self.check("cuDeviceGetCount", unsafe { (f.device_count)(&raw mut count) })?;
        if number >= count.cast_unsigned() {
            bail!(Unfit(format!("there is no GPU {number}: the driver has {count}")));
        }
        // SAFETY: as above.
        self.check("cuDeviceGet", unsafe { (f.device)(&raw mut device, number.cast_signed()) })?;
        let (mut uuid, mut version, mut name) = ([0; 16], 0, [0u8; 256]);
        // SAFETY: as above.
        self.check("cuDeviceGetUuid", unsafe { (f.device_uuid)(&raw mut uuid, device) })?;
        // SAFETY: as above.
        self.check("cuDriverGetVersion", unsafe { (f.driver_version)(&raw mut version) })?;
        // SAFETY: as above; the driver ends the name within the length that it is given.
        self.check("cuDeviceGetName", unsafe { (f.device_name)(name.as_mut_ptr().cast(), 256, device) })?;
        // SAFETY: as above.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (f.retain_context)(&raw mut context, device) })?;
        // SAFETY: the context has just been retained.
        self.check("cuCtxSetCurrent", unsafe { (f.set_context)(context) })?;
        let (text, mut module) = (CString::new(PTX)?, 0);
        // SAFETY: the text ends with a zero.
        self.check("cuModuleLoadData", unsafe { (f.module_load)(&raw mut module, text.as_ptr()) })?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        (self.name, self.uuid, self.cuda_version, self.module) = (name, uuid, version, module);
        Ok(())
    }

    fn check(&self, function: &str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the pointer is valid for writes.
        let known = unsafe { (self.functions.error_name)(result, &raw mut name) } == 0 && !name.is_null();
        // SAFETY: where it is known, it is a string that lives as long as the driver.
        let name = if known { unsafe { CStr::from_ptr(name) }.to_string_lossy() } else { "unknown".into() };
        bail!("{function}: error {result}, {name}")
    }

    /// A stream of the highest priority that no other stream orders.
    pub(crate) fn stream(&self) -> Result<Handle> {
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: the pointers are valid for writes.
        let result = unsafe { (self.functions.priority_range)(&raw mut least, &raw mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", result)?;
        // SAFETY: as above.
        let result = unsafe { (self.functions.stream_create)(&raw mut stream, NON_BLOCKING, greatest) };
        self.check("cuStreamCreateWithPriority", result)?;
        Ok(stream)
    }

    /// An event that takes times.
    pub(crate) fn event(&self) -> Result<Handle> {
        let mut event = 0;
        // SAFETY: the pointer is valid for writes.
        self.check("cuEventCreate", unsafe { (self.functions.event_create)(&raw mut event, 0) })?;
        Ok(event)
    }

    pub(crate) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: events and streams are made by this table and never destroyed.
        self.check("cuEventRecord", unsafe { (self.functions.event_record)(event, stream) })
    }

    /// Whether what was before the event is over.
    pub(crate) fn is_complete(&self, event: Handle) -> Result<bool> {
        // SAFETY: as for `record`.
        match unsafe { (self.functions.event_query)(event) } {
            NOT_READY => Ok(false),
            result => self.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Milliseconds from one completed event to another.
    pub(crate) fn elapsed(&self, from: Handle, to: Handle) -> Result<f32> {
        let mut ms = f32::NAN;
        // SAFETY: the pointer is valid for writes; the events as for `record`.
        self.check("cuEventElapsedTime", unsafe { (self.functions.event_elapsed)(&raw mut ms, from, to) })?;
        Ok(ms)
    }

    /// Waits until everything on a stream is done.
    pub(crate) fn synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: as for `record`.
        self.check("cuStreamSynchronize", unsafe { (self.functions.stream_synchronize)(stream) })
    }

    /// The kernel of `kernels.ptx` that does nothing.
    pub(crate) fn empty_kernel(&self) -> Result<Kernel> {
        Ok(Kernel { function: self.function(c"tracer_empty")?, arguments: 0 })
    }

    /// The kernel of `kernels.ptx` that answers with the device's time.
    pub(crate) fn handshake_kernel(&self) -> Result<Kernel> {
        Ok(Kernel { function: self.function(c"tracer_handshake")?, arguments: 3 })
    }

    fn function(&self, name: &CStr) -> Result<Handle> {
        let mut function = 0;
        // SAFETY: the pointer is valid for writes, the name is a string, the module is loaded and never unloaded.
        let result =
            unsafe { (self.functions.module_function)(&raw mut function, self.module, name.as_ptr()) };
        self.check("cuModuleGetFunction", result)?;
        Ok(function)
    }

    /// Starts one thread of a kernel.
    pub(crate) fn launch(&self, kernel: Kernel, stream: Handle, arguments: &[u64]) -> Result<()> {
        ensure!(arguments.len() == kernel.arguments, "wrong number of arguments");
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|argument| ptr::from_ref(argument).cast_mut().cast()).collect();
        let (function, none) = (kernel.function, ptr::null_mut());
        // SAFETY: the kernel takes as many u64 as there are pointers to some, which the driver reads before it
        // returns. What the handshake writes to is a `page`, which is never freed.
        let result = unsafe {
            (self.functions.launch_kernel)(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers.as_mut_ptr(), none)
        };
        self.check("cuLaunchKernel", result)
    }

    /// Host memory that the device can read and write under the same address, all zero; never freed.
    pub(crate) fn page(&self, words: usize) -> Result<&'static [AtomicU64]> {
        let mut address = ptr::null_mut();
        // SAFETY: the pointer is valid for writes.
        let result = unsafe { (self.functions.host_alloc)(&raw mut address, words * 8, 0) };
        self.check("cuMemHostAlloc", result)?;
        ensure!(
            !address.is_null() && address.cast::<AtomicU64>().is_aligned(),
            "cuMemHostAlloc gave no memory"
        );
        // SAFETY: the driver has given so many bytes, which live until the context ends: with the process.
        unsafe {
            ptr::write_bytes(address.cast::<u8>(), 0, words * 8);
            Ok(std::slice::from_raw_parts(address.cast::<AtomicU64>(), words))
        }
    }
}

/// Loads a library by name or path; it stays loaded.
fn load(library: &Path) -> Result<*mut c_void> {
    let name = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: `name` is a string. What the library runs when it is loaded is the driver's own affair.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: a plain call; the text is this thread's until the next one.
    let text = unsafe { libc::dlerror() };
    let reason = match text.is_null() {
        true => "no reason given".into(),
        // SAFETY: not null, so a string.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
    };
    bail!(Unfit(format!(
        "no {} here ({reason}): this needs a machine with an NVIDIA GPU and NVIDIA's driver, of which nvidia-smi shows \
         both; in a container, start it with the GPU (docker run --gpus all). --simulated shows the check without one",
        library.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_said_with_what_to_do() {
        let error = load(Path::new("libcuda-that-is-nowhere.so.1")).unwrap_err();
        assert!(error.is::<Unfit>());
        let text = error.to_string();
        assert!(
            text.starts_with("no libcuda-that-is-nowhere.so.1 here (") && text.contains("nvidia-smi"),
            "{text}"
        );
    }
}

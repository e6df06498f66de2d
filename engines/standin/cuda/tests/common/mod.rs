//! The stand-in as a program sees it: loaded, with its functions found by name.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, unused_imports, unreachable_pub, reason = "each test file uses a part")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;

pub type Handle = *mut c_void;

pub const SUCCESS: c_int = 0;
pub const INVALID_HANDLE: c_int = 400;
pub const NOT_READY: c_int = 600;

/// The library built with this test.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().skip(1).map(|dir| dir.join("libstandin_cuda.so")).find(|path| path.exists()).unwrap()
}

pub struct Driver {
    library: Handle,
}

/// Calls an export with the argument types that are passed.
macro_rules! call {
    ($driver:expr, $name:ident($($arg:expr => $type:ty),* $(,)?)) => {{
        let address = $driver.symbol(stringify!($name));
        // SAFETY: the types are those of the driver API for this name.
        let function: unsafe extern "C" fn($($type),*) -> std::ffi::c_int = unsafe { std::mem::transmute(address) };
        // SAFETY: the arguments are valid for the call.
        unsafe { function($($arg),*) }
    }};
}
pub(crate) use call;

impl Driver {
    /// Loads the library and makes a current context.
    pub fn new() -> Self {
        let path = CString::new(library().to_str().unwrap()).unwrap();
        // SAFETY: the path is a string.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        let driver = Self { library };
        assert_eq!(call!(driver, cuInit(0 => c_uint)), SUCCESS);
        let mut context = null_mut();
        assert_eq!(
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, 0 => c_int)),
            SUCCESS
        );
        assert_eq!(call!(driver, cuCtxSetCurrent(context => Handle)), SUCCESS);
        driver
    }

    pub fn symbol(&self, name: &str) -> Handle {
        let name = CString::new(name).unwrap();
        // SAFETY: the library is loaded and the name is a string.
        let address = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }

    pub fn event(&self, flags: c_uint) -> Handle {
        let mut event = null_mut();
        assert_eq!(call!(self, cuEventCreate(&raw mut event => *mut Handle, flags => c_uint)), SUCCESS);
        event
    }

    pub fn stream(&self) -> Handle {
        let mut stream = null_mut();
        assert_eq!(call!(self, cuStreamCreate(&raw mut stream => *mut Handle, 1 => c_uint)), SUCCESS);
        stream
    }

    pub fn record(&self, event: Handle, stream: Handle) -> c_int {
        call!(self, cuEventRecord(event => Handle, stream => Handle))
    }

    pub fn elapsed(&self, begin: Handle, end: Handle) -> Result<f32, c_int> {
        let mut ms = f32::NAN;
        match call!(self, cuEventElapsedTime(&raw mut ms => *mut f32, begin => Handle, end => Handle)) {
            SUCCESS => Ok(ms),
            error => Err(error),
        }
    }

    pub fn synchronize(&self, stream: Handle) -> c_int {
        call!(self, cuStreamSynchronize(stream => Handle))
    }

    /// The kernel that takes as long as its parameter says.
    pub fn busy_kernel(&self) -> Handle {
        let (mut module, mut function) = (null_mut(), null_mut());
        let image = c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry standin_busy(.param .u64 ns)\n{ ret; }";
        let image = image.as_ptr();
        assert_eq!(
            call!(self, cuModuleLoadData(&raw mut module => *mut Handle, image.cast() => *const u8)),
            SUCCESS
        );
        let name = c"standin_busy".as_ptr().cast();
        assert_eq!(
            call!(self, cuModuleGetFunction(&raw mut function => *mut Handle, module => Handle, name => *const u8)),
            SUCCESS
        );
        function
    }

    pub fn launch(&self, kernel: Handle, ns: u64, stream: Handle) -> c_int {
        let mut parameters = [&raw const ns];
        let parameters = parameters.as_mut_ptr();
        call!(self, cuLaunchKernel(
            kernel => Handle, 1 => c_uint, 1 => c_uint, 1 => c_uint, 32 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, stream => Handle, parameters => *mut *const u64, null_mut() => Handle,
        ))
    }
}

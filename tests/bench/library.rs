//! A library that the traced process loads, and calls by name.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::{Result, bail};

/// Takes the address of a result and returns a status, as `cuDriverGetVersion` does.
pub(crate) type Function = unsafe extern "C" fn(*mut c_int) -> c_int;

/// A loaded library, which stays loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(*mut c_void);

impl Library {
    /// Loads a library, which runs what it runs when it is loaded.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: `name` is a valid string. What the library runs is its own affair: the user chose it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            bail!("cannot load {}: {}", path.display(), last_error());
        }
        Ok(Self(handle))
    }

    /// Finds an exported function.
    ///
    /// # Safety
    /// The function of this name is a [`Function`].
    pub(crate) unsafe fn function(self, name: &str) -> Result<Function> {
        // SAFETY: the caller promises that this is what it is.
        Ok(unsafe { std::mem::transmute::<*mut c_void, Function>(self.address(name)?) })
    }

    /// Address of an exported symbol.
    pub(crate) fn address(self, name: &str) -> Result<*mut c_void> {
        let symbol = CString::new(name)?;
        // SAFETY: the handle is open, `symbol` is a valid string.
        let address = unsafe { libc::dlsym(self.0, symbol.as_ptr()) };
        if address.is_null() {
            bail!("no function {name}: {}", last_error());
        }
        Ok(address)
    }
}

fn last_error() -> String {
    // SAFETY: a plain call; the text is this thread's until the next one.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic loader does not say why".to_owned();
    }
    // SAFETY: not null, so a valid string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

//! Start, errors, look-up of functions, the device.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::{NAME, UUID, config};
use crate::error::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_FOUND, NOT_INITIALIZED, Result, describe};
use crate::export::exports;
use crate::memory::TOTAL;
use crate::pointer::{Out, Text};

static INITIALIZED: AtomicBool = AtomicBool::new(false);

pub(super) fn initialized() -> Result {
    if INITIALIZED.load(Ordering::Acquire) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

/// Checks a device number: there is one device, 0.
pub(super) fn device(number: c_int) -> Result {
    initialized()?;
    if number == 0 { Ok(()) } else { Err(INVALID_DEVICE) }
}

/// `CUdevice_attribute`: a few that programs ask for before they do anything, with values of a middling GPU.
fn attribute(attribute: c_int) -> c_int {
    match attribute {
        1..=3 => 1_024,    // threads per block, block x and y
        4 => 64,           // block z
        5 => c_int::MAX,   // grid x
        6 | 7 => 65_535,   // grid y and z
        8 => 49_152,       // shared memory per block
        10 => 32,          // warp size
        12 => 65_536,      // registers per block
        13 => 1_500_000,   // clock, kHz
        15 | 31 | 41 => 1, // overlap, concurrent kernels, unified addressing
        16 => 16,          // multiprocessors
        39 => 2_048,       // threads per multiprocessor
        75 => 8,           // compute capability 8.6
        76 => 6,
        78 => 1, // stream priorities
        _ => 0,
    }
}

exports! {
    fn cuInit(_flags: c_uint) {
        if config().no_device == 1 {
            return Err(NO_DEVICE);
        }
        INITIALIZED.store(true, Ordering::Release);
        Ok(())
    }
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(12_080)
    }
    fn cuGetErrorName(code: c_int, name: Out<*const c_char>) {
        let (text, _) = describe(code).ok_or(INVALID_VALUE)?;
        name.set(text.as_ptr())
    }
    fn cuGetErrorString(code: c_int, string: Out<*const c_char>) {
        let (_, text) = describe(code).ok_or(INVALID_VALUE)?;
        string.set(text.as_ptr())
    }
    fn cuGetProcAddress_v2(symbol: Text, function: Out<*const c_void>, _version: c_int, flags: u64,
                           status: Out<c_int>) {
        /// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
        const PER_THREAD: u64 = 2;
        let found = crate::api::find(&symbol.get()?, flags & PER_THREAD != 0);
        // CU_GET_PROC_ADDRESS_SUCCESS or _SYMBOL_NOT_FOUND
        status.set_if_wanted(c_int::from(found.is_none()));
        function.set(found.map_or(std::ptr::null(), |export| export.address as *const c_void))?;
        found.map(|_| ()).ok_or(NOT_FOUND)
    }
    fn cuGetProcAddress(symbol: Text, function: Out<*const c_void>, _version: c_int, flags: u64) {
        let found = crate::api::find(&symbol.get()?, flags & 2 != 0);
        function.set(found.map_or(std::ptr::null(), |export| export.address as *const c_void))?;
        found.map(|_| ()).ok_or(NOT_FOUND)
    }
    fn cuDeviceGetCount(count: Out<c_int>) {
        initialized()?;
        count.set(1)
    }
    fn cuDeviceGet(number: Out<c_int>, ordinal: c_int) {
        device(ordinal)?;
        number.set(ordinal)
    }
    fn cuDeviceGetName(name: Out<c_char>, len: c_int, number: c_int) {
        device(number)?;
        name.set_text(len, NAME)
    }
    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, number: c_int) {
        device(number)?;
        uuid.set(UUID)
    }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, number: c_int) {
        device(number)?;
        uuid.set(UUID)
    }
    fn cuDeviceGetPCIBusId(id: Out<c_char>, len: c_int, number: c_int) {
        device(number)?;
        id.set_text(len, "0000:01:00.0")
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, number: c_int) {
        device(number)?;
        bytes.set(TOTAL)
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, kind: c_int, number: c_int) {
        device(number)?;
        value.set(attribute(kind))
    }
}

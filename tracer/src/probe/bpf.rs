//! The bpf(2) commands that aya 0.14 does not offer.

use std::{
    io,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use bytemuck::{NoUninit, Pod, Zeroable};

// include/uapi/linux/bpf.h
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;

/// `union bpf_attr` of BPF_MAP_UPDATE_BATCH.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// A command whose result is a file descriptor.
///
/// # Safety
/// Every pointer in `attributes` is valid for what the command does with it.
pub(super) unsafe fn open<T: NoUninit>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: by the caller's promise.
    let fd = unsafe { call(command, attributes) }?;
    // SAFETY: the kernel has just made it for us, close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// Every pointer in `attributes` is valid for what the command does with it.
unsafe fn call<T: NoUninit>(command: libc::c_int, attributes: &T) -> io::Result<RawFd> {
    // SAFETY: the attributes are initialised and as long as said; the caller vouches for what they point to.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    RawFd::try_from(result).ok().filter(|result| *result >= 0).ok_or_else(io::Error::last_os_error)
}

/// Writes elements of an array map, from index `first` on. `T` is the map's value.
///
/// # Errors
/// The kernel refuses: no such elements, or no such command (before Linux 5.6).
pub(super) fn write<T: NoUninit>(map: BorrowedFd, first: u32, values: &[T]) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    if values.is_empty() {
        return Ok(());
    }
    let count = u32::try_from(values.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let keys: Vec<u32> = (first..).take(values.len()).collect();
    let attributes = Batch {
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count,
        map: map.as_raw_fd().cast_unsigned(),
        ..Batch::zeroed()
    };
    // SAFETY: keys and values are as many as said, and of the map's types.
    unsafe { call(BPF_MAP_UPDATE_BATCH, &attributes) }.map(drop)
}

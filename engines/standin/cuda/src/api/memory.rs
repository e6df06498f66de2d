//! Memory and copies. Bytes move when a copy is submitted; its time passes on the stream.

use std::ffi::c_uint;

use super::context::{owner, stream};
use crate::device::config;
use crate::error::Result;
use crate::export::exports;
use crate::memory::{TOTAL, allocate, free, used};
use crate::pointer::{Address, Handle, Out, copy, fill};
use crate::timeline::Operation;

fn transfer(to: Address, from: Address, bytes: usize, handle: Handle) -> Result {
    let stream = stream(handle)?;
    copy(to, from, bytes)?;
    stream.submit(&[Operation::Copy { ns: (bytes as u64).saturating_mul(config().copy_ns_per_kib) / 1_024 }])
}

/// As a copy to pageable host memory does, also when it is called asynchronous: returns when all is done.
fn transfer_and_wait(to: Address, from: Address, bytes: usize, handle: Handle) -> Result {
    transfer(to, from, bytes, handle)?;
    stream(handle)?.synchronize()
}

const LEGACY: Handle = std::ptr::null_mut();

exports! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        owner()?;
        total.set(TOTAL)?;
        free.set(TOTAL - used())
    }
    fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) {
        owner()?;
        address.set(allocate(bytes)?)
    }
    fn cuMemFree_v2(address: Address) {
        owner()?;
        free(address)
    }
    fn cuMemHostAlloc(address: Out<Address>, bytes: usize, _flags: c_uint) {
        owner()?;
        address.set(allocate(bytes)?)
    }
    fn cuMemFreeHost(address: Address) {
        owner()?;
        free(address)
    }
    fn cuMemcpyHtoD_v2(to: Address, from: Address, bytes: usize) {
        transfer_and_wait(to, from, bytes, LEGACY)
    }
    fn cuMemcpyDtoH_v2(to: Address, from: Address, bytes: usize) {
        transfer_and_wait(to, from, bytes, LEGACY)
    }
    fn cuMemcpyHtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) {
        transfer(to, from, bytes, stream)
    }
    fn cuMemcpyHtoDAsync_v2_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) {
        transfer(to, from, bytes, stream)
    }
    fn cuMemcpyDtoHAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) {
        transfer_and_wait(to, from, bytes, stream)
    }
    fn cuMemcpyDtoHAsync_v2_ptsz(to: Address, from: Address, bytes: usize, stream: Handle) {
        transfer_and_wait(to, from, bytes, stream)
    }
    fn cuMemsetD8Async(to: Address, value: u8, bytes: usize, handle: Handle) {
        let stream = stream(handle)?;
        fill(to, value, bytes)?;
        stream.submit(&[Operation::Copy { ns: (bytes as u64).saturating_mul(config().copy_ns_per_kib) / 10_240 }])
    }
}

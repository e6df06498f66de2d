//! Streams.

use std::ffi::{c_int, c_uint};

use super::context::{owner, stream};
use crate::error::Result;
use crate::export::exports;
use crate::pointer::{Handle, Out};
use crate::timeline::{EVENTS, Operation, STREAMS, Stream};

fn create() -> Result<Handle> {
    let owner = owner()?;
    Ok(STREAMS.insert(|handle| Stream::new(handle, owner)))
}

fn wait_event(handle: Handle, event: Handle) -> Result {
    let event = EVENTS.get(event)?;
    stream(handle)?.submit(&[Operation::Wait(event)])
}

exports! {
    fn cuStreamCreate(handle: Out<Handle>, _flags: c_uint) {
        handle.set(create()?)
    }
    fn cuStreamCreateWithPriority(handle: Out<Handle>, _flags: c_uint, _priority: c_int) {
        handle.set(create()?)
    }
    fn cuStreamDestroy_v2(handle: Handle) {
        STREAMS.remove(handle)?;
        Ok(())
    }
    fn cuStreamSynchronize(handle: Handle) {
        stream(handle)?.synchronize()
    }
    fn cuStreamSynchronize_ptsz(handle: Handle) {
        stream(handle)?.synchronize()
    }
    fn cuStreamQuery(handle: Handle) {
        stream(handle)?.query()
    }
    fn cuStreamQuery_ptsz(handle: Handle) {
        stream(handle)?.query()
    }
    fn cuStreamWaitEvent(handle: Handle, event: Handle, _flags: c_uint) {
        wait_event(handle, event)
    }
    fn cuStreamWaitEvent_ptsz(handle: Handle, event: Handle, _flags: c_uint) {
        wait_event(handle, event)
    }
    fn cuStreamIsCapturing(handle: Handle, status: Out<c_int>) {
        status.set(stream(handle)?.capturing() as c_int)
    }
    fn cuStreamIsCapturing_ptsz(handle: Handle, status: Out<c_int>) {
        status.set(stream(handle)?.capturing() as c_int)
    }
}

//! Events.

use std::ffi::c_uint;

use super::context::{owner, stream};
use crate::device::config;
use crate::error::Result;
use crate::export::exports;
use crate::fault;
use crate::pointer::{Handle, Out};
use crate::timeline::{EVENTS, Event, Operation};

/// CU_EVENT_DISABLE_TIMING
const DISABLE_TIMING: c_uint = 2;

fn record(event: Handle, handle: Handle) -> Result {
    let event = EVENTS.get(event)?;
    let fault = if event.timed { fault::Record::begin()? } else { fault::Record::default() };
    event.set_glitch(fault.glitch_ns);
    stream(handle)?.submit(&[Operation::Record(event)])?;
    fault.end();
    Ok(())
}

fn elapsed_ms(begin: Handle, end: Handle) -> Result<f32> {
    fault::compare()?;
    Event::elapsed_ms(&*EVENTS.get(begin)?, &*EVENTS.get(end)?, config())
}

exports! {
    fn cuEventCreate(handle: Out<Handle>, flags: c_uint) {
        let owner = owner()?;
        fault::create()?;
        handle.set(EVENTS.insert(|handle| Event::new(handle, owner, flags & DISABLE_TIMING == 0)))
    }
    fn cuEventDestroy_v2(handle: Handle) {
        EVENTS.remove(handle)?;
        Ok(())
    }
    fn cuEventRecord(event: Handle, stream: Handle) {
        record(event, stream)
    }
    fn cuEventRecord_ptsz(event: Handle, stream: Handle) {
        record(event, stream)
    }
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) {
        record(event, stream)
    }
    fn cuEventRecordWithFlags_ptsz(event: Handle, stream: Handle, _flags: c_uint) {
        record(event, stream)
    }
    fn cuEventQuery(event: Handle) {
        fault::query(EVENTS.get(event)?.query())
    }
    fn cuEventSynchronize(event: Handle) {
        EVENTS.get(event)?.synchronize()
    }
    fn cuEventElapsedTime(ms: Out<f32>, begin: Handle, end: Handle) {
        ms.set(elapsed_ms(begin, end)?)
    }
    fn cuEventElapsedTime_v2(ms: Out<f32>, begin: Handle, end: Handle) {
        ms.set(elapsed_ms(begin, end)?)
    }
}

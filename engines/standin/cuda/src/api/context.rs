//! Contexts: the primary one and others, and each thread's current one.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{device, initialized};
use crate::error::{INVALID_CONTEXT, INVALID_VALUE, Result};
use crate::export::exports;
use crate::handle::Table;
use crate::pointer::{Handle, Out};
use crate::timeline::{Owner, STREAMS, Stream};

static CONTEXTS: Table<Context> = Table::new(0x5e01);

struct Context {
    owner: Arc<Owner>,
    /// The stream of handle null.
    legacy: Arc<Stream>,
}

/// The primary context's handle, as a number, and how often it is retained.
static PRIMARY: Mutex<(u64, u32)> = Mutex::new((0, 0));

thread_local! {
    /// The calling thread's contexts, current one last.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

fn create() -> Handle {
    CONTEXTS.insert(|handle| {
        let owner = Arc::new(Owner { context: handle as u64, destroyed: AtomicBool::new(false) });
        Context { legacy: Arc::new(Stream::new(std::ptr::null_mut(), Arc::clone(&owner))), owner }
    })
}

fn destroy(context: Handle) -> Result {
    let context = CONTEXTS.remove(context).map_err(|_| INVALID_CONTEXT)?;
    context.owner.destroyed.store(true, Ordering::Release);
    Ok(())
}

fn top() -> Handle {
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0)) as Handle
}

fn current() -> Result<Arc<Context>> {
    initialized()?;
    CONTEXTS.get(top()).map_err(|_| INVALID_CONTEXT)
}

/// The calling thread's current context.
pub(super) fn owner() -> Result<Arc<Owner>> {
    current().map(|context| Arc::clone(&context.owner))
}

/// The stream of a handle; null, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` are the current context's own one.
pub(super) fn stream(handle: Handle) -> Result<Arc<Stream>> {
    if handle as usize <= 2 {
        current().map(|context| Arc::clone(&context.legacy))
    } else {
        STREAMS.get(handle)
    }
}

exports! {
    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, number: c_int) {
        device(number)?;
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        if primary.1 == 0 {
            primary.0 = create() as u64;
        }
        context.set(primary.0 as Handle)?;
        primary.1 += 1;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(number: c_int) {
        device(number)?;
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        primary.1 = primary.1.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if primary.1 == 0 { destroy(primary.0 as Handle) } else { Ok(()) }
    }
    fn cuDevicePrimaryCtxReset_v2(number: c_int) {
        device(number)?;
        let mut primary = PRIMARY.lock().unwrap_or_else(PoisonError::into_inner);
        if primary.1 == 0 {
            return Ok(());
        }
        primary.1 = 0;
        destroy(primary.0 as Handle)
    }
    fn cuDevicePrimaryCtxGetState(number: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        device(number)?;
        flags.set(0)?;
        active.set(c_int::from(PRIMARY.lock().unwrap_or_else(PoisonError::into_inner).1 > 0))
    }
    fn cuCtxCreate_v2(context: Out<Handle>, _flags: c_uint, number: c_int) {
        device(number)?;
        let handle = create();
        STACK.with_borrow_mut(|stack| stack.push(handle as u64));
        context.set(handle)
    }
    fn cuCtxDestroy_v2(context: Handle) {
        initialized()?;
        destroy(context)?;
        STACK.with_borrow_mut(|stack| stack.retain(|&handle| handle != context as u64));
        Ok(())
    }
    fn cuCtxGetCurrent(context: Out<Handle>) {
        initialized()?;
        context.set(top())
    }
    fn cuCtxSetCurrent(context: Handle) {
        initialized()?;
        if !context.is_null() {
            CONTEXTS.get(context).map_err(|_| INVALID_CONTEXT)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(context as u64);
            }
        });
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: Handle) {
        initialized()?;
        CONTEXTS.get(context).map_err(|_| INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| stack.push(context as u64));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        initialized()?;
        let handle = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        context.set_if_wanted(handle as Handle);
        Ok(())
    }
    fn cuCtxGetDevice(number: Out<c_int>) {
        current()?;
        number.set(0)
    }
    fn cuCtxGetId(context: Handle, id: Out<u64>) {
        let handle = if context.is_null() { top() } else { context };
        CONTEXTS.get(handle).map_err(|_| INVALID_CONTEXT)?;
        id.set(handle as u64 & u64::from(u32::MAX))
    }
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }
    fn cuCtxSynchronize() {
        let context = current()?;
        context.legacy.synchronize()?;
        let id = context.owner.context;
        STREAMS.all().iter().filter(|stream| stream.owner.context == id).try_for_each(|stream| stream.synchronize())
    }
    fn cuStreamGetCtx(handle: Handle, context: Out<Handle>) {
        context.set(stream(handle)?.owner.context as Handle)
    }
    fn cuStreamGetId(handle: Handle, id: Out<u64>) {
        id.set(stream(handle)?.handle & u64::from(u32::MAX))
    }
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        // Modes are not modelled: every thread has the mildest, CU_STREAM_CAPTURE_MODE_RELAXED.
        mode.set(2).map_err(|_| INVALID_VALUE)
    }
}

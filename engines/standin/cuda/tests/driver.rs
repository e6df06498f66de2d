//! The driver API: event times, errors, capture.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use common::{Driver, Handle, INVALID_HANDLE, NOT_READY, SUCCESS, call};

/// Default quantum of the device clock, in ms.
const QUANTUM_MS: f32 = 500e-6;
const MS: u64 = 1_000_000;

/// Elapsed ms, within one quantum and the rounding of f32.
fn assert_ms(got: Result<f32, c_int>, expected: f32) {
    assert!((got.unwrap() - expected).abs() <= 1.01 * QUANTUM_MS, "{got:?} is not {expected} ms");
}

#[test]
fn elapsed_time_is_the_modelled_one() {
    let driver = Driver::new();
    let (stream, kernel) = (driver.stream(), driver.busy_kernel());
    let events = [(); 4].map(|()| driver.event(0));
    // While the first kernel runs the rest is queued: no gaps.
    assert_eq!(driver.launch(kernel, 5 * MS, stream), SUCCESS);
    for (event, ms) in events.iter().zip([1, 7, 0]) {
        assert_eq!(driver.record(*event, stream), SUCCESS);
        assert_eq!(driver.launch(kernel, ms * MS, stream), SUCCESS);
    }
    assert_eq!(driver.record(events[3], stream), SUCCESS);
    assert_eq!(driver.synchronize(stream), SUCCESS);
    assert_eq!(call!(driver, cuEventQuery(events[3] => Handle)), SUCCESS);
    assert_ms(driver.elapsed(events[0], events[1]), 1.0);
    assert_ms(driver.elapsed(events[1], events[2]), 7.0);
    assert_ms(driver.elapsed(events[2], events[3]), 0.0);
    assert_ms(driver.elapsed(events[3], events[0]), -8.0);
}

#[test]
fn unfinished_and_bad_events_are_refused() {
    let driver = Driver::new();
    let (stream, kernel) = (driver.stream(), driver.busy_kernel());
    let (begin, end, fresh, untimed) = (driver.event(0), driver.event(0), driver.event(0), driver.event(2));
    // Longer than any pause of this thread: what follows stays unfinished.
    assert_eq!(driver.record(begin, stream), SUCCESS);
    assert_eq!(driver.launch(kernel, 600_000 * MS, stream), SUCCESS);
    assert_eq!(driver.record(end, stream), SUCCESS);
    assert_eq!(driver.record(untimed, stream), SUCCESS);
    assert_eq!(call!(driver, cuEventQuery(end => Handle)), NOT_READY);
    assert_eq!(call!(driver, cuStreamQuery(stream => Handle)), NOT_READY);
    assert_eq!(call!(driver, cuEventSynchronize(begin => Handle)), SUCCESS);
    assert_eq!(driver.elapsed(begin, end), Err(NOT_READY));
    assert_eq!(driver.elapsed(begin, untimed), Err(INVALID_HANDLE));
    assert_eq!(driver.elapsed(fresh, begin), Err(INVALID_HANDLE));
    assert_eq!(driver.elapsed(end, fresh), Err(INVALID_HANDLE));
    assert_eq!(call!(driver, cuEventQuery(fresh => Handle)), SUCCESS);
    for bad in [null_mut(), stream, 7 as Handle] {
        assert_eq!(driver.record(bad, stream), INVALID_HANDLE);
        assert_eq!(call!(driver, cuEventQuery(bad => Handle)), INVALID_HANDLE);
    }
    assert_eq!(call!(driver, cuEventDestroy_v2(begin => Handle)), SUCCESS);
    assert_eq!(driver.elapsed(begin, end), Err(INVALID_HANDLE));
}

#[test]
fn a_stream_waits_for_anothers_event() {
    let driver = Driver::new();
    let (one, two, kernel) = (driver.stream(), driver.stream(), driver.busy_kernel());
    let (begin, middle, end) = (driver.event(0), driver.event(0), driver.event(0));
    assert_eq!(driver.launch(kernel, MS, one), SUCCESS);
    assert_eq!(driver.record(begin, one), SUCCESS);
    assert_eq!(driver.launch(kernel, 5 * MS, one), SUCCESS);
    assert_eq!(driver.record(middle, one), SUCCESS);
    assert_eq!(call!(driver, cuStreamWaitEvent(two => Handle, middle => Handle, 0 => c_uint)), SUCCESS);
    assert_eq!(driver.launch(kernel, MS, two), SUCCESS);
    assert_eq!(driver.record(end, two), SUCCESS);
    assert_eq!(call!(driver, cuCtxSynchronize()), SUCCESS);
    assert_ms(driver.elapsed(begin, end), 6.0);
}

#[test]
fn captured_work_runs_when_the_graph_is_launched() {
    let driver = Driver::new();
    let (stream, kernel) = (driver.stream(), driver.busy_kernel());
    let (begin, end, inside) = (driver.event(0), driver.event(0), driver.event(0));
    let (mut graph, mut executable, mut status): (Handle, Handle, c_int) = (null_mut(), null_mut(), -1);
    assert_eq!(call!(driver, cuStreamBeginCapture_v2(stream => Handle, 0 => c_int)), SUCCESS);
    call!(driver, cuStreamIsCapturing(stream => Handle, &raw mut status => *mut c_int));
    assert_eq!(status, 1);
    for _ in 0..3 {
        assert_eq!(driver.launch(kernel, 2 * MS, stream), SUCCESS);
    }
    assert_eq!(driver.record(inside, stream), SUCCESS);
    assert_eq!(call!(driver, cuEventQuery(inside => Handle)), 907);
    assert_eq!(call!(driver, cuStreamEndCapture(stream => Handle, &raw mut graph => *mut Handle)), SUCCESS);
    assert_eq!(
        call!(driver, cuGraphInstantiateWithFlags(&raw mut executable => *mut Handle, graph => Handle, 0 => u64)),
        SUCCESS
    );
    assert_eq!(driver.launch(kernel, MS, stream), SUCCESS);
    assert_eq!(driver.record(begin, stream), SUCCESS);
    assert_eq!(call!(driver, cuGraphLaunch(executable => Handle, stream => Handle)), SUCCESS);
    assert_eq!(driver.record(end, stream), SUCCESS);
    assert_eq!(driver.synchronize(stream), SUCCESS);
    assert_ms(driver.elapsed(begin, end), 6.0);
    assert_ms(driver.elapsed(inside, end), 0.0);
}

#[test]
fn waiting_for_a_capturing_stream_spoils_the_capture() {
    let driver = Driver::new();
    let stream = driver.stream();
    let mut graph: Handle = null_mut();
    assert_eq!(call!(driver, cuStreamBeginCapture_v2(stream => Handle, 0 => c_int)), SUCCESS);
    assert_eq!(driver.synchronize(stream), 900);
    assert_eq!(call!(driver, cuStreamEndCapture(stream => Handle, &raw mut graph => *mut Handle)), 901);
    assert!(graph.is_null());
    assert_eq!(driver.synchronize(stream), SUCCESS);
}

#[test]
fn what_a_destroyed_context_owned_is_refused() {
    let driver = Driver::new();
    let mut context: Handle = null_mut();
    assert_eq!(
        call!(driver, cuCtxCreate_v2(&raw mut context => *mut Handle, 0 => c_uint, 0 => c_int)),
        SUCCESS
    );
    let (stream, event) = (driver.stream(), driver.event(0));
    assert_eq!(driver.record(event, stream), SUCCESS);
    assert_eq!(call!(driver, cuCtxDestroy_v2(context => Handle)), SUCCESS);
    assert_eq!(driver.record(event, stream), 709);
    assert_eq!(call!(driver, cuEventQuery(event => Handle)), 709);
    // The context that was current before is current again.
    let other = driver.stream();
    assert_eq!(driver.record(driver.event(0), other), SUCCESS);
    assert_eq!(driver.record(event, other), 709);
}

#[test]
fn functions_are_found_where_they_are_exported() {
    let driver = Driver::new();
    let look_up = |name: &std::ffi::CStr, flags: u64| {
        let (mut address, mut status): (*const c_void, c_int) = (std::ptr::null(), -1);
        let code = call!(driver, cuGetProcAddress_v2(
            name.as_ptr().cast() => *const u8, &raw mut address => *mut *const c_void, 12_080 => c_int, flags => u64,
            &raw mut status => *mut c_int,
        ));
        (code, status, address as Handle)
    };
    assert_eq!(look_up(c"cuLaunchKernel", 0), (0, 0, driver.symbol("cuLaunchKernel")));
    assert_eq!(look_up(c"cuLaunchKernel", 2), (0, 0, driver.symbol("cuLaunchKernel_ptsz")));
    assert_eq!(look_up(c"cuEventElapsedTime", 0), (0, 0, driver.symbol("cuEventElapsedTime_v2")));
    assert_eq!(look_up(c"cuNoSuchThing", 0), (500, 1, null_mut()));
}

#[test]
fn device_says_that_it_is_simulated() {
    let driver = Driver::new();
    let mut name = [0u8; 64];
    let mut uuid = [0u8; 16];
    assert_eq!(
        call!(driver, cuDeviceGetName(name.as_mut_ptr() => *mut u8, 64 => c_int, 0 => c_int)),
        SUCCESS
    );
    assert_eq!(call!(driver, cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], 0 => c_int)), SUCCESS);
    assert_eq!(&name[..19], b"SimGPU (simulated)\0");
    assert_eq!(&uuid[..6], b"SIMGPU");
    // SAFETY: the symbol is a u32.
    assert_eq!(unsafe { *driver.symbol("tracer_standin").cast::<u32>() }, 1);
}

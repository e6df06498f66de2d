//! Launches of CUDA graphs: engines that replay a step as one graph call `cuGraphLaunch`, and never `enqueueV3`.
//!
//! Asked for by the environment ([`SETTING`]), since it is `--engine cuda_graph` that makes launches steps, and an
//! engine may launch dozens of graphs per step. The shims come into the program's hands in three ways: as this
//! library's own exports, which programs that link libcuda get; from `dlsym` ([`crate::interpose`]); and from
//! `cuGetProcAddress`, which gets a shim too. Each stands for the function that the driver itself gave out.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_void},
    sync::atomic::{AtomicU8, AtomicUsize, Ordering},
};

use crate::{driver::Handle, hook::guard, interpose, originals::Originals, report, step};

/// Environment variable: graph launches are timed unless it is missing, empty or 0.
const SETTING: &CStr = c"TRACER_INJECT_GRAPHS";

/// `CUresult cuGraphLaunch(CUgraphExec, CUstream)`.
type Launch = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) -> c_int;
/// `CUresult cuGetProcAddress_v2(name, function, version, flags, status)`; its first version has no status, and takes
/// no notice of a fifth register.
type Lookup = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// What stream 0 means to a function: the legacy stream (0), or the calling thread's (CU_STREAM_PER_THREAD).
type DefaultStream = usize;
const LEGACY: DefaultStream = 0;
const PER_THREAD: DefaultStream = 2;
/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
const FLAG_PER_THREAD: u64 = 2;
/// CUDA_ERROR_NOT_FOUND
const NOT_FOUND: c_int = 500;

/// Different functions of one kind in one process: the export, what `cuGetProcAddress` gives out, those of a second
/// copy of the driver. Beyond these, the program gets the driver's own.
const SHIMS: usize = 4;

static LAUNCHES: Originals<SHIMS> = Originals::new();
static LAUNCHES_PER_THREAD: Originals<SHIMS> = Originals::new();
static LOOKUPS: Originals<SHIMS> = Originals::new();

const LAUNCH: [Launch; SHIMS] =
    [launch::<0, LEGACY>, launch::<1, LEGACY>, launch::<2, LEGACY>, launch::<3, LEGACY>];
const LAUNCH_PER_THREAD: [Launch; SHIMS] =
    [launch::<0, PER_THREAD>, launch::<1, PER_THREAD>, launch::<2, PER_THREAD>, launch::<3, PER_THREAD>];
const LOOKUP: [Lookup; SHIMS] = [lookup::<0>, lookup::<1>, lookup::<2>, lookup::<3>];

thread_local! {
    /// Whether this thread is in a step, whose launches are parts of it. Needs no allocation in a library that is loaded
    /// with the program, and is only touched in such: elsewhere nothing has a shim.
    static IN_STEP: Cell<bool> = const { Cell::new(false) };
}

/// Whether graph launches are to be timed. Asked before the constructor has run, too.
fn is_wanted() -> bool {
    static WANTED: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 2;
    let known = WANTED.load(Ordering::Relaxed);
    if known != UNKNOWN {
        return known == 1;
    }
    // SAFETY: the name is a string; what is found stays until the program changes its environment.
    let value = unsafe { libc::getenv(SETTING.as_ptr()) };
    // SAFETY: a value is a string.
    let wanted = !value.is_null() && !matches!(unsafe { CStr::from_ptr(value) }.to_bytes(), b"" | b"0");
    WANTED.store(wanted.into(), Ordering::Relaxed);
    wanted
}

/// Whether launches may come to our shims.
pub(crate) fn is_hooked() -> bool {
    LAUNCHES.get(0) != 0 || LAUNCHES_PER_THREAD.get(0) != 0
}

/// The functions that have shims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    Launch(DefaultStream),
    Lookup,
}

impl Known {
    /// The function of this name, if launches are wanted.
    ///
    /// # Safety
    /// `name` must be null or a string.
    pub(crate) unsafe fn named(name: *const c_char) -> Option<Self> {
        if name.is_null() {
            return None;
        }
        // SAFETY: by this function's contract.
        let known = match unsafe { CStr::from_ptr(name) }.to_bytes() {
            b"cuGraphLaunch" => Self::Launch(LEGACY),
            b"cuGraphLaunch_ptsz" => Self::Launch(PER_THREAD),
            b"cuGetProcAddress" | b"cuGetProcAddress_v2" => Self::Lookup,
            _ => return None,
        };
        is_wanted().then_some(known)
    }

    /// The shim for a function of the driver; `None`: there are no more.
    pub(crate) fn shim(self, function: *mut c_void) -> Option<*mut c_void> {
        let function = function as usize;
        Some(match self {
            Self::Launch(LEGACY) => LAUNCH[LAUNCHES.claim(function)?] as *mut c_void,
            Self::Launch(_) => LAUNCH_PER_THREAD[LAUNCHES_PER_THREAD.claim(function)?] as *mut c_void,
            Self::Lookup => LOOKUP[LOOKUPS.claim(function)?] as *mut c_void,
        })
    }
}

/// Stands for a `cuGraphLaunch`.
///
/// # Safety
/// As the driver's function; only reachable where [`Known::shim`] gave it out.
unsafe extern "C-unwind" fn launch<const PLACE: usize, const DEFAULT: DefaultStream>(
    graph: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let originals = if DEFAULT == PER_THREAD { &LAUNCHES_PER_THREAD } else { &LAUNCHES };
    // SAFETY: `Known::shim` put the address of a function of this type there.
    let original = unsafe { std::mem::transmute::<usize, Launch>(originals.get(PLACE)) };
    if report::listening() {
        // SAFETY: the caller's arguments, passed on.
        return unsafe { timed(original, DEFAULT, graph, stream) };
    }
    // SAFETY: as above.
    unsafe { original(graph, stream) }
}

/// A launch between two events, unless it is part of a step.
///
/// # Safety
/// As [`launch`].
#[cold]
#[inline(never)]
unsafe extern "C-unwind" fn timed(
    original: Launch,
    default: DefaultStream,
    graph: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    if IN_STEP.get() {
        // SAFETY: the caller's arguments, passed on.
        return unsafe { original(graph, stream) };
    }
    let on: Handle = if stream.is_null() { default } else { stream as usize };
    let open = guard(|| step::begin(on)).flatten();
    // The driver may have been led to this library's export of the function, and so come here once more.
    let in_step = InStep::enter();
    // SAFETY: as above.
    let result = unsafe { original(graph, stream) };
    drop(in_step);
    guard(|| step::end(open));
    result
}

/// While it lives, launches of this thread are parts of a step.
pub(crate) struct InStep(bool);

impl InStep {
    pub(crate) fn enter() -> Self {
        Self(is_hooked() && !IN_STEP.replace(true))
    }

    /// To be kept by others: whether it entered.
    pub(crate) fn into_raw(self) -> bool {
        let entered = self.0;
        std::mem::forget(self);
        entered
    }

    pub(crate) fn from_raw(entered: bool) -> Self {
        Self(entered)
    }
}

impl Drop for InStep {
    fn drop(&mut self) {
        if self.0 {
            IN_STEP.set(false);
        }
    }
}

/// Stands for a `cuGetProcAddress` of either version.
///
/// # Safety
/// As the driver's function.
unsafe extern "C-unwind" fn lookup<const PLACE: usize>(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: `Known::shim` put the address of a function of this type there.
    let original = unsafe { std::mem::transmute::<usize, Lookup>(LOOKUPS.get(PLACE)) };
    // SAFETY: the caller's arguments, passed on: callers of the first version leave anything in the fifth register, which
    // that version does not read.
    let result = unsafe { original(name, function, version, flags, status) };
    if result != 0 || function.is_null() {
        return result;
    }
    // SAFETY: the driver found a function of this name, so that it is a string.
    let Some(known) = (unsafe { Known::named(name) }) else { return result };
    let known = match known {
        Known::Launch(_) if flags & FLAG_PER_THREAD != 0 => Known::Launch(PER_THREAD),
        known => known,
    };
    // SAFETY: the driver has just written there.
    let found = unsafe { function.read() };
    if let Some(shim) = (!found.is_null()).then(|| known.shim(found)).flatten() {
        // SAFETY: as above.
        unsafe { function.write(shim) };
    }
    result
}

/// For programs that link libcuda: their calls come here, since this library is before it.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cuGraphLaunch(graph: *mut c_void, stream: *mut c_void) -> c_int {
    static FUNCTION: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: the caller's arguments, passed on.
    unsafe { linked(&FUNCTION, c"cuGraphLaunch", graph, stream) }
}

/// As [`cuGraphLaunch`], where stream 0 is the thread's own.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cuGraphLaunch_ptsz(graph: *mut c_void, stream: *mut c_void) -> c_int {
    static FUNCTION: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: the caller's arguments, passed on.
    unsafe { linked(&FUNCTION, c"cuGraphLaunch_ptsz", graph, stream) }
}

/// Calls the function of this name of the driver, or its shim; `function` keeps which.
///
/// # Safety
/// As the driver's function.
unsafe fn linked(function: &AtomicUsize, name: &CStr, graph: *mut c_void, stream: *mut c_void) -> c_int {
    let mut address = function.load(Ordering::Acquire);
    if address == 0 {
        let Some(found) = interpose::of_driver(name) else { return NOT_FOUND };
        // SAFETY: the name is a string.
        let known = unsafe { Known::named(name.as_ptr()) };
        address = known.and_then(|known| known.shim(found)).unwrap_or(found) as usize;
        function.store(address, Ordering::Release);
    }
    // SAFETY: the driver's function of this name has this type, and so has its shim.
    let call = unsafe { std::mem::transmute::<usize, Launch>(address) };
    // SAFETY: the caller's arguments, passed on.
    unsafe { call(graph, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_do_not_nest() {
        LAUNCHES.claim(1);
        let outer = InStep::enter();
        let inner = InStep::enter();
        assert!(outer.0 && !inner.0);
        drop(inner);
        assert!(IN_STEP.get());
        drop(outer);
        assert!(!IN_STEP.get());
    }

    #[test]
    fn nothing_is_known_unless_asked_for() {
        // SAFETY: strings.
        unsafe {
            assert_eq!(Known::named(c"cuGraphLaunch".as_ptr()), None);
            assert_eq!(Known::named(std::ptr::null()), None);
        }
    }
}

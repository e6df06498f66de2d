//! How this library begins, and how it survives forks and exits.

use std::{
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    clock, context, driver, find::Finder, graph, harvest::Harvester, layers, nvtx, own, report, step::DONE,
};

/// Between rounds while a tracer listens; steps wait this long for their events to be read, at most.
const ROUND: Duration = Duration::from_millis(2);
/// Between looks whether a tracer listens, or an engine was mapped in the first [`EAGER_NS`].
const PAUSE: Duration = Duration::from_millis(100);
/// Between looks for engines later, ns.
const LOOK_NS: u64 = 1_000_000_000;
const EAGER_NS: u64 = 60_000_000_000;
/// How long an exiting program waits for a round to end, in steps of 0.1 ms.
const EXIT_STEPS: usize = 200;

/// Whether our thread lives in this process.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// The process is exiting: no more calls of the driver.
static STOP: AtomicBool = AtomicBool::new(false);
/// Our thread may be inside the driver.
static BUSY: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Runs when the library is loaded, before the program's own code.
extern "C" fn constructor() {
    report::init();
    // SAFETY: the functions may run around any fork, see there.
    let prepared =
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    if prepared != 0 {
        // No memory. Without these, a child could be left with a lock that nobody holds.
        return;
    }
    ensure_thread();
}

/// Entry point of libraries named by CUDA_INJECTION64_PATH: the driver calls it when it is initialised. 1: success.
#[unsafe(no_mangle)]
extern "C" fn InitializeInjection() -> libc::c_int {
    ensure_thread();
    1
}

/// Whether our thread is inside the dynamic loader, or the process is forking.
///
/// glibc does not give a child the lock back that `dl_iterate_phdr` takes: a fork meanwhile would leave the child unable
/// to load libraries or to throw exceptions.
static LOADER: AtomicBool = AtomicBool::new(false);

/// Calls into the dynamic loader, at a time when no thread forks.
pub(crate) fn with_loader<T>(call: impl FnOnce() -> T) -> T {
    before_fork();
    let result = call();
    after_fork();
    result
}

/// Waits for our thread to leave the loader: microseconds, ten times a second at most.
extern "C" fn before_fork() {
    while LOADER.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
}

extern "C" fn after_fork() {
    LOADER.store(false, Ordering::Release);
}

/// The child has one thread and no usable driver: everything begins anew, with the first step or with the driver's
/// call of [`InitializeInjection`]. Starting a thread here could deadlock in an allocator that is not ready yet.
extern "C" fn after_fork_in_child() {
    RUNNING.store(false, Ordering::Relaxed);
    BUSY.store(false, Ordering::Relaxed);
    after_fork();
    context::reset();
    layers::reset();
    DONE.reset();
}

/// Starts our thread unless it runs already.
pub(crate) fn ensure_thread() {
    if RUNNING.load(Ordering::Relaxed) || RUNNING.swap(true, Ordering::Relaxed) {
        return;
    }
    // The program's signals are not for our thread, which inherits this mask.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid for writes; the first is filled before it is read.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    // Without memory for a thread the program goes on untimed.
    let _ = std::thread::Builder::new().name("tracer-inject".into()).stack_size(1 << 20).spawn(|| {
        if std::panic::catch_unwind(run).is_err() {
            report::disable_by_panic();
        }
    });
    if masked {
        // SAFETY: the call above filled the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
}

/// No more calls of the driver.
pub(crate) fn stop() {
    STOP.store(true, Ordering::SeqCst);
}

/// Registered after the driver was initialised, and so called before the driver's own exit handlers.
extern "C" fn at_exit() {
    stop();
    for _ in 0..EXIT_STEPS {
        if !BUSY.load(Ordering::SeqCst) {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Our thread.
fn run() {
    let mut finder = Finder::new();
    let mut harvester = Harvester::default();
    let (begin, mut next_look, mut was_active) = (clock::monotonic(), 0, false);
    while !STOP.load(Ordering::SeqCst) {
        let now = clock::monotonic();
        let eager = !finder.is_hooked() && now - begin < EAGER_NS;
        if (eager || now >= next_look) && !report::is_disabled() {
            finder.look();
            next_look = now + LOOK_NS;
        }
        if report::is_disabled() {
            finder.unhook();
        }
        let hooked = finder.is_hooked() || graph::is_hooked() || own::is_used();
        let (driver, mut pause) = (hooked.then(driver).flatten(), PAUSE);
        let has_something_to_say =
            hooked || finder.problem().is_some() || report::is_disabled() || nvtx::clients() > 0;
        let active = has_something_to_say && report::listening();
        if active {
            if let Some(driver) = driver
                && !report::is_disabled()
            {
                round(|| harvester.work(driver));
                pause = ROUND;
            }
            harvester.report(finder.problem(), hooked);
        } else if was_active {
            harvester.rest();
            report::end_session();
        } else if !eager && !has_something_to_say {
            pause = Duration::from_nanos(LOOK_NS);
        }
        was_active = active;
        std::thread::sleep(pause);
    }
}

/// The driver, once the program has loaded it.
fn driver() -> Option<&'static driver::Driver> {
    driver::open().unwrap_or_else(|missing| {
        report::disable_because(format!("this libcuda has no function for {missing}"));
        None
    })
}

/// Calls of the driver that a program's exit waits for.
fn round(work: impl FnOnce()) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: the handler is part of this library, which is never unloaded.
        unsafe { libc::atexit(at_exit) };
    });
    BUSY.store(true, Ordering::SeqCst);
    if !STOP.load(Ordering::SeqCst) {
        work();
    }
    BUSY.store(false, Ordering::SeqCst);
}

//! How this library begins, and how it survives forks and exits.

use std::{
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{clock, context, driver, find::Finder, harvest::Harvester, report, step::DONE};

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
    // SAFETY: the function may run in any child, see there. A failure means that there is no memory: children are then
    // not told, and look to us as this process does, without a thread.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    ensure_thread();
}

/// Entry point of libraries named by CUDA_INJECTION64_PATH: the driver calls it when it is initialised. 1: success.
#[unsafe(no_mangle)]
extern "C" fn InitializeInjection() -> libc::c_int {
    ensure_thread();
    1
}

/// The child has one thread and no usable driver: everything begins anew, with the first step or with the driver's
/// call of [`InitializeInjection`]. Starting a thread here could deadlock in an allocator that is not ready yet.
extern "C" fn after_fork_in_child() {
    RUNNING.store(false, Ordering::Relaxed);
    BUSY.store(false, Ordering::Relaxed);
    context::reset();
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
    let _ = std::thread::Builder::new().name("tracer-inject".into()).stack_size(1 << 20).spawn(run);
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
        if now >= next_look && !report::is_disabled() {
            finder.look();
            let eager = !finder.is_hooked() && now - begin < EAGER_NS;
            next_look = now + if eager { 0 } else { LOOK_NS };
            if let Some(problem) = finder.problem() {
                report::disable_because(problem.to_owned());
            }
        }
        if report::is_disabled() && finder.is_hooked() {
            finder.unhook();
        }
        let driver = driver();
        let active = report::listening() && (finder.is_hooked() || report::is_disabled());
        if active {
            if let Some(driver) = driver
                && !report::is_disabled()
            {
                round(|| harvester.work(driver));
            }
            harvester.report();
        } else if was_active {
            harvester.rest();
        }
        was_active = active;
        std::thread::sleep(if active && !report::is_disabled() { ROUND } else { PAUSE });
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

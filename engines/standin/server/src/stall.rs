//! Stalls on purpose, of known cause.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;

use crate::clock::now_ns;
use crate::options::{Cause, Frequency, Stall};
use crate::random::chance;

/// How much longer the kernels of a stalled step take, in ns.
pub(crate) const GPU_NS: u64 = 30_000_000;
/// CPU time that a step needs on top when other threads take its CPU, in ns: more than the scheduler gives at a time, so
/// that it has to wait for its turn.
pub(crate) const CPU_HOST_NS: u64 = 10_000_000;
/// How long the lock is held.
const LOCK: Duration = Duration::from_millis(25);
/// How long the CPU is taken, in ns.
const CPU_NS: u64 = 40_000_000;
/// Threads that take it.
const BURNERS: u64 = 8;

/// Which steps stall, and what it takes to stall them.
#[derive(Debug)]
pub(crate) struct Stalls {
    rules: Vec<Stall>,
    seed: u64,
    lock: Option<LockHolder>,
    burners: Vec<Sender<Burn>>,
}

impl Stalls {
    /// Starts the threads that the rules need.
    pub(crate) fn new(rules: &[Stall], seed: u64) -> anyhow::Result<Self> {
        let has = |cause| rules.iter().any(|rule| rule.cause == cause);
        Ok(Self {
            rules: rules.to_vec(),
            seed,
            lock: has(Cause::Lock).then(LockHolder::start).transpose()?,
            burners: (0..if has(Cause::Cpu) { BURNERS } else { 0 })
                .map(start_burner)
                .collect::<Result<_, _>>()?,
        })
    }

    /// Whether a step stalls for this cause.
    pub(crate) fn due(&self, cause: Cause, batch_id: u64) -> bool {
        self.rules.iter().filter(|rule| rule.cause == cause).any(|rule| match rule.frequency {
            Frequency::Every(n) => batch_id.is_multiple_of(n),
            Frequency::Probability(p) => chance(self.seed, &[cause as u64, batch_id]) < p,
        })
    }

    /// Waits for a mutex that another thread holds; returns when it began to wait and when it got it.
    pub(crate) fn wait_for_lock(&self) -> Option<(u64, u64)> {
        let holder = self.lock.as_ref()?;
        holder.hold.send(()).ok()?;
        holder.held.recv().ok()?;
        let begin = now_ns();
        drop(holder.mutex.lock().unwrap_or_else(PoisonError::into_inner));
        Some((begin, now_ns()))
    }

    /// Lets other threads take the CPU that this thread is on, for a while from now. This thread stays there until the
    /// result is dropped.
    pub(crate) fn take_cpu(&self) -> Option<TakenCpu> {
        let begin = now_ns();
        // SAFETY: no preconditions.
        let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).ok()?;
        let before = affinity();
        set_affinity(&only(cpu));
        let taken = TakenCpu { begin, end: begin + CPU_NS, before };
        for burner in &self.burners {
            burner.send(Burn { cpu, until: taken.end }).ok()?;
        }
        Some(taken)
    }
}

/// While it lives, the thread stays on the CPU that is taken from it.
#[derive(Debug)]
pub(crate) struct TakenCpu {
    /// CLOCK_MONOTONIC ns.
    pub(crate) begin: u64,
    pub(crate) end: u64,
    before: libc::cpu_set_t,
}

impl Drop for TakenCpu {
    fn drop(&mut self) {
        set_affinity(&self.before);
    }
}

#[derive(Debug)]
struct LockHolder {
    mutex: Arc<Mutex<()>>,
    hold: Sender<()>,
    held: Receiver<()>,
}

impl LockHolder {
    fn start() -> anyhow::Result<Self> {
        let mutex = Arc::new(Mutex::new(()));
        let ((hold, asked), (holds, held)) = (channel(), channel());
        let theirs = Arc::clone(&mutex);
        std::thread::Builder::new()
            .name("lock-holder".to_owned())
            .spawn(move || {
                while asked.recv().is_ok() {
                    let guard = theirs.lock().unwrap_or_else(PoisonError::into_inner);
                    if holds.send(()).is_err() {
                        return;
                    }
                    std::thread::sleep(LOCK);
                    drop(guard);
                }
            })
            .context("cannot start the lock's thread")?;
        Ok(Self { mutex, hold, held })
    }
}

#[derive(Debug)]
struct Burn {
    cpu: usize,
    /// CLOCK_MONOTONIC ns.
    until: u64,
}

fn start_burner(number: u64) -> anyhow::Result<Sender<Burn>> {
    let (send, receive) = channel::<Burn>();
    std::thread::Builder::new()
        .name(format!("burner-{number}"))
        .spawn(move || {
            for burn in receive {
                set_affinity(&only(burn.cpu));
                while now_ns() < burn.until {
                    std::hint::spin_loop();
                }
            }
        })
        .context("cannot start a burner thread")?;
    Ok(send)
}

fn only(cpu: usize) -> libc::cpu_set_t {
    // SAFETY: a set of zero bits is the empty set; CPU_SET ignores numbers that are too large.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        set
    }
}

fn affinity() -> libc::cpu_set_t {
    // SAFETY: a set of zero bits is valid, and of the size that is passed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        set
    }
}

fn set_affinity(set: &libc::cpu_set_t) {
    // SAFETY: the set is valid, and of the size that is passed. If it is refused the stall is milder.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
}

//! The engine: a thread per rank; that of rank 0 also decides what each iteration does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context as _, bail};
use tracer_marks::{SLOT_NO_TOKEN, Slot};

use crate::bug::{Bug, Bugs, Order};
use crate::clock::{gettid, now_ns};
use crate::gpu::{Engine, Gpu, Stream};
use crate::options::{Cause, Serve};
use crate::random::chance;
use crate::scheduler::{Scheduler, Step};
use crate::stall::{CPU_HOST_NS, GPU_NS, Stalls};
use crate::truth::{Record, Truth};

/// A request, as the engine sees it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) key: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) max_tokens: u32,
    /// Its tokens go here.
    pub(crate) tokens: Sender<Token>,
    /// Nobody waits for it any more.
    pub(crate) cancelled: Arc<AtomicBool>,
}

/// A generated token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub(crate) index: u32,
    pub(crate) last: bool,
}

/// Requests on their way to the engine.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    waiting: Mutex<(VecDeque<Arc<Job>>, bool)>,
    changed: Condvar,
    /// Iterations so far.
    pub(crate) steps: AtomicU64,
}

impl Intake {
    /// Hands a request over; dropped, with its sender, when the engine has stopped.
    pub(crate) fn push(&self, job: Arc<Job>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.1 {
            waiting.0.push_back(job);
            self.changed.notify_one();
        }
    }

    /// Ends the engine after the step that it is in.
    pub(crate) fn stop(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.1 = true;
        waiting.0.clear();
        self.changed.notify_one();
    }

    /// Up to `most` requests; waits for one if the engine is idle. `None`: stopped.
    fn take(&self, most: usize, idle: bool) -> Option<Vec<Arc<Job>>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while idle && waiting.0.is_empty() && !waiting.1 {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        let most = most.min(waiting.0.len());
        (!waiting.1).then(|| waiting.0.drain(..most).collect())
    }
}

/// What the ranks do together.
#[derive(Clone, Debug)]
pub(crate) struct Iteration {
    batch_id: u64,
    slots: Vec<Slot>,
    gpu_ns: u64,
    host_ns: u64,
    /// Its kernels stall, on the last rank.
    gpu_stall: bool,
}

impl Iteration {
    fn new(batch_id: u64, step: &Step, options: &Serve) -> Self {
        let us = options.step_us
            + options.slot_us * step.slots.len() as f64
            + options.context_token_us * step.context_tokens as f64
            + options.prefill_token_us * step.prefill_tokens as f64;
        Self {
            batch_id,
            slots: step.slots.clone(),
            gpu_ns: (us * 1e3) as u64,
            host_ns: (options.host_us * 1e3) as u64,
            gpu_stall: false,
        }
    }
}

/// Begin and end of a call of `enqueueV3`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enqueued {
    begin_ns: u64,
    end_ns: u64,
}

/// One rank's thread.
pub(crate) struct Rank {
    rank: u32,
    tid: i32,
    pub(crate) engine: Engine,
    options: Arc<Serve>,
    truth: Truth,
}

impl Rank {
    fn new(rank: u32, gpu: &Gpu, options: &Arc<Serve>, truth: &Truth) -> anyhow::Result<Self> {
        let (options, truth) = (Arc::clone(options), truth.clone());
        Ok(Self { rank, tid: gettid(), engine: gpu.engine()?, options, truth })
    }

    /// Rank 0 once more, with a context of its own on a stream that another thread has.
    pub(crate) fn on(gpu: &Gpu, stream: Stream, options: &Arc<Serve>, truth: &Truth) -> anyhow::Result<Self> {
        let (options, truth) = (Arc::clone(options), truth.clone());
        Ok(Self { rank: 0, tid: gettid(), engine: gpu.engine_on(stream)?, options, truth })
    }

    /// Runs this rank's step of an iteration.
    fn run(&self, iteration: &Iteration) -> anyhow::Result<()> {
        let enqueued = self.enqueue(iteration)?;
        self.finish(iteration, enqueued)
    }

    /// Whether the kernels of its step stall.
    fn stalls(&self, iteration: &Iteration) -> bool {
        iteration.gpu_stall && self.rank == self.options.ranks - 1
    }

    fn is_marked(&self, batch_id: u64) -> bool {
        let withheld = chance(self.options.seed, &[BATCHES, batch_id, self.rank.into()]) * 100.0;
        !self.options.no_marks && withheld >= self.options.withhold_batches
    }

    /// Marks and enqueues this rank's step.
    pub(crate) fn enqueue(&self, iteration: &Iteration) -> anyhow::Result<Enqueued> {
        let &Iteration { batch_id, gpu_ns, host_ns, .. } = iteration;
        // Servers load a model when it is first asked for.
        self.engine.load()?;
        let stalls = self.stalls(iteration);
        // Ranks are never equally fast.
        let skew = chance(self.options.seed, &[RANKS, batch_id, self.rank.into()]) * 0.05;
        let gpu_ns = gpu_ns + (gpu_ns as f64 * skew) as u64 + if stalls { GPU_NS } else { 0 };
        self.engine.set_step(gpu_ns, self.options.kernels, host_ns);
        // Rows as long as the longest.
        let longest = iteration.slots.iter().map(|slot| slot.tokens).max().unwrap_or(0);
        let rows = iteration.slots.len() as i64;
        self.engine.set_input_shape(c"input_ids", &[rows, longest.into()]);
        anyhow::ensure!(self.engine.rows(c"logits") == rows, "logits of another batch");
        if self.is_marked(batch_id) {
            tracer_marks::batch(batch_id, self.rank, &iteration.slots);
        }
        let begin_ns = now_ns();
        self.engine.enqueue()?;
        Ok(Enqueued { begin_ns, end_ns: now_ns() })
    }

    /// Waits until the step is done.
    pub(crate) fn finish(&self, iteration: &Iteration, enqueued: Enqueued) -> anyhow::Result<()> {
        let batch_id = iteration.batch_id;
        let Enqueued { begin_ns: enqueue_begin_ns, end_ns: enqueue_end_ns } = enqueued;
        self.engine.synchronize()?;
        let sync_end_ns = now_ns();
        self.truth.push(|| Record::Step {
            batch_id,
            rank: self.rank,
            tid: self.tid,
            enqueue_begin_ns,
            enqueue_end_ns,
            sync_end_ns,
            marked: self.is_marked(batch_id),
            slots: iteration
                .slots
                .iter()
                .map(|slot| (slot.request, slot.generation_step, slot.phase))
                .collect(),
            tokens: iteration.slots.iter().map(|slot| slot.tokens).collect(),
            no_token: iteration
                .slots
                .iter()
                .filter(|s| s.flags & SLOT_NO_TOKEN != 0)
                .map(|s| s.request)
                .collect(),
        });
        if self.stalls(iteration) {
            let (begin_ns, end_ns) = (enqueue_begin_ns, sync_end_ns);
            self.truth.push(|| Record::Stall {
                cause: "gpu",
                begin_ns,
                end_ns,
                batch_id: Some(batch_id),
                key: None,
            });
        }
        Ok(())
    }
}

/// First parts of hashes, so that different decisions are independent.
const RANKS: u64 = 101;
const BATCHES: u64 = 102;

/// A rank other than 0, as rank 0 sees it.
struct Follower {
    iterations: Sender<Arc<Iteration>>,
    done: Receiver<anyhow::Result<()>>,
}

impl Follower {
    fn start(rank: u32, gpu: &Gpu, options: &Arc<Serve>, truth: &Truth) -> anyhow::Result<Self> {
        let ((iterations, todo), (done, result)) = (channel::<Arc<Iteration>>(), channel());
        let (gpu, options, truth) = (gpu.clone(), Arc::clone(options), truth.clone());
        spawn(format!("engine-{rank}"), move || match Rank::new(rank, &gpu, &options, &truth) {
            Ok(rank) => {
                _ = done.send(Ok(()));
                for iteration in todo {
                    _ = done.send(rank.run(&iteration));
                }
            }
            Err(error) => _ = done.send(Err(error)),
        })?;
        let follower = Self { iterations, done: result };
        follower.wait()?;
        Ok(follower)
    }

    fn wait(&self) -> anyhow::Result<()> {
        self.done.recv().context("the thread of a rank ended")?
    }
}

pub(crate) fn spawn<T: Send + 'static>(
    name: String,
    run: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name).spawn(run).context("cannot start an engine thread")
}

/// Starts the engine; returns once all its ranks are ready. Its thread ends with `Intake::stop`, or an error.
pub(crate) fn start(
    gpu: Gpu,
    options: Arc<Serve>,
    truth: Truth,
    intake: Arc<Intake>,
    failed: impl FnOnce() + Send + 'static,
) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
    let (ready, is_ready) = channel();
    let thread = spawn("engine-0".to_owned(), move || {
        let leader = Leader::new(&gpu, &options, &truth)?;
        _ = ready.send(());
        let result = leader.run(&intake);
        if result.is_err() {
            failed();
        }
        result
    })?;
    match is_ready.recv() {
        Ok(()) => Ok(thread),
        Err(_) => match thread.join() {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => bail!("the engine did not start"),
        },
    }
}

/// Rank 0.
struct Leader {
    rank: Rank,
    followers: Vec<Follower>,
    scheduler: Scheduler<Arc<Job>>,
    stalls: Stalls,
    bugs: Bugs,
}

impl Leader {
    fn new(gpu: &Gpu, options: &Arc<Serve>, truth: &Truth) -> anyhow::Result<Self> {
        let rank = Rank::new(0, gpu, options, truth)?;
        Ok(Self {
            bugs: Bugs::new(gpu, rank.engine.stream(), options, truth)?,
            rank,
            followers: (1..options.ranks)
                .map(|rank| Follower::start(rank, gpu, options, truth))
                .collect::<anyhow::Result<_>>()?,
            scheduler: Scheduler::new(options.max_batch, options.prefill_chunk),
            stalls: Stalls::new(&options.stall, options.seed)?,
        })
    }

    fn run(mut self, intake: &Intake) -> anyhow::Result<()> {
        let mut batch_id = 0;
        while let Some(jobs) = intake.take(self.scheduler.free(), self.scheduler.is_idle()) {
            for job in jobs {
                self.scheduler.admit(job.key, job.prompt_tokens, job.max_tokens, job);
            }
            self.scheduler.retain(|job| !job.cancelled.load(Ordering::Relaxed));
            let step = self.scheduler.plan();
            if step.slots.is_empty() {
                continue;
            }
            if batch_id == 0 {
                self.load()?;
            }
            batch_id += 1;
            if self.bugs.due(Bug::SharedStream, batch_id, step.slots.len()) {
                self.share_stream(batch_id, &step)?;
                // It has two batches.
                batch_id += 1;
            } else {
                self.iterate(batch_id, &step)?;
            }
            intake.steps.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Hands the tokens of a step out.
    fn deliver(&mut self, step: &Step) {
        for token in self.scheduler.complete(step) {
            // A request whose client has gone has no receiver.
            _ = token.job.tokens.send(Token { index: token.index, last: token.last });
        }
    }

    fn log_bug(&self, bug: Bug, batch_id: u64, other_batch_id: Option<u64>) {
        self.rank.truth.push(|| Record::Bug { bug, batch_id, other_batch_id });
    }

    /// [`Bug::SharedStream`]: half of the batch on this thread, the other half on another one, both on one stream, and
    /// nobody waits in between.
    #[inline(never)]
    fn share_stream(&mut self, batch_id: u64, step: &Step) -> anyhow::Result<()> {
        let mut mine = Iteration::new(batch_id, step, &self.rank.options);
        mine.gpu_ns /= 2;
        let slots = mine.slots.split_off(mine.slots.len() / 2);
        let other = Iteration { batch_id: batch_id + 1, slots, ..mine.clone() };
        self.log_bug(Bug::SharedStream, batch_id, Some(other.batch_id));
        let enqueued = self.rank.enqueue(&mine)?;
        self.bugs.other(Order::Step(Arc::new(other)))?;
        self.rank.finish(&mine, enqueued)?;
        self.deliver(step);
        Ok(())
    }

    /// Loads the engine's files, as servers do that load a model when it is first asked for. What is in them does not matter:
    /// the stand-in's contexts are made by functions of its own.
    fn load(&self) -> anyhow::Result<()> {
        for file in &self.rank.options.engine_file {
            std::fs::read(file).with_context(|| format!("cannot read the engine {}", file.display()))?;
        }
        Ok(())
    }

    /// Runs an iteration on all ranks.
    fn iterate(&mut self, batch_id: u64, step: &Step) -> anyhow::Result<()> {
        let mut iteration = Iteration::new(batch_id, step, &self.rank.options);
        iteration.gpu_stall = self.stalls.due(Cause::Gpu, batch_id);
        let log = |cause, (begin_ns, end_ns)| {
            let batch_id = Some(batch_id);
            self.rank.truth.push(|| Record::Stall { cause, begin_ns, end_ns, batch_id, key: None });
        };
        if self.stalls.due(Cause::Lock, batch_id)
            && let Some(times) = self.stalls.wait_for_lock()
        {
            log("lock", times);
        }
        let taken = self.stalls.due(Cause::Cpu, batch_id).then(|| self.stalls.take_cpu()).flatten();
        if let Some(taken) = &taken {
            iteration.host_ns += CPU_HOST_NS;
            log("cpu", (taken.begin, taken.end));
        }
        let iteration = Arc::new(iteration);
        for follower in &self.followers {
            follower.iterations.send(Arc::clone(&iteration)).context("the thread of a rank ended")?;
        }
        let captured = self.bugs.due(Bug::Capture, batch_id, step.slots.len());
        if captured {
            self.log_bug(Bug::Capture, batch_id, None);
            self.bugs.other(Order::BeginCapture)?;
        }
        let enqueued = self.rank.enqueue(&iteration)?;
        if captured {
            self.bugs.other(Order::EndCapture)?;
        }
        let early = self.bugs.due(Bug::EarlyOutput, batch_id, step.slots.len());
        if early {
            self.log_bug(Bug::EarlyOutput, batch_id, None);
            self.deliver(step);
        }
        self.rank.finish(&iteration, enqueued)?;
        self.followers.iter().try_for_each(Follower::wait)?;
        drop(taken);
        if !early {
            self.deliver(step);
        }
        Ok(())
    }
}

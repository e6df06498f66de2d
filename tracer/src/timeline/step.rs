//! Steps: calls of points with [`Role::Step`], with their batch, host wait and GPU span.

use std::collections::{HashMap, VecDeque};

use tracer_abi::mark::Slot;

use super::engine::StepTensors;
use super::hazard::{Enqueued, Final, Ran, Served, argument, succeeded};
use super::iteration::{IterationKey, StepEnd};
use super::layer::{self, PendingLayers};
use super::phase::Ranges;
use super::rows::{Step, Unmatched};
use super::{Clock, Timeline, Witness};
use crate::event::mark::{self, GpuLayer, GpuSpan, InjectState};
use crate::event::{Call, CallEnd, Origin, ProcessId, Role};

/// Begin, process, thread: the order in which steps are released.
pub(super) type StepKey = (u64, ProcessId, u32);

/// Batches that a thread announced and has not used; beyond this the oldest is given up.
const MAX_PENDING: usize = 64;
/// Steps of a thread that wait for a host wait; beyond this the oldest will not get one.
const MAX_UNOBSERVED: usize = 8;
/// Slots of one batch over all its marks.
const MAX_BATCH_SLOTS: usize = 1 << 16;

/// A step that is not final.
pub(super) struct OpenStep {
    call: Call,
    /// End of the enqueue; its begin when the point has no return probe.
    end_ns: u64,
    stream: u64,
    batch: Option<JoinedBatch>,
    observed_end_ns: Option<u64>,
    /// That wait was for this step's stream, and so for this step (one for an event need not be).
    observed_by_stream: bool,
    /// A host wait may still come.
    unobserved: bool,
    span: Option<GpuSpan>,
    /// Of a sampled step.
    layers: Vec<GpuLayer>,
    /// The request and the range of NVTX around it.
    nvtx_request: String,
    nvtx_range: String,
    tensors: StepTensors,
}

struct JoinedBatch {
    batch: PendingBatch,
    iteration_key: IterationKey,
    iteration: u64,
}

/// A batch mark that no step has used.
pub(super) struct PendingBatch {
    origin: Origin,
    pub(super) batch_id: u64,
    pub(super) rank: u32,
    pub(super) slots: Vec<Slot>,
    /// The request of each slot, resolved when the mark was made: the program may reuse the number.
    pub(super) requests: Vec<u64>,
}

/// State of one process.
#[derive(Default)]
pub(super) struct Program {
    pub(super) threads: HashMap<u32, Thread>,
    /// Batch ids of open iterations.
    pub(super) batches: HashMap<u64, IterationKey>,
    /// Begin of the first step that was seen.
    first_step_ns: Option<u64>,
    /// Steps without a batch mark, while none was made at all: the program may make none.
    batchless: u64,
    has_batches: bool,
    /// The injected library times steps that begin from here on.
    injected_since_ns: Option<u64>,
    pub(super) layers: PendingLayers,
}

/// State of one thread.
#[derive(Default)]
pub(super) struct Thread {
    pending: VecDeque<PendingBatch>,
    unobserved: VecDeque<StepKey>,
    /// Time and iteration of the last batch mark.
    pub(super) last_batch: Option<(u64, IterationKey)>,
    /// Begin of the newest step that got a GPU span.
    last_span_ns: u64,
    /// The ranges of NVTX that it is in.
    pub(super) ranges: Ranges,
}

impl Program {
    pub(super) fn thread(&mut self, tid: u32) -> &mut Thread {
        self.threads.entry(tid).or_default()
    }

    /// Whether no step had begun, as far as the recording knows: programs announce batches and deliver tokens while
    /// the probes are still being attached.
    pub(super) fn is_before_steps(&self, time_ns: u64) -> bool {
        self.first_step_ns.is_none_or(|first| time_ns < first)
    }
}

impl<C: Clock> Timeline<C> {
    pub(super) fn batch(&mut self, origin: Origin, mark: mark::Batch) {
        if self.programs.get(&origin.process).is_none_or(|program| !program.has_batches) {
            self.first_batch(origin);
        }
        let requests: Vec<u64> =
            mark.slots.iter().map(|slot| self.request_of(origin, slot.request)).collect();
        let thread = self.programs.entry(origin.process).or_default().thread(origin.tid);
        let part_of = thread
            .pending
            .back_mut()
            .filter(|last| mark.first_slot > 0 && (last.batch_id, last.rank) == (mark.batch_id, mark.rank));
        let mut overfull = None;
        match part_of {
            Some(last) if last.slots.len() + mark.slots.len() <= MAX_BATCH_SLOTS => {
                last.slots.extend_from_slice(&mark.slots);
                last.requests.extend_from_slice(&requests);
            }
            Some(_) => overfull = Some(mark.slots.len() as u64),
            None => thread.pending.push_back(PendingBatch {
                origin,
                batch_id: mark.batch_id,
                rank: mark.rank,
                slots: mark.slots.clone(),
                requests: requests.clone(),
            }),
        }
        let given_up = (thread.pending.len() > MAX_PENDING).then(|| thread.pending.pop_front()).flatten();
        if let Some(batch) = given_up {
            self.batch_without_step(&batch);
        }
        if let Some(slots) = overfull {
            self.counts
                .add(Unmatched::Evicted, origin, slots, || format!("slots of batch {}", mark.batch_id));
            return;
        }
        let key = self.iteration_of(origin, mark.batch_id, &mark.slots, &requests);
        if let Some(iteration) = self.iterations.get_mut(&key) {
            iteration.marked(origin.time_ns, mark.first_slot == 0);
        }
        let thread = self.programs.entry(origin.process).or_default().thread(origin.tid);
        thread.last_batch = Some((origin.time_ns, key));
    }

    pub(super) fn step_call(&mut self, call: &Call, stream_arg: Option<u8>) {
        let parent = call.parent_point.and_then(|point| self.points.get(&point));
        if parent.is_some_and(|parent| parent.role == Role::Step) {
            return;
        }
        let process = call.origin.process;
        self.programs.entry(process).or_default().first_step_ns.get_or_insert(call.begin_ns);
        let end_ns = if call.end == CallEnd::EntryOnly { call.begin_ns } else { call.end_ns };
        let inner = self.absorb_inner(call, end_ns);
        let batch = self.take_batch(call).map(|batch| self.join(batch)).or(inner);
        let key = (call.begin_ns, process, call.origin.tid);
        let stream = argument(call, stream_arg).unwrap_or(0);
        let thread = self.programs.entry(process).or_default().thread(call.origin.tid);
        let unobserved = self.has_waits;
        let (nvtx_request, nvtx_range) = thread.ranges.current();
        let owned = |name: Option<&str>| name.unwrap_or_default().to_owned();
        let (nvtx_request, nvtx_range) = (owned(nvtx_request), owned(nvtx_range));
        let mut too_old = None;
        if unobserved {
            thread.unobserved.push_back(key);
            too_old =
                (thread.unobserved.len() > MAX_UNOBSERVED).then(|| thread.unobserved.pop_front()).flatten();
        }
        if let Some(old) = too_old.and_then(|old| self.steps.get_mut(&old)) {
            old.unobserved = false;
        }
        let served = Served {
            requests: batch.as_ref().map(|joined| joined.batch.requests.clone()).unwrap_or_default(),
            name: nvtx_request.clone(),
        };
        let given_up = self.hazards.enqueued(Enqueued { key, end_ns, stream, stack: call.stack, served });
        self.given_up(call.origin, given_up);
        let step = OpenStep {
            call: *call,
            end_ns,
            stream,
            batch,
            observed_end_ns: None,
            observed_by_stream: false,
            unobserved,
            span: None,
            layers: Vec::new(),
            nvtx_request,
            nvtx_range,
            tensors: self.tensors.of(process, call.args[0]),
        };
        self.steps.insert(key, step);
    }

    /// Removes steps that ran inside this call (a forwarder probed on both ends) and gives their batch back.
    fn absorb_inner(&mut self, call: &Call, end_ns: u64) -> Option<JoinedBatch> {
        let Origin { process, tid, .. } = call.origin;
        let inside = self.steps.range((call.begin_ns, ProcessId::default(), 0)..).filter(|(key, step)| {
            (key.1, key.2) == (process, tid) && step.end_ns <= end_ns && step.call.depth > call.depth
        });
        let keys: Vec<StepKey> = inside.map(|(key, _)| *key).collect();
        let mut first = None;
        for key in keys {
            let batch = self.steps.remove(&key).and_then(|step| step.batch);
            if first.is_none() {
                first = batch;
            } else if let Some(other) = batch {
                self.leave(&other);
            }
        }
        first
    }

    /// The batch that the thread announced last before the call began; those before it have no step.
    fn take_batch(&mut self, call: &Call) -> Option<PendingBatch> {
        let thread = self.programs.entry(call.origin.process).or_default().thread(call.origin.tid);
        let at = thread.pending.iter().rposition(|batch| batch.origin.time_ns <= call.begin_ns)?;
        let skipped: Vec<PendingBatch> = thread.pending.drain(..at).collect();
        let batch = thread.pending.pop_front();
        for batch in &skipped {
            self.batch_without_step(batch);
        }
        batch
    }

    fn join(&mut self, batch: PendingBatch) -> JoinedBatch {
        let iteration_key = self.iteration_of(batch.origin, batch.batch_id, &batch.slots, &batch.requests);
        let next = &mut self.next_iteration;
        let iteration = self.iterations.get_mut(&iteration_key).map_or(u64::MAX, |open| {
            open.step_joined(|| {
                *next += 1;
                *next - 1
            })
        });
        JoinedBatch { batch, iteration_key, iteration }
    }

    fn leave(&mut self, joined: &JoinedBatch) {
        if let Some(iteration) = self.iterations.get_mut(&joined.iteration_key) {
            iteration.step_left();
        }
        self.counts.add(Unmatched::BatchWithoutStep, joined.batch.origin, 1, || joined.batch.name());
    }

    fn batch_without_step(&mut self, batch: &PendingBatch) {
        if let Some(iteration) = self.open_iteration(batch.origin.process, batch.batch_id) {
            iteration.pending_gone();
        }
        let program = self.programs.get(&batch.origin.process);
        let is_old = program.is_none_or(|program| program.is_before_steps(batch.origin.time_ns));
        let kind = if is_old { Unmatched::BeforeFirstStep } else { Unmatched::BatchWithoutStep };
        self.counts.add(kind, batch.origin, 1, || batch.name());
    }

    /// A thread is gone, or the recording is over.
    pub(super) fn forget_thread(&mut self, process: ProcessId, tid: u32) {
        let Some(program) = self.programs.get_mut(&process) else { return };
        let Thread { pending, ranges, .. } = program.threads.remove(&tid).unwrap_or_default();
        let is_last = program.threads.is_empty() && program.batches.is_empty();
        if is_last {
            self.programs.remove(&process);
        }
        self.close_ranges(ranges);
        self.forget_pending(pending);
    }

    pub(super) fn forget_all_pending(&mut self) {
        let threads = self.programs.values_mut().flat_map(|program| program.threads.values_mut());
        let pending: Vec<_> = threads.map(|thread| std::mem::take(&mut thread.pending)).collect();
        for pending in pending {
            self.forget_pending(pending);
        }
    }

    /// The last announcement was still ahead of its step: it is not counted.
    fn forget_pending(&mut self, mut pending: VecDeque<PendingBatch>) {
        if let Some(ahead) = pending.pop_back()
            && let Some(iteration) = self.open_iteration(ahead.origin.process, ahead.batch_id)
        {
            iteration.pending_gone();
        }
        for batch in &pending {
            self.batch_without_step(batch);
        }
    }

    pub(super) fn wait_call(&mut self, call: &Call, stream_arg: Option<u8>) {
        let stream = argument(call, stream_arg);
        match call.end {
            CallEnd::Returned if succeeded(call) => self.hazards.waited(call, stream),
            CallEnd::Returned => {}
            // When it returns is not seen.
            CallEnd::EntryOnly => return self.hazards.ordered(&Call { end_ns: call.begin_ns, ..*call }),
            _ => return,
        }
        let Some(program) = self.programs.get_mut(&call.origin.process) else { return };
        let Some(thread) = program.threads.get_mut(&call.origin.tid) else { return };
        let steps = &mut self.steps;
        thread.unobserved.retain(|key| {
            let Some(step) = steps.get_mut(key) else { return false };
            if stream.is_some_and(|stream| stream != step.stream) || call.end_ns < step.end_ns {
                return true;
            }
            step.observed_end_ns = Some(call.end_ns);
            step.observed_by_stream = stream.is_some() && succeeded(call);
            step.unobserved = false;
            false
        });
    }

    pub(super) fn gpu_span(&mut self, origin: Origin, span: GpuSpan) {
        let program = self.programs.entry(origin.process).or_default();
        let since = program.injected_since_ns.get_or_insert(span.enqueue_begin_ns);
        *since = span.enqueue_begin_ns.min(*since);
        let layers = program.layers.remove(&span.sequence).unwrap_or_default();
        if span.enqueue_begin_ns < self.first_ns {
            return;
        }
        let Some(key) = self.step_of_span(origin.process, &span) else {
            self.counts
                .add(Unmatched::GpuSpanWithoutStep, origin, 1, || format!("gpu span {}", span.sequence));
            return;
        };
        if let Some(step) = self.steps.get_mut(&key) {
            step.span = Some(span);
            step.layers = layers;
        }
        let thread = self.programs.entry(origin.process).or_default().thread(key.2);
        thread.last_span_ns = thread.last_span_ns.max(key.0);
    }

    /// The step of the span's thread within the span's host interval; where thread ids do not agree (another pid
    /// namespace), the only step of the process in it.
    fn step_of_span(&self, process: ProcessId, span: &GpuSpan) -> Option<StepKey> {
        let from = (span.enqueue_begin_ns, ProcessId::default(), 0);
        let until = (
            span.enqueue_end_ns.max(span.enqueue_begin_ns),
            ProcessId { tgid: u32::MAX, start_ticks: u64::MAX },
            u32::MAX,
        );
        let inside = self.steps.range(from..=until).filter(|(key, step)| {
            key.1 == process && step.span.is_none() && step.end_ns <= span.enqueue_end_ns
        });
        let keys: Vec<StepKey> = inside.map(|(key, _)| *key).collect();
        match (keys.iter().find(|key| key.2 == span.tid), keys.as_slice()) {
            (Some(key), _) | (None, [key]) => Some(*key),
            _ => None,
        }
    }

    pub(super) fn inject_state(&mut self, origin: Origin, state: &InjectState) {
        let InjectState { active, reason, .. } = state;
        if !reason.is_empty() {
            self.counts.gpu_times_off(origin.process, reason);
        }
        let program = self.programs.entry(origin.process).or_default();
        program.injected_since_ns = active.then(|| program.injected_since_ns.unwrap_or(origin.time_ns));
    }

    pub(super) fn release_steps(&mut self) {
        while let Some((&key, step)) = self.steps.first_key_value() {
            let waits = step.unobserved || (step.span.is_none() && self.expects_span(&key));
            let patience = if waits { self.config.hold_ns } else { 0 };
            let due = (key.0.saturating_add(self.config.order_ns)).max(step.end_ns.saturating_add(patience));
            if self.now_ns < due {
                return;
            }
            self.release_step(key);
        }
    }

    pub(super) fn evict_step(&mut self) {
        if let Some((&key, step)) = self.steps.first_key_value() {
            self.counts.add(Unmatched::Evicted, step.call.origin, 1, || "open step".to_owned());
            self.release_step(key);
        }
    }

    fn expects_span(&self, key: &StepKey) -> bool {
        let since = self.programs.get(&key.1).and_then(|program| program.injected_since_ns);
        since.is_some_and(|since| since <= key.0)
    }

    /// Whether the step should have had a span by now. At the end of a recording the last steps of a thread may
    /// simply not have been harvested.
    fn misses_span(&self, key: &StepKey) -> bool {
        let thread = || self.programs.get(&key.1).and_then(|program| program.threads.get(&key.2));
        self.expects_span(key)
            && (!self.finishing || thread().is_some_and(|thread| thread.last_span_ns > key.0))
    }

    /// Counts a step that no batch mark preceded, once it is known that the program makes them.
    fn step_without_batch(&mut self, origin: Origin) {
        let program = self.programs.entry(origin.process).or_default();
        if program.has_batches {
            let name = || format!("step at {} ns", origin.time_ns);
            self.counts.add(Unmatched::StepWithoutBatch, origin, 1, name);
        } else {
            program.batchless += 1;
        }
    }

    /// The program makes batch marks: its steps without one count.
    fn first_batch(&mut self, origin: Origin) {
        let program = self.programs.entry(origin.process).or_default();
        program.has_batches = true;
        let before = std::mem::take(&mut program.batchless);
        self.counts
            .add(Unmatched::StepWithoutBatch, origin, before, || "steps before the first batch".to_owned());
    }

    fn release_step(&mut self, key: StepKey) {
        let Some(step) = self.steps.remove(&key) else { return };
        let origin = Origin { time_ns: step.call.begin_ns, ..step.call.origin };
        let gpu = step.span.as_ref().and_then(|span| self.clock.map(origin.process, span));
        if let (Some(span), Some(end_ns), true) = (&step.span, step.observed_end_ns, step.observed_by_stream)
        {
            self.clock.witness(origin.process, span, Witness::WaitReturned(end_ns));
        }
        if let (Some(span), None) = (&step.span, gpu) {
            self.counts.add(Unmatched::GpuSpanUnaligned, origin, 1, || format!("gpu span {}", span.sequence));
        }
        if step.span.is_none() && self.misses_span(&key) {
            self.counts.add(Unmatched::StepWithoutGpuSpan, origin, 1, || format!("step at {} ns", key.0));
        }
        if step.batch.is_none() {
            self.step_without_batch(origin);
        }
        let id = self.next_step;
        self.next_step += 1;
        let done = Final { id, is_timed: step.span.is_some(), gpu };
        let incomplete_until_ns = self.hazards.released(key, step.stream, done);
        let (batch_id, iteration, rank, slots) = match step.batch {
            Some(JoinedBatch { batch, iteration_key, iteration }) => {
                let end_ns = gpu.map(|gpu| gpu.end_ns).or(step.observed_end_ns).unwrap_or(step.end_ns);
                if let Some(open) = self.iterations.get_mut(&iteration_key) {
                    let ran = Ran {
                        step: id,
                        process: origin.process,
                        stream: step.stream,
                        tid: origin.tid,
                        stack: step.call.stack,
                        incomplete_until_ns,
                    };
                    open.step_released(StepEnd { id, rank: batch.rank, begin_ns: key.0, end_ns, ran });
                }
                (Some(batch.batch_id), Some(iteration), batch.rank, batch.slots)
            }
            None => (None, None, 0, Vec::new()),
        };
        if let Some(span) = step.span.filter(|span| span.sampled) {
            self.out.layers.extend(layer::rows(id, &span, gpu, &step.layers));
        }
        let row = Step {
            id,
            process: origin.process,
            tid: origin.tid,
            point: step.call.point,
            rank,
            batch_id,
            iteration,
            stream: step.stream,
            begin_ns: step.call.begin_ns,
            end_ns: step.call.end_ns,
            end: step.call.end,
            observed_end_ns: step.observed_end_ns,
            device_uuid: step.span.map(|span| span.device_uuid),
            gpu,
            sampled: step.span.is_some_and(|span| span.sampled),
            engine: self.engines.at(origin.process, origin.time_ns),
            engine_version: self
                .points
                .get(&step.call.point)
                .map(|point| point.version.clone())
                .unwrap_or_default(),
            nvtx_request: step.nvtx_request,
            nvtx_range: step.nvtx_range,
            quantization: step.tensors.quantization().to_owned(),
            input_shapes: step.tensors.input_shapes,
            output_shapes: step.tensors.output_shapes,
            data_types: step.tensors.data_types,
            slots,
        };
        self.exchanges.steps.add(&row, step.call.args[0]);
        self.out.steps.push(row);
    }
}

impl PendingBatch {
    fn name(&self) -> String {
        format!("batch {} rank {}", self.batch_id, self.rank)
    }
}

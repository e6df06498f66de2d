//! Recordings of a server that never ran: as long as wanted, and nothing about them is left to chance.
//!
//! One engine thread runs steps of a full batch; a second thread hands their tokens over. Some steps wait for a lock, some
//! are slow on the GPU. The device's clock runs as the host's.

use std::path::Path;

use anyhow::Result;
use tracer::capture::{Meta, Writer, finish};
use tracer::event::mark::{self, Mark};
use tracer::event::{
    Call, CallEnd, Event, Frame, HostClock, Mapping, MarkEvent, Origin, Point, Process, ProcessAction,
    ProcessId, Role, Sched, Stack, StackCut, StackId,
};
use tracer_abi::mark::{ClockReading, DECODE, FINISH_LENGTH, PREFILL, Slot};

use crate::random::SplitMix;

/// CLOCK_MONOTONIC ns at which the recording begins.
pub const START_NS: u64 = 10_000_000_000;
const BURST_NS: u64 = 500_000_000;
const BRACKET_NS: u64 = 50_000_000;
const PROCESS: ProcessId = ProcessId { tgid: 40, start_ticks: 7 };
const DEVICE: [u8; 16] = *b"synthetic-device";
const ENGINE_TID: u32 = 41;
const SERVER_TID: u32 = 42;
/// Threads that sleep and wake and have nothing to do with any token.
const OTHER_TID: u32 = 100;
const STEP: u32 = 1;
const WAIT: u32 = 2;
const STREAM: u64 = 7;

/// What is recorded.
#[derive(Clone, Debug)]
pub struct Recording {
    pub tokens: usize,
    pub tokens_per_request: u32,
    /// Requests in each step.
    pub batch: usize,
    /// Sleeps of other threads during each step.
    pub other_sleeps: usize,
    /// Written before the number of each request's id and tenant, and as the name of the program's file.
    pub prefix: String,
}

/// Writes the raw tables, and finishes the capture; returns how many events it holds.
///
/// # Errors
/// When they cannot be written.
pub fn record(dir: &Path, recording: &Recording) -> Result<u64> {
    let mut meta = Meta::here(vec!["tracer".into()], "synthetic server".into());
    // Its addresses mean nothing in the running kernel.
    meta.boot_id = String::new();
    meta.started_monotonic_ns = START_NS;
    let mut server = Server::new(Writer::create(dir, meta)?, recording);
    server.definitions()?;
    while server.delivered < recording.tokens {
        server.step()?;
    }
    server.clock_until(server.now_ns + BURST_NS)?;
    let (events, now_ns) = (server.events, server.now_ns);
    let mut writer = server.writer;
    writer.set_ended(now_ns);
    writer.close()?;
    finish(dir)?;
    Ok(events)
}

/// A request in the batch.
struct Open {
    request: u64,
    next_token: u32,
    tokens: u32,
}

struct Server<'a> {
    writer: Writer,
    recording: &'a Recording,
    random: SplitMix,
    now_ns: u64,
    steps: u64,
    requests: u64,
    batch: Vec<Open>,
    delivered: usize,
    events: u64,
    bursts: u64,
    brackets: u64,
}

impl<'a> Server<'a> {
    fn new(writer: Writer, recording: &'a Recording) -> Self {
        Self {
            writer,
            recording,
            random: SplitMix::new(7),
            now_ns: START_NS,
            steps: 0,
            requests: 0,
            batch: Vec::new(),
            delivered: 0,
            events: 0,
            bursts: 0,
            brackets: 0,
        }
    }

    fn write(&mut self, event: &Event) -> Result<()> {
        self.events += 1;
        Ok(self.writer.write(event)?)
    }

    fn mark(&mut self, tid: u32, time_ns: u64, mark: Mark) -> Result<()> {
        self.write(&Event::Mark(MarkEvent { origin: origin(tid, time_ns), mark }))
    }

    fn definitions(&mut self) -> Result<()> {
        self.clock_until(START_NS + 1)?;
        for (tid, comm) in [(PROCESS.tgid, "server"), (ENGINE_TID, "engine"), (SERVER_TID, "http")] {
            let action = ProcessAction::Found;
            let origin = origin(tid, START_NS);
            self.write(&Event::Process(Process {
                origin,
                action,
                parent_tgid: 1,
                parent_tid: 1,
                comm: comm.into(),
            }))?;
        }
        for (id, name, role, stream_arg) in
            [(STEP, "enqueueV3", Role::Step, 1), (WAIT, "cuStreamSynchronize", Role::Wait, 0)]
        {
            self.write(&Event::Point(Point {
                id,
                time_ns: START_NS,
                process: PROCESS,
                engine: "synthetic".into(),
                name: name.into(),
                role,
                library: "/opt/synthetic/libengine.so".into(),
                version: String::new(),
                build_id: vec![id as u8; 20],
                offset: 64,
                placement: "nop5".into(),
                has_return: true,
                stream_arg: Some(stream_arg),
                simulated: true,
            }))?;
        }
        self.write(&Event::Mapping(Mapping {
            id: 0,
            time_ns: START_NS,
            process: PROCESS,
            begin: 0x1000,
            end: 0x9000,
            offset: 0,
            inode: 1,
            path: format!("/opt/{0}/{0}program", self.recording.prefix.replace('/', "|")),
            build_id: vec![9; 20],
        }))?;
        for (id, depth) in [(0, 12), (1, 30)] {
            let frame = |i: u64| Frame { mapping: Some(0), offset: 0x100 * (id + 1) + 0x10 * i, code: None };
            self.write(&Event::Stack(Stack {
                id: StackId(id),
                time_ns: START_NS,
                process: PROCESS,
                kernel: Vec::new(),
                user: (0..depth).map(frame).collect(),
                cut: (id == 1).then_some(StackCut::Depth),
                frame_pointer_steps: 0,
            }))?;
        }
        Ok(())
    }

    /// Bursts and brackets up to a time.
    fn clock_until(&mut self, until_ns: u64) -> Result<()> {
        while START_NS + self.bursts * BURST_NS < until_ns {
            let begin_ns = START_NS + self.bursts * BURST_NS;
            let reading = |j: u64| ClockReading {
                h0_raw_ns: begin_ns + j * 10_000,
                h1_raw_ns: begin_ns + j * 10_000 + 8_000,
                elapsed_ms_bits: (j as f32 / 100.0).to_bits(),
                _pad: 0,
            };
            let burst = mark::ClockBurst {
                device_uuid: DEVICE,
                context: 1,
                epoch: 0,
                base: self.bursts as u32,
                rebase_ms: (self.bursts > 0).then_some(BURST_NS as f32 / 1e6),
                readings: (0..8).map(reading).collect(),
            };
            self.mark(ENGINE_TID, begin_ns + 90_000, Mark::ClockBurst(burst))?;
            self.bursts += 1;
        }
        while START_NS + self.brackets * BRACKET_NS < until_ns {
            let ns = START_NS + self.brackets * BRACKET_NS;
            let is_long = self.brackets.is_multiple_of(20);
            self.write(&Event::HostClock(HostClock {
                raw_before_ns: ns,
                monotonic_ns: ns + 20,
                raw_after_ns: ns + 40,
                realtime_ns: is_long.then_some(ns + 1_796_000_000_000_000_000),
                boottime_ns: is_long.then_some(ns),
            }))?;
            self.brackets += 1;
        }
        Ok(())
    }

    fn admit(&mut self) -> Result<()> {
        while self.batch.len() < self.recording.batch {
            let request = self.requests;
            self.requests += 1;
            let begin = mark::RequestBegin {
                request,
                received_ns: Some(
                    self.now_ns.saturating_sub(self.random.below(900_000) as u64).max(START_NS),
                ),
                prompt_tokens: Some(16),
                request_id: format!("{}{request}", self.recording.prefix),
                tenant_id: format!("{}tenant-{}", self.recording.prefix, request % 7),
                model: "synthetic".into(),
                ..mark::RequestBegin::default()
            };
            self.mark(SERVER_TID, self.now_ns, Mark::RequestBegin(Box::new(begin)))?;
            // The first requests are shorter, so that not all end together.
            let whole = u64::from(self.recording.tokens_per_request);
            let shorter = if request < self.recording.batch as u64 { request % whole } else { 0 };
            self.batch.push(Open { request, next_token: 0, tokens: (whole - shorter) as u32 });
        }
        Ok(())
    }

    fn sleep(
        &mut self,
        tid: u32,
        off_ns: u64,
        wake_ns: u64,
        on_ns: u64,
        waker: u32,
        stack: Option<u64>,
    ) -> Result<()> {
        self.write(&Event::Sched(Sched {
            origin: origin(tid, on_ns),
            off_ns,
            wake_ns: Some(wake_ns),
            waker_tgid: PROCESS.tgid,
            waker_tid: waker,
            prev_state: 1,
            syscall: None,
            preempted: false,
            open: false,
            stack: stack.map(StackId),
        }))
    }

    /// A step of all requests of the batch, and the delivery of its tokens.
    fn step(&mut self) -> Result<()> {
        self.steps += 1;
        let idle_ns = self.now_ns;
        self.clock_until(self.now_ns)?;
        self.admit()?;
        if self.steps.is_multiple_of(53) {
            // A lock that somebody held.
            let woken_ns = self.now_ns + 12_000_000 + self.random.below(4_000_000) as u64;
            self.sleep(ENGINE_TID, self.now_ns, woken_ns, woken_ns + 40_000, OTHER_TID, Some(0))?;
            self.now_ns = woken_ns + 40_000;
        }
        let begin_ns = self.now_ns + 30_000;
        let slots: Vec<Slot> = self
            .batch
            .iter()
            .zip(0..)
            .map(|(open, sample_offset)| Slot {
                request: open.request,
                sample_offset,
                generation_step: open.next_token,
                tokens: if open.next_token == 0 { 16 } else { 1 },
                phase: if open.next_token == 0 { PREFILL } else { DECODE },
                ..Slot::default()
            })
            .collect();
        let slot_count = slots.len() as u32;
        let batch = mark::Batch { batch_id: self.steps, rank: 0, slot_count, first_slot: 0, slots };
        self.mark(ENGINE_TID, begin_ns - 5_000, Mark::Batch(batch))?;
        let enqueued_ns = begin_ns + 150_000 + self.random.below(50_000) as u64;
        self.call(STEP, begin_ns, enqueued_ns, [1, STREAM])?;
        let slow = if self.steps.is_multiple_of(71) { 5 } else { 1 };
        let gpu_begin_ns = begin_ns + 60_000;
        let span_ns = slow * (4_000_000 + self.random.below(1_500_000) as u64);
        let gpu_end_ns = gpu_begin_ns + span_ns;
        let back_ns = gpu_end_ns + 25_000 + self.random.below(10_000) as u64;
        for i in 0..self.recording.other_sleeps as u64 {
            let at_ns = enqueued_ns + i * (gpu_end_ns - enqueued_ns) / self.recording.other_sleeps as u64;
            self.sleep(OTHER_TID + (i % 16) as u32, at_ns, at_ns + 900, at_ns + 1_000, ENGINE_TID, Some(1))?;
        }
        self.sleep(ENGINE_TID, enqueued_ns + 5_000, gpu_end_ns + 10_000, back_ns - 2_000, OTHER_TID, None)?;
        self.call(WAIT, enqueued_ns + 2_000, back_ns, [STREAM, 0])?;
        let (base, base_ns) = self.base(begin_ns);
        let span = mark::GpuSpan {
            device_uuid: DEVICE,
            context: 1,
            stream: STREAM,
            sequence: self.steps,
            enqueue_begin_ns: begin_ns - 1_000,
            enqueue_end_ns: enqueued_ns + 1_000,
            tid: ENGINE_TID,
            epoch: 0,
            base,
            begin_ms: (gpu_begin_ns - base_ns) as f32 / 1e6,
            span_ms: span_ns as f32 / 1e6,
            sampled: false,
        };
        self.mark(ENGINE_TID, back_ns + 1_000, Mark::GpuSpan(span))?;
        self.sleep(SERVER_TID, idle_ns, back_ns + 4_000, back_ns + 12_000, ENGINE_TID, Some(1))?;
        self.deliver(back_ns + 15_000)?;
        self.now_ns = back_ns + 20_000;
        Ok(())
    }

    /// The base that holds at a time, and when it was.
    fn base(&self, ns: u64) -> (u32, u64) {
        let base = (ns - START_NS) / BURST_NS;
        let base = base.min(self.bursts - 1);
        (base as u32, START_NS + base * BURST_NS + 4_000)
    }

    fn call(&mut self, point: u32, begin_ns: u64, end_ns: u64, args: [u64; 2]) -> Result<()> {
        self.write(&Event::Call(Call {
            origin: origin(ENGINE_TID, end_ns),
            point,
            parent_point: None,
            depth: 0,
            begin_ns,
            end_ns,
            end: CallEnd::Returned,
            sp: 0,
            args: [args[0], args[1], 0, 0, 0, 0],
            ret: 0,
            stack: None,
        }))
    }

    fn deliver(&mut self, mut at_ns: u64) -> Result<()> {
        let mut batch = std::mem::take(&mut self.batch);
        for open in &mut batch {
            let token = mark::Token { request: open.request, choice: 0, index: open.next_token, stack: None };
            self.mark(SERVER_TID, at_ns, Mark::Token(token))?;
            self.delivered += 1;
            open.next_token += 1;
            if open.next_token == open.tokens {
                let end = mark::RequestEnd {
                    request: open.request,
                    output_tokens: open.next_token,
                    finish_reason: FINISH_LENGTH,
                };
                self.mark(SERVER_TID, at_ns + 300, Mark::RequestEnd(end))?;
            }
            at_ns += 700 + self.random.below(400) as u64;
        }
        batch.retain(|open| open.next_token < open.tokens);
        self.batch = batch;
        Ok(())
    }
}

const fn origin(tid: u32, time_ns: u64) -> Origin {
    Origin { time_ns, process: PROCESS, tid, cpu: 0 }
}

//! A capture as a Perfetto trace.
//!
//! Tracks: each request (and choice) with its tokens and the parts of their latency; each thread with its steps, and where
//! it was off the CPU; each stream of a GPU with its spans; NVML's readings as counters. A flow leads from a step over its
//! GPU span to the delivery of each token that it generated. What is not exact says so in `bound_ns`.

pub mod proto;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use proto::{ProcessDescriptor, ThreadDescriptor, TrackDescriptor, UNIT_COUNT, UNIT_SIZE_BYTES};
use writer::{Args, Track, Writer};

use super::{Caption, Material, request_name};
use crate::capture::OffCpu;
use crate::event::{GpuSample, ProcessId};
use crate::timeline::budget::{Budget, ByToken};
use crate::timeline::rows::{Request, Step, Token};

/// Writes the trace; `off_cpu` in any order.
///
/// # Errors
/// When it cannot be written, or `off_cpu` not be read.
pub fn trace(
    out: impl Write,
    material: &Material,
    caption: &Caption,
    off_cpu: impl Iterator<Item = crate::capture::Result<OffCpu>>,
) -> anyhow::Result<()> {
    let meta = &material.tables.meta;
    let realtime_ns = material.tables.wall.realtime_ns(meta.started_ns);
    let mut trace = Trace {
        material,
        steps: material.tables.steps.iter().map(|step| (step.id, step)).collect(),
        out: Writer::begin(out, meta.started_ns, realtime_ns)?,
        processes: BTreeMap::new(),
        threads: BTreeMap::new(),
        devices: BTreeMap::new(),
    };
    trace.caption(caption)?;
    trace.requests()?;
    trace.steps()?;
    trace.off_cpu(off_cpu)?;
    trace.counters()?;
    Ok(trace.out.finish()?)
}

struct Trace<'a, W> {
    material: &'a Material,
    steps: HashMap<u64, &'a Step>,
    out: Writer<W>,
    processes: BTreeMap<ProcessId, Track>,
    threads: BTreeMap<(ProcessId, u32), Track>,
    devices: BTreeMap<[u8; 16], Track>,
}

impl<W: Write> Trace<'_, W> {
    /// A slice over the whole recording that says what it is.
    fn caption(&mut self, caption: &Caption) -> io::Result<()> {
        let meta = &self.material.tables.meta;
        let track = self.out.track(None, "Recording", TrackDescriptor::default())?;
        let args =
            vec![("facts", caption.facts.join(" · ").into()), ("notes", caption.notes.join(" · ").into())];
        let name = if meta.simulated { "SIMULATED GPU" } else { "recording" };
        self.out.begin_slice(track, meta.started_ns, name, args, Vec::new())?;
        self.out.end_slice(track, meta.started_ns + caption.span_ns)
    }

    /// Tokens of each request in order, each with the parts of its latency.
    fn requests(&mut self) -> io::Result<()> {
        let tables = &self.material.tables;
        let parent = self.out.track(None, "Requests", TrackDescriptor::default())?;
        let budgets = ByToken::new(&tables.budgets);
        let batches = tables.batches();
        let requests: HashMap<u64, &Request> =
            tables.requests.iter().map(|request| (request.id, request)).collect();
        let mut tokens: Vec<(u64, &Token)> = (1..).zip(&tables.tokens).collect();
        tokens.sort_by_key(|(_, token)| (token.request, token.choice, token.index));
        for tokens in tokens.chunk_by(|(_, a), (_, b)| (a.request, a.choice) == (b.request, b.choice)) {
            let Some((_, first)) = tokens.first() else { continue };
            let request = requests.get(&first.request).copied();
            let name = request.map_or(format!("#{}", first.request), request_name);
            let name = if first.choice == 0 { name } else { format!("{name} choice {}", first.choice) };
            let track = self.out.track(Some(parent), &name, TrackDescriptor::default())?;
            let last_ns = tokens.iter().map(|(_, token)| token.delivered_ns).max().unwrap_or(0);
            let request = request.filter(|_| first.choice == 0);
            if let Some(request) = request {
                self.out.begin_slice(track, request.received_ns, "request", about(request), Vec::new())?;
            }
            for (flow, token) in tokens {
                self.token(track, *flow, token, budgets.of(token), &batches)?;
            }
            if let Some(request) = request {
                self.out
                    .end_slice(track, request.end_ns.unwrap_or(0).max(last_ns).max(request.received_ns))?;
            }
        }
        Ok(())
    }

    fn token(
        &mut self,
        track: Track,
        flow: u64,
        token: &Token,
        budget: Option<&Budget>,
        batches: &HashMap<u64, u64>,
    ) -> io::Result<()> {
        let begin_ns = token.latency_ns.and_then(|latency_ns| token.delivered_ns.checked_sub(latency_ns));
        if let Some(begin_ns) = begin_ns {
            let name = format!("token {}", token.index);
            let mut args: Args = vec![("latency_ns", (token.delivered_ns - begin_ns).into())];
            args.extend(token.step.map(|step| ("step", step.into())));
            args.extend(token.step.and_then(|step| batches.get(&step)).map(|n| ("batch_size", (*n).into())));
            args.push(("phase", if token.prefill { "prefill" } else { "decode" }.into()));
            args.push(("source", token.source.name().into()));
            args.push(("joined_by", token.join.name().into()));
            args.extend(budget.filter(|budget| budget.bound_ns > 0).map(|b| ("bound_ns", b.bound_ns.into())));
            self.out.begin_slice(track, begin_ns, &name, args, Vec::new())?;
            for segment in self.material.budgets.segments(token) {
                let mut args: Args = Vec::new();
                args.extend(segment.blocked.map(|on| ("blocked_on", on.name().into())));
                args.extend(
                    segment
                        .stack
                        .map(|stack| ("stack", self.material.stacks.off_cpu(Some(stack)).join("; ").into())),
                );
                args.extend(segment.step.map(|step| ("step", step.into())));
                let gpu = segment.step.filter(|_| segment.label.is_gpu());
                let gpu = gpu.and_then(|step| self.steps.get(&step)?.gpu);
                args.extend(gpu.map(|gpu| ("bound_ns", gpu.bound_ns.into())));
                self.out.begin_slice(track, segment.begin_ns, segment.label.name(), args, Vec::new())?;
                self.out.end_slice(track, segment.end_ns)?;
            }
        }
        let flows = token.step.filter(|step| self.steps.contains_key(step)).map(|_| flow);
        self.out.instant(track, token.delivered_ns, "delivered", Vec::new(), flows.into_iter().collect())?;
        begin_ns.map_or(Ok(()), |_| self.out.end_slice(track, token.delivered_ns))
    }

    /// Steps on their threads and streams.
    fn steps(&mut self) -> io::Result<()> {
        let tables = &self.material.tables;
        let mut flows: HashMap<u64, Vec<u64>> = HashMap::new();
        for (flow, token) in (1..).zip(&tables.tokens) {
            if let Some(step) = token.step {
                flows.entry(step).or_default().push(flow);
            }
        }
        let batches = tables.batches();
        let mut streams: BTreeMap<([u8; 16], u64), (Track, u64)> = BTreeMap::new();
        for step in &tables.steps {
            let flows = flows.remove(&step.id).unwrap_or_default();
            let mut args: Args = vec![("step", step.id.into()), ("rank", step.rank.into())];
            args.extend(batches.get(&step.id).map(|n| ("batch_size", (*n).into())));
            args.extend(step.iteration.map(|iteration| ("iteration", iteration.into())));
            let thread = self.thread(step.process, step.tid)?;
            self.out.begin_slice(thread, step.begin_ns, "step", args, flows.clone())?;
            self.out.end_slice(thread, step.end_ns.max(step.begin_ns))?;
            let (Some(gpu), Some(device)) = (step.gpu, step.device_uuid) else { continue };
            let (stream, free_ns) = match streams.get(&(device, step.stream)) {
                Some(known) => *known,
                None => {
                    let name = format!("stream {:#x}", step.stream);
                    let device = self.device(device)?;
                    (self.out.track(Some(device), &name, TrackDescriptor::default())?, 0)
                }
            };
            let mut args: Args = vec![("step", step.id.into()), ("span_ns", gpu.span_ns.into())];
            args.push(("bound_ns", gpu.bound_ns.into()));
            args.push(("begin_ns", gpu.begin_ns.into()));
            // Spans of a stream do not overlap; within their bounds, mapped ones may.
            let begin_ns = gpu.begin_ns.max(free_ns);
            let end_ns = gpu.end_ns.max(begin_ns);
            self.out.begin_slice(stream, begin_ns, "gpu_span", args, flows)?;
            self.out.end_slice(stream, end_ns)?;
            streams.insert((device, step.stream), (stream, end_ns));
        }
        Ok(())
    }

    /// In a track of its own below each thread.
    fn off_cpu(&mut self, rows: impl Iterator<Item = crate::capture::Result<OffCpu>>) -> anyhow::Result<()> {
        let mut tracks: BTreeMap<(ProcessId, u32), Track> = BTreeMap::new();
        for off in rows {
            let off = off?;
            let key = (off.process, off.tid);
            let track = match tracks.get(&key) {
                Some(track) => *track,
                None => {
                    let thread = self.thread(off.process, off.tid)?;
                    self.out.track(Some(thread), "off the CPU", TrackDescriptor::default())?
                }
            };
            tracks.insert(key, track);
            let mut args: Args = Vec::new();
            args.extend(off.blocked_ns.map(|ns| ("blocked_ns", ns.into())));
            args.extend(off.runqueue_ns.map(|ns| ("runqueue_ns", ns.into())));
            if off.waker_tid != 0 {
                args.push(("waker_tid", off.waker_tid.into()));
            }
            args.extend(
                off.stack.map(|stack| ("stack", self.material.stacks.off_cpu(Some(stack)).join("; ").into())),
            );
            self.out.begin_slice(track, off.begin_ns, off.reason.name(), args, Vec::new())?;
            self.out.end_slice(track, off.end_ns.max(off.begin_ns))?;
        }
        Ok(())
    }

    fn counters(&mut self) -> io::Result<()> {
        type Reading = fn(&GpuSample) -> Option<u64>;
        const COUNTERS: [(&str, i32, &str, Reading); 6] = [
            ("GPU busy", UNIT_COUNT, "%", |gpu| gpu.gpu_percent.map(u64::from)),
            ("memory used", UNIT_SIZE_BYTES, "", |gpu| gpu.memory_used_bytes),
            ("SM clock", UNIT_COUNT, "MHz", |gpu| gpu.sm_clock_mhz.map(u64::from)),
            ("power", UNIT_COUNT, "mW", |gpu| gpu.power_mw.map(u64::from)),
            ("temperature", UNIT_COUNT, "°C", |gpu| gpu.temperature_c.map(u64::from)),
            ("throttled", UNIT_COUNT, "", |gpu| gpu.is_throttled().map(u64::from)),
        ];
        let mut tracks: HashMap<([u8; 16], &str), Track> = HashMap::new();
        for sample in &self.material.tables.gpu_samples {
            for (name, unit, unit_name, reading) in COUNTERS {
                let Some(value) = reading(sample) else { continue };
                let key = (sample.device_uuid, name);
                let track = match tracks.get(&key) {
                    Some(track) => *track,
                    None => {
                        let device = self.device(sample.device_uuid)?;
                        self.out.counter_track(device, name, unit, unit_name)?
                    }
                };
                tracks.insert(key, track);
                self.out.count(track, sample.time_ns, value)?;
            }
        }
        Ok(())
    }

    fn thread(&mut self, process: ProcessId, tid: u32) -> io::Result<Track> {
        if let Some(track) = self.threads.get(&(process, tid)) {
            return Ok(*track);
        }
        let pid = Some(process.tgid.cast_signed());
        let names = &self.material.threads;
        let parent = match self.processes.get(&process) {
            Some(track) => *track,
            None => {
                let name = names.known((process.tgid, process.tgid)).unwrap_or("process").to_owned();
                let descriptor = ProcessDescriptor { pid, process_name: Some(name.clone()) };
                let descriptor = TrackDescriptor { process: Some(descriptor), ..TrackDescriptor::default() };
                let track = self.out.track(None, &name, descriptor)?;
                self.processes.insert(process, track);
                track
            }
        };
        let name = names.of((process.tgid, tid));
        let thread = ThreadDescriptor { pid, tid: Some(tid.into()), thread_name: Some(name.clone()) };
        let descriptor = TrackDescriptor { thread: Some(thread), ..TrackDescriptor::default() };
        let track = self.out.track(Some(parent), &name, descriptor)?;
        self.threads.insert((process, tid), track);
        Ok(track)
    }

    fn device(&mut self, uuid: [u8; 16]) -> io::Result<Track> {
        if let Some(track) = self.devices.get(&uuid) {
            return Ok(*track);
        }
        let of_device = |sample: &&GpuSample| sample.device_uuid == uuid;
        let model = self.material.tables.gpu_samples.iter().find(of_device).map(|s| s.device_name.as_str());
        let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("GPU {} {digits}", model.unwrap_or_default());
        let track = self.out.track(None, &name, TrackDescriptor::default())?;
        self.devices.insert(uuid, track);
        Ok(track)
    }
}

/// What a client asked for.
fn about(request: &Request) -> Args<'static> {
    let mut args: Args = vec![("request", request.id.into()), ("source", request.source.name().into())];
    let texts = [
        ("request_id", &request.request_id),
        ("tenant", &request.tenant_id),
        ("model", &request.model),
        ("model_version", &request.model_version),
        ("adapters", &request.adapters),
    ];
    args.extend(
        texts
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .map(|(name, text)| (name, text.as_str().into())),
    );
    args.extend(request.prompt_tokens.map(|n| ("prompt_tokens", n.into())));
    args.extend(request.ttft_ns.map(|ns| ("ttft_ns", ns.into())));
    args
}

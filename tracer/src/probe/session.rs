//! A recording in progress.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use aya::maps::{MapData, RingBuf};
use engines::{Profiles, Role};
use tracer_abi::{Counter, TARGET_FOLLOW, TARGET_RING, Target, sched};

use super::{
    Missing, Options, ProbeError,
    attach::{Attacher, Notice},
    engine_files::EngineFiles,
    kernel::Kernel,
    process::{self, Found},
    stacks::Stacks,
    uprobe::Links,
};
use crate::{
    event::{
        Event, Mark, Origin, Process, ProcessAction, ProcessId,
        record::{Record, RecordError, open_calls_of},
        sorter::Sorter,
    },
    host_clock::{bracket, monotonic_ns},
    http::Http,
    symbol::HeldFiles,
    timeline::{coverage, tables::LedgerRow},
};

/// A program may be preempted between taking its time stamp and writing its record; rarely for longer than this.
const SLACK_NS: u64 = 10_000_000;
/// Host clock brackets: 50 Hz, every 50th with the wall clocks.
const BRACKET_NS: u64 = 20_000_000;
const WALL_EVERY: u64 = 50;
/// Mappings that changed without the loader telling (a plain mmap) are found this often.
const RESCAN_NS: u64 = 2_000_000_000;
/// Held bytes are followed onto the wire for so long after the last were seen: a tracepoint that every segment of every
/// connection of the machine passes.
const WIRE_NS: u64 = 5_000_000_000;
/// Records taken from a ring in one go, so that a flood cannot keep the other ring waiting.
const MAX_BURST: usize = 100_000;

/// How often to call [`Session::drain`]: the rings hold a second's worth of a busy server many times over.
pub const DRAIN_INTERVAL: Duration = Duration::from_millis(2);

/// What a recording has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub events: u64,
    pub steps: u64,
    pub tokens: u64,
    pub dropped: u64,
}

/// What a recording came to.
#[derive(Debug, Default)]
pub struct Stopped {
    pub ledger: Vec<LedgerRow>,
    pub progress: Progress,
    /// What names are looked up in.
    pub files: HeldFiles,
}

/// Probes in the kernel and in the targets, and everything that turns their records into ordered events.
pub struct Session {
    kernel: Kernel,
    attacher: Attacher,
    sorter: Sorter<Pending>,
    stacks: Stacks,
    rejects: BTreeMap<&'static str, u64>,
    options: Options,
    step_points: Vec<u32>,
    loader_points: Vec<u32>,
    progress: Progress,
    next_bracket_ns: u64,
    next_rescan_ns: u64,
    brackets: u64,
    /// Time that a process ran without its probes after a fork or exec.
    gaps: BTreeMap<ProcessId, u64>,
    /// When the recording ended; u64::MAX until it does.
    stop_ns: u64,
    engine_files: EngineFiles,
    http: Http,
    http_tokens: u64,
    /// Ports on which arrivals are noted.
    ports: HashSet<u16>,
    /// Until when bytes are followed onto the wire.
    wire_until_ns: u64,
}

/// An event that waits for its turn; stacks are resolved when it comes, with the mappings known then.
enum Pending {
    Ready(Event),
    Record(Record),
}

impl Session {
    /// Loads the kernel side. Nothing is traced until [`Session::add`].
    ///
    /// # Errors
    /// No privileges, no BTF, no kernel-side program in this binary, or the kernel refuses it.
    pub fn start(options: Options, profiles: Profiles) -> Result<Self, ProbeError> {
        Ok(Self {
            kernel: Kernel::load(&options)?,
            attacher: Attacher::new(profiles, options.returns),
            sorter: Sorter::new(SLACK_NS),
            stacks: Stacks::default(),
            rejects: BTreeMap::new(),
            engine_files: EngineFiles::start(),
            http: Http::new(options.http.clone()),
            options,
            step_points: Vec::new(),
            loader_points: Vec::new(),
            progress: Progress::default(),
            next_bracket_ns: 0,
            next_rescan_ns: monotonic_ns() + RESCAN_NS,
            brackets: 0,
            gaps: BTreeMap::new(),
            stop_ns: u64::MAX,
            http_tokens: 0,
            ports: HashSet::new(),
            wire_until_ns: 0,
        })
    }

    /// Traces a process from now on: its scheduling at once, its probe points as far as they are mapped. Does nothing
    /// where it is traced already.
    ///
    /// # Errors
    /// The process is gone, or the map of targets is full.
    pub fn add(&mut self, found: &Found) -> Result<(), ProbeError> {
        if self.attacher.processes.contains_key(&found.id) {
            return Ok(());
        }
        self.add_before_exec(found)?;
        self.scan(found.id)
    }

    /// As [`Session::add`], for a process that is about to execute another program: what it maps now does not matter.
    ///
    /// # Errors
    /// The map of targets is full.
    pub fn add_before_exec(&mut self, found: &Found) -> Result<(), ProbeError> {
        let now_ns = monotonic_ns();
        let mut flags = if self.options.follow { TARGET_FOLLOW } else { 0 };
        if self.options.sockets && process::has_ring(found.id.tgid) {
            flags |= TARGET_RING;
            self.attacher.notices.push(Notice {
                process: found.id,
                library: "io_uring".into(),
                text: "what it moves over sockets that way is counted (socket_io_uring), not followed".into(),
            });
        }
        let target = Target { start_ticks: found.id.start_ticks, flags, epoch: 0 };
        self.kernel
            .targets
            .insert(found.id.tgid, bytemuck::cast::<Target, [u64; 2]>(target), 0)
            .map_err(|source| ProbeError::Map { name: tracer_abi::maps::TARGETS, source })?;
        let mut threads = process::threads(found.id.tgid);
        threads.sort_by_key(|(tid, _)| *tid != found.id.tgid);
        for (tid, comm) in threads {
            let origin = Origin { time_ns: now_ns, process: found.id, tid, cpu: 0 };
            let action = ProcessAction::Found;
            let event = Process { origin, action, parent_tgid: 0, parent_tid: 0, comm };
            self.sorter.push(now_ns, Pending::Ready(Event::Process(event)));
        }
        self.attacher.processes.entry(found.id).or_default();
        self.engine_files.look(now_ns, found.id);
        if self.options.sockets {
            process::listening_ports(found.id.tgid).into_iter().for_each(|port| self.note_port(port));
        }
        Ok(())
    }

    /// Has the arrival of bytes noted on a port. Where there are too many, it is not known there.
    fn note_port(&mut self, port: u16) {
        if self.ports.insert(port) {
            let _full = self.kernel.ports.insert(port, 1, 0);
        }
    }

    /// Empties the rings (of a flood: a part); `out` receives the events whose turn has come, in time order. Returns
    /// the number of records that were taken.
    pub fn drain(&mut self, out: &mut Vec<Event>) -> usize {
        let drained_ns = monotonic_ns();
        if drained_ns >= self.next_bracket_ns {
            self.next_bracket_ns = drained_ns + BRACKET_NS;
            let bracket = bracket(self.brackets.is_multiple_of(WALL_EVERY));
            self.brackets += 1;
            self.sorter.push(bracket.monotonic_ns, Pending::Ready(Event::HostClock(bracket)));
        }
        let mut records = Vec::new();
        for ring in [&mut self.kernel.vital, &mut self.kernel.bulk] {
            take(ring, &mut records, &mut self.rejects);
        }
        let taken = records.len();
        for record in records {
            // Probes do not all go at the same instant; the recording ends at one.
            if let Record::Call(call, _) = &record
                && call.begin_ns >= self.stop_ns
            {
                continue;
            }
            self.note(&record);
            let time_ns = match &record {
                Record::Call(event, _) => event.origin.time_ns,
                Record::Mark(event, _) => event.origin.time_ns,
                Record::CallStack(origin, ..) => origin.time_ns,
                Record::Sched(event, _) => event.origin.time_ns,
                Record::Sample(event, _) => event.origin.time_ns,
                Record::Process(event) => event.origin.time_ns,
                Record::Socket(io) => io.origin.time_ns,
                Record::Open(origin, _) => origin.time_ns,
            };
            self.sorter.push(time_ns, Pending::Record(record));
        }
        self.rescan(drained_ns);
        self.release(drained_ns, out);
        self.engine_files.drain(out);
        self.kernel.flush_log();
        taken
    }

    /// Ends the recording: detaches, empties the rings, and reports what is still open in the kernel.
    pub fn stop(mut self, out: &mut Vec<Event>) -> Stopped {
        self.kernel.detach_global();
        let stop_ns = monotonic_ns();
        self.stop_ns = stop_ns;
        self.open_sleeps(stop_ns);
        // No target any more: marks and new threads are no longer recorded, and a return whose entry probe is gone
        // counts for nothing.
        for id in self.attacher.processes.keys() {
            // Gone already.
            let _gone = self.kernel.targets.remove(&id.tgid);
        }
        let mut links = Links::default();
        self.attacher.processes.values_mut().for_each(|attached| links.append(attached.take_links()));
        links.detach();
        self.open_calls(monotonic_ns());
        while self.drain(out) > 0 {}
        self.release(u64::MAX, out);
        self.engine_files.stop(out);
        Stopped { ledger: self.ledger(), progress: self.progress(), files: self.attacher.files.take() }
    }

    /// Everything that was counted so far.
    #[must_use]
    pub fn ledger(&self) -> Vec<LedgerRow> {
        let mut rows: Vec<LedgerRow> = Counter::ALL
            .iter()
            .map(|counter| row(None, counter.name(), self.counter(*counter), counter.is_loss()))
            .collect();
        rows.extend(self.rejects.iter().map(|(name, count)| row(None, name, *count, true)));
        rows.extend(self.http.counts().lines().map(|(name, count, loss)| row(None, name, count, loss)));
        rows.push(row(None, "engine_files_skipped", self.engine_files.skipped(), true));
        rows.extend(self.stacks.ledger());
        rows.extend(self.kernel.unwinder.ledger());
        rows.push(row(None, "mapped_files_not_kept", self.attacher.files.left_out(), false));
        rows.push(row(None, "events_late", self.sorter.late(), false));
        rows.extend(self.gaps.iter().map(|(process, ns)| row(Some(*process), "attach_gap_ns", *ns, false)));
        let mut fired: BTreeMap<ProcessId, u64> = BTreeMap::new();
        // A function may be in several libraries, and a mark have several sites: they are one line.
        let mut by_name: BTreeMap<(ProcessId, &str), u64> = BTreeMap::new();
        for (id, (process, name)) in self.attacher.points.iter().enumerate() {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            let hits = self.kernel.hits.get(&id, 0).map_or(0, |cpus| cpus.iter().sum());
            *fired.entry(*process).or_default() += u64::from(hits > 0);
            *by_name.entry((*process, name)).or_default() += hits;
        }
        let hits = by_name.into_iter();
        rows.extend(hits.map(|((process, name), hits)| {
            row(Some(process), &format!("{}{name}", coverage::HITS), hits, false)
        }));
        for (process, counts) in &self.attacher.counts {
            let mut line = |name, count| rows.push(row(Some(*process), name, count, false));
            line(coverage::FOUND, counts.found);
            line(coverage::ATTACHED, counts.attached);
            line(coverage::FIRED, fired.get(process).copied().unwrap_or(0));
            line("return_probes_withheld", counts.returns_withheld);
        }
        rows
    }

    /// Waits until stacks of the targets can be walked: until the tables of all files that they map are there, or the time
    /// is over. `false`: some are not.
    #[must_use]
    pub fn wait_for_tables(&self, limit: Duration) -> bool {
        self.kernel.unwinder.settle(limit)
    }

    /// Processes that are traced and alive.
    #[must_use]
    pub fn live(&self) -> usize {
        self.attacher.processes.keys().filter(|id| process::runs(**id)).count()
    }

    /// Steps and marks that can be seen in the targets now: (step points, mark sites).
    #[must_use]
    pub fn coverage(&self) -> (usize, usize) {
        let processes = self.attacher.processes.values();
        processes.fold((0, 0), |(steps, marks), one| (steps + one.steps, marks + one.marks))
    }

    /// What this machine cannot record.
    #[must_use]
    pub fn missing(&self) -> &[Missing] {
        &self.kernel.missing
    }

    /// Takes what should be said about the targets.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        let mut notices = std::mem::take(&mut self.attacher.notices);
        notices.extend(self.kernel.unwinder.take_notices());
        notices
    }

    /// Counts for a progress line.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let dropped = Counter::ALL
            .iter()
            .filter(|counter| counter.is_loss())
            .map(|counter| self.counter(*counter))
            .sum::<u64>()
            + self.rejects.values().sum::<u64>();
        // Marks and sockets may tell of the same tokens.
        Progress { dropped, tokens: self.progress.tokens.max(self.http_tokens), ..self.progress }
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.kernel.counters.get(&(counter as u32), 0).map_or(0, |cpus| cpus.iter().sum())
    }

    /// What a record means for the session itself.
    fn note(&mut self, record: &Record) {
        self.progress.events += 1;
        match record {
            Record::Call(call, _) if self.loader_points.contains(&call.point) => {
                self.attacher.processes.entry(call.origin.process).or_default().stale = true;
            }
            Record::Call(call, _) if self.step_points.contains(&call.point) => self.progress.steps += 1,
            Record::Mark(event, _) if matches!(event.mark, Mark::Token(_)) => {
                self.progress.tokens += 1;
            }
            Record::Process(event) => self.note_process(event),
            Record::Open(origin, file) => self.engine_files.opened(origin.time_ns, origin.process, file),
            _ => {}
        }
    }

    fn note_process(&mut self, event: &Process) {
        let id = event.origin.process;
        match event.action {
            ProcessAction::Exec => self.attacher.begin_program(id, event.origin.time_ns),
            ProcessAction::Fork if event.parent_tgid != id.tgid => {
                self.attacher.begin_program(id, event.origin.time_ns);
                // What its parent has open and mapped it has, too.
                self.engine_files.look(event.origin.time_ns, id);
            }
            _ => {}
        }
    }

    fn rescan(&mut self, now_ns: u64) {
        let all = now_ns >= self.next_rescan_ns;
        if all {
            self.next_rescan_ns = now_ns + RESCAN_NS;
        }
        let due: Vec<ProcessId> = self
            .attacher
            .processes
            .iter()
            .filter(|(_, attached)| all || attached.stale)
            .map(|(id, _)| *id)
            .collect();
        if all {
            // Engines that were opened past the functions that are probed.
            let running = self.attacher.processes.iter().filter(|(_, attached)| attached.steps > 0);
            running.for_each(|(id, _)| self.engine_files.look(now_ns, *id));
        }
        for id in due {
            let began_ns = self.attacher.processes.get_mut(&id).and_then(|attached| attached.began_ns.take());
            let _gone_or_unreadable = self.scan(id);
            if let Some(began_ns) = began_ns {
                *self.gaps.entry(id).or_default() += monotonic_ns().saturating_sub(began_ns);
            }
        }
    }

    fn scan(&mut self, id: ProcessId) -> Result<(), ProbeError> {
        let now_ns = monotonic_ns();
        let mut events = Vec::new();
        let result = self.attacher.scan(&mut self.kernel, id, now_ns, &mut events);
        if let Err(ProbeError::ProcessGone { .. }) = result {
            self.kernel.unwinder.gone(id);
            self.stacks.forget(id);
        }
        for event in events {
            if let Event::Point(point) = &event {
                match point.role {
                    Role::Step => self.step_points.push(point.id),
                    Role::Loader => self.loader_points.push(point.id),
                    _ => {}
                }
            }
            self.sorter.push(now_ns, Pending::Ready(event));
        }
        result
    }

    fn release(&mut self, drained_ns: u64, out: &mut Vec<Event>) {
        let Self { sorter, stacks, attacher, kernel, http, .. } = self;
        let (mut is_held, mut http_tokens, mut ports) = (false, 0, HashSet::new());
        sorter.release(drained_ns, |pending| match pending {
            Pending::Ready(event) => out.push(event),
            Pending::Record(Record::CallStack(origin, key, raw)) => {
                let stack = stacks.intern(&origin, raw, attacher, &mut kernel.unwinder, out);
                stacks.remember(&origin, key, stack);
            }
            Pending::Record(Record::Call(mut event, key)) => {
                event.stack = stacks.remembered(&event.origin, key);
                out.push(Event::Call(event));
            }
            Pending::Record(Record::Mark(mut event, key)) => {
                if let Mark::Token(token) = &mut event.mark {
                    token.stack = stacks.remembered(&event.origin, key);
                }
                out.push(Event::Mark(event));
            }
            Pending::Record(Record::Process(event)) => out.push(Event::Process(event)),
            // It is on its way through [`EngineFiles`].
            Pending::Record(Record::Open(..)) => {}
            Pending::Record(Record::Socket(io)) => {
                let before = out.len();
                is_held |= http.feed(&io, out);
                for event in &out[before..] {
                    match event {
                        Event::HttpSend(send) => http_tokens += u64::from(send.tokens),
                        Event::HttpBegin(begin) => _ = ports.insert(begin.local_port),
                        _ => {}
                    }
                }
            }
            Pending::Record(Record::Sched(mut event, raw)) => {
                event.stack = stacks.intern(&event.origin, raw, attacher, &mut kernel.unwinder, out);
                out.push(Event::Sched(event));
            }
            Pending::Record(Record::Sample(mut event, raw)) => {
                event.stack = stacks.intern(&event.origin, raw, attacher, &mut kernel.unwinder, out);
                out.push(Event::Sample(event));
            }
        });
        self.http_tokens += http_tokens;
        ports.into_iter().for_each(|port| self.note_port(port));
        self.follow_wire(is_held, monotonic_ns());
    }

    /// Follows held bytes onto the wire while there are any.
    fn follow_wire(&mut self, is_held: bool, now_ns: u64) {
        if is_held {
            self.wire_until_ns = now_ns + WIRE_NS;
        }
        let wanted = now_ns < self.wire_until_ns;
        if self.options.sockets {
            self.kernel.set_wire(wanted);
        }
    }

    fn open_calls(&mut self, now_ns: u64) {
        let threads: Vec<_> = self.kernel.open_calls.iter().filter_map(Result::ok).collect();
        for (tid, words) in threads {
            let calls = bytemuck::cast(words);
            let open = open_calls_of(tid, &calls, now_ns);
            for (call, key) in open.filter(|(call, _)| call.begin_ns < self.stop_ns) {
                self.sorter.push(now_ns, Pending::Record(Record::Call(call, key)));
            }
        }
    }

    fn open_sleeps(&mut self, stop_ns: u64) {
        let sleepers: Vec<_> = self.kernel.sleepers.iter().filter_map(Result::ok).collect();
        for (_, words) in sleepers {
            let mut record: tracer_abi::Sched = bytemuck::cast(words);
            if record.off_ns == 0 {
                continue;
            }
            record.header.flags |= sched::OPEN;
            record.header.time_ns = stop_ns;
            match Record::decode(bytemuck::bytes_of(&record)) {
                Ok(record) => self.sorter.push(stop_ns, Pending::Record(record)),
                Err(error) => reject(&mut self.rejects, &error),
            }
        }
    }
}

fn take(ring: &mut RingBuf<MapData>, records: &mut Vec<Record>, rejects: &mut BTreeMap<&'static str, u64>) {
    for _ in 0..MAX_BURST {
        let Some(item) = ring.next() else { return };
        match Record::decode(&item) {
            Ok(record) => records.push(record),
            Err(error) => reject(rejects, &error),
        }
    }
}

fn reject(rejects: &mut BTreeMap<&'static str, u64>, error: &RecordError) {
    *rejects.entry(error.counter()).or_default() += 1;
}

fn row(process: Option<ProcessId>, name: &str, count: u64, loss: bool) -> LedgerRow {
    LedgerRow { process, name: name.to_owned(), count, loss }
}

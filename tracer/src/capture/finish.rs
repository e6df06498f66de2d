//! Finishing: raw streams → Parquet, events → derived tables.
//!
//! Every file is replaced as a whole, and a raw stream is removed only when all tables are on disk. So finishing may
//! be killed at any time and begun again, and gives the same tables.

use std::collections::BTreeMap;
use std::path::Path;

use super::budget;
use super::derived::{ClockKnot, OffCpu, RequestId, captured, torn_bytes};
use super::error::Result;
use super::folder::Folder;
use super::meta::{Meta, boot_id};
use super::raw::{Counter, Marked, Table, for_each_event_table};
use super::reader::{Batches, Events, Torn};
use super::table::TableFile;
use crate::clock::{ClockQuality, DeviceClock};
use crate::event::mark;
use crate::event::{
    Call, Code, EngineFile, Event, GpuProcess, GpuSample, HostClock, HttpBegin, HttpEnd, HttpSend, HttpWire,
    Mapping, Point, Process, ProcessId, Sample, Sched, Stack, Xid,
};
use crate::symbol::{self, HeldFiles, SymbolFrame, Symbolizer};
use crate::timeline::budget::{Budget, Budgets};
use crate::timeline::rows::{Hazard, Iteration, Layer, Phase, Request, Step, Token};
use crate::timeline::shares::{Share, Weights, shares};
use crate::timeline::tables::LedgerRow;
use crate::timeline::{self, DriverEvent, Example, Timeline};

/// What finishing a capture came to.
#[derive(Clone, Debug)]
pub struct Finished {
    pub meta: Meta,
    /// Rows of every table, by name.
    pub rows: BTreeMap<&'static str, u64>,
    /// Raw tables that were torn, with what they lost.
    pub torn: Vec<Torn>,
    pub ledger: Vec<LedgerRow>,
    /// Some of the things that could not be joined.
    pub examples: Vec<Example>,
}

/// Turns what a recording left into Parquet, adds the derived tables, and marks the capture complete.
///
/// A capture that is already complete is derived again from its raw tables, and is not complete while its tables are
/// replaced; names of stacks are kept as they are, since their files may have gone since.
///
/// # Errors
/// When the folder is no capture, is being recorded, or cannot be written; it can then be finished again.
pub fn finish(dir: &Path) -> Result<Finished> {
    finish_with(dir, HeldFiles::default())
}

/// As [`finish`], with the files that the recording has kept open.
///
/// # Errors
/// As [`finish`].
pub fn finish_with(dir: &Path, files: HeldFiles) -> Result<Finished> {
    let folder = Folder::lock(dir)?;
    let mut meta = Meta::read(&folder)?;
    let mut rows = BTreeMap::new();
    // From here on the raw tables are read from their Parquet files.
    let torn = convert_all(&folder, &mut rows)?;
    let derived = derive(&folder, &meta, &mut rows)?;
    if folder.table(SymbolFrame::NAME).exists() {
        rows.insert(SymbolFrame::NAME, Batches::<SymbolFrame>::open(&folder)?.count_finished());
    } else {
        let this_boot = !meta.boot_id.is_empty() && meta.boot_id == boot_id();
        rows.insert(SymbolFrame::NAME, name_stacks(&folder, this_boot, files)?);
    }
    write_causes(&folder, &mut rows)?;
    let ledger = write_ledger(&folder, &rows, derived.ledger)?;
    rows.insert(LedgerRow::NAME, u64::try_from(ledger.len()).unwrap_or(0));

    if meta.ended_monotonic_ns.is_none() {
        meta.recovered = true;
        meta.ended_monotonic_ns = Some(derived.last_ns.max(meta.started_monotonic_ns));
    }
    meta.simulated |= derived.simulated;
    meta.complete = true;
    folder.sync()?;
    meta.write(&folder)?;
    folder.sync()?;
    remove_streams(&folder)?;
    Ok(Finished { meta, rows, torn, ledger, examples: derived.examples })
}

macro_rules! over_raw_tables {
    ($($field:ident: $type:ty),* $(,)?) => {
        /// Turns the streams that are there into Parquet.
        fn convert_all(folder: &Folder, rows: &mut BTreeMap<&'static str, u64>) -> Result<Vec<Torn>> {
            let mut torn = Vec::new();
            $(
                let (count, lost) = convert::<$type>(folder, |_| Ok(()))?;
                rows.insert(<$type>::NAME, count);
                torn.extend(lost);
            )*
            // Last, so that it can hold what the others have lost.
            let (count, lost) = convert::<Counter>(folder, |table| {
                torn.iter().try_for_each(|torn| table.push(&torn_counter(torn)))
            })?;
            rows.insert(Counter::NAME, count);
            torn.extend(lost);
            Ok(torn)
        }

        fn remove_streams(folder: &Folder) -> Result<()> {
            // The counters say what torn streams have lost; without theirs, a second attempt keeps what they say.
            folder.remove(&folder.raw(Counter::NAME))?;
            $(folder.remove(&folder.raw(<$type>::NAME))?;)*
            folder.remove_empty_raw();
            Ok(())
        }
    };
}

for_each_event_table!(over_raw_tables);

/// Makes a table's Parquet file from its stream, or an empty one when it has neither.
fn convert<T: Table>(
    folder: &Folder,
    extra: impl FnOnce(&mut TableFile<T>) -> Result<()>,
) -> Result<(u64, Option<Torn>)> {
    if !folder.raw(T::NAME).exists() && folder.table(T::NAME).exists() {
        return Ok((Batches::<T>::open(folder)?.count_finished(), None));
    }
    let mut table = TableFile::<T>::begin(folder)?;
    let mut batches = Batches::<T>::stream(folder)?;
    while let Some(rows) = batches.next_rows()? {
        rows.iter().try_for_each(|row| table.push(row))?;
    }
    extra(&mut table)?;
    Ok((table.commit()?, batches.torn()))
}

fn torn_counter(torn: &Torn) -> Counter {
    let row = LedgerRow { process: None, name: torn_bytes(torn.table), count: torn.bytes, loss: true };
    Counter { time_ns: 0, row }
}

/// What a pass over all events came to.
struct Derived {
    ledger: Vec<LedgerRow>,
    examples: Vec<Example>,
    simulated: bool,
    last_ns: u64,
}

/// Runs all events through the timeline, with clocks that are fitted to the whole recording: `see` gets each event,
/// `take` the rows as they become final.
pub(super) fn replay(
    folder: &Folder,
    mut see: impl FnMut(&Event) -> Result<()>,
    mut take: impl FnMut(timeline::Output) -> Result<()>,
) -> Result<Timeline<DeviceClock>> {
    /// How often finished rows are taken out of the timeline, in events.
    const DRAIN_EVENTS: u64 = 4096;
    let mut timeline = Timeline::new(timeline::Config::default(), fit_clock(folder)?);
    for (event, number) in Events::open(folder)?.zip(1u64..) {
        let event = event?;
        see(&event)?;
        timeline.feed(&event);
        if number % DRAIN_EVENTS == 0 {
            take(timeline.drain())?;
        }
    }
    timeline.finish();
    take(timeline.drain())?;
    Ok(timeline)
}

/// Derives all tables and writes them.
fn derive(folder: &Folder, meta: &Meta, rows: &mut BTreeMap<&'static str, u64>) -> Result<Derived> {
    let mut tables = TimelineTables::begin(folder)?;
    let mut offcpu = TableFile::<OffCpu>::begin(folder)?;
    let (mut simulated, mut last_ns) = (false, 0);
    let see = |event: &Event| {
        last_ns = last_ns.max(event.time_ns());
        simulated |= event.is_simulated();
        if let Event::Sched(sched) = event {
            offcpu.push(&sched.into())?;
        }
        Ok(())
    };
    let mut timeline = replay(folder, see, |output| tables.push(&output))?;
    if meta.complete {
        // From the first table to the last that takes its place, old and new ones would be read together.
        Meta { complete: false, ..meta.clone() }.write(folder)?;
        folder.sync()?;
    }
    tables.commit(rows)?;
    rows.insert(OffCpu::NAME, offcpu.commit()?);
    let mut clock = TableFile::<ClockKnot>::begin(folder)?;
    timeline.clock().knots().try_for_each(|(series, knot)| clock.push(&ClockKnot { series, knot }))?;
    rows.insert(ClockKnot::NAME, clock.commit()?);
    let mut quality = TableFile::<ClockQuality>::begin(folder)?;
    timeline.clock().quality().try_for_each(|row| quality.push(&row))?;
    rows.insert(ClockQuality::NAME, quality.commit()?);
    let mut driver = TableFile::<DriverEvent>::begin(folder)?;
    timeline.driver_events().iter().try_for_each(|row| driver.push(row))?;
    rows.insert(DriverEvent::NAME, driver.commit()?);
    Ok(Derived { ledger: timeline.ledger(), examples: timeline.examples().to_vec(), simulated, last_ns })
}

/// Fits the device clocks from everything that was recorded of them.
fn fit_clock(folder: &Folder) -> Result<DeviceClock> {
    let mut clock = DeviceClock::default();
    let mut host = Batches::<HostClock>::open(folder)?;
    while let Some(rows) = host.next_rows()? {
        rows.iter().for_each(|bracket| clock.learn_host(bracket));
    }
    let mut bursts = Batches::<Marked<mark::ClockBurst>>::open(folder)?;
    while let Some(rows) = bursts.next_rows()? {
        rows.iter().for_each(|burst| clock.learn(burst.origin.process, &burst.mark));
    }
    let mut spans = Batches::<Marked<mark::GpuSpan>>::open(folder)?;
    while let Some(rows) = spans.next_rows()? {
        rows.iter().for_each(|span| clock.learn_launch(span.origin.process, &span.mark));
    }
    Ok(clock)
}

/// The tables that the timeline fills.
struct TimelineTables {
    steps: TableFile<Step>,
    iterations: TableFile<Iteration>,
    requests: TableFile<Request>,
    request_ids: TableFile<RequestId>,
    tokens: TableFile<Token>,
    layers: TableFile<Layer>,
    phases: TableFile<Phase>,
    hazards: TableFile<Hazard>,
}

impl TimelineTables {
    fn begin(folder: &Folder) -> Result<Self> {
        Ok(Self {
            steps: TableFile::begin(folder)?,
            iterations: TableFile::begin(folder)?,
            requests: TableFile::begin(folder)?,
            request_ids: TableFile::begin(folder)?,
            tokens: TableFile::begin(folder)?,
            layers: TableFile::begin(folder)?,
            phases: TableFile::begin(folder)?,
            hazards: TableFile::begin(folder)?,
        })
    }

    fn push(&mut self, output: &timeline::Output) -> Result<()> {
        output.steps.iter().try_for_each(|row| self.steps.push(row))?;
        output.iterations.iter().try_for_each(|row| self.iterations.push(row))?;
        output.tokens.iter().try_for_each(|row| self.tokens.push(row))?;
        output.layers.iter().try_for_each(|row| self.layers.push(row))?;
        output.phases.iter().try_for_each(|row| self.phases.push(row))?;
        output.hazards.iter().try_for_each(|row| self.hazards.push(row))?;
        for request in &output.requests {
            self.requests.push(request)?;
            RequestId::all(request).try_for_each(|id| self.request_ids.push(&id))?;
        }
        Ok(())
    }

    fn commit(self, rows: &mut BTreeMap<&'static str, u64>) -> Result<()> {
        rows.insert(Step::NAME, self.steps.commit()?);
        rows.insert(Iteration::NAME, self.iterations.commit()?);
        rows.insert(Request::NAME, self.requests.commit()?);
        rows.insert(RequestId::NAME, self.request_ids.commit()?);
        rows.insert(Token::NAME, self.tokens.commit()?);
        rows.insert(Layer::NAME, self.layers.commit()?);
        rows.insert(Phase::NAME, self.phases.commit()?);
        rows.insert(Hazard::NAME, self.hazards.commit()?);
        Ok(())
    }
}

/// Writes the names of what every stack went through.
fn name_stacks(folder: &Folder, this_boot: bool, files: HeldFiles) -> Result<u64> {
    let mut symbolizer = Symbolizer::new(symbol::Options { this_boot }).with_files(files);
    let mut mappings = Batches::<Mapping>::open(folder)?;
    while let Some(rows) = mappings.next_rows()? {
        rows.into_iter().for_each(|mapping| symbolizer.add_mapping(mapping));
    }
    let mut codes = Batches::<Code>::open(folder)?;
    while let Some(rows) = codes.next_rows()? {
        rows.into_iter().for_each(|code| symbolizer.add_code(code));
    }
    let mut frames = TableFile::<SymbolFrame>::begin(folder)?;
    let mut stacks = Batches::<Stack>::open(folder)?;
    while let Some(rows) = stacks.next_rows()? {
        for stack in &rows {
            symbolizer.frames(stack).iter().try_for_each(|frame| frames.push(frame))?;
        }
    }
    frames.commit()
}

/// Cuts the latency of every token into its parts, and the time of every step into shares.
fn write_causes(folder: &Folder, rows: &mut BTreeMap<&'static str, u64>) -> Result<()> {
    let (steps, requests, tokens) = (all::<Step>(folder)?, all::<Request>(folder)?, all::<Token>(folder)?);
    let mut table = TableFile::<Share>::begin(folder)?;
    let shares = shares(&steps, &requests, &tokens, Weights::default());
    shares.iter().try_for_each(|row| table.push(row))?;
    rows.insert(Share::NAME, table.commit()?);
    let budgets = Budgets::new(&steps, &requests, &tokens, budget::threads(folder)?);
    let mut table = TableFile::<Budget>::begin(folder)?;
    tokens.iter().filter_map(|token| budgets.budget(token)).try_for_each(|row| table.push(&row))?;
    rows.insert(Budget::NAME, table.commit()?);
    Ok(())
}

fn all<T: Table>(folder: &Folder) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let mut batches = Batches::<T>::open(folder)?;
    while let Some(rows) = batches.next_rows()? {
        all.extend(rows);
    }
    Ok(all)
}

/// Writes the ledger: the last value of every counter, what the tables hold, and what the timeline could not join.
fn write_ledger(
    folder: &Folder,
    rows: &BTreeMap<&'static str, u64>,
    unmatched: Vec<LedgerRow>,
) -> Result<Vec<LedgerRow>> {
    let mut last: BTreeMap<(Option<ProcessId>, String), LedgerRow> = BTreeMap::new();
    let mut put = |row: LedgerRow| last.insert((row.process, row.name.clone()), row);
    let mut counters = Batches::<Counter>::open(folder)?;
    while let Some(rows) = counters.next_rows()? {
        rows.into_iter().for_each(|counter| _ = put(counter.row));
    }
    for (&table, &count) in rows.iter().filter(|(table, _)| RAW_TABLES.contains(table)) {
        put(LedgerRow { process: None, name: captured(table), count, loss: false });
    }
    unmatched.into_iter().for_each(|row| _ = put(row));
    let mut table = TableFile::<LedgerRow>::begin(folder)?;
    last.values().try_for_each(|row| table.push(row))?;
    table.commit()?;
    Ok(last.into_values().collect())
}

macro_rules! names {
    ($($field:ident: $type:ty),* $(,)?) => {
        const RAW_TABLES: &[&str] = &[$(<$type>::NAME),*];
    };
}

for_each_event_table!(names);

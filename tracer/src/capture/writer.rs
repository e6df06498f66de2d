//! Recording: events → raw tables.

use std::collections::HashMap;
use std::path::Path;

use super::error::Result;
use super::folder::Folder;
use super::meta::Meta;
use super::raw::{Counter, Marked, for_each_event_table};
use super::stream::TableWriter;
use crate::event::mark::{self, Mark};
use crate::event::{
    Call, Code, EngineFile, Event, GpuProcess, GpuSample, HostClock, HttpBegin, HttpEnd, HttpSend, HttpWire,
    Mapping, MarkEvent, Point, Process, ProcessId, Sample, Sched, Stack, Xid,
};
use crate::host_clock::monotonic_ns;
use crate::timeline::tables::LedgerRow;

macro_rules! tables {
    ($($field:ident: $type:ty),* $(,)?) => {
        #[derive(Default)]
        struct Writers { $($field: TableWriter<$type>,)* counters: TableWriter<Counter> }

        impl Writers {
            /// Writes what waits, of every table even if one fails: the first error, and the rows it and others cost.
            fn flush(&mut self, folder: &Folder) -> (u64, Result<()>) {
                let mut first = Ok(());
                let mut lost = 0;
                $(note(&mut first, &mut lost, self.$field.waiting(), self.$field.flush(folder));)*
                note(&mut first, &mut lost, self.counters.waiting(), self.counters.flush(folder));
                (lost, first)
            }
        }
    };
}

for_each_event_table!(tables);

fn note(first: &mut Result<()>, lost: &mut u64, rows: usize, result: Result<()>) {
    if let Err(error) = result {
        *lost += u64::try_from(rows).unwrap_or(u64::MAX);
        if first.is_ok() {
            *first = Err(error);
        }
    }
}

/// Appends events to a new capture. Dropping it loses what was not flushed; the folder stays readable.
pub struct Writer {
    folder: Folder,
    meta: Meta,
    tables: Writers,
    /// Last value that was written of each line of the ledger.
    counters: HashMap<(Option<ProcessId>, String), u64>,
    rows_lost: u64,
    /// CLOCK_MONOTONIC ns at which the recording ended, if it is not when the writer is closed.
    ended_ns: Option<u64>,
}

impl Writer {
    /// Makes the folder, or takes an empty one, and writes `meta.json`.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`](super::ErrorKind::Exists) when the folder is there and not empty; otherwise what the
    /// system refused.
    pub fn create(dir: &Path, meta: Meta) -> Result<Self> {
        let folder = Folder::create(dir)?;
        meta.write(&folder)?;
        Ok(Self {
            folder,
            meta,
            tables: Writers::default(),
            counters: HashMap::new(),
            rows_lost: 0,
            ended_ns: None,
        })
    }

    /// Appends an event. Each table should get its events in order of [`Event::time_ns`], as far as that is known.
    ///
    /// # Errors
    /// When a full table could not be written: its waiting rows are counted in [`rows_lost`](Self::rows_lost), what
    /// was written before is intact, and writing may go on.
    pub fn write(&mut self, event: &Event) -> Result<()> {
        let Self { tables: t, folder, .. } = self;
        let (rows, result) = match event {
            Event::Call(e) => push(&mut t.calls, folder, e),
            Event::Mark(e) => write_mark(t, folder, e),
            Event::Sched(e) => push(&mut t.sched, folder, e),
            Event::Sample(e) => push(&mut t.samples, folder, e),
            Event::Process(e) => push(&mut t.processes, folder, e),
            Event::HostClock(e) => push(&mut t.clock_host, folder, e),
            Event::Mapping(e) => push(&mut t.mappings, folder, e),
            Event::Code(e) => push(&mut t.code, folder, e),
            Event::Stack(e) => push(&mut t.stacks, folder, e),
            Event::Point(e) => push(&mut t.points, folder, e),
            Event::HttpBegin(e) => push(&mut t.http_begins, folder, e),
            Event::HttpSend(e) => push(&mut t.http_sends, folder, e),
            Event::HttpWire(e) => push(&mut t.http_wires, folder, e),
            Event::HttpEnd(e) => push(&mut t.http_ends, folder, e),
            Event::Gpu(e) => push(&mut t.gpu_samples, folder, e),
            Event::GpuProcess(e) => push(&mut t.gpu_processes, folder, e),
            Event::Xid(e) => push(&mut t.xids, folder, e),
            Event::EngineFile(e) => push(&mut t.engine_files, folder, e),
        };
        if result.is_err() {
            self.rows_lost += u64::try_from(rows).unwrap_or(0);
        }
        result?;
        if event.is_simulated() && !self.meta.simulated {
            self.update_meta(|meta| meta.simulated = true)?;
        }
        Ok(())
    }

    /// Appends the lines of the ledger that changed since they were last given; counts are totals since the start.
    /// `time_ns`: CLOCK_MONOTONIC.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn ledger(&mut self, time_ns: u64, rows: &[LedgerRow]) -> Result<()> {
        for row in rows {
            let key = (row.process, row.name.clone());
            if self.counters.insert(key, row.count) != Some(row.count) {
                let counter = Counter { time_ns, row: row.clone() };
                push(&mut self.tables.counters, &self.folder, &counter).1?;
            }
        }
        Ok(())
    }

    /// Writes what waits in memory; to be called about once a second, so that a killed recorder loses no more.
    ///
    /// # Errors
    /// The first of the tables that could not be written; the others are written all the same.
    pub fn flush(&mut self) -> Result<()> {
        if self.rows_lost > 0 {
            let lost = LedgerRow { process: None, name: ROWS_LOST.into(), count: self.rows_lost, loss: true };
            self.ledger(monotonic_ns(), &[lost])?;
        }
        let (lost, result) = self.tables.flush(&self.folder);
        self.rows_lost += lost;
        result
    }

    /// Events that could not be written so far.
    #[must_use]
    pub fn rows_lost(&self) -> u64 {
        self.rows_lost
    }

    /// What `meta.json` says.
    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Changes `meta.json`.
    ///
    /// # Errors
    /// When it cannot be written; the old one then stays.
    pub fn update_meta(&mut self, change: impl FnOnce(&mut Meta)) -> Result<()> {
        change(&mut self.meta);
        self.meta.write(&self.folder)
    }

    /// Says when the recording ended (CLOCK_MONOTONIC ns), where that was before the last events were written.
    pub fn set_ended(&mut self, ended_ns: u64) {
        self.ended_ns = Some(ended_ns);
    }

    /// Ends the recording: writes the rest and notes the time in `meta.json`. [`finish`](super::finish) is next.
    ///
    /// # Errors
    /// As [`flush`](Self::flush) and [`update_meta`](Self::update_meta).
    pub fn close(mut self) -> Result<()> {
        let flushed = self.flush();
        let ended_ns = self.ended_ns.unwrap_or_else(monotonic_ns);
        let noted = self.update_meta(|meta| meta.ended_monotonic_ns = Some(ended_ns));
        flushed.and(noted)
    }
}

/// Line of the ledger: rows that the recorder could not write.
pub(crate) const ROWS_LOST: &str = "capture_rows_lost";

/// Pushes a row; the number is that of the rows which an error costs.
fn push<T: super::raw::Table>(table: &mut TableWriter<T>, folder: &Folder, row: &T) -> (usize, Result<()>) {
    let rows = table.waiting() + 1;
    (rows, table.push(folder, |builder| row.push(builder)))
}

fn push_mark<M: super::column::Columns>(
    table: &mut TableWriter<Marked<M>>,
    folder: &Folder,
    event: &MarkEvent,
    mark: &M,
) -> (usize, Result<()>)
where
    Marked<M>: super::raw::Table<Builder = super::raw::MarkedBuilder<M>>,
{
    let rows = table.waiting() + 1;
    (rows, table.push(folder, |builder| builder.push(&event.origin, mark)))
}

fn write_mark(t: &mut Writers, folder: &Folder, event: &MarkEvent) -> (usize, Result<()>) {
    match &event.mark {
        Mark::RequestBegin(m) => push_mark(&mut t.request_begins, folder, event, m),
        Mark::RequestEnd(m) => push_mark(&mut t.request_ends, folder, event, m),
        Mark::Batch(m) => push_mark(&mut t.batches, folder, event, m),
        Mark::Token(m) => push_mark(&mut t.tokens, folder, event, m),
        Mark::Phase(m) => push_mark(&mut t.phases, folder, event, m),
        Mark::Attr(m) => push_mark(&mut t.attrs, folder, event, m),
        Mark::GpuSpan(m) => push_mark(&mut t.gpu_spans, folder, event, m),
        Mark::ClockBurst(m) => push_mark(&mut t.clock_bursts, folder, event, m),
        Mark::InjectState(m) => push_mark(&mut t.inject_states, folder, event, m),
        Mark::Shape(m) => push_mark(&mut t.shapes, folder, event, m),
        Mark::DataType(m) => push_mark(&mut t.data_types, folder, event, m),
        Mark::Made(m) => push_mark(&mut t.made, folder, event, m),
        Mark::Nvtx(m) => push_mark(&mut t.nvtx, folder, event, m),
        Mark::GpuLayers(m) => push_mark(&mut t.gpu_layers, folder, event, m),
        Mark::NvtxState(m) => push_mark(&mut t.nvtx_states, folder, event, m),
    }
}

#[cfg(test)]
impl Writer {
    /// Writes the clock bursts to another file from here on; returns the one before.
    pub(super) fn replace_file_of_bursts(&mut self, file: std::fs::File) -> std::fs::File {
        self.tables.clock_bursts.replace_file(file)
    }
}

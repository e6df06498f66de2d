//! Reading a capture's events back, from its raw streams or its finished tables.

use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::path::Path;

use arrow::array::RecordBatch;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::error::{Context, Result};
use super::folder::Folder;
use super::meta::Meta;
use super::raw::{EventTable, Marked, Table, for_each_event_table};
use super::stream;
use super::torn::StreamBatches;
use crate::event::mark;
use crate::event::{
    Call, Code, EngineFile, Event, GpuProcess, GpuSample, HostClock, HttpBegin, HttpEnd, HttpSend, HttpWire,
    Mapping, Point, Process, Sample, Sched, Stack, Xid,
};

/// A raw table that ends before its last byte: the recorder was killed, or the disk was full or damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torn {
    pub table: &'static str,
    /// Rows before the torn end.
    pub rows: u64,
    /// Bytes after them, which are lost.
    pub bytes: u64,
}

/// The rows of one table, batch by batch.
pub(crate) struct Batches<T> {
    source: BatchSource,
    path: std::path::PathBuf,
    _rows: std::marker::PhantomData<T>,
}

enum BatchSource {
    /// The table was never written.
    Empty,
    Stream(StreamBatches),
    Parquet {
        reader: ParquetRecordBatchReader,
        rows: u64,
    },
}

impl<T: Table> Batches<T> {
    /// Opens the finished table, or else the stream; a table without a file is empty.
    pub(crate) fn open(folder: &Folder) -> Result<Self> {
        let finished = folder.table(T::NAME);
        match open_if_there(&finished)? {
            Some(file) => Self::parquet(&finished, file),
            None => Self::stream(folder),
        }
    }

    /// Opens the stream; a table without one is empty.
    pub(crate) fn stream(folder: &Folder) -> Result<Self> {
        let path = folder.raw(T::NAME);
        let source = match open_if_there(&path)? {
            Some(file) => BatchSource::Stream(StreamBatches::open(file).context("read", &path)?),
            None => BatchSource::Empty,
        };
        Ok(Self { source, path, _rows: std::marker::PhantomData })
    }

    fn parquet(path: &Path, file: File) -> Result<Self> {
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).context("read", path)?;
        let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = builder.with_batch_size(stream::BATCH_ROWS).build().context("read", path)?;
        let source = BatchSource::Parquet { reader, rows };
        Ok(Self { source, path: path.into(), _rows: std::marker::PhantomData })
    }

    /// Rows of a finished table; 0 for a stream, whose rows are known when it has been read.
    pub(crate) fn count_finished(&self) -> u64 {
        match self.source {
            BatchSource::Parquet { rows, .. } => rows,
            BatchSource::Empty | BatchSource::Stream(_) => 0,
        }
    }

    /// The next rows, as they were written; `None` at the end. A stream that holds something else ends there too.
    pub(crate) fn next_rows(&mut self) -> Result<Option<Vec<T>>> {
        match &mut self.source {
            BatchSource::Empty => Ok(None),
            BatchSource::Stream(stream) => {
                let before = stream.good_bytes();
                let Some(batch) = stream.next_batch().context("read", &self.path)? else { return Ok(None) };
                Ok(stream::rows(&batch).inspect_err(|_| stream.reject(&batch, before)).ok())
            }
            BatchSource::Parquet { reader, .. } => match reader.next() {
                Some(batch) => parquet_rows(&self.path, batch.context("read", &self.path)?).map(Some),
                None => Ok(None),
            },
        }
    }

    /// What a stream has lost; known once it has come to its end.
    pub(crate) fn torn(&self) -> Option<Torn> {
        match &self.source {
            BatchSource::Stream(stream) if stream.torn_bytes() > 0 => {
                Some(Torn { table: T::NAME, rows: stream.rows(), bytes: stream.torn_bytes() })
            }
            _ => None,
        }
    }
}

fn parquet_rows<T: Table>(path: &Path, batch: RecordBatch) -> Result<Vec<T>> {
    stream::rows(&batch).context("read", path)
}

pub(super) fn open_if_there(path: &Path) -> Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).context("open", path),
    }
}

/// A capture's events, whether it was finished or not.
pub struct Reader {
    folder: Folder,
    meta: Meta,
}

impl Reader {
    /// Opens a capture.
    ///
    /// # Errors
    /// When the folder is no capture, or a newer version's, or may not be read.
    pub fn open(dir: &Path) -> Result<Self> {
        let folder = Folder::open(dir)?;
        let meta = Meta::read(&folder)?;
        Ok(Self { folder, meta })
    }

    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All events, merged by time; at the same time, definitions (processes, mappings, points, stacks) come first.
    ///
    /// Rows that their table holds out of order come as soon as they are reached. A batch per table is in memory.
    ///
    /// # Errors
    /// When a table cannot be opened.
    pub fn events(&self) -> Result<Events> {
        Events::open(&self.folder)
    }
}

/// Iterator over a capture's events; see [`Reader::events`].
pub struct Events {
    tables: Vec<Box<dyn Cursor>>,
    /// Index into `tables` of every table that is not at its end, with the time of its next event.
    next: BinaryHeap<std::cmp::Reverse<(u64, u8, usize)>>,
}

impl Events {
    pub(crate) fn open(folder: &Folder) -> Result<Self> {
        Self::open_some(folder, |_| true)
    }

    /// Of the tables that are wanted, by their names.
    pub(crate) fn open_some(folder: &Folder, is_wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let mut tables: Vec<Box<dyn Cursor>> = Vec::new();
        macro_rules! open {
            ($($field:ident: $type:ty),* $(,)?) => {$(
                if is_wanted(<$type as Table>::NAME) {
                    tables.push(Box::new(TableCursor::<$type> {
                        batches: Batches::open(folder)?,
                        rows: Vec::new().into_iter(),
                    }));
                }
            )*};
        }
        for_each_event_table!(open);
        let mut events = Self { tables, next: BinaryHeap::new() };
        for index in 0..events.tables.len() {
            events.advance(index)?;
        }
        Ok(events)
    }

    fn advance(&mut self, index: usize) -> Result<()> {
        if let Some(table) = self.tables.get_mut(index)
            && let Some(time_ns) = table.peek()?
        {
            self.next.push(std::cmp::Reverse((time_ns, table.rank(), index)));
        }
        Ok(())
    }

    /// Tables that were torn; complete once all events have been taken.
    #[must_use]
    pub fn torn(&self) -> Vec<Torn> {
        self.tables.iter().filter_map(|table| table.torn()).collect()
    }
}

impl Iterator for Events {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        let std::cmp::Reverse((_, _, index)) = self.next.pop()?;
        let event = self.tables.get_mut(index)?.take()?;
        Some(self.advance(index).map(|()| event))
    }
}

/// One table of the merge.
trait Cursor {
    fn rank(&self) -> u8;
    /// Time of the next event; `None` at the end.
    fn peek(&mut self) -> Result<Option<u64>>;
    fn take(&mut self) -> Option<Event>;
    fn torn(&self) -> Option<Torn>;
}

struct TableCursor<T> {
    batches: Batches<T>,
    /// The rest of a batch, in order of time.
    rows: std::vec::IntoIter<Event>,
}

impl<T: EventTable> Cursor for TableCursor<T> {
    fn rank(&self) -> u8 {
        T::RANK
    }

    fn peek(&mut self) -> Result<Option<u64>> {
        while self.rows.as_slice().is_empty() {
            let Some(rows) = self.batches.next_rows()? else { return Ok(None) };
            let mut events: Vec<Event> = rows.into_iter().map(T::into_event).collect();
            events.sort_by_key(Event::time_ns);
            self.rows = events.into_iter();
        }
        Ok(self.rows.as_slice().first().map(Event::time_ns))
    }

    fn take(&mut self) -> Option<Event> {
        self.rows.next()
    }

    fn torn(&self) -> Option<Torn> {
        self.batches.torn()
    }
}

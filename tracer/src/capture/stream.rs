//! One raw table as it is recorded: an Arrow IPC stream, written batch by batch and readable up to a torn end.

use std::fs::File;
use std::io::{self, BufReader, Read, Write as _};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;

use super::column::Columns;
use super::error::{Context, Result};
use super::folder::Folder;
use super::raw::Table;

/// Most rows that wait in memory, per table.
pub(crate) const BATCH_ROWS: usize = 16_384;

/// Schema of a table's files.
pub(crate) fn schema<T: Columns>() -> SchemaRef {
    let mut fields = Vec::new();
    T::fields("value", &mut fields);
    Arc::new(Schema::new(fields))
}

/// Takes the rows out of a builder as a batch.
pub(crate) fn batch<T: Columns>(
    builder: &mut T::Builder,
    rows: usize,
    schema: &SchemaRef,
) -> Result<RecordBatch, ArrowError> {
    let mut columns = Vec::new();
    T::finish(builder, &mut columns)?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
}

/// Reads all rows of a batch.
pub(crate) fn rows<T: Columns>(batch: &RecordBatch) -> Result<Vec<T>, super::column::ColumnError> {
    let reader = T::open("value", batch.into())?;
    (0..batch.num_rows()).map(|row| T::get(&reader, row)).collect()
}

/// Appends a table's rows to its stream. The file is made with the first batch.
pub(crate) struct TableWriter<T: Table> {
    builder: T::Builder,
    rows: usize,
    stream: Option<Stream>,
}

impl<T: Table> Default for TableWriter<T> {
    fn default() -> Self {
        Self { builder: T::Builder::default(), rows: 0, stream: None }
    }
}

impl<T: Table> TableWriter<T> {
    /// Appends a row; a full batch goes to the file.
    pub(crate) fn push(&mut self, folder: &Folder, push: impl FnOnce(&mut T::Builder)) -> Result<()> {
        push(&mut self.builder);
        self.rows += 1;
        if self.rows >= BATCH_ROWS { self.flush(folder) } else { Ok(()) }
    }

    /// Rows that wait in memory.
    pub(crate) fn waiting(&self) -> usize {
        self.rows
    }

    /// Writes the waiting rows as one batch. On an error they are given up, and the file is as it was before.
    pub(crate) fn flush(&mut self, folder: &Folder) -> Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let path = folder.raw(T::NAME);
        let rows = std::mem::take(&mut self.rows);
        let schema = schema::<T>();
        let batch = batch::<T>(&mut self.builder, rows, &schema).context("write", &path)?;
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => self.stream.insert(Stream::create(folder, &path, &schema)?),
        };
        stream.write(&batch).context("write", &path)
    }
}

/// A file of encoded batches, whole ones only.
struct Stream {
    file: File,
    /// Bytes of the batches that were written as a whole.
    bytes: u64,
    encoder: StreamWriter<Vec<u8>>,
}

impl Stream {
    fn create(folder: &Folder, path: &Path, schema: &Schema) -> Result<Self> {
        let encoder = StreamWriter::try_new(Vec::new(), schema).context("write", path)?;
        Ok(Self { file: folder.create_file(path).context("create", path)?, bytes: 0, encoder })
    }

    fn write(&mut self, batch: &RecordBatch) -> Result<(), ArrowError> {
        // Before the first batch the buffer holds the schema; it stays until a write has succeeded.
        let before = self.encoder.get_ref().len();
        let written = self.encoder.write(batch);
        let encoded = self.encoder.get_mut();
        match written.and_then(|()| Ok(self.file.write_all(encoded)?)) {
            Ok(()) => {
                self.bytes += u64::try_from(encoded.len()).unwrap_or(0);
                encoded.clear();
                Ok(())
            }
            Err(error) => {
                encoded.truncate(before);
                // Takes a part of a batch back; where that fails too, readers stop at the torn end all the same.
                let _ = self.file.set_len(self.bytes);
                Err(error)
            }
        }
    }
}

/// Reads a stream's batches up to its end or to the first thing that is not a whole batch.
pub(crate) struct StreamBatches {
    /// `None` after the end, and for a file that tore in its schema.
    reader: Option<StreamReader<Counted>>,
    bytes: u64,
    good_bytes: u64,
    rows: u64,
}

/// Counts the bytes that were taken.
struct Counted {
    inner: BufReader<File>,
    bytes: u64,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.bytes += u64::try_from(n).unwrap_or(0);
        Ok(n)
    }
}

impl StreamBatches {
    /// # Errors
    /// When the file cannot be read at all; torn and damaged content is no error.
    pub(crate) fn open(file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        let counted = Counted { inner: BufReader::new(file), bytes: 0 };
        let reader = guard(|| StreamReader::try_new(counted, None));
        let good_bytes = reader.as_ref().map_or(0, |reader| reader.get_ref().bytes);
        Ok(Self { reader, bytes, good_bytes, rows: 0 })
    }

    /// Bytes after the last whole batch; final once the batches have come to their end.
    pub(crate) fn torn_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.good_bytes)
    }

    /// Rows that were read.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Gives up the rest, from the batch that came last on: its content was not what it should be.
    pub(crate) fn reject(&mut self, batch: &RecordBatch, bytes_before: u64) {
        self.rows -= u64::try_from(batch.num_rows()).unwrap_or(0);
        self.good_bytes = bytes_before;
        self.reader = None;
    }

    /// Bytes up to the last whole batch.
    pub(crate) fn good_bytes(&self) -> u64 {
        self.good_bytes
    }
}

impl Iterator for StreamBatches {
    type Item = RecordBatch;

    fn next(&mut self) -> Option<RecordBatch> {
        let mut reader = self.reader.take()?;
        let (reader, batch) = guard(|| {
            let batch = reader.next().transpose()?;
            Ok((reader, batch))
        })?;
        let batch = batch?;
        self.good_bytes = reader.get_ref().bytes;
        self.rows += u64::try_from(batch.num_rows()).unwrap_or(0);
        self.reader = Some(reader);
        Some(batch)
    }
}

/// `None` when decoding fails. The decoder of the arrow crate checks most, not all, of what a damaged file can hold
/// before it relies on it, and panics on the rest.
fn guard<T>(decode: impl FnOnce() -> Result<T, ArrowError>) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode)).ok()?.ok()
}

#[cfg(test)]
impl<T: Table> TableWriter<T> {
    pub(crate) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.stream.as_mut().expect("a batch was written").file, file)
    }
}

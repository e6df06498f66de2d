//! One raw table as it is recorded: an Arrow IPC stream, appended to batch by batch.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
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

#[cfg(test)]
impl<T: Table> TableWriter<T> {
    pub(crate) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.stream.as_mut().expect("a batch was written").file, file)
    }
}

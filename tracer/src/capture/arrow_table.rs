//! Derived tables as they lie in their files, for other forms of them.

use std::path::PathBuf;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::error::{Context, Result};
use super::open::Capture;
use super::reader::open_if_there;
use super::stream::BATCH_ROWS;

/// The rows of a derived table, batch by batch; ends after the first error.
pub struct ArrowBatches {
    reader: Option<ParquetRecordBatchReader>,
    schema: SchemaRef,
    path: PathBuf,
}

impl ArrowBatches {
    #[must_use]
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

impl Iterator for ArrowBatches {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.reader.as_mut()?.next()?.context("read", &self.path);
        if batch.is_err() {
            self.reader = None;
        }
        Some(batch)
    }
}

impl Capture {
    /// A derived table by its name in [`DERIVED_TABLES`](super::DERIVED_TABLES); `None` when the capture has none.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn batches(&self, table: &str) -> Result<Option<ArrowBatches>> {
        let path = self.folder().table(table);
        let Some(file) = open_if_there(&path)? else { return Ok(None) };
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).context("read", &path)?;
        let schema = builder.schema().clone();
        let reader = Some(builder.with_batch_size(BATCH_ROWS).build().context("read", &path)?);
        Ok(Some(ArrowBatches { reader, schema, path }))
    }
}

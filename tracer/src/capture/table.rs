//! One finished table: a Parquet file.

use std::fs::File;

use arrow::datatypes::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::error::{Context, Result};
use super::folder::{Folder, Replacement};
use super::raw::Table;
use super::stream::{BATCH_ROWS, batch, schema};

/// Rows of a row group: small enough to read a window of time without the rest, large enough to compress well.
const ROW_GROUP_ROWS: usize = 65_536;

/// Writes a table's rows; nothing is seen of them before [`TableFile::commit`].
pub(crate) struct TableFile<T: Table> {
    replacement: Replacement,
    parquet: ArrowWriter<File>,
    schema: SchemaRef,
    builder: T::Builder,
    waiting: usize,
    rows: u64,
}

impl<T: Table> TableFile<T> {
    pub(crate) fn begin(folder: &Folder) -> Result<Self> {
        let replacement = folder.begin(&folder.table(T::NAME))?;
        let schema = schema::<T>();
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
            .set_created_by(concat!("tracer ", env!("CARGO_PKG_VERSION")).into())
            .build();
        let parquet = ArrowWriter::try_new(replacement.writer()?, schema.clone(), Some(properties))
            .context("write", replacement.path())?;
        Ok(Self { replacement, parquet, schema, builder: T::Builder::default(), waiting: 0, rows: 0 })
    }

    pub(crate) fn push(&mut self, row: &T) -> Result<()> {
        row.push(&mut self.builder);
        self.waiting += 1;
        self.rows += 1;
        if self.waiting >= BATCH_ROWS { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        if self.waiting > 0 {
            let rows = std::mem::take(&mut self.waiting);
            let batch = batch::<T>(&mut self.builder, rows, &self.schema);
            let batch = batch.context("write", self.replacement.path())?;
            self.parquet.write(&batch).context("write", self.replacement.path())?;
        }
        Ok(())
    }

    /// Puts the table in its place; returns how many rows it has.
    pub(crate) fn commit(mut self) -> Result<u64> {
        self.flush()?;
        self.parquet.close().context("write", self.replacement.path())?;
        self.replacement.commit()?;
        Ok(self.rows)
    }
}

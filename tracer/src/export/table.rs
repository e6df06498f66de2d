//! Derived tables as files: Parquet as in the capture, or CSV.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::{Context as _, Result};
use arrow::array::RecordBatch;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Redactor;
use crate::capture::{Capture, DERIVED_TABLES};

/// How tables are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// RFC 4180, with a line of column names; nothing for null, lists as `[{…}]`.
    Csv,
    Parquet,
}

/// Writes each derived table into a file of its own in `dir`, which is made where it is missing.
///
/// # Errors
/// When a table cannot be read, or a file not be written.
pub fn tables(capture: &Capture, format: Format, dir: &Path, redactor: Option<&Redactor>) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    for name in DERIVED_TABLES {
        let Some(batches) = capture.batches(name)? else { continue };
        let schema = batches.schema();
        let batches = batches.map(|batch| {
            let batch = batch?;
            let Some(redactor) = redactor else { return Ok(batch) };
            let columns = schema.fields().iter().zip(batch.columns());
            let columns =
                columns.map(|(field, column)| redactor.column(name, field.name(), column)).collect();
            Ok(RecordBatch::try_new(schema.clone(), columns)?)
        });
        let path = dir.join(name).with_extension(match format {
            Format::Csv => "csv",
            Format::Parquet => "parquet",
        });
        let write = || -> Result<()> {
            let file = BufWriter::new(File::create(&path)?);
            match format {
                Format::Csv => csv(file, &schema, batches),
                Format::Parquet => parquet(file, schema.clone(), batches),
            }
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn parquet(
    file: BufWriter<File>,
    schema: arrow::datatypes::SchemaRef,
    batches: impl Iterator<Item = Result<RecordBatch>>,
) -> Result<()> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by(concat!("tracer ", env!("CARGO_PKG_VERSION")).into())
        .build();
    let mut writer = ArrowWriter::try_new(file, schema, Some(properties))?;
    for batch in batches {
        writer.write(&batch?)?;
    }
    writer.close()?;
    Ok(())
}

fn csv(
    mut out: impl Write,
    schema: &arrow::datatypes::Schema,
    batches: impl Iterator<Item = Result<RecordBatch>>,
) -> Result<()> {
    let names = schema.fields().iter().map(|field| field.name().clone());
    line(&mut out, names)?;
    let options = FormatOptions::default();
    for batch in batches {
        let batch = batch?;
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column.as_ref(), &options));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        for row in 0..batch.num_rows() {
            let cells = columns.iter().map(|column| column.value(row).try_to_string());
            line(&mut out, cells.collect::<Result<Vec<_>, _>>()?.into_iter())?;
        }
    }
    Ok(out.flush()?)
}

fn line(out: &mut impl Write, cells: impl Iterator<Item = String>) -> io::Result<()> {
    for (i, cell) in cells.enumerate() {
        let comma = if i == 0 { "" } else { "," };
        if cell.contains([',', '"', '\n', '\r']) {
            write!(out, "{comma}\"{}\"", cell.replace('"', "\"\""))?;
        } else {
            write!(out, "{comma}{cell}")?;
        }
    }
    out.write_all(b"\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_that_would_break_a_line_are_quoted() {
        let mut out = Vec::new();
        line(&mut out, ["a", "b,c", "say \"x\"\n", ""].map(str::to_owned).into_iter()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a,\"b,c\",\"say \"\"x\"\"\n\",\r\n");
    }
}

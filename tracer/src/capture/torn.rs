//! Reading an Arrow IPC stream that may be torn or damaged.
//!
//! The decoder of the arrow crate relies on some of what a stream says about itself and panics when it is wrong.
//! So the framing is read here, and every batch's layout is checked against its bytes before it is decoded.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::{self, MessageHeader, MetadataVersion};

/// What begins every message: this marker, then the bytes of its header as i32, then the header, then its body.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// Reads a stream's batches up to its end or to the first thing that is not a whole batch.
pub(crate) struct StreamBatches {
    file: BufReader<File>,
    /// `None` once the end was reached, and for a file that tore in its schema.
    schema: Option<SchemaRef>,
    bytes: u64,
    good_bytes: u64,
    rows: u64,
}

/// A message whose framing is whole.
struct Message {
    header: Vec<u8>,
    body: Vec<u8>,
    bytes: u64,
}

impl StreamBatches {
    /// # Errors
    /// When the file cannot be read at all; torn and damaged content is no error.
    pub(crate) fn open(file: File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        let mut stream = Self { file: BufReader::new(file), schema: None, bytes, good_bytes: 0, rows: 0 };
        if let Some(message) = stream.message()?
            && let Some(schema) = message.schema()
        {
            stream.schema = Some(Arc::new(schema));
            stream.good_bytes = message.bytes;
        }
        Ok(stream)
    }

    /// The next batch; `None` at the end, whole or torn.
    ///
    /// # Errors
    /// When the system cannot read the file.
    pub(crate) fn next_batch(&mut self) -> io::Result<Option<RecordBatch>> {
        let Some(schema) = self.schema.take() else { return Ok(None) };
        let Some(message) = self.message()? else { return Ok(None) };
        let bytes = message.bytes;
        let Some(batch) = message.batch(&schema) else { return Ok(None) };
        self.good_bytes += bytes;
        self.rows += u64::try_from(batch.num_rows()).unwrap_or(0);
        self.schema = Some(schema);
        Ok(Some(batch))
    }

    /// Bytes after the last whole batch; final once the batches have come to their end.
    pub(crate) fn torn_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.good_bytes)
    }

    /// Bytes up to the last whole batch.
    pub(crate) fn good_bytes(&self) -> u64 {
        self.good_bytes
    }

    /// Rows that were read.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Gives up the rest, from the batch that came last on: its content was not what it should be.
    pub(crate) fn reject(&mut self, batch: &RecordBatch, bytes_before: u64) {
        self.rows = self.rows.saturating_sub(u64::try_from(batch.num_rows()).unwrap_or(0));
        self.good_bytes = bytes_before;
        self.schema = None;
    }

    /// Reads the next message. Lengths that the file cannot hold are not believed.
    fn message(&mut self) -> io::Result<Option<Message>> {
        let left = self.bytes.saturating_sub(self.good_bytes);
        let Some(prefix) = self.take(8, left)? else { return Ok(None) };
        let (marker, length) = prefix.split_at(4);
        let length = length.try_into().map(i32::from_le_bytes).unwrap_or(0);
        if marker != CONTINUATION || length <= 0 {
            return Ok(None);
        }
        let Some(header) = self.take(length.into(), left - 8)? else { return Ok(None) };
        let header_bytes = u64::try_from(header.len()).unwrap_or(0);
        let Some(body) = ipc::root_as_message(&header).ok().map(|message| message.bodyLength()) else {
            return Ok(None);
        };
        let Some(body) = self.take(body, left - 8 - header_bytes)? else { return Ok(None) };
        let bytes = 8 + header_bytes + u64::try_from(body.len()).unwrap_or(0);
        Ok(Some(Message { header, body, bytes }))
    }

    fn take(&mut self, length: i64, left: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(length) = u64::try_from(length).ok().filter(|&length| length <= left) else {
            return Ok(None);
        };
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        match self.file.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            result => result.map(|()| Some(bytes)),
        }
    }
}

impl Message {
    fn schema(&self) -> Option<Schema> {
        let schema = ipc::root_as_message(&self.header).ok()?.header_as_schema()?;
        let schema = ipc::convert::try_fb_to_schema(schema).ok()?;
        schema.fields().iter().all(|field| is_known(field.data_type())).then_some(schema)
    }

    fn batch(self, schema: &SchemaRef) -> Option<RecordBatch> {
        let message = ipc::root_as_message(&self.header).ok()?;
        if message.header_type() != MessageHeader::RecordBatch || message.version() != MetadataVersion::V5 {
            return None;
        }
        let batch = message.header_as_record_batch()?;
        if batch.compression().is_some() || batch.variadicBufferCounts().is_some() {
            return None;
        }
        let layout = Layout {
            nodes: batch
                .nodes()?
                .iter()
                .map(|node| (node.length(), node.null_count()))
                .collect::<Vec<_>>()
                .into_iter(),
            buffers: batch
                .buffers()?
                .iter()
                .map(|buffer| (buffer.offset(), buffer.length()))
                .collect::<Vec<_>>()
                .into_iter(),
            body: self.body.len(),
        };
        layout.check(schema, batch.length())?;
        let body = Buffer::from_vec(self.body);
        let none = HashMap::new();
        ipc::reader::read_record_batch(&body, batch, schema.clone(), &none, None, &message.version()).ok()
    }
}

/// Types that the tables have; a schema with others is damaged.
fn is_known(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) => is_known(item.data_type()),
        DataType::Struct(fields) => fields.iter().all(|field| is_known(field.data_type())),
        DataType::Utf8 | DataType::Boolean => true,
        other => other.primitive_width().is_some(),
    }
}

/// What a batch says about its own body, in the order of the schema's fields, depth first.
struct Layout {
    /// Rows and nulls of each array.
    nodes: std::vec::IntoIter<(i64, i64)>,
    /// Offset and length in bytes of each buffer.
    buffers: std::vec::IntoIter<(i64, i64)>,
    body: usize,
}

impl Layout {
    /// `None` unless every array's buffers lie in the body and are long enough for its rows.
    fn check(mut self, schema: &Schema, rows: i64) -> Option<()> {
        usize::try_from(rows).ok()?;
        for field in schema.fields() {
            self.array(field)?;
        }
        (self.nodes.len() == 0 && self.buffers.len() == 0).then_some(())
    }

    fn array(&mut self, field: &Field) -> Option<()> {
        let (rows, nulls) = self.nodes.next()?;
        let (rows, nulls) = (usize::try_from(rows).ok()?, usize::try_from(nulls).ok()?);
        self.buffer(if nulls > 0 { rows.div_ceil(8) } else { 0 }, 1)?;
        match field.data_type() {
            DataType::Boolean => self.buffer(rows.div_ceil(8), 1),
            DataType::Utf8 => {
                self.buffer(rows.checked_add(1)?.checked_mul(4)?, 4)?;
                self.buffer(0, 1)
            }
            DataType::List(item) => {
                self.buffer(rows.checked_add(1)?.checked_mul(4)?, 4)?;
                self.array(item)
            }
            DataType::Struct(fields) => fields.iter().try_for_each(|field| self.array(field)),
            other => {
                let width = other.primitive_width()?;
                self.buffer(rows.checked_mul(width)?, width)
            }
        }
    }

    fn buffer(&mut self, at_least: usize, unit: usize) -> Option<()> {
        let (offset, length) = self.buffers.next()?;
        let (offset, length) = (usize::try_from(offset).ok()?, usize::try_from(length).ok()?);
        let inside = offset.checked_add(length)? <= self.body;
        (inside && length >= at_least && length.is_multiple_of(unit)).then_some(())
    }
}

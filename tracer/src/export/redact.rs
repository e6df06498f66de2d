//! Taking out what must not be shared: who asked, on which machine, where files lie.
//!
//! Identifiers (of requests, traces, tenants, adapters, engine files, devices; the program's own numbers) become keyed hashes: equal ones stay
//! equal within what one [`Redactor`] wrote, and nobody can try candidates, since its key is random and thrown away.
//! Host names and command lines are dropped. Of paths the last part stays, which names libraries and scripts. Names of
//! functions, threads, GPUs and models stay: without them a picture says nothing.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray as _, ListArray, StringArray, StructArray, UInt64Array};
use arrow::datatypes::{DataType, UInt64Type};
use sha2::{Digest as _, Sha256};

use super::Material;

/// Replaces identifiers by hashes of one key.
pub struct Redactor {
    key: [u8; 32],
}

/// Columns of text that say nothing of who or where; as `table.column` where others of the name do.
const PLAIN_COLUMNS: [&str; 9] =
    ["quantization", "source", "joined_by", "ended", "reason", "kind", "ledger.name", "blocked_on", "end"];
/// Columns of text in which paths may be.
const TEXT_COLUMNS: [&str; 10] = [
    "function",
    "module",
    "model",
    "model_version",
    "kv_cache_strategy",
    "layers.name",
    "engine_version",
    "input_shapes",
    "output_shapes",
    "data_types",
];
/// Columns of the program's own numbers of requests; the second is that of a step's slots.
const NUMBER_COLUMNS: [&str; 2] = ["program_request", "slots.request"];

impl Redactor {
    /// With a key that nobody knows.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn new() -> io::Result<Self> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(Self { key })
    }

    fn digest(&self, bytes: &[u8]) -> [u8; 32] {
        // The key fills half of the first block and has one length: no extension attack has anything to gain here, since
        // inputs are secret and digests are cut.
        Sha256::new().chain_update(self.key).chain_update(bytes).finalize().into()
    }

    /// 16 hexadecimal digits for an identifier; nothing for none.
    #[must_use]
    pub fn id(&self, id: &str) -> String {
        if id.is_empty() {
            return String::new();
        }
        self.digest(id.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Another number of at most 48 bits.
    #[must_use]
    pub fn number(&self, number: u64) -> u64 {
        self.digest(&number.to_le_bytes()).iter().take(6).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// As many other bytes, at most 32.
    #[must_use]
    pub fn bytes<const N: usize>(&self, bytes: [u8; N]) -> [u8; N] {
        let digest = self.digest(&bytes);
        std::array::from_fn(|i| digest.get(i).copied().unwrap_or(0))
    }

    /// The text with the last part of each path in it.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        let ends = |c: char| c.is_whitespace() || "()[]<>\"'`,;=|".contains(c);
        text.split_inclusive(ends)
            .map(|word| {
                let body = word.trim_end_matches(ends);
                let last = body.trim_end_matches('/').rsplit('/').next().unwrap_or(body);
                // `operator/` and the like are no paths.
                if body.ends_with('/') || last.is_empty() { word } else { &word[body.len() - last.len()..] }
            })
            .collect()
    }

    /// Takes it out of everything that pictures and traces are made of.
    pub fn redact(&self, material: &mut Material) {
        let Material { tables, stacks, .. } = material;
        let meta = &mut tables.meta;
        (meta.host, meta.target) = (String::new(), String::new());
        meta.not_recorded.values_mut().for_each(|reason| *reason = self.text(reason));
        for request in &mut tables.requests {
            request.request_id = self.id(&request.request_id);
            request.tenant_id = self.id(&request.tenant_id);
            request.engine_hash = self.id(&request.engine_hash);
            request.adapters = self.id(&request.adapters);
            request.model = self.text(&request.model);
            request.model_version = self.text(&request.model_version);
            request.kv_cache_strategy = self.text(&request.kv_cache_strategy);
            request.program_request = self.number(request.program_request);
            request.trace_id = request.trace_id.map(|id| self.bytes(id));
            request.span_id = request.span_id.map(|id| self.bytes(id));
        }
        for step in &mut tables.steps {
            step.device_uuid = step.device_uuid.map(|uuid| self.bytes(uuid));
            (step.engine, step.nvtx_range) = (None, String::new());
            step.nvtx_request = self.id(&step.nvtx_request);
            step.slots.iter_mut().for_each(|slot| slot.request = self.number(slot.request));
        }
        tables.clocks.iter_mut().for_each(|c| c.series.device_uuid = self.bytes(c.series.device_uuid));
        tables.gpu_samples.iter_mut().for_each(|gpu| gpu.device_uuid = self.bytes(gpu.device_uuid));
        tables.gpu_processes.iter_mut().for_each(|gpu| gpu.device_uuid = self.bytes(gpu.device_uuid));
        tables.points.iter_mut().for_each(|point| point.library = self.text(&point.library));
        tables.engine_files.clear();
        tables.phases.clear();
        tables.layers.iter_mut().for_each(|layer| layer.name = self.text(&layer.name));
        tables.xids.iter_mut().for_each(|xid| xid.message.clear());
        stacks.names_mut().for_each(|name| *name = self.text(name));
    }

    /// A column of a table without it. Text of columns that are not known here is hashed.
    #[must_use]
    pub fn column(&self, table: &str, name: &str, column: &ArrayRef) -> ArrayRef {
        let qualified = format!("{table}.{name}");
        let is_in = |columns: &[&str]| columns.contains(&name) || columns.contains(&qualified.as_str());
        let within = |child: &str| format!("{name}.{child}");
        match column.data_type() {
            DataType::Utf8 if !is_in(&PLAIN_COLUMNS) => {
                let is_text = is_in(&TEXT_COLUMNS);
                let change = |text: &str| if is_text { self.text(text) } else { self.id(text) };
                let texts = column.as_string::<i32>().iter();
                Arc::new(texts.map(|text| text.map(change)).collect::<StringArray>())
            }
            DataType::UInt64 if is_in(&NUMBER_COLUMNS) => {
                let numbers = column.as_primitive::<UInt64Type>().iter();
                Arc::new(
                    numbers.map(|number| number.map(|number| self.number(number))).collect::<UInt64Array>(),
                )
            }
            DataType::Struct(fields) => {
                let parts = column.as_struct();
                let changed = fields.iter().zip(parts.columns());
                let changed =
                    changed.map(|(field, part)| self.column(table, &within(field.name()), part)).collect();
                Arc::new(StructArray::new(fields.clone(), changed, parts.nulls().cloned()))
            }
            DataType::List(field) => {
                let list = column.as_list::<i32>();
                let values = self.column(table, name, list.values());
                Arc::new(ListArray::new(field.clone(), list.offsets().clone(), values, list.nulls().cloned()))
            }
            _ => column.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ids_stay_equal_under_one_key_only() {
        let (one, other) = (Redactor::new().unwrap(), Redactor::new().unwrap());
        assert_eq!(one.id("req-1"), one.id("req-1"));
        assert_ne!(one.id("req-1"), one.id("req-2"));
        assert_ne!(one.id("req-1"), other.id("req-1"));
        assert_eq!((one.id("").as_str(), one.id("x").len()), ("", 16));
        assert!(one.number(7) < 1 << 48);
        assert_ne!(one.bytes([1; 16]), [1; 16]);
    }

    #[test]
    fn of_paths_the_last_part_stays() {
        let redactor = Redactor { key: [0; 32] };
        for (text, kept) in [
            ("/opt/acme/lib/libfoo.so.1+0x12", "libfoo.so.1+0x12"),
            ("step (/home/ann/serve.py:12)", "step (serve.py:12)"),
            ("Vec3::operator/(Vec3 const&)", "Vec3::operator/(Vec3 const&)"),
            ("acme/private-7b", "private-7b"),
            ("open /dev/nvidia0: denied, see /var/log/x", "open nvidia0: denied, see x"),
            ("a::b<c::D>", "a::b<c::D>"),
            ("", ""),
        ] {
            assert_eq!(redactor.text(text), kept);
        }
    }
}

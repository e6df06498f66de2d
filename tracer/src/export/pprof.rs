//! Token time as a profile for pprof and speedscope: `profile.proto`, compressed.
//!
//! Messages and numbers are those of github.com/google/pprof/proto/profile.proto; fields that are not used are left out.

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use super::{Caption, Leaf, Material, path, request_name};
use crate::timeline::budget::Place;

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// Leaf first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

/// Strings by number; the first is the empty one.
struct Strings(HashMap<String, i64>);

impl Strings {
    fn number(&mut self, text: &str) -> i64 {
        if let Some(&known) = self.0.get(text) {
            return known;
        }
        let next = self.0.len() as i64;
        self.0.insert(text.to_owned(), next);
        next
    }

    fn into_table(self) -> Vec<String> {
        let mut strings: Vec<(String, i64)> = self.0.into_iter().collect();
        strings.sort_by_key(|(_, number)| *number);
        strings.into_iter().map(|(text, _)| text).collect()
    }
}

/// The time of all tokens with a known latency: phase → part → stack, labelled with request and tenant.
///
/// # Errors
/// When it cannot be compressed.
pub fn profile(material: &Material, caption: &Caption) -> std::io::Result<Vec<u8>> {
    let tables = &material.tables;
    let mut time: BTreeMap<(u64, Leaf), [i64; 2]> = BTreeMap::new();
    for token in &tables.tokens {
        for segment in material.budgets.segments(token) {
            let [parts, ns] = time.entry((token.request, (token.prefill, Place::of(&segment)))).or_default();
            *parts += 1;
            *ns += segment.length_ns().cast_signed();
        }
    }
    let requests: HashMap<u64, _> = tables.requests.iter().map(|request| (request.id, request)).collect();
    let mut strings = Strings(HashMap::from([(String::new(), 0)]));
    let mut value_type =
        |name: &str, unit: &str| ValueType { r#type: strings.number(name), unit: strings.number(unit) };
    let sample_type = vec![value_type("parts", "count"), value_type("token_time", "nanoseconds")];
    let period_type = Some(value_type("token_time", "nanoseconds"));
    let mut functions: HashMap<i64, u64> = HashMap::new();
    let mut paths: HashMap<Leaf, Vec<u64>> = HashMap::new();
    let mut sample = Vec::new();
    for ((request, leaf), value) in time {
        let location_id = paths.entry(leaf).or_insert_with(|| {
            let names = path(material, leaf).into_iter().rev();
            let mut id = |name: String| {
                let next = functions.len() as u64 + 1;
                *functions.entry(strings.number(&name)).or_insert(next)
            };
            names.map(&mut id).collect()
        });
        let location_id = location_id.clone();
        let mut label = Vec::new();
        if let Some(request) = requests.get(&request) {
            let mut add = |key: &str, text: &str| {
                let (key, str) = (strings.number(key), strings.number(text));
                label.extend((str != 0).then_some(Label { key, str }));
            };
            add("request", &request_name(request));
            add("tenant", &request.tenant_id);
            add("model", &request.model);
        }
        sample.push(Sample { location_id, value: value.to_vec(), label });
    }
    let mut function: Vec<Function> = functions.iter().map(|(&name, &id)| Function { id, name }).collect();
    function.sort_by_key(|function| function.id);
    let location =
        |function: &Function| Location { id: function.id, line: vec![Line { function_id: function.id }] };
    let default_sample_type = strings.number("token_time");
    let comment = caption.notes.iter().map(|note| strings.number(note)).collect();
    let profile = Profile {
        sample_type,
        sample,
        location: function.iter().map(location).collect(),
        function,
        string_table: strings.into_table(),
        time_nanos: tables.meta.started_realtime_ns.cast_signed(),
        duration_nanos: caption.span_ns.cast_signed(),
        period_type,
        period: 1,
        comment,
        default_sample_type,
    };
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(&profile.encode_to_vec())?;
    packed.finish()
}

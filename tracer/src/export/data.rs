//! The capture as its page carries it: names as JSON, everything of which there are many as columns of varints.
//!
//! A million tokens have some eight million parts. Tokens lie by request and in order, so that the time of one is that of
//! the one before plus its latency, and its index one more: columns of zeros, which DEFLATE takes away. Parts refer to a
//! dictionary of (phase, part, stack). Times are whole µs: *edges* are rounded, not lengths, so that parts still sum to
//! their token's latency.

use std::collections::HashMap;

use flamegraphs::Loss;
use flamegraphs::text::{clean, shorten};
use serde::Serialize;

use super::{Caption, Leaf, Material, path, request_name};
use crate::timeline::budget::{Label, Place};
use crate::timeline::rows::{Request, Token};

/// Longest name, in characters; longer ones are cut.
const LONGEST_NAME: usize = 300;

/// What the latency of a token is, in the two low bits of its flags; 0: not known.
const TTFT: u64 = 1;
const ITL: u64 = 2;

/// A column of LEB128 numbers; signed ones are zigzag.
#[derive(Default)]
struct Column {
    bytes: Vec<u8>,
    count: usize,
}

impl Column {
    fn push(&mut self, mut value: u64) {
        self.count += 1;
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn push_signed(&mut self, value: i64) {
        self.push((value << 1 ^ value >> 63).cast_unsigned());
    }
}

#[derive(Default)]
struct Columns {
    /// delivered − that of the token before − latency, µs.
    delivered: Column,
    /// µs.
    latency: Column,
    /// index − (that of the token before + 1).
    index: Column,
    /// choice − that of the token before.
    choice: Column,
    flags: Column,
    segments: Column,
    leaf: Column,
    /// Of a part, µs.
    length: Column,
}

#[derive(Serialize)]
struct ColumnHead {
    name: &'static str,
    count: usize,
    bytes: usize,
    signed: bool,
}

impl Columns {
    fn all(&self) -> [(&'static str, bool, &Column); 8] {
        [
            ("deliveredDelta", true, &self.delivered),
            ("latency", false, &self.latency),
            ("indexDelta", true, &self.index),
            ("choiceDelta", true, &self.choice),
            ("flags", false, &self.flags),
            ("segments", false, &self.segments),
            ("leaf", false, &self.leaf),
            ("length", false, &self.length),
        ]
    }
}

#[derive(Serialize)]
struct LabelHead {
    name: &'static str,
    meaning: &'static str,
}

/// A stretch of time, µs, and what was lost in it.
#[derive(Serialize)]
struct LossHead {
    from: u64,
    to: u64,
    what: String,
}

#[derive(Serialize)]
struct LeafHead {
    label: usize,
    /// Indices of names, root first.
    path: Vec<usize>,
}

/// Requests, in order of their beginning; columns.
#[derive(Default, Serialize)]
struct Requests {
    id: Vec<String>,
    number: Vec<u64>,
    received: Vec<Option<u64>>,
    tokens: Vec<usize>,
    tenant: Vec<String>,
    model: Vec<String>,
    prompt: Vec<Option<u32>>,
}

#[derive(Serialize)]
struct Head<'a> {
    #[serde(flatten)]
    caption: &'a Caption,
    /// Length of the recording, µs.
    span: u64,
    losses: Vec<LossHead>,
    labels: Vec<LabelHead>,
    leaves: Vec<LeafHead>,
    names: Vec<String>,
    requests: Requests,
    columns: Vec<ColumnHead>,
}

/// Numbers of names and leaves, in order of appearance.
#[derive(Default)]
struct Dictionary {
    names: HashMap<String, usize>,
    leaves: HashMap<Leaf, usize>,
    heads: Vec<LeafHead>,
}

impl Dictionary {
    fn leaf(&mut self, leaf: Leaf, material: &Material) -> usize {
        if let Some(&known) = self.leaves.get(&leaf) {
            return known;
        }
        let path = path(material, leaf).into_iter().map(|name| self.name(&name)).collect();
        self.heads.push(LeafHead { label: leaf.1.label as usize, path });
        self.leaves.insert(leaf, self.heads.len() - 1);
        self.heads.len() - 1
    }

    fn name(&mut self, text: &str) -> usize {
        let next = self.names.len();
        *self.names.entry(name(text)).or_insert(next)
    }

    fn into_names(self) -> (Vec<String>, Vec<LeafHead>) {
        let mut names: Vec<(String, usize)> = self.names.into_iter().collect();
        names.sort_by_key(|(_, number)| *number);
        (names.into_iter().map(|(name, _)| name).collect(), self.heads)
    }
}

/// The page's data block, not yet compressed; what it looks like is told in `page/data.js`.
pub(super) fn block(material: &Material, caption: &Caption) -> serde_json::Result<Vec<u8>> {
    let tables = &material.tables;
    let start_ns = tables.meta.started_ns;
    let us = |ns: u64| ns.saturating_sub(start_ns) / 1000;
    let by_id: HashMap<u64, &Request> = tables.requests.iter().map(|request| (request.id, request)).collect();
    let mut tokens: Vec<&Token> = tables.tokens.iter().collect();
    tokens.sort_by_key(|token| {
        let received_ns = by_id.get(&token.request).map_or(u64::MAX, |request| request.received_ns);
        (received_ns, token.request, token.choice, token.index)
    });

    let (mut columns, mut requests, mut dictionary) =
        (Columns::default(), Requests::default(), Dictionary::default());
    let mut last_us = 0;
    for tokens in tokens.chunk_by(|a, b| a.request == b.request) {
        if let Some(token) = tokens.first() {
            requests.push(token.request, by_id.get(&token.request).copied(), us, tokens.len());
        }
        let (mut next_index, mut last_choice) = (0, 0);
        for token in tokens {
            let delivered_us = us(token.delivered_ns);
            let origin_ns = token.delivered_ns.saturating_sub(token.latency_ns.unwrap_or(0));
            let latency_us = delivered_us - us(origin_ns);
            columns.delivered.push_signed(delivered_us as i64 - last_us - latency_us as i64);
            columns.latency.push(latency_us);
            columns.index.push_signed(i64::from(token.index) - next_index);
            columns.choice.push_signed(i64::from(token.choice) - last_choice);
            (last_us, next_index) = (delivered_us as i64, i64::from(token.index) + 1);
            last_choice = i64::from(token.choice);
            columns.flags.push(match (token.latency_ns, token.choice, token.index) {
                (Some(_), 0, 0) => TTFT,
                (Some(_), _, 1..) => ITL,
                _ => 0,
            });
            let mut count = 0;
            for segment in material.budgets.segments(token) {
                let length_us = us(segment.end_ns) - us(segment.begin_ns);
                if length_us > 0 {
                    count += 1;
                    columns.leaf.push(dictionary.leaf((token.prefill, Place::of(&segment)), material) as u64);
                    columns.length.push(length_us);
                }
            }
            columns.segments.push(count);
        }
    }

    let (names, leaves) = dictionary.into_names();
    let lost = |Loss { range, what }: &Loss| LossHead {
        from: range.start / 1000,
        to: range.end.div_ceil(1000),
        what: name(what),
    };
    let label = |label: Label| LabelHead { name: label.name(), meaning: label.meaning() };
    let head = Head {
        caption,
        span: caption.span_ns / 1000,
        losses: caption.losses.iter().map(lost).collect(),
        labels: Label::PARTS.into_iter().map(label).collect(),
        leaves,
        names,
        requests,
        columns: columns
            .all()
            .into_iter()
            .map(|(name, signed, column)| ColumnHead {
                name,
                count: column.count,
                bytes: column.bytes.len(),
                signed,
            })
            .collect(),
    };
    let json = serde_json::to_vec(&head)?;
    let mut block = u32::try_from(json.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    block.extend(json);
    columns.all().into_iter().for_each(|(_, _, column)| block.extend(&column.bytes));
    Ok(block)
}

impl Requests {
    fn push(&mut self, id: u64, request: Option<&Request>, us: impl Fn(u64) -> u64, tokens: usize) {
        let text = |of: fn(&Request) -> &str| request.map_or(String::new(), |r| name(of(r)));
        self.id.push(request.map_or(format!("#{id}"), |request| name(&request_name(request))));
        self.number.push(id);
        self.received.push(request.map(|request| us(request.received_ns)));
        self.tokens.push(tokens);
        self.tenant.push(text(|request| &request.tenant_id));
        self.model.push(text(|request| &request.model));
        self.prompt.push(request.and_then(|request| request.prompt_tokens));
    }
}

/// A name from outside, as it is shown.
fn name(text: &str) -> String {
    shorten(&clean(text), LONGEST_NAME).into_owned()
}

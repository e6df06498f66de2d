//! Budgets of tokens: their columns, and how they are derived from a capture's other tables.

use std::collections::HashMap;

use arrow::array::ArrayRef;
use arrow::datatypes::Field;
use arrow::error::ArrowError;

use super::column::{ColumnError, Columns, Source};
use super::derived::{OffCpu, OffReason};
use super::error::Result;
use super::folder::Folder;
use super::open::Capture;
use super::reader::Batches;
use crate::event::StackId;
use crate::symbol::{FrameKind, SymbolFrame};
use crate::timeline::budget::{Blocked, Budgets, Label, OffCpuInterval, Threads};
use crate::timeline::tables::Tables;

/// The parts of a budget, each in a column of its own.
impl Columns for [u64; Label::PARTS.len()] {
    type Builder = [<u64 as Columns>::Builder; Label::PARTS.len()];
    type Reader = Vec<<u64 as Columns>::Reader>;

    fn fields(_: &str, out: &mut Vec<Field>) {
        Label::PARTS.iter().for_each(|label| u64::fields(&part_column(*label), out));
    }

    fn push(&self, builder: &mut Self::Builder) {
        self.iter().zip(builder).for_each(|(ns, builder)| Columns::push(ns, builder));
    }

    fn finish(builder: &mut Self::Builder, out: &mut Vec<ArrayRef>) -> Result<(), ArrowError> {
        builder.iter_mut().try_for_each(|builder| <u64 as Columns>::finish(builder, out))
    }

    fn open(_: &str, source: Source<'_>) -> Result<Self::Reader, ColumnError> {
        Label::PARTS.iter().map(|label| <u64 as Columns>::open(&part_column(*label), source)).collect()
    }

    fn get(reader: &Self::Reader, row: usize) -> Result<Self, ColumnError> {
        let mut parts = Self::default();
        for (ns, column) in parts.iter_mut().zip(reader) {
            *ns = <u64 as Columns>::get(column, row)?;
        }
        Ok(parts)
    }
}

fn part_column(label: Label) -> String {
    format!("{}_ns", label.name())
}

/// When the threads of a recording were off the CPU, and on what.
pub(super) fn threads(folder: &Folder) -> Result<Threads> {
    let blocked = blocked(folder)?;
    let mut threads = Threads::default();
    let mut intervals = Batches::<OffCpu>::open(folder)?;
    while let Some(rows) = intervals.next_rows()? {
        for off in &rows {
            let runnable_ns = off.runqueue_ns.map_or(off.end_ns, |wait| off.end_ns.saturating_sub(wait));
            let interval = OffCpuInterval {
                begin_ns: off.begin_ns,
                runnable_ns: if off.reason == OffReason::Preempted { off.begin_ns } else { runnable_ns },
                end_ns: off.end_ns,
                waker: (off.waker_tgid, off.waker_tid),
                blocked: off.stack.and_then(|stack| blocked.get(&stack).copied()).unwrap_or(Blocked::Other),
                stack: off.stack,
            };
            threads.push((off.process.tgid, off.tid), interval);
        }
    }
    threads.sort();
    Ok(threads)
}

/// What each stack blocks on, where its kernel functions tell.
fn blocked(folder: &Folder) -> Result<HashMap<StackId, Blocked>> {
    let mut blocked = HashMap::new();
    let mut stack: Option<(StackId, Vec<String>)> = None;
    let mut end = |stack: Option<(StackId, Vec<String>)>| {
        if let Some((id, functions)) = stack {
            let on = Blocked::by_stack(functions.iter().map(String::as_str));
            if on != Blocked::Other {
                blocked.insert(id, on);
            }
        }
    };
    let mut frames = Batches::<SymbolFrame>::open(folder)?;
    while let Some(rows) = frames.next_rows()? {
        for frame in rows.into_iter().filter(|frame| frame.kind == FrameKind::Kernel) {
            if stack.as_ref().is_none_or(|(id, _)| *id != frame.stack) {
                end(stack.replace((frame.stack, Vec::new())));
            }
            if let Some((_, functions)) = &mut stack {
                functions.extend(frame.function);
            }
        }
    }
    end(stack);
    Ok(blocked)
}

impl Capture {
    /// What cuts the tokens of these tables of this capture into the parts of their latency.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn budgets_of(&self, tables: &Tables) -> Result<Budgets> {
        Ok(Budgets::new(&tables.steps, &tables.requests, &tables.tokens, threads(self.folder())?))
    }
}

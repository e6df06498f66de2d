//! A capture in the forms that other tools, and people without the tracer, read.
//!
//! In: a capture's derived tables, its budgets, and names of stacks and threads: a [`Material`]. Out: one page of HTML,
//! a Perfetto trace, a pprof profile, or tables as CSV and Parquet. What must not leave the house is taken out of the
//! material before any format sees it ([`redact`]). This folder never reads raw tables and measures nothing.

mod data;
mod html;
pub mod perfetto;
mod pprof;
pub mod redact;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use html::{Page, page};
pub use pprof::profile;
pub use redact::Redactor;
pub use table::{Format, tables};

use serde::Serialize;

use crate::capture::{Capture, Result};
use crate::event::{Process, ProcessAction, ProcessId};
use crate::symbol::StackNames;
use crate::timeline::budget::Budgets;
use crate::timeline::rows::Request;
use crate::timeline::tables::Tables;

/// What a capture says, in memory.
pub struct Material {
    pub tables: Tables,
    /// Cuts the tokens of the tables.
    pub budgets: Budgets,
    pub stacks: StackNames,
    pub threads: ThreadNames,
}

impl Material {
    /// Reads it; a redactor takes out what must not be shared.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn load(capture: &Capture, redactor: Option<&Redactor>) -> Result<Self> {
        let tables = capture.tables()?;
        let budgets = capture.budgets_of(&tables)?;
        let stacks = capture.stacks()?.collect::<Result<Vec<_>>>()?;
        let mut material = Self {
            tables,
            budgets,
            stacks: StackNames::new(capture.frames()?.collect::<Result<_>>()?, stacks),
            threads: capture.processes()?.collect::<Result<_>>()?,
        };
        if let Some(redactor) = redactor {
            redactor.redact(&mut material);
        }
        Ok(material)
    }
}

/// What is said of a capture as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Caption {
    pub title: String,
    pub facts: Vec<String>,
    /// What the reader must know: simulated, lost, how exact.
    pub notes: Vec<String>,
    /// Length of the recording.
    #[serde(skip)]
    pub span_ns: u64,
}

/// What threads were called last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadNames(HashMap<(ProcessId, u32), String>);

impl ThreadNames {
    /// The thread's name; `None` where it never had one.
    #[must_use]
    pub fn of(&self, process: ProcessId, tid: u32) -> Option<&str> {
        self.0.get(&(process, tid)).map(String::as_str)
    }
}

impl FromIterator<Process> for ThreadNames {
    fn from_iter<I: IntoIterator<Item = Process>>(processes: I) -> Self {
        let named = processes
            .into_iter()
            .filter(|process| process.action != ProcessAction::Exit && !process.comm.is_empty())
            .map(|process| ((process.origin.process, process.origin.tid), process.comm));
        Self(named.collect())
    }
}

/// The name by which a request is shown: what its client called it, or its number in the capture.
fn request_name(request: &Request) -> String {
    match request.request_id.as_str() {
        "" => format!("#{}", request.id),
        id => id.to_owned(),
    }
}

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

pub use html::{Page, page};
pub use pprof::profile;
pub use redact::Redactor;
pub use table::{Format, tables};

use flamegraphs::Loss;
use serde::Serialize;

use crate::capture::{Capture, Result, Stacks, ThreadNames};
use crate::timeline::budget::{Budgets, Place};
use crate::timeline::rows::Request;
use crate::timeline::tables::Tables;

/// What a capture says, in memory.
pub struct Material {
    pub tables: Tables,
    /// Cuts the tokens of the tables.
    pub budgets: Budgets,
    pub stacks: Stacks,
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
        let mut material =
            Self { tables, budgets, stacks: Stacks::read(capture)?, threads: ThreadNames::read(capture)? };
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
    /// When events were lost, since the recording began.
    #[serde(skip)]
    pub losses: Vec<Loss>,
}

/// Whether a token was made by a prefill, and where a part of its time is drawn below that.
type Leaf = (bool, Place);

/// Frames of a leaf, root first.
fn path(material: &Material, (prefill, place): Leaf) -> Vec<String> {
    let phase = if prefill { "prefill" } else { "decode" };
    let frames = place.frames(|stack| material.stacks.off_cpu(Some(stack)));
    std::iter::once(phase.to_owned()).chain(frames).collect()
}

/// The name by which a request is shown: what its client called it, or its number in the capture.
fn request_name(request: &Request) -> String {
    match request.request_id.as_str() {
        "" => format!("#{}", request.id),
        id => id.to_owned(),
    }
}

//! A part of the benchmark that needs something that may not be there.

use serde::Serialize;

/// What was measured, or why it was not.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Part<T> {
    Measured(T),
    LeftOut(String),
}

impl<T> Part<T> {
    /// The table, or the reason under the same title.
    pub(crate) fn text(&self, title: &str, table: impl FnOnce(&T) -> String) -> String {
        match self {
            Self::Measured(measured) => table(measured),
            Self::LeftOut(reason) => format!("**{title}**: left out: {reason}\n"),
        }
    }
}

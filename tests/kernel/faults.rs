//! Wrong usage and missing pieces: each a clear message, and nobody harmed.

use anyhow::Result;

use crate::Test;

pub(crate) const TESTS: &[(&str, Test)] = &[];

#[expect(dead_code, reason = "until the first test")]
fn nothing() -> Result<()> {
    Ok(())
}

//! The kernel-side program inside this binary.

use super::ProbeError;

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("TRACER_EBPF_OBJECT"));
const MISSING: &str = env!("TRACER_EBPF_MISSING");

/// Which kernel-side program is inside, for `--version`.
pub const DESCRIPTION: &str = env!("TRACER_EBPF_DESCRIPTION");

/// The object file.
///
/// # Errors
/// The binary was built without one.
pub fn bytes() -> Result<&'static [u8], ProbeError> {
    if OBJECT.is_empty() { Err(ProbeError::Stub { why: MISSING }) } else { Ok(OBJECT) }
}

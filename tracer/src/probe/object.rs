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
    checked(OBJECT, MISSING)
}

fn checked<'a>(object: &'a [u8], why: &'static str) -> Result<&'a [u8], ProbeError> {
    if object.is_empty() { Err(ProbeError::Stub { why }) } else { Ok(object) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_says_what_was_missing() {
        let error = checked(&[], "bpf-linker is missing; cargo install bpf-linker").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("bpf-linker is missing") && text.contains("cargo xtask setup"), "{text}");
    }
}

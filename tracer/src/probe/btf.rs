//! Offsets of kernel struct members, from `/sys/kernel/btf/vmlinux`.
//!
//! aya loads BTF for its own use and offers no lookup of members; the format is a flat table, so this reads it
//! directly (Documentation/bpf/btf.rst). Nothing here trusts a length or an index.

use std::{collections::HashMap, fs, path::Path};

use tracer_abi::Offsets;

use super::ProbeError;

/// Where the kernel describes itself.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_TYPEDEF: u32 = 8;
const KIND_PTR: u32 = 2;
const KIND_FUNC_PROTO: u32 = 13;

/// The offsets that the programs need.
///
/// # Errors
/// No BTF, or a member is not in it.
pub fn offsets(path: &Path) -> Result<Offsets, ProbeError> {
    let bytes = fs::read(path).map_err(|source| ProbeError::NoBtf { path: path.into(), source })?;
    let bad = |what: String| ProbeError::BadBtf { path: path.into(), what };
    let types = Types::parse(&bytes).ok_or_else(|| bad("its type table is torn".into()))?;
    let member = |name: &str, member: &str| {
        types.member(name, member).ok_or_else(|| bad(format!("{name} has no member {member}")))
    };
    let returns = pending_returns(&types).unwrap_or_default();
    Ok(Offsets {
        task_pid: member("task_struct", "pid")?,
        task_start_boottime: member("task_struct", "start_boottime")?,
        task_signal: member("task_struct", "signal")?,
        signal_live: member("signal_struct", "live")?,
        task_comm: member("task_struct", "comm")?,
        task_state: member("task_struct", "__state").or_else(|_| member("task_struct", "state"))?,
        // Parameters: our context, preempt, prev, next and, since 5.18, prev_state.
        switch_has_state: u32::from(
            types.parameters("btf_trace_sched_switch").is_some_and(|count| count >= 5),
        ),
        tcp_write_seq: types.member("tcp_sock", "write_seq").unwrap_or(0),
        tcp_snd_nxt: types.member("tcp_sock", "snd_nxt").unwrap_or(0),
        sock_num: types.member("sock_common", "skc_num").unwrap_or(0),
        socket_sk: types.member("socket", "sk").unwrap_or(0),
        task_files: types.member("task_struct", "files").unwrap_or(0),
        files_fdt: types.member("files_struct", "fdt").unwrap_or(0),
        fdt_fd: types.member("fdtable", "fd").unwrap_or(0),
        file_private_data: types.member("file", "private_data").unwrap_or(0),
        ..returns
    })
}

/// Where the kernel keeps return probes that are pending: all of it, or nothing.
fn pending_returns(types: &Types) -> Option<Offsets> {
    let uprobes = types.structure_of("mm_struct", "uprobes_state")?;
    Some(Offsets {
        task_utask: types.member("task_struct", "utask")?,
        task_mm: types.member("task_struct", "mm")?,
        utask_returns: types.member("uprobe_task", "return_instances")?,
        utask_vaddr: types.member("uprobe_task", "vaddr")?,
        utask_xol_vaddr: types.member("uprobe_task", "xol_vaddr")?,
        return_address: types.member("return_instance", "orig_ret_vaddr")?,
        return_next: types.member("return_instance", "next")?,
        return_chained: types.member("return_instance", "chained")?,
        mm_xol_area: types.member("mm_struct", "uprobes_state")? + types.member(uprobes, "xol_area")?,
        xol_vaddr: types.member("xol_area", "vaddr")?,
        ..Offsets::default()
    })
}

struct Types<'a> {
    bytes: &'a [u8],
    strings: usize,
    /// Position of each type's record; index 0 is `void`.
    positions: Vec<usize>,
    structs: HashMap<&'a str, usize>,
    typedefs: HashMap<&'a str, usize>,
}

impl<'a> Types<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let header = word(bytes, 4)? as usize;
        let types = header.checked_add(word(bytes, 8)? as usize)?;
        let end = types.checked_add(word(bytes, 12)? as usize)?;
        let strings = header.checked_add(word(bytes, 16)? as usize)?;
        let mut this =
            Self { bytes, strings, positions: vec![0], structs: HashMap::new(), typedefs: HashMap::new() };
        let mut at = types;
        while at < end {
            this.positions.push(at);
            let (kind, length) = this.info(at)?;
            let name = this.name(word(bytes, at)?)?;
            match kind {
                KIND_STRUCT if !name.is_empty() => {
                    this.structs.entry(name).or_insert(at);
                }
                KIND_TYPEDEF => {
                    this.typedefs.entry(name).or_insert(at);
                }
                _ => {}
            }
            at += 12 + trailing_bytes(kind, length)?;
        }
        Some(this)
    }

    fn info(&self, at: usize) -> Option<(u32, usize)> {
        let info = word(self.bytes, at + 4)?;
        Some(((info >> 24) & 0x1f, (info & 0xffff) as usize))
    }

    fn name(&self, offset: u32) -> Option<&'a str> {
        let rest = self.bytes.get(self.strings.checked_add(offset as usize)?..)?;
        let length = rest.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&rest[..length]).ok()
    }

    /// Byte offset of a member, looked for in anonymous members too.
    fn member(&self, structure: &str, member: &str) -> Option<u32> {
        self.member_in(*self.structs.get(structure)?, member, 0).map(|(offset, _)| offset)
    }

    /// Name of the structure that a member is.
    fn structure_of(&self, structure: &str, member: &str) -> Option<&'a str> {
        let (_, kind) = self.member_in(*self.structs.get(structure)?, member, 0)?;
        self.name(word(self.bytes, *self.positions.get(kind as usize)?)?)
    }

    /// Byte offset and type of a member.
    fn member_in(&self, at: usize, wanted: &str, nesting: u32) -> Option<(u32, u32)> {
        let (kind, length) = self.info(at)?;
        if nesting > 8 || !matches!(kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        // With the kind flag, the upper byte of an offset is a bitfield's size.
        let bitfields = word(self.bytes, at + 4)? >> 31 == 1;
        (0..length).find_map(|index| {
            let record = at + 12 + 12 * index;
            let name = self.name(word(self.bytes, record)?)?;
            let mut bits = word(self.bytes, record + 8)?;
            if bitfields {
                bits &= 0x00ff_ffff;
            }
            let kind = word(self.bytes, record + 4)?;
            if name == wanted {
                return Some((bits / 8, kind));
            }
            if !name.is_empty() {
                return None;
            }
            let inner = *self.positions.get(kind as usize)?;
            let (offset, kind) = self.member_in(inner, wanted, nesting + 1)?;
            Some((bits / 8 + offset, kind))
        })
    }

    /// Number of parameters of the function that a typedef (of a pointer) names.
    fn parameters(&self, typedef: &str) -> Option<usize> {
        let mut at = *self.typedefs.get(typedef)?;
        for _ in 0..4 {
            let (kind, length) = self.info(at)?;
            match kind {
                KIND_FUNC_PROTO => return Some(length),
                KIND_TYPEDEF | KIND_PTR => at = *self.positions.get(word(self.bytes, at + 8)? as usize)?,
                _ => return None,
            }
        }
        None
    }
}

/// Bytes behind the common 12 of a type record.
fn trailing_bytes(kind: u32, length: usize) -> Option<usize> {
    Some(match kind {
        1 | 14 | 17 => 4,
        KIND_ARRAY => 12,
        KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * length,
        6 | KIND_FUNC_PROTO => 8 * length,
        KIND_PTR | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn this_kernel_has_all_members() {
        if !Path::new(VMLINUX).exists() {
            return;
        }
        let offsets = offsets(Path::new(VMLINUX)).unwrap();
        assert!(offsets.task_pid > 0 && offsets.task_comm > offsets.task_pid);
    }

    #[test]
    fn absent_btf_is_named() {
        let error = offsets(Path::new("/nonexistent/btf")).unwrap_err();
        assert!(matches!(error, ProbeError::NoBtf { .. }), "{error}");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            if let Some(types) = Types::parse(&bytes) {
                let _ = types.member("task_struct", "pid");
            }
        }
    }
}

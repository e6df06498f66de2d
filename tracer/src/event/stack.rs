//! Stacks: raw addresses → (mapping, file offset), each distinct stack once.

use std::collections::HashMap;

use super::{Frame, Mapping, ProcessId, Stack, StackCut, StackId, record::RawStack};

/// Most user frames that the kernel side records; a stack of that many was cut.
const MAX_USER_FRAMES: usize = tracer_abi::MAX_FRAMES / 2;

/// The executable mappings of one process, by address.
#[derive(Debug, Default, Clone)]
pub struct MappingIndex {
    /// Sorted by `begin`; ranges do not overlap.
    ranges: Vec<Range>,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    begin: u64,
    end: u64,
    offset: u64,
    id: u32,
}

impl MappingIndex {
    /// Index of the mappings that a process has now.
    #[must_use]
    pub fn new<'a>(mappings: impl IntoIterator<Item = &'a Mapping>) -> Self {
        let mut ranges: Vec<_> = mappings
            .into_iter()
            .map(|mapping| Range {
                begin: mapping.begin,
                end: mapping.end,
                offset: mapping.offset,
                id: mapping.id,
            })
            .collect();
        ranges.sort_unstable_by_key(|range| range.begin);
        Self { ranges }
    }

    /// The frame of an address.
    #[must_use]
    pub fn frame(&self, address: u64) -> Frame {
        let after = self.ranges.partition_point(|range| range.begin <= address);
        match after.checked_sub(1).and_then(|index| self.ranges.get(index)) {
            Some(range) if address < range.end => {
                Frame { mapping: Some(range.id), offset: address - range.begin + range.offset }
            }
            _ => Frame { mapping: None, offset: address },
        }
    }
}

/// Numbers stacks by content.
#[derive(Debug, Default)]
pub struct StackTable {
    ids: HashMap<(ProcessId, Vec<u64>, Vec<Frame>), StackId>,
}

impl StackTable {
    /// The id of a stack; with the stack itself when it is new. An empty stack has no id.
    pub fn intern(
        &mut self,
        time_ns: u64,
        process: ProcessId,
        raw: RawStack,
        mappings: &MappingIndex,
    ) -> Option<(StackId, Option<Stack>)> {
        if raw.kernel.is_empty() && raw.user.is_empty() {
            return None;
        }
        let user: Vec<Frame> = raw.user.iter().map(|address| mappings.frame(*address)).collect();
        let next = StackId(self.ids.len() as u64);
        let key = (process, raw.kernel, user);
        if let Some(id) = self.ids.get(&key) {
            return Some((*id, None));
        }
        let cut = match key.2.as_slice() {
            [] => Some(StackCut::Unreadable),
            frames if frames.len() >= MAX_USER_FRAMES => Some(StackCut::Depth),
            // A frame pointer that was used for something else: the walk ended outside of any code.
            [.., Frame { mapping: None, .. }] => Some(StackCut::FramePointers),
            _ => None,
        };
        let stack = Stack { id: next, time_ns, process, kernel: key.1.clone(), user: key.2.clone(), cut };
        self.ids.insert(key, next);
        Some((next, Some(stack)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(id: u32, begin: u64, end: u64, offset: u64) -> Mapping {
        Mapping {
            id,
            time_ns: 0,
            process: ProcessId::default(),
            begin,
            end,
            offset,
            inode: 1,
            path: "/lib/x.so".into(),
            build_id: Vec::new(),
        }
    }

    #[test]
    fn addresses_become_file_offsets() {
        let index = MappingIndex::new([&mapping(2, 0x5000, 0x6000, 0x1000), &mapping(1, 0x1000, 0x2000, 0)]);
        assert_eq!(index.frame(0x1abc), Frame { mapping: Some(1), offset: 0xabc });
        assert_eq!(index.frame(0x5000), Frame { mapping: Some(2), offset: 0x1000 });
        assert_eq!(index.frame(0x2000), Frame { mapping: None, offset: 0x2000 });
        assert_eq!(index.frame(0x10), Frame { mapping: None, offset: 0x10 });
    }

    #[test]
    fn equal_stacks_are_stored_once() {
        let mut table = StackTable::default();
        let index = MappingIndex::default();
        let raw = RawStack { kernel: vec![1], user: vec![2, 3] };
        let first = table.intern(7, ProcessId::default(), raw.clone(), &index);
        assert!(
            matches!(&first, Some((StackId(0), Some(stack))) if stack.kernel == [1] && stack.cut == Some(StackCut::FramePointers))
        );
        assert_eq!(table.intern(8, ProcessId::default(), raw, &index), Some((StackId(0), None)));
        let only_kernel = RawStack { kernel: vec![1], user: vec![] };
        let second = table.intern(9, ProcessId::default(), only_kernel, &index);
        assert!(matches!(second, Some((StackId(1), Some(stack))) if stack.cut == Some(StackCut::Unreadable)));
        assert_eq!(table.intern(9, ProcessId::default(), RawStack::default(), &index), None);
    }
}

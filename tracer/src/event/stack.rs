//! Stacks: raw addresses → (mapping, file offset) and Python functions, each distinct stack once.

use std::collections::HashMap;

use super::{
    Frame, Mapping, ProcessId, Stack, StackCut, StackId,
    record::{PythonFrame, PythonState, RawStack},
};

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
                // Memory that is no file's has no offsets: there the address says more.
                offset: if mapping.path.is_empty() { mapping.begin } else { mapping.offset },
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
                Frame { mapping: Some(range.id), code: None, offset: address - range.begin + range.offset }
            }
            _ => Frame { mapping: None, code: None, offset: address },
        }
    }
}

/// How the Python frames of a stack and its C frames came together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Merge {
    /// No Python on it.
    None,
    /// Every entry into the interpreter has its Python frames.
    Whole,
    /// Those on the leaf's side have; there are more than fit.
    Part,
    /// The thread's state was not known (yet): the interpreter's frames stay.
    NoThread,
    /// They do not belong together: the interpreter was entering or leaving a frame. Its own frames stay.
    Mismatch,
}

/// A frame of a merged stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    Native(u64),
    Python(PythonFrame),
}

/// What an address in an interpreter has to do with Python frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// It is in the C function that runs Python code.
    Code,
    /// It throws an exception into a generator. Where that waits for another one, which this calls itself for, it makes
    /// the generator's frame the current one without running it.
    Throw,
    Nothing,
}

/// Puts Python frames in the place of those of the C function that runs them. `runs` says what an address is,
/// `entry_is_function` whether the frame at an entry is a function's.
///
/// Only what fits together exactly is merged: as many entries as frames of the C function, or more where the walk was
/// cut.
pub fn merge(raw: &RawStack, runs: impl Fn(u64) -> Runs, entry_is_function: bool) -> (Merge, Vec<Merged>) {
    let native = || raw.user.iter().copied().map(Merged::Native).collect();
    let what = |depth: usize| {
        raw.user.get(depth).map_or(Runs::Nothing, |address| runs(address.wrapping_sub(u64::from(depth > 0))))
    };
    // A generator's frame that waits was an entry once and still says so, where entries are functions.
    let waits = |depth: usize| {
        entry_is_function && depth > 0 && what(depth) == Runs::Throw && what(depth - 1) == Runs::Throw
    };
    let enters = |depth: usize| what(depth) == Runs::Code || waits(depth);
    let entered = (0..raw.user.len()).filter(|depth| enters(*depth)).count();
    match raw.python_state {
        _ if entered == 0 && raw.python.is_empty() => return (Merge::None, native()),
        PythonState::NoThread if entered == 0 => return (Merge::None, native()),
        PythonState::NoThread => return (Merge::NoThread, native()),
        PythonState::Unreadable => return (Merge::Mismatch, native()),
        PythonState::Whole | PythonState::Depth => {}
    }
    let entries = raw.python.iter().filter(|frame| frame.is_entry).count();
    let is_deeper = raw.python_state == PythonState::Depth;
    let fits = if is_deeper {
        entries < entered || raw.cut.is_some()
    } else {
        entries == entered || (raw.cut.is_some() && entries > entered)
    };
    if !fits {
        return (Merge::Mismatch, native());
    }
    let mut python = raw.python.iter();
    let mut merged = Vec::with_capacity(raw.user.len() + raw.python.len());
    let mut part = is_deeper && entries < entered;
    for (depth, &address) in raw.user.iter().enumerate() {
        if !enters(depth) {
            merged.push(Merged::Native(address));
            continue;
        }
        let mut is_entered = false;
        for frame in python.by_ref() {
            is_entered = frame.is_entry;
            if !frame.is_entry || entry_is_function {
                merged.push(Merged::Python(*frame));
            }
            if frame.is_entry {
                break;
            }
        }
        // Here they end: what is further up stays as C sees it.
        part |= !is_entered;
        if !is_entered || waits(depth) {
            merged.push(Merged::Native(address));
        }
    }
    (if part { Merge::Part } else { Merge::Whole }, merged)
}

/// What makes two stacks the same.
type Content = (ProcessId, Vec<u64>, Vec<Frame>, Option<StackCut>, u32);

/// Numbers stacks by content.
#[derive(Debug, Default)]
pub struct StackTable {
    ids: HashMap<Content, StackId>,
}

impl StackTable {
    /// The id of a stack, whose user part is `user`; with the stack itself when it is new. An empty stack has no id.
    pub fn intern(
        &mut self,
        time_ns: u64,
        process: ProcessId,
        raw: RawStack,
        user: Vec<Frame>,
    ) -> Option<(StackId, Option<Stack>)> {
        if raw.kernel.is_empty() && user.is_empty() {
            return None;
        }
        let next = StackId(self.ids.len() as u64);
        let key = (process, raw.kernel, user, raw.cut, raw.frame_pointer_steps);
        if let Some(id) = self.ids.get(&key) {
            return Some((*id, None));
        }
        let (_, kernel, user, cut, frame_pointer_steps) = key.clone();
        self.ids.insert(key, next);
        Some((next, Some(Stack { id: next, time_ns, process, kernel, user, cut, frame_pointer_steps })))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mapping(id: u32, begin: u64, end: u64, offset: u64, path: &str) -> Mapping {
        Mapping {
            id,
            time_ns: 0,
            process: ProcessId::default(),
            begin,
            end,
            offset,
            inode: 1,
            path: path.into(),
            build_id: Vec::new(),
        }
    }

    fn frame(mapping: Option<u32>, offset: u64) -> Frame {
        Frame { mapping, code: None, offset }
    }

    #[test]
    fn addresses_become_file_offsets() {
        let index = MappingIndex::new([
            &mapping(2, 0x5000, 0x6000, 0x1000, "/lib/x.so"),
            &mapping(1, 0x1000, 0x2000, 0, "/lib/x.so"),
            &mapping(3, 0x8000, 0x9000, 0, ""),
        ]);
        assert_eq!(index.frame(0x1abc), frame(Some(1), 0xabc));
        assert_eq!(index.frame(0x5000), frame(Some(2), 0x1000));
        assert_eq!(index.frame(0x2000), frame(None, 0x2000));
        assert_eq!(index.frame(0x10), frame(None, 0x10));
        assert_eq!(index.frame(0x8010), frame(Some(3), 0x8010));
    }

    #[test]
    fn equal_stacks_are_stored_once() {
        let mut table = StackTable::default();
        let cut = Some(StackCut::FramePointers);
        let raw = RawStack { kernel: vec![1], cut, ..RawStack::default() };
        let user = || vec![frame(None, 2), frame(None, 3)];
        let first = table.intern(7, ProcessId::default(), raw.clone(), user());
        assert!(matches!(&first, Some((StackId(0), Some(stack))) if stack.kernel == [1] && stack.cut == cut));
        assert_eq!(table.intern(8, ProcessId::default(), raw.clone(), user()), Some((StackId(0), None)));
        let whole = RawStack { cut: None, ..raw };
        let second = table.intern(9, ProcessId::default(), whole, user());
        assert!(matches!(second, Some((StackId(1), Some(stack))) if stack.cut.is_none()));
        assert_eq!(table.intern(9, ProcessId::default(), RawStack::default(), Vec::new()), None);
    }

    /// Addresses from 1000 on are of the C function, those from 2000 on throw.
    fn runs(address: u64) -> Runs {
        match address {
            2000.. => Runs::Throw,
            1000.. => Runs::Code,
            _ => Runs::Nothing,
        }
    }

    fn python(code: u64, is_entry: bool) -> PythonFrame {
        PythonFrame { code, is_entry, ..PythonFrame::default() }
    }

    /// Native addresses as they are, Python frames as negative numbers.
    fn merged(raw: &RawStack, entry_is_function: bool) -> (Merge, Vec<i64>) {
        let (merge, frames) = merge(raw, runs, entry_is_function);
        let number = |frame| match frame {
            Merged::Native(address) => address as i64,
            Merged::Python(frame) => -(frame.code as i64),
        };
        (merge, frames.into_iter().map(number).collect())
    }

    #[test]
    fn python_takes_the_place_of_its_interpreter() {
        // work (C) < f < g < C < h < main
        let raw = RawStack {
            user: vec![5, 1001, 6, 1002, 7],
            python: vec![python(1, false), python(2, true), python(3, true)],
            ..RawStack::default()
        };
        assert_eq!(merged(&raw, true), (Merge::Whole, vec![5, -1, -2, 6, -3, 7]));
        // Where a frame of its own marks the entry, it is no function.
        let raw = RawStack {
            python: vec![
                python(1, false),
                python(2, false),
                python(9, true),
                python(3, false),
                python(9, true),
            ],
            ..raw
        };
        assert_eq!(merged(&raw, false), (Merge::Whole, vec![5, -1, -2, 6, -3, 7]));
    }

    #[test]
    fn generators_that_wait_for_one_that_is_thrown_into_have_frames() {
        // inner (C) < throw < throw < throw < C < task; two generators wait for the innermost.
        let user = vec![1001, 6, 2001, 2001, 2001, 7, 1001, 8];
        let frames = vec![python(1, true), python(2, true), python(3, true), python(4, true)];
        let raw = RawStack { user: user.clone(), python: frames, ..RawStack::default() };
        assert_eq!(merged(&raw, true), (Merge::Whole, vec![-1, 6, 2001, -2, 2001, -3, 2001, 7, -4, 8]));
        // Where entries have frames of their own, those of waiting generators are none.
        let frames = vec![
            python(1, false),
            python(9, true),
            python(2, false),
            python(3, false),
            python(4, false),
            python(9, true),
        ];
        let raw = RawStack { user, python: frames, ..RawStack::default() };
        assert_eq!(merged(&raw, false), (Merge::Whole, vec![-1, 6, 2001, 2001, 2001, 7, -2, -3, -4, 8]));
    }

    #[test]
    fn what_does_not_fit_is_left_as_it_is() {
        let raw = RawStack {
            user: vec![5, 1001, 6, 1002, 7],
            python: vec![python(2, true)],
            ..RawStack::default()
        };
        assert_eq!(merged(&raw, true), (Merge::Mismatch, vec![5, 1001, 6, 1002, 7]));
        // A native walk that was cut has seen fewer entries.
        let cut = RawStack {
            user: vec![5, 1001, 6],
            python: vec![python(1, true), python(2, true)],
            cut: Some(StackCut::Depth),
            ..RawStack::default()
        };
        assert_eq!(merged(&cut, true), (Merge::Whole, vec![5, -1, 6]));
        // More Python frames than fit: those that are there belong to the leaf's side.
        let deep = RawStack {
            user: vec![5, 1001, 6, 1002, 7],
            python: vec![python(1, true), python(2, false)],
            python_state: PythonState::Depth,
            ..RawStack::default()
        };
        assert_eq!(merged(&deep, true), (Merge::Part, vec![5, -1, 6, -2, 1002, 7]));
        let unknown = RawStack { python_state: PythonState::NoThread, python: Vec::new(), ..raw };
        assert_eq!(merged(&unknown, true), (Merge::NoThread, vec![5, 1001, 6, 1002, 7]));
        let no_python =
            RawStack { user: vec![5, 7], python_state: PythonState::NoThread, ..RawStack::default() };
        assert_eq!(merged(&no_python, true), (Merge::None, vec![5, 7]));
    }

    proptest! {
        #[test]
        fn merging_loses_and_invents_nothing(
            user in prop::collection::vec(prop_oneof![1u64..900, 1001u64..1100], 0..20),
            lengths in prop::collection::vec(1usize..4, 0..8),
        ) {
            let given: Vec<_> = lengths
                .iter()
                .flat_map(|length| (0..*length).map(move |n| n + 1 == *length))
                .zip(1..)
                .map(|(is_entry, code)| python(code, is_entry))
                .collect();
            let raw = RawStack { user: user.clone(), python: given.clone(), ..RawStack::default() };
            let (merge, frames) = merge(&raw, runs, true);
            let natives: Vec<u64> =
                frames.iter().filter_map(|f| if let Merged::Native(a) = f { Some(*a) } else { None }).collect();
            let pythons: Vec<_> =
                frames.iter().filter_map(|f| if let Merged::Python(p) = f { Some(*p) } else { None }).collect();
            match merge {
                Merge::Whole => {
                    prop_assert_eq!(pythons, given);
                    let others: Vec<u64> = (0..).zip(&user)
                        .filter(|(depth, a)| runs(**a - u64::from(*depth > 0)) == Runs::Nothing)
                        .map(|(_, a)| *a)
                        .collect();
                    prop_assert_eq!(natives, others);
                }
                _ => {
                    prop_assert_eq!(natives, user);
                    prop_assert!(pythons.is_empty());
                }
            }
        }
    }
}

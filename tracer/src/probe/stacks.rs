//! Stacks of a recording: what their addresses are, in the process as it is now; what became of them, for the ledger.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::{
    attach::Attacher,
    unwind::{ProcessMemory, Unwinder},
};
use crate::{
    event::{
        Code, Event, Frame, Origin, ProcessId, StackCut, StackId,
        record::{PythonFrame, RawStack, StackKey},
        stack::{MappingIndex, Merge, Merged, StackTable, merge},
    },
    python::{self, Runtime},
    timeline::tables::LedgerRow,
};

/// A process whose stacks show code that is not known is looked at again, at most this often.
const LOOK_AGAIN_NS: u64 = 20_000_000;
/// Most places that calls and marks come from.
const MAX_PLACES: usize = 1 << 16;

/// Every stack once, and counts of them all.
#[derive(Default)]
pub(super) struct Stacks {
    table: StackTable,
    counts: BTreeMap<ProcessId, Counts>,
    pythons: HashMap<ProcessId, Python>,
    next_code: u32,
    /// Of the places that threads make calls and marks from.
    places: HashMap<(ProcessId, u32, StackKey), Option<StackId>>,
}

/// What became of the stacks of a process.
#[derive(Default)]
struct Counts {
    stacks: u64,
    by_frame_pointers: u64,
    cuts: BTreeMap<StackCut, u64>,
    python: BTreeMap<&'static str, u64>,
    /// When it was looked at for code that was not known.
    looked_ns: u64,
}

/// The interpreter of a process, and the functions that were seen of it.
struct Python {
    runtime: Arc<Runtime>,
    memory: ProcessMemory,
    /// By address and first line: code objects come and go.
    codes: HashMap<(u64, u32), Option<(u32, python::Code)>>,
}

impl Stacks {
    /// The number of a stack; `out` gets what is new of it: its functions, then itself.
    pub(super) fn intern(
        &mut self,
        origin: &Origin,
        raw: RawStack,
        attacher: &mut Attacher,
        unwinder: &mut Unwinder,
        out: &mut Vec<Event>,
    ) -> Option<StackId> {
        let process = origin.process;
        let counts = self.counts.entry(process).or_default();
        counts.stacks += 1;
        counts.by_frame_pointers += u64::from(raw.frame_pointer_steps > 0);
        if let Some(cut) = raw.cut {
            *counts.cuts.entry(cut).or_default() += 1;
            if cut == StackCut::Unmapped && counts.looked_ns + LOOK_AGAIN_NS < origin.time_ns {
                counts.looked_ns = origin.time_ns;
                // A process that is gone by now stays gone.
                if let Some(attached) = attacher.processes.get_mut(&process) {
                    attached.stale = true;
                }
            }
        }
        let none = MappingIndex::default();
        let index = attacher.processes.get(&process).map_or(&none, |attached| &attached.index);
        let user = match self.python(process, &raw, unwinder) {
            Some(merged) => self.frames(origin, &merged, index, out),
            None => raw.user.iter().map(|address| index.frame(*address)).collect(),
        };
        let (id, new) = self.table.intern(origin.time_ns, process, raw, user)?;
        out.extend(new.map(Event::Stack));
        Some(id)
    }

    /// From here on, calls and marks of the thread with this key have this stack.
    pub(super) fn remember(&mut self, origin: &Origin, key: StackKey, stack: Option<StackId>) {
        // The kernel side tells of each again within a second.
        if self.places.len() >= MAX_PLACES {
            self.places.clear();
        }
        self.places.insert((origin.process, origin.tid, key), stack);
    }

    /// The stack of a call or mark.
    pub(super) fn remembered(&self, origin: &Origin, key: StackKey) -> Option<StackId> {
        self.places.get(&(origin.process, origin.tid, key)).copied().flatten()
    }

    /// A process is gone: its memory is.
    pub(super) fn forget(&mut self, process: ProcessId) {
        self.pythons.remove(&process);
        self.places.retain(|(of, ..), _| *of != process);
    }

    /// The stack with its Python frames, if its process runs a Python that is known.
    fn python(&mut self, process: ProcessId, raw: &RawStack, unwinder: &mut Unwinder) -> Option<Vec<Merged>> {
        let runtime = unwinder.python(process)?;
        let is_known = self.pythons.get(&process).is_some_and(|known| Arc::ptr_eq(&known.runtime, &runtime));
        if !is_known {
            let memory = ProcessMemory::open(process).ok()?;
            self.pythons.insert(process, Python { runtime: runtime.clone(), memory, codes: HashMap::new() });
        }
        let (outcome, merged) =
            merge(raw, |address| runtime.runs(address), runtime.offsets.entry_is_function);
        let counter = match outcome {
            Merge::None => return None,
            Merge::Whole => "python_stacks_merged",
            Merge::Part => "python_stacks_merged_in_part",
            Merge::NoThread => {
                unwinder.look_for_threads(process);
                "python_stacks_of_unknown_threads"
            }
            Merge::Mismatch => "python_stacks_mismatched",
        };
        *self.counts.entry(process).or_default().python.entry(counter).or_default() += 1;
        Some(merged)
    }

    fn frames(
        &mut self,
        origin: &Origin,
        merged: &[Merged],
        index: &MappingIndex,
        out: &mut Vec<Event>,
    ) -> Vec<Frame> {
        let mut frame = |frame: &Merged| match frame {
            Merged::Native(address) => index.frame(*address),
            Merged::Python(frame) => self.code(origin, *frame, out).unwrap_or(Frame {
                // The function is gone already: a frame without a name, in its place.
                mapping: None,
                code: None,
                offset: frame.code,
            }),
        };
        merged.iter().map(&mut frame).collect()
    }

    /// The function that a Python frame is of.
    fn code(&mut self, origin: &Origin, frame: PythonFrame, out: &mut Vec<Event>) -> Option<Frame> {
        let python = self.pythons.get_mut(&origin.process)?;
        let Python { runtime, memory, codes } = python;
        let next = &mut self.next_code;
        let known = codes.entry((frame.code, frame.first_line)).or_insert_with(|| {
            let code = python::Code::read(memory, &runtime.offsets, frame.code, frame.first_line).ok()?;
            let id = *next;
            *next += 1;
            out.push(Event::Code(Code {
                id,
                time_ns: origin.time_ns,
                process: origin.process,
                function: code.name.clone(),
                file: code.file.clone(),
                first_line: code.first_line,
            }));
            Some((id, code))
        });
        let (id, code) = known.as_ref()?;
        let line = code.line(frame.instruction);
        Some(Frame { mapping: None, code: Some(*id), offset: u64::from(line) })
    }

    /// What became of all stacks, by process.
    pub(super) fn ledger(&self) -> Vec<LedgerRow> {
        let mut rows = Vec::new();
        for (process, counts) in &self.counts {
            let mut row = |name: &str, count| {
                rows.push(LedgerRow { process: Some(*process), name: name.into(), count, loss: false });
            };
            row("stacks", counts.stacks);
            row("stacks_by_frame_pointers", counts.by_frame_pointers);
            counts.cuts.iter().for_each(|(cut, count)| row(cut.counter(), *count));
            counts.python.iter().for_each(|(name, count)| row(name, *count));
        }
        rows
    }
}

//! What frames of stacks are called in pictures.

use std::collections::HashMap;

use super::{FrameKind, SymbolFrame};
use crate::event::{Stack, StackCut, StackId};

/// Rust's runtime marks by this function where a thread's own code begins; below it there is only how threads start.
const RUST_PROGRAM_BEGINS: &str = "__rust_begin_short_backtrace";
/// The kernel calls a tracer's programs through these: from here on a stack is the tracer's own.
const TRACER_BEGINS: &str = "bpf_trace_run";

/// Names of the frames of each stack, root first, from where the program's own code begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackNames(HashMap<StackId, Vec<String>>);

impl StackNames {
    /// From all frames of the stacks; a stack that is known to miss its root begins with a frame that says why.
    #[must_use]
    pub fn new(mut frames: Vec<SymbolFrame>, stacks: impl IntoIterator<Item = Stack>) -> Self {
        // Positions count from the leaf.
        frames.sort_by_key(|frame| (frame.stack, std::cmp::Reverse(frame.position)));
        let mut names: HashMap<StackId, Vec<String>> = HashMap::new();
        let mut ended = None;
        for frame in frames {
            let label = match frame.kind {
                FrameKind::Kernel => format!("{}_[k]", frame.label()),
                FrameKind::User => frame.label(),
            };
            if label.starts_with(TRACER_BEGINS) {
                ended = Some(frame.stack);
            }
            if ended == Some(frame.stack) {
                continue;
            }
            let names = names.entry(frame.stack).or_default();
            if label.contains(RUST_PROGRAM_BEGINS) {
                names.clear();
            } else {
                names.push(label);
            }
        }
        for Stack { id, cut, .. } in stacks {
            if let (Some(cut), Some(names)) = (cut, names.get_mut(&id)) {
                names.insert(0, cut_name(cut).to_owned());
            }
        }
        Self(names)
    }

    /// Root first; empty for a stack that is not known.
    #[must_use]
    pub fn of(&self, stack: StackId) -> &[String] {
        self.0.get(&stack).map_or(&[], Vec::as_slice)
    }

    /// Every name, to change it.
    pub fn names_mut(&mut self) -> impl Iterator<Item = &mut String> {
        self.0.values_mut().flatten()
    }
}

fn cut_name(cut: StackCut) -> &'static str {
    match cut {
        StackCut::Depth => "[truncated: too deep]",
        StackCut::FramePointers => "[truncated: no frame pointer]",
        StackCut::Unreadable => "[truncated: unreadable]",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::ProcessId;

    fn frame(stack: u64, position: u32, kind: FrameKind, function: &str) -> SymbolFrame {
        SymbolFrame {
            stack: StackId(stack),
            position,
            kind,
            function: Some(function.to_owned()),
            module: String::new(),
            offset: 0,
            inlined: false,
        }
    }

    #[test]
    fn stacks_read_from_the_root_and_say_what_is_missing() {
        let frames = vec![
            frame(1, 0, FrameKind::Kernel, "some_program"),
            frame(1, 1, FrameKind::Kernel, "bpf_trace_run4"),
            frame(1, 2, FrameKind::Kernel, "tcp_sendmsg"),
            frame(1, 3, FrameKind::User, "write"),
            frame(1, 4, FrameKind::User, "main"),
            frame(2, 0, FrameKind::User, "leaf"),
            frame(3, 0, FrameKind::User, "work"),
            frame(3, 1, FrameKind::User, "std::sys::backtrace::__rust_begin_short_backtrace"),
            frame(3, 2, FrameKind::User, "start_thread"),
        ];
        let cut = Stack {
            id: StackId(2),
            time_ns: 0,
            process: ProcessId::default(),
            kernel: Vec::new(),
            user: Vec::new(),
            cut: Some(StackCut::FramePointers),
        };
        let names = StackNames::new(frames, [cut]);
        assert_eq!(names.of(StackId(1)), ["main", "write", "tcp_sendmsg_[k]"]);
        assert_eq!(names.of(StackId(2)), ["[truncated: no frame pointer]", "leaf"]);
        assert_eq!(names.of(StackId(3)), ["work"]);
        assert_eq!(names.of(StackId(4)), [""; 0]);
    }
}

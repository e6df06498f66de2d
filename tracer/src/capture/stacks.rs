//! Stacks by name, for pictures.

use super::error::Result;
use super::open::Capture;
use crate::event::{StackCut, StackId};
use crate::symbol::{FrameKind, SymbolFrame};
use crate::timeline::budget::Blocked;
use std::borrow::Cow;
use std::collections::HashMap;

/// Rust's runtime marks by this function where a thread's own code begins; below it there is only how threads start.
const RUST_PROGRAM_BEGINS: &str = "__rust_begin_short_backtrace";

/// The kernel's function that switches threads, and the beginnings of the names of those that only call it.
const SCHEDULE: &str = "__schedule";
const SWITCH: [&str; 3] = ["schedule", "preempt_schedule", "__cond_resched"];

/// Ends the names of functions of the kernel, as other tools mark them.
const KERNEL: &str = "_[k]";
/// So do those of functions that the compiler has put into their callers.
const INLINED: &str = "_[i]";

/// Names of the frames of each stack, root first, from where the program's own code begins.
#[derive(Clone, Debug, Default)]
pub struct Stacks {
    names: HashMap<StackId, Vec<String>>,
    cuts: HashMap<StackId, StackCut>,
}

impl Stacks {
    /// Of a capture.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn read(capture: &Capture) -> Result<Self> {
        let mut cuts = HashMap::new();
        for stack in capture.stacks()? {
            let stack = stack?;
            cuts.extend(stack.cut.map(|cut| (stack.id, cut)));
        }
        Ok(Self::new(capture.frames()?.collect::<Result<_, _>>()?, cuts))
    }

    fn new(mut frames: Vec<SymbolFrame>, cuts: HashMap<StackId, StackCut>) -> Self {
        // Positions count from the leaf.
        frames.sort_by_key(|frame| (frame.stack, std::cmp::Reverse(frame.position)));
        let mut names: HashMap<StackId, Vec<String>> = HashMap::new();
        for frame in frames {
            let label = match frame.kind {
                FrameKind::Kernel => format!("{}{KERNEL}", frame.label()),
                FrameKind::User if frame.inlined => format!("{}{INLINED}", frame.label()),
                FrameKind::User | FrameKind::Python => frame.label(),
            };
            let names = names.entry(frame.stack).or_default();
            if label.contains(RUST_PROGRAM_BEGINS) {
                names.clear();
            } else {
                names.push(label);
            }
        }
        Self { names, cuts }
    }

    /// The frames of a stack, root first. What is missing at its root has a frame that says why.
    pub fn root_first(&self, stack: Option<StackId>) -> impl Iterator<Item = Cow<'_, str>> {
        let cut = stack
            .and_then(|stack| self.cuts.get(&stack))
            .map(|cut| format!("[truncated: {}]", cut.text()).into());
        let missing = stack.is_none().then_some(Cow::Borrowed("[no stack]"));
        let names = stack.and_then(|stack| self.names.get(&stack)).map_or(&[][..], Vec::as_slice);
        cut.into_iter().chain(missing).chain(names.iter().map(Cow::from))
    }

    /// The frames of a stack with which a thread went off the CPU, root first: without those at its leaf that only say
    /// that it did.
    #[must_use]
    pub fn off_cpu(&self, stack: Option<StackId>) -> Vec<String> {
        let mut frames: Vec<String> = self.root_first(stack).map(Cow::into_owned).collect();
        let is_leaving = |frame: &String| {
            let name = frame.strip_suffix(KERNEL).unwrap_or("");
            SWITCH.iter().any(|start| name.starts_with(start))
        };
        // Our own probe lies at the leaf, in code that has no name.
        let from = frames.iter().rposition(|frame| frame.strip_suffix(KERNEL) == Some(SCHEDULE));
        if let Some(from) = from {
            frames.truncate(from);
            while frames.last().is_some_and(is_leaving) {
                frames.pop();
            }
        }
        frames
    }

    /// What a thread sleeps on with such a stack.
    #[must_use]
    pub fn blocked(&self, stack: Option<StackId>) -> Blocked {
        let names = stack.and_then(|stack| self.names.get(&stack)).map_or(&[][..], Vec::as_slice);
        Blocked::by_stack(names.iter().rev().filter_map(|name| name.strip_suffix(KERNEL)))
    }

    /// Every name, to change it.
    pub fn names_mut(&mut self) -> impl Iterator<Item = &mut String> {
        self.names.values_mut().flatten()
    }

    /// Whether the root of a stack is missing.
    #[must_use]
    pub fn is_cut(&self, stack: StackId) -> bool {
        self.cuts.contains_key(&stack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            frame(1, 0, FrameKind::Kernel, "tcp_sendmsg"),
            frame(1, 1, FrameKind::User, "write"),
            frame(1, 2, FrameKind::User, "main"),
            frame(2, 0, FrameKind::User, "leaf"),
            frame(3, 0, FrameKind::User, "work"),
            frame(3, 1, FrameKind::User, "std::sys::backtrace::__rust_begin_short_backtrace"),
            frame(3, 2, FrameKind::User, "start_thread"),
            frame(4, 0, FrameKind::Kernel, "bpf_trace_run4"),
            frame(4, 1, FrameKind::Kernel, "__schedule"),
            frame(4, 2, FrameKind::Kernel, "schedule"),
            frame(4, 3, FrameKind::Kernel, "schedule_timeout"),
            frame(4, 4, FrameKind::Kernel, "futex_wait"),
            frame(4, 5, FrameKind::User, "lock"),
        ];
        let stacks = Stacks::new(frames, HashMap::from([(StackId(2), StackCut::FramePointers)]));
        let named = |stack| stacks.root_first(stack).collect::<Vec<_>>().join(";");
        assert_eq!(named(Some(StackId(1))), "main;write;tcp_sendmsg_[k]");
        assert_eq!(named(Some(StackId(2))), "[truncated: no frame pointer];leaf");
        assert_eq!(named(None), "[no stack]");
        assert_eq!(named(Some(StackId(3))), "work");
        assert_eq!(stacks.off_cpu(Some(StackId(4))), ["lock", "futex_wait_[k]"]);
        assert_eq!(stacks.off_cpu(Some(StackId(1))), ["main", "write", "tcp_sendmsg_[k]"]);
        assert_eq!(stacks.blocked(Some(StackId(4))), Blocked::Futex);
        assert!(stacks.is_cut(StackId(2)) && !stacks.is_cut(StackId(1)));
        assert_eq!(stacks.blocked(Some(StackId(1))), Blocked::Other);
    }
}

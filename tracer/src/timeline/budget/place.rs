//! Where the time of tokens is drawn: under its part, what that was blocked on, and its stack.

use super::{Blocked, Label, Segment};
use crate::event::StackId;

/// A part, what it was blocked on, and its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    pub label: Label,
    pub blocked: Option<Blocked>,
    pub stack: Option<StackId>,
}

impl Place {
    #[must_use]
    pub const fn of(segment: &Segment) -> Self {
        Self { label: segment.label, blocked: segment.blocked, stack: segment.stack }
    }

    /// Frames from the root; `names` gives those of a stack.
    pub fn frames(self, names: impl Fn(StackId) -> Vec<String>) -> Vec<String> {
        let mut frames = vec![self.label.name().to_owned()];
        frames.extend(self.blocked.map(|on| on.name().to_owned()));
        frames.extend(self.stack.into_iter().flat_map(names));
        frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_comes_last() {
        let place =
            Place { label: Label::HostBlocked, blocked: Some(Blocked::Futex), stack: Some(StackId(3)) };
        let names = |_| vec!["main".to_owned(), "lock".to_owned()];
        assert_eq!(place.frames(names), ["host_blocked", "futex", "main", "lock"]);
        let place = Place { label: Label::GpuSpan, blocked: None, stack: None };
        assert_eq!(place.frames(names), ["gpu_span"]);
    }
}

//! The time of tokens as stacks: phase → part → where it was blocked.

use std::collections::BTreeMap;

use super::{Blocked, Budgets, Label, Segment};
use crate::event::StackId;
use crate::timeline::rows::Token;

/// What a part of a token's time is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Leaf {
    pub prefill: bool,
    pub label: Label,
    pub blocked: Option<Blocked>,
    pub stack: Option<StackId>,
}

impl Leaf {
    #[must_use]
    pub fn new(token: &Token, segment: &Segment) -> Self {
        let Segment { label, blocked, stack, .. } = *segment;
        Self { prefill: token.prefill, label, blocked, stack }
    }

    /// Frames from the root; `names` gives those of a stack.
    pub fn path<'a>(&self, names: impl Fn(StackId) -> &'a [String]) -> Vec<String> {
        let phase = if self.prefill { "prefill" } else { "decode" };
        let part = match self.blocked {
            Some(on) => format!("{}: {}", self.label.name(), on.name()),
            None => self.label.name().to_owned(),
        };
        let stack = self.stack.map_or(&[][..], names);
        [phase.to_owned(), part].into_iter().chain(stack.iter().cloned()).collect()
    }
}

/// ns of all parts of the tokens, by leaf; they sum to the tokens' latencies.
#[must_use]
pub fn folded<'a>(budgets: &Budgets, tokens: impl IntoIterator<Item = &'a Token>) -> BTreeMap<Leaf, u64> {
    let mut time_ns = BTreeMap::new();
    for token in tokens {
        for segment in budgets.segments(token) {
            *time_ns.entry(Leaf::new(token, &segment)).or_default() += segment.length_ns();
        }
    }
    time_ns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;
    use crate::timeline::budget::Threads;

    #[test]
    fn no_time_is_lost() {
        let tables = tables();
        let budgets = Budgets::new(&tables.steps, &tables.requests, &tables.tokens, Threads::default());
        let time_ns: u64 = folded(&budgets, &tables.tokens).values().sum();
        let latencies_ns: u64 = tables.tokens.iter().filter_map(|token| token.latency_ns).sum();
        assert!(latencies_ns > 0);
        assert_eq!(time_ns, latencies_ns);
    }

    #[test]
    fn a_path_ends_in_the_stack() {
        let leaf = Leaf {
            prefill: false,
            label: Label::HostBlocked,
            blocked: Some(Blocked::Futex),
            stack: Some(StackId(3)),
        };
        let stack = ["main".to_owned(), "lock".to_owned()];
        assert_eq!(leaf.path(|_| &stack), ["decode", "host_blocked: futex", "main", "lock"]);
    }
}

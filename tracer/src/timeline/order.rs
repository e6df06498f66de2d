//! Events in order of time.
//!
//! Rule of release: an event leaves once an event at least `slack_ns` newer has been seen, or when more than
//! `max_held` are held. One that comes later than that leaves at once: late, never lost.

use std::collections::BTreeMap;

use crate::event::{Call, HttpBegin, HttpEnd, HttpSend, HttpWire, Mark, MarkEvent, Origin, Sched};

/// The events that the timeline joins.
#[derive(Clone, Debug)]
pub(super) enum Input {
    Call(Call),
    Mark(MarkEvent),
    /// A thread runs again that another has woken.
    Wake(Sched),
    HttpBegin(HttpBegin),
    HttpSend(HttpSend),
    HttpWire(HttpWire),
    HttpEnd(HttpEnd),
    /// A thread ended; the process did when it was the first one.
    Exit(Origin),
}

impl Input {
    fn origin(&self) -> Origin {
        match self {
            Self::Call(call) => call.origin,
            Self::Mark(mark) => mark.origin,
            Self::Wake(sched) => sched.origin,
            Self::HttpBegin(begin) => begin.origin,
            Self::HttpSend(send) => send.origin,
            Self::HttpWire(wire) => wire.origin,
            Self::HttpEnd(end) => end.origin,
            Self::Exit(origin) => *origin,
        }
    }

    pub(super) fn time_ns(&self) -> u64 {
        self.origin().time_ns
    }

    /// Order at equal times: a request begins before it is used and ends after.
    fn rank(&self) -> u8 {
        match self {
            Self::Mark(event) => match event.mark {
                Mark::RequestBegin(_) | Mark::InjectState(_) => 0,
                // A range is open when a step begins at the same time, and still open when one ends.
                Mark::Batch(_) | Mark::GpuLayers(_) => 1,
                Mark::GpuSpan(_) => 3,
                Mark::RequestEnd(_) => 5,
                _ => 4,
            },
            Self::HttpBegin(_) => 0,
            Self::Call(_) => 2,
            Self::Wake(_) => 3,
            Self::HttpSend(_) | Self::HttpWire(_) => 4,
            Self::HttpEnd(_) => 5,
            Self::Exit(_) => 6,
        }
    }
}

/// (time, rank, thread, arrival).
type Key = (u64, u8, u32, u64);

pub(super) struct Order {
    held: BTreeMap<Key, Input>,
    arrivals: u64,
    newest_ns: u64,
    slack_ns: u64,
    max_held: usize,
    closed: bool,
}

impl Order {
    pub(super) fn new(slack_ns: u64, max_held: usize) -> Self {
        Self { held: BTreeMap::new(), arrivals: 0, newest_ns: 0, slack_ns, max_held, closed: false }
    }

    pub(super) fn push(&mut self, input: Input) {
        let origin = input.origin();
        self.held.insert((origin.time_ns, input.rank(), origin.tid, self.arrivals), input);
        self.arrivals += 1;
    }

    /// An event of this time was seen.
    pub(super) fn advance(&mut self, time_ns: u64) {
        self.newest_ns = self.newest_ns.max(time_ns);
    }

    /// Nothing else will come: everything held may leave.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// Everything up to this time has left.
    pub(super) fn released_ns(&self) -> u64 {
        self.newest_ns.saturating_sub(self.slack_ns)
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// The next event that may leave.
    pub(super) fn pop(&mut self) -> Option<Input> {
        let (&(time_ns, ..), _) = self.held.first_key_value()?;
        if self.closed || time_ns <= self.released_ns() || self.held.len() > self.max_held {
            return self.held.pop_first().map(|(_, input)| input);
        }
        None
    }
}

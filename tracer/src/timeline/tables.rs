//! A recording's derived tables in memory: where capture reading and reporting meet.

use super::rows::{Iteration, Request, Step, Token};
use crate::event::{Point, ProcessId};

/// Everything that `report` and `request` print comes from here.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tables {
    pub meta: Meta,
    pub steps: Vec<Step>,
    pub iterations: Vec<Iteration>,
    pub requests: Vec<Request>,
    pub tokens: Vec<Token>,
    pub points: Vec<Point>,
    pub ledger: Vec<LedgerRow>,
}

/// What, when and how was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Version of the tracer that recorded.
    pub tracer_version: String,
    pub host: String,
    /// What was traced, as the user named it (`pid 4711`, `comm server`, a command line).
    pub target: String,
    /// Names of the engines whose probe points were attached, sorted.
    pub engines: Vec<String>,
    /// CLOCK_REALTIME ns since the epoch at the start of the recording; 0 when unknown.
    pub started_realtime_ns: u64,
    /// CLOCK_MONOTONIC ns of the start and the end of the recording.
    pub started_ns: u64,
    pub ended_ns: u64,
    /// A traced library was a stand-in: all GPU times are simulated.
    pub simulated: bool,
    /// The recording was finished by the recorder itself (false: recovered after a crash).
    pub complete: bool,
}

/// One line of the ledger: what was produced, dropped, refused or left unmatched.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerRow {
    /// `None`: of the whole recording.
    pub process: Option<ProcessId>,
    /// `tracer_abi::Counter::name`, `rows::Unmatched::name`, `MarkError::name`, …
    pub name: String,
    pub count: u64,
    /// A count above zero means that something is missing from the capture.
    pub loss: bool,
}

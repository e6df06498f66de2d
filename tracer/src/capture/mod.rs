//! The folder that a recording leaves.
//!
//! In: events, and rows of the derived tables. Out: files that DuckDB, pandas and Spark read as they are, and the
//! same events and rows back. This folder must never interpret an event: what it means is `timeline`'s to say.
//!
//! ```text
//! DIR/meta.json            what was recorded, where, when, how; complete or not
//! DIR/raw/TABLE.arrows     raw tables while recording: Arrow IPC streams, a batch each second
//! DIR/TABLE.parquet        after finishing: the raw tables, and the derived ones
//! ```
//!
//! Raw tables: `calls`, `mark_*` (one per kind of mark), `clock_bursts`, `clock_host`, `sched`, `samples`, `stacks`,
//! `mappings`, `processes`, `points`, `http_*`, `gpu_samples`, `gpu_process_samples`, `xids`, `engine_files`,
//! `counters`. Derived tables: `steps`, `iterations`, `requests`, `request_ids`, `tokens`, `layers`, `phases`, `hazards`,
//! `offcpu`, `clock`, `clock_quality`, `driver_events`, `budgets`, `shares`, `frames`, `ledger`.
//! Columns are named as the fields of the rows; times end in `_ns` and are CLOCK_MONOTONIC unless the name says
//! otherwise; a process is the two columns `tgid` and `start_ticks`; identifiers of bytes are lower-case hexadecimal
//! text.

mod arrow_table;
mod budget;
mod column;
mod derived;
mod error;
mod finish;
mod folder;
mod meta;
mod open;
mod raw;
mod reader;
mod reclock;
mod stacks;
mod stream;
mod table;
mod threads;
mod torn;
mod writer;

pub use arrow_table::ArrowBatches;
pub use derived::{ClockKnot, DERIVED_TABLES, IdKind, OffCpu, OffReason, RequestId};
pub use error::{Error, ErrorKind, Result};
pub use finish::{Finished, finish, finish_with};
pub use meta::{Meta, MetaProcess, VERSION};
pub use open::{Capture, Rows};
pub(crate) use raw::Counter;
pub use reader::{Events, Reader, Torn};
pub use stacks::Stacks;
pub use threads::ThreadNames;
pub use writer::Writer;

#[cfg(test)]
mod finish_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

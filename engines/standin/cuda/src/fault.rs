//! Faults, for tests of what others do about them: `STANDIN_CUDA_FAULT=name=value@n,…`.
//!
//! Each holds from the n-th record of an event with timing in the process on (from 1; `create_error`: from the n-th
//! creation of an event); without `@n`, from the beginning. Only events and the device's clock have faults: launches,
//! copies, waits for streams and captures always work, so that a program that uses no events must not notice.
//!
//! | name | what happens |
//! | --- | --- |
//! | `not_ready` | `cuEventQuery` finds no event complete |
//! | `create_error=CODE` | `cuEventCreate` fails |
//! | `record_error=CODE` | `cuEventRecord` fails |
//! | `query_error=CODE` | `cuEventQuery` and `cuEventElapsedTime` fail; 709: the context is lost |
//! | `record_late_us=N` | the n-th `cuEventRecord` alone returns N µs late |
//! | `query_late_us=N` | every third `cuEventQuery` that finds an event complete returns N µs late, as if preempted |
//! | `clock_step_ns=N` | the device's clock is N ns ahead of what it was (negative: behind) |
//! | `glitch_ns=N` | the time of the n-th record alone is off by N ns |
//! | `quantum_ns=N` | the step of the device's clock is N ns |
//! | `wander_ns=N` | the device's clock swings by ±N ns every minute |

use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::device::{Config, raw_now};
use crate::error::{Error, NOT_READY, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    NotReady,
    CreateError,
    RecordError,
    QueryError,
    RecordLate,
    QueryLate,
    ClockStep,
    Glitch,
    Quantum,
    Wander,
}

const NAMES: [(&str, Kind); 10] = [
    ("not_ready", Kind::NotReady),
    ("create_error", Kind::CreateError),
    ("record_error", Kind::RecordError),
    ("query_error", Kind::QueryError),
    ("record_late_us", Kind::RecordLate),
    ("query_late_us", Kind::QueryLate),
    ("clock_step_ns", Kind::ClockStep),
    ("glitch_ns", Kind::Glitch),
    ("quantum_ns", Kind::Quantum),
    ("wander_ns", Kind::Wander),
];
const WANDER_PERIOD_NS: f64 = 60e9;

#[derive(Debug)]
struct Fault {
    kind: Kind,
    value: i64,
    /// Number of the first record (or creation) that it concerns.
    from: u64,
    /// Raw time of that; `u64::MAX` before.
    since: AtomicU64,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (what, from) = text.split_once('@').unwrap_or((text, "0"));
        let (name, value) = what.split_once('=').unwrap_or((what, "0"));
        let kind = NAMES.iter().find(|known| known.0 == name).ok_or_else(|| format!("no fault {name:?}"))?.1;
        let number = |error| format!("{text:?}: {error}");
        let from: u64 = from.parse().map_err(number)?;
        let since = AtomicU64::new(if from == 0 { 0 } else { u64::MAX });
        Ok(Self { kind, value: value.parse().map_err(number)?, from, since })
    }
}

fn faults() -> &'static [Fault] {
    static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
    FAULTS.get_or_init(|| {
        let text = std::env::var("STANDIN_CUDA_FAULT").unwrap_or_default();
        let parse = |part: &str| {
            part.parse().inspect_err(|error| eprintln!("standin libcuda: STANDIN_CUDA_FAULT: {error}")).ok()
        };
        text.split(',').filter(|part| !part.is_empty()).filter_map(parse).collect()
    })
}

/// The value of a fault that holds at a raw time.
fn at(kind: Kind, raw: u64) -> Option<i64> {
    faults().iter().find(|f| f.kind == kind && f.since.load(Ordering::Relaxed) <= raw).map(|f| f.value)
}

/// The value of a fault that concerns the n-th alone.
fn only(kind: Kind, number: u64) -> Option<i64> {
    faults().iter().find(|fault| fault.kind == kind && fault.from == number).map(|fault| fault.value)
}

fn begin(number: u64, creation: bool) {
    for fault in faults() {
        if fault.from == number && (fault.kind == Kind::CreateError) == creation {
            fault.since.store(raw_now(), Ordering::Relaxed);
        }
    }
}

fn fail(kind: Kind) -> Result {
    if faults().is_empty() {
        return Ok(());
    }
    at(kind, raw_now()).map_or(Ok(()), |code| Err(Error(code as _)))
}

fn sleep(us: i64) {
    std::thread::sleep(Duration::from_micros(us.unsigned_abs()));
}

/// An event is about to be created.
pub(crate) fn create() -> Result {
    static CREATED: AtomicU64 = AtomicU64::new(0);
    if faults().is_empty() {
        return Ok(());
    }
    begin(CREATED.fetch_add(1, Ordering::Relaxed) + 1, true);
    fail(Kind::CreateError)
}

/// What a record of an event with timing suffers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    late_us: i64,
    /// By how much its time is off.
    pub(crate) glitch_ns: i64,
}

impl Record {
    /// An event with timing is about to be recorded.
    pub(crate) fn begin() -> Result<Self> {
        static RECORDED: AtomicU64 = AtomicU64::new(0);
        if faults().is_empty() {
            return Ok(Self::default());
        }
        let number = RECORDED.fetch_add(1, Ordering::Relaxed) + 1;
        begin(number, false);
        fail(Kind::RecordError)?;
        let value = |kind| only(kind, number).unwrap_or(0);
        Ok(Self { late_us: value(Kind::RecordLate), glitch_ns: value(Kind::Glitch) })
    }

    /// It was recorded.
    pub(crate) fn end(self) {
        if self.late_us != 0 {
            sleep(self.late_us);
        }
    }
}

/// What a query answers that found this.
pub(crate) fn query(answer: Result) -> Result {
    static COMPLETE: AtomicU64 = AtomicU64::new(0);
    if faults().is_empty() {
        return answer;
    }
    fail(Kind::QueryError)?;
    if at(Kind::NotReady, raw_now()).is_some() {
        return Err(NOT_READY);
    }
    if answer.is_ok()
        && let Some(us) = at(Kind::QueryLate, raw_now())
        && COMPLETE.fetch_add(1, Ordering::Relaxed).is_multiple_of(3)
    {
        sleep(us);
    }
    answer
}

/// Two events are about to be compared.
pub(crate) fn compare() -> Result {
    fail(Kind::QueryError)
}

/// Reading of the device's clock at a raw time.
pub(crate) fn stamp(config: &Config, raw: u64) -> i64 {
    if faults().is_empty() {
        return config.stamp(raw);
    }
    let phase = (raw as f64 % WANDER_PERIOD_NS) / WANDER_PERIOD_NS * std::f64::consts::TAU;
    let wander = at(Kind::Wander, raw).map_or(0.0, |ns| ns as f64 * phase.sin());
    let config = Config {
        offset_ns: config.offset_ns + at(Kind::ClockStep, raw).unwrap_or(0) + wander as i64,
        quantum_ns: at(Kind::Quantum, raw).unwrap_or(config.quantum_ns),
        ..config.clone()
    };
    config.stamp(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named() {
        let fault: Fault = "clock_step_ns=-500@12".parse().unwrap();
        assert_eq!((fault.kind, fault.value, fault.from), (Kind::ClockStep, -500, 12));
        let fault: Fault = "not_ready".parse().unwrap();
        assert_eq!((fault.kind, fault.from, fault.since.into_inner()), (Kind::NotReady, 0, 0));
        for bad in ["", "none", "wander_ns=x", "wander_ns=1@", "wander_ns=1@-2"] {
            bad.parse::<Fault>().unwrap_err();
        }
    }
}

//! The truth, as JSON lines in the file `STANDIN_CUDA_LOG`: every kernel, and every record of an event that has time.
//!
//! `{"kind":"kernel","stream":…,"submit_ns":…,"begin_ns":…,"end_ns":…}`,
//! `{"kind":"event","stream":…,"event":…,"tid":…,"record_ns":…,"complete_ns":…}`: CLOCK_MONOTONIC ns, and handles as
//! numbers. The threads that use the device only push to a list; a thread of this library converts times and writes.
//! A process that is killed loses what happened in its last [`PERIOD`]; a forked child logs nothing.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::mem::take;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::device::both_now;

const PERIOD: Duration = Duration::from_millis(50);

/// Times are raw.
enum Entry {
    Kernel { stream: u64, submit: u64, begin: u64, end: u64 },
    Event { stream: u64, event: u64, tid: i32, record: u64, complete: u64 },
}

impl Entry {
    fn last(&self) -> u64 {
        match *self {
            Self::Kernel { end, .. } => end,
            Self::Event { complete, .. } => complete,
        }
    }
}

struct Log {
    new: Mutex<Vec<Entry>>,
    writer: Mutex<Writer>,
}

struct Writer {
    file: File,
    /// Not over yet: their times cannot be converted.
    waiting: Vec<Entry>,
    /// An earlier instant, (raw, monotonic).
    earlier: (u64, u64),
}

impl Writer {
    /// Writes what ended before now, or everything.
    fn write(&mut self, new: Vec<Entry>, everything: bool) {
        self.waiting.extend(new);
        let now = both_now();
        let line = Line { at: now, rate: rate(self.earlier, now) };
        self.earlier = now;
        let (over, waiting) =
            take(&mut self.waiting).into_iter().partition(|e| everything || e.last() <= now.0);
        self.waiting = waiting;
        let text = render(&over, line);
        if let Err(error) = self.file.write_all(text.as_bytes()) {
            eprintln!("standin libcuda: truth log: {error}");
        }
    }
}

/// Monotonic time as a line over raw.
#[derive(Clone, Copy)]
struct Line {
    at: (u64, u64),
    rate: f64,
}

impl Line {
    fn monotonic(self, raw: u64) -> u64 {
        let since = raw.wrapping_sub(self.at.0) as i64;
        self.at.1.wrapping_add_signed((since as f64 * self.rate).round() as i64)
    }
}

fn rate(from: (u64, u64), to: (u64, u64)) -> f64 {
    match to.0.saturating_sub(from.0) {
        // Too short for a rate.
        0..1_000_000 => 1.0,
        raw => to.1.saturating_sub(from.1) as f64 / raw as f64,
    }
}

fn render(entries: &[Entry], line: Line) -> String {
    let mut text = String::new();
    let t = |raw| line.monotonic(raw);
    for entry in entries {
        // Writing to a string does not fail.
        _ = match *entry {
            Entry::Kernel { stream, submit, begin, end } => writeln!(
                text,
                r#"{{"kind":"kernel","stream":{stream},"submit_ns":{},"begin_ns":{},"end_ns":{}}}"#,
                t(submit),
                t(begin),
                t(end)
            ),
            Entry::Event { stream, event, tid, record, complete } => writeln!(
                text,
                r#"{{"kind":"event","stream":{stream},"event":{event},"tid":{tid},"record_ns":{},"complete_ns":{}}}"#,
                t(record),
                t(complete)
            ),
        };
    }
    text
}

/// The log of this process, if it has one; its thread starts with the first use.
fn log() -> Option<&'static Log> {
    static LOG: OnceLock<Option<Log>> = OnceLock::new();
    let mut first = false;
    let log = LOG.get_or_init(|| {
        first = true;
        let path = std::env::var_os("STANDIN_CUDA_LOG")?;
        match File::create(&path) {
            Ok(file) => Some(Log {
                new: Mutex::default(),
                writer: Mutex::new(Writer { file, waiting: Vec::new(), earlier: both_now() }),
            }),
            Err(error) => {
                eprintln!("standin libcuda: STANDIN_CUDA_LOG={}: {error}", path.display());
                None
            }
        }
    });
    if first && log.is_some() {
        // SAFETY: `flush_at_exit` stays mapped (the library is never unloaded) and takes no locks that exit holds.
        unsafe { libc::atexit(flush_at_exit) };
        let thread = std::thread::Builder::new().name("standin-log".to_owned()).spawn(|| {
            loop {
                std::thread::sleep(PERIOD);
                flush(false);
            }
        });
        if let Err(error) = thread {
            eprintln!("standin libcuda: truth log is written at exit only: {error}");
        }
    }
    log.as_ref()
}

fn flush(everything: bool) {
    if let Some(log) = log() {
        let mut writer = log.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let new = take(&mut *log.new.lock().unwrap_or_else(PoisonError::into_inner));
        writer.write(new, everything);
    }
}

extern "C" fn flush_at_exit() {
    flush(true);
}

fn push(entry: impl FnOnce() -> Entry) {
    if let Some(log) = log() {
        log.new.lock().unwrap_or_else(PoisonError::into_inner).push(entry());
    }
}

/// A kernel, with raw times.
pub(crate) fn kernel(stream: u64, submit: u64, begin: u64, end: u64) {
    push(|| Entry::Kernel { stream, submit, begin, end });
}

/// A record of an event by this thread, with raw times.
pub(crate) fn event(stream: u64, event: u64, record: u64, complete: u64) {
    push(|| {
        // SAFETY: has no preconditions.
        let tid = unsafe { libc::gettid() };
        Entry::Event { stream, event, tid, record, complete }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_interpolated() {
        // Monotonic runs 100 ppm fast.
        let (from, to) = ((1_000_000_000, 5_000_000_000), (1_100_000_000, 5_100_010_000));
        let line = Line { at: to, rate: rate(from, to) };
        assert_eq!(line.monotonic(1_050_000_000), 5_050_005_000);
        let entries = [Entry::Kernel { stream: 1, submit: from.0, begin: to.0, end: to.0 + 1_000_000 }];
        assert_eq!(
            render(&entries, line),
            "{\"kind\":\"kernel\",\"stream\":1,\"submit_ns\":5000000000,\"begin_ns\":5100010000,\"end_ns\":5101010100}\n"
        );
    }
}

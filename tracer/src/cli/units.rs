//! Numbers, times and foreign text as people read them.

use jiff::Timestamp;

/// Ns with three significant digits: `850 ns`, `41.2 µs`, `8.05 ms`, `12.3 s`.
pub(crate) fn duration(ns: u64) -> String {
    let ns = ns as f64;
    let (value, unit) = match ns {
        _ if ns < 999.5 => return format!("{ns} ns"),
        _ if ns < 999.5e3 => (ns / 1e3, "µs"),
        _ if ns < 999.5e6 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {unit}")
}

/// A count with thin separators: `1 234 567`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// Seconds since the recording began, to the millisecond: `+12.345 s`.
pub(crate) fn offset(ns: u64, start_ns: u64) -> String {
    let seconds = (i128::from(ns) - i128::from(start_ns)) as f64 / 1e9;
    format!("{seconds:+.3} s")
}

/// UTC date and time of CLOCK_REALTIME ns, to the millisecond; `None` when it is not known.
pub(crate) fn date_time(realtime_ns: u64) -> Option<String> {
    utc(realtime_ns, "%Y-%m-%dT%H:%M:%S%.3fZ")
}

/// The same to the microsecond, for machines: RFC 3339.
pub(crate) fn rfc3339(realtime_ns: u64) -> Option<String> {
    utc(realtime_ns, "%Y-%m-%dT%H:%M:%S%.6fZ")
}

fn utc(realtime_ns: u64, format: &str) -> Option<String> {
    let time = Timestamp::from_nanosecond(realtime_ns.into()).ok().filter(|_| realtime_ns > 0)?;
    Some(time.strftime(format).to_string())
}

/// Text from outside: without characters that steer a terminal, at most `most` characters.
pub(crate) fn clean(text: &str, most: usize) -> String {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    let mut out: String = text
        .chars()
        .take(most + 1)
        .map(|c| if steers(c) { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if out.chars().count() > most {
        out.pop();
        out.pop();
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_three_digits() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 µs"),
            (41_234, "41.2 µs"),
            (999_600, "1.00 ms"),
            (8_049_000, "8.05 ms"),
            (123_456_789, "123 ms"),
            (12_345_678_901, "12.3 s"),
            (3_600_000_000_000, "3600 s"),
        ] {
            assert_eq!(duration(ns), text);
        }
    }

    #[test]
    fn the_rest() {
        assert_eq!((count(0), count(999), count(1_234_567)), ("0".into(), "999".into(), "1 234 567".into()));
        assert_eq!((offset(1_500_000_000, 0), offset(0, 1_000_000)), ("+1.500 s".into(), "-0.001 s".into()));
        assert_eq!(date_time(1_796_000_000_123_000_000).as_deref(), Some("2026-11-30T00:53:20.123Z"));
        assert_eq!(rfc3339(1_796_000_000_123_456_789).as_deref(), Some("2026-11-30T00:53:20.123456Z"));
        assert_eq!(date_time(0), None);
        assert_eq!((clean("a\x1b[1mb", 9), clean("abcdef", 4)), ("a\u{fffd}[1mb".into(), "abc…".into()));
        assert_eq!(clean("abcd", 4), "abcd");
    }
}

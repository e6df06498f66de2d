//! Durations as people write them.

use std::time::Duration;

/// Parses `10s`, `500ms`, `50us`, `2m`, `1h`; a bare number is seconds.
///
/// # Errors
/// Anything else, and zero.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 =
        number.parse().map_err(|_| format!("`{text}` is no duration; write 10s, 500ms or 2m"))?;
    let seconds = match unit {
        "us" | "µs" => number / 1e6,
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(format!("`{unit}` is no unit of time; use us, ms, s, m or h")),
    };
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("`{text}` is not a usable duration")),
    }
}

/// Parses an offset from a beginning: as [`parse`], and zero.
///
/// # Errors
/// As [`parse`].
pub(crate) fn parse_offset(text: &str) -> Result<Duration, String> {
    if matches!(text, "0" | "0s") { Ok(Duration::ZERO) } else { parse(text) }
}

/// ns of a duration; more than 64 bits hold is the most that they hold.
pub(crate) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(parse("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(parse("2m"), Ok(Duration::from_secs(120)));
        assert_eq!((parse_offset("0"), parse_offset("2s")), (Ok(Duration::ZERO), parse("2s")));
        for bad in ["", "s", "10x", "-1s", "0", "1e400", "..", "99999999999999999999h"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}

//! Distributions in the formats of HdrHistogram's own tools.

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

use crate::latency::{Distribution, Latencies, Latency};
use crate::timeline::tables::Meta;

/// Values are ns; the maxima in a log, and percentile text, are ms.
const NS_PER_MS: f64 = 1e6;

/// Lines of percentile text for each halving of what lies beyond, as HdrHistogram's tools have them.
const TICKS_PER_HALF: u32 = 5;

/// A V2 interval log: one interval, the whole recording, with a tag for each latency that there is.
pub(super) fn log(meta: &Meta, span_ns: u64, latencies: &Latencies) -> Result<String> {
    let (mut log, mut serializer) = (Vec::new(), V2DeflateSerializer::new());
    let started = UNIX_EPOCH + Duration::from_nanos(meta.started_realtime_ns);
    let simulated = if meta.simulated { ", simulated GPU" } else { "" };
    let mut writer = IntervalLogWriterBuilder::new()
        .add_comment(&format!("[Latencies in ns, by tracer {}{simulated}]", meta.tracer_version))
        .add_comment("[Histogram log format version 1.3]")
        .with_start_time(started)
        .with_base_time(started)
        .with_max_value_divisor(NS_PER_MS)
        .begin_log_with(&mut log, &mut serializer)?;
    for latency in Latency::ALL {
        let distribution = latencies.get(latency);
        if distribution.count() > 0 {
            let tag = Tag::new(latency.name()).context("the name of a latency is no tag")?;
            writer
                .write_histogram(
                    distribution.histogram(),
                    Duration::ZERO,
                    Duration::from_nanos(span_ns),
                    Some(tag),
                )
                .map_err(|error| anyhow!("{error}"))?;
        }
    }
    Ok(String::from_utf8(log)?)
}

/// Percentiles as HdrHistogram's tools print them, ms.
pub(super) fn percentiles(distribution: &Distribution) -> String {
    let histogram = distribution.histogram();
    let mut text =
        format!("{:>12} {:>14} {:>10} {:>14}\n\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)");
    let mut until = 0;
    for at in histogram.iter_quantiles(TICKS_PER_HALF) {
        until += at.count_since_last_iteration();
        let quantile = at.quantile_iterated_to();
        let value = at.value_iterated_to() as f64 / NS_PER_MS;
        let _ = write!(text, "{value:12.3} {quantile:2.12} {until:10}");
        if quantile < 1.0 {
            let _ = write!(text, " {:14.2}", 1.0 / (1.0 - quantile));
        }
        text.push('\n');
    }
    let (mean, deviation) = (histogram.mean() / NS_PER_MS, histogram.stdev() / NS_PER_MS);
    let max = histogram.max() as f64 / NS_PER_MS;
    // The smallest power of two that tells values apart at that precision.
    let sub_buckets = (2 * 10u64.pow(histogram.sigfig().into())).next_power_of_two();
    let _ = writeln!(text, "#[Mean    = {mean:12.3}, StdDeviation   = {deviation:12.3}]");
    let _ = writeln!(text, "#[Max     = {max:12.3}, Total count    = {:12}]", distribution.count());
    let _ = writeln!(text, "#[Buckets = {:12}, SubBuckets     = {sub_buckets:12}]", histogram.buckets());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use hdrhistogram::Histogram;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    #[test]
    fn a_log_holds_what_was_recorded() {
        let tables = tables();
        let latencies = super::super::latencies(&tables);
        let log = log(&tables.meta, 5_000_000_000, &latencies).unwrap();
        assert!(log.contains("#[StartTime: 1796000000.000 (seconds since epoch)]"), "{log}");
        let mut seen = Vec::new();
        for entry in IntervalLogIterator::new(log.as_bytes()) {
            let LogEntry::Interval(interval) = entry.unwrap() else { continue };
            assert_eq!(interval.duration(), Duration::from_secs(5));
            assert!(interval.encoded_histogram().starts_with("HISTFA"));
            let bytes = STANDARD.decode(interval.encoded_histogram()).unwrap();
            let read: Histogram<u64> = Deserializer::new().deserialize(&mut bytes.as_slice()).unwrap();
            let tag = interval.tag().unwrap();
            let latency = Latency::ALL.into_iter().find(|latency| latency.name() == tag.as_str()).unwrap();
            assert!(read == *latencies.get(latency).histogram(), "{}", latency.name());
            seen.push(latency);
        }
        assert_eq!(seen, Latency::ALL);
    }

    #[test]
    fn percentile_text_is_that_of_hdrhistograms_tools() {
        let mut distribution = Distribution::new();
        (1..=1_000u64).for_each(|ms| distribution.record(ms * 1_000_000));
        let text = percentiles(&distribution);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "       Value     Percentile TotalCount 1/(1-Percentile)");
        assert_eq!(lines[2], "       1.000 0.000000000000          1           1.00");
        let rows = lines.iter().filter(|line| !line.starts_with('#') && line.contains('.'));
        let rows: Vec<Vec<f64>> =
            rows.map(|line| line.split_whitespace().map(|word| word.parse().unwrap()).collect()).collect();
        let (median, last) = (rows.iter().find(|row| row[1] >= 0.5).unwrap(), rows.last().unwrap());
        assert!((median[0] - 500.0).abs() <= 1.0 && median[2..] == [500.0, 2.0], "{median:?}");
        assert!((last[0] - 1_000.0).abs() <= 1.0 && last[1..] == [1.0, 1_000.0], "{last:?}");
        assert!(text.contains("#[Mean    =      500.") && text.contains("=         1000]"), "{text}");
        assert!(text.contains("SubBuckets     =         2048]"), "{text}");
    }
}

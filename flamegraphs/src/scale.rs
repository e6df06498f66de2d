//! Scales, ticks and the names of durations.

const NS_PER_US: f64 = 1e3;
const NS_PER_MS: f64 = 1e6;
const NS_PER_S: f64 = 1e9;

/// A duration to three significant digits in the unit that suits it: `850 ns`, `12.3 µs`, `4.56 ms`, `2 s`.
#[must_use]
pub fn duration(ns: u64) -> String {
    let value = ns as f64;
    // A value is shown in the larger unit as soon as rounding would make it 1000 of the smaller one.
    let (scaled, unit) = match value {
        v if v < 999.5 => (v, "ns"),
        v if v < 999.5 * NS_PER_US => (v / NS_PER_US, "µs"),
        v if v < 999.5 * NS_PER_MS => (v / NS_PER_MS, "ms"),
        v => (v / NS_PER_S, "s"),
    };
    format!("{} {unit}", significant(scaled))
}

/// `a–b unit` when both share the unit, else both with theirs.
pub(crate) fn duration_range(from_ns: u64, to_ns: u64) -> String {
    let (from, to) = (duration(from_ns), duration(to_ns));
    match (from.split_once(' '), to.split_once(' ')) {
        (Some((a, unit)), Some((b, other))) if unit == other => format!("{a}–{b} {unit}"),
        _ => format!("{from} – {to}"),
    }
}

/// Three significant digits (all digits before the point), no trailing zeros.
fn significant(value: f64) -> String {
    let decimals = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').to_owned() }
}

/// A count with thousands separators: `12,345`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i != 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The smallest of 1, 2 or 5 × 10^k that is at least `value`, and at least 1.
pub(crate) fn nice_at_least(value: f64) -> u64 {
    let mut power: u64 = 1;
    loop {
        for factor in [1, 2, 5] {
            let Some(step) = power.checked_mul(factor) else { return u64::MAX };
            if step as f64 >= value {
                return step;
            }
        }
        let Some(next) = power.checked_mul(10) else { return u64::MAX };
        power = next;
    }
}

/// A unit for an axis of time.
#[derive(Clone, Copy)]
pub(crate) struct TimeUnit {
    pub(crate) name: &'static str,
    pub(crate) ns: u64,
}

/// The unit in which a span of time is labelled.
pub(crate) fn time_unit(span_ns: u64) -> TimeUnit {
    const UNITS: [TimeUnit; 6] = [
        TimeUnit { name: "h", ns: 3_600_000_000_000 },
        TimeUnit { name: "min", ns: 60_000_000_000 },
        TimeUnit { name: "s", ns: 1_000_000_000 },
        TimeUnit { name: "ms", ns: 1_000_000 },
        TimeUnit { name: "µs", ns: 1_000 },
        TimeUnit { name: "ns", ns: 1 },
    ];
    // Minutes and hours only once there are several of them: a 90 s recording reads better in seconds.
    UNITS
        .into_iter()
        .find(|u| span_ns / u.ns >= if u.ns > 1_000_000_000 { 10 } else { 1 })
        .unwrap_or(UNITS[5])
}

/// The smallest round step of time, ns, that is at least `value_ns`: 1, 2 or 5 × 10^k up to 10 s, then what divides
/// minutes and hours.
pub(crate) fn nice_time_at_least(value_ns: f64) -> u64 {
    const S: u64 = 1_000_000_000;
    const STEPS: [u64; 14] = [
        10 * S,
        20 * S,
        30 * S,
        60 * S,
        120 * S,
        300 * S,
        600 * S,
        1200 * S,
        1800 * S,
        3600 * S,
        7200 * S,
        14_400 * S,
        43_200 * S,
        86_400 * S,
    ];
    if value_ns <= STEPS[0] as f64 {
        return nice_at_least(value_ns);
    }
    let days = || nice_at_least(value_ns / STEPS[13] as f64).saturating_mul(STEPS[13]);
    STEPS.into_iter().find(|&step| step as f64 >= value_ns).unwrap_or_else(days)
}

/// Round times in `[begin, end]`, about `most` of them, as labels in one unit; and the name of that unit.
pub(crate) fn time_ticks(begin_ns: u64, end_ns: u64, most: usize) -> (Vec<(u64, String)>, &'static str) {
    let span_ns = end_ns.saturating_sub(begin_ns).max(1);
    let unit = time_unit(span_ns);
    let step_ns = nice_time_at_least(span_ns as f64 / most.max(1) as f64);
    let exact = |decimals: &u32| step_ns.saturating_mul(10u64.pow(*decimals)).is_multiple_of(unit.ns);
    let decimals = (0..4).find(exact).unwrap_or(4) as usize;
    let mut ticks = Vec::new();
    let mut at = begin_ns.div_ceil(step_ns).saturating_mul(step_ns);
    while at <= end_ns && ticks.len() < 30 {
        ticks.push((at, format!("{:.decimals$}", at as f64 / unit.ns as f64)));
        match at.checked_add(step_ns) {
            Some(next) => at = next,
            None => break,
        }
    }
    (ticks, unit.name)
}

/// Ticks of a logarithmic axis over `[low, high]`: 1 × 10^k, with 2 and 5 where there is room for at most `max`.
pub(crate) fn log_ticks(low: u64, high: u64, max: usize) -> Vec<u64> {
    let within = |factors: &[u64]| -> Vec<u64> {
        let powers = (0..20u32).filter_map(|k| 10u64.checked_pow(k));
        powers
            .flat_map(|power| factors.iter().filter_map(move |f| power.checked_mul(*f)))
            .filter(|tick| (low..=high).contains(tick))
            .collect()
    };
    let fine = within(&[1, 2, 5]);
    if fine.len() <= max {
        return fine;
    }
    let mut coarse = within(&[1]);
    while coarse.len() > max.max(1) {
        coarse = coarse.into_iter().step_by(2).collect();
    }
    coarse
}

/// Edges of logarithmic bins that hold `[low, high]`, ascending, at least two, the bins half-open.
///
/// `max_bins` bounds their number; the bins per decade come from it. A range of less than a decade is widened to
/// one, so that values which differ by nothing do not fill the picture.
pub(crate) fn log_edges(low: u64, high: u64, max_bins: usize) -> Vec<u64> {
    const PER_DECADE: [i32; 9] = [48, 32, 24, 20, 16, 12, 8, 5, 3];
    let (low, high) = (low.max(1), high.max(low).max(1));
    let (mut from, mut to) = ((low as f64).log10(), (high as f64).log10());
    if to - from < 1.0 {
        let middle = f64::midpoint(from, to);
        (from, to) = ((middle - 0.5).max(0.0), (middle + 0.5).max(1.0));
    }
    let bins = |per: i32| (to * f64::from(per)).ceil() - (from * f64::from(per)).floor();
    let per = PER_DECADE.into_iter().find(|&per| bins(per) <= max_bins as f64).unwrap_or(1);
    let first = (from * f64::from(per)).floor() as i32;
    let last = (to * f64::from(per)).ceil() as i32;
    // One more than `last`, because the bins are half-open and `high` may be an edge.
    let mut edges: Vec<u64> =
        (first..=last + 1).map(|k| 10f64.powf(f64::from(k) / f64::from(per)).round() as u64).collect();
    edges.dedup();
    if edges.len() > 2 && edges[edges.len() - 2] > high {
        edges.pop();
    }
    if edges[0] > low {
        edges.insert(0, low);
    }
    edges
}

/// The bin of `value` in ascending `edges` (bin i is `[edges[i], edges[i + 1])`), the outer ones taking what is beyond.
pub(crate) fn bin(edges: &[u64], value: u64) -> usize {
    edges.partition_point(|&edge| edge <= value).saturating_sub(1).min(edges.len().saturating_sub(2))
}

/// Maps logarithms of ns to px.
#[derive(Clone, Copy)]
pub(crate) struct LogScale {
    low: f64,
    span: f64,
    from_px: f64,
    length_px: f64,
}

impl LogScale {
    /// `low` at `from_px`, `high` at `to_px`.
    pub(crate) fn new(low: u64, high: u64, from_px: f64, to_px: f64) -> Self {
        let low = (low.max(1) as f64).log10();
        let span = ((high.max(1) as f64).log10() - low).max(f64::MIN_POSITIVE);
        Self { low, span, from_px, length_px: to_px - from_px }
    }

    /// Position of `ns`, held inside the axis.
    pub(crate) fn px(self, ns: u64) -> f64 {
        let share = (((ns.max(1) as f64).log10() - self.low) / self.span).clamp(0.0, 1.0);
        self.from_px + share * self.length_px
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_have_three_digits_and_a_unit() {
        for (ns, text) in [
            (0, "0 ns"),
            (850, "850 ns"),
            (999, "999 ns"),
            (1_000, "1 µs"),
            (12_345, "12.3 µs"),
            (999_600, "1 ms"),
            (4_560_000, "4.56 ms"),
            (100_000_000, "100 ms"),
            (2_000_000_000, "2 s"),
            (90_000_000_000, "90 s"),
            (3_600_000_000_000, "3600 s"),
        ] {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(duration_range(1_000_000, 1_500_000), "1–1.5 ms");
        assert_eq!(duration_range(900_000, 1_100_000), "900 µs – 1.1 ms");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
    }

    #[test]
    fn ticks_are_nice() {
        assert_eq!(log_ticks(1_000, 100_000, 9), [1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]);
        assert_eq!(
            log_ticks(1_000, 100_000_000, 6),
            [1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]
        );
        assert_eq!(nice_at_least(0.0), 1);
        assert_eq!(nice_at_least(3.0), 5);
        assert_eq!(nice_at_least(201.0), 500);
        assert_eq!(nice_at_least(f64::INFINITY), u64::MAX);
        assert_eq!(nice_time_at_least(0.15e9), 200_000_000);
        assert_eq!(nice_time_at_least(36e9), 60_000_000_000);
        assert_eq!(nice_time_at_least(1e15), 20 * 86_400_000_000_000);
        assert_eq!(time_unit(90_000_000_000).name, "s");
        assert_eq!(time_unit(3_600_000_000_000).name, "min");
        assert_eq!(time_unit(0).name, "ns");
    }

    proptest! {
        #[test]
        fn every_value_is_in_its_bin(low in 0u64.., high in 0u64.., share in 0.0f64..=1.0, max in 1usize..80) {
            let (low, high) = (low.min(high), low.max(high));
            let edges = log_edges(low, high, max);
            prop_assert!(edges.len() >= 2);
            prop_assert!(edges.windows(2).all(|w| w[0] < w[1]));
            let value = low + ((high - low) as f64 * share) as u64;
            let value = value.clamp(low, high);
            let i = bin(&edges, value);
            prop_assert!(edges[i] <= value || (i == 0 && value == 0));
            prop_assert!(value < edges[i + 1] || edges[i + 1] == u64::MAX);
        }

        #[test]
        fn ticks_stay_inside(low in 1u64.., high in 1u64.., max in 1usize..20) {
            let (low, high) = (low.min(high), low.max(high));
            let ticks = log_ticks(low, high, max);
            prop_assert!(ticks.len() <= max);
            prop_assert!(ticks.iter().all(|t| (low..=high).contains(t)));
            prop_assert!(ticks.is_sorted());
        }
    }
}

//! Quantiles over windows of columns that hold enough points.

use std::ops::Range;

/// A quantile over a window of columns.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) columns: Range<usize>,
    /// Points in the window.
    pub(super) n: usize,
    pub(super) value_ns: u64,
}

/// Cuts the columns `within` into the shortest windows with n·(1−q) ≥ 10 and takes `q` of each (nearest rank).
///
/// `per_mille` is q in thousandths, below 1000. A rest that is too small at the end has no window: a quantile is not
/// guessed.
pub(super) fn windows(columns: &[Vec<u64>], within: Range<usize>, per_mille: usize) -> Vec<Window> {
    let needed = 10_000usize.div_ceil(1000usize.saturating_sub(per_mille).max(1));
    let mut windows = Vec::new();
    let mut values: Vec<u64> = Vec::new();
    let mut first = within.start;
    for i in within {
        if values.is_empty() {
            first = i;
        }
        values.extend_from_slice(&columns[i]);
        if values.len() >= needed {
            values.sort_unstable();
            let rank = (values.len() * per_mille).div_ceil(1000).max(1);
            windows.push(Window { columns: first..i + 1, n: values.len(), value_ns: values[rank - 1] });
            values.clear();
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_as_short_as_the_rule_allows() {
        let full: Vec<u64> = (1..=20).collect();
        assert_eq!(
            windows(&[full.clone(), full], 0..2, 500),
            [Window { columns: 0..1, n: 20, value_ns: 10 }, Window { columns: 1..2, n: 20, value_ns: 10 }]
        );
        let half: Vec<u64> = (1..=10).collect();
        assert_eq!(
            windows(&[vec![], half.clone(), vec![], half.clone(), half], 0..5, 500),
            [Window { columns: 1..4, n: 20, value_ns: 5 }]
        );
    }

    #[test]
    fn p99_needs_a_thousand() {
        let column: Vec<u64> = (1..=999).collect();
        assert!(windows(std::slice::from_ref(&column), 0..1, 990).is_empty());
        assert_eq!(
            windows(&[column, vec![1000]], 0..2, 990),
            [Window { columns: 0..2, n: 1000, value_ns: 990 }]
        );
    }
}

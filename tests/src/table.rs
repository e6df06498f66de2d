//! Tables that are read on a terminal and pasted into a Markdown document.

use std::fmt;

use crate::stats::{Aim, Estimate, MIN_PAIRS, Verdict};

/// A table; the first column is text, the others are figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub title: String,
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    #[must_use]
    pub fn new(title: &str, header: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            header: header.iter().map(|&cell| cell.to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().chain([&self.header]).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(3)
    }

    fn line(&self, f: &mut fmt::Formatter<'_>, row: &[String]) -> fmt::Result {
        for column in 0..self.header.len() {
            let (cell, width) = (row.get(column).map_or("", String::as_str), self.width(column));
            if column == 0 { write!(f, "| {cell:<width$} ")? } else { write!(f, "| {cell:>width$} ")? }
        }
        writeln!(f, "|")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "**{}**\n", self.title)?;
        self.line(f, &self.header)?;
        for column in 0..self.header.len() {
            let dashes = "-".repeat(self.width(column) - 1);
            if column == 0 { write!(f, "| {dashes}- ")? } else { write!(f, "| {dashes}: ")? }
        }
        writeln!(f, "|")?;
        self.rows.iter().try_for_each(|row| self.line(f, row))
    }
}

/// Columns that [`ratio`] fills.
pub const RATIO: [&str; 4] = judged("ratio");

/// Columns that [`ratio`] fills, for a figure that is no ratio.
#[must_use]
pub const fn judged(figure: &str) -> [&str; 4] {
    [figure, "95 %", "aim", "result"]
}

/// A ratio, its interval, what it should be, and whether the worse end of the interval is that.
#[must_use]
pub fn ratio(estimate: Option<&Estimate>, aim: Option<Aim>) -> [String; 4] {
    let Some(estimate) = estimate else { return ["–".into(), "–".into(), aim_text(aim), "–".into()] };
    let verdict = aim.map_or_else(String::new, |aim| match aim.judge(estimate) {
        Verdict::Met => "met".into(),
        Verdict::Missed => "missed".into(),
        Verdict::TooFew => format!("– (n={} < {MIN_PAIRS})", estimate.n),
    });
    [
        format!("{:.3}", estimate.median),
        format!("{:.3} … {:.3}", estimate.low, estimate.high),
        aim_text(aim),
        verdict,
    ]
}

fn aim_text(aim: Option<Aim>) -> String {
    match aim {
        Some(Aim::AtLeast(aim)) => format!("≥ {aim}"),
        Some(Aim::AtMost(aim)) => format!("≤ {aim}"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_markdown_and_aligned() {
        let mut table = Table::new("Cost", &["probe", "ns"]);
        table.rows.push(vec!["µs-long name".into(), "7".into()]);
        table.rows.push(vec!["x".into()]);
        let expected = "**Cost**\n\n\
                        | probe        |  ns |\n\
                        | ------------ | --: |\n\
                        | µs-long name |   7 |\n\
                        | x            |     |\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn ratios_say_what_they_support() {
        let estimate = Estimate { median: 0.9954, low: 0.9912, high: 1.0, n: 12 };
        let cells = ratio(Some(&estimate), Some(Aim::AtLeast(0.99)));
        assert_eq!(cells, ["0.995", "0.991 … 1.000", "≥ 0.99", "met"]);
        assert_eq!(ratio(Some(&estimate), None)[2..], ["", ""]);
        let few = Estimate { n: 3, ..estimate };
        assert_eq!(ratio(Some(&few), Some(Aim::AtMost(1.3)))[3], "– (n=3 < 10)");
        assert_eq!(ratio(None, Some(Aim::AtMost(1.3))), ["–", "–", "≤ 1.3", "–"]);
    }
}

//! Aligned text tables and the few styles of the reports.

use std::fmt::Write;

/// Widest line of a report, in characters.
pub(crate) const WIDTH: usize = 100;

/// Escape sequences, or none of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Style {
    pub(crate) color: bool,
}

impl Style {
    fn wrap(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(crate) fn heading(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub(crate) fn alarm(self, text: &str) -> String {
        self.wrap("1;31", text)
    }

    pub(crate) fn note(self, text: &str) -> String {
        self.wrap("33", text)
    }

    pub(crate) fn faint(self, text: &str) -> String {
        self.wrap("2", text)
    }
}

/// Which side a column is aligned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Rows of cells; the last column is cut to what is left of [`WIDTH`].
#[derive(Debug)]
pub(crate) struct Table {
    sides: Vec<Side>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with a line of headings.
    pub(crate) fn new<const N: usize>(columns: [(&str, Side); N]) -> Self {
        Self::with_columns(columns.map(|(heading, side)| (heading.to_owned(), side)).into())
    }

    /// The same with as many columns as it takes.
    pub(crate) fn with_columns(columns: Vec<(String, Side)>) -> Self {
        let (headings, sides) = columns.into_iter().unzip();
        Self { sides, rows: vec![headings] }
    }

    pub(crate) fn push<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    pub(crate) fn push_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Two spaces before every column; headings faint.
    pub(crate) fn render(&self, style: Style) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        let mut out = String::new();
        for (i, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for ((cell, width), side) in row.iter().zip(&widths).zip(&self.sides) {
                let _ = match side {
                    Side::Left => write!(line, "  {cell:<width$}"),
                    Side::Right => write!(line, "  {cell:>width$}"),
                };
            }
            let line = cut(line.trim_end(), WIDTH);
            out.push_str(&if i == 0 { style.faint(&line) } else { line });
            out.push('\n');
        }
        out
    }
}

/// At most `most` characters, the last an ellipsis when some are missing.
pub(crate) fn cut(line: &str, most: usize) -> String {
    if line.chars().count() <= most {
        return line.to_owned();
    }
    line.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_are_cut() {
        let mut table = Table::new([("name", Side::Left), ("n", Side::Right), ("", Side::Left)]);
        table.push(["ttft".into(), "5".into(), "x".repeat(200)]);
        table.push(["µ".into(), "1 234".into(), String::new()]);
        let text = table.render(Style::default());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "  name      n");
        assert_eq!(lines[2], "  µ     1 234");
        assert_eq!(lines[1].chars().count(), WIDTH);
    }
}

//! Rows with names against time: offsets within a second (as in FlameScope), or requests.
//!
//! In: cells with a value and a tooltip. Out: one picture in the colours of the heatmap, its scale explained, empty
//! columns hatched, columns with losses marked.

use crate::frame::{GRID, INK, LABEL, TICK, WIDTH};
use crate::heatmap::{DEFS, EMPTY, LOST, LOST_COLUMN, Loss, dark_shades, shade, time_range};
use crate::scale::{count, duration, nice_at_least, nice_time_at_least, time_ticks};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use crate::{Error, Header};
use std::fmt::Write;
use std::ops::Range;

/// What the values of cells are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measure {
    /// How many: `tokens`. The scale is linear, and equal values of a cell add up.
    Count(String),
    /// How long, ns: `slowest token`. The scale is logarithmic, and a cell has the largest of its values.
    Latency(String),
}

/// A value at a place; several of a place are one cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixCell {
    /// Index into [`MatrixInput::rows`].
    pub row: usize,
    /// ns since the origin of the axis of time; those outside of it are left out.
    pub at_ns: u64,
    pub value: u64,
}

/// A matrix to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixInput {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// Name of the axis of time, without the unit.
    pub time_name: String,
    /// ns since its origin, half-open.
    pub range: Range<u64>,
    /// Width of a column, ns; `None`: a round one of which there are about a hundred.
    pub column_ns: Option<u64>,
    /// Name of the other axis.
    pub row_name: String,
    /// Names of the rows, top to bottom.
    pub rows: Vec<String>,
    pub measure: Measure,
    pub cells: Vec<MatrixCell>,
    pub losses: Vec<Loss>,
    /// What a column without cells means: `nothing seen`.
    pub empty: String,
}

const LEFT: f64 = 190.0;
const RIGHT: f64 = 1176.0;
const TOP: f64 = 112.0;
const HEIGHT: f64 = 480.0;
/// Rows are no higher.
const HIGHEST: f64 = 22.0;
const LOSS_STRIP: f64 = 8.0;
/// Columns where their width is not given, at most.
const COLUMNS: f64 = 125.0;
/// Columns that can still be seen; a range that needs more is refused.
const MOST_COLUMNS: u64 = 1_000;
const ROW_NAME: Style = Style::new(11.0, INK).anchor(Anchor::End);

/// Draws a matrix, 1200 px wide.
///
/// # Errors
/// [`Error::Empty`] when no cell is inside, [`Error::BadRange`] also when there are more columns than can be drawn.
pub fn matrix(input: &MatrixInput) -> Result<String, Error> {
    let Range { start: begin_ns, end: end_ns } = input.range;
    let span_ns = end_ns.saturating_sub(begin_ns);
    let column_ns = input.column_ns.unwrap_or_else(|| nice_time_at_least(span_ns as f64 / COLUMNS)).max(1);
    let columns = span_ns.div_ceil(column_ns);
    if input.range.is_empty() || columns > MOST_COLUMNS {
        return Err(Error::BadRange { begin_ns, end_ns });
    }
    let picture = Picture::new(input, columns as usize, column_ns)?;
    let mut svg = Svg::new(WIDTH, (picture.plot.bottom() + 62.0).max(300.0), &input.header.title, DEFS);
    svg.set_dark(dark_shades());
    input.header.draw(&mut svg);
    picture.draw(&mut svg);
    Ok(svg.finish())
}

struct Picture<'a> {
    input: &'a MatrixInput,
    columns: usize,
    column_ns: u64,
    plot: Rect,
    /// Column by column; 0: nothing.
    values: Vec<u64>,
    least: u64,
    most: u64,
}

impl<'a> Picture<'a> {
    fn new(input: &'a MatrixInput, columns: usize, column_ns: u64) -> Result<Self, Error> {
        let rows = input.rows.len();
        let mut values = vec![0u64; columns * rows];
        for cell in input.cells.iter().filter(|cell| cell.row < rows && input.range.contains(&cell.at_ns)) {
            let column = ((cell.at_ns - input.range.start) / column_ns) as usize;
            let known = &mut values[column * rows + cell.row];
            *known = match input.measure {
                Measure::Count(_) => known.saturating_add(cell.value),
                Measure::Latency(_) => (*known).max(cell.value.max(1)),
            };
        }
        let there = || values.iter().copied().filter(|value| *value > 0);
        let (Some(least), Some(most)) = (there().min(), there().max()) else {
            return Err(Error::Empty("latencies"));
        };
        let height = HEIGHT.min(HIGHEST * rows as f64);
        let plot = Rect { x: LEFT, y: TOP, width: RIGHT - LEFT, height };
        Ok(Self { input, columns, column_ns, plot, values, least, most })
    }

    fn draw(&self, svg: &mut Svg) {
        self.legend(svg);
        self.background(svg);
        self.cells(svg);
        self.names(svg);
        svg.rect(self.plot, &format!("fill=\"none\" stroke=\"{GRID}\""), None);
        let Self { input: MatrixInput { range, .. }, plot, .. } = self;
        let (ticks, unit) = time_ticks(range.start, range.end, 12);
        for (at, label) in ticks {
            let x = self.x((at - range.start) as f64 / self.column_ns as f64);
            let mark = [(x, plot.bottom()), (x, plot.bottom() + 5.0)];
            svg.line(&mark, &format!("stroke=\"{INK}\""), None);
            svg.text(x, plot.bottom() + 20.0, TICK.anchor(Anchor::Middle), &label);
        }
        let name = format!("{} ({unit})", shorten(&self.input.time_name, 100));
        svg.text(plot.x + plot.width / 2.0, plot.bottom() + 42.0, LABEL.anchor(Anchor::Middle), &name);
        svg.text_upwards(22.0, plot.y + plot.height / 2.0, LABEL, &shorten(&self.input.row_name, 56));
    }

    /// Left edge of a column; the last one may reach beyond the axis, and is cut.
    fn x(&self, column: f64) -> f64 {
        let all = (self.input.range.end - self.input.range.start) as f64 / self.column_ns as f64;
        (self.plot.x + self.plot.width * column / all).min(self.plot.right())
    }

    fn range(&self, column: usize) -> Range<u64> {
        let begin = self.input.range.start + column as u64 * self.column_ns;
        begin..begin.saturating_add(self.column_ns)
    }

    fn column(&self, column: usize) -> &[u64] {
        let rows = self.input.rows.len();
        &self.values[column * rows..(column + 1) * rows]
    }

    fn is_empty(&self, column: usize) -> bool {
        self.column(column).iter().all(|value| *value == 0)
    }

    fn lost(&self, column: usize) -> Option<String> {
        let Range { start, end } = self.range(column);
        let mut text = String::new();
        for loss in self.input.losses.iter().filter(|loss| loss.range.start < end && loss.range.end > start) {
            let _ = write!(text, "\n{}: {}", time_range(loss.range.start, loss.range.end), loss.what);
        }
        (!text.is_empty()).then(|| format!("{}, events lost{text}", time_range(start, end)))
    }

    fn background(&self, svg: &mut Svg) {
        for column in 0..self.columns {
            let (left, right) = (self.x(column as f64), self.x(column as f64 + 1.0));
            let whole = Rect { x: left, width: right - left, ..self.plot };
            if self.is_empty(column) {
                let Range { start, end } = self.range(column);
                svg.rect(whole, EMPTY, Some(&format!("{}\n{}", time_range(start, end), self.input.empty)));
            }
            if let Some(tooltip) = self.lost(column) {
                svg.rect(whole, LOST_COLUMN, Some(&tooltip));
                let strip = Rect { y: self.plot.y - LOSS_STRIP - 1.0, height: LOSS_STRIP, ..whole };
                svg.rect(strip, LOST, Some(&tooltip));
            }
        }
    }

    fn cells(&self, svg: &mut Svg) {
        let height = self.plot.height / self.input.rows.len() as f64;
        for column in 0..self.columns {
            let (left, right) = (self.x(column as f64), self.x(column as f64 + 1.0));
            for (row, &value) in self.column(column).iter().enumerate().filter(|(_, value)| **value > 0) {
                let y = self.plot.y + height * row as f64;
                let rect = Rect { x: left, y, width: (right - left).max(1.0), height };
                let Range { start, end } = self.range(column);
                let (when, name) = (time_range(start, end), shorten(&self.input.rows[row], 64));
                let value_text = match &self.input.measure {
                    Measure::Count(what) => format!("{} {what}", count(value)),
                    Measure::Latency(what) => format!("{what} {}", duration(value)),
                };
                let tooltip = format!("{when}, {name}\n{value_text}");
                svg.rect(rect, &format!("fill=\"{}\"", shade(self.share(value))), Some(&tooltip));
            }
        }
    }

    /// Where a value is on the scale of colours.
    fn share(&self, value: u64) -> f64 {
        let part = |value: f64, least: f64, most: f64| {
            if most > least { (value - least) / (most - least) } else { 1.0 }
        };
        match self.input.measure {
            Measure::Count(_) => part(value as f64, 1.0, self.most as f64),
            Measure::Latency(_) => {
                part((value as f64).ln(), (self.least as f64).ln(), (self.most as f64).ln())
            }
        }
    }

    /// Names of the rows, as many as there is room for.
    fn names(&self, svg: &mut Svg) {
        let rows = self.input.rows.len();
        let height = self.plot.height / rows as f64;
        let every = nice_at_least(12.0 / height) as usize;
        for (row, name) in self.input.rows.iter().enumerate().rev().step_by(every.max(1)) {
            let y = self.plot.y + height * (row as f64 + 0.5) + 4.0;
            svg.text(self.plot.x - 8.0, y, ROW_NAME, &shorten(name, ROW_NAME.fits(self.plot.x - 44.0)));
        }
    }

    fn legend(&self, svg: &mut Svg) {
        let y = Header::BOTTOM + 18.0;
        let (low, high) = match &self.input.measure {
            Measure::Count(what) => {
                ("1".to_owned(), format!("{} {} per cell", count(self.most), shorten(what, 24)))
            }
            Measure::Latency(what) => {
                (duration(self.least), format!("{} {} (log)", duration(self.most), shorten(what, 40)))
            }
        };
        let mut x = self.plot.x;
        svg.text(x, y, LABEL, &low);
        x += LABEL.width(&low) + 4.0;
        const STEPS: u32 = 24;
        for i in 0..STEPS {
            let step = Rect { x: x + f64::from(i) * 5.0, y: y - 11.0, width: 5.3, height: 13.0 };
            svg.rect(step, &format!("fill=\"{}\"", shade(f64::from(i) / f64::from(STEPS - 1))), None);
        }
        x += f64::from(STEPS) * 5.0 + 7.0;
        svg.text(x, y, LABEL, &high);
        x += LABEL.width(&high) + 12.0;
        let empty = (0..self.columns).any(|column| self.is_empty(column));
        let lost = (0..self.columns).any(|column| self.lost(column).is_some());
        for (text, fill, shown) in
            [(shorten(&self.input.empty, 40).as_ref(), EMPTY, empty), ("events lost", LOST, lost)]
        {
            if shown {
                let key = Rect { x, y: y - 11.0, width: 16.0, height: 13.0 };
                svg.rect(key, &format!("{fill} stroke=\"{GRID}\""), None);
                svg.text(x + 22.0, y, LABEL, text);
                x += 22.0 + LABEL.width(text) + 12.0;
            }
        }
    }
}

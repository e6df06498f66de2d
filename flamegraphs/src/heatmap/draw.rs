//! The picture of a grid.

use super::grid::{Cell, Grid};
use super::quantile::{Window, windows};
use super::{Axis, HeatmapInput, strips};
use crate::frame::{GRID, Header, INK, LABEL, TICK, WIDTH};
use crate::scale::{
    LogScale, count, duration, duration_range, log_ticks, nice_at_least, time_ticks, time_unit,
};
use crate::svg::{Anchor, Rect, Svg};
use crate::text::shorten;
use std::fmt::Write;
use std::ops::Range;

/// Height without strips.
const HEIGHT: f64 = 675.0;
pub(super) const PLOT: Rect = Rect { x: 92.0, y: 112.0, width: 1084.0, height: 466.0 };

/// Height of the strip above the plot that marks losses.
const LOSS_STRIP: f64 = 8.0;

/// Longest id in a tooltip and in the line below the plot, in characters.
const ID_IN_TOOLTIP: usize = 64;
const ID_IN_LINE: usize = 24;

pub(crate) const DEFS: &str = "<pattern id=\"empty\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#f6f8fa\"/>\
    <rect width=\"1\" height=\"6\" fill=\"#d8dee4\"/></pattern>";
pub(crate) const EMPTY: &str = "fill=\"url(#empty)\"";
pub(crate) const LOST: &str = "fill=\"#c1121f\"";
pub(crate) const LOST_COLUMN: &str = "fill=\"#c1121f\" fill-opacity=\"0.08\"";

/// A quantile line: name, thousandths, stroke.
const LINES: [(&str, usize, &str); 2] =
    [("p50", 500, "stroke=\"#e69f00\""), ("p99", 990, "stroke=\"#d1380b\" stroke-dasharray=\"7 3\"")];

/// Colours from the smallest to the largest count; both ends are told from the ground and, by lightness, from each other.
type Ramp = [[f64; 3]; 3];
const ON_WHITE: Ramp = [[190.0, 214.0, 240.0], [49.0, 116.0, 190.0], [8.0, 29.0, 88.0]];
const ON_DARK: Ramp = [[38.0, 62.0, 106.0], [62.0, 128.0, 204.0], [200.0, 226.0, 255.0]];
/// So many are told apart by nobody; each has a colour on dark.
const SHADES: usize = 32;

pub(super) fn draw(input: &HeatmapInput<'_>, grid: &Grid<'_>) -> String {
    let height = HEIGHT + strips::height(input);
    let mut svg = Svg::new(WIDTH, height, &input.header.title, DEFS);
    svg.set_dark(dark_shades());
    input.header.draw(&mut svg);
    let lines = LINES.map(|(_, per_mille, _)| {
        grid.cuts().windows(2).flat_map(|cut| windows(&grid.latencies, cut[0]..cut[1], per_mille)).collect()
    });
    let picture = Picture { input, grid, y: y_scale(grid), lines };
    picture.legend(&mut svg);
    picture.columns(&mut svg);
    picture.cells(&mut svg);
    picture.latency_axis(&mut svg);
    picture.column_axis(&mut svg);
    picture.quantiles(&mut svg);
    picture.strips(&mut svg, PLOT.bottom() + 54.0);
    picture.slowest(&mut svg, height - 22.0);
    svg.finish()
}

fn y_scale(grid: &Grid<'_>) -> LogScale {
    LogScale::new(grid.rows[0], grid.rows[grid.row_count()], PLOT.bottom(), PLOT.y)
}

pub(super) struct Picture<'a> {
    pub(super) input: &'a HeatmapInput<'a>,
    pub(super) grid: &'a Grid<'a>,
    y: LogScale,
    /// Windows of each of [`LINES`].
    lines: [Vec<Window>; 2],
}

impl Picture<'_> {
    /// Left edge of a column; columns are equally wide whatever they hold.
    pub(super) fn x(&self, column: f64) -> f64 {
        PLOT.x + PLOT.width * column / self.grid.column_count() as f64
    }

    /// The range of some columns in words.
    pub(super) fn range(&self, columns: Range<usize>) -> String {
        let (from, to) = (self.grid.columns[columns.start], self.grid.columns[columns.end]);
        match self.input.axis {
            Axis::Time { .. } => time_range(from, to),
            Axis::TokenIndex | Axis::LogTokenIndex if to - from == 1 => format!("token {from}"),
            Axis::TokenIndex | Axis::LogTokenIndex => format!("tokens {from}–{}", to - 1),
        }
    }

    /// Background of the columns: hatched without points, marked where events were lost.
    fn columns(&self, svg: &mut Svg) {
        for column in 0..self.grid.column_count() {
            let (left, right) = (self.x(column as f64), self.x(column as f64 + 1.0));
            let whole = Rect { x: left, width: right - left, ..PLOT };
            if self.grid.latencies[column].is_empty() {
                let nothing = format!("{}\nno {}", self.range(column..column + 1), self.input.count_name);
                svg.rect(whole, EMPTY, Some(&nothing));
            }
            if let Some(tooltip) = self.lost(column) {
                svg.rect(whole, LOST_COLUMN, Some(&tooltip));
                let strip = Rect { y: PLOT.y - LOSS_STRIP - 1.0, height: LOSS_STRIP, ..whole };
                svg.rect(strip, LOST, Some(&tooltip));
            }
        }
    }

    /// What was lost in a column, in words.
    fn lost(&self, column: usize) -> Option<String> {
        if !matches!(self.input.axis, Axis::Time { .. }) {
            return None;
        }
        let (from, to) = (self.grid.columns[column], self.grid.columns[column + 1]);
        let mut text = String::new();
        for loss in self.input.losses.iter().filter(|l| l.range.start < to && l.range.end > from) {
            let _ = write!(text, "\n{}: {}", time_range(loss.range.start, loss.range.end), loss.what);
        }
        (!text.is_empty()).then(|| format!("{}, events lost{text}", self.range(column..column + 1)))
    }

    fn cells(&self, svg: &mut Svg) {
        for column in 0..self.grid.column_count() {
            let (left, right) = (self.x(column as f64), self.x(column as f64 + 1.0));
            for (row, cell) in self.grid.column(column).iter().enumerate().filter(|(_, c)| c.count > 0) {
                let (low, high) = (self.grid.rows[row], self.grid.rows[row + 1]);
                let (top, bottom) = (self.y.px(high), self.y.px(low));
                let rect = Rect { x: left, y: top, width: right - left, height: bottom - top };
                let fill = format!("fill=\"{}\"", colour(cell.count, self.grid.most));
                svg.rect(rect, &fill, Some(&self.tooltip(column, (low, high), cell)));
            }
        }
    }

    fn tooltip(&self, column: usize, (low, high): (u64, u64), cell: &Cell<'_>) -> String {
        let mut text = format!(
            "{}, {}\n{} {}\nslowest:",
            self.range(column..column + 1),
            duration_range(low, high),
            count(cell.count),
            self.input.count_name
        );
        for (latency_ns, id) in &cell.slowest {
            let _ = write!(text, "\n{} {}", duration(*latency_ns), one_line(id, ID_IN_TOOLTIP));
        }
        text
    }

    fn latency_axis(&self, svg: &mut Svg) {
        let (low, high) = (self.grid.rows[0], self.grid.rows[self.grid.row_count()]);
        for tick in log_ticks(low, high, 12) {
            let y = self.y.px(tick);
            let stroke = format!("stroke=\"{INK}\" stroke-opacity=\"0.12\"");
            svg.line(&[(PLOT.x, y), (PLOT.right(), y)], &stroke, None);
            svg.text(PLOT.x - 8.0, y + 4.5, TICK.anchor(Anchor::End), &duration(tick));
        }
        let frame = format!("fill=\"none\" stroke=\"{GRID}\"");
        svg.rect(PLOT, &frame, None);
        svg.text_upwards(22.0, PLOT.y + PLOT.height / 2.0, LABEL, &shorten(&self.input.latency_name, 56));
    }

    fn column_axis(&self, svg: &mut Svg) {
        let (ticks, name) = match &self.input.axis {
            Axis::Time { name, .. } => self.time_ticks(name),
            Axis::TokenIndex => (self.index_ticks(false), "token index".to_owned()),
            Axis::LogTokenIndex => (self.index_ticks(true), "token index (log)".to_owned()),
        };
        for (column, label) in ticks {
            let x = self.x(column);
            svg.line(&[(x, PLOT.bottom()), (x, PLOT.bottom() + 5.0)], &format!("stroke=\"{INK}\""), None);
            svg.text(x, PLOT.bottom() + 20.0, TICK.anchor(Anchor::Middle), &label);
        }
        let middle = PLOT.x + PLOT.width / 2.0;
        svg.text(middle, PLOT.bottom() + 42.0, LABEL.anchor(Anchor::Middle), &shorten(&name, 120));
    }

    /// Ticks (column, label) at round times, and the name of the axis with its unit.
    fn time_ticks(&self, name: &str) -> (Vec<(f64, String)>, String) {
        let columns = &self.grid.columns;
        let (begin, end) = (columns[0], columns[columns.len() - 1]);
        let width = (columns[1] - begin) as f64;
        let (ticks, unit) = time_ticks(begin, end, 12);
        let ticks = ticks.into_iter().map(|(at, label)| ((at - begin) as f64 / width, label)).collect();
        (ticks, format!("{} ({unit})", shorten(name, 100)))
    }

    /// Ticks (column, label) at round token indexes; in the middle of columns that are one index wide.
    fn index_ticks(&self, log: bool) -> Vec<(f64, String)> {
        let columns = &self.grid.columns;
        let end = columns[columns.len() - 1];
        let values: Vec<u64> = if log {
            std::iter::once(0).chain(log_ticks(1, end.saturating_sub(1).max(1), 24)).collect()
        } else {
            let step = nice_at_least(end as f64 / 16.0);
            (0..20).map_while(|i| step.checked_mul(i)).take_while(|v| *v < end).collect()
        };
        values
            .into_iter()
            .filter_map(|value| {
                let column = columns.partition_point(|&edge| edge <= value).checked_sub(1)?;
                let (from, to) = (*columns.get(column)?, *columns.get(column + 1)?);
                let inside = if to - from == 1 { 0.5 } else { (value - from) as f64 / (to - from) as f64 };
                Some((column as f64 + inside, count(value)))
            })
            .collect()
    }

    fn quantiles(&self, svg: &mut Svg) {
        for (line, (name, _, stroke)) in self.lines.iter().zip(LINES) {
            for window in line {
                let y = self.y.px(window.value_ns);
                let tooltip = self.window_tooltip(name, window);
                for run in self.runs(window.columns.clone()) {
                    let points = [(self.x(run.start as f64), y), (self.x(run.end as f64), y)];
                    // The white line below keeps the coloured one visible on dark cells.
                    svg.line(&points, "stroke=\"#ffffff\" stroke-width=\"3\" stroke-opacity=\"0.8\"", None);
                    svg.line(&points, &format!("{stroke} stroke-width=\"1.75\""), Some(&tooltip));
                }
            }
        }
    }

    /// The stretches of a range of columns that hold points: no line is drawn where nothing was seen.
    fn runs(&self, columns: Range<usize>) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for column in columns.filter(|&c| !self.grid.latencies[c].is_empty()) {
            match runs.last_mut() {
                Some(run) if run.end == column => run.end += 1,
                _ => runs.push(column..column + 1),
            }
        }
        runs
    }

    fn window_tooltip(&self, name: &str, window: &Window) -> String {
        let range = self.range(window.columns.clone());
        format!("{name} {}\n{range}, n={}", duration(window.value_ns), count(window.n as u64))
    }

    /// The colours and lines explained, above the plot.
    fn legend(&self, svg: &mut Svg) {
        let y = Header::BOTTOM + 18.0;
        let most = count(self.grid.most);
        let mut x = PLOT.x;
        svg.text(x, y, LABEL, "1");
        x += 14.0;
        const STEPS: u64 = 24;
        for i in 0..STEPS {
            let step = Rect { x: x + i as f64 * 5.0, y: y - 11.0, width: 5.3, height: 13.0 };
            svg.rect(step, &format!("fill=\"{}\"", colour(i + 1, STEPS)), None);
        }
        x += STEPS as f64 * 5.0 + 7.0;
        let unit = format!("{most} {} per cell", shorten(&self.input.count_name, 24));
        svg.text(x, y, LABEL, &unit);
        x += LABEL.width(&unit) + 12.0;
        for (line, (name, per_mille, stroke)) in self.lines.iter().zip(LINES) {
            let needed = count(10_000 / (1000 - per_mille as u64));
            let text = if line.is_empty() {
                format!("{name} – (n < {needed})")
            } else {
                format!("{name}, n ≥ {needed} each")
            };
            svg.line(&[(x, y - 4.5), (x + 26.0, y - 4.5)], &format!("{stroke} stroke-width=\"2.5\""), None);
            svg.text(x + 32.0, y, LABEL, &text);
            x += 32.0 + LABEL.width(&text) + 12.0;
        }
        let empty = self.grid.latencies.iter().any(Vec::is_empty);
        let lost = (0..self.grid.column_count()).any(|c| self.lost(c).is_some());
        for (text, fill, shown) in [("nothing seen", EMPTY, empty), ("events lost", LOST, lost)] {
            if shown {
                let key = Rect { x, y: y - 11.0, width: 16.0, height: 13.0 };
                svg.rect(key, &format!("{fill} stroke=\"{GRID}\""), None);
                svg.text(x + 22.0, y, LABEL, text);
                x += 22.0 + LABEL.width(text) + 12.0;
            }
        }
    }

    /// The slowest of all in one line at the bottom: tooltips do not reach a slide.
    fn slowest(&self, svg: &mut Svg, y: f64) {
        let mut text = String::from("Slowest: ");
        for (i, point) in self.grid.slowest.iter().take(3).enumerate() {
            let column = crate::scale::bin(&self.grid.columns, point.x);
            let place = match self.input.axis {
                Axis::Time { .. } => format!("at {}", duration(point.x)),
                Axis::TokenIndex | Axis::LogTokenIndex => self.range(column..column + 1),
            };
            let separator = if i == 0 { "" } else { "  ·  " };
            let id = one_line(point.id, ID_IN_LINE);
            let _ = write!(text, "{separator}{} {id} ({place})", duration(point.latency_ns));
        }
        let fits = LABEL.fits(PLOT.width);
        svg.text(PLOT.x, y, LABEL, &shorten(&text, fits));
    }
}

/// An id for one line of text, `(unknown)` when it is empty.
fn one_line(id: &str, longest: usize) -> String {
    if id.is_empty() {
        return "(unknown)".to_owned();
    }
    shorten(id, longest).replace(['\n', '\r'], " ")
}

/// A range of times since the origin: all digits that its width calls for.
pub(crate) fn time_range(from: u64, to: u64) -> String {
    let unit = time_unit(to);
    let width = to.saturating_sub(from).max(1) as f64 / unit.ns as f64;
    let decimals = (-width.log10().floor()).clamp(0.0, 6.0) as usize;
    let part = |ns: u64| ns as f64 / unit.ns as f64;
    format!("{:.decimals$}–{:.decimals$} {}", part(from), part(to), unit.name)
}

/// The colour of a count, linear between 1 and `most`.
fn colour(count: u64, most: u64) -> String {
    shade(if most <= 1 { 1.0 } else { count.saturating_sub(1) as f64 / (most - 1) as f64 })
}

/// The colour of a share of the scale.
pub(crate) fn shade(share: f64) -> String {
    let step = (share.clamp(0.0, 1.0) * (SHADES - 1) as f64).round() as usize;
    of_ramp(ON_WHITE, step)
}

/// What each [`shade`] becomes on dark.
pub(crate) fn dark_shades() -> impl Iterator<Item = (String, String)> {
    (0..SHADES).map(|step| (of_ramp(ON_WHITE, step), of_ramp(ON_DARK, step)))
}

fn of_ramp([first, middle, last]: Ramp, step: usize) -> String {
    let share = step as f64 / (SHADES - 1) as f64;
    let (from, to, at) =
        if share < 0.5 { (first, middle, share * 2.0) } else { (middle, last, share * 2.0 - 1.0) };
    let channel = |i: usize| (from[i] + (to[i] - from[i]) * at).round() as u8;
    format!("#{:02x}{:02x}{:02x}", channel(0), channel(1), channel(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_darken_with_the_count() {
        assert_eq!(colour(1, 100), "#bed6f0");
        assert_eq!(colour(100, 100), "#081d58");
        assert_eq!(colour(1, 1), "#081d58");
    }

    #[test]
    fn ranges_show_the_digits_they_need() {
        assert_eq!(time_range(12_200_000_000, 12_400_000_000), "12.2–12.4 s");
        assert_eq!(time_range(0, 5_000_000_000), "0–5 s");
    }
}

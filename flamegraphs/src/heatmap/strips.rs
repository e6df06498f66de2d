//! Strips below the plot: what devices did at the same time.

use super::draw::{EMPTY, LOST, PLOT, Picture, time_range};
use super::{Axis, HeatmapInput, Lane, Strip};
use crate::frame::{GRID, INK, LABEL, SOFT_INK};
use crate::scale::{count, duration};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use std::fmt::Write;

/// Most strips that are drawn; more are said to be there.
const MOST: usize = 16;

const TITLE_HEIGHT: f64 = 20.0;
const LANE_HEIGHT: f64 = 26.0;
const LANE_GAP: f64 = 4.0;
const STRIP_GAP: f64 = 10.0;
/// Height of the band at the foot of a strip that marks what held the device back.
const HELD_HEIGHT: f64 = 5.0;

const NAME: Style = Style::new(11.0, INK).anchor(Anchor::End);
const SCALE: Style = Style::new(10.0, SOFT_INK).anchor(Anchor::End);

/// Fills of the lanes, in their order; told from each other and from the cells above.
const FILLS: [&str; 2] = ["#2a9d8f", "#7a5aa6"];
const HELD: &str = "fill=\"#f28e2b\"";
const FAULT: &str = "stroke=\"#c1121f\" stroke-width=\"1.5\"";

/// The strips that a picture shows.
fn shown<'a>(input: &'a HeatmapInput<'_>) -> &'a [Strip] {
    let strips = if matches!(input.axis, Axis::Time { .. }) { input.strips.as_slice() } else { &[] };
    strips.get(..MOST).unwrap_or(strips)
}

fn lanes_height(strip: &Strip) -> f64 {
    strip.lanes.len() as f64 * (LANE_HEIGHT + LANE_GAP) + HELD_HEIGHT
}

/// Room that the strips take, px.
pub(super) fn height(input: &HeatmapInput<'_>) -> f64 {
    shown(input).iter().map(|strip| TITLE_HEIGHT + lanes_height(strip) + STRIP_GAP).sum()
}

/// Smallest, mean and largest value in a column.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Level {
    low: u64,
    mean: f64,
    high: u64,
    n: usize,
}

impl Level {
    fn of(values: &[(u64, u64)]) -> Option<Self> {
        let (low, high) =
            (values.iter().map(|point| point.1).min()?, values.iter().map(|point| point.1).max()?);
        let sum: f64 = values.iter().map(|point| point.1 as f64).sum();
        Some(Self { low, mean: sum / values.len() as f64, high, n: values.len() })
    }
}

/// What a lane shows in each column. A value stands until the next one, but not for much longer than is usual
/// between two of them: what was not read is not drawn.
fn levels(lane: &Lane, columns: &[u64]) -> Vec<Option<Level>> {
    let mut points = lane.points.clone();
    points.sort_unstable();
    let mut gaps: Vec<u64> = points.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    gaps.sort_unstable();
    let stands = gaps.get(gaps.len().saturating_sub(1) / 2).copied().unwrap_or(0).saturating_mul(2);
    columns
        .windows(2)
        .map(|edges| {
            let begin = points.partition_point(|point| point.0 < edges[0]);
            let end = points.partition_point(|point| point.0 < edges[1]);
            let before = || points.get(..begin)?.last().filter(|last| edges[0] - last.0 <= stands);
            Level::of(&points[begin..end])
                .or_else(|| Level::of(&[*before()?]).map(|level| Level { n: 0, ..level }))
        })
        .collect()
}

impl Picture<'_> {
    /// All strips, from `top` down.
    pub(super) fn strips(&self, svg: &mut Svg, top: f64) {
        let mut y = top;
        for strip in shown(self.input) {
            self.strip(svg, strip, y);
            y += TITLE_HEIGHT + lanes_height(strip) + STRIP_GAP;
        }
        let more = self.input.strips.len().saturating_sub(MOST);
        if more > 0 && y > top {
            svg.text(
                PLOT.right(),
                top + 14.0,
                LABEL.anchor(Anchor::End),
                &format!("{more} more are not drawn"),
            );
        }
    }

    fn strip(&self, svg: &mut Svg, strip: &Strip, top: f64) {
        self.strip_title(svg, strip, top + 14.0);
        let top = top + TITLE_HEIGHT;
        for (i, lane) in strip.lanes.iter().enumerate() {
            let y = top + i as f64 * (LANE_HEIGHT + LANE_GAP);
            self.lane(svg, lane, FILLS[i % FILLS.len()], Rect { y, height: LANE_HEIGHT, ..PLOT });
        }
        let foot = top + lanes_height(strip) - HELD_HEIGHT;
        for stretch in &strip.held {
            // What goes on beyond the axis is drawn up to its end.
            let end = self.grid.columns.last().map_or(0, |end| stretch.range.end.min(*end));
            let (Some(left), Some(right)) = (self.at(stretch.range.start), self.at(end)) else { continue };
            let tooltip = format!("{}\n{}", time_range(stretch.range.start, stretch.range.end), stretch.what);
            let width = (right - left).max(1.0);
            let band = Rect { x: left, y: foot, width, height: HELD_HEIGHT };
            svg.rect(band, HELD, Some(&tooltip));
        }
        for fault in &strip.faults {
            let Some(x) = self.at(fault.at) else { continue };
            let tooltip = format!("at {}\n{}", duration(fault.at), fault.what);
            for (from, to) in [(PLOT.y, PLOT.bottom()), (top - 4.0, foot + HELD_HEIGHT)] {
                svg.line(&[(x, from), (x, to)], FAULT, Some(&tooltip));
            }
        }
    }

    /// The name, and the marks that this strip has explained.
    fn strip_title(&self, svg: &mut Svg, strip: &Strip, y: f64) {
        let name = shorten(&strip.name, 60);
        svg.text(PLOT.x, y, LABEL.bold(), &name);
        let mut x = PLOT.x + LABEL.width(&name) + 16.0;
        if !strip.held.is_empty() {
            svg.rect(Rect { x, y: y - 8.0, width: 16.0, height: HELD_HEIGHT }, HELD, None);
            let text = "throttled";
            svg.text(x + 22.0, y, LABEL, text);
            x += 22.0 + LABEL.width(text) + 12.0;
        }
        if !strip.faults.is_empty() {
            svg.rect(Rect { x, y: y - 11.0, width: 2.0, height: 13.0 }, LOST, None);
            let mut text = String::new();
            for (i, fault) in strip.faults.iter().take(3).enumerate() {
                let separator = if i == 0 { "" } else { "  ·  " };
                let _ = write!(text, "{separator}{} ({})", fault.what.replace('\n', " "), duration(fault.at));
            }
            let fits = LABEL.fits(PLOT.right() - x - 8.0);
            svg.text(x + 8.0, y, Style::new(13.0, "#c1121f"), &shorten(&text, fits));
        }
    }

    fn lane(&self, svg: &mut Svg, lane: &Lane, fill: &str, room: Rect) {
        let top = lane.top.max(1) as f64;
        let px = |value: f64| room.height * (value / top).clamp(0.0, 1.0);
        let levels = levels(lane, &self.grid.columns);
        let of_column = |column: usize| {
            let (left, right) = (self.x(column as f64), self.x(column as f64 + 1.0));
            Rect { x: left, width: right - left, ..room }
        };
        // Whole columns answer to the pointer, also where the value is low; bars come after all of them, whole.
        for (column, level) in levels.iter().enumerate() {
            let when = self.range(column..column + 1);
            let (fill, tooltip) = match level {
                Some(level) => ("fill=\"#f6f8fa\"", level_tooltip(&when, lane, level)),
                None => (EMPTY, format!("{when}\n{}: not read", lane.name)),
            };
            svg.rect(of_column(column), fill, Some(&tooltip));
        }
        for (column, level) in levels.iter().enumerate() {
            let Some(level) = level else { continue };
            let high = (level.n > 1).then_some((level.high as f64, 0.35));
            for (value, opacity) in high.into_iter().chain([(level.mean, 1.0)]) {
                let height = px(value);
                let bar = Rect { y: room.bottom() - height, height, ..of_column(column) };
                let looks = "shape-rendering=\"crispEdges\" pointer-events=\"none\"";
                svg.rect(bar, &format!("fill=\"{fill}\" fill-opacity=\"{opacity}\" {looks}"), None);
            }
        }
        svg.rect(room, &format!("fill=\"none\" stroke=\"{GRID}\" pointer-events=\"none\""), None);
        svg.text(PLOT.x - 8.0, room.y + 11.0, NAME, &shorten(&lane.name, 12));
        let scale = format!("0–{} {}", lane.top, lane.unit);
        svg.text(PLOT.x - 8.0, room.y + 23.0, SCALE, &shorten(&scale, 14));
    }

    /// Where a time is on the axis; `None` outside.
    fn at(&self, time: u64) -> Option<f64> {
        let columns = &self.grid.columns;
        let (begin, width) = (*columns.first()?, columns.get(1)? - columns.first()?);
        let column = time.checked_sub(begin)? as f64 / width as f64;
        (column <= self.grid.column_count() as f64).then(|| self.x(column))
    }
}

fn level_tooltip(when: &str, lane: &Lane, level: &Level) -> String {
    let Lane { name, unit, .. } = lane;
    match level {
        Level { n: 0, high, .. } => format!("{when}\n{name} {high} {unit}, read before"),
        Level { n: 1, high, .. } => format!("{when}\n{name} {high} {unit}"),
        Level { low, mean, high, n } => {
            format!("{when}\n{name} {mean:.0} {unit} ({low}–{high}), n={}", count(*n as u64))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(points: &[(u64, u64)]) -> Lane {
        Lane { name: String::new(), unit: String::new(), top: 100, points: points.to_vec() }
    }

    #[test]
    fn a_value_stands_until_the_next_and_not_for_ever() {
        let levels =
            levels(&lane(&[(40, 8), (0, 1), (10, 3), (12, 5), (20, 7)]), &[0, 5, 10, 15, 20, 30, 45, 60, 90]);
        let means: Vec<Option<f64>> = levels.iter().map(|level| level.map(|level| level.mean)).collect();
        assert_eq!(
            means,
            [Some(1.0), Some(1.0), Some(4.0), Some(5.0), Some(7.0), Some(8.0), Some(8.0), None]
        );
        assert_eq!((levels[2].unwrap().low, levels[2].unwrap().high, levels[1].unwrap().n), (3, 5, 0));
    }

    #[test]
    fn without_points_there_is_nothing() {
        assert_eq!(levels(&lane(&[]), &[0, 1, 2]), [None, None]);
        assert_eq!(levels(&lane(&[(u64::MAX, 1)]), &[0, 1]), [None]);
    }
}

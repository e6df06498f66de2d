//! Percentiles of several distributions on one logarithmic axis, as HdrHistogram's plots have them: each nine has the
//! same width, so that the tail has as much room as the middle.

use crate::frame::{GRID, INK, LABEL, TICK, WIDTH};
use crate::part::Hue;
use crate::scale::{LogScale, count, duration, log_ticks};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use crate::{Error, Header};

/// A distribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// Whose it is: a capture.
    pub name: String,
    /// Values in ns, ascending, and how often each occurred.
    pub values: Vec<(u64, u64)>,
}

/// Percentiles to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PercentileInput {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// `itl: token → next token`
    pub latency_name: String,
    /// Those without values stay in the legend, saying so.
    pub series: Vec<Series>,
}

const PLOT: Rect = Rect { x: 92.0, y: 96.0, width: 1060.0, height: 440.0 };
/// Colours and dashes of the series in turn.
const STROKES: [(Hue, &str); 6] = [
    (Hue::Blue, ""),
    (Hue::Vermilion, "8 3"),
    (Hue::Green, "3 3"),
    (Hue::Purple, "10 3 3 3"),
    (Hue::Orange, "6 6"),
    (Hue::Black, "2 5"),
];
/// Samples that must lie beyond a quantile for it to be given; what is beyond it is drawn faint.
const BEYOND: f64 = 10.0;
const ROW: f64 = 20.0;
const CELL: Style = Style::new(13.0, INK).anchor(Anchor::End);

/// (share of values that are larger, value) at each value, from the smallest.
struct Curve {
    points: Vec<(f64, u64)>,
    n: u64,
}

impl Curve {
    fn new(series: &Series) -> Self {
        let n = series.values.iter().fold(0u64, |n, value| n.saturating_add(value.1));
        let mut below = 0u64;
        let points = series.values.iter().filter(|value| value.1 > 0).map(|&(value, times)| {
            // The value is that of all quantiles from what lies below it to itself.
            let rest = n.saturating_sub(below) as f64 / n.max(1) as f64;
            below = below.saturating_add(times);
            (rest, value)
        });
        Self { points: points.collect(), n }
    }

    /// The value that a share is smaller than.
    fn least(&self, share: f64) -> Option<u64> {
        let point = self.points.partition_point(|point| point.0 > 1.0 - share + 1e-12);
        self.points.get(point.saturating_sub(1)).map(|point| point.1)
    }

    /// The value at a share that is larger; `None` where fewer than ten values are.
    fn at(&self, rest: f64) -> Option<u64> {
        if (self.n as f64) * rest < BEYOND * (1.0 - 1e-9) {
            return None;
        }
        let point = self.points.partition_point(|point| point.0 > rest + 1e-12);
        self.points.get(point.saturating_sub(1)).map(|point| point.1)
    }
}

/// The axis of percentiles: the logarithm of one over what lies beyond.
#[derive(Clone, Copy)]
struct Nines {
    /// Nines that the axis is long.
    decades: f64,
}

impl Nines {
    /// Where a share that lies beyond is, px.
    fn px(self, rest: f64) -> f64 {
        PLOT.x + PLOT.width * (-rest.log10() / self.decades).clamp(0.0, 1.0)
    }
}

/// Draws percentiles, 1200 px wide.
///
/// # Errors
/// [`Error::Empty`] when no series has values.
pub fn percentiles(input: &PercentileInput) -> Result<String, Error> {
    let curves: Vec<Curve> = input.series.iter().map(Curve::new).collect();
    // The shortest hundredth is not what one looks for, and may be shorter by orders of magnitude.
    let low = curves.iter().filter_map(|curve| curve.least(0.01)).min();
    let high = curves.iter().filter_map(|curve| curve.points.last()).map(|point| point.1).max();
    let (Some(low), Some(high)) = (low, high) else {
        return Err(Error::Empty("latencies"));
    };
    // A little room, so that curves do not run along the frame.
    let y = LogScale::new(low - low / 20, high.saturating_add(high / 20), PLOT.bottom(), PLOT.y);
    // As many nines as the longest series has.
    let most = curves.iter().map(|curve| curve.n).max().unwrap_or(1).max(10);
    let x = Nines { decades: (most as f64).log10() };
    let rows = input.series.len() as f64;
    let table = PLOT.bottom() + 78.0;
    let mut svg = Svg::new(WIDTH, (table + ROW * (rows + 1.0)).max(675.0), &input.header.title, "");
    input.header.draw(&mut svg);
    axes(&mut svg, &input.latency_name, (low, high), most, x, y);
    for (i, curve) in curves.iter().enumerate() {
        draw(&mut svg, curve, STROKES[i % STROKES.len()], x, y);
    }
    draw_table(&mut svg, input, &curves, table);
    Ok(svg.finish())
}

fn axes(svg: &mut Svg, name: &str, (low, high): (u64, u64), most: u64, x: Nines, y: LogScale) {
    for tick in log_ticks(low, high, 12) {
        let at = y.px(tick);
        svg.line(&[(PLOT.x, at), (PLOT.right(), at)], &format!("stroke=\"{GRID}\""), None);
        svg.text(PLOT.x - 8.0, at + 4.5, TICK.anchor(Anchor::End), &duration(tick));
    }
    let mut names = vec![(1, "0 %".to_owned()), (2, "50 %".to_owned())];
    let nines = (1..20u32).filter_map(|nines| Some((10u64.checked_pow(nines)?, nines as usize)));
    names.extend(nines.map(|(beyond, nines)| match nines {
        1 => (beyond, "90 %".to_owned()),
        2 => (beyond, "99 %".to_owned()),
        _ => (beyond, format!("99.{} %", "9".repeat(nines - 2))),
    }));
    for (beyond, label) in names.into_iter().filter(|tick| tick.0 <= most) {
        let at = x.px(1.0 / beyond as f64);
        svg.line(&[(at, PLOT.y), (at, PLOT.bottom())], &format!("stroke=\"{GRID}\""), None);
        svg.text(at, PLOT.bottom() + 20.0, TICK.anchor(Anchor::Middle), &label);
    }
    svg.rect(PLOT, &format!("fill=\"none\" stroke=\"{GRID}\""), None);
    let middle = PLOT.x + PLOT.width / 2.0;
    let text = "percentile (log); faint: fewer than 10 values beyond";
    svg.text(middle, PLOT.bottom() + 42.0, LABEL.anchor(Anchor::Middle), text);
    svg.text_upwards(22.0, PLOT.y + PLOT.height / 2.0, LABEL, &shorten(name, 56));
}

/// A curve of steps; what fewer than ten values are beyond is faint.
fn draw(svg: &mut Svg, curve: &Curve, (hue, dashes): (Hue, &str), x: Nines, y: LogScale) {
    let honest = BEYOND / curve.n.max(1) as f64;
    let mut lines: [Vec<(f64, f64)>; 2] = [Vec::new(), Vec::new()];
    let mut last: Option<(f64, f64)> = None;
    for &(rest, value) in &curve.points {
        let (px, py) = (x.px(rest), y.px(value));
        let line = &mut lines[usize::from(rest < honest * (1.0 - 1e-9))];
        if let Some(before) = last {
            // The faint part begins where the other one ends.
            if line.is_empty() {
                line.push(before);
            }
            line.push((px, before.1));
        }
        line.push((px, py));
        last = Some((px, py));
    }
    if let Some((_, py)) = last {
        if lines[1].is_empty() {
            lines[1].extend(last);
        }
        lines[1].push((x.px(1.0 / curve.n.max(1) as f64), py));
    }
    let stroke = format!("stroke=\"{}\" stroke-width=\"2.2\"", hue.hex());
    for (line, opacity) in lines.iter().zip(["1", "0.4"]) {
        if line.len() > 1 {
            let looks = format!("{stroke} stroke-opacity=\"{opacity}\" stroke-dasharray=\"{dashes}\"");
            svg.line(line, &looks, None);
        }
    }
}

/// Name, n and some percentiles of each series.
fn draw_table(svg: &mut Svg, input: &PercentileInput, curves: &[Curve], top: f64) {
    const COLUMNS: [(&str, f64, f64); 6] = [
        ("n", 0.0, 620.0),
        ("p50", 0.5, 730.0),
        ("p90", 0.1, 840.0),
        ("p99", 0.01, 950.0),
        ("p99.9", 0.001, 1060.0),
        ("max", 0.0, 1170.0),
    ];
    for (name, _, x) in COLUMNS {
        svg.text(x, top, TICK.anchor(Anchor::End), name);
    }
    for (i, (series, curve)) in input.series.iter().zip(curves).enumerate() {
        let y = top + ROW * (i as f64 + 1.0);
        let (hue, dashes) = STROKES[i % STROKES.len()];
        let looks = format!("stroke=\"{}\" stroke-width=\"2.5\" stroke-dasharray=\"{dashes}\"", hue.hex());
        svg.line(&[(PLOT.x, y - 4.5), (PLOT.x + 36.0, y - 4.5)], &looks, None);
        svg.text(PLOT.x + 46.0, y, LABEL, &shorten(&series.name, 52));
        for (name, rest, x) in COLUMNS {
            let text = match name {
                "n" => count(curve.n),
                "max" => curve.points.last().map_or("–".to_owned(), |point| duration(point.1)),
                _ => curve.at(rest).map_or("–".to_owned(), duration),
            };
            svg.text(x, y, CELL, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[(u64, u64)]) -> Series {
        Series { name: "a".to_owned(), values: values.to_vec() }
    }

    #[test]
    fn a_percentile_is_given_where_ten_values_are_beyond_it() {
        let values: Vec<(u64, u64)> = (1..=100).map(|value| (value, 1)).collect();
        let curve = Curve::new(&series(&values));
        assert_eq!((curve.n, curve.at(0.5), curve.at(0.1), curve.at(0.01)), (100, Some(50), Some(90), None));
        let curve = Curve::new(&series(&[(7, 50), (9, 50)]));
        assert_eq!((curve.at(0.9), curve.at(0.2)), (Some(7), Some(9)));
        assert_eq!(Curve::new(&series(&[])).at(0.5), None);
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let input = PercentileInput {
            header: Header::default(),
            latency_name: String::new(),
            series: vec![series(&[])],
        };
        assert!(matches!(percentiles(&input), Err(Error::Empty(_))));
    }
}

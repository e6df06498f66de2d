//! Histograms: several distributions under each other on one logarithmic axis of time.

use crate::frame::{GRID, INK, LABEL, SOFT_INK, TICK, WIDTH};
use crate::scale::{LogScale, bin, count, duration, duration_range, log_edges, log_ticks};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use crate::{Error, Header};

/// A quantile to mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantile {
    /// `p50`, `p99`, `max`.
    pub name: String,
    /// ns; `None` when there are too few values for it, which the picture then says.
    pub value_ns: Option<u64>,
}

/// One distribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panel {
    /// `TTFT (socket → first token)`.
    pub name: String,
    /// Values in ns and how often each occurred.
    pub values: Vec<(u64, u64)>,
    /// What to mark with a line.
    pub quantiles: Vec<Quantile>,
}

/// Histograms to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramInput {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// Top to bottom. A panel without values stays, saying so.
    pub panels: Vec<Panel>,
}

/// Most bins of the shared axis.
const BINS: usize = 110;
const LEFT: f64 = 84.0;
const PLOT_WIDTH: f64 = 1092.0;
/// The whole is 16:9 with up to this many panels, higher with more.
const PANELS_OF_16_9: usize = 4;
/// Above a panel's bars: its name and the labels of its quantiles.
const HEAD: f64 = 42.0;
const BARS: f64 = 86.0;
const GAP: f64 = 12.0;
const AXIS: f64 = 48.0;

const NAME: Style = Style::new(14.0, INK).bold();
const MARK: Style = Style::new(12.0, INK);

/// Bars of the panels in turn, and the marks; told apart by lightness too.
const FILLS: [&str; 4] = ["#3174be", "#2a9d8f", "#8a6fb3", "#c17c1f"];
const MARK_STROKE: &str = "stroke=\"#1b1f24\" stroke-width=\"1.5\" stroke-dasharray=\"4 3\"";

/// Draws the panels, 1200 px wide.
///
/// # Errors
/// [`Error::Empty`] when no panel has values.
pub fn histogram(input: &HistogramInput) -> Result<String, Error> {
    let values = || input.panels.iter().flat_map(|p| &p.values).filter(|v| v.1 > 0).map(|v| v.0);
    let marks = || input.panels.iter().flat_map(|p| &p.quantiles).filter_map(|q| q.value_ns);
    let (Some(low), Some(high)) = (values().min(), values().chain(marks()).max()) else {
        return Err(Error::Empty("latencies"));
    };
    let edges = log_edges(low, high, BINS);
    let x = LogScale::new(edges[0], edges[edges.len() - 1], LEFT, LEFT + PLOT_WIDTH);
    let panel_height = HEAD + BARS + GAP;
    let panels = input.panels.len().max(PANELS_OF_16_9) as f64;
    let bottom = Header::BOTTOM + panel_height * panels;
    let mut svg = Svg::new(WIDTH, (bottom + AXIS).max(675.0), &input.header.title, "");
    input.header.draw(&mut svg);
    let used = Header::BOTTOM + panel_height * input.panels.len() as f64;
    axis(&mut svg, &edges, x, used);
    for (i, panel) in input.panels.iter().enumerate() {
        let bars = Rect {
            x: LEFT,
            y: Header::BOTTOM + panel_height * i as f64 + HEAD,
            width: PLOT_WIDTH,
            height: BARS,
        };
        draw_panel(&mut svg, panel, FILLS[i % FILLS.len()], bars, &edges, x);
    }
    Ok(svg.finish())
}

/// Grid lines through all panels and the labels below the last.
fn axis(svg: &mut Svg, edges: &[u64], x: LogScale, bottom: f64) {
    for tick in log_ticks(edges[0], edges[edges.len() - 1], 16) {
        let at = x.px(tick);
        svg.line(&[(at, Header::BOTTOM + HEAD), (at, bottom - 6.0)], &format!("stroke=\"{GRID}\""), None);
        svg.text(at, bottom + 10.0, TICK.anchor(Anchor::Middle), &duration(tick));
    }
    let middle = LEFT + PLOT_WIDTH / 2.0;
    svg.text(middle, bottom + 32.0, LABEL.anchor(Anchor::Middle), "time (log)");
}

fn draw_panel(svg: &mut Svg, panel: &Panel, fill: &str, bars: Rect, edges: &[u64], x: LogScale) {
    let mut counts = vec![0u64; edges.len() - 1];
    for &(value, n) in &panel.values {
        let slot = &mut counts[bin(edges, value)];
        *slot = slot.saturating_add(n);
    }
    let n = panel.values.iter().fold(0u64, |sum, v| sum.saturating_add(v.1));
    let most = counts.iter().copied().max().unwrap_or(0);
    svg.text(LEFT, bars.y - HEAD + 18.0, NAME, &panel_title(panel, n));
    let base = [(bars.x, bars.bottom()), (bars.right(), bars.bottom())];
    svg.line(&base, &format!("stroke=\"{SOFT_INK}\""), None);
    if n == 0 {
        svg.text(LEFT + 8.0, bars.bottom() - 8.0, TICK, "no values");
        return;
    }
    svg.text(LEFT - 8.0, bars.y + 9.0, TICK.anchor(Anchor::End), &count(most));
    svg.text(LEFT - 8.0, bars.bottom(), TICK.anchor(Anchor::End), "0");
    let attributes = format!("fill=\"{fill}\"");
    for (i, &in_bin) in counts.iter().enumerate().filter(|(_, c)| **c > 0) {
        // A bin that holds anything is at least a px high: rare and slow is what one looks for.
        let height = (bars.height * in_bin as f64 / most as f64).max(1.5);
        let (left, right) = (x.px(edges[i]), x.px(edges[i + 1]));
        let width = (right - left - 0.5).max(0.5);
        let bar = Rect { x: left, y: bars.bottom() - height, width, height };
        let tooltip = format!("{}\n{}", duration_range(edges[i], edges[i + 1]), count(in_bin));
        svg.rect(bar, &attributes, Some(&tooltip));
    }
    draw_marks(svg, panel, bars, x);
}

/// Name, n, and the quantiles for which n is too small.
fn panel_title(panel: &Panel, n: u64) -> String {
    let mut title = format!("{} · n = {}", shorten(&panel.name, 70), count(n));
    for quantile in panel.quantiles.iter().filter(|q| q.value_ns.is_none()) {
        title.push_str(&format!(" · {} – (n={})", shorten(&quantile.name, 12), count(n)));
    }
    title
}

/// Lines with labels at the quantiles; labels that would touch go to the other of two rows, or further right.
fn draw_marks(svg: &mut Svg, panel: &Panel, bars: Rect, x: LogScale) {
    let mut marks: Vec<(f64, String)> = panel
        .quantiles
        .iter()
        .filter_map(|q| {
            let value = q.value_ns?;
            Some((x.px(value), format!("{} {}", shorten(&q.name, 12), duration(value))))
        })
        .collect();
    marks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let title_end = LEFT + NAME.width(&panel_title(panel, 0)) + 40.0;
    // Where each row of labels is still free: the upper one begins after the title.
    let mut free = [LEFT, title_end];
    let mut labels = Vec::new();
    for (at, label) in marks {
        let width = MARK.width(&label);
        // Right of its line, or left of it at the end of the axis.
        let wanted = if at + 4.0 + width <= bars.right() { at + 4.0 } else { at - 4.0 - width };
        let row = if free[0] <= wanted { 0 } else { usize::from(free[1] <= wanted) };
        let left = wanted.max(free[row]);
        free[row] = left + width + 8.0;
        let y = bars.y - 6.0 - row as f64 * 17.0;
        svg.line(&[(at, y - 10.0), (at, bars.bottom())], MARK_STROKE, Some(&label));
        labels.push((left, y, label));
    }
    // After all lines, each on white, so that no line runs through a label.
    for (left, y, label) in labels {
        let behind = Rect { x: left - 1.0, y: y - 11.0, width: MARK.width(&label) * 0.92, height: 14.0 };
        svg.rect(behind, "fill=\"#ffffff\" fill-opacity=\"0.85\"", None);
        svg.text(left, y, MARK, &label);
    }
}

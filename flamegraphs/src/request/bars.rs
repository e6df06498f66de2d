//! The latency of each token as a stacked bar.

use super::{LEFT, RIGHT, RequestInput, SECTION, TokenBar, length, parts_of, slowest};
use crate::frame::{GRID, INK, SOFT_INK, TICK};
use crate::scale::{count, duration, nice_at_least};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;

const HEIGHT: f64 = 120.0;
/// Bars are no narrower, and so bins where there are more tokens.
const NARROWEST: f64 = 4.0;
const WIDEST: f64 = 60.0;
const VALUE: Style = Style::new(11.0, INK).anchor(Anchor::Middle);

/// The bars below `top`; where they end.
pub(super) fn draw(svg: &mut Svg, input: &RequestInput, top: f64) -> f64 {
    let n = input.tokens.len();
    let most = ((RIGHT - LEFT) / NARROWEST) as usize;
    let per_bar = n.div_ceil(most).max(1);
    let bars: Vec<&TokenBar> = input.tokens.chunks(per_bar).filter_map(slowest_of).collect();
    let title = if per_bar == 1 {
        "Latency of each token".to_owned()
    } else {
        format!("Latency of the slowest of each {} of {} tokens", count(per_bar as u64), count(n as u64))
    };
    svg.text(LEFT, top + 14.0, SECTION, &title);
    // The first token's latency is another one, and often far longer: it is cut where it would dwarf the others.
    let highest = slowest(input).map_or(1, |token| length(&token.range)).max(1);
    let x = LEFT + SECTION.width(&title) + 12.0;
    if bars.iter().any(|token| length(&token.range) > highest) {
        svg.text(x, top + 14.0, TICK, "↑ longer than the scale: cut, its parts in proportion");
    }
    let plot = Rect { x: LEFT, y: top + 38.0, width: RIGHT - LEFT, height: HEIGHT };
    axis(svg, plot, highest);
    let width = (plot.width / bars.len() as f64).min(WIDEST);
    for (i, token) in bars.iter().enumerate() {
        let column = Rect { x: plot.x + width * i as f64, width, ..plot };
        bar(svg, input, token, column, highest);
    }
    names(svg, &bars, plot, width);
    plot.bottom() + 22.0
}

fn slowest_of(tokens: &[TokenBar]) -> Option<&TokenBar> {
    tokens.iter().rev().max_by_key(|token| length(&token.range))
}

fn axis(svg: &mut Svg, plot: Rect, highest: u64) {
    let base = [(plot.x, plot.bottom()), (plot.right(), plot.bottom())];
    svg.line(&base, &format!("stroke=\"{SOFT_INK}\""), None);
    let step = nice_at_least(highest as f64 / 4.0);
    let mut at = step;
    while at <= highest {
        let y = plot.bottom() - plot.height * at as f64 / highest as f64;
        svg.line(&[(plot.x, y), (plot.right(), y)], &format!("stroke=\"{GRID}\""), None);
        svg.text(plot.x - 8.0, y + 4.5, TICK.anchor(Anchor::End), &duration(at));
        match at.checked_add(step) {
            Some(next) => at = next,
            None => break,
        }
    }
}

fn bar(svg: &mut Svg, input: &RequestInput, token: &TokenBar, column: Rect, highest: u64) {
    let latency = length(&token.range);
    let gap = if column.width >= 3.0 { 0.12 * column.width } else { 0.0 };
    let (left, width) = (column.x + gap / 2.0, column.width - gap);
    let px = |ns: u64| column.height * (ns as f64 / highest.max(latency) as f64).min(1.0);
    let mut sums = vec![0u64; input.parts.len()];
    for piece in &token.pieces {
        if let Some(sum) = sums.get_mut(piece.part) {
            *sum = sum.saturating_add(length(&piece.range));
        }
    }
    let mut until = 0u64;
    for (part, sum) in input.parts.iter().zip(sums).filter(|(_, sum)| *sum > 0) {
        let (from, to) = (px(until), px(until.saturating_add(sum)));
        until = until.saturating_add(sum);
        if to > from {
            let rect = Rect { x: left, y: column.bottom() - to, width, height: to - from };
            svg.rect(rect, &format!("{} pointer-events=\"none\"", part.attributes()), None);
        }
    }
    if latency > highest {
        let text = format!("↑ {}", duration(latency));
        let x = (left + width / 2.0).max(LEFT + VALUE.width(&text) / 2.0);
        svg.text(x, column.y - 5.0, VALUE, &text);
    }
    let tooltip = format!("token {}: {}{}", token.name, duration(latency), parts_of(input, token));
    svg.rect(column, "fill=\"#ffffff\" fill-opacity=\"0\"", Some(&tooltip));
}

/// Names of some tokens below their bars.
fn names(svg: &mut Svg, bars: &[&TokenBar], plot: Rect, width: f64) {
    let every = nice_at_least(bars.len() as f64 / 20.0).max(nice_at_least(46.0 / width)) as usize;
    for (i, token) in bars.iter().enumerate().step_by(every.max(1)) {
        let x = plot.x + width * (i as f64 + 0.5);
        svg.text(x, plot.bottom() + 17.0, TICK.anchor(Anchor::Middle), &shorten(&token.name, 8));
    }
    let axis = Style::new(13.0, SOFT_INK).anchor(Anchor::End);
    svg.text(plot.x - 8.0, plot.bottom() + 17.0, axis, "token");
}

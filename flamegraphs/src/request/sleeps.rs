//! Where threads slept, as a table.

use super::{LEFT, RIGHT, RequestInput, SECTION, length};
use crate::frame::{INK, SOFT_INK};
use crate::scale::{count, duration};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use std::collections::{BTreeMap, BTreeSet};

/// Rows that are drawn.
const MOST: usize = 8;
/// Functions of a stack that are named, leaf first.
const FUNCTIONS: usize = 7;
const CELL: Style = Style::new(12.0, INK);
const FAINT: Style = Style::new(12.0, SOFT_INK);

/// What is known of a place where threads slept.
#[derive(Default)]
struct Place {
    ns: u64,
    tokens: BTreeSet<usize>,
}

/// The table below `top`, nothing where no thread slept; where it ends.
pub(super) fn draw(svg: &mut Svg, input: &RequestInput, top: f64) -> f64 {
    let mut places: BTreeMap<(usize, &str, &[String]), Place> = BTreeMap::new();
    for (i, token) in input.tokens.iter().enumerate() {
        for piece in token.pieces.iter().filter(|piece| !piece.stack.is_empty()) {
            let place = places.entry((piece.part, &piece.what, &piece.stack)).or_default();
            place.ns = place.ns.saturating_add(length(&piece.range));
            place.tokens.insert(i);
        }
    }
    if places.is_empty() {
        return top - 22.0;
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort_by(|a, b| b.1.ns.cmp(&a.1.ns).then_with(|| a.0.cmp(&b.0)));
    let title = if places.len() > MOST {
        format!("Where threads had no CPU: the longest {MOST} of {} places", count(places.len() as u64))
    } else {
        "Where threads had no CPU".to_owned()
    };
    svg.text(LEFT, top, SECTION, &title);
    let mut y = top + 20.0;
    for ((part, what, stack), place) in places.into_iter().take(MOST) {
        let Some(part) = input.parts.get(part) else { continue };
        let swatch = Rect { x: LEFT, y: y - 10.0, width: 12.0, height: 12.0 };
        let all: String = stack.iter().map(|function| format!("\n{function}")).collect();
        svg.rect(swatch, &part.attributes(), Some(&format!("{}: {what}{all}", part.name)));
        svg.text(LEFT + 84.0, y, CELL.anchor(Anchor::End), &duration(place.ns));
        let tokens = match place.tokens.len() {
            1 => "1 token".to_owned(),
            n => format!("{} tokens", count(n as u64)),
        };
        svg.text(LEFT + 96.0, y, FAINT, &tokens);
        svg.text(LEFT + 176.0, y, CELL, &shorten(what, 34));
        // The kernel's functions say how it slept, which is said already; the program's say where.
        let program = || stack.iter().map(String::as_str).filter(|function| !function.ends_with("_[k]"));
        let mut functions: Vec<&str> = program().take(FUNCTIONS).collect();
        match program().count() {
            0 => functions.extend(stack.iter().take(FUNCTIONS).map(String::as_str)),
            n if n > FUNCTIONS => functions.push("…"),
            _ => {}
        }
        let x = LEFT + 400.0;
        svg.text(x, y, FAINT, &shorten(&functions.join(" ← "), FAINT.fits(RIGHT - x)));
        y += 18.0;
    }
    y
}

//! One request: what each of its tokens waited for, and the steps that generated them.
//!
//! In: tokens cut into segments of known cause, steps with their batches and GPU times, all in ns since the request was
//! received. Out: one picture that reads from top to bottom: which parts the time went to, which tokens were slow, the
//! same in time above steps and GPU, a magnified view of the slowest token, and where threads slept. What there is no
//! room for is drawn in bins, which the picture says.

mod bars;
mod lanes;
mod sleeps;

use crate::frame::{Header, LABEL, SOFT_INK, WIDTH};
use crate::scale::duration;
use crate::svg::{Rect, Style, Svg};
use crate::text::shorten;
use crate::{Error, part};
use lanes::{Lanes, View};
use std::ops::Range;

/// A part that latencies are cut into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// `gpu_span`
    pub name: String,
    /// What it is, in a few words.
    pub meaning: String,
    /// Its colour.
    pub hue: part::Hue,
    /// Tells it from another part of the same colour.
    pub hatched: bool,
}

/// A stretch of a token's latency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// ns since the request was received, half-open.
    pub range: Range<u64>,
    /// Index into [`RequestInput::parts`].
    pub part: usize,
    /// More about it: `futex, thread engine`. May be empty.
    pub what: String,
    /// Where a thread slept, leaf first. May be empty.
    pub stack: Vec<String>,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBar {
    /// Its index.
    pub name: String,
    /// Tokens of different lanes (choices) may overlap in time.
    pub lane: u32,
    /// From its origin to its delivery, ns since the request was received.
    pub range: Range<u64>,
    /// The first token of the request: its latency is another one than those of later tokens.
    pub is_first: bool,
    /// In order of time.
    pub pieces: Vec<Piece>,
}

/// When a step ran on its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuBar {
    /// ns since the request was received.
    pub range: Range<u64>,
    /// Begin and end are right within this many ns.
    pub bound_ns: u64,
}

/// A step of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepBar {
    /// `step #12`
    pub name: String,
    /// From its enqueueing to its end, ns since the request was received.
    pub range: Range<u64>,
    pub gpu: Option<GpuBar>,
    /// Requests in its batch, and how many of them were prompts.
    pub batch: u64,
    pub prompts: u64,
    /// Tokens of those prompts.
    pub prompt_tokens: u64,
    /// It generated a token of the request.
    pub is_own: bool,
}

/// A request to draw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInput {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// What latencies are cut into, in the order of the legend.
    pub parts: Vec<Part>,
    /// By lane, then in order of time.
    pub tokens: Vec<TokenBar>,
    /// In any order; steps that served only others too.
    pub steps: Vec<StepBar>,
    /// Said at the bottom, a line each.
    pub notes: Vec<String>,
}

pub(super) const LEFT: f64 = 92.0;
pub(super) const RIGHT: f64 = 1176.0;
pub(super) const SECTION: Style = Style::new(14.0, crate::frame::INK).bold();
const NOTE: Style = Style::new(12.0, SOFT_INK);

/// Draws a request, 1200 px wide.
///
/// # Errors
/// [`Error::Empty`] when it has no token.
pub fn request(input: &RequestInput) -> Result<String, Error> {
    if input.tokens.is_empty() {
        return Err(Error::Empty("tokens"));
    }
    let mut svg = Svg::new(WIDTH, 0.0, &input.header.title, &part::defs());
    let height = draw(&mut svg, input);
    svg.set_height(height);
    Ok(svg.finish())
}

/// Everything, top to bottom; where it ends.
fn draw(svg: &mut Svg, input: &RequestInput) -> f64 {
    input.header.draw(svg);
    let mut y = legend(svg, input, Header::BOTTOM + 18.0);
    y = bars::draw(svg, input, y + 16.0);
    let whole = View::whole(input);
    let near = View::near_slowest(input, &whole);
    let lanes = Lanes::new(input);
    y = lanes.draw(svg, &whole, near.as_ref(), y + 30.0);
    if let Some(near) = &near {
        y = lanes.draw(svg, near, None, y + 30.0);
    }
    y = sleeps::draw(svg, input, y + 30.0);
    for note in &input.notes {
        svg.text(LEFT, y + 14.0, NOTE, &shorten(note, NOTE.fits(RIGHT - LEFT)));
        y += 18.0;
    }
    y + 16.0
}

/// The parts that occur with what they sum to, in rows; where it ends.
fn legend(svg: &mut Svg, input: &RequestInput, top: f64) -> f64 {
    const ROW: f64 = 21.0;
    let mut sums = vec![0u64; input.parts.len()];
    let pieces = input.tokens.iter().flat_map(|token| &token.pieces);
    for piece in pieces {
        if let Some(sum) = sums.get_mut(piece.part) {
            *sum = sum.saturating_add(length(&piece.range));
        }
    }
    let all = sums.iter().fold(0u64, |sum, part| sum.saturating_add(*part)).max(1);
    let (mut x, mut y) = (LEFT, top);
    for (part, &sum) in input.parts.iter().zip(&sums).filter(|(_, sum)| **sum > 0) {
        let share = 100.0 * sum as f64 / all as f64;
        let text = format!("{} {} ({share:.0} %)", shorten(&part.name, 24), duration(sum));
        let width = 22.0 + LABEL.width(&text) + 10.0;
        if x + width > RIGHT && x > LEFT {
            (x, y) = (LEFT, y + ROW);
        }
        let swatch = Rect { x, y: y - 11.0, width: 16.0, height: 13.0 };
        svg.rect(swatch, &part.attributes(), Some(&format!("{}: {}", part.name, part.meaning)));
        svg.text(x + 22.0, y, LABEL, &text);
        x += width;
    }
    y
}

impl Part {
    /// Its looks as attributes of a shape.
    fn attributes(&self) -> String {
        part::fill(self.hue, self.hatched)
    }
}

/// Length of a range that may end before it begins.
fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// The slowest token: of those after the first, where there are any.
fn slowest(input: &RequestInput) -> Option<&TokenBar> {
    let later = input.tokens.iter().filter(|token| !token.is_first);
    // The first of equally slow ones.
    later.rev().max_by_key(|token| length(&token.range)).or_else(|| input.tokens.first())
}

/// What a token's latency went to, longest first: lines of a tooltip.
fn parts_of(input: &RequestInput, token: &TokenBar) -> String {
    let mut sums = vec![0u64; input.parts.len()];
    for piece in &token.pieces {
        if let Some(sum) = sums.get_mut(piece.part) {
            *sum = sum.saturating_add(length(&piece.range));
        }
    }
    let mut parts: Vec<(u64, &str)> =
        sums.into_iter().zip(&input.parts).map(|(sum, part)| (sum, part.name.as_str())).collect();
    parts.retain(|part| part.0 > 0);
    parts.sort_by_key(|part| std::cmp::Reverse(part.0));
    parts.iter().map(|(sum, name)| format!("\n{} {name}", duration(*sum))).collect()
}

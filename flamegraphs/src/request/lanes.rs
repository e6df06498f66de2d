//! Tokens, steps and the GPU under each other on one axis of time.

use super::{LEFT, Part, Piece, RIGHT, RequestInput, SECTION, StepBar, TokenBar, length, slowest};
use crate::frame::{GRID, INK, ON_LIGHT, SOFT_INK, TICK};
use crate::part::{Hue, fill};
use crate::scale::{count, duration, time_ticks};
use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// Lanes of tokens that are drawn; more are said to be there.
const MOST_LANES: u32 = 6;
/// What is narrower is not drawn itself, but in bins of [`BIN`].
const NARROW: f64 = 1.0;
const BIN: f64 = 2.0;
/// Functions of a stack in a tooltip.
const FUNCTIONS: usize = 16;
/// The slowest token is magnified where it is narrower in the whole.
const WIDE: f64 = 220.0;

const TOKEN_HEIGHT: f64 = 24.0;
const STEP_HEIGHT: f64 = 46.0;
const GPU_HEIGHT: f64 = 20.0;
const GAP: f64 = 10.0;

const NAME: Style = Style::new(12.0, INK).anchor(Anchor::End);
const FAINT: Style = Style::new(11.0, SOFT_INK).anchor(Anchor::End);
const KEY: Style = Style::new(12.0, SOFT_INK);
const INSIDE: f64 = 11.0;

const OWN: Hue = Hue::Sky;
const OTHERS: &str = "fill=\"#dfe3e8\"";
const PROMPTS: Hue = Hue::Purple;
const VAGUE: Hue = Hue::Vermilion;

/// A stretch of time that is drawn.
pub(super) struct View {
    title: String,
    range: Range<u64>,
}

impl View {
    /// From the first instant of the request to the last.
    pub(super) fn whole(input: &RequestInput) -> Self {
        let ranges = input.tokens.iter().map(|token| &token.range);
        let from = ranges.clone().map(|range| range.start).min().unwrap_or(0);
        let to = ranges.map(|range| range.end).max().unwrap_or(0).max(from.saturating_add(1));
        Self { title: "In time".to_owned(), range: from..to }
    }

    /// The slowest token with some time around it; `None` where it is wide enough in `whole`.
    pub(super) fn near_slowest(input: &RequestInput, whole: &Self) -> Option<Self> {
        let token = slowest(input)?;
        let latency = length(&token.range).max(1);
        if whole.width(&token.range) >= WIDE {
            return None;
        }
        let from = token.range.start.saturating_sub(latency / 2).max(whole.range.start);
        let to = token.range.end.saturating_add(latency / 2).min(whole.range.end);
        let which = if token.is_first { "" } else { " after the first" };
        let name = shorten(&token.name, 12);
        let title = format!("Around the slowest token{which}: {name}, {}", duration(latency));
        Some(Self { title, range: from..to })
    }

    fn x(&self, ns: u64) -> f64 {
        let share = ns.saturating_sub(self.range.start) as f64 / length(&self.range).max(1) as f64;
        LEFT + (RIGHT - LEFT) * share.min(1.0)
    }

    fn width(&self, range: &Range<u64>) -> f64 {
        self.x(range.end) - self.x(range.start)
    }

    fn shows(&self, range: &Range<u64>) -> bool {
        range.start < self.range.end && range.end > self.range.start
    }

    fn rect(&self, range: &Range<u64>, y: f64, height: f64) -> Rect {
        Rect { x: self.x(range.start), y, width: self.width(range).max(0.4), height }
    }
}

/// What is drawn in views.
pub(super) struct Lanes<'a> {
    input: &'a RequestInput,
    /// Tokens by lane, lanes in their order.
    tokens: BTreeMap<u32, Vec<&'a TokenBar>>,
    /// In order of time, those of others first.
    steps: Vec<&'a StepBar>,
}

impl<'a> Lanes<'a> {
    pub(super) fn new(input: &'a RequestInput) -> Self {
        let mut tokens: BTreeMap<u32, Vec<&TokenBar>> = BTreeMap::new();
        input.tokens.iter().for_each(|token| tokens.entry(token.lane).or_default().push(token));
        let mut steps: Vec<&StepBar> = input.steps.iter().collect();
        steps.sort_by(|a, b| (a.is_own, a.range.start, &a.name).cmp(&(b.is_own, b.range.start, &b.name)));
        Self { input, tokens, steps }
    }

    /// A view below `top`, the stretch of `magnified` marked in it; where it ends.
    pub(super) fn draw(&self, svg: &mut Svg, view: &View, magnified: Option<&View>, top: f64) -> f64 {
        svg.text(LEFT, top, SECTION, &view.title);
        let first = top + 24.0;
        let shown: Vec<_> = self.tokens.iter().take(MOST_LANES as usize).collect();
        let steps_top = first + shown.len() as f64 * (TOKEN_HEIGHT + GAP) + 8.0;
        let bottom = steps_top + STEP_HEIGHT + GAP + GPU_HEIGHT;
        if let Some(near) = magnified {
            let rect = Rect {
                width: view.width(&near.range).max(2.0),
                ..view.rect(&near.range, first - 6.0, bottom - first + 10.0)
            };
            svg.rect(rect, "fill=\"#fff3c4\" stroke=\"#d9b44a\"", Some(&near.title));
        }
        self.axis(svg, view, first, bottom);
        for (i, (lane, tokens)) in shown.iter().enumerate() {
            let y = first + i as f64 * (TOKEN_HEIGHT + GAP);
            let name = if self.tokens.len() == 1 { "tokens".to_owned() } else { format!("choice {lane}") };
            svg.text(LEFT - 8.0, y + 16.0, NAME, &name);
            self.tokens(svg, view, tokens, y);
        }
        let hidden = self.tokens.len().saturating_sub(shown.len());
        if hidden > 0 {
            let text = format!("{} more choices are not drawn", count(hidden as u64));
            svg.text(RIGHT, top, KEY.anchor(Anchor::End), &text);
        }
        self.steps(svg, view, steps_top);
        self.gpu(svg, view, steps_top + STEP_HEIGHT + GAP);
        self.key(svg, view, bottom + 40.0)
    }

    fn axis(&self, svg: &mut Svg, view: &View, top: f64, bottom: f64) {
        let (ticks, unit) = time_ticks(view.range.start, view.range.end, 10);
        for (at, label) in ticks {
            let x = view.x(at);
            svg.line(&[(x, top - 4.0), (x, bottom + 6.0)], &format!("stroke=\"{GRID}\""), None);
            svg.text(x, bottom + 20.0, TICK.anchor(Anchor::Middle), &label);
        }
        svg.text(LEFT - 26.0, bottom + 20.0, TICK.anchor(Anchor::End), unit);
    }

    fn tokens(&self, svg: &mut Svg, view: &View, tokens: &[&TokenBar], y: f64) {
        let seen: Vec<&TokenBar> = tokens.iter().copied().filter(|token| view.shows(&token.range)).collect();
        self.bins(svg, view, &seen, y);
        for token in &seen {
            let pieces = token.pieces.iter().filter(|piece| view.shows(&piece.range));
            for piece in pieces.filter(|piece| view.width(&piece.range) >= NARROW) {
                let Some(part) = self.input.parts.get(piece.part) else { continue };
                let rect = view.rect(&piece.range, y, TOKEN_HEIGHT);
                svg.rect(rect, &part.attributes(), Some(&piece_tooltip(token, piece, part)));
                inside(svg, part, rect);
            }
        }
        let mut free = LEFT;
        for token in &seen {
            let (left, right) = (view.x(token.range.start), view.x(token.range.end));
            if right - left >= 2.5 {
                svg.line(&[(right, y - 3.0), (right, y + TOKEN_HEIGHT)], &format!("stroke=\"{INK}\""), None);
            }
            let style = Style::new(INSIDE, SOFT_INK).anchor(Anchor::Middle);
            let (name, middle) = (shorten(&token.name, 8), f64::midpoint(left, right));
            let half = style.width(&name) / 2.0;
            if right - left >= 8.0 && middle - half >= free {
                svg.text(middle, y - 4.0, style, &name);
                free = middle + half + 6.0;
            }
        }
    }

    /// Where pieces are narrow: of each bin the part that most of its time went to.
    fn bins(&self, svg: &mut Svg, view: &View, tokens: &[&TokenBar], y: f64) {
        let bins = ((RIGHT - LEFT) / BIN) as usize;
        let parts = self.input.parts.len();
        let mut sums = vec![0f64; bins * parts];
        let mut has_narrow = vec![false; bins];
        for piece in tokens.iter().flat_map(|token| &token.pieces).filter(|piece| piece.part < parts) {
            let (from, to) = (view.x(piece.range.start) - LEFT, view.x(piece.range.end) - LEFT);
            let last = ((to / BIN) as usize).min(bins - 1);
            for bin in (from / BIN) as usize..=last {
                let edges = (bin as f64 * BIN, (bin + 1) as f64 * BIN);
                sums[bin * parts + piece.part] += (to.min(edges.1) - from.max(edges.0)).max(0.0);
                has_narrow[bin] |= to - from < NARROW;
            }
        }
        for bin in (0..bins).filter(|bin| has_narrow[*bin]) {
            let sums = &sums[bin * parts..(bin + 1) * parts];
            let longest = (0..parts).rev().max_by(|a, b| sums[*a].total_cmp(&sums[*b]));
            let Some(part) = longest.filter(|part| sums[*part] > 0.0) else { continue };
            let rect = Rect { x: LEFT + bin as f64 * BIN, y, width: BIN, height: TOKEN_HEIGHT };
            let part = &self.input.parts[part];
            let tooltip = format!("several parts, most of the time {}", part.name);
            svg.rect(rect, &part.attributes(), Some(&tooltip));
        }
    }

    fn steps(&self, svg: &mut Svg, view: &View, y: f64) {
        let largest = self.steps.iter().map(|step| step.batch).max().unwrap_or(0).max(1);
        svg.text(LEFT - 8.0, y + 11.0, NAME, "batch");
        svg.text(LEFT - 8.0, y + 25.0, FAINT, &format!("0–{}", count(largest)));
        let seen: Vec<&StepBar> = self.steps.iter().copied().filter(|step| view.shows(&step.range)).collect();
        let base = y + STEP_HEIGHT;
        svg.line(&[(LEFT, base), (RIGHT, base)], &format!("stroke=\"{GRID}\""), None);
        let px = |n: u64| STEP_HEIGHT * n as f64 / largest as f64;
        for step in bins_of(view, &seen) {
            let tooltip = step_tooltip(step);
            let looks = if step.is_own { fill(OWN, false) } else { OTHERS.to_owned() };
            let (all, prompts) = (px(step.batch).max(2.0), px(step.prompts.min(step.batch)));
            let rect = view.rect(&step.range, base - all, all);
            let gap = if rect.width > 4.0 { 0.5 } else { 0.0 };
            let rect = Rect { width: rect.width - gap, ..rect };
            svg.rect(rect, &looks, Some(&tooltip));
            if step.prompts > 0 {
                let part = Rect { y: base - prompts, height: prompts, ..rect };
                svg.rect(part, &fill(PROMPTS, true), Some(&tooltip));
            }
            let ink = if step.is_own && step.prompts == 0 { ON_LIGHT } else { INK };
            let label = Style::new(INSIDE, ink).anchor(Anchor::Middle);
            let text = if step.prompts > 0 {
                format!("{} · {} prompt tokens", step.batch, count(step.prompt_tokens))
            } else {
                step.batch.to_string()
            };
            if rect.width >= label.width(&text) + 6.0 && rect.height >= 14.0 {
                svg.text(rect.x + rect.width / 2.0, rect.y + 12.0, label, &text);
            }
        }
    }

    fn gpu(&self, svg: &mut Svg, view: &View, y: f64) {
        svg.text(LEFT - 8.0, y + 14.0, NAME, "GPU");
        let seen: Vec<&StepBar> = self
            .steps
            .iter()
            .copied()
            .filter(|step| step.gpu.as_ref().is_some_and(|gpu| view.shows(&gpu.range)))
            .collect();
        if seen.is_empty() {
            svg.text(LEFT + 4.0, y + 14.0, KEY, "no GPU times: the end of a step is what its host saw");
            return;
        }
        let drawn = bins_of(view, &seen);
        for step in &drawn {
            let Some(gpu) = &step.gpu else { continue };
            let looks = match (is_vague(step), step.is_own) {
                (true, _) => format!("{} stroke=\"{}\"", fill(VAGUE, true), VAGUE.hex()),
                (false, true) => fill(Hue::Blue, false),
                (false, false) => "fill=\"#aab4bf\"".to_owned(),
            };
            svg.rect(view.rect(&gpu.range, y, GPU_HEIGHT), &looks, Some(&step_tooltip(step)));
        }
        // Above all spans, so that none hides the bound of the one before it.
        for step in &drawn {
            if let Some(gpu) = &step.gpu {
                whisker(svg, view, gpu.range.start, gpu.bound_ns, y);
                whisker(svg, view, gpu.range.end, gpu.bound_ns, y);
            }
        }
    }

    /// What colours and shapes of steps mean; where it ends.
    fn key(&self, svg: &mut Svg, view: &View, y: f64) -> f64 {
        let own = self.steps.iter().any(|step| step.is_own);
        let others = self.steps.iter().any(|step| !step.is_own);
        let prompts = self.steps.iter().any(|step| step.prompts > 0);
        let vague = self.steps.iter().any(|step| is_vague(step));
        let widest = self.steps.iter().filter_map(|step| step.gpu.as_ref()).map(|gpu| gpu.bound_ns).max();
        let drawn = |bound: u64| view.width(&(0..bound.saturating_mul(2).min(length(&view.range)))) >= 1.5;
        let vague_looks = format!("{} stroke=\"{}\"", fill(VAGUE, true), VAGUE.hex());
        let keys = [
            (own, fill(OWN, false), "step of this request".to_owned()),
            (others, OTHERS.to_owned(), "step that served only others".to_owned()),
            (prompts, fill(PROMPTS, true), "prompts in its batch".to_owned()),
            (vague, vague_looks, "GPU time known worse than it is long".to_owned()),
        ];
        let mut place = (LEFT, y);
        for (_, looks, text) in keys.into_iter().filter(|key| key.0) {
            let (x, y) = next_place(&mut place, 20.0 + KEY.width(&text) + 8.0);
            svg.rect(Rect { x, y: y - 10.0, width: 14.0, height: 12.0 }, &looks, None);
            svg.text(x + 20.0, y, KEY, &text);
        }
        let narrow = |range: &Range<u64>| view.shows(range) && view.width(range) < NARROW;
        if self.input.tokens.iter().flat_map(|token| &token.pieces).any(|piece| narrow(&piece.range)) {
            let text =
                format!("parts under 1 px: each {BIN} px show the part that most of their time went to");
            let (x, y) = next_place(&mut place, KEY.width(&text) + 8.0);
            svg.text(x, y, KEY, &text);
        }
        if let Some(bound) = widest {
            let text = if drawn(bound) {
                format!("├─┤ GPU times are right within this, at most ±{}", duration(bound))
            } else {
                format!("GPU times are right within ±{}: too little to be seen here", duration(bound))
            };
            let (x, y) = next_place(&mut place, KEY.width(&text));
            svg.text(x, y, KEY, &text);
        }
        place.1
    }
}

/// Where something of a width goes in rows of text, and the place after it.
fn next_place(place: &mut (f64, f64), width: f64) -> (f64, f64) {
    if place.0 + width > RIGHT && place.0 > LEFT {
        *place = (LEFT, place.1 + 18.0);
    }
    let here = *place;
    place.0 += width;
    here
}

fn is_vague(step: &StepBar) -> bool {
    step.gpu.as_ref().is_some_and(|gpu| gpu.bound_ns > length(&gpu.range))
}

/// What a time is right within, where that can be seen.
fn whisker(svg: &mut Svg, view: &View, at: u64, bound: u64, y: f64) {
    let (from, to) = (at.saturating_sub(bound), at.saturating_add(bound));
    let (left, right) = (view.x(from.max(view.range.start)), view.x(to));
    if at < view.range.start || at > view.range.end || right - left < 1.5 {
        return;
    }
    let middle = y + GPU_HEIGHT / 2.0;
    let tooltip = format!("right within ±{}", duration(bound));
    let mut points = vec![(left, y + 4.0), (left, y + GPU_HEIGHT - 4.0), (left, middle)];
    points.extend([(right, middle), (right, y + 4.0), (right, y + GPU_HEIGHT - 4.0)]);
    svg.line(&points, "stroke=\"#ffffff\" stroke-width=\"3\" stroke-opacity=\"0.7\"", None);
    svg.line(&points, &format!("stroke=\"{INK}\" stroke-width=\"1.2\""), Some(&tooltip));
}

/// The steps that are wide enough, and of the others in each bin that with the largest batch.
fn bins_of<'a>(view: &View, steps: &[&'a StepBar]) -> Vec<&'a StepBar> {
    let (mut drawn, mut bins) = (Vec::new(), BTreeMap::<(bool, usize), &StepBar>::new());
    for &step in steps {
        if view.width(&step.range) >= NARROW {
            drawn.push(step);
            continue;
        }
        let bin = ((view.x(step.range.start) - LEFT) / BIN) as usize;
        let largest = bins.entry((step.is_own, bin)).or_insert(step);
        if (is_vague(step), step.prompts, step.batch) > (is_vague(largest), largest.prompts, largest.batch) {
            *largest = step;
        }
    }
    bins.into_values().chain(drawn).collect()
}

/// The name of a part in its rectangle, where there is room.
fn inside(svg: &mut Svg, part: &Part, rect: Rect) {
    let ink = if part.hue.is_dark() { "#ffffff" } else { ON_LIGHT };
    let style = Style::new(INSIDE, ink).anchor(Anchor::Middle);
    let name = shorten(&part.name, 24);
    if rect.width >= style.width(&name) + 4.0 {
        let (x, y) = (rect.x + rect.width / 2.0, rect.y + rect.height / 2.0 + 4.0);
        if part.hatched {
            let behind = Rect {
                x: x - style.width(&name) / 2.0,
                y: y - INSIDE + 1.0,
                width: style.width(&name),
                height: INSIDE + 2.0,
            };
            svg.rect(behind, "fill=\"#ffffff\" fill-opacity=\"0.9\" pointer-events=\"none\"", None);
            svg.text(x, y, Style::new(INSIDE, INK).anchor(Anchor::Middle), &name);
        } else {
            svg.text(x, y, style, &name);
        }
    }
}

fn piece_tooltip(token: &TokenBar, piece: &Piece, part: &Part) -> String {
    let mut text =
        format!("token {}: {} {}\n{}", token.name, duration(length(&piece.range)), part.name, part.meaning);
    if !piece.what.is_empty() {
        let _ = write!(text, "\n{}", piece.what);
    }
    let _ = write!(text, "\nat +{}", duration(piece.range.start));
    for function in piece.stack.iter().take(FUNCTIONS) {
        let _ = write!(text, "\n  {}", shorten(function, 120));
    }
    text
}

fn step_tooltip(step: &StepBar) -> String {
    let whose = if step.is_own { "" } else { ", served only others" };
    let mut text = format!(
        "{}{whose}: {}\nbatch of {}, {} prompts ({} tokens)",
        step.name,
        duration(length(&step.range)),
        count(step.batch),
        count(step.prompts),
        count(step.prompt_tokens)
    );
    if let Some(gpu) = &step.gpu {
        let span = length(&gpu.range);
        let _ = write!(text, "\nGPU {} at +{}", duration(span), duration(gpu.range.start));
        let _ = write!(text, ", right within ±{}", duration(gpu.bound_ns));
    }
    text
}

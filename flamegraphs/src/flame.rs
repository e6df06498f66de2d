//! Flame graphs, drawn by inferno from folded stacks.

use crate::frame::{SIMULATED, WIDTH};
use crate::text::{clean, shorten};
use crate::{Error, Header, colour, dark};
use inferno::flamegraph::color::{BackgroundColor, Color, PaletteMap};
use std::collections::BTreeMap;

/// Size of the text in px; inferno takes the title 5 px larger.
const FONT_SIZE: usize = 13;

/// Longest frame name, in characters. Names beyond it are cut with `…`.
const LONGEST_NAME: usize = 500;

/// Colours of the frames. Each name keeps its colour from picture to picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Palette {
    /// Time on CPU: yellows and oranges.
    #[default]
    Hot,
    /// Time spent waiting: blues.
    Wait,
}

/// What a flame graph says and how it counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlameOptions {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// What is counted, as it reads after a number: `µs on CPU`. Empty: `samples`.
    pub count_name: String,
    /// Numbers shown are weight × factor, rounded: 0.001 shows weights in ns as µs. Not positive: 1.
    pub factor: f64,
    /// Colours of the functions. Kernel frames (`_[k]`), wakers (`_[w]`) and groups have their own.
    pub palette: Palette,
    /// How many frames at the root of each stack are groups (request, phase), not functions.
    pub groups: usize,
}

/// A drawn flame graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlameGraph {
    /// The picture. In a browser it can be zoomed and searched.
    pub svg: String,
    /// The same stacks in the folded format (`root;…;leaf weight` lines), for other tools.
    pub folded: String,
}

/// Draws stacks (root first) by their weights, equal stacks added up. Stacks without frames or weight are left out.
///
/// In frame names `;` becomes `:`, and line breaks, control characters and directional marks are replaced, so that
/// the folded text means the same to every reader of it.
///
/// # Errors
/// [`Error::Empty`] when no stack has weight, [`Error::WeightOverflow`], and [`Error::Render`] from inferno.
pub fn flamegraph<I>(stacks: I, options: &FlameOptions) -> Result<FlameGraph, Error>
where
    I: IntoIterator<Item = (Vec<String>, u64)>,
{
    let stacks = merge(stacks.into_iter().map(|(stack, weight)| (stack, [weight])))?;
    let mut colours = colours(&stacks, options);
    let mut settings = settings(options);
    settings.palette_map = Some(&mut colours);
    render(&stacks, settings)
}

/// Draws how stacks grew: widths are the second weight, red where it is larger than the first, blue where it is
/// smaller. Otherwise as [`flamegraph`]; the folded text has both weights, in their order.
///
/// # Errors
/// As [`flamegraph`]; [`Error::Empty`] also when no stack has a second weight.
pub fn differential<I>(stacks: I, options: &FlameOptions) -> Result<FlameGraph, Error>
where
    I: IntoIterator<Item = (Vec<String>, [u64; 2])>,
{
    let stacks = merge(stacks)?;
    if stacks.values().all(|[_, weight]| *weight == 0) {
        return Err(Error::Empty("samples"));
    }
    // Inferno multiplies differences by 150 in 64 bits with a sign.
    if stacks.values().flatten().any(|weight| *weight > i64::MAX as u64 / 256) {
        return Err(Error::WeightOverflow);
    }
    render(&stacks, settings(options))
}

fn render<const N: usize>(
    stacks: &BTreeMap<Vec<String>, [u64; N]>,
    mut settings: inferno::flamegraph::Options<'_>,
) -> Result<FlameGraph, Error> {
    let line = |(stack, weights): (&Vec<String>, &[u64; N])| {
        let weights: String = weights.iter().map(|weight| format!(" {weight}")).collect();
        stack.join(";") + &weights
    };
    let lines: Vec<String> = stacks.iter().map(line).collect();
    let mut svg = Vec::new();
    // Lines go in the reverse of their order because `flame_chart` turns them around; see `settings`.
    inferno::flamegraph::from_lines(&mut settings, lines.iter().rev().map(String::as_str), &mut svg)?;
    let svg = String::from_utf8(svg)
        .map_err(|e| std::io::Error::new(std::io::ErrorKind::InvalidData, e.utf8_error()))?;
    let dark = format!("{}\n</style>", dark::style_of_flames());
    let svg = svg.replacen("</style>", &dark, 1);
    let mut folded = lines.join("\n");
    folded.push('\n');
    Ok(FlameGraph { svg, folded })
}

/// The different stacks sorted by frames. (Sorting folded lines by their bytes would tear equal roots apart: `;` comes
/// after a space.)
fn merge<I, const N: usize>(stacks: I) -> Result<BTreeMap<Vec<String>, [u64; N]>, Error>
where
    I: IntoIterator<Item = (Vec<String>, [u64; N])>,
{
    let mut merged: BTreeMap<Vec<String>, [u64; N]> = BTreeMap::new();
    let mut totals = [0u64; N];
    for (stack, weights) in stacks {
        if stack.is_empty() || weights.iter().all(|weight| *weight == 0) {
            continue;
        }
        let sums = merged.entry(stack.iter().map(|name| frame_name(name)).collect()).or_insert([0; N]);
        for ((sum, total), weight) in sums.iter_mut().zip(&mut totals).zip(weights) {
            *total = total.checked_add(weight).ok_or(Error::WeightOverflow)?;
            *sum += weight;
        }
    }
    if merged.is_empty() {
        return Err(Error::Empty("samples"));
    }
    Ok(merged)
}

/// A colour for every name. Where a group and a function share one, the outermost group decides.
fn colours(stacks: &BTreeMap<Vec<String>, [u64; 1]>, options: &FlameOptions) -> PaletteMap {
    let mut colours = PaletteMap::default();
    // The frame that inferno draws below all others.
    colours.insert("", Color { r: 226, g: 228, b: 232 });
    let deepest = stacks.keys().map(Vec::len).max().unwrap_or(0);
    for level in 0..deepest {
        for name in stacks.keys().filter_map(|stack| stack.get(level)) {
            if colours.get(name).is_none() {
                let colour = if level < options.groups {
                    colour::group(level, name)
                } else {
                    colour::function(options.palette, name)
                };
                colours.insert(name, colour);
            }
        }
    }
    colours
}

/// A name that cannot be mistaken for syntax of the folded format: separators, a count at the end, a comment.
fn frame_name(name: &str) -> String {
    let name = clean(name);
    let name = shorten(name.trim(), LONGEST_NAME).replace(';', ":");
    let name = match name.rsplit_once(' ') {
        // A no-break space keeps `worker 3` from being read as `worker`, 3 times.
        Some((head, last)) if last.chars().all(|c| c.is_ascii_digit() || c == '.') => {
            format!("{head}\u{a0}{last}")
        }
        _ => name,
    };
    if name.is_empty() {
        return "[unnamed]".to_owned();
    }
    if name.starts_with("# ") { format!("[{name}]") } else { name }
}

fn settings<'a>(options: &FlameOptions) -> inferno::flamegraph::Options<'a> {
    let mut settings = inferno::flamegraph::Options::default();
    settings.title = header_line(&options.header.title, FONT_SIZE + 5);
    let subtitle = if options.header.simulated {
        format!("{SIMULATED} · {}", options.header.subtitle)
    } else {
        options.header.subtitle.clone()
    };
    settings.subtitle = (!subtitle.is_empty()).then(|| header_line(&subtitle, FONT_SIZE));
    settings.count_name = if options.count_name.is_empty() {
        "samples".to_owned()
    } else {
        clean(&options.count_name).into_owned()
    };
    settings.factor = if options.factor > 0.0 && options.factor.is_finite() { options.factor } else { 1.0 };
    settings.bgcolors = Some(BackgroundColor::Flat(Color { r: 255, g: 255, b: 255 }));
    settings.font_type = "sans-serif".to_owned();
    settings.font_size = FONT_SIZE;
    settings.frame_height = FONT_SIZE + 5;
    settings.text_truncate_direction = inferno::flamegraph::TextTruncateDirection::Right;
    // Equal stacks are merged and sorted by `fold`; this is inferno's way to take lines in the order given.
    settings.flame_chart = true;
    settings
}

/// A line of the header, cut to the width of the picture.
fn header_line(text: &str, size: usize) -> String {
    // Proportional text is narrower than this on average; the line is centred.
    let fits = (WIDTH - 160.0) / (size as f64 * 0.56);
    shorten(&clean(text), fits as usize).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(names: &[&str]) -> Vec<String> {
        names.iter().map(|&n| n.to_owned()).collect()
    }

    fn folded(stacks: Vec<(Vec<String>, u64)>) -> String {
        flamegraph(stacks, &FlameOptions::default()).expect("draws").folded
    }

    #[test]
    fn equal_stacks_add_up_in_order_of_frames() {
        let text = folded(vec![
            (stack(&["a", "c"]), 1),
            (stack(&["a b", "x"]), 5),
            (stack(&["a"]), 2),
            (stack(&["a", "c"]), 3),
            (stack(&[]), 9),
            (stack(&["z"]), 0),
        ]);
        assert_eq!(text, "a 2\na;c 4\na b;x 5\n");
    }

    #[test]
    fn a_root_is_one_rectangle_whatever_its_children_are_called() {
        let svg = flamegraph(
            vec![(stack(&["a"]), 5), (stack(&["a!b"]), 5), (stack(&["a", "b"]), 5)],
            &FlameOptions::default(),
        )
        .expect("draws")
        .svg;
        assert_eq!(svg.matches("<title>a (10 samples, 66.67%)</title>").count(), 1);
    }

    #[test]
    fn names_cannot_be_mistaken_for_syntax() {
        assert_eq!(frame_name("worker 3"), "worker\u{a0}3");
        assert_eq!(frame_name("a;b"), "a:b");
        assert_eq!(frame_name(" \n "), "[unnamed]");
        assert_eq!(frame_name("# note"), "[# note]");
        assert_eq!(frame_name("operator new(unsigned long)"), "operator new(unsigned long)");
        assert_eq!(folded(vec![(stack(&["worker 3"]), 7)]), "worker\u{a0}3 7\n");
    }

    #[test]
    fn nothing_and_too_much_are_errors() {
        assert!(matches!(flamegraph(vec![], &FlameOptions::default()), Err(Error::Empty(_))));
        let huge = vec![(stack(&["a"]), u64::MAX), (stack(&["b"]), 1)];
        assert!(matches!(flamegraph(huge, &FlameOptions::default()), Err(Error::WeightOverflow)));
    }
}

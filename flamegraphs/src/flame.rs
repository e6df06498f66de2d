//! Flame graphs, drawn by inferno from folded stacks.

use crate::folded::Sorted;
use crate::frame::{SIMULATED, WIDTH};
use crate::text::{clean, shorten};
use crate::{Error, Folded, Header, colour, dark};
use inferno::flamegraph::color::{BackgroundColor, Color, PaletteMap};

/// Size of the text in px; inferno takes the title 5 px larger.
const FONT_SIZE: usize = 13;

/// Frames that take less of the width, in percent, are not drawn.
const LEAST_WIDTH_PERCENT: f64 = 0.01;

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

/// Draws stacks by their weights, as SVG. In a browser it can be zoomed and searched.
///
/// # Errors
/// [`Error::Empty`] when no stack has weight, [`Error::WeightOverflow`], and [`Error::Render`] from inferno.
pub fn flamegraph(stacks: &Folded<1>, options: &FlameOptions) -> Result<String, Error> {
    let sorted = stacks.sorted()?;
    // What is too narrow to be drawn need not be read either.
    let visible = sorted.visible(LEAST_WIDTH_PERCENT / 100.0);
    let lines = visible.into_iter().map(|(stack, weight)| sorted.line(stack, &[weight])).collect();
    let mut colours = colours(&sorted, options);
    let mut settings = settings(options);
    settings.palette_map = Some(&mut colours);
    render(lines, settings)
}

/// Draws how stacks grew: widths are the second weight, red where it is larger than the first, blue where it is
/// smaller. Otherwise as [`flamegraph`].
///
/// # Errors
/// As [`flamegraph`]; [`Error::Empty`] also when no stack has a second weight.
pub fn differential(stacks: &Folded<2>, options: &FlameOptions) -> Result<String, Error> {
    let sorted = stacks.sorted()?;
    if sorted.stacks.iter().all(|(_, [_, weight])| *weight == 0) {
        return Err(Error::Empty("samples"));
    }
    // Inferno multiplies differences by 150 in 64 bits with a sign.
    if sorted.stacks.iter().any(|(_, weights)| weights.iter().any(|weight| *weight > i64::MAX as u64 / 256)) {
        return Err(Error::WeightOverflow);
    }
    let lines = sorted.stacks.iter().map(|(stack, weights)| sorted.line(stack, weights)).collect();
    render(lines, settings(options))
}

fn render(lines: Vec<String>, mut settings: inferno::flamegraph::Options<'_>) -> Result<String, Error> {
    let mut svg = Vec::new();
    // Lines go in the reverse of their order because `flame_chart` turns them around; see `settings`.
    inferno::flamegraph::from_lines(&mut settings, lines.iter().rev().map(String::as_str), &mut svg)?;
    let svg = String::from_utf8(svg)
        .map_err(|e| std::io::Error::new(std::io::ErrorKind::InvalidData, e.utf8_error()))?;
    let dark = format!("{}\n</style>", dark::style_of_flames());
    Ok(svg.replacen("</style>", &dark, 1))
}

/// A colour for every name. Where a group and a function share one, the outermost group decides.
fn colours(sorted: &Sorted<'_, 1>, options: &FlameOptions) -> PaletteMap {
    let mut levels = vec![usize::MAX; sorted.names.len()];
    for (stack, _) in &sorted.stacks {
        for (level, name) in stack.iter().enumerate() {
            let outermost = &mut levels[*name as usize];
            *outermost = level.min(*outermost);
        }
    }
    let mut colours = PaletteMap::default();
    // The frame that inferno draws below all others.
    colours.insert("", Color { r: 226, g: 228, b: 232 });
    for (name, level) in sorted.names.iter().zip(levels) {
        let colour = if level < options.groups {
            colour::group(level, name)
        } else {
            colour::function(options.palette, name)
        };
        colours.insert(name, colour);
    }
    colours
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
    settings.min_width = LEAST_WIDTH_PERCENT;
    // Stacks are merged and sorted; this is inferno's way to take lines in the order given.
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

    fn drawn(stacks: Vec<(Vec<&str>, u64)>) -> Result<String, Error> {
        let stacks: Folded<1> = stacks.into_iter().map(|(stack, weight)| (stack, [weight])).collect();
        flamegraph(&stacks, &FlameOptions::default())
    }

    #[test]
    fn a_root_is_one_rectangle_whatever_its_children_are_called() {
        let svg = drawn(vec![(vec!["a"], 5), (vec!["a!b"], 5), (vec!["a", "b"], 5)]).expect("draws");
        assert_eq!(svg.matches("<title>a (10 samples, 66.67%)</title>").count(), 1);
    }

    /// What is left out before is what inferno leaves out.
    #[test]
    fn narrow_frames_leave_no_trace() {
        let narrow = |name| (vec!["a", name, "deeper"], 4);
        let stacks =
            vec![(vec!["a", "wide"], 49_990), narrow("x"), narrow("y"), (vec!["z"], 1), (vec!["zz"], 50_000)];
        let svg = drawn(stacks).expect("draws");
        assert!(svg.contains("total_samples=\"99999\"") && !svg.contains("deeper"));
        assert_eq!(svg.matches("<title>a (49,998 samples, 50.00%)</title>").count(), 1);
        assert_eq!(svg.matches("<title>").count(), 4, "all, a, wide, zz");
    }

    #[test]
    fn nothing_is_an_error() {
        assert!(matches!(drawn(vec![]), Err(Error::Empty(_))));
        let gone: Folded<2> = [(vec!["a"], [1, 0])].into_iter().collect();
        assert!(matches!(differential(&gone, &FlameOptions::default()), Err(Error::Empty(_))));
    }
}

//! How pictures look to those who have asked for dark ones (`prefers-color-scheme`).
//!
//! Colours are attributes: slide and office programs read those, and show pictures as they are on white. A style sheet
//! has other colours for the same attributes, which only browsers follow.

use crate::frame::{GRID, INK, SOFT_INK};
use crate::part::Hue;
use std::fmt::Write;

const GROUND: &str = "#14171c";
const LIGHT_INK: &str = "#e6e9ee";

/// What a colour of lines, areas and text becomes; those that are not named are seen on both grounds.
const COLOURS: [(&str, &str); 13] = [
    (INK, LIGHT_INK),
    (SOFT_INK, "#a0a8b5"),
    (GRID, "#363c47"),
    ("#f6f8fa", "#1c2027"),
    ("#dfe3e8", "#2d333d"),
    ("#aab4bf", "#6b7480"),
    ("#fff3c4", "#463b17"),
    ("#c1121f", "#ff5a64"),
    ("#d1380b", "#ff7a45"),
    ("#2a9d8f", "#35b8a8"),
    ("#7a5aa6", "#a98ad6"),
    // Under white text, and beside each other.
    (Hue::Black.hex(), "#59616c"),
    (Hue::Grey.hex(), "#8b949e"),
];

/// The style sheet of a picture, and what `more` colours become.
pub(crate) fn style(more: impl IntoIterator<Item = (String, String)>) -> String {
    let mut rules = String::new();
    // White is the ground, behind areas, text and lines; on dark areas text stays white.
    let _ = write!(rules, "rect[fill=\"#ffffff\"]{{fill:{GROUND}}}[stroke=\"#ffffff\"]{{stroke:{GROUND}}}");
    let common = COLOURS.into_iter().map(|(light, dark)| (light.to_owned(), dark.to_owned()));
    for (light, dark) in common.chain(more) {
        let _ = write!(rules, "[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}");
    }
    media(&rules)
}

/// The same for pictures of inferno's: its frames are light, and stay so.
pub(crate) fn style_of_flames() -> String {
    media(&format!("stop{{stop-color:{GROUND}}}:root>text{{fill:{LIGHT_INK}}}"))
}

fn media(rules: &str) -> String {
    format!("@media (prefers-color-scheme:dark){{{rules}}}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heatmap::dark_shades;

    /// Relative luminance (WCAG 2).
    fn luminance(colour: &str) -> f64 {
        let channel = |i: usize| {
            let value = f64::from(u8::from_str_radix(&colour[i..i + 2], 16).unwrap()) / 255.0;
            if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_is_readable_on_dark() {
        for ink in [INK, SOFT_INK, "#c1121f"] {
            let dark = COLOURS.iter().find(|(light, _)| *light == ink).unwrap().1;
            assert!(contrast(dark, GROUND) >= 4.5, "{ink} becomes {dark}");
        }
        let black = COLOURS.iter().find(|(light, _)| *light == Hue::Black.hex()).unwrap().1;
        assert!(contrast("#ffffff", black) >= 4.5);
    }

    #[test]
    fn more_is_lighter_on_dark_and_the_least_is_seen() {
        let shades: Vec<String> = dark_shades().map(|(_, dark)| dark).collect();
        assert!(shades.is_sorted_by(|less, more| luminance(less) < luminance(more)), "{shades:?}");
        assert!(contrast(&shades[0], GROUND) >= 1.5, "{shades:?}");
    }

    /// Of two rules for one colour the later one would decide.
    #[test]
    fn a_colour_becomes_one_other() {
        let light: Vec<String> = COLOURS
            .iter()
            .map(|(light, _)| (*light).to_owned())
            .chain(dark_shades().map(|(light, _)| light))
            .collect();
        let different: std::collections::HashSet<_> = light.iter().collect();
        assert_eq!(different.len(), light.len());
    }
}

//! Colours of the frames of a flame graph: by kind, and within a kind by name.
//!
//! All are light enough for black text (contrast of at least 7:1). A name has the same colour in every picture.

use crate::flame::Palette;
use inferno::flamegraph::color::Color;

/// Hue (degrees), how far names spread around it, and saturation. Lightness varies a little by name.
type Tone = (f64, f64, f64);

/// The levels of groups above the functions, outermost first; deeper ones take the last.
const GROUPS: [Tone; 2] = [(214.0, 6.0, 0.42), (176.0, 14.0, 0.34)];
const KERNEL: Tone = (322.0, 10.0, 0.48);
/// Threads that woke others.
const WAKER: Tone = (128.0, 14.0, 0.42);
const HOT: Tone = (36.0, 18.0, 0.92);
const WAIT: Tone = (208.0, 20.0, 0.55);

/// Frames that stand for something missing: `[truncated]`, `[unknown]`.
const MISSING: Color = Color { r: 208, g: 208, b: 208 };

/// The colour of a group's name at a level (0 is the root).
pub(crate) fn group(level: usize, name: &str) -> Color {
    tint(GROUPS[level.min(GROUPS.len() - 1)], name)
}

/// The colour of a function's name.
pub(crate) fn function(palette: Palette, name: &str) -> Color {
    if name.ends_with("_[k]") {
        return tint(KERNEL, name);
    }
    if name.ends_with("_[w]") {
        return tint(WAKER, name);
    }
    if name.starts_with('[') && name.ends_with(']') {
        return MISSING;
    }
    match palette {
        Palette::Hot => tint(HOT, name),
        Palette::Wait => tint(WAIT, name),
    }
}

fn tint((hue, spread, saturation): Tone, name: &str) -> Color {
    let hash = fnv1a(name);
    // Two independent values in [0, 1] from one hash.
    let share = |shift: u32| f64::from((hash >> shift) as u16) / f64::from(u16::MAX);
    hsl(hue + spread * (2.0 * share(16) - 1.0), saturation, 0.73 + 0.10 * share(32))
}

/// FNV-1a, 64 bits (draft-eastlake-fnv).
fn fnv1a(text: &str) -> u64 {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // The low bits mix best; fold them over the bits that are used.
    hash ^ (hash << 29) ^ (hash >> 31)
}

/// HSL to sRGB; hue in degrees, the others in [0, 1].
fn hsl(hue: f64, saturation: f64, lightness: f64) -> Color {
    let reach = saturation * lightness.min(1.0 - lightness);
    let channel = |n: f64| {
        let k = (n + hue / 30.0).rem_euclid(12.0);
        let value = lightness - reach * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round() as u8
    };
    Color { r: channel(0.0), g: channel(8.0), b: channel(4.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// WCAG 2 contrast of black on a colour.
    fn contrast_with_black(c: Color) -> f64 {
        let linear = |v: u8| {
            let v = f64::from(v) / 255.0;
            if v <= 0.040_45 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
        };
        (0.2126 * linear(c.r) + 0.7152 * linear(c.g) + 0.0722 * linear(c.b) + 0.05) / 0.05
    }

    #[test]
    fn hsl_gives_the_known_colours() {
        assert_eq!(hsl(0.0, 1.0, 0.5), Color { r: 255, g: 0, b: 0 });
        assert_eq!(hsl(120.0, 1.0, 0.5), Color { r: 0, g: 255, b: 0 });
        assert_eq!(hsl(240.0, 0.0, 0.5), Color { r: 128, g: 128, b: 128 });
    }

    proptest! {
        #[test]
        fn black_text_is_readable(name in ".*", level in 0usize..4) {
            for colour in [
                group(level, &name),
                function(Palette::Hot, &name),
                function(Palette::Wait, &name),
                function(Palette::Hot, &format!("{name}_[k]")),
                function(Palette::Wait, &format!("{name}_[w]")),
            ] {
                prop_assert!(contrast_with_black(colour) >= 7.0, "{:?}", colour);
            }
        }
    }
}

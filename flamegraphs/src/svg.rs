//! A small SVG writer: escaping, shapes with tooltips, text.
//!
//! Styles are presentation attributes, not CSS classes: slide and office programs import those reliably. What they become
//! on dark is in [`crate::dark`].

use crate::dark;
use crate::text::clean;
use std::fmt::{self, Display, Write};

/// Fonts that the systems in use have, the last one generic.
const FONTS: &str = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif";

/// Width of a character in units of the font size, on the wide side (DejaVu Sans digits), so that text which is
/// computed to fit does fit.
const CHARACTER_WIDTH: f64 = 0.62;

/// Which point of a text its position is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

/// Size and looks of a text.
#[derive(Clone, Copy)]
pub(crate) struct Style {
    pub(crate) size: f64,
    pub(crate) fill: &'static str,
    pub(crate) anchor: Anchor,
    pub(crate) bold: bool,
}

impl Style {
    pub(crate) const fn new(size: f64, fill: &'static str) -> Self {
        Self { size, fill, anchor: Anchor::Start, bold: false }
    }

    pub(crate) const fn anchor(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    pub(crate) const fn bold(self) -> Self {
        Self { bold: true, ..self }
    }

    /// Room that `text` takes at most, px.
    pub(crate) fn width(self, text: &str) -> f64 {
        text.chars().count() as f64 * self.size * CHARACTER_WIDTH
    }

    /// How many characters fit into `px`.
    pub(crate) fn fits(self, px: f64) -> usize {
        (px / (self.size * CHARACTER_WIDTH)).max(0.0) as usize
    }
}

/// A rectangle in px, y downwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rect {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

impl Rect {
    pub(crate) fn right(self) -> f64 {
        self.x + self.width
    }

    pub(crate) fn bottom(self) -> f64 {
        self.y + self.height
    }
}

/// An SVG document being written.
pub(crate) struct Svg {
    width: f64,
    height: f64,
    label: String,
    defs: String,
    /// What colours of this picture become on dark.
    dark: Vec<(String, String)>,
    body: String,
}

impl Svg {
    /// Opens a document of the given size on white; `label` is its accessible name, `defs` trusted markup.
    pub(crate) fn new(width: f64, height: f64, label: &str, defs: &str) -> Self {
        let body = String::with_capacity(64 * 1024);
        Self { width, height, label: label.to_owned(), defs: defs.to_owned(), dark: Vec::new(), body }
    }

    /// What other colours than those that all pictures have become on dark; trusted markup.
    pub(crate) fn set_dark(&mut self, colours: impl IntoIterator<Item = (String, String)>) {
        self.dark.extend(colours);
    }

    /// For documents whose height is known once they are drawn.
    pub(crate) fn set_height(&mut self, height: f64) {
        self.height = height;
    }

    /// A rectangle. `attributes` is trusted markup; `tooltip` is escaped.
    pub(crate) fn rect(&mut self, r: Rect, attributes: &str, tooltip: Option<&str>) {
        self.put(format_args!(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" {attributes}",
            Px(r.x),
            Px(r.y),
            Px(r.width),
            Px(r.height)
        ));
        self.close("rect", tooltip);
    }

    /// A polyline through `points`. `attributes` is trusted markup; `tooltip` is escaped.
    pub(crate) fn line(&mut self, points: &[(f64, f64)], attributes: &str, tooltip: Option<&str>) {
        self.body.push_str("<polyline points=\"");
        for (i, &(x, y)) in points.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            self.put(format_args!("{space}{},{}", Px(x), Px(y)));
        }
        self.put(format_args!("\" fill=\"none\" {attributes}"));
        self.close("polyline", tooltip);
    }

    /// A text; `y` is its base line.
    pub(crate) fn text(&mut self, x: f64, y: f64, style: Style, text: &str) {
        self.text_with(x, y, style, "", text);
    }

    /// A text that reads upwards, centred on its position.
    pub(crate) fn text_upwards(&mut self, x: f64, y: f64, style: Style, text: &str) {
        let turn = format!(" transform=\"rotate(-90 {} {})\"", Px(x), Px(y));
        self.text_with(x, y, style.anchor(Anchor::Middle), &turn, text);
    }

    fn text_with(&mut self, x: f64, y: f64, style: Style, attributes: &str, text: &str) {
        let weight = if style.bold { " font-weight=\"600\"" } else { "" };
        let anchor = style.anchor.name();
        self.put(format_args!(
            "<text x=\"{}\" y=\"{}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{anchor}\"{weight}{attributes}>{}</text>\n",
            Px(x),
            Px(y),
            Px(style.size),
            style.fill,
            Escaped(text)
        ));
    }

    /// The finished document.
    pub(crate) fn finish(self) -> String {
        let Self { width, height, label, defs, dark, body } = self;
        let mut svg = Self::new(width, height, "", "");
        svg.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
             role=\"img\" aria-label=\"{}\" font-family=\"{FONTS}\">\n",
            Escaped(&label),
            w = Px(width),
            h = Px(height),
        ));
        if !defs.is_empty() {
            svg.put(format_args!("<defs>{defs}</defs>\n"));
        }
        svg.put(format_args!("<style>{}</style>\n", dark::style(dark)));
        svg.rect(Rect { x: 0.0, y: 0.0, width, height }, "fill=\"#ffffff\"", None);
        svg.body + &body + "</svg>\n"
    }

    fn close(&mut self, name: &str, tooltip: Option<&str>) {
        match tooltip {
            Some(tooltip) => {
                self.body.push_str("><title>");
                // Lines are cleaned one by one: line breaks are the only control characters a tooltip may have.
                for (i, line) in tooltip.lines().enumerate() {
                    let newline = if i == 0 { "" } else { "\n" };
                    self.put(format_args!("{newline}{}", Escaped(line)));
                }
                self.put(format_args!("</title></{name}>\n"));
            }
            None => self.body.push_str("/>\n"),
        }
    }

    fn put(&mut self, arguments: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.body.write_fmt(arguments);
    }
}

/// A coordinate with at most two decimals; 0 when it is not a number.
pub(crate) struct Px(pub(crate) f64);

impl Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hundredths = (self.0 * 100.0).round();
        let value = if hundredths.is_finite() { hundredths / 100.0 } else { 0.0 };
        // `+ 0.0` turns -0 into 0.
        write!(f, "{}", value + 0.0)
    }
}

/// Text or attribute value: cleaned, then escaped.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in clean(self.0).chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short_and_finite() {
        assert_eq!(Px(1.0).to_string(), "1");
        assert_eq!(Px(1.005_1).to_string(), "1.01");
        assert_eq!(Px(-0.001).to_string(), "0");
        assert_eq!(Px(f64::NAN).to_string(), "0");
        assert_eq!(Px(f64::INFINITY).to_string(), "0");
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(Escaped("<a b=\"c\">&'\u{1b}").to_string(), "&lt;a b=&quot;c&quot;&gt;&amp;&#39;\u{FFFD}");
    }
}

//! What all pictures have in common: title, subtitle, the badge of a simulated GPU, sizes and colours.

use crate::svg::{Anchor, Rect, Style, Svg};
use crate::text::shorten;

/// Width of every picture, px.
pub(crate) const WIDTH: f64 = 1200.0;

pub(crate) const INK: &str = "#1b1f24";
pub(crate) const SOFT_INK: &str = "#57606a";
/// Text on an area that is light, on either ground.
pub(crate) const ON_LIGHT: &str = "#111418";
pub(crate) const GRID: &str = "#d8dee4";

const TITLE: Style = Style::new(22.0, INK).bold();
const SUBTITLE: Style = Style::new(14.0, SOFT_INK);
const BADGE: Style = Style::new(14.0, "#5c3d00").anchor(Anchor::Middle).bold();
pub(crate) const LABEL: Style = Style::new(13.0, INK);
pub(crate) const TICK: Style = Style::new(13.0, SOFT_INK);

pub(crate) const SIMULATED: &str = "simulated GPU";

/// What a picture says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// What was selected.
    pub title: String,
    /// When, how many, and what is missing (lost, truncated).
    pub subtitle: String,
    /// The GPU behind the figures is a stand-in; the picture says so.
    pub simulated: bool,
}

impl Header {
    /// Draws title, subtitle and badge at the top; what follows begins below [`Self::BOTTOM`].
    pub(crate) fn draw(&self, svg: &mut Svg) {
        const MARGIN: f64 = 24.0;
        let mut room = WIDTH - 2.0 * MARGIN;
        if self.simulated {
            let width = BADGE.width(SIMULATED) + 16.0;
            let badge = Rect { x: WIDTH - MARGIN - width, y: 18.0, width, height: 26.0 };
            svg.rect(badge, "rx=\"13\" fill=\"#ffe2a8\" stroke=\"#b07d1a\"", None);
            svg.text(badge.x + width / 2.0, badge.y + 18.0, BADGE, SIMULATED);
            room -= width + MARGIN;
        }
        svg.text(MARGIN, 38.0, TITLE, &shorten(&self.title, TITLE.fits(room)));
        svg.text(MARGIN, 62.0, SUBTITLE, &shorten(&self.subtitle, SUBTITLE.fits(WIDTH - 2.0 * MARGIN)));
    }

    /// Where the header ends, px from the top.
    pub(crate) const BOTTOM: f64 = 72.0;
}

//! Colours of the parts of a latency: those of Okabe and Ito ("Color Universal Design", 2008), which people with any
//! common kind of colour blindness tell apart. What shares a colour is told apart by hatching.

use std::fmt::Write;

/// A colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hue {
    Black,
    Orange,
    Sky,
    Green,
    Yellow,
    Blue,
    Vermilion,
    Purple,
    Grey,
}

impl Hue {
    const ALL: [Self; 9] = [
        Self::Black,
        Self::Orange,
        Self::Sky,
        Self::Green,
        Self::Yellow,
        Self::Blue,
        Self::Vermilion,
        Self::Purple,
        Self::Grey,
    ];

    /// `#rrggbb`
    #[must_use]
    pub const fn hex(self) -> &'static str {
        match self {
            Self::Black => "#3b3f46",
            Self::Orange => "#e69f00",
            Self::Sky => "#56b4e9",
            Self::Green => "#009e73",
            Self::Yellow => "#f0e442",
            Self::Blue => "#0072b2",
            Self::Vermilion => "#d55e00",
            Self::Purple => "#cc79a7",
            Self::Grey => "#c4cad1",
        }
    }

    const fn id(self) -> &'static str {
        match self {
            Self::Black => "hatched-black",
            Self::Orange => "hatched-orange",
            Self::Sky => "hatched-sky",
            Self::Green => "hatched-green",
            Self::Yellow => "hatched-yellow",
            Self::Blue => "hatched-blue",
            Self::Vermilion => "hatched-vermilion",
            Self::Purple => "hatched-purple",
            Self::Grey => "hatched-grey",
        }
    }

    /// Whether text on it has to be white.
    pub(crate) const fn is_dark(self) -> bool {
        matches!(self, Self::Black | Self::Blue | Self::Green | Self::Vermilion)
    }
}

/// Attributes that fill a shape.
pub(crate) fn fill(hue: Hue, hatched: bool) -> String {
    if hatched { format!("fill=\"url(#{})\"", hue.id()) } else { format!("fill=\"{}\"", hue.hex()) }
}

/// The patterns that [`fill`] refers to.
pub(crate) fn defs() -> String {
    let mut defs = String::new();
    for hue in Hue::ALL {
        let _ = write!(
            defs,
            "<pattern id=\"{}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
             patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#ffffff\"/>\
             <rect width=\"3.4\" height=\"6\" fill=\"{}\"/></pattern>",
            hue.id(),
            hue.hex()
        );
    }
    defs
}

//! Pictures of latency as SVG: flame graphs, heatmaps, histograms, percentiles, and single requests.
//!
//! In: stacks with weights, latencies in nanoseconds, request ids as they came from outside. Out: one SVG document as
//! a string, equal input giving equal bytes. This crate does no I/O, knows nothing of captures or events, and trusts
//! no string that it is given: see [`text`] for what happens to hostile ones.
//!
//! The documents refer to nothing outside themselves. They are 1200 px wide, so that they fit a 16:9 slide at a
//! readable size, and carry details (exact ranges, counts, request ids) as `<title>` tooltips for a browser.

mod colour;
mod dark;
mod error;
mod flame;
mod folded;
mod frame;
mod heatmap;
mod histogram;
mod matrix;
mod part;
mod percentile;
mod request;
mod scale;
mod svg;
pub mod text;

pub use error::Error;
pub use flame::{FlameOptions, Palette, differential, flamegraph};
pub use folded::{Folded, Name};
pub use frame::Header;
pub use heatmap::{Axis, Fault, HeatmapInput, Lane, Loss, Point, Stretch, Strip, heatmap};
pub use histogram::{HistogramInput, Panel, Quantile, histogram};
pub use matrix::{MatrixCell, MatrixInput, Measure, matrix};
pub use part::Hue;
pub use percentile::{PercentileInput, Series, percentiles};
pub use request::{GpuBar, Part, Piece, RequestInput, StepBar, TokenBar, request};
pub use scale::duration;

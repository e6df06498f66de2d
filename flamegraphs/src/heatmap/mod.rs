//! Heatmaps: latency over time or over the token index.
//!
//! In: one point per token (or request). Out: columns × logarithmic rows of counts, with the ids of the slowest
//! requests of each cell, quantile lines where there are enough points, and marks where events were lost; below,
//! strips that show what devices did meanwhile.

mod draw;
mod grid;
mod quantile;
mod strips;

pub(crate) use draw::{DEFS, EMPTY, LOST, LOST_COLUMN, dark_shades, shade, time_range};

use crate::{Error, Header};
use std::ops::Range;

/// One latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point<'a> {
    /// Where on the axis: ns since its origin, or the token index.
    pub x: u64,
    /// The latency, ns.
    pub latency_ns: u64,
    /// Whose it is; shown (shortened) among the slowest of a cell. Empty: `(unknown)`.
    pub id: &'a str,
}

/// A stretch of time in which events were lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// ns since the origin of the axis, half-open.
    pub range: Range<u64>,
    /// What is missing: `1,204 events dropped`.
    pub what: String,
}

/// A device that the latencies depend on: drawn below them, on the same axis of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strip {
    /// Whose it is: `GPU 0 · NVIDIA H200`.
    pub name: String,
    pub lanes: Vec<Lane>,
    /// Where something held the device back (throttled it), and what.
    pub held: Vec<Stretch>,
    /// Where it failed.
    pub faults: Vec<Fault>,
}

/// One reading of a device over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// `utilisation`
    pub name: String,
    /// `%`
    pub unit: String,
    /// The value that fills the lane; its foot is 0.
    pub top: u64,
    /// (ns since the origin of the axis, value), in any order.
    pub points: Vec<(u64, u64)>,
}

/// Something that lasted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// ns since the origin of the axis, half-open.
    pub range: Range<u64>,
    /// What it was: `SwPowerCap`.
    pub what: String,
}

/// Something that happened at an instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// ns since the origin of the axis.
    pub at: u64,
    /// What it was: `Xid 79`.
    pub what: String,
}

/// What the columns are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Time since an origin, which `name` says: `time since the recording began`. Points outside are left out.
    Time {
        /// Name of the axis, without the unit.
        name: String,
        /// The half-open range shown, ns since the origin.
        range: Range<u64>,
    },
    /// The index of the token in its choice, equal bins.
    TokenIndex,
    /// The index of the token in its choice, bins that grow with the index.
    LogTokenIndex,
}

/// A heatmap to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeatmapInput<'a> {
    /// Title, subtitle, simulated or not.
    pub header: Header,
    /// What the columns are.
    pub axis: Axis,
    /// Name of the latency: `inter-token latency`.
    pub latency_name: String,
    /// What is counted, plural: `tokens`.
    pub count_name: String,
    /// The latencies, in any order.
    pub points: Vec<Point<'a>>,
    /// Where events were lost; only drawn on an axis of time.
    pub losses: Vec<Loss>,
    /// Devices beside them; only drawn on an axis of time.
    pub strips: Vec<Strip>,
}

/// Draws a heatmap, 1200 × 675 px, higher with strips.
///
/// A cell's colour is linear in its count, from a light blue that is told from the background to a dark one. Lines
/// show p50 and p99, each over the shortest windows of columns that hold enough points for it (n·(1−q) ≥ 10).
/// Columns without points are hatched grey, columns with losses are marked red at the top.
///
/// # Errors
/// [`Error::Empty`] when no point is inside the axis, [`Error::BadRange`].
pub fn heatmap(input: &HeatmapInput<'_>) -> Result<String, Error> {
    let grid = grid::Grid::new(input)?;
    Ok(draw::draw(input, &grid))
}

//! Why a picture could not be drawn.

/// Why a picture could not be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing in the selection.
    #[error("nothing to draw: the selection holds no {0}")]
    Empty(&'static str),
    /// The weights of all stacks do not fit 64 bits.
    #[error("the weights of the stacks add up to more than 64 bits hold")]
    WeightOverflow,
    /// The range of an axis holds nothing, or more columns than can be seen.
    #[error(
        "a range of time from {begin_ns} ns to {end_ns} ns cannot be drawn: it holds nothing, or too much"
    )]
    BadRange {
        /// First instant, ns.
        begin_ns: u64,
        /// End, ns.
        end_ns: u64,
    },
    /// The flame graph renderer refused.
    #[error("rendering the flame graph failed")]
    Render(#[from] std::io::Error),
}

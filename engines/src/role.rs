//! What a probe point means.

/// What a probe point means: the word in a profile (`role = "step"`), in the tables and in the reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// One execution of an engine.
    Step,
    /// Kernel or graph launch.
    Launch,
    GraphLaunch,
    /// The host waits for the GPU.
    Wait,
    Copy,
    EventRecord,
    /// May order streams, or tell that work is done, without waiting for it: polls, waits of one stream for another.
    Sync,
    /// What a stream is given from here on becomes a graph, and does not run.
    CaptureBegin,
    CaptureEnd,
    /// A stream ends: its handle may be another one's later.
    StreamEnd,
    /// A context ends, with all that is in it.
    ContextEnd,
    /// The dynamic loader finished a change of the mapped libraries.
    Loader,
    /// The site of marks.
    Mark,
    /// Opens a file.
    Open,
    /// Sets the shape of an engine's input.
    Shape,
    /// Asks an execution context for the shape of a tensor.
    AskedShape,
    /// Asks an engine for the data type of a tensor.
    DataType,
    /// Makes an execution context of an engine.
    CreatesContext,
    /// A function of NVTX.
    Nvtx,
    /// Anything else worth recording.
    Other,
}

impl Role {
    /// Name in profiles and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Launch => "launch",
            Self::GraphLaunch => "graph_launch",
            Self::Wait => "wait",
            Self::Copy => "copy",
            Self::EventRecord => "event_record",
            Self::Sync => "sync",
            Self::CaptureBegin => "capture_begin",
            Self::CaptureEnd => "capture_end",
            Self::StreamEnd => "stream_end",
            Self::ContextEnd => "context_end",
            Self::Loader => "loader",
            Self::Mark => "mark",
            Self::Open => "open",
            Self::Shape => "shape",
            Self::AskedShape => "asked_shape",
            Self::DataType => "data_type",
            Self::CreatesContext => "creates_context",
            Self::Nvtx => "nvtx",
            Self::Other => "other",
        }
    }
}

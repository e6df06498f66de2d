//! What the kernel side counts: every path that loses or refuses something has a counter, and every counter reaches
//! the ledger.

/// Index into the per-CPU `COUNTERS` array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Counter {
    /// Records written to the vital ring.
    VitalWritten = 0,
    /// Records lost because the vital ring was full.
    VitalDropped = 1,
    /// Records written to the bulk ring.
    BulkWritten = 2,
    /// Records lost because the bulk ring was full.
    BulkDropped = 3,
    /// Events lost because no scratch slot was free on the CPU.
    ScratchBusy = 4,
    /// Calls not recorded because they nest deeper than [`crate::call::MAX_DEPTH`].
    CallTooDeep = 5,
    /// Calls closed as unwound.
    CallUnwound = 6,
    /// Returns without an entry (the probe was attached while the call ran).
    ReturnWithoutEntry = 7,
    /// Calls not recorded because the map of open calls was full.
    OpenCallsFull = 8,
    /// Marks whose payload could not be read.
    MarkUnreadable = 9,
    /// Marks longer than [`crate::mark::MAX_BYTES`] or shorter than a header.
    MarkBadSize = 10,
    /// Off-CPU intervals lost because the map of sleeping threads was full.
    SleepersFull = 11,
    /// Target processes not followed because the map of targets was full.
    TargetsFull = 12,
    /// Children whose mappings could not be taken over from their parent: the map of spaces was full.
    SpacesFull = 13,
    /// Bytes of a socket that could not be read.
    SocketUnreadable = 14,
    /// Connections of targets that are encrypted: their requests are not seen.
    SocketTls = 15,
    /// Connections of targets that speak HTTP/2: their requests are not seen.
    SocketHttp2 = 16,
    /// Reads and writes of sockets through an io_uring: what they moved is not seen.
    SocketRing = 17,
    /// Reads and writes in ways that do not show their bytes (sendfile, splice, recvmmsg, sendmmsg): how many is known.
    SocketUnseen = 18,
    /// Instances of io_uring that targets made.
    RingsMade = 19,
    /// Stacks of calls and marks that were not walked since another thread's walk was interrupted on the CPU; tried again.
    CallStackBusy = 20,
}

impl Counter {
    /// All of them, in index order.
    pub const ALL: [Self; 21] = [
        Self::VitalWritten,
        Self::VitalDropped,
        Self::BulkWritten,
        Self::BulkDropped,
        Self::ScratchBusy,
        Self::CallTooDeep,
        Self::CallUnwound,
        Self::ReturnWithoutEntry,
        Self::OpenCallsFull,
        Self::MarkUnreadable,
        Self::MarkBadSize,
        Self::SleepersFull,
        Self::TargetsFull,
        Self::SpacesFull,
        Self::SocketUnreadable,
        Self::SocketTls,
        Self::SocketHttp2,
        Self::SocketRing,
        Self::SocketUnseen,
        Self::RingsMade,
        Self::CallStackBusy,
    ];

    /// Name in the ledger.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VitalWritten => "vital_written",
            Self::VitalDropped => "vital_dropped",
            Self::BulkWritten => "bulk_written",
            Self::BulkDropped => "bulk_dropped",
            Self::ScratchBusy => "scratch_busy",
            Self::CallTooDeep => "call_too_deep",
            Self::CallUnwound => "call_unwound",
            Self::ReturnWithoutEntry => "return_without_entry",
            Self::OpenCallsFull => "open_calls_full",
            Self::MarkUnreadable => "mark_unreadable",
            Self::MarkBadSize => "mark_bad_size",
            Self::SleepersFull => "sleepers_full",
            Self::TargetsFull => "targets_full",
            Self::SpacesFull => "spaces_full",
            Self::SocketUnreadable => "socket_unreadable",
            Self::SocketTls => "socket_tls",
            Self::SocketHttp2 => "socket_http2",
            Self::SocketRing => "socket_io_uring",
            Self::SocketUnseen => "socket_unseen",
            Self::RingsMade => "io_urings_made",
            Self::CallStackBusy => "call_stacks_put_off",
        }
    }

    /// Whether a count above zero means that something is missing from the capture.
    #[must_use]
    pub const fn is_loss(self) -> bool {
        !matches!(
            self,
            Self::VitalWritten
                | Self::BulkWritten
                | Self::CallUnwound
                | Self::SocketTls
                | Self::SocketHttp2
                | Self::SocketRing
                | Self::SocketUnseen
                | Self::RingsMade
                | Self::CallStackBusy
        )
    }
}

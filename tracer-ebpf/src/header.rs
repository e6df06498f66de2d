//! The first bytes of every record.

use bytemuck::{Pod, Zeroable};

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    Call = 1,
    Mark = 2,
    Sched = 3,
    Sample = 4,
    Process = 5,
    Socket = 6,
    Open = 7,
    CallStack = 8,
}

/// A record kind that this version does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKind(pub u16);

impl TryFrom<u16> for Kind {
    type Error = UnknownKind;

    fn try_from(value: u16) -> Result<Self, UnknownKind> {
        Ok(match value {
            1 => Self::Call,
            2 => Self::Mark,
            3 => Self::Sched,
            4 => Self::Sample,
            5 => Self::Process,
            6 => Self::Socket,
            7 => Self::Open,
            8 => Self::CallStack,
            other => return Err(UnknownKind(other)),
        })
    }
}

/// Beginning of every record in both rings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// [`Kind`] as a number.
    pub kind: u16,
    /// Bits whose meaning depends on the kind (`call::UNWOUND`, …).
    pub flags: u16,
    /// Bytes of the whole record: this header, the fixed part and the tail.
    pub size: u32,
    /// CLOCK_MONOTONIC ns at which the record was written.
    pub time_ns: u64,
    /// Process id, as seen in the initial pid namespace.
    pub tgid: u32,
    /// Thread id, as seen in the initial pid namespace.
    pub tid: u32,
    /// See [`crate::Target::start_ticks`].
    pub start_ticks: u64,
    /// CPU that wrote the record.
    pub cpu: u32,
    pub _pad: u32,
}

const _: () = assert!(size_of::<Header>() == 40);

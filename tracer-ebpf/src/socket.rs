//! `socket`: bytes that a target moved over a TCP connection that looks like HTTP, its end, and when held bytes left.

use bytemuck::{Pod, Zeroable};

use crate::Header;

/// Bytes were handed to the kernel, or it refused them (`result` < 0).
pub const SEND: u32 = 1;
/// Bytes were taken from the kernel; 0: the peer has closed its side.
pub const RECV: u32 = 2;
/// The connection changed state: `result` is the new one (include/net/tcp_states.h). No process is named.
pub const STATE: u32 = 3;
/// Bytes that a send left behind have been put on the wire: see `wire_until`. No process is named.
pub const WIRE: u32 = 4;

/// `result` of [`STATE`]: the connection is over.
pub const STATE_CLOSE: i64 = 7;
/// `result` of [`STATE`]: the peer has closed its side.
pub const STATE_CLOSE_WAIT: i64 = 8;
/// A state of which there is no record: it waits for connections.
pub const STATE_LISTEN: i64 = 10;

/// Most bytes of one send and of one receive that are captured.
pub const SEND_BYTES: usize = 4096;
pub const RECV_BYTES: usize = 2048;

/// The fixed part; `captured` bytes follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Socket {
    pub header: Header,
    /// The kernel's name for the socket, never used twice until reboot.
    pub cookie: u64,
    /// RECV: when bytes reached the socket that had none unread (CLOCK_MONOTONIC ns); 0: not seen.
    pub arrived_ns: u64,
    /// Bytes moved, or −errno; see the actions.
    pub result: i64,
    /// SEND, WIRE: sequence number (modulo 2^32) behind the last byte handed to the kernel.
    pub sent_until: u32,
    /// SEND, WIRE: sequence number behind the last byte put on the wire.
    pub wire_until: u32,
    pub action: u32,
    /// Number of the system call (x86-64).
    pub syscall: u32,
    pub local_port: u32,
    /// Bytes that follow.
    pub captured: u32,
}

const _: () = assert!(size_of::<Socket>() == 88);

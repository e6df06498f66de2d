//! Stacks as they travel in `sample` and `sched` records: a head, then words.

use bytemuck::{Pod, Zeroable};

/// Most frames of each kind in one record; of a deeper stack the leaf's side is kept.
pub const MAX_KERNEL_FRAMES: usize = 64;
pub const MAX_USER_FRAMES: usize = 128;
pub const MAX_PYTHON_FRAMES: usize = 96;

/// Most words of one stack: an address per kernel and user frame, two words per Python frame.
pub const STACK_WORDS: usize = MAX_KERNEL_FRAMES + MAX_USER_FRAMES + 2 * MAX_PYTHON_FRAMES;

/// What follows it: kernel addresses, user addresses, Python frames; each leaf first.
///
/// A Python frame is two words: the address of its code object with [`PYTHON_ENTRY`], then the distance of its
/// instruction from that address in bytes (low half) and the first line of the code (high half).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StackHead {
    pub kernel_frames: u8,
    pub user_frames: u8,
    pub python_frames: u8,
    /// Why the user part ends where it does: [`Cut`] as a number.
    pub cut: u8,
    /// Steps of the walk that went by frame pointers, for want of a table (255: that many or more).
    pub frame_pointer_steps: u8,
    /// `PYTHON_*` flags.
    pub flags: u8,
    pub _pad: [u8; 2],
}

const _: () = assert!(size_of::<StackHead>() == 8);

/// In a Python frame's first word: the interpreter's C function was entered for this frame. Python frames that follow
/// belong to the next one of it on the stack.
pub const PYTHON_ENTRY: u64 = 1 << 63;
/// In a Python frame's first word: where the address is.
pub const PYTHON_CODE: u64 = (1 << 56) - 1;

/// The process runs Python, and its thread is not known to (yet).
pub const PYTHON_NO_THREAD: u8 = 1;
/// There are more Python frames than fit.
pub const PYTHON_DEPTH: u8 = 2;
/// A Python frame could not be read.
pub const PYTHON_UNREADABLE: u8 = 4;

/// Why a walk through a user stack ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Cut {
    /// At the thread's first function: nothing is missing.
    None = 0,
    /// There are more frames than fit.
    Depth = 1,
    /// The code is in no mapping that was known.
    Unmapped = 2,
    /// The code's table was being built.
    TablePending = 3,
    /// There is no table for the code, and its frame pointer leads nowhere.
    FramePointers = 4,
    /// The stack could not be read (a page that is not in memory, or no stack).
    Unreadable = 5,
    /// The code keeps its frame in a way that tables cannot say.
    Unsupported = 6,
    /// The next frame would not be above this one: the stack was switched, or is damaged.
    NoProgress = 7,
    /// The frame needs a register whose value is lost.
    RegisterLost = 8,
    /// The thread had no registers of user space.
    NoRegisters = 9,
    /// An exception's handler is being entered: what the stack holds of its frames is overwritten.
    Exception = 10,
}

/// A number that is no [`Cut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownCut(pub u8);

impl TryFrom<u8> for Cut {
    type Error = UnknownCut;

    fn try_from(value: u8) -> Result<Self, UnknownCut> {
        Ok(match value {
            0 => Self::None,
            1 => Self::Depth,
            2 => Self::Unmapped,
            3 => Self::TablePending,
            4 => Self::FramePointers,
            5 => Self::Unreadable,
            6 => Self::Unsupported,
            7 => Self::NoProgress,
            8 => Self::RegisterLost,
            9 => Self::NoRegisters,
            10 => Self::Exception,
            other => return Err(UnknownCut(other)),
        })
    }
}

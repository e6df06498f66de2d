//! Bytes of the kernel's rings → events.
//!
//! In: one record. Out: the event, with its stack as raw addresses where it has one. A record that is too short, of
//! an unknown kind or inconsistent is a typed error that the caller counts; nothing here panics on input.

use bytemuck::Pod;
use thiserror::Error;
use tracer_abi::{
    Header, Kind, call, call_stack, mark, open, process, sample, sched, socket,
    stack::{
        Cut, PYTHON_CODE, PYTHON_DEPTH, PYTHON_ENTRY, PYTHON_NO_THREAD, PYTHON_UNREADABLE, STACK_WORDS,
        StackHead,
    },
};

use super::{
    Call, CallEnd, Mark, MarkEvent, Origin, Process, ProcessAction, ProcessId, Sample, Sched, StackCut,
    http::{SocketAction, SocketIo},
    mark::MarkError,
};

/// Why a record was refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RecordError {
    #[error("record of {actual} bytes where at least {needed} are needed")]
    TooShort { actual: usize, needed: usize },
    #[error("record kind {0} is unknown to this version")]
    UnknownKind(u16),
    #[error("action {0} is unknown to this version")]
    UnknownAction(u32),
    #[error("mark: {0}")]
    Mark(#[from] MarkError),
}

impl RecordError {
    /// Name of its counter in the ledger.
    #[must_use]
    pub const fn counter(&self) -> &'static str {
        match self {
            Self::TooShort { .. } => "record_too_short",
            Self::UnknownKind(_) => "record_unknown_kind",
            Self::UnknownAction(_) => "record_unknown_action",
            Self::Mark(_) => "mark_malformed",
        }
    }
}

/// A stack as the kernel gave it, leaf first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawStack {
    /// Addresses.
    pub kernel: Vec<u64>,
    pub user: Vec<u64>,
    pub python: Vec<PythonFrame>,
    pub cut: Option<StackCut>,
    pub frame_pointer_steps: u32,
    /// What is known to be wrong with the Python frames.
    pub python_state: PythonState,
}

/// A frame as the interpreter keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PythonFrame {
    /// Address of its code object, and the first line of that.
    pub code: u64,
    pub first_line: u32,
    /// Where its instruction is, in bytes behind `code`.
    pub instruction: u32,
    /// The interpreter's C function was entered for it.
    pub is_entry: bool,
}

/// What became of the Python frames of a stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PythonState {
    /// All there, or no Python.
    #[default]
    Whole,
    /// The thread's state was not known.
    NoThread,
    /// More than fit.
    Depth,
    /// A frame could not be read.
    Unreadable,
}

/// What a program opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedFile {
    /// Descriptor of the directory that a relative path begins in, or `tracer_abi::open::WORKING_DIRECTORY`.
    pub folder: i32,
    /// As the program says it.
    pub path: String,
}

/// Names the stack of a call or mark among those of its thread; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StackKey(pub u32);

/// A decoded record.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `stack` of the event is not set yet: it is that of the last [`Record::CallStack`] of its thread with the key.
    Call(Call, StackKey),
    /// As with calls, of those marks that have a stack.
    Mark(MarkEvent, StackKey),
    CallStack(Origin, StackKey, RawStack),
    /// `stack` of the event is not set yet.
    Sched(Sched, RawStack),
    /// `stack` of the event is not set yet.
    Sample(Sample, RawStack),
    Process(Process),
    Socket(SocketIo),
    /// A file that may be an engine is to be opened.
    Open(Origin, OpenedFile),
}

impl Record {
    /// Decodes one record.
    ///
    /// # Errors
    /// The bytes are not a record of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let header: Header = read(bytes, 0)?;
        let kind = Kind::try_from(header.kind).map_err(|unknown| RecordError::UnknownKind(unknown.0))?;
        let origin = Origin {
            time_ns: header.time_ns,
            process: ProcessId { tgid: header.tgid, start_ticks: header.start_ticks },
            tid: header.tid,
            cpu: header.cpu,
        };
        match kind {
            Kind::Call => {
                let record: tracer_abi::Call = read(bytes, 0)?;
                Ok(Self::Call(call_of(&record), StackKey(record.stack)))
            }
            Kind::Mark => {
                let [payload_bytes, stack]: [u32; 2] = read(bytes, size_of::<Header>())?;
                let payload = slice(bytes, mark::FIXED_BYTES, payload_bytes as usize)?;
                Ok(Self::Mark(MarkEvent { origin, mark: Mark::decode(payload)? }, StackKey(stack)))
            }
            Kind::Sched => sched_of(bytes, header, origin),
            Kind::Sample => sample_of(bytes, header, origin),
            Kind::CallStack => {
                let [key, _]: [u32; 2] = read(bytes, size_of::<Header>())?;
                let head: StackHead = read(bytes, size_of::<Header>() + 8)?;
                Ok(Self::CallStack(origin, StackKey(key), stack(bytes, call_stack::FIXED_BYTES, head)?))
            }
            Kind::Process => process_of(&read(bytes, 0)?, origin),
            Kind::Socket => socket_of(bytes, origin),
            Kind::Open => {
                let record: tracer_abi::Open = read(bytes, 0)?;
                let length = (record.path_bytes as usize).min(open::MAX_PATH_BYTES);
                let path = slice(bytes, size_of::<tracer_abi::Open>(), length)?;
                let path = String::from_utf8_lossy(path).into_owned();
                Ok(Self::Open(origin, OpenedFile { folder: record.folder, path }))
            }
        }
    }
}

fn socket_of(bytes: &[u8], origin: Origin) -> Result<Record, RecordError> {
    let record: tracer_abi::Socket = read(bytes, 0)?;
    let action = match (record.action, record.result) {
        (socket::SEND, result) => {
            SocketAction::Send { result, sent_until: record.sent_until, wire_until: record.wire_until }
        }
        (socket::RECV, result) => SocketAction::Recv {
            bytes: u64::try_from(result).unwrap_or(0),
            arrived_ns: (record.arrived_ns != 0).then_some(record.arrived_ns),
        },
        (socket::STATE, socket::STATE_CLOSE) => SocketAction::Closed,
        (socket::STATE, socket::STATE_CLOSE_WAIT) => SocketAction::PeerClosed,
        (socket::WIRE, _) => SocketAction::Wire { wire_until: record.wire_until },
        (action, _) => return Err(RecordError::UnknownAction(action)),
    };
    let captured = slice(bytes, size_of::<tracer_abi::Socket>(), record.captured as usize)?;
    Ok(Record::Socket(SocketIo {
        origin,
        cookie: record.cookie,
        action,
        bytes: captured.to_vec(),
        // A port has 16 bits.
        local_port: record.local_port as u16,
    }))
}

/// The calls that a thread was in when the recording stopped, outermost first.
pub fn open_calls_of(
    tid: u32,
    thread: &call::ThreadCalls,
    stop_ns: u64,
) -> impl Iterator<Item = (Call, StackKey)> + use<'_> {
    let process = ProcessId { tgid: thread.tgid, start_ticks: thread.start_ticks };
    let origin = Origin { time_ns: stop_ns, process, tid, cpu: 0 };
    (0u32..).zip(&thread.calls).take(thread.depth as usize).map(move |(depth, open)| {
        let call = Call {
            origin,
            point: open.point,
            parent_point: (open.parent_point != call::NO_PARENT).then_some(open.parent_point),
            depth,
            begin_ns: open.begin_ns,
            end_ns: stop_ns,
            end: CallEnd::Open,
            sp: open.sp,
            args: open.args,
            ret: 0,
            stack: None,
        };
        (call, StackKey(open.stack))
    })
}

fn call_of(record: &tracer_abi::Call) -> Call {
    let header = &record.header;
    let end = match header.flags {
        call::RETURNED => CallEnd::Returned,
        call::UNWOUND => CallEnd::Unwound,
        call::EXITED => CallEnd::Exited,
        _ => CallEnd::EntryOnly,
    };
    Call {
        origin: Origin {
            time_ns: header.time_ns,
            process: ProcessId { tgid: header.tgid, start_ticks: header.start_ticks },
            tid: header.tid,
            cpu: header.cpu,
        },
        point: record.point,
        parent_point: (record.parent_point != call::NO_PARENT).then_some(record.parent_point),
        depth: record.depth,
        begin_ns: record.begin_ns,
        end_ns: record.end_ns,
        end,
        sp: record.sp,
        args: record.args,
        ret: record.ret,
        stack: None,
    }
}

fn sched_of(bytes: &[u8], header: Header, origin: Origin) -> Result<Record, RecordError> {
    const FIELDS: usize = size_of::<Header>();
    let [off_ns, wake_ns]: [u64; 2] = read(bytes, FIELDS)?;
    let [waker_tgid, waker_tid, prev_state, syscall]: [u32; 4] = read(bytes, FIELDS + 16)?;
    let head: StackHead = read(bytes, FIELDS + 32)?;
    let event = Sched {
        origin,
        off_ns,
        wake_ns: (wake_ns != 0).then_some(wake_ns),
        waker_tgid,
        waker_tid,
        prev_state,
        syscall: Some(syscall).filter(|syscall| syscall.cast_signed() >= 0),
        preempted: header.flags & sched::PREEMPTED != 0,
        open: header.flags & sched::OPEN != 0,
        stack: None,
    };
    Ok(Record::Sched(event, stack(bytes, sched::FIXED_BYTES, head)?))
}

fn sample_of(bytes: &[u8], header: Header, origin: Origin) -> Result<Record, RecordError> {
    const FIELDS: usize = size_of::<Header>();
    let period_ns: u64 = read(bytes, FIELDS)?;
    let head: StackHead = read(bytes, FIELDS + 8)?;
    let event =
        Sample { origin, period_ns, kernel_mode: header.flags & sample::KERNEL_MODE != 0, stack: None };
    Ok(Record::Sample(event, stack(bytes, sample::FIXED_BYTES, head)?))
}

fn process_of(record: &tracer_abi::Process, origin: Origin) -> Result<Record, RecordError> {
    let action = match record.action {
        process::FORK => ProcessAction::Fork,
        process::EXEC => ProcessAction::Exec,
        process::EXIT => ProcessAction::Exit,
        other => return Err(RecordError::UnknownAction(other)),
    };
    let length = record.comm.iter().position(|byte| *byte == 0).unwrap_or(record.comm.len());
    Ok(Record::Process(Process {
        origin,
        action,
        parent_tgid: record.parent_tgid,
        parent_tid: record.parent_tid,
        comm: String::from_utf8_lossy(&record.comm[..length]).into_owned(),
    }))
}

fn stack(bytes: &[u8], at: usize, head: StackHead) -> Result<RawStack, RecordError> {
    let [kernel, user, python] = [head.kernel_frames, head.user_frames, head.python_frames].map(usize::from);
    let count = (kernel + user + 2 * python).min(STACK_WORDS);
    let (words, _) = slice(bytes, at, 8 * count)?.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_ne_bytes(*word));
    let kernel = words.by_ref().take(kernel).collect();
    let user = words.by_ref().take(user).collect();
    let mut frames = Vec::with_capacity(python);
    while let (Some(code), Some(place)) = (words.next(), words.next()) {
        frames.push(PythonFrame {
            code: code & PYTHON_CODE,
            first_line: (place >> 32) as u32,
            instruction: place as u32,
            is_entry: code & PYTHON_ENTRY != 0,
        });
    }
    let cut = Cut::try_from(head.cut).map_err(|unknown| RecordError::UnknownAction(u32::from(unknown.0)))?;
    Ok(RawStack {
        kernel,
        user,
        python: frames,
        cut: cut_of(cut),
        frame_pointer_steps: u32::from(head.frame_pointer_steps),
        python_state: match head.flags {
            flags if flags & PYTHON_NO_THREAD != 0 => PythonState::NoThread,
            flags if flags & PYTHON_DEPTH != 0 => PythonState::Depth,
            flags if flags & PYTHON_UNREADABLE != 0 => PythonState::Unreadable,
            _ => PythonState::Whole,
        },
    })
}

fn cut_of(cut: Cut) -> Option<StackCut> {
    Some(match cut {
        Cut::None => return None,
        Cut::Depth => StackCut::Depth,
        Cut::Unmapped => StackCut::Unmapped,
        Cut::TablePending => StackCut::TablePending,
        Cut::FramePointers => StackCut::FramePointers,
        Cut::Unreadable => StackCut::Unreadable,
        Cut::Unsupported => StackCut::Unsupported,
        Cut::NoProgress => StackCut::NoProgress,
        Cut::RegisterLost => StackCut::RegisterLost,
        Cut::NoRegisters => StackCut::NoRegisters,
        Cut::Exception => StackCut::Exception,
    })
}

fn slice(bytes: &[u8], at: usize, length: usize) -> Result<&[u8], RecordError> {
    let needed = at.saturating_add(length);
    bytes.get(at..needed).ok_or(RecordError::TooShort { actual: bytes.len(), needed })
}

fn read<T: Pod>(bytes: &[u8], at: usize) -> Result<T, RecordError> {
    Ok(bytemuck::pod_read_unaligned(slice(bytes, at, size_of::<T>())?))
}

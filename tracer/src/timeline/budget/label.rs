//! Names of the parts of a budget, and of what threads sleep on.

/// A part of a token's latency; what each means is told in [`budget`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Label {
    EventLoopLag,
    Queue,
    OtherSteps,
    HostRunning,
    HostRunqueue,
    HostBlocked,
    Enqueue,
    GpuWait,
    GpuSpan,
    NeighbourPrefill,
    HostObserved,
    SyncWake,
    Deliver,
    Unattributed,
    /// After the delivery, and so no part of the latency.
    NagleHold,
}

impl Label {
    /// Those that sum to the latency, in the order in which a token usually passes them.
    pub const PARTS: [Self; 14] = [
        Self::EventLoopLag,
        Self::Queue,
        Self::OtherSteps,
        Self::HostRunning,
        Self::HostRunqueue,
        Self::HostBlocked,
        Self::Enqueue,
        Self::GpuWait,
        Self::GpuSpan,
        Self::NeighbourPrefill,
        Self::HostObserved,
        Self::SyncWake,
        Self::Deliver,
        Self::Unattributed,
    ];

    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EventLoopLag => "event_loop_lag",
            Self::Queue => "queue",
            Self::OtherSteps => "other_steps",
            Self::HostRunning => "host_running",
            Self::HostRunqueue => "host_runqueue",
            Self::HostBlocked => "host_blocked",
            Self::Enqueue => "enqueue",
            Self::GpuWait => "gpu_wait",
            Self::GpuSpan => "gpu_span",
            Self::NeighbourPrefill => "neighbour_prefill",
            Self::HostObserved => "host_observed",
            Self::SyncWake => "sync_wake",
            Self::Deliver => "deliver",
            Self::Unattributed => "unattributed",
            Self::NagleHold => "nagle_hold",
        }
    }

    /// What it is, for somebody who reads a report.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::EventLoopLag => "the program had not read the request yet",
            Self::Queue => "the request waited to be taken into a batch",
            Self::OtherSteps => "the engine ran steps for others",
            Self::HostRunning => "the program ran, before the step",
            Self::HostRunqueue => "a thread could run and had no CPU",
            Self::HostBlocked => "a thread slept",
            Self::Enqueue => "the step was being enqueued",
            Self::GpuWait => "the GPU had not begun the step",
            Self::GpuSpan => "the GPU ran the step",
            Self::NeighbourPrefill => "the step had prompts of others, and took longer",
            Self::HostObserved => "the host waited for the step (no GPU times)",
            Self::SyncWake => "the GPU was done, the host's wait not",
            Self::Deliver => "the program ran, after the step",
            Self::Unattributed => "nothing is known of the thread",
            Self::NagleHold => "the kernel held the bytes back",
        }
    }

    /// Whether its bounds are as good as the device's clock.
    #[must_use]
    pub const fn is_gpu(self) -> bool {
        matches!(self, Self::GpuWait | Self::GpuSpan | Self::NeighbourPrefill | Self::SyncWake)
    }
}

/// What a thread slept on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Blocked {
    /// A lock, a condition, a channel.
    Futex,
    /// Any of several descriptors: epoll, poll, select.
    Poll,
    /// Data from a socket, or a connection.
    SocketRead,
    /// Room in a socket: its reader does not read.
    SocketWrite,
    /// A pipe or an eventfd.
    Pipe,
    /// Time.
    Sleep,
    Disk,
    /// Memory that is not there, or that others hold.
    Memory,
    /// NVIDIA's kernel driver.
    Gpu,
    Child,
    /// Something else, or it is not known.
    Other,
}

impl Blocked {
    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Futex => "futex",
            Self::Poll => "poll",
            Self::SocketRead => "socket_read",
            Self::SocketWrite => "socket_write",
            Self::Pipe => "pipe",
            Self::Sleep => "sleep",
            Self::Disk => "disk",
            Self::Memory => "memory",
            Self::Gpu => "gpu_driver",
            Self::Child => "child",
            Self::Other => "other",
        }
    }

    /// What it is, for somebody who reads a report.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Futex => "waited for a lock, a condition or a channel",
            Self::Poll => "waited for any of several descriptors",
            Self::SocketRead => "waited for data from a socket",
            Self::SocketWrite => "a socket was full: its client does not read",
            Self::Pipe => "waited for a pipe or an eventfd",
            Self::Sleep => "somebody slept on purpose",
            Self::Disk => "waited for a disk",
            Self::Memory => "waited for memory",
            Self::Gpu => "waited in NVIDIA's kernel driver",
            Self::Child => "waited for a child process",
            Self::Other => "a thread slept; on what is not known",
        }
    }

    /// By the names of the kernel functions of a stack, leaf first.
    ///
    /// ```
    /// use tracer::timeline::budget::Blocked;
    /// let stack = ["__schedule", "schedule", "futex_do_wait", "__futex_wait", "do_futex"];
    /// assert_eq!(Blocked::by_stack(stack), Blocked::Futex);
    /// ```
    #[must_use]
    pub fn by_stack<'a>(functions: impl IntoIterator<Item = &'a str>) -> Self {
        /// Beginnings of the names of functions; the first frame that has one decides.
        const WAITS: &[(&str, Blocked)] = &[
            ("futex_", Blocked::Futex),
            ("__futex_", Blocked::Futex),
            ("do_futex", Blocked::Futex),
            ("ep_poll", Blocked::Poll),
            ("do_epoll_wait", Blocked::Poll),
            ("do_sys_poll", Blocked::Poll),
            ("do_poll", Blocked::Poll),
            ("do_select", Blocked::Poll),
            ("sk_stream_wait_memory", Blocked::SocketWrite),
            ("sock_alloc_send", Blocked::SocketWrite),
            ("unix_wait_for_peer", Blocked::SocketWrite),
            ("sk_wait_data", Blocked::SocketRead),
            ("__skb_wait_for_more_packets", Blocked::SocketRead),
            ("unix_stream_data_wait", Blocked::SocketRead),
            ("unix_stream_read", Blocked::SocketRead),
            ("inet_csk_accept", Blocked::SocketRead),
            ("inet_csk_wait_for_connect", Blocked::SocketRead),
            ("pipe_read", Blocked::Pipe),
            ("anon_pipe_read", Blocked::Pipe),
            ("pipe_write", Blocked::Pipe),
            ("anon_pipe_write", Blocked::Pipe),
            ("eventfd_", Blocked::Pipe),
            ("do_nanosleep", Blocked::Sleep),
            ("hrtimer_nanosleep", Blocked::Sleep),
            ("io_schedule", Blocked::Disk),
            ("folio_wait", Blocked::Disk),
            ("jbd2_", Blocked::Disk),
            ("blk_", Blocked::Disk),
            ("nv_", Blocked::Gpu),
            ("nvidia_", Blocked::Gpu),
            ("uvm_", Blocked::Gpu),
            ("_nv0", Blocked::Gpu),
            ("do_wait", Blocked::Child),
            ("rwsem_down", Blocked::Memory),
            ("handle_mm_fault", Blocked::Memory),
            ("do_user_addr_fault", Blocked::Memory),
        ];
        let mut frames = functions.into_iter();
        frames
            .find_map(|name| WAITS.iter().find(|(start, _)| name.starts_with(start)).map(|(_, on)| *on))
            .unwrap_or(Self::Other)
    }

    /// Whether whoever woke the thread is what it waited for: a thread that gave it something. Timers, disks and
    /// network cards wake on behalf of whichever thread they interrupt.
    pub(crate) const fn is_for_a_thread(self) -> bool {
        matches!(self, Self::Futex | Self::Poll | Self::SocketRead | Self::Pipe)
    }

    /// The thread was held, and not waiting for a token.
    pub(super) const fn is_held(self) -> bool {
        matches!(self, Self::SocketWrite | Self::Disk | Self::Memory)
    }
}

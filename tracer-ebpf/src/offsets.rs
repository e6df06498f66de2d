//! Where the running kernel keeps what the programs read, from its BTF.

use bytemuck::{Pod, Zeroable};

/// Byte offsets in kernel structs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Offsets {
    /// `task_struct.pid`; `tgid` follows it.
    pub task_pid: u32,
    /// `task_struct.start_boottime` (ns).
    pub task_start_boottime: u32,
    /// `task_struct.signal`.
    pub task_signal: u32,
    /// `signal_struct.live`: threads that have not exited.
    pub signal_live: u32,
    /// `task_struct.comm`.
    pub task_comm: u32,
    /// `task_struct.__state`.
    pub task_state: u32,
    /// 1: `sched_switch` passes the previous task's state as its fourth argument (Linux ≥ 5.18).
    pub switch_has_state: u32,
    /// `tcp_sock.write_seq` and `tcp_sock.snd_nxt`; 0: this kernel's sockets are not followed.
    pub tcp_write_seq: u32,
    pub tcp_snd_nxt: u32,
    /// `sock_common.skc_num`: the local port.
    pub sock_num: u32,
    /// `socket.sk`.
    pub socket_sk: u32,
    /// From a task to the file of a descriptor: `task_struct.files`, `files_struct.fdt`, `fdtable.fd`,
    /// `file.private_data`.
    pub task_files: u32,
    pub files_fdt: u32,
    pub fdt_fd: u32,
    pub file_private_data: u32,
}

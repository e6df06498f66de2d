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
    /// Probes of returns that are pending on a thread's stack, and the page where single-stepped instructions are:
    /// `task_struct.{utask,mm}`, `uprobe_task.{return_instances,vaddr,xol_vaddr}`,
    /// `return_instance.{orig_ret_vaddr,next,chained}`, `mm_struct.uprobes_state.xol_area`, `xol_area.vaddr`.
    /// `task_utask` is 0 where this kernel does not describe all of them.
    pub task_utask: u32,
    pub task_mm: u32,
    pub utask_returns: u32,
    pub utask_vaddr: u32,
    pub utask_xol_vaddr: u32,
    pub return_address: u32,
    pub return_next: u32,
    pub return_chained: u32,
    pub mm_xol_area: u32,
    pub xol_vaddr: u32,
}

//! Maps and small helpers that every program uses.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{
    Global,
    bindings::BPF_RB_NO_WAKEUP,
    helpers::{bpf_get_current_pid_tgid, bpf_get_smp_processor_id, bpf_ktime_get_ns, generated},
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use tracer_abi::{
    Counter, Header, Kind, MAX_POINTS, MAX_TARGETS, MarkRecord, Offsets, Socket, Target, socket::SEND_BYTES,
};

#[map]
pub(crate) static VITAL: RingBuf = RingBuf::with_byte_size(16 << 20, 0);
#[map]
pub(crate) static BULK: RingBuf = RingBuf::with_byte_size(32 << 20, 0);
#[map]
pub(crate) static TARGETS: HashMap<u32, Target> = HashMap::with_max_entries(MAX_TARGETS, 0);
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Counter::ALL.len() as u32, 0);
#[map]
static HITS: PerCpuArray<u64> = PerCpuArray::with_max_entries(MAX_POINTS, 0);
#[map]
static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(SCRATCH_SLOTS, 0);

#[unsafe(no_mangle)]
pub(crate) static OFFSETS: Global<Offsets> = Global::new(Offsets {
    task_pid: 0,
    task_start_boottime: 0,
    task_signal: 0,
    signal_live: 0,
    task_comm: 0,
    task_state: 0,
    switch_has_state: 0,
    tcp_write_seq: 0,
    tcp_snd_nxt: 0,
    sock_num: 0,
    socket_sk: 0,
    task_files: 0,
    files_fdt: 0,
    fdt_fd: 0,
    file_private_data: 0,
    task_utask: 0,
    task_mm: 0,
    utask_returns: 0,
    utask_vaddr: 0,
    utask_xol_vaddr: 0,
    return_address: 0,
    return_next: 0,
    return_chained: 0,
    mm_xol_area: 0,
    xol_vaddr: 0,
});

/// One of the [`OFFSETS`]. Its value is known to the verifier, since its map is read-only; all of them at once would be
/// copied one by one.
macro_rules! offset {
    ($member:ident) => {{
        let offsets = (&raw const $crate::programs::common::OFFSETS).cast::<tracer_abi::Offsets>();
        // SAFETY: `Global` is transparent; it holds offsets from the beginning, and the loader writes before any program runs.
        unsafe { (&raw const (*offsets).$member).read_volatile() }
    }};
}
pub(crate) use offset;

/// Reads a member of a kernel structure by a plain load.
///
/// # Safety
/// `base` is a pointer of whose type the verifier knows that it has this member there.
#[inline(always)]
pub(crate) unsafe fn member<T: Copy>(base: u64, offset: u32) -> T {
    // SAFETY: by the caller's promise, which the verifier checks.
    unsafe { ((base + u64::from(offset)) as *const T).read_volatile() }
}

/// Slots per CPU: a program may be preempted by another one on the same CPU, so one slot is not enough.
const SCRATCH_SLOTS: u32 = 4;

/// Room for one record that is too big for the stack, claimed by `busy`.
#[repr(C)]
pub(crate) struct Scratch {
    busy: u64,
    pub(crate) bytes: ScratchBytes,
}

/// Room for a `Socket` whose bytes are copied to any place below [`SEND_BYTES`].
pub(crate) type ScratchBytes = [u8; size_of::<Socket>() + 2 * SEND_BYTES];

const _: () = assert!(size_of::<ScratchBytes>() >= size_of::<MarkRecord>());

/// Counts on this CPU. A program preempted between the read and the write of its own CPU's counter could lose a
/// count, so the addition is atomic.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    add(COUNTERS.get_ptr_mut(counter as u32));
}

#[inline(always)]
pub(crate) fn count_hit(point: u32) {
    add(HITS.get_ptr_mut(point));
}

#[inline(always)]
fn add(cell: Option<*mut u64>) {
    if let Some(cell) = cell {
        // SAFETY: the verifier knows `cell` as a valid, aligned map value. `core` offers no atomic read-modify-write
        // on this target, though its instruction set has them.
        unsafe { asm!("lock *(u64 *)({cell} + 0) += {one}", cell = in(reg) cell, one = in(reg) 1u64) };
    }
}

/// The same value, of which the compiler knows nothing: so that it keeps the comparison that follows, which the
/// verifier needs to see.
#[inline(always)]
pub(crate) fn opaque(value: u64) -> u64 {
    let mut value = value;
    // SAFETY: moves a register to itself. (With no instruction, its line would stand twice in the line table, which
    // the verifier refuses.)
    unsafe { asm!("{value} = {value}", value = inout(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Atomically sets `cell` to `value`; returns what it was.
///
/// # Safety
/// `cell` is a valid, aligned map value.
#[inline(always)]
pub(crate) unsafe fn exchange(cell: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: by the caller's promise.
    unsafe { asm!("{value} = xchg_64({cell} + 0, {value})", cell = in(reg) cell, value = inout(reg) value) };
    value
}

/// Runs `f` with a scratch slot of this CPU, or counts that none was free.
#[inline(always)]
pub(crate) fn with_scratch(f: impl FnOnce(&mut ScratchBytes)) {
    let mut index = 0;
    while index < SCRATCH_SLOTS {
        if let Some(slot) = SCRATCH.get_ptr_mut(index) {
            // SAFETY: a valid map value; `busy` is only accessed atomically.
            if unsafe { exchange(&raw mut (*slot).busy, 1) } == 0 {
                // SAFETY: the claim above makes this program the only user of `bytes`.
                f(unsafe { &mut (*slot).bytes });
                // SAFETY: as above.
                unsafe { exchange(&raw mut (*slot).busy, 0) };
                return;
            }
        }
        index += 1;
    }
    count(Counter::ScratchBusy);
}

/// The value of a key, which begins as what `zero` holds: a value that is too big for the stack. `None`: the map is full.
#[inline(always)]
pub(crate) fn entry<K, V>(map: &HashMap<K, V>, key: K, zero: &Array<V>) -> Option<*mut V> {
    if let Some(value) = map.get_ptr_mut(&key) {
        return Some(value);
    }
    map.insert(&key, zero.get(0)?, 0).ok()?;
    map.get_ptr_mut(&key)
}

/// The target that is running, with the ids of the current thread: (target, tgid, tid).
#[inline(always)]
pub(crate) fn current_target() -> Option<(Target, u32, u32)> {
    let id = bpf_get_current_pid_tgid();
    let (tgid, tid) = ((id >> 32) as u32, id as u32);
    // SAFETY: the value is copied at once; user space writes whole values only.
    let target = unsafe { TARGETS.get(tgid) }?;
    Some((*target, tgid, tid))
}

#[inline(always)]
pub(crate) fn now_ns() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
pub(crate) fn header(
    kind: Kind,
    flags: u16,
    size: usize,
    time_ns: u64,
    target: &Target,
    tgid: u32,
    tid: u32,
) -> Header {
    Header {
        kind: kind as u16,
        flags,
        size: size as u32,
        time_ns,
        tgid,
        tid,
        start_ticks: target.start_ticks,
        // SAFETY: the helper has no preconditions.
        cpu: unsafe { bpf_get_smp_processor_id() },
        _pad: 0,
    }
}

/// Which ring a record goes to; each has its own pair of counters.
#[derive(Clone, Copy)]
pub(crate) enum Ring {
    Vital,
    Bulk,
}

/// Copies `size` bytes at `record` into a ring, without waking anyone: user space drains on a timer.
///
/// # Safety
/// `record` points to at least `size` readable bytes that the verifier knows the bounds of.
#[inline(always)]
pub(crate) unsafe fn output(ring: Ring, record: *const c_void, size: u64) {
    let (map, written, dropped) = match ring {
        Ring::Vital => (&VITAL, Counter::VitalWritten, Counter::VitalDropped),
        Ring::Bulk => (&BULK, Counter::BulkWritten, Counter::BulkDropped),
    };
    // SAFETY: by the caller's promise; the map is a ring buffer.
    let failed = unsafe {
        generated::bpf_ringbuf_output(
            core::ptr::from_ref(map).cast_mut().cast(),
            record.cast_mut(),
            size,
            u64::from(BPF_RB_NO_WAKEUP),
        )
    };
    count(if failed == 0 { written } else { dropped });
}

/// Reads a plain value at a kernel address; zeroes if that fails.
#[inline(always)]
pub(crate) fn read_kernel<T: bytemuck::Zeroable>(address: u64) -> T {
    let mut value = T::zeroed();
    // SAFETY: `value` is as long as said; the helper checks the source.
    unsafe {
        generated::bpf_probe_read_kernel(
            (&raw mut value).cast(),
            size_of::<T>() as u32,
            address as *const c_void,
        );
    }
    value
}

/// Reads a plain value of user space; `None` if that fails.
#[inline(always)]
pub(crate) fn read_user<T: bytemuck::Zeroable>(address: u64) -> Option<T> {
    let mut value = T::zeroed();
    // SAFETY: `value` is as long as said; the helper checks the source.
    let failed = unsafe {
        generated::bpf_probe_read_user(
            (&raw mut value).cast(),
            size_of::<T>() as u32,
            address as *const c_void,
        )
    };
    (failed == 0).then_some(value)
}

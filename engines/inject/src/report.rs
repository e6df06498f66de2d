//! What this library says of itself: whether it listens, its counters, its marks.

use std::{
    fs::File,
    io::Write as _,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use tracer_abi::mark::{self, GpuLayer, GpuLayers, InjectState, MarkHeader, MarkKind, NvtxState};

use crate::{
    driver::{CudaError, Driver},
    layers, names, nvtx,
    step::Open,
};

/// Where marks go too, so that tests see them without a tracer; setting it counts as being listened to.
const TEST_SINK: &str = "TRACER_INJECT_TEST_SINK";

static FORCED: AtomicBool = AtomicBool::new(false);
static SINK: OnceLock<File> = OnceLock::new();

/// Reads the environment; once, before the program's own code runs.
pub(crate) fn init() {
    let Some(path) = std::env::var_os(TEST_SINK) else { return };
    if let Ok(file) = File::options().append(true).create(true).open(path) {
        FORCED.store(SINK.set(file).is_ok(), Ordering::Relaxed);
    }
}

/// Whether a tracer probes our site now.
#[inline(always)]
pub(crate) fn listening() -> bool {
    tracer_marks::listening() || FORCED.load(Ordering::Relaxed)
}

static SESSION: AtomicU32 = AtomicU32::new(0);

/// Changes when a tracer has gone.
pub(crate) fn session() -> u32 {
    SESSION.load(Ordering::Relaxed)
}

/// A tracer has gone.
pub(crate) fn end_session() {
    SESSION.fetch_add(1, Ordering::Relaxed);
}

fn emit(payload: &[u8]) {
    tracer_marks::emit(payload);
    if let Some(mut file) = SINK.get() {
        // A test that misses marks fails by itself.
        let _ = file.write_all(payload);
    }
}

/// Counts of steps; see [`InjectState`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) steps: AtomicU64,
    pub(crate) timed: AtomicU64,
    pub(crate) capturing: AtomicU64,
    pub(crate) pool: AtomicU64,
    pub(crate) error: AtomicU64,
    pub(crate) abandoned: AtomicU64,
}

pub(crate) static COUNTERS: Counters = Counters {
    steps: AtomicU64::new(0),
    timed: AtomicU64::new(0),
    capturing: AtomicU64::new(0),
    pool: AtomicU64::new(0),
    error: AtomicU64::new(0),
    abandoned: AtomicU64::new(0),
};

/// Counts one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// 0 while active; else a `WHY_*` in the upper and a CUDA result in the lower half. A number, so that the program's
/// threads can set it without allocating.
static DISABLED: AtomicU64 = AtomicU64::new(0);
static TEXT: OnceLock<String> = OnceLock::new();
const WHY_TEXT: u64 = 1;
const WHY_DRIVER: u64 = 2;
const WHY_PANIC: u64 = 3;

/// Turns this library off for good; the first reason stays.
fn disable(why: u64, code: u32) {
    let _ = DISABLED.compare_exchange(0, why << 32 | u64::from(code), Ordering::Relaxed, Ordering::Relaxed);
}

/// Off: for this reason. On our own thread only.
pub(crate) fn disable_because(text: String) {
    let _ = TEXT.set(text);
    disable(WHY_TEXT, 0);
}

/// Off: the driver answered something that this library does not understand.
pub(crate) fn disable_by_driver(error: CudaError) {
    disable(WHY_DRIVER, error.0 as u32);
}

/// Off: a defect of this library.
pub(crate) fn disable_by_panic() {
    disable(WHY_PANIC, 0);
}

pub(crate) fn is_disabled() -> bool {
    DISABLED.load(Ordering::Relaxed) != 0
}

fn reason() -> String {
    let disabled = DISABLED.load(Ordering::Relaxed);
    match disabled >> 32 {
        0 => String::new(),
        WHY_TEXT => TEXT.get().cloned().unwrap_or_default(),
        WHY_DRIVER => format!("the CUDA driver answered with error {}", disabled as u32),
        _ => "a defect of this library (panic)".to_owned(),
    }
}

/// The beginning of a mark of `bytes` bytes.
fn header(kind: MarkKind, bytes: usize) -> MarkHeader {
    MarkHeader { version: mark::VERSION, kind: kind as u16, size: bytes as u32 }
}

/// Emits the state; `problem`: why an engine is not hooked; `hooked`: something is.
pub(crate) fn emit_state(problem: Option<&str>, hooked: bool) {
    let text = if is_disabled() { reason() } else { problem.unwrap_or_default().to_owned() };
    let text = &text.as_bytes()[..text.floor_char_boundary(mark::MAX_STRING_BYTES)];
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let bytes = size_of::<InjectState>() + text.len();
    let state = InjectState {
        header: header(MarkKind::InjectState, bytes),
        state: if is_disabled() || !hooked { mark::INJECT_DISABLED } else { mark::INJECT_ACTIVE },
        reason_bytes: text.len() as u32,
        steps: read(&COUNTERS.steps),
        timed: read(&COUNTERS.timed),
        skipped_capturing: read(&COUNTERS.capturing),
        skipped_pool: read(&COUNTERS.pool),
        skipped_error: read(&COUNTERS.error),
        abandoned: read(&COUNTERS.abandoned),
    };
    emit_with_tail(bytemuck::bytes_of(&state), text);
}

/// Emits a span.
pub(crate) fn emit_span(span: mark::GpuSpan) {
    let span = mark::GpuSpan { header: header(MarkKind::GpuSpan, size_of::<mark::GpuSpan>()), ..span };
    count(&COUNTERS.timed);
    emit(bytemuck::bytes_of(&span));
}

/// Emits a burst; at most [`mark::MAX_READINGS`] readings.
pub(crate) fn emit_burst(burst: mark::ClockBurst, readings: &[mark::ClockReading]) {
    let readings = &readings[..readings.len().min(mark::MAX_READINGS)];
    let tail: &[u8] = bytemuck::cast_slice(readings);
    let bytes = size_of::<mark::ClockBurst>() + tail.len();
    let burst = mark::ClockBurst {
        header: header(MarkKind::ClockBurst, bytes),
        readings: readings.len() as u32,
        ..burst
    };
    emit_with_tail(bytemuck::bytes_of(&burst), tail);
}

/// Emits a range's begin or end, or a mark, of NVTX; on the program's threads.
pub(crate) fn emit_nvtx(nvtx: mark::Nvtx, name: &[u8], domain: &[u8]) {
    const FIXED: usize = size_of::<mark::Nvtx>();
    let mut payload = [0; FIXED + 2 * mark::MAX_NVTX_BYTES];
    let bytes = FIXED + name.len() + domain.len();
    let nvtx = mark::Nvtx {
        header: header(MarkKind::Nvtx, bytes),
        name_bytes: name.len() as u16,
        domain_bytes: domain.len() as u16,
        ..nvtx
    };
    if let Some(space) = payload.get_mut(..bytes) {
        space[..FIXED].copy_from_slice(bytemuck::bytes_of(&nvtx));
        space[FIXED..FIXED + name.len()].copy_from_slice(name);
        space[FIXED + name.len()..].copy_from_slice(domain);
        emit(space);
    }
}

/// Emits what became of NVTX.
pub(crate) fn emit_nvtx_state() {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    emit(bytemuck::bytes_of(&NvtxState {
        header: header(MarkKind::NvtxState, size_of::<NvtxState>()),
        clients: nvtx::clients(),
        refused: nvtx::refused(),
        sample_every: layers::every(),
        _pad: 0,
        reported: read(&nvtx::REPORTED),
        limited: read(&nvtx::LIMITED),
        names_lost: names::lost(),
        sampled: read(&layers::SAMPLED),
        skipped_pool: read(&layers::SKIPPED),
    }));
}

/// Emits the ranges of a sampled step, whose events are complete, in as many marks as they need.
///
/// # Errors
/// The driver gives no time.
pub(crate) fn emit_layers(driver: &Driver, slot: usize, open: &Open) -> Result<(), CudaError> {
    const ROOM: usize = mark::MAX_BYTES - size_of::<GpuLayers>();
    let (mut fixed, mut text) = (Vec::new(), Vec::new());
    // (first range, ranges, bytes of the ranges, bytes of their names) of each mark.
    let mut marks: Vec<(u32, u32, usize, usize)> = vec![(0, 0, 0, 0)];
    let summary = layers::read(driver, slot, open.pair.begin, |range, layer| {
        let name = range.name();
        fixed.extend_from_slice(bytemuck::bytes_of(&layer));
        text.extend_from_slice(name);
        let more = size_of::<GpuLayer>() + name.len();
        if let Some(&(first, layers, bytes, names)) = marks.last()
            && bytes + names + more > ROOM
        {
            marks.push((first + layers, 0, 0, 0));
        }
        if let Some(last) = marks.last_mut() {
            *last = (last.0, last.1 + 1, last.2 + size_of::<GpuLayer>(), last.3 + name.len());
        }
    })?;
    let (mut fixed, mut text) = (&fixed[..], &text[..]);
    for (first, layers, bytes, names) in marks {
        let mut tail = Vec::with_capacity(bytes + names);
        let (these, other_layers) = fixed.split_at(bytes);
        let (their_names, other_names) = text.split_at(names);
        (fixed, text) = (other_layers, other_names);
        tail.extend_from_slice(these);
        tail.extend_from_slice(their_names);
        let mark = GpuLayers {
            header: header(MarkKind::GpuLayers, size_of::<GpuLayers>() + tail.len()),
            sequence: open.sequence,
            total: summary.total,
            first,
            layers,
            flags: if summary.cut { mark::LAYERS_CUT } else { 0 },
        };
        emit_with_tail(bytemuck::bytes_of(&mark), &tail);
    }
    Ok(())
}

/// Puts a payload together on the stack, where the kernel finds it without a page fault.
fn emit_with_tail(fixed: &[u8], tail: &[u8]) {
    let mut payload = [0; mark::MAX_BYTES];
    let end = fixed.len() + tail.len();
    if let Some(space) = payload.get_mut(..end) {
        space[..fixed.len()].copy_from_slice(fixed);
        space[fixed.len()..].copy_from_slice(tail);
        emit(space);
    }
}

//! Payload bytes → [`Mark`].
//!
//! The bytes come from a program that may be newer, hostile or torn: a payload longer than this version knows is
//! accepted and its rest ignored; a shorter one, or one whose counts do not fit, is refused with a reason that the
//! ledger counts.

use bytemuck::{AnyBitPattern, Pod};
use tracer_abi::mark::{self as abi, MarkHeader, MarkKind};

use super::{
    Attr, AttrValue, Batch, ClockBurst, DataType, GpuLayer, GpuLayers, GpuSpan, InjectState, Made, Mark,
    Nvtx, NvtxAction, NvtxState, Phase, RequestBegin, RequestEnd, Shape, Token,
};

/// Why a payload was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum MarkError {
    #[error("the mark says {needed} bytes, its payload has {have}")]
    Short { needed: usize, have: usize },
    #[error("the mark has payload version 0; the first version is {}", abi::VERSION)]
    Version,
    #[error("mark kind {0} is unknown to this version")]
    UnknownKind(u16),
    #[error("the mark holds {count} {what}, more than {max}")]
    TooMany { what: &'static str, count: usize, max: usize },
    #[error("the mark's field {field} has the undefined value {value}")]
    BadValue { field: &'static str, value: u64 },
}

impl MarkError {
    /// Name in the ledger.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Short { .. } => "mark_short",
            Self::Version => "mark_bad_version",
            Self::UnknownKind(_) => "mark_unknown_kind",
            Self::TooMany { .. } => "mark_too_many",
            Self::BadValue { .. } => "mark_bad_value",
        }
    }
}

impl Mark {
    /// Decodes one payload (`tracer_abi::mark`: header, fixed part, tail).
    ///
    /// Strings become UTF-8 of at most [`abi::MAX_STRING_BYTES`] bytes; invalid sequences and characters that could
    /// steer a terminal become U+FFFD.
    ///
    /// # Errors
    /// [`MarkError`] when the payload is shorter than its kind, its counts or its own size field demand, when a count
    /// is above the maximum of the ABI, or when a kind or a value is undefined. Never panics.
    pub fn decode(payload: &[u8]) -> Result<Self, MarkError> {
        let header: MarkHeader = fixed(payload)?;
        if header.version == 0 {
            return Err(MarkError::Version);
        }
        let size = header.size as usize;
        let body = payload.get(..size).ok_or(MarkError::Short { needed: size, have: payload.len() })?;
        let kind = MarkKind::try_from(header.kind).map_err(|unknown| MarkError::UnknownKind(unknown.0))?;
        Ok(match kind {
            MarkKind::RequestBegin => Self::RequestBegin(Box::new(request_begin(body)?)),
            MarkKind::RequestEnd => Self::RequestEnd(request_end(body)?),
            MarkKind::Batch => Self::Batch(batch(body)?),
            MarkKind::Token => Self::Token(token(body)?),
            MarkKind::Phase => Self::Phase(phase(body)?),
            MarkKind::Attr => Self::Attr(attr(body)?),
            MarkKind::Nvtx => Self::Nvtx(nvtx(body)?),
            MarkKind::Shape => Self::Shape(shape(body)?),
            MarkKind::DataType => Self::DataType(data_type(body)?),
            MarkKind::Made => {
                let raw: abi::Made = fixed(body)?;
                Self::Made(Made { maker: raw.maker, made: raw.made })
            }
            MarkKind::GpuLayers => Self::GpuLayers(gpu_layers(body)?),
            MarkKind::NvtxState => Self::NvtxState(nvtx_state(body)?),
            MarkKind::GpuSpan => Self::GpuSpan(gpu_span(body)?),
            MarkKind::ClockBurst => Self::ClockBurst(clock_burst(body)?),
            MarkKind::InjectState => Self::InjectState(inject_state(body)?),
        })
    }
}

fn request_begin(body: &[u8]) -> Result<RequestBegin, MarkError> {
    let (raw, mut tail) = split::<abi::RequestBegin>(body)?;
    Ok(RequestBegin {
        request: raw.request,
        received_ns: Some(raw.received_ns).filter(|&ns| ns != 0),
        trace_id: Some(raw.trace_id).filter(|id| *id != [0; 16]),
        span_id: Some(raw.span_id).filter(|id| *id != [0; 8]),
        trace_flags: raw.trace_flags,
        prompt_tokens: Some(raw.prompt_tokens).filter(|&n| n != 0),
        request_id: tail.string(raw.request_id_bytes)?,
        tenant_id: tail.string(raw.tenant_id_bytes)?,
        model: tail.string(raw.model_bytes)?,
        model_version: tail.string(raw.model_version_bytes)?,
        engine_hash: tail.string(raw.engine_hash_bytes)?,
        adapters: tail.string(raw.adapters_bytes)?,
        kv_cache_strategy: tail.string(raw.kv_cache_strategy_bytes)?,
    })
}

fn request_end(body: &[u8]) -> Result<RequestEnd, MarkError> {
    let raw: abi::RequestEnd = fixed(body)?;
    Ok(RequestEnd {
        request: raw.request,
        output_tokens: raw.output_tokens,
        finish_reason: raw.finish_reason,
    })
}

fn batch(body: &[u8]) -> Result<Batch, MarkError> {
    let (raw, mut tail) = split::<abi::Batch>(body)?;
    let slots = tail.array("slots", raw.slots, abi::MAX_SLOTS)?;
    if u64::from(raw.first_slot) + u64::from(raw.slots) > u64::from(raw.slot_count) {
        return Err(MarkError::BadValue { field: "first_slot", value: raw.first_slot.into() });
    }
    Ok(Batch {
        batch_id: raw.batch_id,
        rank: raw.rank,
        slot_count: raw.slot_count,
        first_slot: raw.first_slot,
        slots,
    })
}

fn token(body: &[u8]) -> Result<Token, MarkError> {
    let raw: abi::Token = fixed(body)?;
    Ok(Token { request: raw.request, choice: raw.choice, index: raw.index, stack: None })
}

fn phase(body: &[u8]) -> Result<Phase, MarkError> {
    let (raw, mut tail) = split::<abi::Phase>(body)?;
    let begins = match raw.action {
        abi::PHASE_BEGIN => true,
        abi::PHASE_END => false,
        other => return Err(MarkError::BadValue { field: "action", value: other.into() }),
    };
    Ok(Phase { request: raw.request, begins, name: tail.string(raw.name_bytes)? })
}

fn attr(body: &[u8]) -> Result<Attr, MarkError> {
    let (raw, mut tail) = split::<abi::Attr>(body)?;
    let key = tail.string(raw.key_bytes)?;
    let value = match raw.value_kind {
        abi::ATTR_NUMBER => AttrValue::Number(raw.number),
        abi::ATTR_STRING => AttrValue::String(tail.string(raw.value_bytes)?),
        other => return Err(MarkError::BadValue { field: "value_kind", value: other.into() }),
    };
    Ok(Attr { request: raw.request, choice: raw.choice, key, value })
}

fn nvtx(body: &[u8]) -> Result<Nvtx, MarkError> {
    let (raw, mut tail) = split::<abi::Nvtx>(body)?;
    let action = match raw.action {
        abi::NVTX_PUSH => NvtxAction::Push,
        abi::NVTX_POP => NvtxAction::Pop,
        abi::NVTX_START => NvtxAction::Start,
        abi::NVTX_END => NvtxAction::End,
        abi::NVTX_MARK => NvtxAction::Mark,
        abi::NVTX_STARTED => NvtxAction::Started,
        other => return Err(MarkError::BadValue { field: "action", value: other.into() }),
    };
    let bits = raw.payload;
    let payload = match raw.payload_kind {
        abi::NVTX_PAYLOAD_NONE => String::new(),
        abi::NVTX_PAYLOAD_U64 => bits.to_string(),
        abi::NVTX_PAYLOAD_I64 => bits.cast_signed().to_string(),
        abi::NVTX_PAYLOAD_F64 => f64::from_bits(bits).to_string(),
        // The union's smaller members are its first bytes.
        abi::NVTX_PAYLOAD_U32 => (bits as u32).to_string(),
        abi::NVTX_PAYLOAD_I32 => (bits as u32).cast_signed().to_string(),
        abi::NVTX_PAYLOAD_F32 => f32::from_bits(bits as u32).to_string(),
        other => return Err(MarkError::BadValue { field: "payload_kind", value: other.into() }),
    };
    Ok(Nvtx {
        action,
        range: raw.range,
        name: tail.string(raw.name_bytes)?,
        domain: tail.string(raw.domain_bytes)?,
        payload,
    })
}

fn shape(body: &[u8]) -> Result<Shape, MarkError> {
    let (raw, mut tail) = split::<abi::Shape>(body)?;
    let dims = raw.dims.get(..raw.count as usize).ok_or(MarkError::TooMany {
        what: "dimensions",
        count: raw.count as usize,
        max: abi::MAX_DIMS,
    })?;
    let dims: Vec<String> = dims.iter().map(i64::to_string).collect();
    let asked = raw.asked != 0;
    Ok(Shape { object: raw.object, name: tail.string(raw.name_bytes)?, dims: dims.join("x"), asked })
}

/// Names of `nvinfer1::DataType`, by number.
const DATA_TYPES: [&str; 12] =
    ["fp32", "fp16", "int8", "int32", "bool", "uint8", "fp8", "bf16", "int64", "int4", "fp4", "e8m0"];

fn data_type(body: &[u8]) -> Result<DataType, MarkError> {
    let (raw, mut tail) = split::<abi::DataType>(body)?;
    let known = DATA_TYPES.get(raw.data_type as usize);
    let data_type = known.map_or_else(|| raw.data_type.to_string(), |name| (*name).to_owned());
    Ok(DataType { object: raw.object, name: tail.string(raw.name_bytes)?, data_type })
}

fn gpu_layers(body: &[u8]) -> Result<GpuLayers, MarkError> {
    let (raw, mut tail) = split::<abi::GpuLayers>(body)?;
    let fixed: Vec<abi::GpuLayer> = tail.array("layers", raw.layers, abi::MAX_LAYERS)?;
    let beyond = raw.total as usize > abi::MAX_LAYERS || raw.first.saturating_add(raw.layers) > raw.total;
    if beyond {
        return Err(MarkError::BadValue { field: "total", value: raw.total.into() });
    }
    let layers = (raw.first..).zip(fixed).map(|(number, layer)| {
        let parent = (layer.parent != abi::NO_LAYER).then_some(layer.parent);
        if parent.is_some_and(|parent| parent >= number) {
            return Err(MarkError::BadValue { field: "parent", value: layer.parent.into() });
        }
        Ok(GpuLayer {
            begin_ms: f32::from_bits(layer.begin_ms_bits),
            end_ms: f32::from_bits(layer.end_ms_bits),
            parent,
            depth: layer.depth,
            name: tail.string(layer.name_bytes)?,
        })
    });
    let layers = layers.collect::<Result<_, _>>()?;
    let cut = raw.flags & abi::LAYERS_CUT != 0;
    Ok(GpuLayers { sequence: raw.sequence, total: raw.total, first: raw.first, cut, layers })
}

fn nvtx_state(body: &[u8]) -> Result<NvtxState, MarkError> {
    let raw: abi::NvtxState = fixed(body)?;
    Ok(NvtxState {
        clients: raw.clients,
        refused: raw.refused,
        sample_every: raw.sample_every,
        reported: raw.reported,
        limited: raw.limited,
        names_lost: raw.names_lost,
        sampled: raw.sampled,
        skipped_pool: raw.skipped_pool,
    })
}

fn gpu_span(body: &[u8]) -> Result<GpuSpan, MarkError> {
    let raw: abi::GpuSpan = fixed(body)?;
    Ok(GpuSpan {
        device_uuid: raw.device_uuid,
        context: raw.context,
        stream: raw.stream,
        sequence: raw.sequence,
        enqueue_begin_ns: raw.enqueue_begin_ns,
        enqueue_end_ns: raw.enqueue_end_ns,
        tid: raw.tid,
        epoch: raw.epoch,
        base: raw.base,
        begin_ms: f32::from_bits(raw.begin_ms_bits),
        span_ms: f32::from_bits(raw.span_ms_bits),
        sampled: raw.flags & abi::SPAN_SAMPLED != 0,
    })
}

fn clock_burst(body: &[u8]) -> Result<ClockBurst, MarkError> {
    let (raw, mut tail) = split::<abi::ClockBurst>(body)?;
    Ok(ClockBurst {
        device_uuid: raw.device_uuid,
        context: raw.context,
        epoch: raw.epoch,
        base: raw.base,
        rebase_ms: Some(f32::from_bits(raw.rebase_ms_bits)).filter(|ms| !ms.is_nan()),
        readings: tail.array("readings", raw.readings, abi::MAX_READINGS)?,
    })
}

fn inject_state(body: &[u8]) -> Result<InjectState, MarkError> {
    let (raw, mut tail) = split::<abi::InjectState>(body)?;
    let active = match raw.state {
        abi::INJECT_ACTIVE => true,
        abi::INJECT_DISABLED => false,
        other => return Err(MarkError::BadValue { field: "state", value: other.into() }),
    };
    Ok(InjectState {
        active,
        reason: tail.string(raw.reason_bytes)?,
        steps: raw.steps,
        timed: raw.timed,
        skipped_capturing: raw.skipped_capturing,
        skipped_pool: raw.skipped_pool,
        skipped_error: raw.skipped_error,
        abandoned: raw.abandoned,
    })
}

/// The fixed part at the beginning of `bytes`.
fn fixed<T: AnyBitPattern>(bytes: &[u8]) -> Result<T, MarkError> {
    let needed = size_of::<T>();
    let head = bytes.get(..needed).ok_or(MarkError::Short { needed, have: bytes.len() })?;
    Ok(bytemuck::pod_read_unaligned(head))
}

fn split<T: AnyBitPattern>(body: &[u8]) -> Result<(T, Tail<'_>), MarkError> {
    Ok((fixed(body)?, Tail { body, at: size_of::<T>() }))
}

/// Reads what follows the fixed part.
struct Tail<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Tail<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], MarkError> {
        let needed = self.at.saturating_add(bytes);
        let part =
            self.body.get(self.at..needed).ok_or(MarkError::Short { needed, have: self.body.len() })?;
        self.at = needed;
        Ok(part)
    }

    fn string(&mut self, bytes: impl Into<u64>) -> Result<String, MarkError> {
        let bytes = usize::try_from(bytes.into()).unwrap_or(usize::MAX);
        Ok(clean(self.take(bytes)?))
    }

    fn array<T: Pod>(&mut self, what: &'static str, count: u32, max: usize) -> Result<Vec<T>, MarkError> {
        let count = count as usize;
        if count > max {
            return Err(MarkError::TooMany { what, count, max });
        }
        let bytes = self.take(count * size_of::<T>())?;
        Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// UTF-8 without characters that steer a terminal, cut at a character boundary.
pub(crate) fn clean(bytes: &[u8]) -> String {
    let mut out = String::new();
    for c in String::from_utf8_lossy(bytes).chars() {
        let c = if steers(c) { char::REPLACEMENT_CHARACTER } else { c };
        if out.len() + c.len_utf8() > abi::MAX_STRING_BYTES {
            break;
        }
        out.push(c);
    }
    out
}

/// Control characters, and the marks that reorder or break lines.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests;

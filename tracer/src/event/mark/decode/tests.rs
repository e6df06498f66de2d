use bytemuck::{Zeroable, bytes_of};
use proptest::prelude::*;
use tracer_abi::mark::{self as abi, ClockReading, MAX_STRING_BYTES, MarkHeader, MarkKind, Slot};

use super::*;

fn header(kind: MarkKind) -> MarkHeader {
    MarkHeader { version: abi::VERSION, kind: kind as u16, size: 0 }
}

/// Fixed part and tails as one payload whose size field is right.
fn payload(fixed: &[u8], tails: &[&[u8]]) -> Vec<u8> {
    let mut bytes = fixed.to_vec();
    for tail in tails {
        bytes.extend_from_slice(tail);
    }
    let size = u32::try_from(bytes.len()).unwrap();
    bytes[4..8].copy_from_slice(&size.to_ne_bytes());
    bytes
}

fn encode(mark: &Mark) -> Vec<u8> {
    match mark {
        Mark::RequestBegin(m) => {
            let raw = abi::RequestBegin {
                header: header(MarkKind::RequestBegin),
                request: m.request,
                received_ns: m.received_ns.unwrap_or(0),
                trace_id: m.trace_id.unwrap_or_default(),
                span_id: m.span_id.unwrap_or_default(),
                trace_flags: m.trace_flags,
                prompt_tokens: m.prompt_tokens.unwrap_or(0),
                request_id_bytes: m.request_id.len() as u16,
                tenant_id_bytes: m.tenant_id.len() as u16,
                model_bytes: m.model.len() as u16,
                model_version_bytes: m.model_version.len() as u16,
                engine_hash_bytes: m.engine_hash.len() as u16,
                adapters_bytes: m.adapters.len() as u16,
                kv_cache_strategy_bytes: m.kv_cache_strategy.len() as u16,
                _pad: 0,
            };
            let strings = [
                &m.request_id,
                &m.tenant_id,
                &m.model,
                &m.model_version,
                &m.engine_hash,
                &m.adapters,
                &m.kv_cache_strategy,
            ];
            payload(bytes_of(&raw), &strings.map(|string| string.as_bytes()))
        }
        Mark::RequestEnd(m) => payload(
            bytes_of(&abi::RequestEnd {
                header: header(MarkKind::RequestEnd),
                request: m.request,
                output_tokens: m.output_tokens,
                finish_reason: m.finish_reason,
            }),
            &[],
        ),
        Mark::Batch(m) => payload(
            bytes_of(&abi::Batch {
                header: header(MarkKind::Batch),
                batch_id: m.batch_id,
                rank: m.rank,
                slot_count: m.slot_count,
                first_slot: m.first_slot,
                slots: m.slots.len() as u32,
            }),
            &[bytemuck::cast_slice(&m.slots)],
        ),
        Mark::Token(m) => payload(
            bytes_of(&abi::Token {
                header: header(MarkKind::Token),
                request: m.request,
                choice: m.choice,
                index: m.index,
            }),
            &[],
        ),
        Mark::Phase(m) => payload(
            bytes_of(&abi::Phase {
                header: header(MarkKind::Phase),
                request: m.request,
                action: if m.begins { abi::PHASE_BEGIN } else { abi::PHASE_END },
                name_bytes: m.name.len() as u16,
                _pad: 0,
            }),
            &[m.name.as_bytes()],
        ),
        Mark::Attr(m) => {
            let (number, kind, value) = match &m.value {
                AttrValue::Number(n) => (*n, abi::ATTR_NUMBER, ""),
                AttrValue::String(s) => (0.0, abi::ATTR_STRING, s.as_str()),
            };
            let raw = abi::Attr {
                header: header(MarkKind::Attr),
                request: m.request,
                number,
                choice: m.choice,
                value_kind: kind,
                key_bytes: m.key.len() as u16,
                value_bytes: value.len() as u16,
                _pad: [0; 3],
            };
            payload(bytes_of(&raw), &[m.key.as_bytes(), value.as_bytes()])
        }
        Mark::GpuSpan(m) => payload(
            bytes_of(&abi::GpuSpan {
                header: header(MarkKind::GpuSpan),
                device_uuid: m.device_uuid,
                context: m.context,
                stream: m.stream,
                sequence: m.sequence,
                enqueue_begin_ns: m.enqueue_begin_ns,
                enqueue_end_ns: m.enqueue_end_ns,
                tid: m.tid,
                epoch: m.epoch,
                base: m.base,
                begin_ms_bits: m.begin_ms.to_bits(),
                span_ms_bits: m.span_ms.to_bits(),
                flags: if m.sampled { abi::SPAN_SAMPLED } else { 0 },
            }),
            &[],
        ),
        Mark::Nvtx(m) => payload(
            bytes_of(&abi::Nvtx {
                header: header(MarkKind::Nvtx),
                range: m.range,
                payload: m.payload.parse::<i64>().map_or(0, i64::cast_unsigned),
                action: match m.action {
                    NvtxAction::Push => abi::NVTX_PUSH,
                    NvtxAction::Pop => abi::NVTX_POP,
                    NvtxAction::Start => abi::NVTX_START,
                    NvtxAction::End => abi::NVTX_END,
                    NvtxAction::Mark => abi::NVTX_MARK,
                    NvtxAction::Started => abi::NVTX_STARTED,
                },
                payload_kind: if m.payload.is_empty() {
                    abi::NVTX_PAYLOAD_NONE
                } else {
                    abi::NVTX_PAYLOAD_I64
                },
                name_bytes: m.name.len() as u16,
                domain_bytes: m.domain.len() as u16,
            }),
            &[m.name.as_bytes(), m.domain.as_bytes()],
        ),
        Mark::Shape(m) => {
            let mut dims = [0; abi::MAX_DIMS];
            let given: Vec<i64> = m.dims.split('x').filter_map(|dim| dim.parse().ok()).collect();
            dims[..given.len()].copy_from_slice(&given);
            payload(
                bytes_of(&abi::Shape {
                    header: header(MarkKind::Shape),
                    object: m.object,
                    dims,
                    count: given.len() as u32,
                    name_bytes: m.name.len() as u16,
                    asked: u16::from(m.asked),
                }),
                &[m.name.as_bytes()],
            )
        }
        Mark::DataType(m) => payload(
            bytes_of(&abi::DataType {
                header: header(MarkKind::DataType),
                object: m.object,
                data_type: DATA_TYPES.iter().position(|name| *name == m.data_type).unwrap_or(99) as u32,
                name_bytes: m.name.len() as u32,
            }),
            &[m.name.as_bytes()],
        ),
        Mark::Made(m) => payload(
            bytes_of(&abi::Made { header: header(MarkKind::Made), maker: m.maker, made: m.made }),
            &[],
        ),
        Mark::GpuLayers(m) => {
            let fixed = m.layers.iter().map(|layer| abi::GpuLayer {
                begin_ms_bits: layer.begin_ms.to_bits(),
                end_ms_bits: layer.end_ms.to_bits(),
                parent: layer.parent.unwrap_or(abi::NO_LAYER),
                depth: layer.depth,
                name_bytes: layer.name.len() as u16,
            });
            let names: String = m.layers.iter().map(|layer| layer.name.as_str()).collect();
            payload(
                bytes_of(&abi::GpuLayers {
                    header: header(MarkKind::GpuLayers),
                    sequence: m.sequence,
                    total: m.total,
                    first: m.first,
                    layers: m.layers.len() as u32,
                    flags: if m.cut { abi::LAYERS_CUT } else { 0 },
                }),
                &[bytemuck::cast_slice(&fixed.collect::<Vec<_>>()), names.as_bytes()],
            )
        }
        Mark::NvtxState(m) => payload(
            bytes_of(&abi::NvtxState {
                header: header(MarkKind::NvtxState),
                clients: m.clients,
                refused: m.refused,
                sample_every: m.sample_every,
                _pad: 0,
                reported: m.reported,
                limited: m.limited,
                names_lost: m.names_lost,
                sampled: m.sampled,
                skipped_pool: m.skipped_pool,
            }),
            &[],
        ),
        Mark::ClockBurst(m) => payload(
            bytes_of(&abi::ClockBurst {
                header: header(MarkKind::ClockBurst),
                device_uuid: m.device_uuid,
                context: m.context,
                epoch: m.epoch,
                base: m.base,
                rebase_ms_bits: m.rebase_ms.unwrap_or(f32::NAN).to_bits(),
                readings: m.readings.len() as u32,
            }),
            &[bytemuck::cast_slice(&m.readings)],
        ),
        Mark::InjectState(m) => payload(
            bytes_of(&abi::InjectState {
                header: header(MarkKind::InjectState),
                state: if m.active { abi::INJECT_ACTIVE } else { abi::INJECT_DISABLED },
                reason_bytes: m.reason.len() as u32,
                steps: m.steps,
                timed: m.timed,
                skipped_capturing: m.skipped_capturing,
                skipped_pool: m.skipped_pool,
                skipped_error: m.skipped_error,
                abandoned: m.abandoned,
            }),
            &[m.reason.as_bytes()],
        ),
    }
}

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9é漢 _-]{0,40}"
}

fn slot() -> impl Strategy<Value = Slot> {
    (any::<u64>(), any::<[u32; 3]>(), any::<u16>(), any::<[u8; 2]>()).prop_map(|(request, n, choice, b)| {
        Slot {
            request,
            sample_offset: n[0],
            generation_step: n[1],
            tokens: n[2],
            choice,
            phase: b[0],
            flags: b[1],
        }
    })
}

fn request_mark() -> impl Strategy<Value = Mark> {
    let begin =
        (any::<[u64; 2]>(), any::<[u8; 16]>(), any::<[u8; 8]>(), any::<[u32; 2]>(), [(); 7].map(|()| name()))
            .prop_map(|(n, trace, span, m, strings)| {
                let [request_id, tenant_id, model, model_version, engine_hash, adapters, kv_cache_strategy] =
                    strings;
                Mark::RequestBegin(Box::new(RequestBegin {
                    request: n[0],
                    received_ns: Some(n[1]).filter(|&x| x != 0),
                    trace_id: Some(trace).filter(|x| *x != [0; 16]),
                    span_id: Some(span).filter(|x| *x != [0; 8]),
                    trace_flags: m[0],
                    prompt_tokens: Some(m[1]).filter(|&x| x != 0),
                    request_id,
                    tenant_id,
                    model,
                    model_version,
                    engine_hash,
                    adapters,
                    kv_cache_strategy,
                }))
            });
    let end = (any::<u64>(), any::<[u32; 2]>()).prop_map(|(request, n)| {
        Mark::RequestEnd(RequestEnd { request, output_tokens: n[0], finish_reason: n[1] })
    });
    let token = (any::<u64>(), any::<[u32; 2]>())
        .prop_map(|(request, n)| Mark::Token(Token { request, choice: n[0], index: n[1], stack: None }));
    let phase = (any::<u64>(), any::<bool>(), name())
        .prop_map(|(request, begins, name)| Mark::Phase(Phase { request, begins, name }));
    let value =
        prop_oneof![prop::num::f64::NORMAL.prop_map(AttrValue::Number), name().prop_map(AttrValue::String)];
    let attr = (any::<u64>(), any::<u32>(), name(), value)
        .prop_map(|(request, choice, key, value)| Mark::Attr(Attr { request, choice, key, value }));
    prop_oneof![begin, end, token, phase, attr]
}

fn device_mark() -> impl Strategy<Value = Mark> {
    let batch = (
        any::<u64>(),
        any::<u32>(),
        0..1000u32,
        0..1000u32,
        prop::collection::vec(slot(), 0..=abi::MAX_SLOTS),
    )
        .prop_map(|(batch_id, rank, first_slot, more, slots)| {
            let slot_count = first_slot + slots.len() as u32 + more;
            Mark::Batch(Batch { batch_id, rank, slot_count, first_slot, slots })
        });
    let span = (any::<[u8; 16]>(), any::<[u64; 5]>(), any::<[u32; 3]>(), [0f32..1e6, 0f32..1e6]).prop_map(
        |(device_uuid, n, m, ms)| {
            Mark::GpuSpan(GpuSpan {
                device_uuid,
                context: n[0],
                stream: n[1],
                sequence: n[2],
                enqueue_begin_ns: n[3],
                enqueue_end_ns: n[4],
                tid: m[0],
                epoch: m[1],
                base: m[2],
                begin_ms: ms[0],
                span_ms: ms[1],
                sampled: false,
            })
        },
    );
    let reading = any::<(u64, u64, u32)>().prop_map(|(h0_raw_ns, h1_raw_ns, elapsed_ms_bits)| ClockReading {
        h0_raw_ns,
        h1_raw_ns,
        elapsed_ms_bits,
        _pad: 0,
    });
    let burst = (
        any::<[u8; 16]>(),
        any::<u64>(),
        any::<[u32; 2]>(),
        prop::option::of(0f32..1e6),
        prop::collection::vec(reading, 0..=abi::MAX_READINGS),
    )
        .prop_map(|(device_uuid, context, n, rebase_ms, readings)| {
            Mark::ClockBurst(ClockBurst {
                device_uuid,
                context,
                epoch: n[0],
                base: n[1],
                rebase_ms,
                readings,
            })
        });
    let state = (any::<bool>(), name(), any::<[u64; 6]>()).prop_map(|(active, reason, n)| {
        Mark::InjectState(InjectState {
            active,
            reason,
            steps: n[0],
            timed: n[1],
            skipped_capturing: n[2],
            skipped_pool: n[3],
            skipped_error: n[4],
            abandoned: n[5],
        })
    });
    prop_oneof![batch, span, burst, state, nvtx_mark()]
}

fn nvtx_mark() -> impl Strategy<Value = Mark> {
    use NvtxAction::{End, Pop, Push, Start, Started};
    let action = prop::sample::select(vec![Push, Pop, Start, End, NvtxAction::Mark, Started]);
    let payload = prop_oneof![Just(String::new()), any::<i64>().prop_map(|n| n.to_string())];
    let nvtx =
        (action, any::<u64>(), name(), name(), payload).prop_map(|(action, range, name, domain, payload)| {
            Mark::Nvtx(Nvtx { action, range, name, domain, payload })
        });
    let layer = ([0f32..1e6, 0f32..1e6], any::<Option<u32>>(), any::<u16>(), name());
    let layers = (any::<u64>(), 0..900u32, any::<bool>(), prop::collection::vec(layer, 0..60)).prop_map(
        |(sequence, first, cut, layers)| {
            let layers: Vec<GpuLayer> = (first..)
                .zip(layers)
                .map(|(number, ([begin_ms, end_ms], parent, depth, name))| {
                    let parent = parent.and_then(|parent| parent.checked_rem(number));
                    GpuLayer { begin_ms, end_ms, parent, depth, name }
                })
                .collect();
            let total = first + layers.len() as u32;
            Mark::GpuLayers(GpuLayers { sequence, total, first, cut, layers })
        },
    );
    let state = (any::<[u32; 3]>(), any::<[u64; 5]>()).prop_map(|(m, n)| {
        Mark::NvtxState(NvtxState {
            clients: m[0],
            refused: m[1],
            sample_every: m[2],
            reported: n[0],
            limited: n[1],
            names_lost: n[2],
            sampled: n[3],
            skipped_pool: n[4],
        })
    });
    let shape = (any::<u64>(), name(), prop::collection::vec(any::<i64>(), 0..=abi::MAX_DIMS)).prop_map(
        |(object, name, dims)| {
            let dims = dims.iter().map(i64::to_string).collect::<Vec<_>>().join("x");
            Mark::Shape(Shape { object, name, dims, asked: object % 2 == 1 })
        },
    );
    let data_type = (any::<u64>(), name(), prop::sample::select([&DATA_TYPES[..], &["99"]].concat()))
        .prop_map(|(object, name, data_type)| {
            Mark::DataType(DataType { object, name, data_type: data_type.into() })
        });
    let made = any::<(u64, u64)>().prop_map(|(maker, made)| Mark::Made(Made { maker, made }));
    prop_oneof![nvtx, layers, state, shape, data_type, made]
}

fn mark() -> impl Strategy<Value = Mark> {
    prop_oneof![request_mark(), device_mark()]
}

proptest! {
    #[test]
    fn round_trip(mark in mark()) {
        prop_assert_eq!(Mark::decode(&encode(&mark)), Ok(mark));
    }

    #[test]
    fn longer_payloads_are_accepted(mark in mark(), rest in prop::collection::vec(any::<u8>(), 1..64)) {
        let mut bytes = encode(&mark);
        bytes.extend_from_slice(&rest);
        // Beyond the size field.
        prop_assert_eq!(Mark::decode(&bytes), Ok(mark.clone()));
        // Within it, as a newer writer would.
        let size = bytes.len() as u32;
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        prop_assert_eq!(Mark::decode(&bytes), Ok(mark));
    }

    #[test]
    fn every_shorter_payload_is_refused(mark in mark(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(&mark);
        let cut = cut.index(bytes.len());
        let is_short = matches!(Mark::decode(&bytes[..cut]), Err(MarkError::Short { .. }));
        prop_assert!(is_short);
        // Also when the size field agrees with the cut.
        if cut >= 8 {
            let mut torn = bytes[..cut].to_vec();
            torn[4..8].copy_from_slice(&(cut as u32).to_ne_bytes());
            let is_short = matches!(Mark::decode(&torn), Err(MarkError::Short { .. }));
            prop_assert!(is_short);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = Mark::decode(&bytes);
    }

    #[test]
    fn random_bodies_never_panic(kind in 0u16..22, mut bytes in prop::collection::vec(any::<u8>(), 8..4200)) {
        let size = bytes.len() as u32;
        bytes[..2].copy_from_slice(&1u16.to_ne_bytes());
        bytes[2..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        if let Ok(Mark::RequestBegin(m)) = Mark::decode(&bytes) {
            for text in [m.request_id, m.tenant_id, m.model, m.model_version, m.engine_hash, m.adapters] {
                prop_assert!(text.len() <= MAX_STRING_BYTES);
                prop_assert!(!text.chars().any(steers));
            }
        }
    }
}

#[test]
fn hostile_strings_are_cleaned_and_cut() {
    assert_eq!(clean(b"a\x1b[31mb\nc\0"), "a\u{fffd}[31mb\u{fffd}c\u{fffd}");
    assert_eq!(clean("x\u{202e}y".as_bytes()), "x\u{fffd}y");
    assert_eq!(clean(&[0xff; 400]).len(), MAX_STRING_BYTES / 3 * 3);
    assert_eq!(clean("漢".repeat(200).as_bytes()).len(), 255);
}

#[test]
fn payloads_of_nvtx_are_text() {
    let decode = |kind: u16, bits: u64| {
        let raw = abi::Nvtx {
            header: header(MarkKind::Nvtx),
            payload: bits,
            payload_kind: kind,
            ..Zeroable::zeroed()
        };
        Mark::decode(&payload(bytes_of(&raw), &[])).map(|mark| match mark {
            Mark::Nvtx(nvtx) => nvtx.payload,
            other => panic!("{other:?}"),
        })
    };
    let ok = |text: &str| Ok(text.to_owned());
    assert_eq!(decode(abi::NVTX_PAYLOAD_NONE, 7), ok(""));
    assert_eq!(decode(abi::NVTX_PAYLOAD_U64, u64::MAX), ok("18446744073709551615"));
    assert_eq!(decode(abi::NVTX_PAYLOAD_I64, u64::MAX), ok("-1"));
    assert_eq!(decode(abi::NVTX_PAYLOAD_U32, 0xdead_0000_0007), ok("7"));
    assert_eq!(decode(abi::NVTX_PAYLOAD_I32, 0xffff_fffe), ok("-2"));
    assert_eq!(decode(abi::NVTX_PAYLOAD_F64, 1.5f64.to_bits()), ok("1.5"));
    assert_eq!(decode(abi::NVTX_PAYLOAD_F32, 0.25f32.to_bits().into()), ok("0.25"));
    assert!(decode(7, 0).is_err());
}

#[test]
fn refusals_name_their_reason() {
    let mut bytes = encode(&Mark::Token(Token { request: 1, choice: 0, index: 2, stack: None }));
    bytes[2] = 99;
    assert_eq!(Mark::decode(&bytes), Err(MarkError::UnknownKind(99)));
    bytes[0] = 0;
    assert_eq!(Mark::decode(&bytes), Err(MarkError::Version));

    let raw =
        abi::Batch { header: header(MarkKind::Batch), slots: 129, slot_count: 129, ..Zeroable::zeroed() };
    let error = Mark::decode(&payload(bytes_of(&raw), &[&[0; 129 * 24]])).unwrap_err();
    assert_eq!(error, MarkError::TooMany { what: "slots", count: 129, max: 128 });
    assert_eq!(error.name(), "mark_too_many");

    let raw = abi::Batch {
        header: header(MarkKind::Batch),
        slots: 1,
        first_slot: 2,
        slot_count: 2,
        ..Zeroable::zeroed()
    };
    let error = Mark::decode(&payload(bytes_of(&raw), &[&[0; 24]])).unwrap_err();
    assert_eq!(error, MarkError::BadValue { field: "first_slot", value: 2 });
}

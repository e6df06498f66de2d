use bytemuck::pod_read_unaligned;
use proptest::prelude::*;

use super::*;

fn fixed<T: bytemuck::Pod>(payload: &[u8]) -> T {
    pod_read_unaligned(&payload[..size_of::<T>()])
}

/// Header laws of every payload; returns the tail after the fixed part.
fn tail<T: bytemuck::Pod>(payload: &[u8], kind: MarkKind) -> &[u8] {
    let header: abi::MarkHeader = fixed(payload);
    assert_eq!(header.version, abi::VERSION);
    assert_eq!(header.kind, kind as u16);
    assert_eq!(header.size as usize, payload.len());
    assert!(payload.len() <= abi::MAX_BYTES);
    &payload[size_of::<T>()..]
}

fn is_clip(clipped: &str, whole: &str) -> bool {
    whole.starts_with(clipped)
        && clipped.len() <= MAX_STRING_BYTES
        && (clipped.len() == whole.len()
        // One character more would not have fitted.
        || whole[clipped.len()..].chars().next().is_some_and(|c| clipped.len() + c.len_utf8() > MAX_STRING_BYTES))
}

fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(any::<char>(), 0..300).prop_map(|chars| chars.into_iter().collect())
}

proptest! {
    #[test]
    fn request_begin_holds_clipped_strings(texts in [(); 7].map(|()| text()), request: u64,
                                           received: Option<u64>, prompt_tokens: u32, trace_id: [u8; 16]) {
        let [request_id, tenant_id, model, model_version, engine_hash, adapters, kv_cache_strategy] = &texts;
        let begin = RequestBegin {
            request, received_ns: received, trace_id, prompt_tokens, request_id, tenant_id, model, model_version,
            engine_hash, adapters, kv_cache_strategy, ..Default::default()
        };
        cold::request_begin_payload(&begin, |payload| {
            let tail = tail::<abi::RequestBegin>(payload, MarkKind::RequestBegin);
            let got: abi::RequestBegin = fixed(payload);
            assert_eq!(got.request, request);
            assert_eq!(got.received_ns, received.unwrap_or(0));
            assert_eq!((got.trace_id, got.prompt_tokens), (trace_id, prompt_tokens));
            let lengths = [
                got.request_id_bytes, got.tenant_id_bytes, got.model_bytes, got.model_version_bytes,
                got.engine_hash_bytes, got.adapters_bytes, got.kv_cache_strategy_bytes,
            ];
            let mut rest = tail;
            for (length, whole) in lengths.into_iter().zip(&texts) {
                let (clipped, after) = rest.split_at(length.into());
                assert!(is_clip(std::str::from_utf8(clipped).unwrap(), whole));
                rest = after;
            }
            assert!(rest.is_empty());
        });
    }

    #[test]
    fn batches_are_split_without_loss(requests in proptest::collection::vec(any::<u64>(), 0..400)) {
        let slots: Vec<Slot> = requests.iter().map(|&request| Slot { request, ..Default::default() }).collect();
        let mut got = Vec::new();
        cold::batch_payloads(3, 1, &slots, |payload| {
            let tail = tail::<abi::Batch>(payload, MarkKind::Batch);
            let part: abi::Batch = fixed(payload);
            assert_eq!((part.batch_id, part.rank, part.slot_count as usize), (3, 1, slots.len()));
            assert_eq!(part.first_slot as usize, got.len());
            assert_eq!(tail.len(), part.slots as usize * size_of::<Slot>());
            got.extend(tail.chunks(size_of::<Slot>()).map(fixed::<Slot>));
        });
        assert_eq!(got, slots);
    }

    #[test]
    fn attr_and_phase_hold_clipped_strings(key in text(), value in text(), number: f64) {
        cold::attr_payload(1, 2, &key, AttrValue::String(&value), |payload| {
            let tail = tail::<abi::Attr>(payload, MarkKind::Attr);
            let got: abi::Attr = fixed(payload);
            let (got_key, got_value) = tail.split_at(got.key_bytes.into());
            assert_eq!(got_value.len(), usize::from(got.value_bytes));
            assert!(is_clip(std::str::from_utf8(got_key).unwrap(), &key));
            assert!(is_clip(std::str::from_utf8(got_value).unwrap(), &value));
        });
        cold::attr_payload(1, 2, &key, AttrValue::Number(number), |payload| {
            let got: abi::Attr = fixed(payload);
            assert_eq!(got.number.to_bits(), number.to_bits());
            assert_eq!(got.value_bytes, 0);
        });
        cold::phase_payload(1, &key, true, |payload| {
            let name = tail::<abi::Phase>(payload, MarkKind::Phase);
            assert!(is_clip(std::str::from_utf8(name).unwrap(), &key));
        });
    }
}

#[test]
fn bad_arguments_are_harmless() {
    // Called past the check, as when somebody listens: the site itself does nothing.
    cold::emit(&[0; abi::MAX_BYTES]);
    cold::emit(&[0; abi::MAX_BYTES + 1]);
    cold::emit(&[]);
    cold::batch(0, 0, &[]);
    cold::token(0, u32::MAX, u32::MAX);
    cold::request_end(0, u32::MAX, FinishReason::Cancelled);
}

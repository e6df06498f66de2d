//! Arbitrary events, for the tests of this folder.

use proptest::prelude::*;
use tracer_abi::mark::{ClockReading, Slot};

use crate::event::mark::{self, AttrValue, Mark};
use crate::event::*;

/// A folder in memory where there is one: finishing waits for the disk dozens of times.
pub(crate) fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn process() -> impl Strategy<Value = ProcessId> {
    (any::<u32>(), any::<u64>()).prop_map(|(tgid, start_ticks)| ProcessId { tgid, start_ticks })
}

/// Times from a small range, so that some are equal.
fn time() -> impl Strategy<Value = u64> {
    prop_oneof![0..40u64, any::<u64>()]
}

fn origin() -> impl Strategy<Value = Origin> {
    (time(), process(), any::<u32>(), any::<u32>()).prop_map(|(time_ns, process, tid, cpu)| Origin {
        time_ns,
        process,
        tid,
        cpu,
    })
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[a-z]{1,8}", "\\PC{0,12}", ".{0,6}"]
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..21)
}

/// Any float that equals itself.
fn float() -> impl Strategy<Value = f32> {
    use prop::num::f32::{INFINITE, NEGATIVE, NORMAL, POSITIVE, SUBNORMAL, ZERO};
    POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO | INFINITE
}

fn stack_id() -> impl Strategy<Value = Option<StackId>> {
    any::<Option<u64>>().prop_map(|id| id.map(StackId))
}

fn call() -> impl Strategy<Value = Event> {
    let end = prop_oneof![
        Just(CallEnd::Returned),
        Just(CallEnd::EntryOnly),
        Just(CallEnd::Unwound),
        Just(CallEnd::Open),
        Just(CallEnd::Exited)
    ];
    let times = any::<(u64, u64, u64)>();
    (origin(), any::<(u32, Option<u32>, u32)>(), times, end, any::<[u64; 6]>(), (any::<u64>(), stack_id()))
        .prop_map(
            |(origin, (point, parent_point, depth), (begin_ns, end_ns, sp), end, args, (ret, stack))| {
                Event::Call(Call {
                    origin,
                    point,
                    parent_point,
                    depth,
                    begin_ns,
                    end_ns,
                    end,
                    sp,
                    args,
                    ret,
                    stack,
                })
            },
        )
}

fn slots() -> impl Strategy<Value = Vec<Slot>> {
    let slot = (any::<(u64, u32, u32, u32)>(), any::<(u16, u8, u8)>()).prop_map(
        |((request, sample_offset, generation_step, tokens), (choice, phase, flags))| Slot {
            request,
            sample_offset,
            generation_step,
            tokens,
            choice,
            phase,
            flags,
        },
    );
    prop::collection::vec(slot, 0..4)
}

fn readings() -> impl Strategy<Value = Vec<ClockReading>> {
    let reading = any::<(u64, u64, u32)>().prop_map(|(h0_raw_ns, h1_raw_ns, elapsed_ms_bits)| ClockReading {
        h0_raw_ns,
        h1_raw_ns,
        elapsed_ms_bits,
        ..ClockReading::default()
    });
    prop::collection::vec(reading, 0..4)
}

fn request_mark() -> impl Strategy<Value = Mark> {
    let begin = (any::<(u64, Option<u64>, u32, Option<u32>)>(), any::<(Option<[u8; 16]>, Option<[u8; 8]>)>());
    let value =
        prop_oneof![float().prop_map(|x| AttrValue::Number(x.into())), text().prop_map(AttrValue::String)];
    prop_oneof![
        (begin, [(); 7].map(|()| text())).prop_map(|((a, b), strings)| {
            let [request_id, tenant_id, model, model_version, engine_hash, adapters, kv_cache_strategy] =
                strings;
            let (request, received_ns, trace_flags, prompt_tokens) = a;
            let (trace_id, span_id) = b;
            Mark::RequestBegin(Box::new(mark::RequestBegin {
                request,
                received_ns,
                trace_id,
                span_id,
                trace_flags,
                prompt_tokens,
                request_id,
                tenant_id,
                model,
                model_version,
                engine_hash,
                adapters,
                kv_cache_strategy,
            }))
        }),
        any::<(u64, u32, u32)>().prop_map(|(request, output_tokens, finish_reason)| Mark::RequestEnd(
            mark::RequestEnd { request, output_tokens, finish_reason }
        )),
        (any::<(u64, u32, u32)>(), stack_id()).prop_map(|((request, choice, index), stack)| Mark::Token(
            mark::Token { request, choice, index, stack }
        )),
        (any::<(u64, bool)>(), text()).prop_map(|((request, begins), name)| Mark::Phase(mark::Phase {
            request,
            begins,
            name
        })),
        (any::<(u64, u32)>(), text(), value).prop_map(|((request, choice), key, value)| Mark::Attr(
            mark::Attr { request, choice, key, value }
        )),
    ]
}

fn engine_mark() -> impl Strategy<Value = Mark> {
    let span = (any::<([u8; 16], u64, u64, u64)>(), any::<(u64, u64, u32, u32, u32)>(), float(), float());
    let burst = (any::<([u8; 16], u64, u32, u32)>(), prop::option::of(float()), readings());
    prop_oneof![
        (any::<(u64, u32, u32, u32)>(), slots()).prop_map(
            |((batch_id, rank, slot_count, first_slot), slots)| Mark::Batch(mark::Batch {
                batch_id,
                rank,
                slot_count,
                first_slot,
                slots
            })
        ),
        span.prop_map(|(a, b, begin_ms, span_ms)| {
            let (device_uuid, context, stream, sequence) = a;
            let (enqueue_begin_ns, enqueue_end_ns, tid, epoch, base) = b;
            Mark::GpuSpan(mark::GpuSpan {
                device_uuid,
                context,
                stream,
                sequence,
                enqueue_begin_ns,
                enqueue_end_ns,
                tid,
                epoch,
                base,
                begin_ms,
                span_ms,
                sampled: false,
            })
        }),
        burst.prop_map(|((device_uuid, context, epoch, base), rebase_ms, readings)| Mark::ClockBurst(
            mark::ClockBurst { device_uuid, context, epoch, base, rebase_ms, readings }
        )),
        (any::<bool>(), text(), any::<[u64; 6]>()).prop_map(|(active, reason, n)| {
            let [steps, timed, skipped_capturing, skipped_pool, skipped_error, abandoned] = n;
            Mark::InjectState(mark::InjectState {
                active,
                reason,
                steps,
                timed,
                skipped_capturing,
                skipped_pool,
                skipped_error,
                abandoned,
            })
        }),
    ]
}

fn tensor_mark() -> impl Strategy<Value = Mark> {
    prop_oneof![
        (any::<(u64, bool)>(), text(), text())
            .prop_map(|((object, asked), name, dims)| Mark::Shape(mark::Shape { object, name, dims, asked })),
        (any::<u64>(), text(), text()).prop_map(|(object, name, data_type)| Mark::DataType(mark::DataType {
            object,
            name,
            data_type
        })),
        any::<(u64, u64)>().prop_map(|(maker, made)| Mark::Made(mark::Made { maker, made })),
    ]
}

fn nvtx_mark() -> impl Strategy<Value = Mark> {
    use mark::NvtxAction::{End, Pop, Push, Start, Started};
    let action = prop::sample::select(vec![Push, Pop, Start, End, mark::NvtxAction::Mark, Started]);
    let layer = (float(), float(), any::<(Option<u32>, u16)>(), text()).prop_map(
        |(begin_ms, end_ms, (parent, depth), name)| mark::GpuLayer { begin_ms, end_ms, parent, depth, name },
    );
    prop_oneof![
        (action, any::<u64>(), text(), text(), text()).prop_map(|(action, range, name, domain, payload)| {
            Mark::Nvtx(mark::Nvtx { action, range, name, domain, payload })
        }),
        (any::<(u64, u32, u32, bool)>(), prop::collection::vec(layer, 0..4)).prop_map(
            |((sequence, total, first, cut), layers)| Mark::GpuLayers(mark::GpuLayers {
                sequence,
                total,
                first,
                cut,
                layers
            })
        ),
        any::<([u32; 3], [u64; 5])>().prop_map(|(m, n)| {
            let ([clients, refused, sample_every], [reported, limited, names_lost, sampled, skipped_pool]) =
                (m, n);
            Mark::NvtxState(mark::NvtxState {
                clients,
                refused,
                sample_every,
                reported,
                limited,
                names_lost,
                sampled,
                skipped_pool,
            })
        }),
    ]
}

fn engine_file() -> impl Strategy<Value = Event> {
    let seen = prop::sample::select(vec![EngineSeen::Opened, EngineSeen::Open, EngineSeen::Mapped]);
    (time(), process(), seen, text(), any::<(u64, u64)>(), bytes(), text()).prop_map(
        |(time_ns, process, seen, path, (bytes, modified_ns), fingerprint, problem)| {
            Event::EngineFile(EngineFile {
                time_ns,
                process,
                seen,
                path,
                bytes,
                modified_ns,
                fingerprint,
                problem,
            })
        },
    )
}

fn scheduler() -> impl Strategy<Value = Event> {
    prop_oneof![
        (origin(), any::<(u64, Option<u64>, u32, u32, u32, Option<u32>, bool, bool)>(), stack_id()).prop_map(
            |(
                origin,
                (off_ns, wake_ns, waker_tgid, waker_tid, prev_state, syscall, preempted, open),
                stack,
            )| {
                Event::Sched(Sched {
                    origin,
                    off_ns,
                    wake_ns,
                    waker_tgid,
                    waker_tid,
                    prev_state,
                    syscall,
                    preempted,
                    open,
                    stack,
                })
            }
        ),
        (origin(), any::<(u64, bool)>(), stack_id()).prop_map(|(origin, (period_ns, kernel_mode), stack)| {
            Event::Sample(Sample { origin, period_ns, kernel_mode, stack })
        }),
    ]
}

fn definition() -> impl Strategy<Value = Event> {
    let action = prop_oneof![
        Just(ProcessAction::Found),
        Just(ProcessAction::Fork),
        Just(ProcessAction::Exec),
        Just(ProcessAction::Exit)
    ];
    let cut = prop::option::of(prop::sample::select(&StackCut::ALL[..]));
    let frame = any::<(Option<u32>, Option<u32>, u64)>().prop_map(|(mapping, code, offset)| Frame {
        mapping,
        code,
        offset,
    });
    let addresses = prop::collection::vec(any::<u64>(), 0..5);
    let frames = prop::collection::vec(frame, 0..5);
    prop_oneof![
        (origin(), action, any::<(u32, u32)>(), text()).prop_map(
            |(origin, action, (parent_tgid, parent_tid), comm)| {
                Event::Process(Process { origin, action, parent_tgid, parent_tid, comm })
            }
        ),
        (time(), any::<(u64, u64, Option<u64>, Option<u64>)>()).prop_map(
            |(monotonic_ns, (raw_before_ns, raw_after_ns, realtime_ns, boottime_ns))| {
                Event::HostClock(HostClock {
                    raw_before_ns,
                    monotonic_ns,
                    raw_after_ns,
                    realtime_ns,
                    boottime_ns,
                })
            }
        ),
        (any::<u32>(), time(), process(), any::<(u64, u64, u64, u64)>(), text(), bytes()).prop_map(
            |(id, time_ns, process, (begin, end, offset, inode), path, build_id)| {
                Event::Mapping(Mapping { id, time_ns, process, begin, end, offset, inode, path, build_id })
            }
        ),
        (any::<u32>(), time(), process(), text(), text(), any::<u32>()).prop_map(
            |(id, time_ns, process, function, file, first_line)| {
                Event::Code(Code { id, time_ns, process, function, file, first_line })
            }
        ),
        (any::<u64>(), time(), process(), addresses, frames, cut, any::<u32>()).prop_map(
            |(id, time_ns, process, kernel, user, cut, frame_pointer_steps)| {
                let id = StackId(id);
                Event::Stack(Stack { id, time_ns, process, kernel, user, cut, frame_pointer_steps })
            }
        ),
        point(),
    ]
}

fn point() -> impl Strategy<Value = Event> {
    use Role::*;
    let role = prop::sample::select(vec![
        Step,
        Launch,
        GraphLaunch,
        Wait,
        Copy,
        EventRecord,
        Sync,
        CaptureBegin,
        CaptureEnd,
        StreamEnd,
        ContextEnd,
        Loader,
        Role::Mark,
        Role::Open,
        Shape,
        AskedShape,
        DataType,
        CreatesContext,
        Nvtx,
        Other,
    ]);
    let names = (text(), text(), text(), text());
    let facts = any::<(u64, bool, Option<u8>, bool)>();
    (any::<u32>(), time(), process(), role, names, bytes(), facts).prop_map(
        |(id, time_ns, process, role, (engine, name, library, placement), build_id, facts)| {
            let (offset, has_return, stream_arg, simulated) = facts;
            Event::Point(Point {
                id,
                time_ns,
                process,
                engine,
                name,
                role,
                library,
                version: String::from("1.2"),
                build_id,
                offset,
                placement,
                has_return,
                stream_arg,
                simulated,
            })
        },
    )
}

fn gpu() -> impl Strategy<Value = Event> {
    let device = (any::<[u8; 16]>(), any::<u32>(), text(), text(), any::<bool>());
    let readings = any::<([Option<u32>; 6], [Option<u64>; 3])>();
    let sample =
        (time(), any::<u64>(), device, readings).prop_map(|(time_ns, bound_ns, device, readings)| {
            let (device_uuid, device_index, device_name, pci, simulated) = device;
            let (
                [gpu_percent, memory_percent, sm_clock_mhz, memory_clock_mhz, power_mw, temperature_c],
                wide,
            ) = readings;
            let [memory_used_bytes, memory_total_bytes, throttle_reasons] = wide;
            Event::Gpu(GpuSample {
                time_ns,
                bound_ns,
                device_uuid,
                device_index,
                device_name,
                pci,
                gpu_percent,
                memory_percent,
                memory_used_bytes,
                memory_total_bytes,
                sm_clock_mhz,
                memory_clock_mhz,
                power_mw,
                temperature_c,
                throttle_reasons,
                simulated,
            })
        });
    let readings = any::<([u8; 16], Option<u64>, Option<u32>, Option<u32>)>();
    let process =
        (time(), any::<u64>(), process(), readings).prop_map(|(time_ns, bound_ns, process, readings)| {
            let (device_uuid, memory_used_bytes, sm_percent, memory_percent) = readings;
            Event::GpuProcess(GpuProcess {
                time_ns,
                bound_ns,
                device_uuid,
                process,
                memory_used_bytes,
                sm_percent,
                memory_percent,
            })
        });
    let xid = (time(), any::<u64>(), text(), any::<u32>(), text()).prop_map(
        |(time_ns, kernel_log_ns, pci, xid, message)| {
            Event::Xid(Xid { time_ns, kernel_log_ns, pci, xid, message })
        },
    );
    prop_oneof![sample, process, xid]
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    let mark =
        (origin(), prop_oneof![request_mark(), engine_mark(), nvtx_mark().boxed(), tensor_mark().boxed()])
            .prop_map(|(origin, mark)| Event::Mark(MarkEvent { origin, mark }));
    prop_oneof![call(), mark.boxed(), scheduler(), definition(), gpu(), engine_file()]
}

/// Events in order of time.
pub(crate) fn events(most: usize) -> impl Strategy<Value = Vec<Event>> {
    prop::collection::vec(event(), 0..most).prop_map(|mut events| {
        events.sort_by_key(Event::time_ns);
        events
    })
}

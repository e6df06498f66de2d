use proptest::prelude::*;

use super::*;
use crate::event::{CallEnd, ProcessId};
use crate::timeline::rows::{GpuTime, Join, Source};
use tracer_abi::mark::Slot;

const PROCESS: ProcessId = ProcessId { tgid: 7, start_ticks: 1 };
/// Threads: one that runs steps, one that delivers.
const ENGINE: u32 = 10;
const HANDLER: u32 = 20;

fn step(
    id: u64,
    begin_ns: u64,
    enqueued_ns: u64,
    gpu: Option<(u64, u64)>,
    observed_ns: u64,
    serves: &[u64],
) -> Step {
    Step {
        id,
        process: PROCESS,
        tid: ENGINE,
        point: 1,
        rank: 0,
        batch_id: Some(id),
        iteration: Some(id),
        stream: 1,
        begin_ns,
        end_ns: enqueued_ns,
        end: CallEnd::Returned,
        observed_end_ns: Some(observed_ns),
        device_uuid: None,
        gpu: gpu.map(|(begin_ns, end_ns)| GpuTime {
            begin_ns,
            end_ns,
            span_ns: end_ns - begin_ns,
            bound_ns: 5,
        }),
        sampled: false,
        engine: None,
        engine_version: String::new(),
        nvtx_request: String::new(),
        nvtx_range: String::new(),
        input_shapes: String::new(),
        output_shapes: String::new(),
        data_types: String::new(),
        quantization: String::new(),
        slots: serves.iter().map(|&request| Slot { request, ..Slot::default() }).collect(),
    }
}

fn request(id: u64, received_ns: u64, read_ns: Option<u64>) -> Request {
    Request {
        id,
        process: PROCESS,
        program_request: id,
        request_id: String::new(),
        trace_id: None,
        span_id: None,
        tenant_id: String::new(),
        model: String::new(),
        model_version: String::new(),
        engine_hash: String::new(),
        adapters: String::new(),
        kv_cache_strategy: String::new(),
        prompt_tokens: None,
        received_ns,
        arrived_ns: None,
        read_ns,
        source: Source::Mark,
        end_ns: None,
        finish_reason: 0,
        declared_tokens: None,
        tokens: 0,
        ttft_ns: None,
        tpot_ns: None,
    }
}

fn token(request: u64, index: u32, begin_ns: u64, delivered_ns: u64, step: Option<u64>) -> Token {
    Token {
        request,
        choice: 0,
        index,
        process: PROCESS,
        tid: HANDLER,
        delivered_ns,
        written_ns: None,
        wire_ns: None,
        latency_ns: Some(delivered_ns - begin_ns),
        source: Source::Mark,
        iteration: step,
        step,
        join: Join::Mark,
        prefill: index == 0,
    }
}

fn off(begin_ns: u64, runnable_ns: u64, end_ns: u64, waker: u32, blocked: Blocked) -> OffCpuInterval {
    let waker = if waker == 0 { (0, 0) } else { (PROCESS.tgid, waker) };
    OffCpuInterval { begin_ns, runnable_ns, end_ns, waker, blocked, stack: None }
}

fn threads(of: &[(u32, &[OffCpuInterval])]) -> Threads {
    let mut threads = Threads::default();
    for (tid, intervals) in of {
        intervals.iter().for_each(|interval| threads.push((PROCESS.tgid, *tid), *interval));
    }
    threads.sort();
    threads
}

/// Label and length of each part.
fn parts(budgets: &Budgets, token: &Token) -> Vec<(Label, u64)> {
    budgets.segments(token).iter().map(|segment| (segment.label, segment.length_ns())).collect()
}

/// The engine waits for its steps, and the handler for the engine.
fn usual() -> Threads {
    threads(&[
        (ENGINE, &[off(130, 195, 200, 0, Blocked::Sleep), off(330, 395, 400, 0, Blocked::Sleep)]),
        (HANDLER, &[off(60, 210, 215, ENGINE, Blocked::Futex), off(230, 410, 415, ENGINE, Blocked::Futex)]),
    ])
}

#[test]
fn a_token_passes_the_engine_and_is_delivered() {
    let steps =
        [step(0, 100, 120, Some((150, 190)), 202, &[1]), step(1, 300, 320, Some((340, 390)), 402, &[1])];
    let tokens = [token(1, 0, 50, 220, Some(0)), token(1, 1, 220, 420, Some(1))];
    let budgets = Budgets::new(&steps, &[request(1, 50, None)], &tokens, usual());
    use Label::*;
    assert_eq!(
        parts(&budgets, &tokens[1]),
        [
            (HostRunning, 80),
            (Enqueue, 20),
            (GpuWait, 20),
            (GpuSpan, 50),
            (SyncWake, 5),
            (HostRunqueue, 5),
            (SyncWake, 2),
            (Deliver, 8),
            (HostRunqueue, 5),
            (Deliver, 5),
        ]
    );
    let budget = budgets.budget(&tokens[1]).unwrap();
    assert_eq!(
        (budget.top(), budget.part_ns(Deliver), budget.bound_ns, budget.vague),
        (HostRunning, 13, 5, false)
    );
    assert_eq!(budget.parts_ns.iter().sum::<u64>(), budget.latency_ns);
    // Before the engine was woken for it, the handler ran: the walk comes back to it.
    let first = budgets.segments(&tokens[0]);
    assert_eq!((first[0].label, first[0].thread), (HostRunning, (7, ENGINE)));
}

#[test]
fn steps_of_others_are_a_queue_until_the_request_is_in_a_batch() {
    let steps = [
        step(0, 100, 110, Some((110, 190)), 195, &[2]),
        step(1, 200, 210, Some((210, 290)), 295, &[1, 2]),
        step(2, 300, 310, Some((310, 390)), 395, &[2]),
        step(3, 400, 410, Some((410, 490)), 495, &[1, 2]),
    ];
    let tokens = [token(1, 0, 120, 298, Some(1)), token(1, 1, 298, 498, Some(3))];
    let sleeps = [off(112, 195, 195, 0, Blocked::Sleep), off(312, 395, 395, 0, Blocked::Sleep)];
    let handler = [off(121, 296, 296, ENGINE, Blocked::Futex), off(299, 496, 496, ENGINE, Blocked::Futex)];
    let threads = threads(&[(ENGINE, &sleeps), (HANDLER, &handler)]);
    let requests = [request(1, 120, None), request(2, 10, None)];
    let budgets = Budgets::new(&steps, &requests, &tokens, threads);
    let first = budgets.budget(&tokens[0]).unwrap();
    assert_eq!((first.part_ns(Label::Queue), first.part_ns(Label::OtherSteps)), (75, 0));
    let second = budgets.budget(&tokens[1]).unwrap();
    assert_eq!((second.part_ns(Label::Queue), second.part_ns(Label::OtherSteps)), (0, 95));
}

#[test]
fn a_prompt_in_chunks_waits_for_all_of_them() {
    let steps =
        [step(0, 100, 110, Some((110, 190)), 195, &[1]), step(1, 200, 210, Some((210, 290)), 295, &[1])];
    let tokens = [token(1, 0, 90, 300, Some(1))];
    let threads = threads(&[(ENGINE, &[]), (HANDLER, &[off(95, 297, 297, ENGINE, Blocked::Futex)])]);
    let budget = Budgets::new(&steps, &[request(1, 90, None)], &tokens, threads).budget(&tokens[0]).unwrap();
    assert_eq!((budget.part_ns(Label::GpuSpan), budget.part_ns(Label::OtherSteps)), (160, 0));
}

#[test]
fn a_lock_and_a_busy_cpu_show_on_the_thread_that_has_them() {
    let steps = [step(0, 300, 400, Some((410, 490)), 495, &[1])];
    let tokens = [token(1, 1, 100, 500, Some(0))];
    // The lock's holder slept: nobody in the recording did anything for it.
    let engine = [off(150, 250, 250, 30, Blocked::Futex), off(320, 320, 380, 0, Blocked::Other)];
    let handler = [off(101, 496, 496, ENGINE, Blocked::Futex)];
    let holder = [off(40, 249, 249, 0, Blocked::Sleep)];
    let threads = threads(&[(ENGINE, &engine), (HANDLER, &handler), (30, &holder)]);
    let budgets = Budgets::new(&steps, &[request(1, 0, None)], &tokens, threads);
    let budget = budgets.budget(&tokens[0]).unwrap();
    assert_eq!((budget.part_ns(Label::HostBlocked), budget.blocked), (149, Some(Blocked::Sleep)));
    assert_eq!((budget.part_ns(Label::HostRunqueue), budget.part_ns(Label::Enqueue)), (60, 40));
}

#[test]
fn a_client_that_does_not_read_holds_the_token_and_not_the_gpu() {
    let steps = [step(0, 120, 130, Some((130, 190)), 195, &[1])];
    let tokens = [token(1, 1, 100, 500, Some(0))];
    let handler = [off(110, 490, 490, 0, Blocked::SocketWrite)];
    let budgets =
        Budgets::new(&steps, &[request(1, 0, None)], &tokens, threads(&[(ENGINE, &[]), (HANDLER, &handler)]));
    let budget = budgets.budget(&tokens[0]).unwrap();
    assert_eq!(budget.top(), Label::HostBlocked);
    assert_eq!((budget.part_ns(Label::HostBlocked), budget.blocked), (380, Some(Blocked::SocketWrite)));
    // One that held it while the step ran held nothing up.
    let handler = [off(110, 150, 150, 0, Blocked::SocketWrite)];
    let budgets =
        Budgets::new(&steps, &[request(1, 0, None)], &tokens, threads(&[(ENGINE, &[]), (HANDLER, &handler)]));
    let budget = budgets.budget(&tokens[0]).unwrap();
    assert_eq!((budget.part_ns(Label::GpuSpan), budget.part_ns(Label::HostBlocked)), (60, 10));
}

#[test]
fn without_gpu_times_or_threads_it_says_so() {
    let steps = [step(0, 120, 130, None, 195, &[1])];
    let mut tokens = [token(1, 0, 90, 200, Some(0))];
    tokens[0].wire_ns = Some(240);
    let lag = [request(1, 90, Some(100))];
    let known = Budgets::new(&steps, &lag, &tokens, usual()).budget(&tokens[0]).unwrap();
    assert_eq!((known.part_ns(Label::HostObserved), known.part_ns(Label::EventLoopLag)), (65, 10));
    assert_eq!((known.part_ns(Label::NagleHold), known.latency_ns, known.bound_ns), (40, 110, 0));
    // Of the threads nothing is known; of the step, when it was.
    let unknown = Budgets::new(&steps, &lag, &tokens, Threads::default()).budget(&tokens[0]).unwrap();
    assert_eq!((unknown.part_ns(Label::HostObserved), unknown.part_ns(Label::Unattributed)), (65, 25));
    let lost = Token { latency_ns: None, ..token(1, 5, 0, 9, None) };
    assert!(Budgets::default().budget(&lost).is_none() && Budgets::default().segments(&lost).is_empty());
}

fn interval() -> impl Strategy<Value = (u32, u64, u64, u64, u32, Blocked)> {
    let on = prop::sample::select(vec![Blocked::Futex, Blocked::Sleep, Blocked::SocketWrite, Blocked::Poll]);
    let tid = || prop::sample::select(vec![0u32, ENGINE, HANDLER, 30]);
    (tid(), 0u64..1_000, 0u64..200, 0u64..50, tid(), on)
}

proptest! {
    /// Whatever the recording holds, even what cannot be: no gap, no overlap, and the sum is the latency.
    #[test]
    fn parts_sum_to_the_latency(
        steps in prop::collection::vec((0u64..1_000, 0u64..60, 0u64..100, 0u64..100, 0u64..200, any::<bool>(), 0u64..3), 0..8),
        intervals in prop::collection::vec(interval(), 0..40),
        tokens in prop::collection::vec((0u64..3, 0u32..3, 0u64..1_000, 0u64..500, 0u64..10), 1..6),
        reads in prop::collection::vec((0u64..1_000, prop::option::of(0u64..1_200)), 3),
    ) {
        let steps: Vec<Step> = (0..).zip(steps).map(|(id, (begin, enqueue, wait, span, sync, has_gpu, serves))| {
            let gpu = has_gpu.then_some((begin + wait, begin + wait + span));
            step(id, begin, begin + enqueue, gpu, begin + sync, &[serves])
        }).collect();
        let requests: Vec<Request> = (0..).zip(reads).map(|(id, (at, read))| request(id, at, read)).collect();
        let tokens: Vec<Token> = tokens.into_iter().map(|(r, index, begin, length, step)| {
            token(r, index, begin, begin + length, (step < steps.len() as u64).then_some(step))
        }).collect();
        let mut threads = Threads::default();
        for (tid, begin, blocked, wait, waker, on) in intervals {
            threads.push((PROCESS.tgid, tid), off(begin, begin + blocked, begin + blocked + wait, waker, on));
        }
        threads.sort();
        let budgets = Budgets::new(&steps, &requests, &tokens, threads);
        for token in &tokens {
            let segments = budgets.segments(token);
            let latency = token.latency_ns.unwrap();
            let mut at = token.delivered_ns - latency;
            for segment in &segments {
                prop_assert_eq!(segment.begin_ns, at);
                prop_assert!(segment.end_ns > at);
                at = segment.end_ns;
            }
            prop_assert_eq!(at, token.delivered_ns);
            let budget = budgets.budget(token).unwrap();
            prop_assert_eq!(budget.parts_ns.iter().sum::<u64>(), latency);
            prop_assert!(Label::PARTS.iter().all(|label| budget.part_ns(*label) <= budget.part_ns(budget.top())));
        }
    }
}

use std::collections::BTreeMap;

use proptest::prelude::*;
use tracer_abi::mark::{FINISH_CANCELLED, FINISH_LENGTH, FINISH_STOP, SLOT_NO_TOKEN};

use super::rows::Unmatched;
use super::testing::*;
use super::*;
use crate::event::mark::{Attr, AttrValue, InjectState};
use crate::event::{Call, CallEnd, MarkEvent};

fn timeline() -> Timeline<EnqueueClock> {
    Timeline::new(Config::default(), EnqueueClock)
}

fn feed(events: &[Event]) -> (Output, Timeline<EnqueueClock>) {
    let mut timeline = timeline();
    for event in events {
        timeline.feed(event);
    }
    timeline.finish();
    (timeline.drain(), timeline)
}

/// Points first, then these.
fn play(events: &[Event]) -> (Output, Timeline<EnqueueClock>) {
    let mut all = points();
    all.extend_from_slice(events);
    feed(&all)
}

fn unmatched(timeline: &Timeline<EnqueueClock>) -> BTreeMap<&'static str, u64> {
    let counts = Unmatched::ALL.map(|kind| (kind.name(), timeline.unmatched(kind)));
    counts.into_iter().filter(|(_, count)| *count > 0).collect()
}

fn plan(withholding: bool) -> impl Strategy<Value = Plan> {
    let requests = prop::collection::vec((1u32..12, any::<bool>()), 1..25);
    let percent = if withholding { 0..60u64 } else { 0..1u64 };
    (
        any::<u64>(),
        1u32..4,
        1usize..9,
        requests,
        percent.clone(),
        percent,
        any::<bool>(),
        prop::sample::select(vec![1, 100, 3_000]),
    )
        .prop_map(
            |(seed, ranks, max_batch, requests, withheld_tokens, withheld_batches, spans, scale)| Plan {
                seed,
                ranks,
                max_batch,
                requests,
                withheld_tokens,
                withheld_batches,
                spans,
                scale,
            },
        )
}

/// Everything that the rows say, against what happened.
fn check_rows(plan: &Plan, history: &History, out: &Output) {
    check_steps(plan, history, out);
    assert_eq!(out.requests.len(), history.requests.len());
    for request in &out.requests {
        let (received_ns, end_ns, delivered) = history.requests[&request.request_id];
        assert_eq!((request.received_ns, request.end_ns), (received_ns, Some(end_ns)));
        let of_request = |key: &&(String, u32)| key.0 == request.request_id;
        let marked = history.tokens.iter().filter(|(key, truth)| of_request(key) && truth.marked).count();
        assert_eq!(request.tokens as usize, marked);
        assert!(request.tokens <= delivered);
    }
    let ids: BTreeMap<u64, &str> = out.requests.iter().map(|r| (r.id, r.request_id.as_str())).collect();
    let batch_of: BTreeMap<u64, u64> = out.iterations.iter().map(|i| (i.id, i.batch_id)).collect();
    let mut seen = 0;
    for token in &out.tokens {
        let id = ids[&token.request].to_owned();
        let truth = history.tokens[&(id.clone(), token.index)];
        assert!(truth.marked);
        assert_eq!(token.delivered_ns, truth.delivered_ns);
        let batch_id = token.iteration.map(|iteration| batch_of[&iteration]);
        assert_eq!(batch_id, truth.batch_marked.then_some(truth.batch_id));
        assert_eq!(token.prefill, truth.batch_marked && token.index == 0);
        let before = match token.index.checked_sub(1) {
            None => Some(history.requests[&id].0),
            Some(before) => history.tokens.get(&(id, before)).filter(|t| t.marked).map(|t| t.delivered_ns),
        };
        assert_eq!(token.latency_ns, before.map(|before| truth.delivered_ns - before));
        seen += 1;
    }
    assert_eq!(seen, history.tokens.values().filter(|truth| truth.marked).count());
}

fn check_steps(plan: &Plan, history: &History, out: &Output) {
    let mut truth: Vec<&TrueStep> = history.steps.iter().collect();
    truth.sort_by_key(|step| (step.begin_ns, step.tid));
    assert_eq!(out.steps.len(), truth.len());
    for (i, (step, truth)) in out.steps.iter().zip(truth).enumerate() {
        assert_eq!(step.id, i as u64);
        assert_eq!((step.begin_ns, step.end_ns, step.tid), (truth.begin_ns, truth.end_ns, truth.tid));
        assert_eq!(step.observed_end_ns, Some(truth.observed_end_ns));
        assert_eq!(step.batch_id, truth.marked.then_some(truth.batch_id));
        assert_eq!(step.gpu.map(|gpu| gpu.end_ns), plan.spans.then_some(truth.gpu_end_ns));
        assert_eq!(step.stream, 7);
    }
    for iteration in &out.iterations {
        let steps: Vec<&Step> = out.steps.iter().filter(|s| s.iteration == Some(iteration.id)).collect();
        assert_eq!((steps.len(), iteration.steps), (plan.ranks as usize, plan.ranks));
        let end = |s: &Step| s.gpu.map_or(s.observed_end_ns.unwrap(), |gpu| gpu.end_ns);
        let slowest = steps.iter().max_by_key(|s| (end(s), std::cmp::Reverse(s.id))).unwrap();
        assert_eq!((iteration.slowest_rank, iteration.end_ns), (slowest.rank, end(slowest)));
        assert_eq!(iteration.begin_ns, steps.iter().map(|s| s.begin_ns).min().unwrap());
        assert_eq!(iteration.requests as usize, steps[0].slots.len());
        let slot_tokens: u64 = steps[0].slots.iter().map(|s| u64::from(s.tokens)).sum();
        assert_eq!(iteration.tokens, slot_tokens);
        for token in out.tokens.iter().filter(|t| t.iteration == Some(iteration.id)) {
            assert_eq!(token.step, Some(slowest.id));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_well_formed_history_is_understood_completely(plan in plan(false)) {
        let history = run(&plan);
        let (out, timeline) = feed(&history.events);
        prop_assert_eq!(unmatched(&timeline), BTreeMap::new());
        check_rows(&plan, &history, &out);
        for request in &out.requests {
            prop_assert_eq!(request.tokens, history.requests[&request.request_id].2);
        }
    }

    #[test]
    fn exactly_what_is_withheld_is_unmatched(plan in plan(true)) {
        let history = run(&plan);
        let (out, timeline) = feed(&history.events);
        check_rows(&plan, &history, &out);
        let mut expected = BTreeMap::new();
        // A program that marks no batch at all has no step without one.
        let marks_batches = history.steps.iter().any(|step| step.marked);
        let steps = history.steps.iter().filter(|step| marks_batches && !step.marked).count() as u64;
        let orphans = history.tokens.values().filter(|t| t.marked && !t.batch_marked).count() as u64;
        let mut lost = 0;
        for (key, truth) in &history.tokens {
            let request = out.requests.iter().find(|r| r.request_id == key.0).unwrap();
            // After a cancellation nobody can tell whether the tokens behind the last delivered one were written.
            let last = history.tokens.iter().filter(|(k, t)| k.0 == key.0 && t.marked).map(|(k, _)| k.1).max();
            let is_known = request.finish_reason != FINISH_CANCELLED || last.is_some_and(|last| key.1 < last);
            lost += u64::from(!truth.marked && is_known);
        }
        for (name, count) in [("step_without_batch", steps), ("token_without_step", orphans), ("token_not_delivered", lost)] {
            if count > 0 {
                expected.insert(name, count);
            }
        }
        prop_assert_eq!(unmatched(&timeline), expected);
    }

    #[test]
    fn interleavings_make_no_difference(plan in plan(true), seed in any::<u64>(), drains in any::<bool>()) {
        let history = run(&plan);
        let (expected, in_order) = feed(&history.events);
        // Everything within the slack may come in any order; definitions come first.
        let mut random = Random(seed);
        let mut events = history.events.clone();
        let defined = points().len();
        let mut from = defined;
        while from < events.len() {
            let time_ns = events[from].time_ns();
            let window = events[from..].iter().take_while(|e| e.time_ns() <= time_ns + 90_000_000).count();
            random.shuffle(&mut events[from..from + window]);
            from += window;
        }
        let mut timeline = timeline();
        let mut out = Output::default();
        for event in &events {
            timeline.feed(event);
            if drains && random.below(4) == 0 {
                let part = timeline.drain();
                out.steps.extend(part.steps);
                out.iterations.extend(part.iterations);
                out.requests.extend(part.requests);
                out.tokens.extend(part.tokens);
            }
        }
        timeline.finish();
        let part = timeline.drain();
        out.steps.extend(part.steps);
        out.iterations.extend(part.iterations);
        out.requests.extend(part.requests);
        out.tokens.extend(part.tokens);
        prop_assert_eq!(out, expected);
        prop_assert_eq!(timeline.ledger(), in_order.ledger());
    }

    #[test]
    fn no_token_mark_is_lost_or_invented(soup in prop::collection::vec(soup(), 0..400), bound in 1usize..20) {
        let mut timeline = Timeline::new(Config { max_open: bound, ..Config::default() }, EnqueueClock);
        let mut out = Output::default();
        for event in points().iter().chain(&soup) {
            timeline.feed(event);
            prop_assert!(timeline.steps.len() <= bound && timeline.iterations.len() <= bound);
            prop_assert!(timeline.requests.len() <= bound && timeline.order.held() <= bound);
            out.tokens.append(&mut timeline.drain().tokens);
        }
        timeline.finish();
        out.tokens.append(&mut timeline.drain().tokens);
        let marks = soup.iter().filter(|e| matches!(e, Event::Mark(MarkEvent { mark: Mark::Token(_), .. }))).count();
        let repeated = timeline.unmatched(Unmatched::TokenRepeated) as usize;
        prop_assert_eq!(out.tokens.len() + repeated, marks);
        prop_assert_eq!(timeline.finish(), ());
        prop_assert_eq!(timeline.drain(), Output::default());
    }
}

/// Events that make no sense together.
fn soup() -> impl Strategy<Value = Event> {
    let time = prop_oneof![0..3_000_000_000u64, Just(u64::MAX), 0..20_000_000_000u64];
    (0..11u8, 98..103u32, time, 0..6u64, prop_oneof![0..5u32, Just(u32::MAX)], any::<u32>()).prop_map(
        |(kind, tid, time_ns, number, index, extra)| match kind {
            0 => begin(tid, time_ns, number),
            1 => end(tid, time_ns, number, index, extra % 6),
            2..=4 => token(tid, time_ns, number, index),
            5 | 6 => batch(tid, time_ns, number % 3, &[slot(number, index), slot(number + 1, extra % 5)]),
            7 => call(STEP, tid, time_ns.saturating_sub(extra.into()), time_ns, [0, 7]),
            8 => call(WAIT, tid, time_ns.saturating_sub(extra.into()), time_ns, [7, 0]),
            9 => span(tid, time_ns, (time_ns.saturating_sub(1 << 32), time_ns.min(1 << 60)), 5),
            _ => Event::Process(crate::event::Process {
                origin: origin(if extra % 2 == 0 { PROCESS.tgid } else { tid }, time_ns),
                action: ProcessAction::Exit,
                parent_tgid: 0,
                parent_tid: 0,
                comm: String::new(),
            }),
        },
    )
}

fn step(tid: u32, begin_ns: u64, end_ns: u64) -> Event {
    call(STEP, tid, begin_ns, end_ns, [0, 7])
}

fn with_call(event: Event, change: impl FnOnce(&mut Call)) -> Event {
    let Event::Call(mut call) = event else { panic!("not a call") };
    change(&mut call);
    Event::Call(call)
}

#[test]
fn a_forwarder_and_its_callee_are_one_step() {
    let direct = with_call(step(100, 30, 40), |c| (c.parent_point, c.depth) = (Some(STEP), 1));
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        batch(100, 20, 5, &[slot(1, 0)]),
        direct,
        step(100, 25, 50),
        token(200, 90, 1, 0),
    ]);
    assert_eq!((out.steps.len(), out.steps[0].begin_ns, out.steps[0].batch_id), (1, 25, Some(5)));
    assert_eq!(out.tokens[0].step, Some(0));
    assert_eq!(unmatched(&timeline), BTreeMap::new());

    // With a probed call that is no step between them.
    let inner = with_call(step(100, 30, 40), |c| (c.parent_point, c.depth) = (Some(OTHER), 2));
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        batch(100, 20, 5, &[slot(1, 0)]),
        inner,
        step(100, 25, 50),
        token(200, 90, 1, 0),
    ]);
    assert_eq!((out.steps.len(), out.steps[0].begin_ns, out.steps[0].batch_id), (1, 25, Some(5)));
    assert_eq!((out.iterations.len(), out.iterations[0].steps, out.tokens[0].step), (1, 1, Some(0)));
    assert_eq!(unmatched(&timeline), BTreeMap::new());
}

#[test]
fn a_batch_serves_one_step_and_the_last_before_it_wins() {
    let slots = [slot(1, 0)];
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        batch(100, 12, 4, &slots),
        step(100, 14, 16),
        batch(100, 20, 5, &slots),
        batch(100, 30, 6, &slots),
        step(100, 40, 50),
        step(100, 60, 70),
        batch(100, 80, 7, &slots),
    ]);
    assert_eq!(out.steps.iter().map(|s| s.batch_id).collect::<Vec<_>>(), [Some(4), Some(6), None]);
    // The batch at the end was ahead of its step.
    assert_eq!(unmatched(&timeline), BTreeMap::from([("batch_without_step", 1), ("step_without_batch", 1)]));
    let examples: Vec<&str> = timeline.examples().iter().map(|e| e.what.as_str()).collect();
    assert_eq!(examples, ["batch 5 rank 0", "step at 60 ns"]);
}

#[test]
fn a_batch_made_during_a_step_belongs_to_the_next() {
    let (out, _) = play(&[
        begin(200, 5, 1),
        batch(100, 10, 1, &[slot(1, 0)]),
        batch(100, 25, 2, &[slot(1, 1)]),
        step(100, 20, 30),
        step(100, 40, 50),
    ]);
    assert_eq!(out.steps.iter().map(|s| s.batch_id).collect::<Vec<_>>(), [Some(1), Some(2)]);
}

#[test]
fn a_step_that_hangs_longer_than_anyone_waits_keeps_its_batch_and_tokens() {
    let second = 1_000_000_000;
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        begin(201, 11, 2),
        batch(100, 20, 5, &[slot(1, 0)]),
        batch(101, 21, 6, &[slot(2, 0)]),
        step(101, 30, 40),
        step(100, 30, 20 * second),
        token(200, 21 * second, 1, 0),
        end(200, 22 * second, 1, 1, FINISH_STOP),
    ]);
    assert_eq!(out.steps.iter().map(|s| s.batch_id).collect::<Vec<_>>(), [Some(6), Some(5)]);
    assert_eq!((out.tokens.len(), out.tokens[0].step), (1, Some(1)));
    assert_eq!(unmatched(&timeline), BTreeMap::new());
}

#[test]
fn a_number_may_be_used_again() {
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        step(100, 12, 14),
        token(200, 20, 1, 0),
        end(200, 30, 1, 1, FINISH_STOP),
        begin(200, 40, 1),
        token(200, 60, 1, 0),
        token(200, 65, 1, 0),
        end(200, 70, 1, 1, FINISH_STOP),
    ]);
    assert_eq!(out.requests.iter().map(|r| r.ttft_ns).collect::<Vec<_>>(), [Some(10), Some(20)]);
    assert_ne!(out.requests[0].id, out.requests[1].id);
    assert_eq!(unmatched(&timeline), BTreeMap::from([("token_repeated", 1), ("token_without_step", 2)]));
}

#[test]
fn what_was_there_before_the_first_step_is_not_unmatched() {
    let (out, timeline) = play(&[
        begin(200, 5, 2),
        // Delivered by a step that was not recorded; so is its batch mark.
        token(200, 10, 1, 40),
        batch(100, 20, 1, &[slot(1, 42), slot(2, 0)]),
        token(200, 25, 1, 41),
        token(200, 28, 1, 42),
        batch(100, 30, 2, &[slot(1, 43), slot(2, 1)]),
        step(100, 40, 45),
        token(200, 48, 2, 0),
        token(200, 50, 1, 43),
    ]);
    assert_eq!(out.tokens.iter().filter(|token| token.step.is_some()).count(), 1);
    assert_eq!(unmatched(&timeline), BTreeMap::from([("before_first_step", 5), ("unknown_request", 1)]));
}

#[test]
fn a_request_from_before_the_recording_is_counted_once_and_its_tokens_are_kept() {
    let (out, timeline) = play(&[
        batch(100, 10, 1, &[slot(9, 41)]),
        step(100, 20, 30),
        token(200, 40, 9, 41),
        batch(100, 50, 2, &[slot(9, 42)]),
        step(100, 60, 70),
        // Token 42 withheld.
        batch(100, 80, 3, &[slot(9, 43)]),
        step(100, 90, 95),
        token(200, 99, 9, 43),
        end(200, 120, 9, 44, FINISH_STOP),
    ]);
    assert!(out.requests.is_empty());
    assert_eq!(
        out.tokens.iter().map(|t| (t.index, t.latency_ns)).collect::<Vec<_>>(),
        [(41, None), (43, None)]
    );
    assert_eq!(unmatched(&timeline), BTreeMap::from([("unknown_request", 1), ("token_not_delivered", 1)]));
}

#[test]
fn tokens_missing_both_ways_are_counted_by_what_was_declared() {
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        token(200, 20, 1, 0),
        token(200, 50, 1, 3),
        end(200, 60, 1, 6, FINISH_LENGTH),
    ]);
    assert_eq!(timeline.unmatched(Unmatched::TokenNotDelivered), 4);
    assert_eq!((out.requests[0].tokens, out.requests[0].tpot_ns), (2, Some(10.0)));
}

#[test]
fn what_a_cancelled_or_running_request_never_got_is_no_loss() {
    let generated =
        |id, index| [batch(100, id * 100, id, &[slot(1, index)]), step(100, id * 100 + 10, id * 100 + 20)];
    let mut events = vec![begin(200, 10, 1)];
    events.extend((1..=4).flat_map(|id| generated(id, id as u32 - 1)));
    events.extend([token(200, 150, 1, 0), token(200, 350, 1, 2)]);
    events.sort_by_key(Event::time_ns);
    // Token 1 is missing for certain; token 3 was generated and nobody knows more.
    let (out, timeline) = play(&events);
    assert_eq!((timeline.unmatched(Unmatched::TokenNotDelivered), out.requests[0].end_ns), (1, None));
    events.push(end(200, 900, 1, 4, FINISH_CANCELLED));
    assert_eq!(play(&events).1.unmatched(Unmatched::TokenNotDelivered), 1);
    events.pop();
    events.push(end(200, 900, 1, 4, FINISH_STOP));
    assert_eq!(play(&events).1.unmatched(Unmatched::TokenNotDelivered), 2);
    events.pop();
    // Without a declaration the slots tell.
    events.push(end(200, 900, 1, 0, FINISH_STOP));
    assert_eq!(play(&events).1.unmatched(Unmatched::TokenNotDelivered), 2);
}

#[test]
fn a_chunk_of_a_prefill_yields_no_token() {
    let chunk = tracer_abi::mark::Slot { flags: SLOT_NO_TOKEN, ..slot(1, 0) };
    let (out, timeline) = play(&[
        begin(200, 10, 1),
        batch(100, 20, 1, &[chunk]),
        step(100, 30, 40),
        batch(100, 50, 2, &[slot(1, 0)]),
        step(100, 60, 70),
        token(200, 80, 1, 0),
        end(200, 90, 1, 1, FINISH_STOP),
    ]);
    assert_eq!(
        (out.tokens[0].iteration, out.tokens[0].step, out.tokens[0].prefill),
        (Some(1), Some(1), true)
    );
    assert_eq!(unmatched(&timeline), BTreeMap::new());
}

#[test]
fn spans_find_their_step_across_pid_namespaces_if_it_is_the_only_one() {
    let events = |inside: u64| {
        [injected(5), step(100, 10, 20), step(101, inside, inside + 1), span(7, 40, (9, 22), 5)]
    };
    let (out, timeline) = play(&events(25));
    assert_eq!(out.steps[0].gpu.map(|gpu| gpu.begin_ns), Some(25));
    assert_eq!(timeline.unmatched(Unmatched::GpuSpanWithoutStep), 0);
    let (_, timeline) = play(&events(12));
    assert_eq!(timeline.unmatched(Unmatched::GpuSpanWithoutStep), 1);
}

#[test]
fn missing_spans_count_only_while_the_library_is_active() {
    let step_ns = 10_000_000;
    let steps = |from: u64, n: u64| (from..from + n).map(move |i| step(100, i * step_ns, i * step_ns + 10));
    let silent: Vec<Event> = steps(1, 10).collect();
    assert_eq!(play(&silent).1.unmatched(Unmatched::StepWithoutGpuSpan), 0);

    // Active from step 11; spans of steps 12 and 15 come; those after 15 were not harvested yet.
    let mut events = silent;
    events.push(injected(11 * step_ns - 1));
    events.extend(steps(11, 8));
    events.extend([12, 15].map(|i| span(100, 19 * step_ns, (i * step_ns - 5, i * step_ns + 20), 5)));
    assert_eq!(play(&events).1.unmatched(Unmatched::StepWithoutGpuSpan), 3);

    // Long after, all that were expected are missing; once it is off, none is expected.
    let off = |event| {
        let Event::Mark(MarkEvent { origin, mark: Mark::InjectState(state) }) = event else {
            panic!("no state")
        };
        let reason = "error 999".to_owned();
        let state = InjectState { active: false, reason, ..state };
        Event::Mark(MarkEvent { origin, mark: Mark::InjectState(state) })
    };
    events.push(off(injected(1_000 * step_ns)));
    events.extend(steps(1_001, 3));
    let timeline = play(&events).1;
    assert_eq!(timeline.unmatched(Unmatched::StepWithoutGpuSpan), 6);
    let off = timeline.ledger().into_iter().find(|row| row.name.starts_with("gpu_times_off")).unwrap();
    assert_eq!((off.name.as_str(), off.count, off.loss), ("gpu_times_off: error 999", 1, true));
}

#[test]
fn a_span_that_the_clock_cannot_map_is_counted() {
    let mut timeline = Timeline::new(Config::default(), NoClock);
    for event in points().iter().chain(&[step(100, 10, 20), span(100, 40, (9, 22), 5)]) {
        timeline.feed(event);
    }
    timeline.finish();
    let steps = timeline.drain().steps;
    assert_eq!((steps[0].gpu, steps[0].device_uuid), (None, Some(*b"SIMGPU0000000000")));
    assert_eq!(timeline.unmatched(Unmatched::GpuSpanUnaligned), 1);
}

#[test]
fn waits_of_other_streams_and_threads_and_unfinished_waits_do_not_end_a_step() {
    let wait = |tid, begin, end, stream| call(WAIT, tid, begin, end, [stream, 0]);
    let open = with_call(wait(100, 50, 60, 7), |c| c.end = CallEnd::Open);
    let events = [
        step(100, 10, 20),
        wait(100, 30, 35, 8),
        wait(101, 30, 36, 7),
        open,
        wait(100, 61, 70, 7),
        wait(100, 80, 90, 7),
    ];
    assert_eq!(play(&events).0.steps[0].observed_end_ns, Some(70));
}

/// Keeps what it is told.
#[derive(Default)]
struct Listener(Vec<(u64, Witness)>);

impl Clock for Listener {
    fn map(&mut self, process: ProcessId, span: &GpuSpan) -> Option<GpuTime> {
        EnqueueClock.map(process, span)
    }

    fn witness(&mut self, _process: ProcessId, span: &GpuSpan, witness: Witness) {
        self.0.push((span.enqueue_begin_ns, witness));
    }
}

#[test]
fn a_wait_for_the_stream_witnesses_the_span_and_a_failed_one_or_one_for_an_event_does_not() {
    const EVENT_WAIT: u32 = 9;
    let wait = |point, begin, end, ret| with_call(call(point, 100, begin, end, [7, 0]), |c| c.ret = ret);
    let mut timeline = Timeline::new(Config::default(), Listener::default());
    let defined = points().into_iter().chain([point(EVENT_WAIT, Role::Wait, None)]);
    let events = [
        step(100, 10, 20),
        wait(WAIT, 30, 40, 0),
        span(100, 45, (9, 22), 5),
        step(100, 50, 60),
        wait(WAIT, 70, 80, 700),
        span(100, 85, (49, 62), 5),
        step(100, 90, 100),
        wait(EVENT_WAIT, 110, 120, 0),
        span(100, 125, (89, 102), 5),
    ];
    defined.chain(events).for_each(|event| timeline.feed(&event));
    timeline.finish();
    assert_eq!(timeline.clock().0, [(9, Witness::WaitReturned(40))]);
}

#[test]
fn a_pipelined_wait_ends_every_step_before_it() {
    let events = [step(100, 10, 20), step(100, 30, 40), call(WAIT, 100, 50, 60, [7, 0])];
    let ends: Vec<_> = play(&events).0.steps.iter().map(|s| s.observed_end_ns).collect();
    assert_eq!(ends, [Some(60), Some(60)]);
}

#[test]
fn calls_without_a_return_are_steps() {
    let entry_only = with_call(step(100, 10, 10), |c| (c.end, c.end_ns) = (CallEnd::EntryOnly, 0));
    let open = with_call(step(100, 30, 99), |c| c.end = CallEnd::Open);
    let (out, _) = play(&[entry_only, open]);
    assert_eq!(
        out.steps.iter().map(|s| (s.end_ns, s.end)).collect::<Vec<_>>(),
        [(0, CallEnd::EntryOnly), (99, CallEnd::Open)]
    );
}

#[test]
fn a_large_batch_comes_in_parts() {
    let plan = Plan {
        seed: 1,
        ranks: 2,
        max_batch: 300,
        requests: vec![(3, false); 300],
        withheld_tokens: 0,
        withheld_batches: 0,
        spans: true,
        scale: 1,
    };
    let history = run(&plan);
    let (out, timeline) = feed(&history.events);
    assert!(out.steps.iter().any(|step| step.slots.len() > 128));
    assert_eq!(unmatched(&timeline), BTreeMap::new());
    check_rows(&plan, &history, &out);
}

#[test]
fn rows_leave_while_the_recording_runs() {
    let mut timeline = timeline();
    let mut released = 0;
    let second = 1_000_000_000;
    for event in points() {
        timeline.feed(&event);
    }
    for i in 1..=100u64 {
        let t = i * second / 10;
        for event in [
            begin(200, t, i),
            batch(100, t + 10, i, &[slot(i, 0)]),
            step(100, t + 20, t + 30),
            call(WAIT, 100, t + 40, t + 50, [7, 0]),
            token(200, t + 60, i, 0),
            end(200, t + 70, i, 1, FINISH_STOP),
        ] {
            timeline.feed(&event);
        }
        let out = timeline.drain();
        released += out.steps.len() + out.iterations.len() + out.requests.len() + out.tokens.len();
        assert!(timeline.steps.len() <= 4 && timeline.iterations.len() <= 4 && timeline.requests.len() <= 12);
    }
    assert!(released > 4 * 85, "{released}");
}

#[test]
fn what_becomes_known_later_is_of_the_request() {
    let attr = |time_ns, request, key: &str, value| {
        mark(HTTP_TID, time_ns, Mark::Attr(Attr { request, choice: 0, key: key.into(), value }))
    };
    let text = |text: &str| AttrValue::String(text.into());
    let (out, _) = play(&[
        begin(HTTP_TID, 100, 1),
        begin(HTTP_TID, 110, 2),
        attr(120, 1, "tenant_id", text("early")),
        attr(130, 1, "tenant_id", text("late")),
        attr(140, 1, "prompt_tokens", AttrValue::Number(17.0)),
        attr(141, 1, "prompt_tokens", AttrValue::Number(f64::NAN)),
        attr(142, 1, "prompt_tokens", AttrValue::Number(-1.0)),
        attr(143, 1, "prompt_tokens", text("18")),
        attr(150, 1, "kv_cache_strategy", text("paged")),
        attr(160, 1, "temperature", text("0.7")),
        attr(170, 9, "model", text("of nobody")),
        end(HTTP_TID, 200, 1, 0, FINISH_STOP),
        end(HTTP_TID, 210, 2, 0, FINISH_STOP),
    ]);
    let (one, two) = (&out.requests[0], &out.requests[1]);
    assert_eq!((one.tenant_id.as_str(), one.prompt_tokens), ("late", Some(17)));
    assert_eq!((one.kv_cache_strategy.as_str(), one.model.as_str()), ("paged", ""));
    assert_eq!((two.tenant_id.as_str(), two.prompt_tokens), ("", None));
}

use proptest::prelude::*;
use tracer_abi::mark::FINISH_STOP;

use super::super::testing::{
    EnqueueClock, HTTP_TID, PROCESS, RANK_TID, STEP, WAIT, batch, begin, call, end, mark, point, slot, span,
    token,
};
use super::super::{Config, Output, Timeline};
use super::*;
use crate::event::{CallEnd, Event, Mark, Role};

const MS: u64 = 1_000_000;
const STREAM: u64 = 0x7f00;
const OTHER_TID: u32 = RANK_TID + 1;

const CONTEXT_WAIT: u32 = 11;
const POLL: u32 = 12;
const BEGIN_CAPTURE: u32 = 13;
const END_CAPTURE: u32 = 14;
const LAUNCH: u32 = 15;
const END_STREAM: u32 = 16;

fn points() -> Vec<Event> {
    vec![
        point(STEP, Role::Step, Some(1)),
        point(WAIT, Role::Wait, Some(0)),
        point(CONTEXT_WAIT, Role::Wait, None),
        point(POLL, Role::Sync, None),
        point(BEGIN_CAPTURE, Role::CaptureBegin, Some(0)),
        point(END_CAPTURE, Role::CaptureEnd, Some(0)),
        point(LAUNCH, Role::GraphLaunch, Some(1)),
        point(END_STREAM, Role::StreamEnd, Some(0)),
    ]
}

/// A call that did what it says, made from a place that the thread's number names.
fn did(point: u32, tid: u32, (begin_ns, end_ns): (u64, u64), args: [u64; 2]) -> Event {
    let Event::Call(call) = call(point, tid, begin_ns, end_ns, args) else { unreachable!() };
    Event::Call(Call { ret: 0, stack: Some(StackId(tid.into())), ..call })
}

/// Begin marks of requests 1 to 9, and a wait, so that waits are known to be seen.
fn prologue() -> Vec<Event> {
    let begins = (1..10).map(|request| begin(HTTP_TID, request, request));
    begins.chain([did(CONTEXT_WAIT, HTTP_TID, (20, 30), [0; 2])]).collect()
}

/// A step for a request, of 10 ns.
fn step(tid: u32, begin_ns: u64, request: u64, stream: u64) -> [Event; 2] {
    [
        batch(tid, begin_ns - 1, begin_ns, &[slot(request, 0)]),
        did(STEP, tid, (begin_ns, begin_ns + 10), [0, stream]),
    ]
}

/// Two steps of two requests on two threads and one stream.
fn two_steps() -> Vec<Event> {
    [step(RANK_TID, 100, 1, STREAM), step(OTHER_TID, 200, 2, STREAM)].concat()
}

fn play(events: &[Event]) -> (Output, BTreeMap<String, u64>) {
    let mut timeline = Timeline::new(Config::default(), EnqueueClock);
    points().iter().chain(events).for_each(|event| timeline.feed(event));
    timeline.finish();
    let counts = timeline.hazards.ledger().map(|row| (row.name, row.count)).collect();
    (timeline.drain(), counts)
}

fn hazards(more: &[Event]) -> Vec<Hazard> {
    play(&[prologue(), more.to_vec()].concat()).0.hazards
}

#[test]
fn two_threads_on_one_stream_without_a_wait() {
    let (out, counts) = play(&[prologue(), two_steps()].concat());
    let expected = Hazard {
        kind: HazardKind::SharedStream,
        process: PROCESS,
        time_ns: 200,
        step: 1,
        other_step: Some(0),
        request: Some(1),
        other_request: Some(0),
        stream: STREAM,
        tid: OTHER_TID,
        stack: Some(StackId(OTHER_TID.into())),
        other_tid: RANK_TID,
        other_stack: Some(StackId(RANK_TID.into())),
    };
    assert_eq!(out.hazards, [expected]);
    assert_eq!(counts, BTreeMap::from([("hazard_shared_stream".into(), 1), (STEPS_CHECKED.into(), 1)]));
    // Calls that overlap have nothing in between.
    let overlapping = [step(RANK_TID, 105, 1, STREAM), step(OTHER_TID, 100, 2, STREAM)].concat();
    assert_eq!(hazards(&overlapping).len(), 1);
}

#[test]
fn whatever_may_have_ordered_two_steps_ends_the_claim() {
    let between = |event: Event| hazards(&[two_steps(), vec![event]].concat());
    for (name, event) in [
        ("a wait by the first thread", did(WAIT, RANK_TID, (120, 150), [STREAM, 0])),
        ("by the second", did(WAIT, OTHER_TID, (120, 200), [STREAM, 0])),
        ("by a third", did(WAIT, HTTP_TID, (90, 111), [STREAM, 0])),
        ("for all streams", did(CONTEXT_WAIT, HTTP_TID, (120, 150), [0; 2])),
        ("for the default stream", did(WAIT, HTTP_TID, (120, 150), [0, 0])),
        ("a poll", did(POLL, HTTP_TID, (120, 150), [9, 0])),
        ("another stream by then", did(END_STREAM, HTTP_TID, (120, 150), [STREAM, 0])),
        ("a GPU span that was over", span(RANK_TID, 300, (99, 111), 50)),
    ] {
        assert_eq!(between(event), [], "{name}");
    }
    for (name, event) in [
        ("a wait for another stream", did(WAIT, HTTP_TID, (120, 150), [STREAM + 1, 0])),
        ("a wait that failed", call(WAIT, HTTP_TID, 120, 150, [STREAM, 0])),
        ("a wait that came too late", did(WAIT, HTTP_TID, (120, 201), [STREAM, 0])),
        ("a GPU span that was not over", span(RANK_TID, 300, (99, 111), 900)),
    ] {
        assert_eq!(between(event).len(), 1, "{name}");
    }
    let Event::Call(wait) = did(WAIT, OTHER_TID, (120, 0), [STREAM, 0]) else { unreachable!() };
    let entry =
        Call { end: CallEnd::EntryOnly, origin: super::super::testing::origin(OTHER_TID, 120), ..wait };
    assert_eq!(between(Event::Call(entry)), [], "a wait whose return is not probed");
}

#[test]
fn steps_that_may_share_a_stream_do() {
    let pair = |one: [Event; 2], other: [Event; 2]| hazards(&[one, other].concat());
    assert_eq!(pair(step(RANK_TID, 100, 1, STREAM), step(RANK_TID, 200, 2, STREAM)), [], "one thread");
    assert_eq!(pair(step(RANK_TID, 100, 1, STREAM), step(OTHER_TID, 200, 1, STREAM)), [], "one request");
    assert_eq!(pair(step(RANK_TID, 100, 1, STREAM), step(OTHER_TID, 200, 2, STREAM + 8)), [], "two streams");
    assert_eq!(pair(step(RANK_TID, 100, 1, 0), step(OTHER_TID, 200, 2, 0)), [], "the default stream");
    assert_eq!(pair(step(RANK_TID, 100, 1, 2), step(OTHER_TID, 200, 2, 2)), [], "that of each thread");
    // Of whom a step is, somebody must say; and waits must be known to be seen.
    let [_, plain] = step(RANK_TID, 100, 1, STREAM);
    assert_eq!(hazards(&[vec![plain], step(OTHER_TID, 200, 2, STREAM).to_vec()].concat()), []);
    assert_eq!(play(&[prologue()[..9].to_vec(), two_steps()].concat()).0.hazards, []);
}

#[test]
fn a_step_of_a_request_that_goes_into_a_graph() {
    let capture = |tid, until| {
        vec![
            did(BEGIN_CAPTURE, tid, (40, 50), [STREAM, 0]),
            did(END_CAPTURE, tid, (until, until + 10), [STREAM, 0]),
        ]
    };
    let one = step(RANK_TID, 100, 1, STREAM).to_vec();
    for tid in [RANK_TID, HTTP_TID] {
        let found = hazards(&[capture(tid, 150), one.clone()].concat());
        assert_eq!(found.len(), 1, "{tid}");
        let Hazard { kind, step, tid: enqueued, other_tid, other_stack, request, .. } = found[0];
        assert_eq!(
            (kind, step, enqueued, other_tid, other_stack, request),
            (HazardKind::CapturedStep, 0, RANK_TID, tid, Some(StackId(tid.into())), Some(0))
        );
    }
    // Ended before the step, or failed to begin; timed, so that it ran.
    assert_eq!(hazards(&[capture(RANK_TID, 80), one.clone()].concat()), []);
    let failed = call(BEGIN_CAPTURE, RANK_TID, 40, 50, [STREAM, 0]);
    assert_eq!(hazards(&[vec![failed], one.clone()].concat()), []);
    let timed = span(RANK_TID, 300, (99, 111), 50);
    assert_eq!(hazards(&[capture(RANK_TID, 150), one.clone(), vec![timed]].concat()), []);
    // Its own graph, which it launches: meant to be. Another thread's launch does not tell.
    let launch = |tid| vec![did(LAUNCH, tid, (170, 180), [9, STREAM])];
    assert_eq!(hazards(&[capture(RANK_TID, 150), one.clone(), launch(RANK_TID)].concat()), []);
    assert_eq!(hazards(&[capture(RANK_TID, 150), one.clone(), launch(HTTP_TID)].concat()).len(), 1);
    assert_eq!(hazards(&[capture(HTTP_TID, 150), one.clone(), launch(RANK_TID)].concat()).len(), 1);
    // For nobody, by the thread that captures: a warm-up. By another one it is none.
    let [_, plain] = step(RANK_TID, 100, 1, STREAM);
    assert_eq!(hazards(&[capture(RANK_TID, 150), vec![plain.clone()]].concat()), []);
    assert_eq!(hazards(&[capture(HTTP_TID, 150), vec![plain]].concat()).len(), 1);
    // The end of the capture was not seen, but a wait for the stream was.
    let mut lost = capture(RANK_TID, 150);
    lost.truncate(1);
    lost.push(did(WAIT, RANK_TID, (60, 70), [STREAM, 0]));
    assert_eq!(hazards(&[lost, one].concat()), []);
}

/// A step of request 1 from 1 ms to 2 ms, and the delivery of its token at a time; then request 1 ends.
fn early(delivered_ns: u64, more: Vec<Event>) -> (Vec<Hazard>, BTreeMap<String, u64>) {
    let step = [batch(RANK_TID, MS - 1, 7, &[slot(1, 0)]), did(STEP, RANK_TID, (MS, 2 * MS), [0, STREAM])];
    let token = match token(HTTP_TID, delivered_ns, 1, 0) {
        Event::Mark(mut event) => {
            if let Mark::Token(token) = &mut event.mark {
                token.stack = Some(StackId(77));
            }
            Event::Mark(event)
        }
        other => other,
    };
    let last = end(HTTP_TID, 90 * MS, 1, 1, FINISH_STOP);
    let (out, counts) = play(&[prologue(), step.to_vec(), vec![token, last], more].concat());
    assert_eq!(out.tokens.len(), 1);
    (out.hazards, counts)
}

#[test]
fn output_before_its_step_was_complete() {
    let wait = |begin, end| did(WAIT, RANK_TID, (begin * MS, end * MS), [STREAM, 0]);
    let (found, counts) = early(5 * MS, vec![wait(2, 10)]);
    assert_eq!(found.len(), 1);
    let Hazard { kind, time_ns, step, request, tid, stack, other_tid, other_stack, .. } = found[0];
    assert_eq!((kind, time_ns, step, request), (HazardKind::EarlyOutput, 5 * MS, 0, Some(0)));
    assert_eq!((tid, stack), (HTTP_TID, Some(StackId(77))));
    assert_eq!((other_tid, other_stack), (RANK_TID, Some(StackId(RANK_TID.into()))));
    assert_eq!(counts.get(TOKENS_CHECKED), Some(&1));
    // After the wait, or so near its end that it may have been over.
    assert_eq!(early(11 * MS, vec![wait(2, 10)]).0, []);
    assert_eq!(early(9 * MS + 1, vec![wait(2, 10)]).0, []);
    // No wait that tells: none at all, one for no stream, one that did not block, one for a later step, too.
    assert_eq!(early(5 * MS, vec![]).0, []);
    assert_eq!(early(5 * MS, vec![did(CONTEXT_WAIT, RANK_TID, (2 * MS, 10 * MS), [0; 2])]).0, []);
    assert_eq!(early(5 * MS, vec![did(WAIT, RANK_TID, (10 * MS, 10 * MS + 9), [STREAM, 0])]).0, []);
    let later = did(STEP, RANK_TID, (3 * MS, 4 * MS), [0, STREAM]);
    assert_eq!(early(5 * MS, vec![later, wait(4, 10)]).0, []);
    // Something may have told before that it was complete.
    assert_eq!(early(5 * MS, vec![did(POLL, HTTP_TID, (4 * MS, 4 * MS + 1), [9, 0]), wait(2, 10)]).0, []);
    assert_eq!(early(5 * MS, vec![did(CONTEXT_WAIT, HTTP_TID, (2 * MS, 4 * MS), [0; 2]), wait(2, 10)]).0, []);
}

#[test]
fn gpu_times_decide_when_output_is_early() {
    let timed = |span_ms: u64| span(RANK_TID, 50 * MS, (MS - 1, 2 * MS), (span_ms * MS) as u32);
    // From 2 ms on, whatever was waited for.
    let poll = did(POLL, HTTP_TID, (4 * MS, 4 * MS + 1), [9, 0]);
    assert_eq!(early(5 * MS, vec![timed(10), poll]).0.len(), 1);
    assert_eq!(early(5 * MS, vec![timed(2), did(WAIT, RANK_TID, (2 * MS, 10 * MS), [STREAM, 0])]).0, []);
}

#[test]
fn of_several_ranks_the_first_to_be_complete_counts() {
    let rank = |tid: u32, rank: u32| {
        let slots = vec![slot(1, 0)];
        let batch = crate::event::mark::Batch { batch_id: 7, rank, slot_count: 1, first_slot: 0, slots };
        let stream = STREAM + u64::from(rank);
        let step = did(STEP, tid, (MS + u64::from(rank), 2 * MS), [0, stream]);
        vec![mark(tid, MS - 1, Mark::Batch(batch)), step]
    };
    let both = |until: [u64; 2]| {
        let wait = |tid, stream, end| did(WAIT, tid, (2 * MS, end * MS), [stream, 0]);
        let waits = vec![wait(RANK_TID, STREAM, until[0]), wait(OTHER_TID, STREAM + 1, until[1])];
        let token = vec![token(HTTP_TID, 5 * MS, 1, 0)];
        hazards(&[rank(RANK_TID, 0), rank(OTHER_TID, 1), waits, token].concat()).len()
    };
    assert_eq!([both([10, 4]), both([4, 10]), both([10, 12])], [0, 0, 1]);
}

#[test]
fn all_are_counted_and_the_first_are_kept() {
    let steps: Vec<Event> = (0..1_200u64)
        .flat_map(|n| step(RANK_TID + (n % 2) as u32, 100 + 20 * n, 1 + n % 2, STREAM))
        .collect();
    let (out, counts) = play(&[prologue(), steps].concat());
    assert_eq!((out.hazards.len() as u64, counts["hazard_shared_stream"]), (MAX_ROWS, 1_199));
    assert!(out.hazards.windows(2).all(|pair| pair[0].time_ns < pair[1].time_ns));
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Step { thread: u32, stream: u64 },
    Wait { thread: u32, stream: u64 },
    WaitForAll { thread: u32 },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..3u32, 0..3u64).prop_map(|(thread, stream)| Act::Step { thread, stream }),
        2 => (0..4u32, 0..3u64).prop_map(|(thread, stream)| Act::Wait { thread, stream }),
        1 => (0..4u32).prop_map(|thread| Act::WaitForAll { thread }),
    ]
}

/// The events of acts one after the other, each step for a request of its own; and how many steps follow, on their stream,
/// one of another thread without a wait in between.
fn history(acts: &[Act]) -> (Vec<Event>, u64) {
    let mut events = vec![did(CONTEXT_WAIT, HTTP_TID, (1, 2), [0; 2])];
    let mut last: BTreeMap<u64, u32> = BTreeMap::new();
    let mut unordered = 0;
    for (act, n) in acts.iter().zip(1u64..) {
        let at = 100 * n;
        match *act {
            Act::Step { thread, stream } => {
                events.push(begin(HTTP_TID, at - 50, n));
                events.extend(step(RANK_TID + thread, at, n, STREAM + stream));
                let before = last.insert(stream, thread);
                unordered += u64::from(before.is_some_and(|before| before != thread));
            }
            Act::Wait { thread, stream } => {
                events.push(did(WAIT, RANK_TID + thread, (at, at + 9), [STREAM + stream, 0]));
                last.remove(&stream);
            }
            Act::WaitForAll { thread } => {
                events.push(did(CONTEXT_WAIT, RANK_TID + thread, (at, at + 9), [0; 2]));
                last.clear();
            }
        }
    }
    (events, unordered)
}

proptest! {
    /// Whoever waits, in whatever order: as many as there are steps with nothing in between.
    #[test]
    fn exactly_the_steps_without_a_wait_in_between(acts in prop::collection::vec(act(), 0..60)) {
        let (events, unordered) = history(&acts);
        let (_, counts) = play(&events);
        prop_assert_eq!(counts.get("hazard_shared_stream").copied().unwrap_or(0), unordered);
    }

    /// A program that waits for each step before it goes on has none, nor do its captures, whatever the interleaving.
    #[test]
    fn proper_waits_show_none(
        steps in prop::collection::vec((0..3u32, 0..3u64, 0..3u32, any::<bool>(), any::<bool>()), 1..40),
    ) {
        let mut events = vec![did(CONTEXT_WAIT, HTTP_TID, (1, 2), [0; 2])];
        for (&(thread, stream, waiter, for_all, captures), n) in steps.iter().zip(1u64..) {
            let (at, tid, handle) = (n * 10 * MS, RANK_TID + thread, STREAM + stream);
            if captures {
                let [_, warm_up] = step(tid, at - 900, n, handle);
                events.push(did(BEGIN_CAPTURE, tid, (at - 1_000, at - 950), [handle, 0]));
                events.push(warm_up);
                events.push(did(END_CAPTURE, tid, (at - 800, at - 700), [handle, 0]));
            }
            events.push(begin(HTTP_TID, at - 500, n));
            events.extend(step(tid, at, n, handle));
            let (point, argument) = if for_all { (CONTEXT_WAIT, 0) } else { (WAIT, handle) };
            events.push(did(point, RANK_TID + waiter, (at + 20, at + 5 * MS), [argument, 0]));
            events.push(token(HTTP_TID, at + 5 * MS + 1, n, 0));
        }
        let (out, _) = play(&events);
        prop_assert_eq!(out.hazards, vec![]);
    }
}

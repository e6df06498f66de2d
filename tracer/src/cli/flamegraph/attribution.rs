//! Whose CPU time a sample is.
//!
//! In: a recording's events in order of time. Out: weighted stacks rooted at request → phase, or at `no request` →
//! thread. A sample belongs to the batch that its thread announced last. Its CPU time is split over the batch's
//! requests by the tokens that each has in it; the shares add up to the sample.

use crate::event::{Event, Mark, ProcessAction, ProcessId, Sample, StackId, mark};
use crate::timeline::shares::split;
use std::collections::{BTreeMap, HashMap};
use tracer_abi::mark::{DECODE, PREFILL, Slot};

/// Root of samples that no batch mark precedes on their thread.
const NO_REQUEST: &str = "no request";

/// A thread for life.
type Thread = (ProcessId, u32);

/// Number of a request in order of appearance.
type RequestKey = usize;

/// Who a sample's time belongs to, and in which phase (request) or on which thread (nobody).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Request(RequestKey, &'static str),
    Nobody(String),
}

/// Sums CPU time by owner and stack.
#[derive(Debug, Default)]
pub(super) struct Attribution {
    /// Name of each request, by key.
    requests: Vec<String>,
    /// The request that a process now means by a number.
    numbers: HashMap<(ProcessId, u64), RequestKey>,
    batches: HashMap<Thread, Batch>,
    threads: HashMap<Thread, String>,
    weights: BTreeMap<(Owner, Option<StackId>), u64>,
    /// Samples of each stack.
    samples: BTreeMap<Option<StackId>, u64>,
}

#[derive(Debug)]
struct Batch {
    id: u64,
    slots: Vec<Slot>,
}

/// CPU time by owner, largest requests by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Rooted {
    /// The two frames at the root, the stack, ns of CPU time.
    pub(super) weights: Vec<([String; 2], Option<StackId>, u64)>,
    /// Samples of each stack.
    pub(super) samples: BTreeMap<Option<StackId>, u64>,
}

impl Attribution {
    /// Takes the next event.
    pub(super) fn feed(&mut self, event: &Event) {
        match event {
            Event::Mark(e) => match &e.mark {
                Mark::RequestBegin(begin) => {
                    let key = self.new_request(begin.request, &begin.request_id);
                    self.numbers.insert((e.origin.process, begin.request), key);
                }
                Mark::Batch(batch) => self.batch((e.origin.process, e.origin.tid), batch),
                _ => {}
            },
            Event::Process(e) => {
                let thread = (e.origin.process, e.origin.tid);
                match e.action {
                    ProcessAction::Exit => {
                        self.batches.remove(&thread);
                    }
                    _ => {
                        self.threads.insert(thread, e.comm.clone());
                    }
                }
            }
            Event::Sample(sample) => self.sample(sample),
            _ => {}
        }
    }

    fn new_request(&mut self, number: u64, id: &str) -> RequestKey {
        self.requests.push(if id.is_empty() { format!("request #{number}") } else { id.to_owned() });
        self.requests.len() - 1
    }

    /// A thread announces its next batch, or a further part of it.
    fn batch(&mut self, thread: Thread, mark: &mark::Batch) {
        match self.batches.get_mut(&thread) {
            Some(batch) if batch.id == mark.batch_id && mark.first_slot > 0 => {
                batch.slots.extend_from_slice(&mark.slots);
            }
            _ => {
                self.batches.insert(thread, Batch { id: mark.batch_id, slots: mark.slots.clone() });
            }
        }
    }

    fn sample(&mut self, sample: &Sample) {
        *self.samples.entry(sample.stack).or_default() += 1;
        let thread = (sample.origin.process, sample.origin.tid);
        let slots = self.batches.get(&thread).map(|batch| batch.slots.clone()).unwrap_or_default();
        if slots.is_empty() {
            let name = match self.threads.get(&thread) {
                Some(name) if !name.is_empty() => name.clone(),
                _ => format!("thread-{}", thread.1),
            };
            self.add(Owner::Nobody(name), sample.stack, sample.period_ns);
            return;
        }
        let tokens: Vec<u64> = slots.iter().map(|slot| u64::from(slot.tokens)).collect();
        for (slot, share) in slots.iter().zip(split(sample.period_ns, &tokens)) {
            let owner = Owner::Request(self.request(thread.0, slot.request), phase_name(slot.phase));
            self.add(owner, sample.stack, share);
        }
    }

    /// The request that a process means by a number; one that began before the recording gets a name from it.
    fn request(&mut self, process: ProcessId, number: u64) -> RequestKey {
        if let Some(&key) = self.numbers.get(&(process, number)) {
            return key;
        }
        let key = self.new_request(number, "");
        self.numbers.insert((process, number), key);
        key
    }

    fn add(&mut self, owner: Owner, stack: Option<StackId>, weight: u64) {
        if weight > 0 {
            let sum = self.weights.entry((owner, stack)).or_default();
            *sum = sum.saturating_add(weight);
        }
    }

    /// What came of it, the `named` requests with most CPU time by name and all others together.
    pub(super) fn finish(self, named: usize) -> Rooted {
        let mut totals: BTreeMap<RequestKey, u64> = BTreeMap::new();
        for ((owner, _), weight) in &self.weights {
            if let Owner::Request(key, _) = owner {
                *totals.entry(*key).or_default() += weight;
            }
        }
        let names = root_names(&self.requests, totals, named);
        let mut weights: BTreeMap<([String; 2], Option<StackId>), u64> = BTreeMap::new();
        for ((owner, stack), weight) in self.weights {
            let root = match owner {
                Owner::Request(key, phase) => {
                    [names.get(&key).cloned().unwrap_or_default(), phase.to_owned()]
                }
                Owner::Nobody(thread) => [NO_REQUEST.to_owned(), thread],
            };
            *weights.entry((root, stack)).or_default() += weight;
        }
        Rooted {
            weights: weights.into_iter().map(|((root, stack), weight)| (root, stack, weight)).collect(),
            samples: self.samples,
        }
    }
}

/// Names of the roots: the requests with most time by their own, told apart where they share it (a retry).
pub(super) fn root_names(
    requests: &[String],
    totals: BTreeMap<RequestKey, u64>,
    named: usize,
) -> HashMap<RequestKey, String> {
    let mut order: Vec<(RequestKey, u64)> = totals.into_iter().collect();
    order.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let others = order.split_off(named.min(order.len()));
    let mut names = HashMap::new();
    let mut uses: HashMap<&str, u32> = HashMap::new();
    order.sort_unstable();
    for (key, _) in order {
        let name = requests.get(key).map_or("", String::as_str);
        let nth = uses.entry(name).and_modify(|n| *n += 1).or_insert(1);
        names.insert(key, if *nth == 1 { name.to_owned() } else { format!("{name} (again, {nth})") });
    }
    let rest = format!("other requests (n={})", others.len());
    names.extend(others.into_iter().map(|(key, _)| (key, rest.clone())));
    names
}

fn phase_name(phase: u8) -> &'static str {
    match phase {
        PREFILL => "prefill",
        DECODE => "decode",
        _ => "other phase",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{MarkEvent, Origin, Process};
    use proptest::prelude::*;

    const PROCESS: ProcessId = ProcessId { tgid: 10, start_ticks: 1 };

    fn origin(tid: u32) -> Origin {
        Origin { process: PROCESS, tid, ..Origin::default() }
    }

    fn begin(request: u64, id: &str) -> Event {
        let begin =
            mark::RequestBegin { request, request_id: id.to_owned(), ..mark::RequestBegin::default() };
        Event::Mark(MarkEvent { origin: origin(10), mark: Mark::RequestBegin(begin.into()) })
    }

    fn batch(tid: u32, batch_id: u64, first_slot: u32, slots: &[(u64, u32, u8)]) -> Event {
        let slots: Vec<Slot> = slots
            .iter()
            .map(|&(request, tokens, phase)| Slot { request, tokens, phase, ..Slot::default() })
            .collect();
        let slot_count = slots.len() as u32;
        let batch = mark::Batch { batch_id, rank: 0, slot_count, first_slot, slots };
        Event::Mark(MarkEvent { origin: origin(tid), mark: Mark::Batch(batch) })
    }

    fn sample(tid: u32, period_ns: u64, stack: u64) -> Event {
        let stack = Some(StackId(stack));
        Event::Sample(Sample { origin: origin(tid), period_ns, kernel_mode: false, stack })
    }

    fn rooted(events: &[Event], named: usize) -> Vec<(String, String, u64, u64)> {
        let mut attribution = Attribution::default();
        events.iter().for_each(|event| attribution.feed(event));
        let rooted = attribution.finish(named);
        let flat = rooted.weights.into_iter();
        flat.map(|([a, b], stack, weight)| (a, b, stack.map_or(0, |s| s.0), weight)).collect()
    }

    fn row(root: &str, phase: &str, stack: u64, weight: u64) -> (String, String, u64, u64) {
        (root.to_owned(), phase.to_owned(), stack, weight)
    }

    #[test]
    fn a_sample_is_split_by_the_tokens_of_its_threads_batch() {
        let events = [
            begin(1, "a"),
            begin(2, "b"),
            batch(11, 7, 0, &[(1, 3, PREFILL)]),
            batch(11, 7, 1, &[(2, 1, DECODE)]),
            sample(11, 10, 5),
            sample(12, 4, 5),
        ];
        assert_eq!(
            rooted(&events, 12),
            [row("a", "prefill", 5, 8), row("b", "decode", 5, 2), row("no request", "thread-12", 5, 4)]
        );
    }

    #[test]
    fn the_next_batch_of_the_same_thread_takes_over() {
        let events = [
            begin(1, "a"),
            begin(2, "b"),
            batch(11, 7, 0, &[(1, 1, DECODE)]),
            batch(12, 7, 0, &[(1, 1, DECODE)]),
            sample(11, 1, 5),
            batch(11, 8, 0, &[(2, 1, DECODE)]),
            sample(11, 2, 5),
            sample(12, 4, 5),
        ];
        assert_eq!(rooted(&events, 12), [row("a", "decode", 5, 5), row("b", "decode", 5, 2)]);
    }

    #[test]
    fn only_the_largest_requests_are_named_and_repeated_ids_told_apart() {
        let mut events = vec![begin(1, "same"), begin(2, "same"), begin(3, "c"), begin(4, ""), begin(5, "e")];
        for (request, weight) in [(1, 50), (2, 40), (3, 30), (4, 20), (5, 10), (6, 5)] {
            events.push(batch(11, request, 0, &[(request, 1, DECODE)]));
            events.push(sample(11, weight, 0));
        }
        assert_eq!(
            rooted(&events, 4),
            [
                row("c", "decode", 0, 30),
                row("other requests (n=2)", "decode", 0, 15),
                row("request #4", "decode", 0, 20),
                row("same", "decode", 0, 50),
                row("same (again, 2)", "decode", 0, 40),
            ]
        );
    }

    #[test]
    fn a_number_may_be_used_again_and_a_thread_may_end() {
        let exit = Process {
            origin: origin(11),
            action: ProcessAction::Exit,
            parent_tgid: 0,
            parent_tid: 0,
            comm: String::new(),
        };
        let found = Process { action: ProcessAction::Found, comm: "engine".to_owned(), ..exit.clone() };
        let events = [
            Event::Process(found),
            begin(1, "first"),
            batch(11, 1, 0, &[(1, 1, PREFILL)]),
            sample(11, 1, 0),
            begin(1, "second"),
            batch(11, 2, 0, &[(1, 1, PREFILL)]),
            sample(11, 2, 0),
            Event::Process(exit),
            sample(11, 4, 0),
        ];
        assert_eq!(
            rooted(&events, 12),
            [
                row("first", "prefill", 0, 1),
                row("no request", "engine", 0, 4),
                row("second", "prefill", 0, 2)
            ]
        );
    }

    proptest! {
        #[test]
        fn no_time_is_lost_or_invented(
            steps in prop::collection::vec((0u32..3, prop::collection::vec((0u64..6, 0u32..50, 0u8..3), 0..5), 0u64..1_000_000), 0..60),
            named in 0usize..8,
        ) {
            let mut events = Vec::new();
            let mut total = 0;
            for (i, (tid, slots, weight)) in steps.iter().enumerate() {
                events.push(batch(*tid, i as u64, 0, slots));
                events.push(sample(*tid, *weight, i as u64 % 4));
                total += weight;
            }
            prop_assert_eq!(rooted(&events, named).iter().map(|r| r.3).sum::<u64>(), total);
        }
    }
}

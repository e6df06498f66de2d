//! Whose CPU time a sample is.
//!
//! In: a recording's events in order of time. Out: weighted stacks rooted at request → phase, or at `no request` →
//! thread. A sample belongs to the batch that its thread announced last, or, where it announces none, to the request that
//! an NVTX range around it names. Its CPU time is split over the batch's
//! requests by the tokens that each has in it; the shares add up to the sample.

use crate::event::mark::NvtxAction;
use crate::event::{Event, Mark, ProcessAction, ProcessId, Sample, StackId, mark};
use crate::timeline::request_id;
use crate::timeline::shares::split;
use std::collections::{BTreeMap, HashMap};
use tracer_abi::mark::{DECODE, PREFILL, Slot};

/// Root of samples that no batch mark precedes on their thread.
const NO_REQUEST: &str = "no request";
/// Phase of a request in which no NVTX range names one.
const NO_PHASE: &str = "no phase";
/// Where the events are that it takes.
pub(super) const TABLES: [&str; 5] =
    ["mark_request_begin", "mark_batch", "mark_nvtx", "processes", "samples"];
/// Nested ranges that are kept.
const MAX_DEPTH: usize = 64;

/// A thread for life.
type Thread = (ProcessId, u32);

/// Number of a request in order of appearance.
type RequestKey = usize;

/// Number of a phase's or a thread's name.
type WordKey = usize;

/// Who a sample's time belongs to, and in which phase (request) or on which thread (nobody).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Request(RequestKey, WordKey),
    Nobody(WordKey),
}

/// Sums CPU time by owner and stack.
#[derive(Debug, Default)]
pub(super) struct Attribution {
    /// Name of each request, by key.
    requests: Vec<String>,
    /// The request that a process now means by a number.
    numbers: HashMap<(ProcessId, u64), RequestKey>,
    batches: HashMap<Thread, Batch>,
    /// The NVTX ranges that each thread is in, outermost first, as they began.
    ranges: HashMap<Thread, Vec<mark::Nvtx>>,
    /// Requests that NVTX names.
    named: HashMap<String, RequestKey>,
    threads: HashMap<Thread, WordKey>,
    /// Names of phases and threads, by key.
    words: Vec<String>,
    word_keys: HashMap<String, WordKey>,
    weights: HashMap<(Owner, Option<StackId>), u64>,
    /// Samples of each stack.
    samples: HashMap<Option<StackId>, u64>,
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
                Mark::Nvtx(nvtx) => self.range((e.origin.process, e.origin.tid), nvtx),
                _ => {}
            },
            Event::Process(e) => {
                let thread = (e.origin.process, e.origin.tid);
                match e.action {
                    ProcessAction::Exit => {
                        self.batches.remove(&thread);
                        self.ranges.remove(&thread);
                    }
                    _ if e.comm.is_empty() => {
                        self.threads.remove(&thread);
                    }
                    _ => {
                        let name = self.word(&e.comm);
                        self.threads.insert(thread, name);
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

    fn word(&mut self, text: &str) -> WordKey {
        if let Some(&key) = self.word_keys.get(text) {
            return key;
        }
        self.words.push(text.to_owned());
        self.word_keys.insert(text.to_owned(), self.words.len() - 1);
        self.words.len() - 1
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

    fn range(&mut self, thread: Thread, nvtx: &mark::Nvtx) {
        let ranges = self.ranges.entry(thread).or_default();
        match nvtx.action {
            NvtxAction::Push if ranges.len() < MAX_DEPTH => {
                ranges.push(nvtx.clone());
            }
            NvtxAction::Pop => {
                if let Some(at) =
                    ranges.iter().rposition(|open| (&open.domain, open.range) == (&nvtx.domain, nvtx.range))
                {
                    ranges.remove(at);
                }
            }
            _ => {}
        }
    }

    /// The request and the innermost other range that NVTX names on a thread.
    fn named_by_ranges(&mut self, thread: Thread) -> Option<Owner> {
        let ranges = self.ranges.get(&thread).filter(|ranges| !ranges.is_empty())?;
        let id = |range: &mark::Nvtx| request_id(&range.name, &range.payload).map(str::to_owned);
        let request = ranges.iter().rev().find_map(id);
        let phase = ranges.iter().rev().find(|range| id(range).is_none()).map(|range| range.name.clone());
        let phase = phase.map(|name| self.word(&name));
        let Some(request) = request else { return phase.map(Owner::Nobody) };
        let key = match self.named.get(&request) {
            Some(key) => *key,
            None => {
                let key = self.new_request(0, &request);
                self.named.insert(request, key);
                key
            }
        };
        Some(Owner::Request(key, phase.unwrap_or_else(|| self.word(NO_PHASE))))
    }

    fn sample(&mut self, sample: &Sample) {
        *self.samples.entry(sample.stack).or_default() += 1;
        let thread = (sample.origin.process, sample.origin.tid);
        let slots =
            self.batches.get_mut(&thread).map(|batch| std::mem::take(&mut batch.slots)).unwrap_or_default();
        if slots.is_empty() {
            let owner = self.named_by_ranges(thread).unwrap_or_else(|| Owner::Nobody(self.thread(thread)));
            self.add(owner, sample.stack, sample.period_ns);
            return;
        }
        let tokens: Vec<u64> = slots.iter().map(|slot| u64::from(slot.tokens)).collect();
        for (slot, share) in slots.iter().zip(split(sample.period_ns, &tokens)) {
            let owner =
                Owner::Request(self.request(thread.0, slot.request), self.word(phase_name(slot.phase)));
            self.add(owner, sample.stack, share);
        }
        if let Some(batch) = self.batches.get_mut(&thread) {
            batch.slots = slots;
        }
    }

    /// The name of a thread, or what there is instead.
    fn thread(&mut self, thread: Thread) -> WordKey {
        match self.threads.get(&thread) {
            Some(&name) => name,
            None => self.word(&format!("thread-{}", thread.1)),
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
        let word = |key: WordKey| self.words.get(key).cloned().unwrap_or_default();
        let root = |owner: Owner| match owner {
            Owner::Request(key, phase) => [names.get(&key).cloned().unwrap_or_default(), word(phase)],
            Owner::Nobody(thread) => [NO_REQUEST.to_owned(), word(thread)],
        };
        // Owners are few, and several may share a root.
        let mut roots: BTreeMap<[String; 2], BTreeMap<Option<StackId>, u64>> = BTreeMap::new();
        let mut by_owner: HashMap<Owner, Vec<(Option<StackId>, u64)>> = HashMap::new();
        for ((owner, stack), weight) in self.weights {
            by_owner.entry(owner).or_default().push((stack, weight));
        }
        for (owner, weights) in by_owner {
            let of_root = roots.entry(root(owner)).or_default();
            weights.into_iter().for_each(|(stack, weight)| *of_root.entry(stack).or_default() += weight);
        }
        let flat = roots.into_iter().flat_map(|(root, weights)| {
            weights.into_iter().map(move |(stack, weight)| (root.clone(), stack, weight))
        });
        Rooted { weights: flat.collect(), samples: self.samples.into_iter().collect() }
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

    fn nvtx(tid: u32, action: NvtxAction, name: &str) -> Event {
        let (name, none) = (name.to_owned(), String::new);
        let nvtx = mark::Nvtx { action, range: 0, name, domain: none(), payload: none() };
        Event::Mark(MarkEvent { origin: origin(tid), mark: Mark::Nvtx(nvtx) })
    }

    #[test]
    fn ranges_name_requests_and_phases_where_no_batch_does() {
        use NvtxAction::{Pop, Push};
        let events = [
            nvtx(11, Push, "request:abc"),
            sample(11, 1, 5),
            nvtx(11, Push, "prefill"),
            sample(11, 2, 5),
            nvtx(11, Pop, ""),
            nvtx(11, Pop, ""),
            nvtx(12, Push, "warm-up"),
            sample(12, 4, 5),
            sample(11, 8, 5),
            batch(12, 1, 0, &[(1, 1, DECODE)]),
            sample(12, 16, 5),
        ];
        assert_eq!(
            rooted(&events, 12),
            [
                row("abc", "no phase", 5, 1),
                row("abc", "prefill", 5, 2),
                row("no request", "thread-11", 5, 8),
                row("no request", "warm-up", 5, 4),
                row("request #1", "decode", 5, 16),
            ]
        );
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

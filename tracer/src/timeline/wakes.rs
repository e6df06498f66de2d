//! Whose steps a thread heard of: news that spread from the threads of an engine by who woke whom.
//!
//! A thread that ran a step knows of its execution context. One that it wakes hears of it, and so does one that is woken
//! by that one: over locks, pipes, and sockets between the processes of a server, whatever they say on them. What a
//! thread heard last, between two tokens that it wrote, is evidence of whose tokens they are. A sleep in a futex is weak
//! evidence: CPython's interpreter lock is one, and who gives it back has told nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::pair::TokenKey;
use crate::event::{Call, Origin, ProcessId, Sched};

/// Most threads that are remembered.
const MAX_THREADS: usize = 1 << 16;
/// Most votes of a request of either kind.
const MAX_VOTES: usize = 256;
/// A context with fewer than one in so many votes of a request is left out: interrupts wake in the name of whom they
/// interrupt.
const LEAST_SHARE: usize = 5;

/// An execution context of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Context {
    pub(super) process: ProcessId,
    /// First argument of the step's call.
    pub(super) object: u64,
}

/// News of a context; `left_ns`: when it left the thread that ran the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct News {
    context: Context,
    left_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// Of its own last step, whose call ended at `left_ns`.
    own: Option<News>,
    strong: Option<News>,
    /// A futex was in between.
    weak: Option<News>,
}

/// What each thread (tgid, tid) has heard.
#[derive(Debug, Default)]
pub(super) struct Wakes(HashMap<(u32, u32), Heard>);

/// The thread that wrote a token had heard of this context last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vote {
    pub(super) token: TokenKey,
    pub(super) context: Context,
}

/// What speaks for the contexts whose tokens a request got.
#[derive(Clone, Debug, Default)]
pub(super) struct Votes {
    strong: Vec<Vote>,
    weak: Vec<Vote>,
}

impl Wakes {
    /// A thread ran a step.
    pub(super) fn step(&mut self, call: &Call) {
        let context = Context { process: call.origin.process, object: call.args[0] };
        let heard = self.entry((call.origin.process.tgid, call.origin.tid));
        heard.own = Some(News { context, left_ns: call.origin.time_ns });
    }

    /// A thread was woken by another.
    pub(super) fn woken(&mut self, sched: &Sched) {
        let Some(wake_ns) = sched.wake_ns else { return };
        let Some(waker) = self.0.get(&(sched.waker_tgid, sched.waker_tid)) else { return };
        let mut told = waker.told(wake_ns);
        if sched.in_futex() {
            told = Heard { weak: newer(told.strong, told.weak), ..Heard::default() };
        }
        let heard = self.entry((sched.origin.process.tgid, sched.origin.tid));
        heard.strong = newer(heard.strong, told.strong);
        heard.weak = newer(heard.weak, told.weak);
    }

    /// A process ended: its number may be used again.
    pub(super) fn forget(&mut self, process: ProcessId) {
        self.0.retain(|(tgid, _), _| *tgid != process.tgid);
    }

    /// Adds what the writer of a token has heard since `since_ns`.
    pub(super) fn vote(&self, writer: Origin, since_ns: u64, token: TokenKey, votes: &mut Votes) {
        let Some(heard) = self.0.get(&(writer.process.tgid, writer.tid)) else { return };
        let fresh = |news: &News| news.left_ns > since_ns;
        let (news, votes) = match newer(heard.own, heard.strong).filter(fresh) {
            Some(news) => (Some(news), &mut votes.strong),
            None => (heard.weak.filter(fresh), &mut votes.weak),
        };
        if let Some(news) = news.filter(|_| votes.len() < MAX_VOTES) {
            votes.push(Vote { token, context: news.context });
        }
    }

    fn entry(&mut self, thread: (u32, u32)) -> &mut Heard {
        if self.0.len() >= MAX_THREADS && !self.0.contains_key(&thread) {
            // Most have ended, and news is soon told anew.
            self.0.clear();
        }
        self.0.entry(thread).or_default()
    }
}

impl Heard {
    /// What a thread tells when it wakes another: of its own step, unless it has heard something since.
    fn told(&self, wake_ns: u64) -> Self {
        match newer(self.strong, self.own) {
            Some(news) if Some(news) == self.own => {
                Self { strong: Some(News { left_ns: wake_ns, ..news }), ..Self::default() }
            }
            strong => Self { own: None, strong, weak: self.weak },
        }
    }
}

/// The later one; the second if both are as old.
fn newer(one: Option<News>, other: Option<News>) -> Option<News> {
    one.into_iter().chain(other).max_by_key(|news| news.left_ns)
}

impl Votes {
    /// The votes, weak ones only where there are no others, without those for a context that few are for; and the
    /// contexts that they are for.
    pub(super) fn credible(&self) -> (Vec<Vote>, BTreeSet<Context>) {
        let votes = if self.strong.is_empty() { &self.weak } else { &self.strong };
        let mut counts: BTreeMap<Context, usize> = BTreeMap::new();
        for vote in votes {
            *counts.entry(vote.context).or_default() += 1;
        }
        counts.retain(|_, count| *count * LEAST_SHARE >= votes.len());
        let credible = votes.iter().filter(|vote| counts.contains_key(&vote.context));
        (credible.copied().collect(), counts.into_keys().collect())
    }
}

#[cfg(test)]
impl Votes {
    pub(super) fn of(tokens: impl IntoIterator<Item = TokenKey>, context: Context) -> Self {
        let strong = tokens.into_iter().map(|token| Vote { token, context }).collect();
        Self { strong, weak: Vec::new() }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.strong.extend(other.strong);
        self.weak.extend(other.weak);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::CallEnd;
    use crate::timeline::testing::{PROCESS, origin};

    const ENGINE: u32 = 11;
    const OTHER_ENGINE: u32 = 12;
    const HELPER: u32 = 13;
    const LOOP: u32 = 14;
    const FUTEX: u32 = 202;
    const EPOLL: u32 = 232;

    fn step(wakes: &mut Wakes, tid: u32, object: u64, end_ns: u64) {
        wakes.step(&Call {
            origin: origin(tid, end_ns),
            point: 0,
            parent_point: None,
            depth: 0,
            begin_ns: end_ns - 1,
            end_ns,
            end: CallEnd::Returned,
            sp: 0,
            args: [object, 0, 0, 0, 0, 0],
            ret: 1,
            stack: None,
        });
    }

    fn wake(wakes: &mut Wakes, waker: u32, sleeper: u32, time_ns: u64, syscall: u32) {
        wakes.woken(&Sched {
            origin: origin(sleeper, time_ns + 1),
            off_ns: 0,
            wake_ns: Some(time_ns),
            waker_tgid: PROCESS.tgid,
            waker_tid: waker,
            prev_state: 1,
            syscall: Some(syscall),
            preempted: false,
            open: false,
            stack: None,
        });
    }

    /// The contexts that a token of the loop, written at a time, speaks for: strongly or not.
    fn votes(wakes: &Wakes, since_ns: u64) -> (Vec<u64>, Vec<u64>) {
        let mut votes = Votes::default();
        wakes.vote(origin(LOOP, 1_000), since_ns, (0, 0), &mut votes);
        let objects = |votes: Vec<Vote>| votes.iter().map(|vote| vote.context.object).collect();
        (objects(votes.strong), objects(votes.weak))
    }

    #[test]
    fn news_spreads_over_threads() {
        let mut wakes = Wakes::default();
        step(&mut wakes, ENGINE, 7, 10);
        wake(&mut wakes, ENGINE, HELPER, 20, EPOLL);
        wake(&mut wakes, HELPER, LOOP, 30, EPOLL);
        assert_eq!(votes(&wakes, 0), (vec![7], vec![]));
        // It was already known when the token before was written.
        assert_eq!(votes(&wakes, 25), (vec![], vec![]));
    }

    #[test]
    fn who_gives_an_interpreter_back_has_told_little() {
        let mut wakes = Wakes::default();
        step(&mut wakes, ENGINE, 7, 10);
        step(&mut wakes, OTHER_ENGINE, 8, 10);
        wake(&mut wakes, ENGINE, LOOP, 20, EPOLL);
        wake(&mut wakes, OTHER_ENGINE, LOOP, 30, FUTEX);
        assert_eq!(votes(&wakes, 0), (vec![7], vec![]));
        assert_eq!(votes(&wakes, 25), (vec![], vec![8]));
    }

    #[test]
    fn an_echo_is_not_news() {
        let mut wakes = Wakes::default();
        step(&mut wakes, ENGINE, 7, 10);
        step(&mut wakes, OTHER_ENGINE, 8, 10);
        wake(&mut wakes, ENGINE, LOOP, 20, EPOLL);
        wake(&mut wakes, LOOP, HELPER, 21, EPOLL);
        wake(&mut wakes, OTHER_ENGINE, LOOP, 30, EPOLL);
        wake(&mut wakes, HELPER, LOOP, 40, EPOLL);
        assert_eq!(votes(&wakes, 0), (vec![8], vec![]));
    }

    #[test]
    fn a_warm_up_of_long_ago_is_not_what_a_thread_tells() {
        let mut wakes = Wakes::default();
        step(&mut wakes, LOOP, 8, 5);
        step(&mut wakes, ENGINE, 7, 10);
        wake(&mut wakes, ENGINE, LOOP, 20, EPOLL);
        wake(&mut wakes, LOOP, HELPER, 30, EPOLL);
        assert_eq!(votes(&wakes, 0), (vec![7], vec![]));
    }

    #[test]
    fn a_context_that_few_speak_for_is_left_out() {
        let of = |object| Context { process: PROCESS, object };
        let mut votes = Votes::of((0..30).map(|index| (0, index)), of(7));
        votes.add(Votes::of([(0, 30)], of(8)));
        let (credible, contexts) = votes.credible();
        assert_eq!((credible.len(), contexts), (30, BTreeSet::from([of(7)])));
    }
}

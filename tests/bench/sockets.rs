//! What following sockets costs a system call: of a target, of another process, and on what is no socket.

use anyhow::{Context as _, Result, ensure};
use engines::Profiles;
use serde::Serialize;
use tracer::probe::{Options, Session};
use tracer_tests::{
    stats::{self, Aim, Estimate},
    table::{Table, judged, ratio},
};

use crate::{
    affinity,
    part::Part,
    probe,
    syscalls::{self, CHUNK_BYTES, READ, Syscall, WRITE},
    worker::{self, Worker},
};

const TITLE: &str = "Cost of following sockets";
/// In ns.
const TARGET_AIM: Aim = Aim::AtMost(400.0);
const OTHER_AIM: Aim = Aim::AtMost(100.0);
/// What is no socket is not touched: so much is the measurement's own.
const ELSEWHERE_AIM: Aim = Aim::AtMost(10.0);

/// What is traced while the worker makes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Untraced,
    Target,
    Other,
    TargetBySyscalls,
}

impl State {
    const ALL: [Self; 4] = [Self::Untraced, Self::Target, Self::Other, Self::TargetBySyscalls];

    const fn text(self) -> &'static str {
        match self {
            Self::Untraced => "not traced",
            Self::Target => "the target",
            Self::Other => "another process",
            Self::TargetBySyscalls => "the target, by system calls",
        }
    }

    fn aim(self, syscall: &Syscall) -> Option<Aim> {
        match self {
            Self::Target | Self::Other if !syscall.on_socket => Some(ELSEWHERE_AIM),
            Self::Target => Some(TARGET_AIM),
            Self::Other => Some(OTHER_AIM),
            // Kernels without hooks for sockets have no other way.
            Self::Untraced | Self::TargetBySyscalls => None,
        }
    }
}

/// What one kind of system call costs in one state, in ns of CPU time per call, over all rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    what: &'static str,
    caller: &'static str,
    untraced_ns: f64,
    traced_ns: f64,
    /// Traced − untraced, round by round.
    added_ns: Option<Estimate>,
    aim: Option<Aim>,
}

/// Sockets and nothing else.
fn options(socket_syscalls: bool) -> Options {
    Options { sample_hz: 0, sched: false, socket_syscalls, ..Options::default() }
}

/// Measures from another CPU than the traced process's.
pub(crate) fn run(rounds: usize) -> Result<Part<Vec<Cost>>> {
    let session = Session::start(options(false), Profiles::builtin())?;
    let missing = session.missing().iter().find(|missing| ["sockets", "arrivals"].contains(&missing.what));
    if let Some(missing) = missing {
        return Ok(Part::LeftOut(missing.why.clone()));
    }
    drop(session);
    affinity::apart(|cpu| Bench::new(cpu)?.measure(rounds)).map(Part::Measured)
}

struct Bench {
    worker: Worker,
    /// Traced where the worker is not.
    other: Worker,
}

impl Bench {
    fn new(cpu: usize) -> Result<Self> {
        Ok(Self { worker: Worker::start(cpu, None)?, other: Worker::start(cpu, None)? })
    }

    fn measure(&mut self, rounds: usize) -> Result<Vec<Cost>> {
        let mut order = State::ALL;
        // By system call, a row of all states per round.
        let mut measured = vec![Vec::new(); syscalls::ALL.len()];
        for round in 0..rounds {
            crate::progress(&format!("sockets: round {} of {rounds}", round + 1));
            let mut row = vec![[0.0; State::ALL.len()]; syscalls::ALL.len()];
            for state in order {
                let all = self.measure_in(state).with_context(|| format!("tracing: {}", state.text()))?;
                for (syscall, ns) in all.into_iter().enumerate() {
                    row[syscall][state as usize] = ns;
                }
            }
            measured.iter_mut().zip(row).for_each(|(rows, row)| rows.push(row));
            order.rotate_left(1);
        }
        let costs = syscalls::ALL.iter().zip(&measured).flat_map(|(syscall, rounds)| {
            State::ALL.into_iter().skip(1).map(move |state| cost(syscall, state, rounds))
        });
        Ok(costs.collect())
    }

    /// ns per call of each system call.
    fn measure_in(&mut self, state: State) -> Result<Vec<f64>> {
        let target = match state {
            State::Untraced => return all(&mut self.worker, &mut || ()),
            State::Target | State::TargetBySyscalls => self.worker.pid(),
            State::Other => self.other.pid(),
        };
        let options = options(state == State::TargetBySyscalls);
        let traced =
            probe::with_session(options, Profiles::builtin(), target, |drain| all(&mut self.worker, drain))?;
        // A connection that is not followed is cheaper.
        let (tokens, requests) = match state {
            State::Other => (0, 0),
            _ => (worker::total(WRITE.calls), worker::total(READ.calls)),
        };
        ensure!(traced.tokens == tokens as u64, "{} tokens of {tokens} were seen", traced.tokens);
        ensure!(traced.events >= tokens + requests, "{} events of {tokens} tokens", traced.events);
        Ok(traced.measured)
    }
}

/// ns per call of each system call, as things are.
fn all(worker: &mut Worker, meanwhile: &mut dyn FnMut()) -> Result<Vec<f64>> {
    syscalls::ALL.iter().map(|syscall| worker.median(syscall.name, syscall.calls, meanwhile)).collect()
}

fn cost(syscall: &Syscall, state: State, rounds: &[[f64; State::ALL.len()]]) -> Cost {
    let column = |state: State| {
        let column: Vec<f64> = rounds.iter().map(|round| round[state as usize]).collect();
        stats::median(&column).unwrap_or(f64::NAN)
    };
    let added: Vec<f64> =
        rounds.iter().map(|round| round[state as usize] - round[State::Untraced as usize]).collect();
    Cost {
        what: syscall.what,
        caller: state.text(),
        untraced_ns: column(State::Untraced),
        traced_ns: column(state),
        added_ns: stats::estimate(&added),
        aim: state.aim(syscall),
    }
}

fn table(costs: &[Cost]) -> Table {
    let title = format!(
        "{TITLE}: CPU ns per call over loopback, a token being a chunk of {CHUNK_BYTES} bytes; traced (with records, \
         rings drained) − not traced"
    );
    let mut header = vec!["system call", "its caller is", "not traced", "traced"];
    header.extend(judged("added"));
    let mut table = Table::new(&title, &header);
    for cost in costs {
        let mut row = vec![cost.what.to_owned(), cost.caller.to_owned()];
        row.extend([cost.untraced_ns, cost.traced_ns].map(|ns| format!("{ns:.0}")));
        row.extend(ratio(cost.added_ns.as_ref(), cost.aim));
        table.rows.push(row);
    }
    table
}

pub(crate) fn text(costs: &Part<Vec<Cost>>) -> String {
    costs.text(TITLE, |costs| table(costs).to_string())
}

//! Bugs on purpose, in every so many iterations: what a tracer should find of itself.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use crate::engine::{Iteration, Rank, spawn};
use crate::gpu::{Gpu, Stream};
use crate::options::Serve;
use crate::truth::Truth;

/// One iteration in so many has the bug.
const EVERY: u64 = 5;

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bug {
    /// A second thread gives the engine's stream a step of other requests while the first one's runs
    SharedStream,
    /// Another thread captures the engine's stream while it is given a step, which then never runs
    Capture,
    /// Tokens are handed out before the step that generates them is waited for
    EarlyOutput,
}

/// The bug of a server, and the thread that it takes.
#[derive(Debug)]
pub(crate) struct Bugs {
    bug: Option<Bug>,
    other: Option<Other>,
}

impl Bugs {
    /// `stream`: of the engine.
    pub(crate) fn new(
        gpu: &Gpu,
        stream: Stream,
        options: &Arc<Serve>,
        truth: &Truth,
    ) -> anyhow::Result<Self> {
        let bug = options.bug;
        let needs_other = matches!(bug, Some(Bug::SharedStream | Bug::Capture));
        let other = needs_other.then(|| Other::start(gpu, stream, options, truth)).transpose()?;
        Ok(Self { bug, other })
    }

    /// Whether an iteration, of so many requests, has a bug.
    pub(crate) fn due(&self, bug: Bug, batch_id: u64, requests: usize) -> bool {
        self.bug == Some(bug) && batch_id.is_multiple_of(EVERY) && requests > 1
    }

    /// The other thread begins what it should not, and has done so when this returns.
    pub(crate) fn other(&self, order: Order) -> anyhow::Result<()> {
        let other = self.other.as_ref().context("there is no other thread")?;
        other.orders.send(order).context("the other thread ended")?;
        other.done.recv().context("the other thread ended")?
    }
}

/// What the other thread is to do.
#[derive(Debug)]
pub(crate) enum Order {
    /// A step, to its end.
    Step(Arc<Iteration>),
    BeginCapture,
    EndCapture,
}

#[derive(Debug)]
struct Other {
    orders: Sender<Order>,
    done: Receiver<anyhow::Result<()>>,
}

impl Other {
    fn start(gpu: &Gpu, stream: Stream, options: &Arc<Serve>, truth: &Truth) -> anyhow::Result<Self> {
        let ((orders, todo), (done, results)) = (channel::<Order>(), channel());
        let (gpu, options, truth) = (gpu.clone(), Arc::clone(options), truth.clone());
        spawn("engine-other".to_owned(), move || {
            let rank = match Rank::on(&gpu, stream, &options, &truth) {
                Ok(rank) => rank,
                Err(error) => {
                    _ = done.send(Err(error));
                    return;
                }
            };
            _ = done.send(Ok(()));
            for order in todo {
                _ = done.send(obey(&rank, order));
            }
        })?;
        let other = Self { orders, done: results };
        other.done.recv().context("the other thread ended")??;
        Ok(other)
    }
}

fn obey(rank: &Rank, order: Order) -> anyhow::Result<()> {
    match order {
        Order::Step(iteration) => intrude(rank, &iteration),
        Order::BeginCapture => capture(rank),
        Order::EndCapture => rank.engine.end_capture(),
    }
}

/// Gives the stream a step that the engine's thread knows nothing of.
#[inline(never)]
fn intrude(rank: &Rank, iteration: &Iteration) -> anyhow::Result<()> {
    let times = rank.enqueue(iteration)?;
    rank.finish(iteration, times)
}

#[inline(never)]
fn capture(rank: &Rank) -> anyhow::Result<()> {
    rank.engine.begin_capture()
}

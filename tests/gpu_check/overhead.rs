//! What an event pair around each launch costs a stream of small kernels.

use std::time::Instant;

use anyhow::Result;
use tracer_tests::stats::{estimate, median};

use crate::driver::{Gpu, Handle};
use crate::line::Line;

/// Launches in one measurement, and measurements of each kind, in turns.
const LAUNCHES: usize = 1_000;
const ROUNDS: usize = 20;
/// Event pairs, used in turn: as many as a step's launch could still be waiting for.
const PAIRS: usize = 64;

/// ns per launch, from the first launch until all are done; and the part of it until all are submitted.
#[derive(Clone, Copy)]
struct Cost {
    done_ns: f64,
    submitted_ns: f64,
}

/// Costs without and with pairs, by turn.
pub(crate) struct Overhead(Vec<(Cost, Cost)>);

impl Overhead {
    pub(crate) fn measure(gpu: &Gpu) -> Result<Self> {
        let stream = gpu.stream()?;
        let mut pairs = Vec::with_capacity(PAIRS);
        for _ in 0..PAIRS {
            pairs.push((gpu.event()?, gpu.event()?));
        }
        // The first launches compile and load.
        run(gpu, stream, &pairs)?;
        (0..ROUNDS)
            .map(|_| Ok((run(gpu, stream, &[])?, run(gpu, stream, &pairs)?)))
            .collect::<Result<_>>()
            .map(Self)
    }

    pub(crate) fn lines(&self) -> Vec<Line> {
        let ratios: Vec<f64> = self.0.iter().map(|(plain, timed)| timed.done_ns / plain.done_ns).collect();
        let added: Vec<f64> =
            self.0.iter().map(|(plain, timed)| (timed.submitted_ns - plain.submitted_ns) / 1e3).collect();
        let plain: Vec<f64> = self.0.iter().map(|(plain, _)| plain.done_ns / 1e3).collect();
        let Some(ratio) = estimate(&ratios) else { return Vec::new() };
        let Some(added) = estimate(&added) else { return Vec::new() };
        let note = format!(
            "95 % {:.3} … {:.3}; {LAUNCHES} empty kernels each, {:.2} µs per launch without",
            ratio.low,
            ratio.high,
            median(&plain).unwrap_or(f64::NAN)
        );
        let of_host = format!("95 % {:.2} … {:.2} µs of the launching thread", added.low, added.high);
        vec![
            Line::new("event pair per launch ÷ launch alone", "×", ratio.median, None, note),
            Line::new("host time that a pair adds", "µs", added.median, None, of_host),
        ]
    }
}

fn run(gpu: &Gpu, stream: Handle, pairs: &[(Handle, Handle)]) -> Result<Cost> {
    let kernel = gpu.empty_kernel()?;
    let begin = Instant::now();
    for i in 0..LAUNCHES {
        let pair = pairs.get(i % PAIRS);
        if let Some((before, _)) = pair {
            gpu.record(*before, stream)?;
        }
        gpu.launch(kernel, stream, &[])?;
        if let Some((_, after)) = pair {
            gpu.record(*after, stream)?;
        }
    }
    let per_launch = |begin: Instant| begin.elapsed().as_nanos() as f64 / LAUNCHES as f64;
    let submitted_ns = per_launch(begin);
    gpu.synchronize(stream)?;
    Ok(Cost { done_ns: per_launch(begin), submitted_ns })
}

//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};

use crate::bug::Bug;

/// A small OpenAI-compatible streaming server on a simulated GPU.
///
/// Needs the stand-in libcuda.so.1 and libnvinfer.so.10 on LD_LIBRARY_PATH. Prints "listening on ADDRESS" once it takes
/// requests. Ends on SIGINT, SIGTERM or POST /shutdown, and prints a summary as JSON; GET /stats gives it at any time.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) serve: Serve,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Send requests to a server and report latencies as the client sees them
    Load(Load),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Serve {
    /// Port on 127.0.0.1; 0: any free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Ranks: each iteration runs a step on a thread and stream of each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) ranks: u32,
    /// Most requests in a batch
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) max_batch: u32,
    /// Most prompt tokens that one step processes; longer prompts take several steps
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_chunk: u32,
    /// GPU time of a step, in µs; the next three add to it
    #[arg(long, default_value_t = 6_000.0)]
    pub(crate) step_us: f64,
    /// … for each request in the batch
    #[arg(long, default_value_t = 50.0)]
    pub(crate) slot_us: f64,
    /// … for each token of context of each decoded request
    #[arg(long, default_value_t = 0.2)]
    pub(crate) context_token_us: f64,
    /// … for each prompt token
    #[arg(long, default_value_t = 10.0)]
    pub(crate) prefill_token_us: f64,
    /// Kernels of a step
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) kernels: u32,
    /// CPU time that enqueueing a step takes, in µs
    #[arg(long, default_value_t = 150.0)]
    pub(crate) host_us: f64,
    /// The GPU takes no time: the server is bound by the CPU
    #[arg(long)]
    pub(crate) zero_gpu: bool,
    /// Stall some steps, as CAUSE:PROBABILITY or CAUSE:every:N; CAUSE is gpu (+30 ms of kernels), lock (a mutex that
    /// another thread holds for 25 ms) or cpu (threads that take the engine thread's CPU for 40 ms). Repeatable
    #[arg(long, value_name = "STALL")]
    pub(crate) stall: Vec<Stall>,
    /// Do something wrong in every 5th iteration that has several requests, for a tracer to find (with one rank)
    #[arg(long, value_name = "BUG")]
    pub(crate) bug: Option<Bug>,
    /// Write what happens, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub(crate) truth: Option<PathBuf>,
    /// Read this file before the first step, as an engine's (repeatable)
    #[arg(long, value_name = "FILE")]
    pub(crate) engine_file: Vec<PathBuf>,
    /// Make no marks
    #[arg(long)]
    pub(crate) no_marks: bool,
    /// Make no mark for this share of the tokens
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub(crate) withhold_tokens: f64,
    /// Make no mark for this share of the steps
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub(crate) withhold_batches: f64,
    /// Bytes of each connection's send buffer; 0: the system's. Small unless --zero-gpu is given, so that a slow client
    /// makes writes block
    #[arg(long, default_value_t = 4_096, default_value_if("zero_gpu", "true", "0"))]
    pub(crate) send_buffer: u32,
    /// Decides which steps stall and which marks are withheld
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// What stalls a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    Gpu,
    Lock,
    Cpu,
}

/// How often a step stalls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Frequency {
    Probability(f64),
    Every(u64),
}

/// `CAUSE:PROBABILITY` or `CAUSE:every:N`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stall {
    pub(crate) cause: Cause,
    pub(crate) frequency: Frequency,
}

impl FromStr for Stall {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (cause, frequency) = text.split_once(':').ok_or("must be CAUSE:PROBABILITY or CAUSE:every:N")?;
        let cause = match cause {
            "gpu" => Cause::Gpu,
            "lock" => Cause::Lock,
            "cpu" => Cause::Cpu,
            "client" => {
                return Err("a slow client is made by the load generator: load --slow-clients".to_owned());
            }
            other => return Err(format!("unknown cause {other:?}: must be gpu, lock or cpu")),
        };
        let frequency = match frequency.strip_prefix("every:") {
            Some(n) => match n.parse() {
                Ok(n) if n > 0 => Frequency::Every(n),
                _ => return Err(format!("{n:?} is not a number of steps")),
            },
            None => match frequency.parse() {
                Ok(p) if (0.0..=1.0).contains(&p) => Frequency::Probability(p),
                _ => return Err(format!("{frequency:?} is not a probability between 0 and 1")),
            },
        };
        Ok(Self { cause, frequency })
    }
}

/// Numbers from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) low: u32,
    pub(crate) high: u32,
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        match (low.parse(), high.parse()) {
            (Ok(low), Ok(high)) if 0 < low && low <= high => Ok(Self { low, high }),
            _ => Err("must be N or LOW-HIGH, from 1 on".to_owned()),
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Load {
    /// Server, as http://HOST:PORT
    #[arg(long, required_unless_present = "port", conflicts_with = "port")]
    pub(crate) url: Option<String>,
    /// Server's port on 127.0.0.1
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// Stop after this many requests
    #[arg(long, required_unless_present = "duration")]
    pub(crate) requests: Option<u64>,
    /// Start no request after this many seconds
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,
    /// Requests at a time
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    pub(crate) concurrency: u32,
    /// Requests a second, at random times; without it each client sends its next one when the last is answered
    #[arg(long)]
    pub(crate) rate: Option<f64>,
    /// Tokens of the prompts, spread evenly over the orders of magnitude
    #[arg(long, default_value = "16-2000", value_name = "LOW-HIGH")]
    pub(crate) prompt_tokens: Range,
    /// Word that the prompts are made of
    #[arg(long, default_value = "w", value_name = "WORD")]
    pub(crate) prompt_word: String,
    /// Tokens asked for, spread likewise
    #[arg(long, default_value = "8-200", value_name = "LOW-HIGH")]
    pub(crate) output_tokens: Range,
    /// Share of the clients that stop reading now and then (0 to 1)
    #[arg(long, default_value_t = 0.0, value_name = "FRACTION")]
    pub(crate) slow_clients: f64,
    /// Requests are of so many tenants in turn (`user` in their bodies); 0: of none
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) tenants: u64,
    /// … and for so many versions of the model, likewise; 0: for none
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) model_versions: u64,
    /// Beginning of the requests' ids
    #[arg(long, default_value = "load", value_name = "PREFIX")]
    pub(crate) id_prefix: String,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn stalls_are_parsed() {
        let stall = |text: &str| text.parse::<Stall>();
        assert_eq!(stall("gpu:0.5"), Ok(Stall { cause: Cause::Gpu, frequency: Frequency::Probability(0.5) }));
        assert_eq!(stall("cpu:every:10"), Ok(Stall { cause: Cause::Cpu, frequency: Frequency::Every(10) }));
        for bad in ["gpu", "gpu:", "gpu:2", "gpu:NaN", "gpu:every:0", "disk:0.1", "client:0.1", ""] {
            assert!(stall(bad).is_err(), "{bad}");
        }
        for bad in ["", "0", "5-4", "a-b", "-"] {
            assert!(bad.parse::<Range>().is_err(), "{bad}");
        }
    }
}

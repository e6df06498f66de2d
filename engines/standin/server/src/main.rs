//! A small OpenAI-compatible streaming server on the stand-in GPU, for demo, tests and benchmarks.
//!
//! In: `POST /v1/completions`. Out: tokens as server-sent events, marks for a tracer, and a truth log of what really
//! happened and when. Requests are served by continuous batching: each step prefills new requests and decodes the
//! running ones together, through `enqueueV3` of the libnvinfer that the loader finds. `standin-server load` is a load
//! generator for it.

mod bug;
mod clock;
mod connection;
mod engine;
mod gpu;
mod http;
mod load;
mod options;
mod random;
mod scheduler;
mod serve;
mod stall;
mod truth;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let result = match options::Cli::parse() {
        options::Cli { command: Some(options::Command::Load(options)), .. } => load::run(&options),
        options::Cli { serve, .. } => serve::run(serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("standin-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}

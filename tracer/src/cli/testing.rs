//! Tables of a synthetic recording.

use crate::clock::{ClockQuality, Quality, SeriesKey, WallClock};
use crate::event::ProcessId;
use crate::timeline::budget::{Budgets, Threads};
use crate::timeline::tables::{LedgerRow, Meta, Tables};
use crate::timeline::testing::{EnqueueClock, Plan, run};
use crate::timeline::{Config, Timeline};

/// 40 requests of 25 tokens on two ranks.
pub(crate) fn tables() -> Tables {
    let plan = Plan {
        seed: 7,
        ranks: 2,
        max_batch: 8,
        requests: vec![(25, false); 40],
        withheld_tokens: 0,
        withheld_batches: 0,
        spans: true,
        scale: 100,
    };
    let mut timeline = Timeline::new(Config::default(), EnqueueClock);
    for event in &run(&plan).events {
        timeline.feed(event);
    }
    timeline.finish();
    let out = timeline.drain();
    let ended_ns = out.tokens.iter().map(|token| token.delivered_ns).max().unwrap_or(0);
    let clock = ClockQuality {
        series: SeriesKey {
            process: ProcessId { tgid: 10, start_ticks: 1 },
            device_uuid: [0xab; 16],
            context: 1,
            epoch: 0,
        },
        quality: Quality {
            bursts: 120,
            bursts_rejected: 0,
            segments: 1,
            median_bound_ns: 4_900,
            p99_bound_ns: 5_800,
            precision_ns: 90,
            drift_ppm: -210.25,
            quantum_ns: 500,
            causality_samples: 1_000,
            causality_violations: 0,
        },
    };
    let row = |name: &str, count, loss| LedgerRow { process: None, name: name.into(), count, loss };
    let mut wall = WallClock::default();
    wall.push_pair(0, 1_796_000_000_000_000_000);
    let cut = Budgets::new(&out.steps, &out.requests, &out.tokens, Threads::default());
    Tables {
        budgets: out.tokens.iter().filter_map(|token| cut.budget(token)).collect(),
        meta: Meta {
            tracer_version: "0.1.0".into(),
            host: "node-1".into(),
            target: "comm server".into(),
            engines: vec!["tensorrt".into()],
            started_realtime_ns: 1_796_000_000_000_000_000,
            started_ns: 0,
            ended_ns,
            simulated: true,
            complete: true,
            ..Meta::default()
        },
        steps: out.steps,
        iterations: out.iterations,
        requests: out.requests,
        tokens: out.tokens,
        points: Vec::new(),
        http_wires: Vec::new(),
        http_ends: Vec::new(),
        clocks: vec![clock],
        wall,
        ledger: vec![row("vital_written", 12_345, false), row("vital_dropped", 0, true)],
        ..Tables::default()
    }
}

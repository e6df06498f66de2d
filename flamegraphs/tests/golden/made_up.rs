//! Made-up latencies that look like a server's: the same at every run.

use flamegraphs::{
    Axis, Fault, FlameOptions, Folded, GpuBar, Header, HeatmapInput, HistogramInput, Hue, Lane, Loss,
    MatrixCell, MatrixInput, Measure, Panel, Part, PercentileInput, Piece, Point, Quantile, RequestInput,
    Series, StepBar, Stretch, Strip, TokenBar,
};

/// A small generator (splitmix64): the pictures must not depend on a crate's version.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub(crate) fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Around `middle_ns`, skewed to the right as latencies are.
    pub(crate) fn latency(&mut self, middle_ns: f64) -> u64 {
        let noise = self.share() + self.share() + self.share() - 1.5;
        let tail = if self.share() < 0.01 { 4.0 + 10.0 * self.share() } else { 1.0 };
        (middle_ns * (0.35 * noise).exp() * tail) as u64
    }
}

pub(crate) fn header(title: &str, subtitle: &str) -> Header {
    Header { title: title.to_owned(), subtitle: subtitle.to_owned(), simulated: true }
}

pub(crate) fn ids(n: usize) -> Vec<String> {
    let mut random = Random(7);
    (0..n).map(|_| format!("req-{:08x}", random.next() as u32)).collect()
}

pub(crate) fn heatmap_over_time(ids: &[String], points: usize) -> HeatmapInput<'_> {
    let mut random = Random(1);
    let points = (0..points)
        .map(|_| {
            let x = (random.share() * 20e9) as u64;
            let middle = if (8_000_000_000..8_600_000_000).contains(&x) { 9e6 } else { 2.2e6 };
            let id = &ids[random.next() as usize % ids.len()];
            Point { x, latency_ns: random.latency(middle), id }
        })
        .filter(|p| !(14_000_000_000..15_000_000_000).contains(&p.x))
        .collect();
    HeatmapInput {
        header: header(
            "Inter-token latency of all requests",
            "standin-server, pid 4242 · 2026-03-01 10:00:00 UTC, 20 s · 1,204 events lost · clock bound 0.4 µs",
        ),
        axis: Axis::Time { name: "time since the recording began".to_owned(), range: 0..20_000_000_000 },
        latency_name: "inter-token latency".to_owned(),
        count_name: "tokens".to_owned(),
        points,
        losses: vec![Loss { range: 17_300_000_000..17_900_000_000, what: "1,204 events dropped".to_owned() }],
        strips: vec![],
    }
}

/// Two devices: one that is throttled where the latencies are high, one that fails.
pub(crate) fn strips() -> Vec<Strip> {
    const SECOND: u64 = 1_000_000_000;
    let mut random = Random(5);
    let mut strip = |name: &str, slow: std::ops::Range<u64>, end: u64| {
        let times = (0..end / (SECOND / 10)).map(|i| i * (SECOND / 10) + random.next() % 1_000_000);
        let times: Vec<u64> = times.filter(|t| !(14 * SECOND..15 * SECOND).contains(t)).collect();
        let busy = times.iter().map(|&t| (t, 70 + random.next() % 25)).collect();
        let clock = |t: u64| if slow.contains(&t) { 1_005 + t / 7 % 60 } else { 1_980 };
        let clocks = times.iter().map(|&t| (t, clock(t))).collect();
        let lane = |name: &str, unit: &str, top, points| Lane {
            name: name.to_owned(),
            unit: unit.to_owned(),
            top,
            points,
        };
        Strip {
            name: name.to_owned(),
            lanes: vec![lane("utilisation", "%", 100, busy), lane("SM clock", "MHz", 1_980, clocks)],
            held: vec![Stretch { range: slow.clone(), what: "HwThermalSlowdown, SwPowerCap".to_owned() }],
            faults: vec![],
        }
    };
    let first = strip("GPU 0 · SimGPU (simulated)", 8 * SECOND..8 * SECOND + SECOND * 6 / 10, 20 * SECOND);
    let mut second = strip("GPU 1 · SimGPU (simulated)", 0..0, 12 * SECOND);
    second.held.clear();
    second.faults = vec![Fault { at: 12 * SECOND, what: "Xid 79: GPU has fallen off the bus.".to_owned() }];
    vec![first, second]
}

pub(crate) fn heatmap_over_index(ids: &[String], points: usize, log: bool) -> HeatmapInput<'_> {
    let mut random = Random(2);
    let longest = if log { 3000.0 } else { 180.0 };
    let points = (0..points)
        .map(|_| {
            let x = (random.share().powi(2) * longest) as u64;
            let middle = if x == 0 { 60e6 } else { 2e6 + x as f64 * 1e3 };
            let id = &ids[random.next() as usize % ids.len()];
            Point { x, latency_ns: random.latency(middle), id }
        })
        .collect();
    HeatmapInput {
        header: header("Latency by token index", "standin-server, pid 4242 · 20 s · nothing lost"),
        axis: if log { Axis::LogTokenIndex } else { Axis::TokenIndex },
        latency_name: "TTFT (index 0), inter-token latency".to_owned(),
        count_name: "tokens".to_owned(),
        points,
        losses: vec![],
        strips: vec![],
    }
}

pub(crate) fn histograms(scale: usize) -> HistogramInput {
    let mut random = Random(3);
    let mut panel = |name: &str, middle: f64, n: usize| {
        let mut values: Vec<u64> = (0..n).map(|_| random.latency(middle)).collect();
        values.sort_unstable();
        let quantile = |q: f64| {
            let enough = n as f64 * (1.0 - q) >= 10.0;
            enough.then(|| values[((n as f64 * q).ceil() as usize).max(1) - 1])
        };
        let quantiles = vec![
            Quantile { name: "p50".to_owned(), value_ns: quantile(0.5) },
            Quantile { name: "p99".to_owned(), value_ns: quantile(0.99) },
            Quantile { name: "max".to_owned(), value_ns: values.last().copied() },
        ];
        Panel { name: name.to_owned(), values: values.into_iter().map(|v| (v, 1)).collect(), quantiles }
    };
    let panels = vec![
        panel("TTFT (request received → first token)", 60e6, 4 * scale),
        panel("ITL (token → next token)", 2.2e6, 100 * scale),
        panel("step (enqueue → end)", 1.9e6, 40 * scale),
        panel("gpu_span (begin event → end event)", 1.4e6, 40 * scale),
    ];
    HistogramInput {
        header: header("Where the time goes", "standin-server, pid 4242 · 2026-03-01 10:00:00 UTC, 20 s"),
        panels,
    }
}

pub(crate) fn stacks() -> Folded<1> {
    let mut random = Random(4);
    let mut stacks = Vec::new();
    let leaves: [&[&str]; 6] = [
        &["serve", "engine::step", "nvinfer1::ExecutionContext::enqueueV3(CUstream_st*)", "cuLaunchKernel"],
        &["serve", "engine::step", "nvinfer1::ExecutionContext::enqueueV3(CUstream_st*)", "memcpy"],
        &["serve", "scheduler::pick", "core::slice::sort::unstable"],
        &["serve", "http::write_chunk", "write", "entry_SYSCALL_64_[k]", "tcp_sendmsg_[k]"],
        &["serve", "sample_token"],
        &["[truncated]", "serde_json::ser::to_string"],
    ];
    for root in ids(5).into_iter().chain(["other requests (n=15)".to_owned(), "no request".to_owned()]) {
        let phases: &[&str] =
            if root == "no request" { &["accept 3", "worker-1"] } else { &["prefill", "decode"] };
        for phase in phases {
            for leaf in leaves {
                let mut stack = vec![root.clone(), (*phase).to_owned()];
                stack.extend(leaf.iter().map(|&f| f.to_owned()));
                stacks.push((stack, [random.next() % 40_000_000]));
            }
        }
    }
    stacks.into_iter().collect()
}

pub(crate) fn flame_options() -> FlameOptions {
    FlameOptions {
        header: header(
            "CPU time by request and phase",
            "standin-server, pid 4242 · 2026-03-01 10:00:00 UTC, 20 s at 99 Hz · 1,980 samples, 0 lost, 12 truncated",
        ),
        count_name: "µs on CPU".to_owned(),
        factor: 1e-3,
        groups: 2,
        ..FlameOptions::default()
    }
}

/// A request of `n` tokens; some of its steps have prompts of others, some tokens wait for a lock.
pub(crate) fn request(n: usize, name: &str) -> RequestInput {
    const US: u64 = 1_000;
    let mut random = Random(6);
    let parts = [
        ("queue", Hue::Purple, false),
        ("host_blocked", Hue::Vermilion, false),
        ("enqueue", Hue::Yellow, false),
        ("gpu_wait", Hue::Sky, false),
        ("gpu_span", Hue::Blue, false),
        ("neighbour_prefill", Hue::Blue, true),
        ("deliver", Hue::Green, false),
    ];
    let parts = parts.map(|(name, hue, hatched)| Part {
        name: name.to_owned(),
        meaning: format!("what {name} means"),
        hue,
        hatched,
    });
    let (mut tokens, mut steps) = (Vec::new(), Vec::new());
    let mut now = 0;
    for index in 0..n {
        let begin = now;
        let mut pieces = Vec::new();
        let mut piece = |part: usize, ns: u64, what: &str| {
            let stack = if part == 1 { vec!["futex_wait", "lock", name, "serve"] } else { vec![] };
            let stack = stack.into_iter().map(str::to_owned).collect();
            if ns > 0 {
                pieces.push(Piece { range: now..now + ns, part, what: what.to_owned(), stack });
            }
            now += ns;
            now
        };
        piece(0, if index == 0 { 9_000 * US } else { 40 * US }, "");
        piece(1, if random.next() % 19 == 7 { random.latency(8e6) } else { 0 }, "futex, thread scheduler");
        let enqueued = piece(2, random.latency(120e3), "");
        let started = piece(3, random.latency(60e3), "");
        piece(4, random.latency(1.9e6), "");
        let prompts = if random.next() % 23 == 5 { 2 } else { 0 };
        let ended = piece(5, if prompts > 0 { 4_000 * US } else { 0 }, "");
        piece(6, random.latency(90e3), "");
        tokens.push(TokenBar {
            name: index.to_string(),
            lane: 0,
            range: begin..now,
            is_first: index == 0,
            pieces,
        });
        let gpu =
            GpuBar { range: started..ended, bound_ns: if index % 7 == 3 { 9_000 * US } else { 30 * US } };
        steps.push(StepBar {
            name: format!("step #{index}"),
            range: enqueued - 100 * US..ended,
            gpu: Some(gpu),
            batch: 3 + random.next() % 9,
            prompts,
            prompt_tokens: prompts * 512,
            is_own: true,
        });
        if index == 0 {
            steps.push(StepBar {
                name: "step #99".to_owned(),
                range: 2_000 * US..8_000 * US,
                gpu: Some(GpuBar { range: 2_200 * US..7_900 * US, bound_ns: 30 * US }),
                batch: 7,
                prompts: 0,
                prompt_tokens: 0,
                is_own: false,
            });
        }
    }
    RequestInput {
        header: header(
            &format!("Request {name}"),
            "received 2026-03-01 10:00:00 UTC · prompt 512 tokens · nothing lost",
        ),
        parts: parts.into(),
        tokens,
        steps,
        notes: vec!["1 token was not seen: 17".to_owned()],
    }
}

pub(crate) fn percentiles() -> PercentileInput {
    let mut random = Random(8);
    let mut series = |name: &str, middle: f64, n: usize| {
        let mut values: Vec<u64> = (0..n).map(|_| random.latency(middle)).collect();
        values.sort_unstable();
        Series { name: name.to_owned(), values: values.into_iter().map(|value| (value, 1)).collect() }
    };
    PercentileInput {
        header: header("Percentiles of itl", "3 captures · 2026-03-01 10:00:00 UTC"),
        latency_name: "itl: token → next token".to_owned(),
        series: vec![series("before", 2.2e6, 3_000), series("after", 2.9e6, 900), series("nothing", 1.0, 0)],
    }
}

/// Tokens of a minute by their offset in the second, more of them in the first half of each.
pub(crate) fn offsets() -> MatrixInput {
    const SECOND: u64 = 1_000_000_000;
    let mut random = Random(9);
    let cells = (0..9_000)
        .map(|_| (random.next() % 60, random.share() * random.share()))
        .filter(|(second, _)| !(20..22).contains(second))
        .map(|(second, share)| MatrixCell {
            row: 49 - (share * 50.0) as usize,
            at_ns: second * SECOND + (share * 1e9) as u64,
            value: 1,
        });
    MatrixInput {
        header: header("Tokens by offset in the second", "60 s · 31 events lost"),
        time_name: "time since the recording began".to_owned(),
        range: 0..60 * SECOND,
        column_ns: Some(SECOND),
        row_name: "offset in the second".to_owned(),
        rows: (0..50u64).rev().map(|row| format!("{} ms", row * 20)).collect(),
        measure: Measure::Count("tokens".to_owned()),
        cells: cells.collect(),
        losses: vec![Loss { range: 41 * SECOND..42 * SECOND, what: "31 events dropped".to_owned() }],
        empty: "nothing seen".to_owned(),
    }
}

/// Latencies of a few requests in time.
pub(crate) fn request_rows(ids: &[String]) -> MatrixInput {
    let mut random = Random(10);
    let cells = (0..ids.len() * 60).map(|i| {
        let (row, at) = (i / 60, i as u64 % 60 * 100_000_000 + (i as u64 / 60) * 1_500_000_000);
        MatrixCell { row, at_ns: at, value: random.latency(3e6) }
    });
    MatrixInput {
        header: header("Slowest token of each request in time", "20 s · nothing lost"),
        time_name: "time since the recording began".to_owned(),
        range: 0..20_000_000_000,
        column_ns: None,
        row_name: "request".to_owned(),
        rows: ids.to_vec(),
        measure: Measure::Latency("slowest gap".to_owned()),
        cells: cells.collect(),
        losses: vec![],
        empty: "none of these".to_owned(),
    }
}

/// Stacks of usual and slow tokens, ns of a token.
pub(crate) fn grown() -> Folded<2> {
    let stack = |names: &[&'static str]| names.to_vec();
    let stacks = [
        (stack(&["gpu_span"]), [1_900_000, 1_950_000]),
        (stack(&["gpu_wait"]), [60_000, 20_000]),
        (stack(&["host_blocked", "futex", "serve", "lock", "futex_wait_[k]"]), [10_000, 6_300_000]),
        (stack(&["host_blocked", "poll", "serve", "epoll_wait_[k]"]), [90_000, 0]),
        (stack(&["deliver"]), [90_000, 90_000]),
    ];
    stacks.into_iter().collect()
}

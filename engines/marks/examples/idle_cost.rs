//! Prints what a mark costs while nobody listens: `cargo run --release -p tracer-marks --example idle_cost`.

use std::hint::black_box;
use std::time::Instant;

const CALLS: u64 = 100_000_000;

/// Median over 9 runs of ns per call.
fn ns_per_call(mut call: impl FnMut(u64)) -> f64 {
    let mut runs: Vec<f64> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            (0..CALLS).for_each(|i| call(black_box(i)));
            begin.elapsed().as_nanos() as f64 / CALLS as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

fn main() {
    let empty = ns_per_call(|i| {
        black_box(i);
    });
    let token = ns_per_call(|i| tracer_marks::token(i, 0, black_box(1)));
    println!("listening: {}", tracer_marks::listening());
    println!("empty loop: {empty:.2} ns, token mark: {token:.2} ns per call");
}

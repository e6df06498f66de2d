//! What the check says: one line for each thing.

use std::fmt::Write as _;

use serde::Serialize;
use tracer::event::mark::ClockBurst;
use tracer_tests::stats::Aim;
use tracer_tests::table::Table;

use crate::driver::Gpu;

/// How a value is to its aim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Met,
    Missed,
    /// Nothing is demanded of it.
    Measured,
    NotMeasured,
}

impl Outcome {
    const fn text(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Measured => "measured",
            Self::NotMeasured => "not measured",
        }
    }
}

/// One thing that was checked.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) aim: Option<Aim>,
    pub(crate) value: Option<f64>,
    pub(crate) outcome: Outcome,
    /// What it rests on; of what was not measured, why.
    pub(crate) note: String,
}

impl Line {
    /// A value that should be so, or of which nothing is demanded.
    pub(crate) fn new(
        name: &'static str,
        unit: &'static str,
        value: f64,
        aim: Option<Aim>,
        note: String,
    ) -> Self {
        let outcome = match aim {
            None => Outcome::Measured,
            Some(Aim::AtMost(most)) if value <= most => Outcome::Met,
            Some(Aim::AtLeast(least)) if value >= least => Outcome::Met,
            Some(_) => Outcome::Missed,
        };
        Self { name, unit, aim, value: Some(value), outcome, note }
    }

    /// What could not be measured, and why.
    pub(crate) fn missing(name: &'static str, unit: &'static str, aim: Option<Aim>, why: String) -> Self {
        Self { name, unit, aim, value: None, outcome: Outcome::NotMeasured, note: why }
    }

    fn cells(&self, simulated: bool) -> Vec<String> {
        let number = |value: f64| {
            let digits = if self.unit.is_empty() { 0 } else { 3 };
            format!("{value:.digits$} {}", self.unit).trim_end().to_owned()
        };
        let aim = match self.aim {
            None => "–".to_owned(),
            Some(Aim::AtMost(0.0)) => "0".to_owned(),
            Some(Aim::AtMost(most)) => format!("≤ {}", number(most)),
            Some(Aim::AtLeast(least)) => format!("≥ {}", number(least)),
        };
        let outcome = self.outcome.text();
        let outcome = if simulated { format!("{outcome} (simulated)") } else { outcome.to_owned() };
        vec![self.name.to_owned(), self.value.map_or("–".into(), number), aim, outcome]
    }
}

/// Everything, as printed with `--json`.
#[derive(Serialize)]
pub(crate) struct Report<'a> {
    schema: &'static str,
    /// The driver was the stand-in: nothing here says anything of a GPU.
    simulated_gpu: bool,
    gpu: &'a str,
    gpu_uuid: String,
    /// CUDA that the driver offers, as 1000 · major + 10 · minor.
    cuda_version: i32,
    kernel: String,
    seconds: u32,
    lines: Vec<Line>,
    bursts: Vec<RawBurst>,
}

/// A burst as it was read, so that it can be judged anew.
#[derive(Serialize)]
struct RawBurst {
    rebase_ms: Option<f32>,
    /// CLOCK_MONOTONIC_RAW ns before and after, and ms since the burst's base.
    readings: Vec<(u64, u64, f32)>,
}

impl RawBurst {
    fn new(burst: &ClockBurst) -> Self {
        let reading = |reading: &tracer_abi::mark::ClockReading| {
            (reading.h0_raw_ns, reading.h1_raw_ns, f32::from_bits(reading.elapsed_ms_bits))
        };
        Self { rebase_ms: burst.rebase_ms, readings: burst.readings.iter().map(reading).collect() }
    }
}

impl<'a> Report<'a> {
    pub(crate) fn new(gpu: &'a Gpu, seconds: u32, lines: Vec<Line>, bursts: &[ClockBurst]) -> Self {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            schema: "tracer.gpu_check/1",
            simulated_gpu: gpu.simulated,
            gpu: &gpu.name,
            gpu_uuid: gpu.uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            cuda_version: gpu.cuda_version,
            kernel: release.trim().to_owned(),
            seconds,
            lines,
            bursts: bursts.iter().map(RawBurst::new).collect(),
        }
    }

    pub(crate) fn is_met(&self) -> bool {
        self.lines.iter().all(|line| line.outcome != Outcome::Missed)
    }

    pub(crate) fn text(&self) -> String {
        let simulated = if self.simulated_gpu { "; SIMULATED: says nothing of any GPU" } else { "" };
        let (major, minor) = (self.cuda_version / 1_000, self.cuda_version % 1_000 / 10);
        let title = format!(
            "{}, CUDA {major}.{minor}, Linux {}, {} s{simulated}",
            self.gpu, self.kernel, self.seconds
        );
        let mut table = Table::new(&title, &["what", "value", "aim", "result"]);
        table.rows.extend(self.lines.iter().map(|line| line.cells(self.simulated_gpu)));
        let mut out = format!("{table}\n");
        for line in self.lines.iter().filter(|line| !line.note.is_empty()) {
            let _ = writeln!(out, "- {}: {}", line.name, line.note);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_whether_it_is_as_it_should_be() {
        let line = |value, aim| Line::new("x", "µs", value, aim, String::new());
        assert_eq!(line(1.0, Some(Aim::AtMost(1.0))).outcome, Outcome::Met);
        assert_eq!(line(0.9, Some(Aim::AtLeast(1.0))).outcome, Outcome::Missed);
        assert_eq!(line(f64::NAN, Some(Aim::AtMost(1.0))).outcome, Outcome::Missed);
        assert_eq!(line(1.0, None).outcome, Outcome::Measured);
        assert_eq!(
            line(1.0, Some(Aim::AtMost(2.0))).cells(true),
            ["x", "1.000 µs", "≤ 2.000 µs", "met (simulated)"]
        );
        let missing = Line::missing("y", "", Some(Aim::AtMost(0.0)), "why".into());
        assert_eq!(missing.cells(false), ["y", "–", "0", "not measured"]);
    }
}

//! Why slow tokens were slow: the first thing that a report says.

use std::fmt::Write as _;

use serde::Serialize;

use super::wrap;
use crate::cli::table::{Style, WIDTH, cut};
use crate::cli::units::{clean, count, duration};
use crate::latency::{Contrast, Contrasts, Latency, TooFew};
use crate::timeline::tables::Tables;

/// Parts and properties that the text names; JSON has all.
const MOST_PARTS: usize = 4;
const MOST_PROPERTIES: usize = 5;
/// Parts with a smaller share of what slow tokens took longer are not named in the text.
const LEAST_SHARE: f64 = 0.03;

/// Slow tokens against the middle half, of one latency.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Why {
    /// `ttft` or `itl`.
    pub(crate) latency: &'static str,
    /// Too few tokens for a comparison; then the rest is empty.
    pub(crate) too_few: bool,
    pub(crate) tokens: u64,
    /// From which quantile on tokens are slow; `null`: from the latency that was asked for.
    pub(crate) slow_from_quantile: Option<f64>,
    pub(crate) slow_from_ns: u64,
    pub(crate) slow_tokens: u64,
    pub(crate) slow_steps: u64,
    pub(crate) slow_mean_ns: f64,
    pub(crate) usual_tokens: u64,
    pub(crate) usual_mean_ns: f64,
    pub(crate) grown: Vec<Grown>,
    pub(crate) frequent: Vec<Frequent>,
}

/// A part that is longer in slow tokens.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Grown {
    pub(crate) part: &'static str,
    pub(crate) blocked_on: Option<&'static str>,
    pub(crate) slow_mean_ns: f64,
    pub(crate) usual_mean_ns: f64,
    /// Of what slow tokens took longer.
    pub(crate) share: f64,
    #[serde(skip)]
    meaning: &'static str,
}

/// A property that is more frequent among slow tokens; counted by step.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Frequent {
    pub(crate) property: &'static str,
    pub(crate) value: String,
    pub(crate) slow_with: u64,
    pub(crate) slow_all: u64,
    pub(crate) usual_with: u64,
    pub(crate) usual_all: u64,
}

impl Why {
    /// Of gaps, then of first tokens; what is slow may be given in ns.
    pub(super) fn all(tables: &Tables, slow_ns: Option<u64>) -> Vec<Self> {
        let contrasts = Contrasts::new(tables);
        let of = |latency| Self::new(latency, contrasts.by(latency, slow_ns));
        [Latency::Itl, Latency::Ttft].map(of).into_iter().filter(|why| why.tokens > 0).collect()
    }

    fn new(latency: Latency, contrast: Result<Contrast, TooFew>) -> Self {
        let mut why = Self {
            latency: latency.name(),
            too_few: contrast.is_err(),
            tokens: 0,
            slow_from_quantile: None,
            slow_from_ns: 0,
            slow_tokens: 0,
            slow_steps: 0,
            slow_mean_ns: 0.0,
            usual_tokens: 0,
            usual_mean_ns: 0.0,
            grown: Vec::new(),
            frequent: Vec::new(),
        };
        let contrast = match contrast {
            Ok(contrast) => contrast,
            Err(TooFew(n)) => return Self { tokens: n, ..why },
        };
        why.tokens = contrast.tokens;
        why.slow_from_quantile = contrast.quantile;
        (why.slow_from_ns, why.slow_tokens) = (contrast.slow.least_ns, contrast.slow.n);
        (why.slow_steps, why.slow_mean_ns) = (contrast.slow.steps, contrast.slow.mean_ns);
        (why.usual_tokens, why.usual_mean_ns) = (contrast.usual.n, contrast.usual.mean_ns);
        why.grown = contrast
            .grown
            .iter()
            .map(|part| Grown {
                part: part.label.name(),
                blocked_on: part.blocked.map(|on| on.name()),
                slow_mean_ns: part.slow_ns,
                usual_mean_ns: part.usual_ns,
                share: part.share,
                meaning: part.blocked.map_or(part.label.meaning(), |on| on.meaning()),
            })
            .collect();
        why.frequent = contrast
            .frequent
            .into_iter()
            .map(|found| Frequent {
                property: found.property,
                value: found.value,
                slow_with: found.slow.0,
                slow_all: found.slow.1,
                usual_with: found.usual.0,
                usual_all: found.usual.1,
            })
            .collect();
        why
    }

    pub(super) fn text(&self, style: Style, out: &mut String) {
        let Self { latency, tokens, .. } = self;
        if self.too_few {
            let line = format!(
                "  {latency}: {} tokens are too few to compare slow ones with usual ones",
                count(*tokens)
            );
            let _ = writeln!(out, "{}", style.faint(&line));
            return;
        }
        let mean = |ns: f64| duration(ns.round() as u64);
        let quantile = self.slow_from_quantile.map_or(String::new(), |q| format!(" (p{})", q * 100.0));
        let line = format!(
            "  {latency} of {} or more{quantile}: mean {} (n={}, {} steps); of the middle half {}",
            duration(self.slow_from_ns),
            mean(self.slow_mean_ns),
            count(self.slow_tokens),
            count(self.slow_steps),
            mean(self.usual_mean_ns),
        );
        let _ = writeln!(out, "{}", cut(&line, WIDTH));
        let named = |part: &&Grown| part.share >= LEAST_SHARE;
        for part in self.grown.iter().filter(named).take(MOST_PARTS) {
            let name = part.blocked_on.map_or(part.part.to_owned(), |on| format!("{}: {on}", part.part));
            let line = format!(
                "    +{:>8}  {:>3.0} %  {name:<27} {}",
                mean(part.slow_mean_ns - part.usual_mean_ns),
                part.share * 100.0,
                part.meaning
            );
            let _ = writeln!(out, "{}", cut(&line, WIDTH));
        }
        let percent = |k: u64, n: u64| format!("{:.0} %", 100.0 * k as f64 / n.max(1) as f64);
        let found = self.frequent.iter().take(MOST_PROPERTIES).map(|found| {
            format!(
                "{} {} ({} of {} steps, usually {})",
                found.property,
                clean(&found.value, 40),
                percent(found.slow_with, found.slow_all),
                count(found.slow_all),
                percent(found.usual_with, found.usual_all)
            )
        });
        for (i, line) in wrap(found, WIDTH - 4 - 17).iter().enumerate() {
            let lead = if i == 0 { "more often with: " } else { "                 " };
            let _ = writeln!(out, "{}", style.note(&cut(&format!("    {lead}{line}"), WIDTH)));
        }
    }
}

//! One clock: its bases, its bursts, and where its spans lie.

use std::collections::BTreeMap;

use super::burst::{BaseTime, Burst, MAX_NS, is_elapsed, ms_to_ns, rounding_ns};
use super::causality::Sample;
use super::curve::Segment;
use super::host::HostMap;
use super::quantum::{Shown, quanta_ns};
use super::track::UNKNOWN_RATES;
use crate::event::mark::{ClockBurst, GpuSpan};
use crate::timeline::Witness;
use crate::timeline::rows::GpuTime;

/// The base events of a series: `T(k) = T(k−1) + elapsed(base k−1, base k)`, in whole ns.
#[derive(Debug, Default)]
pub(super) struct Bases {
    bases: BTreeMap<u32, Base>,
    chains: u32,
}

#[derive(Clone, Copy, Debug)]
struct Base {
    time: BaseTime,
    /// What the readings close to it show of the quantum.
    shown: Shown,
    quantum_ns: u64,
}

/// Bases whose grids tell the quantum of a new one.
const RECENT: usize = 16;

impl Bases {
    /// A burst of a base that may be new, with the quantum as far as known by now; `None` without a sane reading.
    pub(super) fn burst(&mut self, burst: &ClockBurst) -> Option<Burst> {
        let time = match self.bases.get(&burst.base) {
            Some(base) => base.time,
            None => self.add(burst.base, burst.rebase_ms),
        };
        let mut burst = Burst::new(&time, burst)?;
        let shown = burst.shown(UNKNOWN_RATES.1 / 1e9);
        if shown.says_something()
            && let Some(base) = self.bases.get_mut(&burst.base)
        {
            base.shown = shown;
            let mut recent: Vec<Shown> =
                self.bases.range(..=burst.base).rev().take(RECENT).map(|(_, base)| base.shown).collect();
            recent.reverse();
            let quantum_ns = quanta_ns(&recent).last().copied().unwrap_or(0);
            self.bases.entry(burst.base).and_modify(|base| base.quantum_ns = quantum_ns);
        }
        burst.quantum_ns = self.bases.get(&burst.base)?.quantum_ns as f64;
        Some(burst)
    }

    fn add(&mut self, number: u32, rebase_ms: Option<f32>) -> BaseTime {
        let before = number.checked_sub(1).and_then(|before| self.bases.get(&before)).copied();
        let time = match (before, rebase_ms.filter(|ms| is_elapsed(*ms))) {
            (Some(Base { time: before, .. }), Some(ms)) if before.device_ns < MAX_NS / 2 => BaseTime {
                device_ns: before.device_ns + ms_to_ns(ms).round() as i64,
                rounding_ns: before.rounding_ns + rounding_ns(ms) + 0.5,
                chain: before.chain,
            },
            _ => {
                self.chains += 1;
                BaseTime { device_ns: 0, rounding_ns: 0.0, chain: self.chains }
            }
        };
        let unknown = quanta_ns(&[Shown::default()]).last().copied().unwrap_or(0);
        let quantum_ns = before.map_or(unknown, |before| before.quantum_ns);
        self.bases.insert(number, Base { time, shown: Shown::default(), quantum_ns });
        time
    }

    /// Gives each burst its quantum, now that all bases are known.
    pub(super) fn settle_quanta(&mut self, bursts: &mut [Burst]) {
        let shown: Vec<Shown> = self.bases.values().map(|base| base.shown).collect();
        for (base, quantum_ns) in self.bases.values_mut().zip(quanta_ns(&shown)) {
            base.quantum_ns = quantum_ns;
        }
        for burst in bursts {
            burst.quantum_ns = self.bases.get(&burst.base).map_or(0.0, |base| base.quantum_ns as f64);
        }
    }

    pub(super) fn forget_all_but(&mut self, most: usize) {
        while self.bases.len() > most {
            self.bases.pop_first();
        }
    }

    /// Where a span lies on the device's clock; `None` of a base that is not known.
    pub(super) fn place(&self, span: &GpuSpan) -> Option<Place> {
        let &GpuSpan { base, begin_ms, span_ms, .. } = span;
        let base = self.bases.get(&base).filter(|_| is_elapsed(begin_ms) && is_elapsed(span_ms))?.time;
        Some(Place { base, begin_ms, span_ms })
    }
}

/// A span on the device's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    base: BaseTime,
    begin_ms: f32,
    span_ms: f32,
}

impl Place {
    /// ns from the base, and what f32 may have rounded off of it: of the begin, and of the end.
    fn begin(&self) -> (f64, f64) {
        (ms_to_ns(self.begin_ms), rounding_ns(self.begin_ms))
    }

    /// By the span's own duration, which is more precise than a difference.
    fn end(&self) -> (f64, f64) {
        let (begin_ns, rounding) = self.begin();
        (begin_ns + ms_to_ns(self.span_ms), rounding + rounding_ns(self.span_ms))
    }

    pub(super) fn map(&self, segments: &[Segment], host: &HostMap) -> Option<GpuTime> {
        let base = &self.base;
        let near_ns = base.device_ns.saturating_add(self.begin().0 as i64);
        let segment = Segment::holding(segments, base.chain, near_ns)?;
        let map = |(offset_ns, rounding_ns)| {
            host.monotonic(segment.map(base.device_ns, offset_ns, rounding_ns, base.rounding_ns)?)
        };
        let (begin_ns, begin_bound) = map(self.begin())?;
        let (end_ns, end_bound) = map(self.end())?;
        let end_ns = end_ns.max(begin_ns);
        Some(GpuTime { begin_ns, end_ns, span_ns: end_ns - begin_ns, bound_ns: begin_bound.max(end_bound) })
    }

    pub(super) fn sample(&self, witness: Witness) -> Sample {
        let (elapsed_ns, rounding_ns) = match witness {
            Witness::LaunchBegan(_) => self.begin(),
            Witness::WaitReturned(_) => self.end(),
        };
        Sample {
            witness,
            chain: self.base.chain,
            base_ns: self.base.device_ns,
            elapsed_ns,
            rounding_ns,
            chain_rounding_ns: self.base.rounding_ns,
        }
    }
}

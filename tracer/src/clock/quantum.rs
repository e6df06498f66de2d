//! The step of a device's clock.
//!
//! It is no constant of a device: some tools raise the rate of the timer while they run. So it is found per base, by
//! readings so close to the base that f32 resolves single ns: it divides all of them, and bases that agree make a run.
//! A step as long as a burst leaves few readings or none that are not 0. Such a burst contradicts itself under a finer
//! step, since one reading cannot hold for as long as the host saw pass; by how much is the least that the step is.

/// Smallest step assumed (readings may show a multiple of the true one, which is safe; less than this, no device has).
const FINEST_NS: u64 = 32;
/// Step assumed while nothing shows it: the coarsest known.
pub(super) const COARSEST_NS: u64 = 1_000;
/// Stands for a step that bursts show to be coarse without showing how coarse: times read by it are of no use.
pub(super) const UNLIMITED_NS: u64 = 1_000_000_000;
/// A base's readings say something when there are this many: all of four are multiples of 2 q by chance in 1 of 16.
const ENOUGH_READINGS: usize = 4;
/// A coarser grid is believed after this many bases.
const BELIEVED: usize = 3;

/// The grid that a base's readings (ns since the base, none of them 0) lie on; 0: too few to tell.
#[must_use]
pub fn grid_ns(readings: impl Iterator<Item = u64>) -> u64 {
    let shown = Shown::new(readings, 0);
    if shown.readings < ENOUGH_READINGS { 0 } else { shown.grid_ns }
}

/// What a base's readings show of the step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shown {
    /// Greatest common divisor of the readings (ns since the base) that are not 0; 0: there are none.
    grid_ns: u64,
    /// How many these are.
    readings: usize,
    /// With any finer step, the readings contradict each other.
    least_ns: u64,
}

impl Shown {
    pub(super) fn new(readings: impl IntoIterator<Item = u64>, least_ns: u64) -> Self {
        let none = Self { least_ns, ..Self::default() };
        readings.into_iter().filter(|ns| *ns > 0).fold(none, |shown, ns| Self {
            grid_ns: gcd(shown.grid_ns, ns),
            readings: shown.readings + 1,
            ..shown
        })
    }

    pub(super) fn says_something(&self) -> bool {
        self.readings >= ENOUGH_READINGS || self.least_ns > 0
    }

    /// Whether no step explains the readings: something else happened.
    fn is_contradiction(&self) -> bool {
        self.grid_ns > 0 && self.grid_ns < self.least_ns
    }
}

/// Consecutive bases that show one step.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Number of the first of them, among those that say something.
    first: usize,
    /// 0: nothing limits it.
    step: u64,
    least: u64,
}

impl Run {
    fn new(first: usize, shown: &Shown) -> Self {
        Self { first, step: shown.grid_ns, least: shown.least_ns }
    }

    fn step(&self) -> u64 {
        if self.step == 0 { UNLIMITED_NS } else { self.step.max(FINEST_NS) }
    }

    fn holds(&self, shown: &Shown) -> bool {
        let fits = match self.step {
            0 => shown.grid_ns == 0 || shown.grid_ns >= self.least,
            step => shown.grid_ns.is_multiple_of(step),
        };
        fits && shown.least_ns <= self.step()
    }
}

/// What to assume for each of consecutive bases, given what each shows; never finer than what its own run shows.
///
/// Readings that do not fit the step end a run at once; a coarser grid does after [`BELIEVED`] bases, since a few
/// readings may fit a multiple by chance. Where runs meet, the coarser holds from the last base that fits only the one to
/// the first of the other, and at the end, where nothing followed, a coarser grid holds unconfirmed.
pub(super) fn quanta_ns(bases: &[Shown]) -> Vec<u64> {
    let mut known: Vec<(usize, u64)> = Vec::new();
    let mut runs: Vec<Run> = Vec::new();
    for (i, shown) in bases.iter().enumerate() {
        let step = runs.last().filter(|run| run.step > 0).map_or(COARSEST_NS, Run::step);
        let is_refuted = shown.least_ns > step;
        if shown.is_contradiction() || (shown.readings < ENOUGH_READINGS && !is_refuted) {
            continue;
        }
        known.push((i, shown.grid_ns));
        let n = known.len() - 1;
        let Some(run) = runs.last_mut() else {
            runs.push(Run::new(n, shown));
            continue;
        };
        if !run.holds(shown) {
            runs.push(Run::new(n, shown));
            continue;
        }
        run.least = run.least.max(shown.least_ns);
        if run.step == 0 {
            run.step = shown.grid_ns;
        }
        let first = (n + 1).saturating_sub(BELIEVED);
        let recent = known[first..].iter().fold(0, |divisor, (_, grid)| gcd(divisor, *grid));
        if first > run.first && recent > run.step {
            runs.push(Run { first, step: recent, least: 0 });
        }
    }
    if let Some(&run) = runs.last() {
        let unsure = known[run.first..].iter().rev().take_while(|(_, grid)| *grid > run.step).count();
        let unsure = known.iter().enumerate().skip((known.len() - unsure).max(run.first + 1));
        runs.extend(unsure.map(|(first, &(_, step))| Run { first, step, least: 0 }));
    }
    let place = |n: usize| known.get(n).map_or(bases.len(), |(i, _)| *i);
    let mut quanta = vec![if runs.is_empty() { COARSEST_NS } else { 0 }; bases.len()];
    for (n, run) in runs.iter().enumerate() {
        let before = n.checked_sub(1).and_then(|before| runs.get(before));
        let from = before.map_or(0, |before| {
            let fits_before =
                known[before.first..run.first].iter().rposition(|(_, grid)| *grid <= before.step);
            place(before.first + fits_before.unwrap_or(0))
        });
        let until = runs.get(n + 1).map_or(bases.len(), |next| place(next.first) + 1);
        quanta[from..until].iter_mut().for_each(|quantum| *quantum = run.step().max(*quantum));
    }
    quanta
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What to assume for bases with these grids; 0: too few readings to tell.
    fn quanta(grids: &[u64]) -> Vec<u64> {
        let shown =
            |&grid_ns: &u64| Shown { grid_ns, readings: if grid_ns > 0 { 7 } else { 0 }, least_ns: 0 };
        quanta_ns(&grids.iter().map(shown).collect::<Vec<_>>())
    }

    #[test]
    fn a_grid_needs_readings() {
        assert!(!Shown::new([64, 96, 160], 0).says_something());
        let shown = Shown::new([0, 64, 96, 160, 320], 0);
        assert_eq!((shown.grid_ns, shown.readings, shown.says_something()), (32, 4, true));
    }

    #[test]
    fn unknown_is_coarse_and_chance_is_ignored() {
        assert!(quanta(&[]).is_empty());
        assert_eq!(quanta(&[0, 0]), [COARSEST_NS; 2]);
        assert_eq!(quanta(&[500, 0, 1000, 500, 1500, 500]), [500; 6]);
        assert_eq!(quanta(&[1, 1, 1]), [FINEST_NS; 3]);
    }

    #[test]
    fn a_change_is_found_in_both_directions() {
        assert_eq!(quanta(&[1000, 1000, 1000, 32, 32, 32]), [1000, 1000, 1000, 1000, 32, 32]);
        assert_eq!(quanta(&[32, 32, 32, 1000, 1000, 1000, 1000]), [32, 32, 1000, 1000, 1000, 1000, 1000]);
        assert_eq!(quanta(&[32, 0, 0, 500, 0, 500, 500, 0]), [500; 8]);
        // At the end nothing confirms it yet.
        assert_eq!(quanta(&[32, 32, 32, 64]), [32, 32, 64, 64]);
    }

    /// A burst that a step of 32 µs leaves with at most two values.
    fn long(grid_ns: u64) -> Shown {
        Shown { grid_ns, readings: usize::from(grid_ns > 0), least_ns: 15_000 }
    }

    #[test]
    fn a_step_as_long_as_a_burst_is_found_at_once() {
        let fine = Shown { grid_ns: 500, readings: 7, least_ns: 0 };
        let u = UNLIMITED_NS;
        assert_eq!(quanta_ns(&[fine, fine, long(32_000)]), [500, 32_000, 32_000]);
        assert_eq!(quanta_ns(&[fine, fine, long(0), long(32_000)]), [500, 32_000, 32_000, 32_000]);
        assert_eq!(quanta_ns(&[fine, fine, long(0)]), [500, u, u]);
        assert_eq!(quanta_ns(&[fine, long(0), Shown::default(), fine, fine]), [u, u, u, u, 500]);
        assert_eq!(quanta_ns(&[long(0), long(64_000)]), [64_000; 2]);
        assert_eq!(quanta_ns(&[long(32_000), fine, fine]), [32_000, 32_000, 500]);
        // A burst in which the clock itself changed: no step explains it.
        let changed = Shown { grid_ns: 500, readings: 7, least_ns: 15_000 };
        assert_eq!(quanta_ns(&[fine, changed, fine]), [500; 3]);
        assert_eq!(quanta_ns(&[fine, changed, long(32_000)]), [32_000; 3]);
    }

    proptest! {
        #[test]
        fn never_finer_than_the_truth(
            steps in prop::collection::vec(prop::sample::select(vec![32u64, 64, 500, 1000, 32_000]), 1..4),
            seen in prop::collection::vec((prop::sample::select(vec![1u64, 1, 1, 1, 2, 3]), 0u8..6), 40),
        ) {
            let truth = |i: usize| steps[(i / 10).min(steps.len() - 1)];
            let shown = |(i, (factor, kind)): (usize, &(u64, u8))| match kind {
                // A burst that the coarsest step leaves with few values shows that.
                0..2 if truth(i) == 32_000 => long(32_000 * u64::from(*kind)),
                0 => Shown::default(),
                _ => Shown { grid_ns: truth(i) * factor, readings: 7, least_ns: 0 },
            };
            let bases: Vec<Shown> = seen.iter().enumerate().map(shown).collect();
            for (i, quantum) in quanta_ns(&bases).into_iter().enumerate() {
                // Where nothing is shown next to a change, the other step may be assumed: no burst is there to be judged.
                let says = bases[i].readings > 0 || bases[i].least_ns > 0;
                prop_assert!(!says || quantum >= truth(i), "{} at {}: {:?}", quantum, i, bases);
            }
        }
    }
}

//! The step of a device's clock.
//!
//! It is no constant of a device: some tools raise the rate of the timer while they run. So it is found per base, as
//! the greatest common divisor of readings so close to the base that f32 resolves single ns, and bases that agree
//! make a run.

/// Smallest step assumed (readings may show a multiple of the true one, which is safe; less than this, no device has).
const FINEST_NS: u64 = 32;
/// Step assumed while nothing shows it: the coarsest known.
const COARSEST_NS: u64 = 1_000;
/// A base's readings say something when there are this many: all of four are multiples of 2 q by chance in 1 of 16.
const ENOUGH_READINGS: usize = 4;
/// A coarser grid is believed after this many bases.
const BELIEVED: usize = 3;

/// The grid that a base's readings (ns since the base, none of them 0) lie on; 0: too few to tell.
#[must_use]
pub fn grid_ns(readings: impl Iterator<Item = u64>) -> u64 {
    let (count, divisor) = readings.fold((0, 0), |(count, divisor), ns| (count + 1, gcd(divisor, ns)));
    if count < ENOUGH_READINGS { 0 } else { divisor }
}

/// What to assume for each of consecutive bases, given the grid of each; never finer than what its own run shows.
///
/// A reading that does not fit the grid ends a run at once; a coarser grid does after [`BELIEVED`] bases, since a few
/// readings may fit a multiple by chance. Where runs meet, and at the end, where nothing followed, the coarser holds.
pub(super) fn quanta_ns(grids: &[u64]) -> Vec<u64> {
    let mut runs: Vec<(usize, u64)> = vec![(0, 0)];
    for (i, &grid) in grids.iter().enumerate().filter(|(_, grid)| **grid > 0) {
        let Some((from, step)) = runs.last_mut() else { break };
        let first = (i + 1).saturating_sub(BELIEVED);
        let recent = grids[first..=i].iter().fold(0, |divisor, grid| gcd(divisor, *grid));
        let is_coarser = recent > *step && first > *from && grids[first..=i].iter().all(|grid| *grid > 0);
        match *step {
            0 => *step = grid,
            step if grid % step != 0 => runs.push((i, grid)),
            _ if is_coarser => runs.push((first, recent)),
            _ => {}
        }
    }
    let mut quanta = vec![0; grids.len()];
    for (n, &(from, step)) in runs.iter().enumerate() {
        let next = runs.get(n + 1);
        let until = next.map_or(grids.len(), |next| next.0);
        quanta[from..until].fill(step);
        if let (Some(&(_, next_step)), Some(last)) = (next, until.checked_sub(1)) {
            quanta[last] = step.max(next_step);
        }
    }
    let is_unsure = |(quantum, grid): &(&mut u64, &u64)| **grid == 0 || **grid > **quantum;
    for (quantum, grid) in quanta.iter_mut().zip(grids).rev().take_while(is_unsure) {
        *quantum = (*quantum).max(*grid);
    }
    quanta.iter().map(|&ns| if ns == 0 { COARSEST_NS } else { ns.max(FINEST_NS) }).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_grid_needs_readings() {
        assert_eq!(grid_ns([64, 96, 160].into_iter()), 0);
        assert_eq!(grid_ns([64, 96, 160, 320].into_iter()), 32);
    }

    #[test]
    fn unknown_is_coarse_and_chance_is_ignored() {
        assert!(quanta_ns(&[]).is_empty());
        assert_eq!(quanta_ns(&[0, 0]), [COARSEST_NS; 2]);
        assert_eq!(quanta_ns(&[500, 0, 1000, 500, 1500, 500]), [500; 6]);
        assert_eq!(quanta_ns(&[1, 1, 1]), [FINEST_NS; 3]);
    }

    #[test]
    fn a_change_is_found_in_both_directions() {
        assert_eq!(quanta_ns(&[1000, 1000, 1000, 32, 32, 32]), [1000, 1000, 1000, 32, 32, 32]);
        assert_eq!(quanta_ns(&[32, 32, 32, 1000, 1000, 1000, 1000]), [32, 32, 1000, 1000, 1000, 1000, 1000]);
        // At the end nothing confirms it yet.
        assert_eq!(quanta_ns(&[32, 32, 32, 64]), [32, 32, 32, 64]);
    }

    proptest! {
        #[test]
        fn never_finer_than_the_truth(
            steps in prop::collection::vec(prop::sample::select(vec![32u64, 64, 500, 1000]), 1..4),
            factors in prop::collection::vec(prop::sample::select(vec![1u64, 1, 1, 1, 2, 3]), 40),
        ) {
            let truth = |i: usize| steps[(i / 10).min(steps.len() - 1)];
            let grids: Vec<u64> = factors.iter().enumerate().map(|(i, factor)| truth(i) * factor).collect();
            for (i, quantum) in quanta_ns(&grids).into_iter().enumerate() {
                prop_assert!(quantum >= truth(i), "{} at {}: {:?}", quantum, i, grids);
            }
        }
    }
}

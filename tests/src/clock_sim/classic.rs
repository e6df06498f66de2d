//! How clocks are usually aligned: θ = host − device from the middles of brackets, as a line or a step.

use super::{Bracket, Estimate, Simulation};
use crate::random::SplitMix;
use crate::stats::median;

/// A usual way to align clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Classic {
    /// A line through the first and the last burst.
    EndPoints,
    /// A line through all bursts by least squares.
    LeastSquares,
    /// A line of the median slope and the median offset (Theil, 1950; Sen, 1968).
    TheilSen,
    /// Live: a line through the two newest bursts.
    LastPair,
    /// Live: the offset of the newest burst, as a trace processor applies clock snapshots.
    Step,
}

/// θ at a device time, both in µs.
type Point = (f64, f64);

impl Classic {
    pub const ALL: [Self; 5] =
        [Self::EndPoints, Self::LeastSquares, Self::TheilSen, Self::LastPair, Self::Step];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EndPoints => "two end points",
            Self::LeastSquares => "least squares",
            Self::TheilSen => "Theil–Sen",
            Self::LastPair => "last pair",
            Self::Step => "step",
        }
    }

    #[must_use]
    pub const fn is_live(self) -> bool {
        matches!(self, Self::LastPair | Self::Step)
    }

    /// Where it puts each query.
    #[must_use]
    pub fn estimate(self, simulation: &Simulation) -> Vec<Estimate> {
        let best: Vec<&Bracket> = simulation.bursts.iter().filter_map(|burst| shortest(burst)).collect();
        let points: Vec<Point> =
            best.iter().map(|b| (b.device, f64::midpoint(b.before, b.after) - b.device)).collect();
        let line = match self {
            Self::EndPoints => points.first().zip(points.last()).map(|(first, last)| through(*first, *last)),
            Self::LeastSquares => least_squares(&points),
            Self::TheilSen => theil_sen(&points),
            Self::LastPair | Self::Step => None,
        };
        let ends: Vec<f64> = simulation.bursts.iter().filter_map(|burst| Some(burst.last()?.after)).collect();
        let estimates = simulation.queries.iter().filter_map(|&host| {
            let device = simulation.read(host);
            let past = points.get(..ends.partition_point(|end| *end <= host)).unwrap_or(&[]);
            let theta = match (self, past) {
                (Self::LastPair, [.., before, last]) => at(through(*before, *last), device),
                (Self::Step, [.., (_, theta)]) => *theta,
                _ => at(line?, device),
            };
            // They know one clock of the host: the one that they are asked for.
            Some(Estimate { host_us: host, error_us: device + theta - host, bound_us: None })
        });
        estimates.collect()
    }
}

fn shortest(burst: &[Bracket]) -> Option<&Bracket> {
    burst.iter().min_by(|a, b| (a.after - a.before).total_cmp(&(b.after - b.before)))
}

/// A point on a line, and its slope.
type Line = (Point, f64);

fn at(((x, y), slope): Line, device: f64) -> f64 {
    y + slope * (device - x)
}

fn through(a: Point, b: Point) -> Line {
    (a, (b.1 - a.1) / (b.0 - a.0))
}

fn least_squares(points: &[Point]) -> Option<Line> {
    let n = points.len() as f64;
    let mean = |of: fn(&Point) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| of(p.0 - x, p.1 - y)).sum::<f64>();
    let (xx, xy) = (sum(&|x, _| x * x), sum(&|x, y| x * y));
    (xx > 0.0).then_some(((x, y), xy / xx))
}

/// With at most 600 points, drawn at random: all pairs of them are 180 000.
fn theil_sen(points: &[Point]) -> Option<Line> {
    const MOST: usize = 600;
    let mut random = SplitMix::new(1);
    let mut drawn: Vec<Point> = points.to_vec();
    while drawn.len() > MOST {
        drawn.swap_remove(random.below(drawn.len()));
    }
    let pairs = drawn.iter().enumerate().flat_map(|(i, a)| drawn[i + 1..].iter().map(|b| through(*a, *b).1));
    let slope = median(&pairs.collect::<Vec<_>>())?;
    let offset = median(&points.iter().map(|(x, y)| y - slope * x).collect::<Vec<_>>())?;
    Some(((0.0, offset), slope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found() {
        let points: Vec<Point> = (0..50).map(|i| (f64::from(i), 3.0 - 0.5 * f64::from(i))).collect();
        for line in
            [least_squares(&points).unwrap(), theil_sen(&points).unwrap(), through(points[0], points[9])]
        {
            assert!((at(line, 100.0) + 47.0).abs() < 1e-9, "{line:?}");
        }
        let mut spoilt = points;
        spoilt[7].1 = 1e6;
        assert!((at(theil_sen(&spoilt).unwrap(), 100.0) + 47.0).abs() < 1e-9);
    }
}

//! Points sorted into columns and rows.

use super::{Axis, HeatmapInput, Point};
use crate::Error;
use crate::scale::{bin, log_edges, nice_at_least, nice_time_at_least};
/// Most columns and rows of a heatmap.
const COLUMNS: usize = 125;
const ROWS: usize = 90;

/// How many ids of a cell are kept.
pub(super) const SLOWEST: usize = 5;

/// Token indexes per bin grow by this factor on the logarithmic axis: 16 bins per factor of 10.
const INDEX_GROWTH: f64 = 1.154_781_984_689_458_2;

/// One cell.
#[derive(Clone, Default)]
pub(super) struct Cell<'a> {
    pub(super) count: u64,
    /// Slowest first, each id once.
    pub(super) slowest: Vec<(u64, &'a str)>,
}

impl<'a> Cell<'a> {
    fn add(&mut self, point: Point<'a>) {
        self.count += 1;
        match self.slowest.iter_mut().find(|(_, id)| *id == point.id) {
            Some(known) => known.0 = known.0.max(point.latency_ns),
            None => self.slowest.push((point.latency_ns, point.id)),
        }
        // By id where latencies are equal, so that the order of the points does not show.
        self.slowest.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
        self.slowest.truncate(SLOWEST);
    }
}

/// The cells and what bounds them.
pub(super) struct Grid<'a> {
    /// Ascending edges of the columns: column i is `[edges[i], edges[i + 1])`.
    pub(super) columns: Vec<u64>,
    /// Ascending edges of the rows, ns.
    pub(super) rows: Vec<u64>,
    by_index: bool,
    /// Column by column.
    cells: Vec<Cell<'a>>,
    /// Latencies of each column, sorted.
    pub(super) latencies: Vec<Vec<u64>>,
    /// The largest count of a cell.
    pub(super) most: u64,
    /// The slowest of all, each id once.
    pub(super) slowest: Vec<Point<'a>>,
}

impl<'a> Grid<'a> {
    pub(super) fn new(input: &HeatmapInput<'a>) -> Result<Self, Error> {
        let points: Vec<Point<'a>> = match &input.axis {
            Axis::Time { range, .. } if range.is_empty() => {
                return Err(Error::BadRange { begin_ns: range.start, end_ns: range.end });
            }
            Axis::Time { range, .. } => {
                input.points.iter().copied().filter(|p| range.contains(&p.x)).collect()
            }
            Axis::TokenIndex | Axis::LogTokenIndex => input.points.clone(),
        };
        let latencies = points.iter().map(|p| p.latency_ns);
        let (Some(fastest), Some(slowest)) = (latencies.clone().min(), latencies.max()) else {
            return Err(Error::Empty("latencies"));
        };
        let last = points.iter().map(|p| p.x).max().unwrap_or(0);
        let columns = column_edges(&input.axis, last);
        let rows = log_edges(fastest, slowest, ROWS);
        let mut grid = Self {
            cells: vec![Cell::default(); (columns.len() - 1) * (rows.len() - 1)],
            latencies: vec![Vec::new(); columns.len() - 1],
            by_index: !matches!(input.axis, Axis::Time { .. }),
            columns,
            rows,
            most: 0,
            slowest: slowest_points(&points),
        };
        for point in points {
            let column = bin(&grid.columns, point.x);
            let cell = column * grid.row_count() + bin(&grid.rows, point.latency_ns);
            grid.cells[cell].add(point);
            grid.most = grid.most.max(grid.cells[cell].count);
            grid.latencies[column].push(point.latency_ns);
        }
        grid.latencies.iter_mut().for_each(|column| column.sort_unstable());
        Ok(grid)
    }

    pub(super) fn column_count(&self) -> usize {
        self.columns.len() - 1
    }

    pub(super) fn row_count(&self) -> usize {
        self.rows.len() - 1
    }

    /// Where columns begin whose latencies mean something else than those before: the first token is apart from the
    /// later ones. Ends with the number of columns.
    pub(super) fn cuts(&self) -> Vec<usize> {
        let all = self.column_count();
        if self.by_index && all > 1 { vec![0, 1, all] } else { vec![0, all] }
    }

    /// The cells of a column, fastest first.
    pub(super) fn column(&self, column: usize) -> &[Cell<'a>] {
        &self.cells[column * self.row_count()..(column + 1) * self.row_count()]
    }
}

/// The slowest points, each id once, slowest first.
fn slowest_points<'a>(points: &[Point<'a>]) -> Vec<Point<'a>> {
    let mut kept: Vec<Point<'a>> = Vec::new();
    for &point in points {
        if kept.len() == SLOWEST && kept[SLOWEST - 1].latency_ns > point.latency_ns {
            continue;
        }
        match kept.iter_mut().find(|k| k.id == point.id) {
            Some(known) if known.latency_ns < point.latency_ns => *known = point,
            Some(_) => {}
            None => kept.push(point),
        }
        kept.sort_by(|a, b| b.latency_ns.cmp(&a.latency_ns).then(a.id.cmp(b.id)).then(a.x.cmp(&b.x)));
        kept.truncate(SLOWEST);
    }
    kept
}

fn column_edges(axis: &Axis, last: u64) -> Vec<u64> {
    match axis {
        Axis::Time { range, .. } => {
            let width = nice_time_at_least((range.end - range.start) as f64 / COLUMNS as f64);
            equal_edges(range.start, range.end, width)
        }
        Axis::TokenIndex => {
            let width = nice_at_least((last as f64 + 1.0) / COLUMNS as f64);
            // The first token alone: its latency is another one (TTFT).
            let mut edges = equal_edges(0, last.saturating_add(1), width);
            if width > 1 {
                edges.insert(1, 1);
            }
            edges
        }
        Axis::LogTokenIndex => {
            let mut edges = vec![0, 1];
            let mut edge = 1u64;
            while edge <= last && edge < u64::MAX {
                edge = ((edge as f64 * INDEX_GROWTH).round() as u64).max(edge + 1);
                edges.push(edge);
            }
            edges
        }
    }
}

/// Edges `width` apart from `begin` until `end` is covered.
fn equal_edges(begin: u64, end: u64, width: u64) -> Vec<u64> {
    let count = (end - begin).div_ceil(width).max(1);
    let mut edges: Vec<u64> = (0..=count).map(|i| begin.saturating_add(i.saturating_mul(width))).collect();
    edges.dedup();
    edges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Header;
    use proptest::prelude::*;

    fn input<'a>(axis: Axis, points: Vec<Point<'a>>) -> HeatmapInput<'a> {
        HeatmapInput {
            header: Header::default(),
            axis,
            latency_name: String::new(),
            count_name: String::new(),
            points,
            losses: vec![],
            strips: vec![],
        }
    }

    #[test]
    fn columns_are_round() {
        let axis = Axis::Time { name: String::new(), range: 0..20_000_000_000 };
        let edges = column_edges(&axis, 0);
        assert_eq!((edges.len(), edges[1]), (101, 200_000_000));
        let axis = Axis::Time { name: String::new(), range: 0..3_600_000_000_000 };
        assert_eq!(column_edges(&axis, 0)[1], 30_000_000_000);
        assert_eq!(column_edges(&Axis::TokenIndex, 49).len(), 51);
        assert_eq!(column_edges(&Axis::LogTokenIndex, 0), [0, 1]);
        assert_eq!(column_edges(&Axis::LogTokenIndex, 3), [0, 1, 2, 3, 4]);
        assert!(column_edges(&Axis::LogTokenIndex, 100_000).len() < 100);
    }

    #[test]
    fn a_cell_names_each_id_once_slowest_first() {
        let mut cell = Cell::default();
        for (latency_ns, id) in [(5, "a"), (9, "b"), (7, "a"), (1, "c"), (2, "d"), (3, "e"), (4, "f")] {
            cell.add(Point { x: 0, latency_ns, id });
        }
        assert_eq!(cell.count, 7);
        assert_eq!(cell.slowest, [(9, "b"), (7, "a"), (4, "f"), (3, "e"), (2, "d")]);
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(matches!(Grid::new(&input(Axis::TokenIndex, vec![])), Err(Error::Empty(_))));
        let backwards = Axis::Time { name: String::new(), range: 5..5 };
        assert!(matches!(Grid::new(&input(backwards, vec![])), Err(Error::BadRange { .. })));
    }

    proptest! {
        #[test]
        fn every_point_inside_is_counted_once(
            points in prop::collection::vec((any::<u64>(), any::<u64>()), 1..200),
            kind in 0..3,
            range in (any::<u64>(), any::<u64>()),
        ) {
            let (begin, end) = (range.0.min(range.1), range.0.max(range.1).max(1));
            prop_assume!(begin < end);
            let axis = match kind {
                0 => Axis::Time { name: String::new(), range: begin..end },
                1 => Axis::TokenIndex,
                _ => Axis::LogTokenIndex,
            };
            let inside = points.iter().filter(|p| kind != 0 || (begin..end).contains(&p.0)).count();
            let points = points.into_iter().map(|(x, latency_ns)| Point { x, latency_ns, id: "r" }).collect();
            match Grid::new(&input(axis, points)) {
                Ok(grid) => {
                    prop_assert!(grid.column_count() <= 350);
                    let counted: u64 =
                        (0..grid.column_count()).flat_map(|c| grid.column(c)).map(|c| c.count).sum();
                    prop_assert_eq!(counted as usize, inside);
                }
                Err(_) => prop_assert_eq!(inside, 0),
            }
        }
    }
}

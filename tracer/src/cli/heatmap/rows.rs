//! Heatmaps with rows of their own: offsets in a second, and requests.

use super::{Drawing, TIME};
use flamegraphs::{MatrixCell, MatrixInput, Measure};
use std::collections::{BTreeMap, HashMap};

const SECOND_NS: u64 = 1_000_000_000;
/// Rows of a second, as FlameScope has them.
const ROWS: u64 = 50;
/// Requests that are drawn.
const REQUESTS: usize = 40;

impl Drawing<'_> {
    /// Whole seconds against the offset within them.
    pub(super) fn offsets(&self) -> MatrixInput {
        let row_ns = SECOND_NS / ROWS;
        // The beginning of a second is at the bottom.
        let cells = self.observed().map(|observed| MatrixCell {
            row: (ROWS - 1 - observed.at_ns % SECOND_NS / row_ns) as usize,
            at_ns: observed.at_ns,
            value: 1,
        });
        let cells: Vec<MatrixCell> = cells.collect();
        MatrixInput {
            header: self.header(format!("{} by offset in the second", self.latency.whose()), cells.len()),
            time_name: TIME.to_owned(),
            // Whole seconds, as the columns are.
            range: self.range.start / SECOND_NS * SECOND_NS..self.range.end.div_ceil(SECOND_NS) * SECOND_NS,
            column_ns: Some(SECOND_NS),
            row_name: "offset in the second".to_owned(),
            rows: (0..ROWS).rev().map(|row| format!("{} ms", row * row_ns / 1_000_000)).collect(),
            measure: Measure::Count(self.latency.count_name().to_owned()),
            cells,
            losses: self.losses.clone(),
            empty: "nothing seen".to_owned(),
        }
    }

    /// The requests with the slowest tokens in the order in which they came, and their slowest tokens in time.
    pub(super) fn requests(&self) -> MatrixInput {
        let mut slowest: BTreeMap<u64, u64> = BTreeMap::new();
        for observed in self.observed() {
            let known = slowest.entry(observed.request).or_default();
            *known = observed.latency_ns.max(*known);
        }
        let all = slowest.len();
        let received: HashMap<u64, u64> =
            self.tables.requests.iter().map(|request| (request.id, request.received_ns)).collect();
        let mut drawn: Vec<(u64, u64)> = slowest.into_iter().collect();
        drawn.sort_by_key(|(request, latency)| (std::cmp::Reverse(*latency), *request));
        drawn.truncate(REQUESTS);
        drawn.sort_by_key(|(request, _)| (received.get(request).copied(), *request));
        let rows: HashMap<u64, usize> =
            drawn.iter().enumerate().map(|(row, (request, _))| (*request, row)).collect();
        let mut names = vec![String::new(); drawn.len()];
        let mut cells = Vec::new();
        for observed in self.observed() {
            if let Some(&row) = rows.get(&observed.request) {
                names[row] = observed.name.clone().into_owned();
                cells.push(MatrixCell { row, at_ns: observed.at_ns, value: observed.latency_ns });
            }
        }
        let title = if all > drawn.len() {
            format!("{} in time: the slowest {} of {all} requests", self.latency.whose(), drawn.len())
        } else {
            format!("{} in time: {all} requests", self.latency.whose())
        };
        MatrixInput {
            header: self.header(title, cells.len()),
            time_name: TIME.to_owned(),
            range: self.range.clone(),
            column_ns: None,
            row_name: "request, in the order of arrival".to_owned(),
            rows: names,
            measure: Measure::Latency("slowest in the cell".to_owned()),
            cells,
            losses: self.losses.clone(),
            empty: "none of these requests".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{By, Latency, Names};
    use super::*;
    use crate::cli::testing::tables;

    #[test]
    fn every_token_has_a_cell_and_every_request_a_row() {
        let tables = tables();
        let names = Names::new(&tables.requests);
        let drawing = |by| Drawing {
            tables: &tables,
            by,
            latency: Latency::Itl,
            range: 0..tables.meta.ended_ns,
            observed: Latency::Itl.observed(&tables, &names),
            losses: Vec::new(),
        };
        let n = drawing(By::Time).observed().count();
        assert!(n > 900);
        let offsets = drawing(By::Offset).offsets();
        assert_eq!((offsets.cells.len(), offsets.rows.len()), (n, 50));
        for (cell, observed) in offsets.cells.iter().zip(drawing(By::Offset).observed()) {
            assert_eq!(cell.row as u64, 49 - observed.at_ns % SECOND_NS / 20_000_000);
        }
        let requests = drawing(By::Request).requests();
        assert_eq!((requests.cells.len(), requests.rows.len()), (n, 40));
        assert!(requests.rows.contains(&"req-7".to_owned()));
    }
}

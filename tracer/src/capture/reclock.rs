//! Mapping an old capture anew: what its raw tables come to with the estimator of this version.

use super::budget;
use super::error::Result;
use super::finish::replay;
use super::open::Capture;
use crate::timeline::tables::Tables;
use crate::timeline::{self, budget::Budgets};

impl Capture {
    /// As [`Capture::tables`], but with GPU times, and all that follows from them, derived from the raw tables now. The
    /// capture stays as it is, and its derived tables may be of another version; [`finish`](super::finish()) would store
    /// the same.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn tables_anew(&self) -> Result<Tables> {
        let mut tables = self.underived()?;
        let Tables {
            steps,
            iterations,
            requests,
            tokens,
            layers,
            phases,
            hazards,
            budgets,
            clocks,
            driver_events,
            ledger,
            ..
        } = &mut tables;
        let mut derived = replay(
            self.folder(),
            |_| Ok(()),
            |output| {
                steps.extend(output.steps);
                iterations.extend(output.iterations);
                requests.extend(output.requests);
                tokens.extend(output.tokens);
                layers.extend(output.layers);
                phases.extend(output.phases);
                hazards.extend(output.hazards);
                Ok(())
            },
        )?;
        let threads = budget::threads(self.folder())?;
        let cut = Budgets::new(steps, requests, tokens, threads);
        *budgets = tokens.iter().filter_map(|token| cut.budget(token)).collect();
        *clocks = derived.clock().quality().collect();
        *driver_events = derived.driver_events();
        ledger.retain(|row| !timeline::is_own_line(&row.name));
        ledger.extend(derived.ledger());
        ledger.sort();
        Ok(tables)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tracer_abi::mark::ClockReading;

    use super::super::table::TableFile;
    use super::super::testing::tempdir;
    use super::super::{Meta, Writer, finish};
    use super::*;
    use crate::capture::folder::Folder;
    use crate::event::mark::{ClockBurst, GpuSpan, Mark};
    use crate::event::*;

    const PROCESS: ProcessId = ProcessId { tgid: 40, start_ticks: 7 };
    const BURST_NS: u64 = 500_000_000;
    const START_NS: u64 = 10_000_000_000;

    fn origin(time_ns: u64) -> Origin {
        Origin { time_ns, process: PROCESS, tid: 41, cpu: 1 }
    }

    fn burst(number: u64) -> Event {
        let begin_ns = START_NS + number * BURST_NS;
        let reading = |j: u64| ClockReading {
            h0_raw_ns: begin_ns + j * 10_000,
            h1_raw_ns: begin_ns + j * 10_000 + 8_000,
            elapsed_ms_bits: (j as f32 / 100.0).to_bits(),
            _pad: 0,
        };
        let burst = ClockBurst {
            device_uuid: [9; 16],
            context: 1,
            epoch: 0,
            base: number as u32,
            rebase_ms: (number > 0).then_some(500.0),
            readings: (0..8).map(reading).collect(),
        };
        Event::Mark(MarkEvent { origin: origin(begin_ns + 90_000), mark: Mark::ClockBurst(burst) })
    }

    fn host(number: u64) -> Event {
        let ns = START_NS - BURST_NS + number * BURST_NS / 10;
        let wall = number.is_multiple_of(10);
        Event::HostClock(HostClock {
            raw_before_ns: ns,
            monotonic_ns: ns + 20,
            raw_after_ns: ns + 40,
            realtime_ns: wall.then_some(ns + 1_796_000_000_000_000_020),
            boottime_ns: wall.then_some(ns + 20),
        })
    }

    /// A step whose GPU span of 1 ms begins 100 ms after the fourth base.
    fn step() -> [Event; 3] {
        let begin_ns = START_NS + 3 * BURST_NS + 99_900_000;
        let point = Point {
            id: 1,
            time_ns: 10,
            process: PROCESS,
            engine: "tensorrt".into(),
            name: "enqueueV3".into(),
            role: Role::Step,
            library: "libnvinfer.so.10".into(),
            version: String::new(),
            build_id: vec![7; 20],
            offset: 64,
            placement: "emulated".into(),
            has_return: true,
            stream_arg: Some(1),
            simulated: true,
        };
        let call = Call {
            origin: origin(begin_ns + 50_000),
            point: 1,
            parent_point: None,
            depth: 0,
            begin_ns,
            end_ns: begin_ns + 50_000,
            end: CallEnd::Returned,
            sp: 0,
            args: [1, 2, 3, 4, 5, 6],
            ret: 1,
            stack: None,
        };
        let span = GpuSpan {
            device_uuid: [9; 16],
            context: 1,
            stream: 2,
            sequence: 0,
            enqueue_begin_ns: begin_ns - 1_000,
            enqueue_end_ns: begin_ns + 51_000,
            tid: 41,
            epoch: 0,
            base: 3,
            begin_ms: 100.0,
            span_ms: 1.0,
            sampled: false,
        };
        [
            Event::Point(point),
            Event::Call(call),
            Event::Mark(MarkEvent { origin: origin(begin_ns + 2_000_000), mark: Mark::GpuSpan(span) }),
        ]
    }

    fn record(dir: &Path) {
        let meta = Meta::here(vec!["tracer".into()], "pid 40".into());
        let mut writer = Writer::create(dir, meta).unwrap();
        let mut events: Vec<Event> = (0..8).map(burst).chain((0..100).map(host)).chain(step()).collect();
        events.sort_by_key(Event::time_ns);
        events.iter().for_each(|event| writer.write(event).unwrap());
        writer.close().unwrap();
        finish(dir).unwrap();
    }

    fn files(dir: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
        let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
        files.sort();
        files
    }

    #[test]
    fn an_old_map_is_replaced_in_memory_and_on_disk_only_when_asked() {
        let dir = tempdir();
        record(dir.path());
        let expected = Capture::open(dir.path()).unwrap().tables().unwrap();
        let time = expected.steps[0].gpu.unwrap();
        let truth_ns = START_NS + 3 * BURST_NS + 100_004_000;
        assert!(time.begin_ns.abs_diff(truth_ns) <= time.bound_ns && time.bound_ns < 20_000, "{time:?}");
        assert_eq!(expected.wall.realtime_ns(START_NS), Some(START_NS + 1_796_000_000_000_000_000));

        let folder = Folder::lock(dir.path()).unwrap();
        let mut steps = TableFile::begin(&folder).unwrap();
        for step in &expected.steps {
            let mut step = step.clone();
            step.gpu.as_mut().unwrap().bound_ns = 77_000;
            steps.push(&step).unwrap();
        }
        steps.commit().unwrap();
        drop(folder);
        let before = files(dir.path());
        let capture = Capture::open(dir.path()).unwrap();
        assert_eq!(capture.tables().unwrap().steps[0].gpu.unwrap().bound_ns, 77_000);
        assert_eq!(capture.tables_anew().unwrap(), expected);
        assert!(files(dir.path()) == before, "looking changed the capture");
        // Nor need the derived tables be ones that this version can read.
        fs::copy(dir.path().join("points.parquet"), dir.path().join("requests.parquet")).unwrap();
        assert!(capture.tables().is_err());
        assert_eq!(capture.tables_anew().unwrap(), expected);

        finish(dir.path()).unwrap();
        assert_eq!(Capture::open(dir.path()).unwrap().tables().unwrap(), expected);
    }

    #[test]
    fn a_capture_whose_tables_are_being_replaced_is_not_complete() {
        let dir = tempdir();
        record(dir.path());
        let before = Capture::open(dir.path()).unwrap().tables().unwrap();
        // Makes the last table impossible to put in its place, as if deriving were killed there.
        let ledger = dir.path().join("ledger.parquet");
        fs::remove_file(&ledger).unwrap();
        fs::create_dir(&ledger).unwrap();
        fs::write(ledger.join("file"), "").unwrap();
        finish(dir.path()).unwrap_err();
        assert!(Capture::open(dir.path()).is_err());
        fs::remove_dir_all(&ledger).unwrap();
        let finished = finish(dir.path()).unwrap();
        assert!(finished.meta.complete && !finished.meta.recovered);
        assert_eq!(Capture::open(dir.path()).unwrap().tables().unwrap(), before);
    }
}

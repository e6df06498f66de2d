//! A finished capture, for reports and pictures.

use std::path::Path;

use super::derived::{ClockKnot, OffCpu, RequestId};
use super::error::{Error, ErrorKind, Result};
use super::folder::Folder;
use super::meta::Meta;
use super::raw::{Counter, Table};
use super::reader::{Batches, Events};
use crate::clock::{ClockQuality, WallClock};
use crate::event::{
    Call, EngineFile, GpuProcess, GpuSample, HostClock, HttpEnd, HttpWire, Mapping, Point, Process, Sample,
    Sched, Stack, Xid,
};
use crate::symbol::SymbolFrame;
use crate::timeline::DriverEvent;
use crate::timeline::budget::Budget;
use crate::timeline::rows::{Hazard, Iteration, Layer, Phase, Request, Step, Token};
use crate::timeline::shares::Share;
use crate::timeline::tables::{self, LedgerRow, Tables};

/// A capture whose tables are complete.
pub struct Capture {
    folder: Folder,
    meta: Meta,
}

/// The rows of a table; a batch at a time is in memory. Ends after the first error.
pub struct Rows<T> {
    batches: Option<Batches<T>>,
    rows: std::vec::IntoIter<T>,
}

fn rows<T: Table>(folder: &Folder) -> Result<Rows<T>> {
    Ok(Rows { batches: Some(Batches::open(folder)?), rows: Vec::new().into_iter() })
}

impl<T: Table> Iterator for Rows<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        loop {
            if let Some(row) = self.rows.next() {
                return Some(Ok(row));
            }
            match self.batches.as_mut()?.next_rows() {
                Ok(Some(rows)) => self.rows = rows.into_iter(),
                end => {
                    self.batches = None;
                    return end.err().map(Err);
                }
            }
        }
    }
}

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        impl Capture {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// When the table cannot be opened; each row when it cannot be read.
            pub fn $name(&self) -> Result<Rows<$type>> {
                rows(&self.folder)
            }
        )*}
    };
}

tables! {
    /// In order of their id.
    steps: Step;
    iterations: Iteration;
    requests: Request;
    request_ids: RequestId;
    tokens: Token;
    /// Of sampled steps, by step and begin.
    layers: Layer;
    phases: Phase;
    /// The first of each kind.
    hazards: Hazard;
    engine_files: EngineFile;
    offcpu: OffCpu;
    /// Of the tokens whose latency is known, in their order.
    budgets: Budget;
    /// Whose time each step was.
    shares: Share;
    /// The curves that map the devices' clocks, by series and time.
    clock: ClockKnot;
    /// How good each of them is.
    clock_quality: ClockQuality;
    /// What the CUDA driver answered that matters.
    driver_events: DriverEvent;
    /// By stack, leaf first.
    frames: SymbolFrame;
    ledger: LedgerRow;
    samples: Sample;
    sched: Sched;
    stacks: Stack;
    mappings: Mapping;
    processes: Process;
    points: Point;
    http_wires: HttpWire;
    http_ends: HttpEnd;
    calls: Call;
    /// Brackets of the host's clocks.
    clock_host: HostClock;
    gpu_samples: GpuSample;
    gpu_process_samples: GpuProcess;
    xids: Xid;
}

impl Capture {
    /// Opens a finished capture.
    ///
    /// # Errors
    /// [`ErrorKind::Unfinished`] when it has yet to be finished or recovered; otherwise as
    /// [`Reader::open`](super::Reader::open).
    pub fn open(dir: &Path) -> Result<Self> {
        let folder = Folder::open(dir)?;
        let meta = Meta::read(&folder)?;
        if !meta.complete {
            let detail = "the recording was not finished: its tables are missing";
            return Err(Error::new(ErrorKind::Unfinished, "open capture", dir, detail));
        }
        Ok(Self { folder, meta })
    }

    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All events, merged by time; see [`Reader::events`](super::Reader::events).
    ///
    /// # Errors
    /// When a table cannot be opened.
    pub fn events(&self) -> Result<Events> {
        Events::open(&self.folder)
    }

    /// Those of some tables only.
    ///
    /// # Errors
    /// When a table cannot be opened.
    pub(crate) fn events_of(&self, tables: &[&str]) -> Result<Events> {
        Events::open_some(&self.folder, |name| tables.contains(&name))
    }

    /// The recorder's lines of the ledger as they changed over time.
    pub(crate) fn counters(&self) -> Result<Rows<Counter>> {
        rows(&self.folder)
    }

    /// CLOCK_REALTIME by the recording's brackets; where there are none, by its start.
    fn wall(&self) -> Result<WallClock> {
        let mut wall = WallClock::default();
        self.clock_host()?.try_for_each(|bracket| bracket.map(|bracket| wall.push(&bracket)))?;
        if wall.is_empty() && self.meta.started_realtime_ns > 0 {
            wall.push_pair(self.meta.started_monotonic_ns, self.meta.started_realtime_ns);
        }
        Ok(wall)
    }

    /// Everything that reports print, in memory.
    ///
    /// # Errors
    /// When a table cannot be read.
    pub fn tables(&self) -> Result<Tables> {
        Ok(Tables {
            steps: self.steps()?.collect::<Result<_>>()?,
            iterations: self.iterations()?.collect::<Result<_>>()?,
            requests: self.requests()?.collect::<Result<_>>()?,
            tokens: self.tokens()?.collect::<Result<_>>()?,
            budgets: self.budgets()?.collect::<Result<_>>()?,
            layers: self.layers()?.collect::<Result<_>>()?,
            phases: self.phases()?.collect::<Result<_>>()?,
            hazards: self.hazards()?.collect::<Result<_>>()?,
            clocks: self.clock_quality()?.collect::<Result<_>>()?,
            driver_events: self.driver_events()?.collect::<Result<_>>()?,
            ..self.underived()?
        })
    }

    /// The same without what the timeline derives.
    pub(super) fn underived(&self) -> Result<Tables> {
        let points = self.points()?.collect::<Result<Vec<_>>>()?;
        let mut engines: Vec<String> = points.iter().map(|point| point.engine.clone()).collect();
        engines.sort();
        engines.dedup();
        let Meta { tool_version, host, target, started_realtime_ns, started_monotonic_ns, .. } =
            self.meta.clone();
        Ok(Tables {
            meta: tables::Meta {
                tracer_version: tool_version,
                host,
                target,
                engines,
                started_realtime_ns,
                started_ns: started_monotonic_ns,
                ended_ns: self.meta.ended_monotonic_ns.unwrap_or(started_monotonic_ns),
                simulated: self.meta.simulated,
                complete: !self.meta.recovered,
                not_recorded: self.meta.not_recorded.clone(),
            },
            points,
            engine_files: self.engine_files()?.collect::<Result<_>>()?,
            http_wires: self.http_wires()?.collect::<Result<_>>()?,
            http_ends: self.http_ends()?.collect::<Result<_>>()?,
            gpu_samples: self.gpu_samples()?.collect::<Result<_>>()?,
            gpu_processes: self.gpu_process_samples()?.collect::<Result<_>>()?,
            xids: self.xids()?.collect::<Result<_>>()?,
            wall: self.wall()?,
            ledger: self.ledger()?.collect::<Result<_>>()?,
            ..Tables::default()
        })
    }
}

//! GPUs beside the trace: NVML's readings, sampled on a thread of its own, and Xids from the kernel log.
//!
//! In: libnvidia-ml, `/dev/kmsg`. Out: events, what is not recorded and why, lines of the ledger. The recorder calls
//! this between two looks at the rings, so nothing here may wait: not for a library that hangs, and not at the end.

mod kmsg;
mod nvml;
mod sampler;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::event::Event;
use crate::timeline::tables::LedgerRow;
use kmsg::KernelLog;
use sampler::Sampler;

/// Line of the ledger: samples are missing, since NVML did not answer for so long that its thread was left behind.
const HUNG: &str = "nvml_hung";

/// Names of what may be absent.
const READINGS: &str = "GPU readings";
const XIDS: &str = "Xids";

/// Something that is not recorded, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) what: &'static str,
    pub(crate) why: String,
}

/// What a recording takes from GPUs.
pub(crate) struct Gpus {
    sampler: Option<Sampler>,
    log: Option<KernelLog>,
    absences: Vec<Absence>,
    hung: bool,
}

impl Gpus {
    /// Samples NVML at `hz`, 0 being never, and reads Xids from the kernel log.
    pub(crate) fn start(hz: u32, kernel_log: &Path) -> Self {
        let mut absences = Vec::new();
        let mut absent = |what, why| absences.push(Absence { what, why });
        let log = KernelLog::open(kernel_log)
            .inspect_err(|error| absent(XIDS, format!("{}: {error}", kernel_log.display())))
            .ok();
        let sampler = (hz > 0).then(|| Sampler::start(hz)).transpose();
        let sampler =
            sampler.inspect_err(|error| absent(READINGS, format!("no thread: {error}"))).ok().flatten();
        Self { sampler, log, absences, hung: false }
    }

    /// What came since the last call.
    pub(crate) fn drain(&mut self, out: &mut Vec<Event>) {
        if let Some(log) = &mut self.log {
            log.read(out);
        }
        if let Some(sampler) = &mut self.sampler {
            sampler.drain(out, &mut self.absences);
        }
    }

    /// What turned out to be missing since the last call.
    pub(crate) fn take_absences(&mut self) -> Vec<Absence> {
        std::mem::take(&mut self.absences)
    }

    /// Ends the sampling and takes the rest.
    pub(crate) fn stop(&mut self, out: &mut Vec<Event>) {
        self.drain(out);
        if let Some(sampler) = &mut self.sampler {
            self.hung = !sampler.stop(out, &mut self.absences);
        }
        if self.hung {
            let why = "NVML did not answer at the end of the recording; its last samples are missing".into();
            self.absences.push(Absence { what: READINGS, why });
        }
    }

    /// A thread is still inside NVML: running the library's destructors could wait for it.
    pub(crate) fn is_hung(&self) -> bool {
        self.hung
    }

    /// Lines of the ledger; totals since the start.
    pub(crate) fn ledger(&self) -> Vec<LedgerRow> {
        let row = |name: &str, count, loss| LedgerRow { process: None, name: name.into(), count, loss };
        let mut rows = Vec::new();
        if let Some(sampler) = &self.sampler {
            let counts = sampler.counts();
            rows.push(row("nvml_absent", u64::from(counts.absent), false));
            // Not a loss: every sample has its own time, and the one that took long is among them.
            rows.push(row("nvml_ticks_skipped", counts.skipped, false));
            rows.push(row("nvml_failed", counts.failed, true));
            rows.push(row("nvml_dropped", counts.dropped, true));
            rows.push(row(HUNG, u64::from(self.hung), true));
        }
        match &self.log {
            Some(log) => rows.push(row("kmsg_overrun", log.overruns(), true)),
            None => rows.push(row("kmsg_absent", 1, false)),
        }
        rows
    }
}

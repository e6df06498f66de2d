//! What the CUDA driver answered that matters for what is seen elsewhere: errors, and contexts that ended.

use std::collections::{BTreeMap, HashMap};

use crate::event::{Call, CallEnd, Point, ProcessId, Role};

/// `CUresult` of success, and of a poll that finds work unfinished.
const SUCCESS: u32 = 0;
const NOT_READY: u32 = 600;

/// Answers of one kind to calls of one function by one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverEvent {
    pub process: ProcessId,
    /// The function: `cuStreamSynchronize`.
    pub function: String,
    /// Its `CUresult`: 0 when a context ended, otherwise an error.
    pub code: u32,
    pub count: u64,
    /// CLOCK_MONOTONIC ns at which the first and the last of them returned.
    pub first_ns: u64,
    pub last_ns: u64,
}

impl DriverEvent {
    /// By how many ns of CLOCK_MONOTONIC the first, or the last if that is nearer, is later than a time.
    #[must_use]
    pub fn after_ns(&self, time_ns: u64) -> i64 {
        let after = |ns: u64| i64::try_from(i128::from(ns) - i128::from(time_ns)).unwrap_or(i64::MAX);
        [after(self.first_ns), after(self.last_ns)]
            .into_iter()
            .min_by_key(|ns| ns.unsigned_abs())
            .unwrap_or(0)
    }

    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.code != SUCCESS
    }
}

/// Gathers them; bounded by the number of functions and of error codes.
#[derive(Debug, Default)]
pub(super) struct DriverEvents {
    /// Points of the driver that are seen to return: function, and whether it ends a context.
    points: HashMap<u32, (String, bool)>,
    events: BTreeMap<(ProcessId, u32, u32), (u64, u64, u64)>,
}

impl DriverEvents {
    pub(super) fn point(&mut self, point: &Point) {
        if point.engine == "cuda" && point.has_return {
            self.points.insert(point.id, (point.name.clone(), point.role == Role::ContextEnd));
        }
    }

    pub(super) fn call(&mut self, call: &Call) {
        let Some((_, ends_context)) = self.points.get(&call.point) else { return };
        // An int is returned in the lower half of the register.
        let code = call.ret as u32;
        let matters = if code == SUCCESS { *ends_context } else { code != NOT_READY };
        if call.end == CallEnd::Returned && matters {
            let key = (call.origin.process, call.point, code);
            let (count, first_ns, last_ns) = self.events.entry(key).or_insert((0, call.end_ns, call.end_ns));
            *count += 1;
            *first_ns = call.end_ns.min(*first_ns);
            *last_ns = call.end_ns.max(*last_ns);
        }
    }

    /// By the time of the first of each kind.
    pub(super) fn rows(&self) -> Vec<DriverEvent> {
        let row = |(&(process, point, code), &(count, first_ns, last_ns)): (&(_, u32, _), &_)| DriverEvent {
            process,
            function: self.points.get(&point).map_or_else(String::new, |(name, _)| name.clone()),
            code,
            count,
            first_ns,
            last_ns,
        };
        let mut rows: Vec<DriverEvent> = self.events.iter().map(row).collect();
        rows.sort_by_key(|row| row.first_ns);
        rows
    }
}

/// The name of a `CUresult`, without its prefix `CUDA_ERROR_`, of those that runs end with (cuda.h).
#[must_use]
pub const fn driver_error(code: u32) -> Option<&'static str> {
    Some(match code {
        1 => "INVALID_VALUE",
        2 => "OUT_OF_MEMORY",
        4 => "DEINITIALIZED",
        46 => "DEVICE_UNAVAILABLE",
        100 => "NO_DEVICE",
        201 => "INVALID_CONTEXT",
        214 => "ECC_UNCORRECTABLE",
        400 => "INVALID_HANDLE",
        700 => "ILLEGAL_ADDRESS",
        701 => "LAUNCH_OUT_OF_RESOURCES",
        702 => "LAUNCH_TIMEOUT",
        709 => "CONTEXT_IS_DESTROYED",
        710 => "ASSERT",
        714 => "HARDWARE_STACK_ERROR",
        715 => "ILLEGAL_INSTRUCTION",
        716 => "MISALIGNED_ADDRESS",
        717 => "INVALID_ADDRESS_SPACE",
        718 => "INVALID_PC",
        719 => "LAUNCH_FAILED",
        802 => "SYSTEM_NOT_READY",
        900 => "STREAM_CAPTURE_UNSUPPORTED",
        901 => "STREAM_CAPTURE_INVALIDATED",
        906 => "STREAM_CAPTURE_IMPLICIT",
        907 => "CAPTURED_EVENT",
        999 => "UNKNOWN",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::timeline::testing;

    #[test]
    fn errors_and_ended_contexts_are_kept_and_polls_are_not() {
        let mut events = DriverEvents::default();
        for (id, name, role) in [
            (1, "cuStreamSynchronize", Role::Wait),
            (2, "cuCtxDestroy_v2", Role::ContextEnd),
            (3, "enqueueV3", Role::Step),
        ] {
            let engine = if role == Role::Step { "tensorrt" } else { "cuda" };
            let Event::Point(point) = testing::point(id, role, None) else { unreachable!() };
            events.point(&Point { engine: engine.into(), name: name.into(), ..point });
        }
        let mut call = |point, end_ns, ret, end| {
            let Event::Call(call) = testing::call(point, 1, end_ns - 1, end_ns, [0; 2]) else {
                unreachable!()
            };
            events.call(&Call { ret, end, ..call });
        };
        // The upper half of the register is not part of an int.
        call(1, 50, 0xffff_0000_0000_02bc, CallEnd::Returned);
        call(1, 30, 700, CallEnd::Returned);
        call(1, 40, 0, CallEnd::Returned);
        call(1, 41, 600, CallEnd::Returned);
        call(1, 42, 700, CallEnd::Open);
        call(2, 60, 0, CallEnd::Returned);
        call(3, 61, 1, CallEnd::Returned);
        let rows = events.rows();
        let kinds: Vec<_> = rows.iter().map(|row| (row.function.as_str(), row.code, row.count)).collect();
        assert_eq!(kinds, [("cuStreamSynchronize", 700, 2), ("cuCtxDestroy_v2", 0, 1)]);
        assert_eq!((rows[0].first_ns, rows[0].last_ns), (30, 50));
        assert_eq!((rows[0].after_ns(28), rows[0].after_ns(55), rows[0].after_ns(45)), (2, -5, 5));
        assert!(rows[0].is_error() && !rows[1].is_error());
    }
}

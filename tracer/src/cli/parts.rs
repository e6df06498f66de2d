//! What a token waited for, as far as one step tells.

use serde::Serialize;

use crate::timeline::rows::{Step, Token};

/// A token's latency in four parts that sum to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Parts {
    /// Until its step began: queueing, other steps, the server's own work.
    pub(crate) before_ns: u64,
    /// Of the step, what was not its GPU span: enqueue, waiting for the GPU, the host wait's return.
    pub(crate) step_ns: u64,
    /// The step's GPU span.
    pub(crate) gpu_ns: u64,
    /// From the step's completion to the delivery.
    pub(crate) after_ns: u64,
}

impl Parts {
    /// Divides the token's latency by the times of its step.
    pub(crate) fn of(token: &Token, step: &Step) -> Option<Self> {
        let until = token.delivered_ns;
        let from = until.saturating_sub(token.latency_ns?);
        let inside = |ns: u64| ns.clamp(from, until);
        let completion = step.completion_ns().unwrap_or(step.end_ns).max(step.begin_ns);
        let (begin, end) = (inside(step.begin_ns), inside(completion));
        let gpu_ns = step.gpu.map_or(0, |gpu| {
            let within = |ns: u64| ns.clamp(begin, end);
            within(gpu.end_ns) - within(gpu.begin_ns).min(within(gpu.end_ns))
        });
        Some(Self { before_ns: begin - from, step_ns: end - begin - gpu_ns, gpu_ns, after_ns: until - end })
    }

    /// The longest part, in words.
    pub(crate) fn longest(&self) -> &'static str {
        let parts = [
            (self.gpu_ns, "GPU"),
            (self.step_ns, "its step, host side"),
            (self.before_ns, "before its step"),
            (self.after_ns, "delivery"),
        ];
        parts.into_iter().max_by_key(|(ns, _)| *ns).map_or("", |(_, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::event::{CallEnd, ProcessId};
    use crate::timeline::rows::{GpuTime, Source};

    pub(crate) fn token(delivered_ns: u64, latency_ns: Option<u64>) -> Token {
        Token {
            request: 0,
            choice: 0,
            index: 1,
            process: crate::event::ProcessId::default(),
            tid: 0,
            delivered_ns,
            wire_ns: None,
            latency_ns,
            source: Source::Mark,
            join: crate::timeline::rows::Join::Mark,
            iteration: None,
            step: None,
            prefill: false,
        }
    }

    fn step(begin_ns: u64, end_ns: u64, observed_end_ns: Option<u64>, gpu: Option<(u64, u64)>) -> Step {
        let gpu = gpu.map(|(begin_ns, span_ns)| GpuTime {
            begin_ns,
            end_ns: begin_ns + span_ns,
            span_ns,
            bound_ns: 1,
        });
        Step {
            id: 0,
            process: ProcessId::default(),
            tid: 1,
            point: 0,
            rank: 0,
            batch_id: None,
            iteration: None,
            stream: 0,
            begin_ns,
            end_ns,
            end: CallEnd::Returned,
            observed_end_ns,
            device_uuid: None,
            gpu,
            slots: Vec::new(),
        }
    }

    #[test]
    fn a_plain_token() {
        let parts = Parts::of(&token(100, Some(60)), &step(50, 55, Some(90), Some((56, 30)))).unwrap();
        assert_eq!(parts, Parts { before_ns: 10, step_ns: 6, gpu_ns: 30, after_ns: 14 });
        assert_eq!(parts.longest(), "GPU");
        assert_eq!(Parts::of(&token(100, None), &step(50, 55, None, None)), None);
    }

    proptest! {
        #[test]
        fn parts_sum_to_the_latency(
            token in (0u64..1000, 0u64..2000).prop_map(|(at, latency)| token(at, Some(latency))),
            times in (0u64..1000, 0u64..1000, prop::option::of(0u64..1000), prop::option::of((0u64..1000, 0u64..1000))),
        ) {
            let parts = Parts::of(&token, &step(times.0, times.1, times.2, times.3)).unwrap();
            let sum = parts.before_ns + parts.step_ns + parts.gpu_ns + parts.after_ns;
            prop_assert_eq!(sum, token.latency_ns.unwrap().min(token.delivered_ns));
        }
    }
}

//! GPUs below a heatmap: NVML's readings and Xids on its axis of time.

use std::collections::BTreeMap;

use flamegraphs::{Fault, Lane, Stretch, Strip};

use crate::event::GpuSample;
use crate::event::gpu::throttle_reasons;
use crate::timeline::tables::Tables;

/// A strip for every GPU that was sampled, in their order.
pub(super) fn of(tables: &Tables) -> Vec<Strip> {
    let mut gpus: BTreeMap<(u32, [u8; 16]), Vec<&GpuSample>> = BTreeMap::new();
    for sample in &tables.gpu_samples {
        gpus.entry((sample.device_index, sample.device_uuid)).or_default().push(sample);
    }
    gpus.into_values().filter_map(|samples| strip(&samples, tables)).collect()
}

fn strip(samples: &[&GpuSample], tables: &Tables) -> Option<Strip> {
    let first = samples.first()?;
    let since = |time_ns: u64| time_ns.checked_sub(tables.meta.started_ns);
    let points = |reading: &dyn Fn(&GpuSample) -> Option<u32>| -> Vec<(u64, u64)> {
        samples.iter().filter_map(|sample| Some((since(sample.time_ns)?, reading(sample)?.into()))).collect()
    };
    let clocks = points(&|sample| sample.sm_clock_mhz);
    let highest = clocks.iter().map(|point| point.1).max().unwrap_or(0);
    let lane =
        |name: &str, unit: &str, top, points| Lane { name: name.into(), unit: unit.into(), top, points };
    let faults = tables.xids.iter().filter(|xid| xid.pci.starts_with(&first.pci) && !first.pci.is_empty());
    Some(Strip {
        name: format!("GPU {} · {}", first.device_index, first.device_name),
        lanes: vec![
            lane("utilisation", "%", 100, points(&|sample| sample.gpu_percent)),
            lane("SM clock", "MHz", highest, clocks),
        ],
        held: held(samples, tables.meta.started_ns),
        faults: faults
            .filter_map(|xid| {
                Some(Fault { at: since(xid.time_ns)?, what: format!("Xid {}: {}", xid.xid, xid.message) })
            })
            .collect(),
    })
}

/// Where the GPU was throttled for the same reasons: from the first sample that says so to the first that does not.
fn held(samples: &[&GpuSample], started_ns: u64) -> Vec<Stretch> {
    let mut held: Vec<Stretch> = Vec::new();
    let mut open = false;
    for sample in samples {
        let time = sample.time_ns.saturating_sub(started_ns);
        if let Some(last) = held.last_mut().filter(|_| open) {
            last.range.end = time;
        }
        let reasons = throttle_reasons(sample.throttle_reasons.unwrap_or(0)).filter(|reason| reason.slows);
        let what = reasons.map(|reason| reason.name).collect::<Vec<_>>().join(", ");
        open = !what.is_empty();
        if open && held.last().is_none_or(|last| last.what != what || last.range.end != time) {
            held.push(Stretch { range: time..time, what });
        }
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Xid;

    fn sample(time_ns: u64, bits: Option<u64>) -> GpuSample {
        GpuSample {
            time_ns,
            device_uuid: [1; 16],
            device_name: "X".into(),
            pci: "0000:01:00".into(),
            gpu_percent: Some(50),
            throttle_reasons: bits,
            ..GpuSample::default()
        }
    }

    #[test]
    fn throttling_lasts_until_a_sample_without_it() {
        let bits = [None, Some(4), Some(4), Some(0x44), Some(1), Some(4)];
        let samples: Vec<GpuSample> =
            (1..).zip(bits).map(|(t, bits)| sample(1_000 + t * 100, bits)).collect();
        let expected =
            [(200..400, "SwPowerCap"), (400..500, "SwPowerCap, HwThermalSlowdown"), (600..600, "SwPowerCap")];
        let expected = expected.map(|(range, what)| Stretch { range, what: what.into() });
        assert_eq!(held(&samples.iter().collect::<Vec<_>>(), 1_000), expected);
    }

    #[test]
    fn a_strip_has_its_own_readings_and_xids() {
        let mut tables = Tables::default();
        tables.meta.started_ns = 1_000;
        let other = GpuSample {
            device_index: 1,
            device_uuid: [2; 16],
            pci: "0000:02:00".into(),
            ..sample(1_200, None)
        };
        tables.gpu_samples = vec![sample(900, None), sample(1_100, None), other];
        let xid = |pci: &str| Xid {
            time_ns: 1_150,
            pci: pci.into(),
            xid: 79,
            message: "gone".into(),
            ..Xid::default()
        };
        tables.xids = vec![xid("0000:01:00"), xid("0000:03:00")];
        let strips = of(&tables);
        assert_eq!(strips.len(), 2);
        assert_eq!(strips[0].lanes[0].points, [(100, 50)]);
        assert!(strips[0].lanes[1].points.is_empty());
        assert_eq!(strips[0].faults, [Fault { at: 150, what: "Xid 79: gone".into() }]);
        assert!(strips[1].faults.is_empty());
        assert!(of(&Tables::default()).is_empty());
    }
}

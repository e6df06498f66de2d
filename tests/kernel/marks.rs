//! Marks of a C program.

use anyhow::{Result, ensure};
use tracer::event::Mark;

use crate::{
    Test,
    fixture::{calls_only, trace},
};

pub(crate) const TESTS: &[(&str, Test)] = &[("marks::from_c", from_c)];

fn from_c() -> Result<()> {
    let trace = trace(&["marks"], calls_only())?;
    trace.lossless()?;
    ensure!(trace.said == "1", "the program thinks that nobody listens");
    let marks: Vec<&Mark> = trace.marks().into_iter().map(|event| &event.mark).collect();
    let Some(Mark::RequestBegin(begin)) = marks.first() else { anyhow::bail!("{marks:?}") };
    ensure!((begin.request, begin.prompt_tokens) == (11, Some(5)), "{begin:?}");
    ensure!(begin.request_id.starts_with("fixture-") && begin.request_id.ends_with("-id"), "{begin:?}");
    ensure!(!begin.request_id.chars().any(char::is_control), "control characters came through: {begin:?}");
    ensure!(begin.tenant_id == "tenant" && begin.trace_id.is_none(), "{begin:?}");
    let served = [&begin.model, &begin.model_version, &begin.engine_hash, &begin.adapters];
    ensure!(served == ["model", "2", "e3b0c442", "legal,french"], "{begin:?}");
    ensure!(begin.kv_cache_strategy == "paged", "{begin:?}");
    let slots: Vec<_> = marks
        .iter()
        .filter_map(|mark| if let Mark::Batch(batch) = mark { Some(batch) } else { None })
        .flat_map(|batch| {
            let first = batch.first_slot;
            batch.slots.iter().zip(first..).map(|(slot, index)| (index, slot.sample_offset))
        })
        .collect();
    ensure!(
        slots.len() == 300 && slots.iter().all(|(index, offset)| index == offset),
        "{} slots",
        slots.len()
    );
    let tokens: Vec<u32> = marks
        .iter()
        .filter_map(|mark| if let Mark::Token(token) = mark { Some(token.index) } else { None })
        .collect();
    ensure!(tokens == (0..100).collect::<Vec<_>>(), "{tokens:?}");
    ensure!(matches!(marks.last(), Some(Mark::RequestEnd(end)) if end.output_tokens == 100), "{marks:?}");
    Ok(())
}

//! What the commands that draw have in common: the words around a picture, and its file.

use super::units;
use crate::capture::{Capture, Counter};
use crate::event::ProcessId;
use crate::timeline::rows::{Request, Token};
use crate::timeline::tables::{LedgerRow, Meta, Tables};
use anyhow::{Context, Result};
use flamegraphs::Loss;
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

/// Opens a finished capture.
pub(crate) fn open(capture: &Path) -> Result<Capture> {
    Capture::open(capture).with_context(|| {
        format!(
            "{} cannot be shown; if its recorder was killed, `tracer recover` finishes it",
            capture.display()
        )
    })
}

/// Names of a capture's requests.
#[derive(Default)]
pub(crate) struct Names(HashMap<u64, String>);

impl Names {
    pub(crate) fn new(requests: &[Request]) -> Self {
        Self(requests.iter().map(|request| (request.id, name(request))).collect())
    }

    /// The name of a token's request; empty when its begin was not seen.
    pub(crate) fn of(&self, token: &Token) -> &str {
        self.0.get(&token.request).map_or("", String::as_str)
    }
}

pub(crate) fn name(request: &Request) -> String {
    if request.request_id.is_empty() {
        format!("request #{}", request.program_request)
    } else {
        request.request_id.clone()
    }
}

/// When and how long, then the facts given, what is missing, and last what was traced: a picture cuts a line that is
/// too long, and a command line may be.
pub(crate) fn subtitle(tables: &Tables, facts: &[String]) -> String {
    let Meta { target, host, started_realtime_ns, .. } = &tables.meta;
    let mut parts: Vec<String> = units::date_time(*started_realtime_ns).into_iter().collect();
    parts.push(flamegraphs::duration(span_ns(tables)));
    parts.extend_from_slice(facts);
    parts.push(missing(&tables.ledger));
    parts.extend(
        [host.as_str(), short(target)].into_iter().filter(|part| !part.is_empty()).map(str::to_owned),
    );
    parts.join(" · ")
}

/// Length of the recording, ns. Where the recorder could not write its end: up to the last token.
pub(crate) fn span_ns(tables: &Tables) -> u64 {
    let last = tables.tokens.iter().map(|token| token.delivered_ns.saturating_add(1)).max().unwrap_or(0);
    let end = if tables.meta.ended_ns > 0 { tables.meta.ended_ns } else { last };
    end.saturating_sub(tables.meta.started_ns)
}

/// What the ledger says is missing from the capture.
pub(crate) fn missing(ledger: &[LedgerRow]) -> String {
    let losses: Vec<String> = ledger
        .iter()
        .filter(|row| row.loss && row.count > 0)
        .map(|row| format!("{} {}", row.count, row.name))
        .collect();
    if losses.is_empty() { "nothing lost".to_owned() } else { format!("lost: {}", losses.join(", ")) }
}

/// When events of a capture were lost.
pub(crate) fn losses(capture: &Capture, started_ns: u64) -> Result<Vec<Loss>> {
    Ok(grown(capture.counters()?.collect::<Result<_, _>>()?, started_ns))
}

/// When the recorder's counters of losses grew: between the flush before the one that says so, and that one.
fn grown(mut counters: Vec<Counter>, started_ns: u64) -> Vec<Loss> {
    counters.sort_by_key(|counter| counter.time_ns);
    let mut flushes: Vec<u64> = counters.iter().map(|counter| counter.time_ns).collect();
    flushes.dedup();
    let mut before: HashMap<(Option<ProcessId>, String), u64> = HashMap::new();
    let mut losses = Vec::new();
    for Counter { time_ns, row } in counters.into_iter().filter(|counter| counter.row.loss) {
        let known = before.entry((row.process, row.name.clone())).or_default();
        let lost = row.count.saturating_sub(*known);
        *known = row.count;
        // A line without a time is about the capture's files, not about an instant.
        if lost > 0 && time_ns > started_ns {
            let flush = flushes.partition_point(|&flush| flush < time_ns);
            let since = flush.checked_sub(1).and_then(|i| flushes.get(i)).copied().unwrap_or(started_ns);
            let range = since.saturating_sub(started_ns)..time_ns - started_ns;
            losses.push(Loss { range, what: format!("{lost} {}", row.name) });
        }
    }
    losses
}

/// What was traced, the folder of a command left out.
fn short(target: &str) -> &str {
    let command = target.split(' ').next().unwrap_or(target);
    command.rfind('/').map_or(target, |slash| &target[slash + 1..])
}

/// Writes a picture to `path`, `-` being stdout, and says so.
pub(crate) fn write(path: &Path, what: &str, content: &str) -> Result<()> {
    if path == Path::new("-") {
        return std::io::stdout().lock().write_all(content.as_bytes()).context("cannot write to stdout");
    }
    std::fs::write(path, content).with_context(|| {
        format!("cannot write the {what} to {}; choose another file with -o", path.display())
    })?;
    eprintln!("{what}: {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests;

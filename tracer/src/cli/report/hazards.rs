//! Work that was not ordered as it must be, and where the calls come from.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use serde::Serialize;
use tracer_abi::Counter;

use super::wrap_words;
use crate::capture::Stacks;
use crate::cli::table::{Style, WIDTH, cut};
use crate::cli::units::{clean, count, offset};
use crate::event::StackId;
use crate::timeline::hazard::{STEPS_CHECKED, TOKENS_CHECKED};
use crate::timeline::rows::{Hazard, HazardKind};
use crate::timeline::tables::Tables;

/// Pairs of places of each kind that are shown, and frames of each place; JSON has all.
const SHOWN: usize = 3;
const FRAMES: usize = 6;

/// Hazards of a capture that has some.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Hazards {
    pub(crate) steps: u64,
    /// Steps that follow another one on their stream, where both requests are known and waits are seen.
    pub(crate) steps_checked: u64,
    /// Tokens of which it is known until when their step ran.
    pub(crate) tokens_checked: u64,
    /// A wait may be among them, and then a hazard is none.
    pub(crate) records_lost: u64,
    pub(crate) kinds: Vec<Kind>,
}

/// All hazards of one kind.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Kind {
    pub(crate) kind: &'static str,
    pub(crate) count: u64,
    /// Of those that have rows, by where the two calls come from: most frequent first.
    pub(crate) places: Vec<Places>,
    #[serde(skip)]
    of: HazardKind,
}

/// Hazards between calls from the same two places.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Places {
    pub(crate) count: u64,
    pub(crate) first: Case,
    /// Of the second call, and of the first one: leaf first.
    pub(crate) stack: Vec<String>,
    pub(crate) other_stack: Vec<String>,
    #[serde(skip)]
    ids: Ids,
}

/// Stacks of the second call and of the first one.
type Ids = (Option<StackId>, Option<StackId>);

/// The first of them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Case {
    /// CLOCK_MONOTONIC.
    pub(crate) time_ns: u64,
    pub(crate) pid: u32,
    pub(crate) step: u64,
    pub(crate) other_step: Option<u64>,
    /// As the client named them, else by number.
    pub(crate) request: Option<String>,
    pub(crate) other_request: Option<String>,
    pub(crate) stream: u64,
    pub(crate) tid: u32,
    pub(crate) other_tid: u32,
}

/// What a kind means, in one sentence.
pub(in crate::cli) const fn meaning(kind: HazardKind) -> &'static str {
    match kind {
        HazardKind::SharedStream => {
            "two threads gave one stream steps of different requests, and nothing waited in between"
        }
        HazardKind::CapturedStep => "a step was enqueued while its stream was capturing: it did not run",
        HazardKind::EarlyOutput => "a token was delivered before the step that generates it was complete",
    }
}

impl Hazards {
    /// `None` where there are none. Stacks have no names yet.
    pub(crate) fn new(tables: &Tables) -> Option<Self> {
        let told =
            |name: &str| tables.ledger.iter().filter(|row| row.name == name).map(|row| row.count).sum();
        let of = |kind: HazardKind| Kind::new(kind, told(kind.counter()), tables);
        let kinds: Vec<Kind> = HazardKind::ALL.into_iter().map(of).filter(|kind| kind.count > 0).collect();
        (!kinds.is_empty()).then(|| Self {
            steps: tables.steps.len() as u64,
            steps_checked: told(STEPS_CHECKED),
            tokens_checked: told(TOKENS_CHECKED),
            records_lost: told(Counter::VitalDropped.name()),
            kinds,
        })
    }

    /// Gives the stacks their names.
    pub(crate) fn name(&mut self, stacks: &Stacks) {
        let names = |id: Option<StackId>| -> Vec<String> {
            let mut frames: Vec<String> = stacks.root_first(id).map(Cow::into_owned).collect();
            frames.reverse();
            frames
        };
        for places in self.kinds.iter_mut().flat_map(|kind| &mut kind.places) {
            (places.stack, places.other_stack) = (names(places.ids.0), names(places.ids.1));
        }
    }

    pub(crate) fn text(&self, started_ns: u64, style: Style, out: &mut String) {
        for kind in &self.kinds {
            let line = format!("  {}  {}: {}", count(kind.count), kind.kind, meaning(kind.of));
            for (line, number) in wrap_words(line.trim_start(), WIDTH - 4).iter().zip(0..) {
                let indent = if number == 0 { "  " } else { "    " };
                let _ = writeln!(out, "{indent}{}", style.alarm(line));
            }
            kind.places.iter().take(SHOWN).for_each(|places| places.text(kind.of, started_ns, style, out));
            if let Some(more) = kind.places.len().checked_sub(SHOWN).filter(|more| *more > 0) {
                let _ = writeln!(
                    out,
                    "{}",
                    style.faint(&format!("    {more} more pairs of places: --json has all"))
                );
            }
        }
        let mut checked = format!(
            "  Checked: {} steps for captures, {} of them against the step before on their stream, {} tokens. \
             Locks, polls and host functions are not seen: docs/hazards.md says when a hazard is none.",
            count(self.steps),
            count(self.steps_checked),
            count(self.tokens_checked)
        );
        if self.records_lost > 0 {
            let _ = write!(
                checked,
                " {} records were lost: where a wait is among them, a hazard may be none.",
                count(self.records_lost)
            );
        }
        for line in wrap_words(checked.trim_start(), WIDTH - 2) {
            let _ = writeln!(out, "{}", style.faint(&format!("  {line}")));
        }
    }
}

impl Kind {
    fn new(kind: HazardKind, count: u64, tables: &Tables) -> Self {
        let names: HashMap<u64, &str> =
            tables.requests.iter().map(|request| (request.id, request.request_id.as_str())).collect();
        let name = |id: u64| match names.get(&id) {
            Some(name) if !name.is_empty() => (*name).to_owned(),
            _ => format!("#{id}"),
        };
        let mut by_place: BTreeMap<Ids, (u64, &Hazard)> = BTreeMap::new();
        for hazard in tables.hazards.iter().filter(|hazard| hazard.kind == kind) {
            by_place.entry((hazard.stack, hazard.other_stack)).or_insert((0, hazard)).0 += 1;
        }
        let mut places: Vec<Places> = by_place
            .into_iter()
            .map(|(ids, (count, first))| Places {
                count,
                first: Case {
                    time_ns: first.time_ns,
                    pid: first.process.tgid,
                    step: first.step,
                    other_step: first.other_step,
                    request: first.request.map(name),
                    other_request: first.other_request.map(name),
                    stream: first.stream,
                    tid: first.tid,
                    other_tid: first.other_tid,
                },
                stack: Vec::new(),
                other_stack: Vec::new(),
                ids,
            })
            .collect();
        places.sort_by_key(|places| (std::cmp::Reverse(places.count), places.first.time_ns));
        Self { kind: kind.name(), count, places, of: kind }
    }
}

impl Places {
    fn text(&self, kind: HazardKind, started_ns: u64, style: Style, out: &mut String) {
        let Case { time_ns, step, other_step, request, other_request, stream, tid, other_tid, .. } =
            &self.first;
        let of = |request: &Option<String>| {
            request.as_ref().map_or(String::new(), |id| format!(" of {}", clean(id, 24)))
        };
        let (second, first) = match kind {
            HazardKind::SharedStream => (
                format!("step #{step}{}", of(request)),
                format!("step #{}{}", other_step.map_or("–".into(), |id| id.to_string()), of(other_request)),
            ),
            HazardKind::CapturedStep => (format!("step #{step}{}", of(request)), "the capture".into()),
            HazardKind::EarlyOutput => (format!("a token{}", of(request)), format!("step #{step}")),
        };
        let line = format!(
            "    {} ×, first at {}, stream {stream:#x}: {second} after {first}",
            count(self.count),
            offset(*time_ns, started_ns)
        );
        let _ = writeln!(out, "{}", cut(&line, WIDTH));
        for (what, tid, frames) in [(&second, tid, &self.stack), (&first, other_tid, &self.other_stack)] {
            let _ = writeln!(out, "{}", style.faint(&cut(&format!("      {what}: thread {tid}, in"), WIDTH)));
            for frame in frames.iter().take(FRAMES) {
                let _ = writeln!(out, "{}", cut(&format!("        {}", clean(frame, WIDTH)), WIDTH));
            }
        }
    }
}

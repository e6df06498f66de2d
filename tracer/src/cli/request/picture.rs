//! One request as a picture.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use anyhow::Result;
use flamegraphs::{GpuBar, Header, Part, Piece, RequestInput, StepBar, TokenBar};
use tracer_abi::mark::PREFILL;

use super::{Life, finish, index};
use crate::capture::Capture;
use crate::cli::budget;
use crate::cli::picture::{ThreadNames, missing, name};
use crate::cli::stacks::Stacks;
use crate::cli::units::{clean, count, date_time, duration};
use crate::timeline::budget::{Budgets, Label, Segment};
use crate::timeline::rows::{Step, Token};
use crate::timeline::tables::Tables;

pub(super) fn svg(capture: &Capture, tables: &Tables, life: &Life) -> Result<String> {
    let drawing = Drawing {
        tables,
        life,
        budgets: &capture.budgets_of(tables)?,
        stacks: &Stacks::read(capture)?,
        threads: &ThreadNames::read(capture)?,
    };
    Ok(flamegraphs::request(&drawing.input())?)
}

struct Drawing<'a> {
    tables: &'a Tables,
    life: &'a Life<'a>,
    budgets: &'a Budgets,
    stacks: &'a Stacks,
    threads: &'a ThreadNames,
}

impl Drawing<'_> {
    fn input(&self) -> RequestInput {
        let parts = Label::PARTS.map(|label| {
            let (hue, hatched) = budget::looks(label);
            Part { name: label.name().to_owned(), meaning: label.meaning().to_owned(), hue, hatched }
        });
        let tokens: Vec<TokenBar> =
            self.life.tokens.iter().filter_map(|piece| self.token(piece.token)).collect();
        RequestInput {
            header: self.header(),
            parts: parts.into(),
            steps: self.steps(&tokens),
            notes: self.notes(&tokens),
            tokens,
        }
    }

    fn header(&self) -> Header {
        let Self { tables, life, .. } = self;
        let request = life.request;
        let mut title = format!("Request {}", name(request));
        let mut add = |what: &str, text: &str| {
            if !text.is_empty() {
                title += &format!(" · {what}{}", clean(text, 40));
            }
        };
        add("", &request.model);
        add("tenant ", &request.tenant_id);
        let shown = |name: &str, ns: Option<u64>| Some(format!("{name} {}", duration(ns?)));
        let e2e = request.end_ns.and_then(|end| end.checked_sub(request.received_ns));
        let facts = [
            tables.wall.realtime_ns(request.received_ns).and_then(date_time),
            shown("ttft", request.ttft_ns),
            shown("tpot", request.tpot_ns.map(|ns| ns.round() as u64)),
            shown("e2e", e2e),
            Some(missing(&tables.ledger)),
            Some(format!("{} tokens", count(request.tokens.into()))),
            request.prompt_tokens.map(|n| format!("prompt {}", count(n.into()))),
            Some(finish(request).to_owned()),
        ];
        let facts: Vec<String> = facts.into_iter().flatten().collect();
        Header { title, subtitle: facts.join(" · "), simulated: tables.meta.simulated }
    }

    /// ns since the request was received.
    fn range(&self, begin_ns: u64, end_ns: u64) -> Range<u64> {
        let since = |ns: u64| ns.saturating_sub(self.life.request.received_ns);
        since(begin_ns)..since(end_ns)
    }

    /// `None`: its latency is not known.
    fn token(&self, token: &Token) -> Option<TokenBar> {
        let begin_ns = token.delivered_ns.saturating_sub(token.latency_ns?);
        Some(TokenBar {
            name: index(token.choice, token.index),
            lane: token.choice,
            range: self.range(begin_ns, token.delivered_ns),
            is_first: token.index == 0,
            pieces: self.budgets.segments(token).iter().map(|segment| self.piece(segment)).collect(),
        })
    }

    fn piece(&self, segment: &Segment) -> Piece {
        let blocked = segment.blocked.map(|on| on.name().to_owned());
        let thread = format!("thread {}", clean(&self.threads.of(segment.thread), 20));
        let what: Vec<String> = blocked.into_iter().chain([thread]).collect();
        let mut stack = segment.stack.map(|_| self.stacks.off_cpu(segment.stack)).unwrap_or_default();
        stack.reverse();
        Piece {
            range: self.range(segment.begin_ns, segment.end_ns),
            part: segment.label as usize,
            what: what.join(", "),
            stack,
        }
    }

    /// The steps of the threads that the request's steps ran on, while it was served.
    fn steps(&self, tokens: &[TokenBar]) -> Vec<StepBar> {
        let own: HashSet<u64> = self.life.tokens.iter().filter_map(|piece| piece.token.step).collect();
        let thread = |step: &Step| (step.process, step.tid);
        let threads: HashSet<_> =
            self.tables.steps.iter().filter(|step| own.contains(&step.id)).map(thread).collect();
        let begin_ns = self.life.request.received_ns;
        let end_ns = tokens.iter().map(|token| token.range.end).max().unwrap_or(0).saturating_add(begin_ns);
        let batches = self.tables.batches();
        let shown = |step: &&Step| {
            let step_end_ns = step.completion_ns().unwrap_or(step.end_ns);
            threads.contains(&thread(step)) && step.begin_ns < end_ns && step_end_ns > begin_ns
        };
        self.tables.steps.iter().filter(shown).map(|step| self.step(step, &own, &batches)).collect()
    }

    fn step(&self, step: &Step, own: &HashSet<u64>, batches: &HashMap<u64, u64>) -> StepBar {
        let prompts = || step.slots.iter().filter(|slot| slot.phase == PREFILL);
        let end_ns = step.completion_ns().unwrap_or(step.end_ns);
        let batch = step.batch_id.map_or(String::new(), |id| format!(" (batch {id}, rank {})", step.rank));
        let gpu = step
            .gpu
            .map(|gpu| GpuBar { range: self.range(gpu.begin_ns, gpu.end_ns), bound_ns: gpu.bound_ns });
        StepBar {
            name: format!("step #{}{batch}", step.id),
            range: self.range(step.begin_ns, end_ns),
            gpu,
            batch: batches.get(&step.id).copied().unwrap_or(0),
            prompts: prompts().count() as u64,
            prompt_tokens: prompts().map(|slot| u64::from(slot.tokens)).sum(),
            is_own: own.contains(&step.id),
        }
    }

    fn notes(&self, tokens: &[TokenBar]) -> Vec<String> {
        let request = self.life.request;
        let unseen = u64::from(request.declared_tokens.unwrap_or(0)).saturating_sub(request.tokens.into());
        let unknown = self.life.tokens.len().saturating_sub(tokens.len()) as u64;
        let held = self.life.tokens.iter().filter(|piece| piece.token.held_ns().is_some()).count() as u64;
        let notes = [
            (unseen, "tokens were not seen"),
            (unknown, "tokens are not drawn: the token before them was not seen"),
            (held, "tokens were held after they were written: the kernel waited for an acknowledgement"),
        ];
        notes.into_iter().filter(|(n, _)| *n > 0).map(|(n, text)| format!("{} {text}", count(n))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;
    use crate::timeline::budget::Threads;

    #[test]
    fn a_request_has_its_tokens_and_the_steps_of_its_threads() {
        let tables = tables();
        let request = super::super::find(&tables, "req-1")[0];
        let life = Life::new(&tables, request);
        let budgets = Budgets::new(&tables.steps, &tables.requests, &tables.tokens, Threads::default());
        let drawing = Drawing {
            tables: &tables,
            life: &life,
            budgets: &budgets,
            stacks: &Stacks::default(),
            threads: &ThreadNames::default(),
        };
        let input = drawing.input();
        assert_eq!(input.tokens.len(), 25);
        for token in &input.tokens {
            let sum: u64 = token.pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
            assert_eq!(sum, token.range.end - token.range.start);
        }
        assert!(input.steps.iter().filter(|step| step.is_own).count() > 10);
        assert!(input.steps.iter().all(|step| step.batch > 0 && step.gpu.is_some()));
        assert!(input.header.title.starts_with("Request req-1") && input.header.simulated);
        let svg = flamegraphs::request(&input).unwrap();
        assert!(svg.contains("Latency of each token") && svg.contains("gpu_span"));
    }
}

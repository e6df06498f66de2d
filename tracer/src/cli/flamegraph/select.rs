//! What of a capture is drawn.

use crate::cli::duration::{ns, parse as duration, parse_offset as offset};
use crate::cli::picture::ThreadNames;
use crate::cli::request::find;
use crate::cli::units::clean;
use crate::timeline::rows::{Request, Token};
use crate::timeline::tables::Tables;
use anyhow::{Result, bail};
use clap::ValueEnum;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Duration;

/// Which tokens, times and threads; all of them by default.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Filters")]
pub(crate) struct Filters {
    /// Only this request: its id, a trace id, or # and its number (repeatable)
    #[arg(long, value_name = "ID")]
    request: Vec<String>,
    /// Only this tenant (repeatable)
    #[arg(long, value_name = "NAME")]
    tenant: Vec<String>,
    /// Only first tokens (prefill), or only later ones (decode)
    #[arg(long, value_enum)]
    pub(crate) phase: Option<Phase>,
    /// Only from this time on, since the recording began
    #[arg(long, value_name = "OFFSET", value_parser = offset)]
    from: Option<Duration>,
    /// Only before this time, since the recording began
    #[arg(long, value_name = "OFFSET", value_parser = duration)]
    to: Option<Duration>,
    /// Only tokens with at least this latency
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    slower_than: Option<Duration>,
    /// Only tokens with less than this latency
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    faster_than: Option<Duration>,
    /// Only this thread: its name or number (repeatable)
    #[arg(long, value_name = "NAME|TID")]
    thread: Vec<String>,
    /// Only this process (repeatable)
    #[arg(long, value_name = "PID")]
    process: Vec<u32>,
}

/// Where in its answer a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Phase {
    Prefill,
    Decode,
}

impl Phase {
    /// The first token of a request comes of its prompt, also where nobody said so.
    pub(crate) const fn of(token: &Token) -> Self {
        if token.prefill || token.index == 0 { Self::Prefill } else { Self::Decode }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Filters {
    /// Nothing is left out.
    pub(crate) fn is_all(&self) -> bool {
        self.words().is_empty()
    }

    /// Tokens are chosen by something else than their time.
    pub(super) fn is_by_token(&self) -> bool {
        !self.request.is_empty()
            || !self.tenant.is_empty()
            || self.phase.is_some()
            || self.slower_than.is_some()
            || self.faster_than.is_some()
    }

    /// What is selected, for a title.
    pub(crate) fn words(&self) -> Vec<String> {
        let shown = |duration: Duration| flamegraphs::duration(ns(duration));
        let listed = |what: &str, values: &[String]| {
            (!values.is_empty()).then(|| format!("{what} {}", clean(&values.join(", "), 60)))
        };
        let processes: Vec<String> = self.process.iter().map(u32::to_string).collect();
        let window = match (self.from, self.to) {
            (None, None) => None,
            (from, None) => Some(format!("from {} on", shown(from.unwrap_or_default()))),
            (None, Some(to)) => Some(format!("until {}", shown(to))),
            (Some(from), Some(to)) => Some(format!("{} – {}", shown(from), shown(to))),
        };
        [
            listed("request", &self.request),
            listed("tenant", &self.tenant),
            self.phase.map(|phase| phase.name().to_owned()),
            self.slower_than.map(|least| format!("latency ≥ {}", shown(least))),
            self.faster_than.map(|most| format!("latency < {}", shown(most))),
            listed("thread", &self.thread),
            listed("pid", &processes),
            window,
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// The time that is selected, CLOCK_MONOTONIC ns.
    pub(super) fn window(&self, tables: &Tables) -> Range<u64> {
        let at = |offset: Duration| tables.meta.started_ns.saturating_add(ns(offset));
        self.from.map_or(0, at)..self.to.map_or(u64::MAX, at)
    }

    pub(super) fn has_thread(&self, names: &ThreadNames, (tgid, tid): (u32, u32)) -> bool {
        let is_it = |wanted: &String| {
            wanted.parse() == Ok(tid) || names.known((tgid, tid)).is_some_and(|name| name == wanted)
        };
        (self.process.is_empty() || self.process.contains(&tgid))
            && (self.thread.is_empty() || self.thread.iter().any(is_it))
    }

    /// The selected tokens of known latency, in their order.
    ///
    /// # Errors
    /// When a request that was named is not there.
    pub(super) fn tokens<'a>(&self, tables: &'a Tables) -> Result<Vec<&'a Token>> {
        let mut wanted: HashSet<u64> = HashSet::new();
        for id in &self.request {
            let found = find(tables, id);
            if found.is_empty() {
                bail!(
                    "no request `{}` in the capture; `tracer report` names the slowest ones",
                    clean(id, 80)
                );
            }
            wanted.extend(found.iter().map(|request| request.id));
        }
        let requests: HashMap<u64, &Request> = tables.requests.iter().map(|r| (r.id, r)).collect();
        let window = self.window(tables);
        let is_wanted = |token: &&Token| {
            let tenant = requests.get(&token.request).map_or("", |request| request.tenant_id.as_str());
            let Some(latency_ns) = token.latency_ns else { return false };
            (self.request.is_empty() || wanted.contains(&token.request))
                && (self.tenant.is_empty() || self.tenant.iter().any(|name| name == tenant))
                && self.phase.is_none_or(|phase| phase == Phase::of(token))
                && self.slower_than.is_none_or(|least| latency_ns >= ns(least))
                && self.faster_than.is_none_or(|most| latency_ns < ns(most))
                && window.contains(&token.delivered_ns)
        };
        Ok(tables.tokens.iter().filter(is_wanted).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;
    use clap::Parser;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        filters: Filters,
    }

    fn parse(words: &str) -> Filters {
        Alone::try_parse_from(std::iter::once("x").chain(words.split_whitespace())).unwrap().filters
    }

    #[test]
    fn tokens_are_selected_by_all_filters_together() {
        let mut tables = tables();
        tables.requests.iter_mut().filter(|r| r.id % 2 == 0).for_each(|r| r.tenant_id = "even".into());
        let n = |words: &str| parse(words).tokens(&tables).unwrap().len();
        let all = tables.tokens.iter().filter(|token| token.latency_ns.is_some()).count();
        assert_eq!((n(""), n("--phase prefill") + n("--phase decode")), (all, all));
        assert_eq!(n("--request #3 --request req-3 --phase prefill"), 1);
        assert_eq!(n("--tenant even --phase prefill"), 20);
        assert_eq!(n("--slower-than 1ms") + n("--faster-than 1ms"), all);
        let (first, last) = (n("--from 0 --to 1us"), n("--from 1000h"));
        assert_eq!((first, last), (0, 0));
        assert!(parse("--request nobody").tokens(&tables).is_err());
    }

    #[test]
    fn what_was_selected_is_said() {
        assert!(parse("").is_all() && !parse("--process 7").is_all());
        let words = parse("--tenant a --phase decode --slower-than 5ms --from 2s --to 3s").words();
        assert_eq!(words, ["tenant a", "decode", "latency ≥ 5 ms", "2 s – 3 s"]);
        assert!(parse("--thread x").words() == ["thread x"] && !parse("--thread x").is_by_token());
    }
}

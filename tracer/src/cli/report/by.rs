//! `tracer report --by`: latencies and shares of the GPU's time by what requests and steps are.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use clap::ValueEnum;
use serde::Serialize;
use tracer_abi::mark::{FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP};

use crate::cli::table::{Side, Style, Table, WIDTH, cut};
use crate::cli::units::{clean, count, duration};
use crate::hex::hex;
use crate::latency::Distribution;
use crate::timeline::rows::{Request, Step, Token};
use crate::timeline::shares::{Weights, shares};
use crate::timeline::tables::Tables;

/// Rows that the text shows; JSON has all.
const MOST_ROWS: usize = 50;

/// What tells requests and steps apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Property {
    TenantId,
    Model,
    ModelVersion,
    EngineHash,
    Adapters,
    KvCacheStrategy,
    /// The client's name of the request
    RequestId,
    FinishReason,
    /// The power of two that holds the number of prompt tokens
    PromptTokens,
    /// Requests that the step served
    BatchSize,
    /// Prefill or decode
    Phase,
    /// The thread that ran the step
    Thread,
    /// UUID of the device that ran the step
    Gpu,
    Rank,
}

impl Property {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Latencies and shares by some properties.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct By {
    pub(crate) schema: &'static str,
    pub(crate) simulated_gpu: bool,
    pub(crate) by: Vec<String>,
    /// Tenants are told apart though that was not asked for.
    pub(crate) tenants_kept_apart: bool,
    /// How many times the weight of a decoded token a token of a prompt has.
    pub(crate) prefill_weight: f64,
    pub(crate) rows: Vec<Row>,
    /// Of steps whose batch is not known.
    pub(crate) unshared_step_ns: u64,
    pub(crate) unshared_gpu_ns: u64,
}

/// What has the same values.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    /// In the order of `by`; empty when not known.
    pub(crate) values: Vec<String>,
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
    /// Shares of steps: of the time from enqueue to completion, and of the GPU spans.
    pub(crate) step_ns: u64,
    pub(crate) gpu_ns: u64,
    /// Of the GPU spans of all steps, or (without GPU times) of their time.
    pub(crate) share: f64,
    pub(crate) ttft_p50_ns: Option<u64>,
    pub(crate) ttft_p99_ns: Option<u64>,
    pub(crate) itl_p50_ns: Option<u64>,
    pub(crate) itl_p99_ns: Option<u64>,
}

/// A row that is being made.
#[derive(Default)]
struct Sum {
    requests: HashSet<u64>,
    row: Row,
    ttft: Distribution,
    itl: Distribution,
}

/// What properties are looked up in.
struct Known<'a> {
    steps: HashMap<u64, &'a Step>,
    requests: HashMap<u64, &'a Request>,
    batches: HashMap<u64, u64>,
}

impl Known<'_> {
    /// Empty when not known.
    fn value(&self, property: Property, request: Option<u64>, step: Option<u64>, prefill: bool) -> String {
        let request = request.and_then(|id| self.requests.get(&id));
        let step = step.and_then(|id| self.steps.get(&id));
        let value = match property {
            Property::TenantId => request.map(|request| request.tenant_id.clone()),
            Property::Model => request.map(|request| request.model.clone()),
            Property::ModelVersion => request.map(|request| request.model_version.clone()),
            Property::EngineHash => request.map(|request| request.engine_hash.clone()),
            Property::Adapters => request.map(|request| request.adapters.clone()),
            Property::KvCacheStrategy => request.map(|request| request.kv_cache_strategy.clone()),
            Property::RequestId => request.map(|request| request.request_id.clone()),
            Property::FinishReason => request.map(|request| finish(request).to_owned()),
            Property::PromptTokens => request.and_then(|request| request.prompt_tokens).map(power_of_two),
            Property::BatchSize => step.and_then(|step| self.batches.get(&step.id)).map(u64::to_string),
            Property::Phase => Some(if prefill { "prefill" } else { "decode" }.to_owned()),
            Property::Thread => step.map(|step| format!("{}/{}", step.process.tgid, step.tid)),
            Property::Gpu => step.and_then(|step| step.device_uuid).map(|uuid| hex(&uuid)),
            Property::Rank => step.map(|step| step.rank.to_string()),
        };
        value.unwrap_or_default()
    }
}

impl By {
    /// Tenants are kept apart unless they are asked for, or `mix_tenants`.
    pub(super) fn new(tables: &Tables, asked: &[Property], mix_tenants: bool, weights: Weights) -> Self {
        let mut by: Vec<Property> = Vec::new();
        for property in asked {
            if !by.contains(property) {
                by.push(*property);
            }
        }
        let tenants: BTreeSet<&str> =
            tables.requests.iter().map(|request| request.tenant_id.as_str()).collect();
        let apart = tenants.len() > 1 && !mix_tenants && !by.contains(&Property::TenantId);
        if apart {
            by.insert(0, Property::TenantId);
        }
        let known = Known {
            steps: tables.steps.iter().map(|step| (step.id, step)).collect(),
            requests: tables.requests.iter().map(|request| (request.id, request)).collect(),
            batches: tables.batches(),
        };
        let key = |request, step, prefill| -> Vec<String> {
            by.iter().map(|property| known.value(*property, request, step, prefill)).collect()
        };
        let mut sums: BTreeMap<Vec<String>, Sum> = BTreeMap::new();
        let (mut shared_step_ns, mut shared_gpu_ns) = (0, 0);
        for share in shares(&tables.steps, &tables.requests, &tables.tokens, weights) {
            let sum = sums.entry(key(share.request, Some(share.step), share.prefill)).or_default();
            sum.row.step_ns += share.step_ns;
            sum.row.gpu_ns += share.gpu_ns.unwrap_or(0);
            sum.requests.extend(share.request);
            shared_step_ns += share.step_ns;
            shared_gpu_ns += share.gpu_ns.unwrap_or(0);
        }
        for token in &tables.tokens {
            let sum = sums.entry(key(Some(token.request), token.step, token.prefill)).or_default();
            sum.requests.insert(token.request);
            sum.row.tokens += 1;
            let Token { choice, index, latency_ns: Some(ns), .. } = *token else { continue };
            match (choice, index) {
                (0, 0) => sum.ttft.record(ns),
                (_, 0) => {}
                _ => sum.itl.record(ns),
            }
        }
        let step_ns: u64 = tables.steps.iter().filter_map(Step::duration_ns).sum();
        let gpu_ns: u64 = tables.steps.iter().filter_map(|step| step.gpu).map(|gpu| gpu.span_ns).sum();
        let mut rows: Vec<Row> =
            sums.into_iter().map(|(values, sum)| sum.row(values, step_ns, gpu_ns)).collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.gpu_ns, row.step_ns, row.tokens)));
        Self {
            schema: "tracer.report.by/1",
            simulated_gpu: tables.meta.simulated,
            by: by.iter().map(|property| property.name()).collect(),
            tenants_kept_apart: apart,
            prefill_weight: weights.prefill,
            rows,
            unshared_step_ns: step_ns - shared_step_ns,
            unshared_gpu_ns: gpu_ns - shared_gpu_ns,
        }
    }

    /// A table, with what is to be known about it.
    pub(super) fn text(&self, style: Style) -> String {
        use Side::{Left, Right};
        let has_gpu = self.rows.iter().any(|row| row.gpu_ns > 0);
        let mut columns: Vec<(String, Side)> = self.by.iter().map(|name| (name.clone(), Left)).collect();
        let time = if has_gpu { "GPU time" } else { "step time" };
        for name in ["requests", "tokens", time, "share", "ttft p50", "p99", "itl p50", "p99"] {
            columns.push((name.to_owned(), Right));
        }
        let mut table = Table::with_columns(columns);
        let optional = |ns: Option<u64>| ns.map_or("–".to_owned(), duration);
        for row in self.rows.iter().take(MOST_ROWS) {
            let unknown = |value: &String| if value.is_empty() { "–".to_owned() } else { clean(value, 24) };
            let mut cells: Vec<String> = row.values.iter().map(unknown).collect();
            cells.extend([
                count(row.requests),
                count(row.tokens),
                duration(if has_gpu { row.gpu_ns } else { row.step_ns }),
                format!("{:.1} %", 100.0 * row.share),
                optional(row.ttft_p50_ns),
                optional(row.ttft_p99_ns),
                optional(row.itl_p50_ns),
                optional(row.itl_p99_ns),
            ]);
            table.push_row(cells);
        }
        let mut text = table.render(style);
        let mut note =
            |line: String| text.push_str(&format!("{}\n", style.faint(&cut(&format!("  {line}"), WIDTH))));
        if self.rows.len() > MOST_ROWS {
            note(format!("and {} more rows (--json has all)", self.rows.len() - MOST_ROWS));
        }
        let unshared = if has_gpu { self.unshared_gpu_ns } else { self.unshared_step_ns };
        if unshared > 0 {
            note(format!("{} more of steps whose batch is not known", duration(unshared)));
        }
        if self.tenants_kept_apart {
            note("Tenants are kept apart; --mix-tenants sums over them.".to_owned());
        }
        note(format!(
            "Steps are split by tokens; one of a prompt weighs {} times one that is decoded (--prefill-weight).",
            self.prefill_weight
        ));
        text
    }
}

impl Sum {
    fn row(self, values: Vec<String>, step_ns: u64, gpu_ns: u64) -> Row {
        let of = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        Row {
            values,
            requests: self.requests.len() as u64,
            share: if gpu_ns > 0 { of(self.row.gpu_ns, gpu_ns) } else { of(self.row.step_ns, step_ns) },
            ttft_p50_ns: self.ttft.quantile(0.5).value(),
            ttft_p99_ns: self.ttft.quantile(0.99).value(),
            itl_p50_ns: self.itl.quantile(0.5).value(),
            itl_p99_ns: self.itl.quantile(0.99).value(),
            ..self.row
        }
    }
}

fn finish(request: &Request) -> &'static str {
    match (request.end_ns, request.finish_reason) {
        (None, _) => "running",
        (_, FINISH_STOP) => "stop",
        (_, FINISH_LENGTH) => "length",
        (_, FINISH_CANCELLED) => "cancelled",
        (_, FINISH_ERROR) => "error",
        _ => "",
    }
}

/// The power of two that holds a number: `512` for 257 to 512.
fn power_of_two(n: u32) -> String {
    n.checked_next_power_of_two().map_or_else(|| "4294967296".to_owned(), |power| power.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;

    #[test]
    fn shares_sum_to_all_steps_whatever_is_asked_for() {
        let mut tables = tables();
        for request in &mut tables.requests {
            request.tenant_id = if request.id % 4 == 0 { "gold\x1b[31m" } else { "free" }.into();
        }
        let gpu_ns: u64 = tables.steps.iter().filter_map(|step| step.gpu).map(|gpu| gpu.span_ns).sum();
        for asked in Property::value_variants() {
            let by = By::new(&tables, &[*asked, *asked], false, Weights::default());
            let sum: u64 = by.rows.iter().map(|row| row.gpu_ns).sum();
            assert_eq!(sum + by.unshared_gpu_ns, gpu_ns, "{asked:?}");
            assert_eq!(by.rows.iter().map(|row| row.tokens).sum::<u64>(), 1_000);
            assert!((by.rows.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
            assert_eq!(by.tenants_kept_apart, *asked != Property::TenantId);
            let text = by.text(Style::default());
            assert!(
                text.lines().all(|line| line.chars().count() <= WIDTH) && !text.contains('\x1b'),
                "{text}"
            );
        }
        let by = By::new(&tables, &[Property::TenantId], false, Weights::default());
        println!("{}", by.text(Style::default()));
        assert_eq!((by.rows.len(), by.rows[0].values[0].as_str(), by.rows[0].requests), (2, "free", 30));
        assert_eq!(By::new(&tables, &[Property::Phase], true, Weights::default()).rows.len(), 2);
    }
}

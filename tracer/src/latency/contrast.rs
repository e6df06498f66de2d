//! What slow tokens have in common, against usual ones.
//!
//! Slow are those from a quantile on, usual the middle half. Means of the parts of their budgets say what grew; how often
//! a property (a batch size, a tenant, a thread) is among them says where. Tokens of one step are slow together, so
//! properties are counted by step and not by token, and nothing is said that chance explains.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use crate::hex::hex;
use crate::latency::Latency;
use crate::timeline::budget::{Blocked, Budget, ByToken, Label};
use crate::timeline::rows::{Request, Step, Token};
use crate::timeline::tables::Tables;

/// Least slow tokens for a comparison, and the quantiles from which they are slow, best first.
const LEAST_SLOW: usize = 10;
const QUANTILES: [f64; 2] = [0.99, 0.9];
/// A property is named when it is in this many slow steps, this much more often than usual, and further from it than this
/// many standard deviations (two proportions, pooled).
const LEAST_STEPS: u64 = 5;
const LEAST_RATIO: f64 = 1.5;
const LEAST_SIGMAS: f64 = 4.0;
/// Values of a property beyond this many are not counted.
const MAX_VALUES: usize = 10_000;

/// Slow tokens against usual ones, of one latency.
#[derive(Clone, Debug, PartialEq)]
pub struct Contrast {
    pub latency: Latency,
    /// Tokens with a budget.
    pub tokens: u64,
    /// From which quantile on tokens are slow; `None`: from a latency that was given.
    pub quantile: Option<f64>,
    pub slow: Group,
    pub usual: Group,
    /// Parts of the budget that are longer in slow tokens, by how much.
    pub grown: Vec<Grown>,
    /// What is more frequent among them, most telling first.
    pub frequent: Vec<Frequent>,
}

/// Tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    pub n: u64,
    /// Steps that generated them.
    pub steps: u64,
    /// Shortest and longest latency, ns.
    pub least_ns: u64,
    pub most_ns: u64,
    pub mean_ns: f64,
}

/// A part of the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grown {
    pub label: Label,
    /// What it was blocked on most often, of the slow ones.
    pub blocked: Option<Blocked>,
    /// Means, ns.
    pub slow_ns: f64,
    pub usual_ns: f64,
    /// Of what slow tokens took longer; parts that shrank can make these sum to more than 1.
    pub share: f64,
}

/// A value of a property.
#[derive(Clone, Debug, PartialEq)]
pub struct Frequent {
    pub property: &'static str,
    pub value: String,
    /// Steps with it, and all: of slow tokens, and of usual ones.
    pub slow: (u64, u64),
    pub usual: (u64, u64),
    /// How many times as frequent; infinite where no usual one has it.
    pub ratio: f64,
}

/// Too few tokens for a comparison: how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFew(pub u64);

/// A token with its budget, and what is known about it.
struct Case<'a> {
    token: &'a Token,
    budget: &'a Budget,
}

/// The tokens of a recording, to be compared by any latency.
pub struct Contrasts<'a> {
    tables: &'a Tables,
    budgets: ByToken<'a>,
    properties: Properties<'a>,
}

impl<'a> Contrasts<'a> {
    #[must_use]
    pub fn new(tables: &'a Tables) -> Self {
        Self { tables, budgets: ByToken::new(&tables.budgets), properties: Properties::new(tables) }
    }

    /// Compares tokens by [`Latency::Ttft`] or [`Latency::Itl`]; slow ones are those of at least `slow_ns`, where given.
    ///
    /// # Errors
    /// When there are too few.
    pub fn by(&self, latency: Latency, slow_ns: Option<u64>) -> Result<Contrast, TooFew> {
        let of_latency = self.tables.plain_tokens().filter(|token| latency.is_of(token));
        let mut cases: Vec<Case> =
            of_latency.filter_map(|token| Some(Case { token, budget: self.budgets.of(token)? })).collect();
        cases.sort_by_key(|case| case.budget.latency_ns);
        let n = cases.len();
        let too_few = TooFew(n as u64);
        let at = |q: f64| (n as f64 * q).ceil() as usize;
        let (from, quantile) = match slow_ns {
            Some(slow_ns) => (cases.partition_point(|case| case.budget.latency_ns < slow_ns), None),
            None => {
                let q = QUANTILES.into_iter().find(|q| n - at(*q) >= LEAST_SLOW).ok_or(too_few)?;
                (at(q), Some(q))
            }
        };
        let (slow, usual) =
            (cases.get(from..).unwrap_or_default(), cases.get(at(0.25)..at(0.75)).unwrap_or_default());
        if slow.len() < LEAST_SLOW || usual.len() < LEAST_SLOW {
            return Err(too_few);
        }
        let groups = [Group::new(slow), Group::new(usual)];
        Ok(Contrast {
            latency,
            tokens: n as u64,
            quantile,
            slow: groups[0],
            usual: groups[1],
            grown: grown(slow, usual, groups[0].mean_ns - groups[1].mean_ns),
            frequent: self.properties.frequent(slow, usual),
        })
    }
}

impl Group {
    fn new(cases: &[Case]) -> Self {
        let sum: u128 = cases.iter().map(|case| u128::from(case.budget.latency_ns)).sum();
        let latency = |case: Option<&Case>| case.map_or(0, |case| case.budget.latency_ns);
        Self {
            n: cases.len() as u64,
            steps: cases.iter().map(unit).collect::<HashSet<_>>().len() as u64,
            least_ns: latency(cases.first()),
            most_ns: latency(cases.last()),
            mean_ns: sum as f64 / cases.len() as f64,
        }
    }
}

/// Tokens of a step are one case; a token whose step is not known is one.
fn unit(case: &Case) -> (Option<u64>, u64, u32, u32) {
    let Token { request, choice, index, step, .. } = case.token;
    step.map_or((None, *request, *choice, *index), |step| (Some(step), 0, 0, 0))
}

fn mean_ns(cases: &[Case], label: Label) -> f64 {
    let sum: u128 = cases.iter().map(|case| u128::from(case.budget.part_ns(label))).sum();
    sum as f64 / cases.len() as f64
}

fn grown(slow: &[Case], usual: &[Case], excess_ns: f64) -> Vec<Grown> {
    let mut grown: Vec<Grown> = Label::PARTS
        .into_iter()
        .map(|label| {
            let (slow_ns, usual_ns) = (mean_ns(slow, label), mean_ns(usual, label));
            let mut on: BTreeMap<Blocked, u64> = BTreeMap::new();
            for budget in slow.iter().map(|case| case.budget).filter(|_| label == Label::HostBlocked) {
                if let Some(blocked) = budget.blocked {
                    *on.entry(blocked).or_default() += budget.part_ns(label);
                }
            }
            let blocked = on.into_iter().max_by_key(|(_, ns)| *ns).map(|(on, _)| on);
            let share = if excess_ns > 0.0 { (slow_ns - usual_ns) / excess_ns } else { 0.0 };
            Grown { label, blocked, slow_ns, usual_ns, share }
        })
        .filter(|part| part.slow_ns > part.usual_ns)
        .collect();
    grown.sort_by(|a, b| (b.slow_ns - b.usual_ns).total_cmp(&(a.slow_ns - a.usual_ns)));
    grown
}

/// What tokens can have in common.
const PROPERTIES: [&str; 12] = [
    "token index",
    "batch size",
    "phase",
    "prompts in the batch",
    "engine thread",
    "GPU",
    "delivering thread",
    "tenant",
    "model",
    "model version",
    "adapters",
    "prompt tokens",
];

/// What a property is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Value<'a> {
    /// The power of two that holds a number, by its upper end.
    UpTo(u64),
    Thread {
        tgid: u32,
        tid: u32,
    },
    Gpu([u8; 16]),
    Text(&'a str),
}

/// Steps with each value of each property, and with any value of it.
struct Counted<'a> {
    values: HashMap<(usize, Value<'a>), u64>,
    all: [u64; PROPERTIES.len()],
}

/// What is known of tokens.
struct Properties<'a> {
    steps: HashMap<u64, &'a Step>,
    requests: HashMap<u64, &'a Request>,
    batches: HashMap<u64, u64>,
}

impl<'a> Properties<'a> {
    fn new(tables: &'a Tables) -> Self {
        Self {
            steps: tables.steps.iter().map(|step| (step.id, step)).collect(),
            requests: tables.requests.iter().map(|request| (request.id, request)).collect(),
            batches: tables.batches(),
        }
    }

    /// The value of each of [`PROPERTIES`], where it is known of a token.
    fn of(&self, case: &Case) -> [Option<Value<'a>>; PROPERTIES.len()] {
        let token = case.token;
        let step = token.step.and_then(|id| self.steps.get(&id));
        let request = self.requests.get(&token.request);
        let prompts = |step: &&Step| step.slots.iter().any(|slot| slot.phase == tracer_abi::mark::PREFILL);
        let prompts = step.filter(|_| !token.prefill).map(prompts);
        let text = |text: fn(&Request) -> &str| {
            request.map(|request| text(request)).filter(|text| !text.is_empty()).map(Value::Text)
        };
        [
            Some(Value::range(token.index.into())),
            token.step.and_then(|id| self.batches.get(&id)).map(|n| Value::range(*n)),
            Some(Value::Text(if token.prefill { "prefill" } else { "decode" })),
            prompts.map(|any| Value::Text(if any { "some" } else { "none" })),
            step.map(|step| Value::Thread { tgid: step.process.tgid, tid: step.tid }),
            step.and_then(|step| step.device_uuid).map(Value::Gpu),
            Some(Value::Thread { tgid: token.process.tgid, tid: token.tid }),
            text(|request| &request.tenant_id),
            text(|request| &request.model),
            text(|request| &request.model_version),
            text(|request| &request.adapters),
            request.and_then(|request| request.prompt_tokens).map(|n| Value::range(n.into())),
        ]
    }

    fn count(&self, cases: &[Case]) -> Counted<'a> {
        // There are many tokens and few values: both are numbered.
        let mut numbers: HashMap<(usize, Value), (usize, u64)> = HashMap::new();
        let mut all: [HashSet<usize>; PROPERTIES.len()] = Default::default();
        let (mut units, mut seen) = (HashMap::new(), HashSet::new());
        for case in cases {
            let next = units.len();
            let unit: usize = *units.entry(unit(case)).or_insert(next);
            for (property, value) in self.of(case).into_iter().enumerate() {
                let Some(value) = value else { continue };
                let next = numbers.len();
                let key = (property, value);
                let entry = match numbers.get_mut(&key) {
                    Some(known) => Some(known),
                    None if next < MAX_VALUES => Some(numbers.entry(key).or_insert((next, 0))),
                    None => None,
                };
                // A unit has the property where it has a value of it.
                match entry {
                    Some((number, count)) if seen.insert((*number, unit)) => *count += 1,
                    Some(_) => continue,
                    None => {}
                }
                all[property].insert(unit);
            }
        }
        let values = numbers.into_iter().map(|(key, (_, count))| (key, count)).collect();
        Counted { values, all: all.map(|with| with.len() as u64) }
    }

    fn frequent(&self, slow: &[Case], usual: &[Case]) -> Vec<Frequent> {
        let (slow, usual) = (self.count(slow), self.count(usual));
        let mut found: Vec<(f64, Frequent)> = slow
            .values
            .into_iter()
            .filter_map(|((property, value), k)| {
                let (n, usual_n) = (slow.all[property], usual.all[property]);
                let usual_k = usual.values.get(&(property, value)).copied().unwrap_or(0);
                if usual_n == 0 {
                    return None;
                }
                let (p, q) = (k as f64 / n as f64, usual_k as f64 / usual_n as f64);
                let pooled = (k + usual_k) as f64 / (n + usual_n) as f64;
                let deviation = (pooled * (1.0 - pooled) * (1.0 / n as f64 + 1.0 / usual_n as f64)).sqrt();
                let sigmas = (p - q) / deviation;
                let says = k >= LEAST_STEPS && p >= q * LEAST_RATIO && sigmas >= LEAST_SIGMAS;
                says.then(|| {
                    let (property, value) = (PROPERTIES[property], value.to_string());
                    let (slow, usual) = ((k, n), (usual_k, usual_n));
                    (sigmas, Frequent { property, value, slow, usual, ratio: p / q })
                })
            })
            .collect();
        found.sort_by(|(a, x), (b, y)| {
            b.total_cmp(a).then_with(|| (x.property, &x.value).cmp(&(y.property, &y.value)))
        });
        found.into_iter().map(|(_, frequent)| frequent).collect()
    }
}

impl Value<'_> {
    fn range(n: u64) -> Self {
        Self::UpTo(if n == 0 { 0 } else { n.checked_next_power_of_two().unwrap_or(u64::MAX) })
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UpTo(n @ 0..=2) => write!(f, "{n}"),
            Self::UpTo(high) => write!(f, "{}–{high}", high / 2 + 1),
            Self::Thread { tgid, tid } => write!(f, "{tid} of pid {tgid}"),
            Self::Gpu(uuid) => f.write_str(&hex(uuid)),
            Self::Text(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::testing::tables;

    /// Tables whose tokens have this latency, all of it one part.
    fn cut(cut: impl Fn(&Token) -> (u64, Label)) -> Tables {
        let mut tables = tables();
        tables.budgets.retain(|budget| budget.index == 0);
        for token in tables.tokens.iter_mut().filter(|token| token.index > 0) {
            let (latency_ns, label) = cut(token);
            token.latency_ns = Some(latency_ns);
            let mut budget = Budget {
                request: token.request,
                index: token.index,
                latency_ns,
                blocked: (label == Label::HostBlocked).then_some(Blocked::Futex),
                ..Budget::default()
            };
            budget.parts_ns[label as usize] = latency_ns;
            tables.budgets.push(budget);
        }
        tables
    }

    #[test]
    fn what_grew_and_where() {
        // Every tenth request's tokens wait for a lock.
        let mut tables = cut(|token| match token.request % 10 {
            3 => (50_000, Label::HostBlocked),
            _ => (5_000 + u64::from(token.index), Label::GpuSpan),
        });
        for request in &mut tables.requests {
            request.tenant_id = if request.id % 10 == 3 { "loud" } else { "quiet" }.into();
        }
        let found = Contrasts::new(&tables).by(Latency::Itl, Some(20_000)).unwrap();
        assert_eq!((found.slow.n, found.slow.least_ns, found.quantile), (96, 50_000, None));
        let top = found.grown[0];
        assert_eq!((top.label, top.blocked, top.usual_ns), (Label::HostBlocked, Some(Blocked::Futex), 0.0));
        assert!(top.share > 1.0 && found.grown.len() == 1, "the GPU's part shrank: {found:?}");
        let tenants: Vec<_> =
            found.frequent.iter().filter(|f| f.property == "tenant").map(|f| f.value.as_str()).collect();
        assert_eq!(tenants, ["loud"]);
        assert!(found.frequent.iter().all(|f| f.ratio >= LEAST_RATIO));
    }

    #[test]
    fn chance_and_thin_data_say_nothing() {
        let tables = cut(|token| {
            (1_000 + (token.request * 7_919 + u64::from(token.index) * 104_729) % 997, Label::GpuSpan)
        });
        let found = Contrasts::new(&tables).by(Latency::Itl, None).unwrap();
        assert_eq!((found.quantile, found.frequent.len()), (Some(0.9), 0), "{:?}", found.frequent);
        assert_eq!(Contrasts::new(&tables).by(Latency::Ttft, None), Err(TooFew(40)));
        assert_eq!(Contrasts::new(&tables).by(Latency::Itl, Some(1_990)), Err(TooFew(960)));
    }

    #[test]
    fn ranges_are_powers_of_two() {
        let ranges: Vec<String> =
            [0, 1, 2, 3, 4, 5, 16, 17].into_iter().map(|n| Value::range(n).to_string()).collect();
        assert_eq!(ranges, ["0", "1", "2", "3–4", "3–4", "5–8", "9–16", "17–32"]);
        assert!(Value::range(u64::MAX).to_string().contains('–'));
    }
}

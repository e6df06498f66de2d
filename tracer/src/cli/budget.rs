//! Budgets of tokens in words, bars and JSON.

use std::collections::BTreeMap;

use flamegraphs::Hue;

use crate::timeline::budget::{Budget, Label};

/// Name → ns, without those that are zero.
pub(crate) fn parts(budget: &Budget) -> BTreeMap<&'static str, u64> {
    Label::PARTS
        .into_iter()
        .map(|label| (label.name(), budget.part_ns(label)))
        .filter(|(_, ns)| *ns > 0)
        .collect()
}

/// The name of a part, with what it was blocked on.
pub(crate) fn name(label: Label, budget: &Budget) -> String {
    match (label, budget.blocked) {
        (Label::HostBlocked, Some(on)) => format!("{}: {}", label.name(), on.name()),
        _ => label.name().to_owned(),
    }
}

/// The longest part, and its share.
pub(crate) fn longest(budget: &Budget) -> String {
    let top = budget.top();
    let share = 100.0 * budget.part_ns(top) as f64 / budget.latency_ns.max(1) as f64;
    format!("{} {share:.0} %", name(top, budget))
}

/// The character of a part in a bar.
pub(crate) const fn mark(label: Label) -> char {
    match label {
        Label::EventLoopLag => 'l',
        Label::Queue => 'q',
        Label::OtherSteps => 'o',
        Label::HostRunning => 'r',
        Label::HostRunqueue => 'c',
        Label::HostBlocked => 'b',
        Label::Enqueue => 'e',
        Label::GpuWait => 'w',
        Label::GpuSpan => '#',
        Label::NeighbourPrefill => 'P',
        Label::HostObserved => '~',
        Label::SyncWake => 's',
        Label::Deliver => 'd',
        Label::Unattributed => '?',
        Label::NagleHold => 'n',
    }
}

/// The colour of a part in pictures, and whether it is hatched: what one waits for alike has one colour.
pub(crate) const fn looks(label: Label) -> (Hue, bool) {
    match label {
        Label::EventLoopLag => (Hue::Black, false),
        Label::Queue => (Hue::Purple, false),
        Label::OtherSteps => (Hue::Purple, true),
        Label::HostRunning => (Hue::Orange, false),
        Label::HostRunqueue => (Hue::Orange, true),
        Label::HostBlocked => (Hue::Vermilion, false),
        Label::Enqueue => (Hue::Yellow, false),
        Label::GpuWait => (Hue::Sky, false),
        Label::GpuSpan => (Hue::Blue, false),
        Label::NeighbourPrefill => (Hue::Blue, true),
        Label::HostObserved => (Hue::Sky, true),
        Label::SyncWake => (Hue::Green, true),
        Label::Deliver => (Hue::Green, false),
        Label::Unattributed => (Hue::Grey, true),
        Label::NagleHold => (Hue::Black, true),
    }
}

/// The parts in proportion, `scale_ns` being `width` characters.
pub(crate) fn bar(budget: &Budget, scale_ns: u64, width: usize) -> String {
    let most = width as u128;
    let columns = |ns: u64| (u128::from(ns) * most / u128::from(scale_ns.max(1))).min(most) as usize;
    let (mut bar, mut until_ns) = (String::new(), 0);
    // Edges are rounded, not widths: so the bar is as long as the latency.
    for label in Label::PARTS {
        let from = columns(until_ns);
        until_ns += budget.part_ns(label);
        bar.extend(std::iter::repeat_n(mark(label), columns(until_ns) - from));
    }
    bar
}

/// What the characters of some bars mean.
pub(crate) fn legend<'a>(budgets: impl Iterator<Item = &'a Budget> + Clone) -> impl Iterator<Item = String> {
    let occurs = move |label: &Label| budgets.clone().any(|budget| budget.part_ns(*label) > 0);
    Label::PARTS.into_iter().filter(occurs).map(|label| format!("{} {}", mark(label), label.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::budget::Blocked;

    fn budget(parts: &[(Label, u64)]) -> Budget {
        let mut budget = Budget { blocked: Some(Blocked::Futex), ..Budget::default() };
        for (label, ns) in parts {
            budget.parts_ns[*label as usize] = *ns;
            budget.latency_ns += ns;
        }
        budget
    }

    #[test]
    fn bars_are_as_long_as_latencies() {
        let budget = budget(&[(Label::HostBlocked, 30), (Label::GpuSpan, 50), (Label::Deliver, 1)]);
        assert_eq!(bar(&budget, 81, 81), "b".repeat(30) + &"#".repeat(50) + "d");
        assert_eq!(bar(&budget, 81, 8), "bb#####d");
        assert_eq!(bar(&budget, 10, 4), "bbbb");
        assert_eq!(longest(&budget), "gpu_span 62 %");
        assert_eq!(name(Label::HostBlocked, &budget), "host_blocked: futex");
        assert!(legend([&budget].into_iter()).eq(["b host_blocked", "# gpu_span", "d deliver"]));
        assert_eq!(parts(&budget).values().sum::<u64>(), 81);
    }

    #[test]
    fn no_two_parts_look_the_same() {
        let marks: std::collections::HashSet<char> = Label::PARTS.into_iter().map(mark).collect();
        assert_eq!(marks.len(), Label::PARTS.len());
        let looks: Vec<(Hue, bool)> = Label::PARTS.into_iter().map(looks).collect();
        assert!(looks.iter().all(|look| looks.iter().filter(|other| *other == look).count() == 1));
    }
}

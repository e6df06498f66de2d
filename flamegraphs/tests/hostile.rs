//! Strings chosen by others: whatever they hold, a picture is well-formed, carries no markup of theirs, and is the
//! same every time.

use flamegraphs::{
    Axis, Fault, FlameOptions, Folded, GpuBar, Header, HeatmapInput, HistogramInput, Hue, Lane, Loss,
    MatrixCell, MatrixInput, Measure, Panel, Part, PercentileInput, Piece, Point, Quantile, RequestInput,
    Series, StepBar, Stretch, Strip, TokenBar,
};
use proptest::prelude::*;

/// Text as an attacker or an accident would choose it.
fn hostile() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ -~]{0,40}",
        prop::sample::select(vec![
            "<script>alert(1)</script>".to_owned(),
            "]]></script><script>alert(1)</script>".to_owned(),
            "a&b;c 12 34".to_owned(),
            "-->\"'<!--".to_owned(),
            "\u{1b}[31m\0\u{7}\u{202E}\u{FFFF}".to_owned(),
            "שלום \u{2067}مرحبا".to_owned(),
            "# comment 5".to_owned(),
            "x".repeat(10_000),
            "é;".repeat(5_000),
            String::new(),
        ]),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    (hostile(), hostile(), any::<bool>()).prop_map(|(title, subtitle, simulated)| Header {
        title,
        subtitle,
        simulated,
    })
}

/// Parses, and fails on a script that is not inferno's one, a handler other than its `onload`, or a reference out.
fn assert_safe(svg: &str, scripts: usize) -> Result<(), TestCaseError> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(svg, options)
        .map_err(|e| TestCaseError::fail(e.to_string()))?;
    let found = document.descendants().filter(|n| n.tag_name().name() == "script").count();
    prop_assert_eq!(found, scripts);
    for node in document.descendants() {
        for attribute in node.attributes() {
            let name = attribute.name();
            prop_assert!(!name.starts_with("on") || (scripts == 1 && name == "onload"), "handler {}", name);
            prop_assert!(name != "href", "reference to {}", attribute.value());
        }
        if let Some(text) = node.text().filter(|_| node.is_text() && node.parent_element().is_some()) {
            let controls = text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t'));
            prop_assert!(!controls, "control character in {:?}", text);
        }
    }
    Ok(())
}

fn strip() -> impl Strategy<Value = Strip> {
    let times = || prop::collection::vec(any::<(u64, u64)>(), 0..6);
    let lane = (hostile(), hostile(), any::<u64>(), times()).prop_map(|(name, unit, top, points)| Lane {
        name,
        unit,
        top,
        points,
    });
    let held = (any::<u64>(), any::<u64>(), hostile()).prop_map(|(a, b, what)| Stretch { range: a..b, what });
    let fault = (any::<u64>(), hostile()).prop_map(|(at, what)| Fault { at, what });
    (
        hostile(),
        prop::collection::vec(lane, 0..3),
        prop::collection::vec(held, 0..3),
        prop::collection::vec(fault, 0..3),
    )
        .prop_map(|(name, lanes, held, faults)| Strip { name, lanes, held, faults })
}

/// A range, its bound.
type Gpu = ((u64, u64), u64);

/// A range, when the GPU ran it, batch, prompts, whether it is the request's own.
fn step() -> impl Strategy<Value = StepBar> {
    let gpu =
        any::<Option<Gpu>>().prop_map(|gpu| gpu.map(|((a, b), bound_ns)| GpuBar { range: a..b, bound_ns }));
    (hostile(), any::<(u64, u64)>(), gpu, any::<(u64, u64, u64, bool)>()).prop_map(
        |(name, (a, b), gpu, (batch, prompts, prompt_tokens, is_own))| StepBar {
            name,
            range: a..b,
            gpu,
            batch,
            prompts,
            prompt_tokens,
            is_own,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn flame_graphs_are_safe(
        stacks in prop::collection::vec((prop::collection::vec(hostile(), 0..6), 0u64..1_000_000), 1..12),
        header in header(),
        count_name in hostile(),
        factor in any::<f64>(),
    ) {
        let options = FlameOptions { header, count_name, factor, ..FlameOptions::default() };
        let total: u64 = stacks.iter().filter(|s| !s.0.is_empty()).map(|s| s.1).sum();
        let stacks: Folded<1> = stacks.into_iter().map(|(stack, weight)| (stack, [weight])).collect();
        match flamegraphs::flamegraph(&stacks, &options) {
            Ok(svg) => {
                assert_safe(&svg, 1)?;
                let text = stacks.text().unwrap();
                let weights = text.lines().map(|l| l.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap());
                prop_assert_eq!(weights.sum::<u64>(), total);
                let all = format!("total_samples=\"{total}\"");
                prop_assert!(svg.contains(&all), "inferno dropped a line");
                prop_assert_eq!(flamegraphs::flamegraph(&stacks, &options).unwrap(), svg);
            }
            Err(_) => prop_assert_eq!(total, 0),
        }
    }

    #[test]
    fn heatmaps_are_safe(
        points in prop::collection::vec((any::<u64>(), any::<u64>(), hostile()), 1..40),
        header in header(),
        names in (hostile(), hostile(), hostile()),
        losses in prop::collection::vec((any::<u64>(), any::<u64>(), hostile()), 0..3),
        strips in prop::collection::vec(strip(), 0..20),
        kind in 0..3,
    ) {
        let points: Vec<Point<'_>> =
            points.iter().map(|(x, latency_ns, id)| Point { x: *x, latency_ns: *latency_ns, id }).collect();
        let axis = match kind {
            0 => Axis::Time { name: names.2.clone(), range: 0..u64::MAX },
            1 => Axis::TokenIndex,
            _ => Axis::LogTokenIndex,
        };
        let losses = losses.into_iter().map(|(a, b, what)| Loss { range: a..b, what }).collect();
        let (latency_name, count_name, _) = names;
        let input = HeatmapInput { header, axis, latency_name, count_name, points, losses, strips };
        if let Ok(svg) = flamegraphs::heatmap(&input) {
            assert_safe(&svg, 0)?;
            prop_assert_eq!(flamegraphs::heatmap(&input).unwrap(), svg);
        }
    }

    #[test]
    fn histograms_are_safe(
        panels in prop::collection::vec(
            (hostile(), prop::collection::vec((any::<u64>(), any::<u64>()), 0..30),
             prop::collection::vec((hostile(), any::<Option<u64>>()), 0..4)),
            0..6,
        ),
        header in header(),
    ) {
        let panels = panels
            .into_iter()
            .map(|(name, values, quantiles)| Panel {
                name,
                values,
                quantiles: quantiles.into_iter().map(|(name, value_ns)| Quantile { name, value_ns }).collect(),
            })
            .collect();
        if let Ok(svg) = flamegraphs::histogram(&HistogramInput { header, panels }) {
            assert_safe(&svg, 0)?;
        }
    }

    #[test]
    fn differentials_are_safe(
        stacks in prop::collection::vec((prop::collection::vec(hostile(), 0..6), any::<[u32; 2]>()), 1..12),
        header in header(),
    ) {
        let options = FlameOptions { header, ..FlameOptions::default() };
        let stacks = stacks.into_iter().map(|(stack, [a, b])| (stack, [u64::from(a), u64::from(b)]));
        let stacks: Folded<2> = stacks.collect();
        if let Ok(svg) = flamegraphs::differential(&stacks, &options) {
            assert_safe(&svg, 1)?;
            prop_assert_eq!(flamegraphs::differential(&stacks, &options).unwrap(), svg);
        }
    }

    #[test]
    fn requests_are_safe(
        header in header(),
        names in (hostile(), hostile(), hostile(), hostile()),
        tokens in prop::collection::vec((0u32..9, any::<(u64, u64)>(), any::<(u64, u64)>(), 0usize..3), 1..40),
        steps in prop::collection::vec(step(), 0..20),
    ) {
        let (name, what, part, note) = names;
        let parts = [Hue::Blue, Hue::Grey].map(|hue| Part { name: part.clone(), meaning: what.clone(), hue, hatched: hue == Hue::Grey });
        let token = |(lane, (a, b), (c, d), part): (u32, (u64, u64), (u64, u64), usize)| TokenBar {
            name: name.clone(),
            lane,
            range: a.min(b)..b,
            is_first: lane == 0,
            pieces: vec![Piece { range: c..d, part, what: what.clone(), stack: vec![name.clone()] }],
        };
        let input = RequestInput {
            header,
            parts: parts.into(),
            tokens: tokens.into_iter().map(token).collect(),
            steps,
            notes: vec![note],
        };
        let svg = flamegraphs::request(&input).map_err(|e| TestCaseError::fail(e.to_string()))?;
        assert_safe(&svg, 0)?;
        prop_assert_eq!(flamegraphs::request(&input).unwrap(), svg);
    }

    #[test]
    fn percentiles_are_safe(
        header in header(),
        name in hostile(),
        series in prop::collection::vec((hostile(), prop::collection::vec(any::<(u64, u64)>(), 0..30)), 0..8),
    ) {
        let series = series.into_iter().map(|(name, mut values)| {
            values.sort_unstable();
            Series { name, values }
        });
        let input = PercentileInput { header, latency_name: name, series: series.collect() };
        if let Ok(svg) = flamegraphs::percentiles(&input) {
            assert_safe(&svg, 0)?;
        }
    }

    #[test]
    fn matrices_are_safe(
        header in header(),
        names in (hostile(), hostile(), hostile()),
        rows in prop::collection::vec(hostile(), 0..80),
        cells in prop::collection::vec((0usize..90, any::<u64>(), any::<u64>()), 0..60),
        range in any::<(u64, u64)>(),
        columns in 0u64..200,
        counts: bool,
    ) {
        let (time_name, row_name, what) = names;
        let (begin, end) = (range.0.min(range.1), range.0.max(range.1));
        let cells = cells.into_iter().map(|(row, at_ns, value)| MatrixCell { row, at_ns, value });
        let input = MatrixInput {
            header,
            time_name,
            range: begin..end,
            column_ns: (columns > 9).then(|| (end - begin) / columns),
            row_name,
            rows,
            measure: if counts { Measure::Count(what.clone()) } else { Measure::Latency(what.clone()) },
            cells: cells.collect(),
            losses: vec![Loss { range: begin..end, what: what.clone() }],
            empty: what,
        };
        if let Ok(svg) = flamegraphs::matrix(&input) {
            assert_safe(&svg, 0)?;
        }
    }
}

//! The page of `tracer probes`.

use std::fmt::Write as _;

use engines::{Found, Library, Machine, Point};

use super::{Seen, hex};
use crate::cli::{
    table::{Side, Style, Table},
    units::clean,
};

/// Longest texts from outside, in characters.
const NAME: usize = 80;
const TEXT: usize = 500;

/// All libraries, a block for each.
pub(super) fn page(seen: &[Seen], style: Style) -> String {
    let mut out = String::new();
    for (index, seen) in seen.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        block(seen, style, &mut out);
    }
    out
}

fn block(seen: &Seen, style: Style, out: &mut String) {
    let library = &seen.library;
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{}", style.heading(&clean(&library.path.display().to_string(), TEXT)));
    let _ = writeln!(out, "  {}", style.faint(&facts(library, &seen.pids)));
    if !library.points.is_empty() {
        out.push_str(&points(library).render(style));
    }
    for point in library.points.iter().filter(|point| is_worth_telling(point)) {
        let _ = writeln!(out, "  {}: {}", clean(&point.name, NAME), clean(&point.evidence, TEXT));
    }
    for refusal in &library.refusals {
        let text = format!("{}: {}", clean(&refusal.point, NAME), clean(&refusal.reason.to_string(), TEXT));
        let line = if refusal.default {
            style.alarm(&format!("not probed: {text}"))
        } else {
            format!("off: {text}")
        };
        let _ = writeln!(out, "  {line}");
    }
}

/// What says more than the name and the way: which slot of which class, which other names.
fn is_worth_telling(point: &Point) -> bool {
    point.found == Found::Vtable || point.evidence.contains("also named")
}

fn facts(library: &Library, pids: &[u32]) -> String {
    let mut facts = vec![match &library.version {
        Some(version) => format!("{} {}", clean(&library.title, NAME), clean(version, NAME)),
        None => clean(&library.title, NAME),
    }];
    facts.extend(
        library
            .machine
            .filter(|machine| Some(*machine) != Machine::HOST)
            .map(|machine| format!("for {}: not for this machine", machine.name())),
    );
    if library.simulated {
        facts.push("SIMULATED".to_owned());
    }
    if !library.build_id.is_empty() {
        facts.push(format!("build-id {}", hex(&library.build_id)));
    }
    if !pids.is_empty() {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        facts.push(format!("in process {}", pids.join(", ")));
    }
    facts.join(" · ")
}

fn points(library: &Library) -> Table {
    let mut table = Table::new([
        ("POINT", Side::Left),
        ("ROLE", Side::Left),
        ("BY DEFAULT", Side::Left),
        ("OFFSET", Side::Right),
        ("PLACED", Side::Left),
        ("RETURN", Side::Left),
        ("FOUND BY", Side::Left),
    ]);
    for point in &library.points {
        let delta = point.offset.wrapping_sub(point.function_offset);
        table.push([
            clean(&point.name, NAME),
            point.role.name().to_owned(),
            if point.default { "on" } else { "off" }.to_owned(),
            format!("{:#x}", point.offset),
            format!("{} +{delta}", point.placement.name()),
            if point.return_probe { "yes" } else { "entry only" }.to_owned(),
            point.found.name().to_owned(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use engines::{Placement, Reason, Refusal, Role};

    use super::*;

    fn library() -> Library {
        let point = Point {
            engine: "tensorrt".into(),
            name: "enqueueV3".into(),
            role: Role::Step,
            offset: 0x1234,
            function_offset: 0x1230,
            placement: Placement::Emulated,
            return_probe: true,
            args: [("stream".to_owned(), 1)].into(),
            default: true,
            address: 0x1230,
            vtable_words: vec![0x2000],
            found: Found::Vtable,
            evidence: "slot 36 names itself".into(),
        };
        Library {
            engine: "tensorrt".into(),
            title: "NVIDIA TensorRT".into(),
            path: "/lib/libnvinfer.so.11".into(),
            build_id: vec![0xab, 1],
            version: Some("11.4.0.106".into()),
            machine: Machine::HOST,
            simulated: true,
            points: vec![point],
            refusals: vec![Refusal {
                engine: "tensorrt".into(),
                point: "executeV2".into(),
                reason: Reason::NoSymbol("executeV2\u{1b}[31m".into()),
                default: false,
            }],
        }
    }

    #[test]
    fn a_page() {
        let seen = [Seen { library: library(), pids: vec![7, 8] }];
        let expected = "\
/lib/libnvinfer.so.11
  NVIDIA TensorRT 11.4.0.106 · SIMULATED · build-id ab01 · in process 7, 8
  POINT      ROLE  BY DEFAULT  OFFSET  PLACED       RETURN  FOUND BY
  enqueueV3  step  on          0x1234  emulated +4  yes     vtable
  enqueueV3: slot 36 names itself
  off: executeV2: no exported function `executeV2�[31m`
";
        assert_eq!(page(&seen, Style::default()), expected);
    }

    #[test]
    fn the_same_as_json() {
        let value = super::super::json(&[Seen { library: library(), pids: vec![7] }]);
        assert_eq!(value["schema"], "tracer.probes/1");
        let library = &value["libraries"][0];
        assert_eq!((&library["version"], &library["pids"][0]), (&"11.4.0.106".into(), &7.into()));
        let point = &library["points"][0];
        assert_eq!((&point["offset"], &point["function_offset"]), (&0x1234.into(), &0x1230.into()));
        assert_eq!((&point["found"], &point["args"]["stream"]), (&"vtable".into(), &1.into()));
        assert!(library["refusals"][0]["reason"].as_str().is_some_and(|text| text.contains("executeV2")));
    }
}

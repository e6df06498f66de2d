//! Pictures compared with the ones under `tests/golden`.
//!
//! A difference leaves the new picture as `NAME.actual.svg` beside the golden one. `TRACER_BLESS=1` accepts what is
//! drawn; a golden file that does not exist fails.

#[path = "golden/made_up.rs"]
mod made_up;

use std::path::Path;

/// Inferno's script is its authors', is the same in every flame graph, and does not belong into our tree.
fn without_script(svg: &str) -> String {
    let Some((head, rest)) = svg.split_once("<script") else { return svg.to_owned() };
    let tail = rest.split_once("</script>").map_or("", |(_, tail)| tail);
    // One element a line, so that a difference can be read.
    format!("{head}{tail}").replace("><", ">\n<")
}

fn check(name: &str, svg: &str) {
    let actual = without_script(svg);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let golden = folder.join(format!("{name}.svg"));
    if std::env::var_os("TRACER_BLESS").is_some_and(|v| v == "1") {
        std::fs::write(&golden, &actual).unwrap();
        return;
    }
    let beside = folder.join(format!("{name}.actual.svg"));
    match std::fs::read_to_string(&golden) {
        Ok(expected) if expected == actual => {
            let _ = std::fs::remove_file(&beside);
        }
        Ok(_) => {
            std::fs::write(&beside, &actual).unwrap();
            panic!("{name}: differs from the golden picture; see {}", beside.display());
        }
        Err(e) => panic!("{}: {e}; TRACER_BLESS=1 makes it", golden.display()),
    }
}

#[test]
fn flamegraph() {
    check("flamegraph", &flamegraphs::flamegraph(made_up::stacks(), &made_up::flame_options()).unwrap().svg);
}

#[test]
fn heatmap_over_time() {
    let ids = made_up::ids(8);
    check("heatmap_time", &flamegraphs::heatmap(&made_up::heatmap_over_time(&ids, 1500)).unwrap());
}

#[test]
fn heatmap_over_token_index() {
    let ids = made_up::ids(8);
    check("heatmap_index", &flamegraphs::heatmap(&made_up::heatmap_over_index(&ids, 600, true)).unwrap());
}

#[test]
fn histogram() {
    check("histogram", &flamegraphs::histogram(&made_up::histograms(20)).unwrap());
}

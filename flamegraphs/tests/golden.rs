//! Pictures compared with the ones under `tests/golden`.
//!
//! A difference leaves the new picture as `NAME.actual.svg` beside the golden one. `TRACER_BLESS=1` accepts what is
//! drawn; a golden file that does not exist fails.

#[path = "golden/made_up.rs"]
mod made_up;

use flamegraphs::HeatmapInput;
use std::error::Error;
use std::fs;
use std::path::Path;

/// Inferno's script is its authors', is the same in every flame graph, and does not belong into our tree.
fn without_script(svg: &str) -> String {
    let Some((head, rest)) = svg.split_once("<script") else { return svg.to_owned() };
    let tail = rest.split_once("</script>").map_or("", |(_, tail)| tail);
    // One element a line, so that a difference can be read.
    format!("{head}{tail}").replace("><", ">\n<")
}

/// # Errors
/// The picture differs, or there is no golden one.
fn check(name: &str, svg: &str) -> Result<(), Box<dyn Error>> {
    let actual = without_script(svg);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let golden = folder.join(format!("{name}.svg"));
    if std::env::var_os("TRACER_BLESS").is_some_and(|v| v == "1") {
        return Ok(fs::write(&golden, &actual)?);
    }
    let beside = folder.join(format!("{name}.actual.svg"));
    let expected = fs::read_to_string(&golden)
        .map_err(|e| format!("{}: {e}; TRACER_BLESS=1 makes it", golden.display()))?;
    if expected == actual {
        return Ok(());
    }
    fs::write(&beside, &actual)?;
    Err(format!("differs from {}; see {}", golden.display(), beside.display()).into())
}

#[test]
fn flamegraph() -> Result<(), Box<dyn Error>> {
    check("flamegraph", &flamegraphs::flamegraph(&made_up::stacks(), &made_up::flame_options())?)
}

#[test]
fn heatmap_over_time() -> Result<(), Box<dyn Error>> {
    let ids = made_up::ids(8);
    check("heatmap_time", &flamegraphs::heatmap(&made_up::heatmap_over_time(&ids, 1500))?)
}

#[test]
fn heatmap_with_devices() -> Result<(), Box<dyn Error>> {
    let ids = made_up::ids(8);
    let input = HeatmapInput { strips: made_up::strips(), ..made_up::heatmap_over_time(&ids, 1500) };
    check("heatmap_devices", &flamegraphs::heatmap(&input)?)
}

#[test]
fn heatmap_over_token_index() -> Result<(), Box<dyn Error>> {
    let ids = made_up::ids(8);
    check("heatmap_index", &flamegraphs::heatmap(&made_up::heatmap_over_index(&ids, 600, true))?)
}

#[test]
fn histogram() -> Result<(), Box<dyn Error>> {
    check("histogram", &flamegraphs::histogram(&made_up::histograms(20))?)
}

#[test]
fn differential_flamegraph() -> Result<(), Box<dyn Error>> {
    check("differential", &flamegraphs::differential(&made_up::grown(), &made_up::flame_options())?)
}

#[test]
fn request() -> Result<(), Box<dyn Error>> {
    check("request", &flamegraphs::request(&made_up::request(60, "req-0001"))?)
}

#[test]
fn request_of_one_token() -> Result<(), Box<dyn Error>> {
    check("request_one", &flamegraphs::request(&made_up::request(1, "req-0001"))?)
}

#[test]
fn requests_of_many_tokens_are_drawn_in_bins() -> Result<(), Box<dyn Error>> {
    let svg = flamegraphs::request(&made_up::request(5_000, "req-0001"))?;
    assert!(svg.contains("Latency of the slowest of each 19 of 5,000 tokens"));
    assert!(svg.contains("parts under 1 px: each 2 px show"));
    assert!(svg.len() < 1_500_000, "{} bytes", svg.len());
    Ok(())
}

#[test]
fn percentiles() -> Result<(), Box<dyn Error>> {
    check("percentiles", &flamegraphs::percentiles(&made_up::percentiles())?)
}

#[test]
fn matrix_of_offsets() -> Result<(), Box<dyn Error>> {
    check("matrix_offsets", &flamegraphs::matrix(&made_up::offsets())?)
}

#[test]
fn matrix_of_requests() -> Result<(), Box<dyn Error>> {
    check("matrix_requests", &flamegraphs::matrix(&made_up::request_rows(&made_up::ids(9)))?)
}

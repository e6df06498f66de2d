//! The page of `tracer view` in a real browser: a selection shows exactly its tokens, keys reach everything, names from
//! outside stay text. Where no Chromium is installed it says SKIP, which `TRACER_REQUIRE=1` turns into a failure.

mod others;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use flamegraphs::Loss;
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::json;
use tempfile::TempDir;
use tracer::capture::Capture;
use tracer::export::{Caption, Material, page};
use tracer::timeline::rows::Token;
use tracer_tests::browser::{self, Browser};
use tracer_tests::synthetic::{self, Recording};

/// Would run, or break out of where it is put, if it were read as markup.
const HOSTILE: &str = "</script><img src=x onerror=hacked()><svg onload=hacked()>\u{202e}";

/// When events were lost, ns since the recording began.
const LOST_NS: Range<u64> = 300_000_000..500_000_000;

type Test = fn(&mut Browser, &Exhibit) -> Result<()>;

const TESTS: [(&str, Test); 8] = [
    ("selection_by_mouse", selection_by_mouse),
    ("everything_by_keys", everything_by_keys),
    ("lines_of_quantiles", lines_of_quantiles),
    ("columns_that_hold_nothing_or_lost_events", columns_that_hold_nothing_or_lost_events),
    ("search", search),
    ("the_url_carries_the_selection", the_url_carries_the_selection),
    ("dark_and_light", dark_and_light),
    ("a_request_in_time", a_request_in_time),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let browser = match browser::find() {
        Some(browser) => browser,
        None if std::env::var_os("TRACER_REQUIRE").is_some() => {
            eprintln!("view: required, but no Chromium is installed (apt-get install chromium)");
            return ExitCode::FAILURE;
        }
        None => {
            println!(
                "SKIP view: no Chromium is installed (apt-get install chromium): the page was NOT tested"
            );
            return ExitCode::SUCCESS;
        }
    };
    let exhibit = match Exhibit::new() {
        Ok(exhibit) => Arc::new(exhibit),
        Err(error) => {
            eprintln!("view: cannot make a page: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let others = if others::folder().is_some() { others::TESTS } else { &[] };
    let trials = TESTS.iter().chain(others).map(|&(name, test)| {
        let exhibit = exhibit.clone();
        Trial::test(name, move || {
            run(browser, &exhibit, test).map_err(|error| Failed::from(format!("{error:#}")))
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// Runs a test in a browser of its own; whatever it does, nothing may complain and nothing hostile may run.
fn run(name: &str, exhibit: &Exhibit, test: Test) -> Result<()> {
    let profile = tempfile::tempdir()?;
    let mut browser = Browser::start(name, profile.path())?;
    browser.call(
        "Page.addScriptToEvaluateOnNewDocument",
        &json!({ "source": "window.hacked = () => { window.isHacked = true; };" }),
    )?;
    test(&mut browser, exhibit)?;
    ensure!(browser.evaluate("window.isHacked === undefined")? == true, "a name was run");
    // What is another tool's has markup of its own.
    let is_ours = "document.documentElement.dataset.ready === 'true'";
    let strangers = "document.querySelectorAll('img, svg, iframe, object, script:not(:last-of-type)').length";
    ensure!(browser.evaluate(is_ours)? == false || browser.evaluate(strangers)? == 0, "a name became markup");
    ensure!(browser.complaints.is_empty(), "the browser complains: {:#?}", browser.complaints);
    Ok(())
}

/// A page, and the capture that it is of.
struct Exhibit {
    material: Material,
    caption: Caption,
    folder: TempDir,
}

/// What the page must say of some tokens.
#[derive(Debug, Default, PartialEq)]
struct Truth {
    tokens: u64,
    time_us: u64,
    requests: BTreeMap<String, u64>,
    parts_us: BTreeMap<&'static str, u64>,
}

impl Exhibit {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let recording = Recording {
            tokens: 6_000,
            tokens_per_request: 30,
            batch: 12,
            other_sleeps: 2,
            prefix: HOSTILE.to_owned(),
        };
        let capture = folder.path().join("capture");
        synthetic::record(&capture, &recording)?;
        let material = Material::load(&Capture::open(&capture)?, None)?;
        let caption = Caption {
            title: HOSTILE.to_owned(),
            facts: vec![HOSTILE.to_owned()],
            notes: vec![HOSTILE.to_owned()],
            span_ns: material.tables.meta.ended_ns - material.tables.meta.started_ns,
            losses: vec![Loss { range: LOST_NS, what: format!("7 dropped {HOSTILE}") }],
        };
        let exhibit = Self { material, caption, folder };
        std::fs::write(exhibit.page(), page(&exhibit.material, &exhibit.caption)?.html)?;
        Ok(exhibit)
    }

    fn page(&self) -> PathBuf {
        self.folder.path().join("page.html")
    }

    fn us(&self, ns: u64) -> u64 {
        (ns - self.material.tables.meta.started_ns) / 1000
    }

    /// Delivery and latency as the page counts them.
    fn times_us(&self, token: &Token) -> Option<(u64, u64)> {
        let delivered_us = self.us(token.delivered_ns);
        Some((delivered_us, delivered_us - self.us(token.delivered_ns - token.latency_ns?)))
    }

    /// Of the gaps in a region.
    fn truth(&self, (from, to): (u64, u64), (low, high): (u64, u64)) -> Truth {
        let mut truth = Truth::default();
        let names: BTreeMap<u64, &str> = self
            .material
            .tables
            .requests
            .iter()
            .map(|request| (request.id, request.request_id.as_str()))
            .collect();
        for token in self.material.tables.tokens.iter().filter(|token| token.index > 0) {
            let Some((at, latency)) = self.times_us(token) else { continue };
            if !(from..to).contains(&at) || !(low..high).contains(&latency) {
                continue;
            }
            truth.tokens += 1;
            truth.time_us += latency;
            let name = names.get(&token.request).copied().unwrap_or_default();
            *truth.requests.entry(shown_name(name)).or_default() += 1;
            for segment in self.material.budgets.segments(token) {
                *truth.parts_us.entry(segment.label.name()).or_default() +=
                    self.us(segment.end_ns) - self.us(segment.begin_ns);
            }
        }
        truth.parts_us.retain(|_, us| *us > 0);
        truth
    }
}

/// A name as pictures show it: marks that turn text around are replaced.
fn shown_name(name: &str) -> String {
    name.replace('\u{202e}', "\u{fffd}")
}

/// The region in the page's URL.
fn region(browser: &mut Browser) -> Result<((u64, u64), (u64, u64))> {
    let hash = browser.evaluate("location.hash")?;
    let hash = hash.as_str().unwrap_or_default().trim_start_matches('#').to_owned();
    let range = |name: &str| {
        let value = hash.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
        let (from, to) = value.split_once('-')?;
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    Ok((range("time").context(hash.clone())?, range("latency").context(hash.clone())?))
}

/// What the page says of its selection. Figures are read back from words of three digits.
fn compare(browser: &mut Browser, exhibit: &Exhibit) -> Result<Truth> {
    let (time, latency) = region(browser)?;
    let truth = exhibit.truth(time, latency);
    let status = browser.text("status")?;
    let digits: String =
        status.split(" tokens").next().unwrap_or_default().chars().filter(char::is_ascii_digit).collect();
    ensure!(truth.tokens > 0, "nothing is in {time:?}, {latency:?}");
    ensure!(digits == truth.tokens.to_string(), "{status}: {} tokens are in the region", truth.tokens);
    let rows = browser.evaluate(
        "[...document.querySelectorAll('#requests tr')].map((row) => [row.cells[0].textContent, row.cells[2].textContent])",
    )?;
    let shown: BTreeMap<String, u64> = rows
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|row| Some((row[0].as_str()?.to_owned(), row[1].as_str()?.parse().ok()?)))
        .collect();
    ensure!(shown == truth.requests, "listed are {shown:?}, selected are {:?}", truth.requests);
    let bars = browser.evaluate(
        "[...document.querySelectorAll('.part')].map((part) => \
         [part.children[0].textContent, part.children[2].textContent.split(' (')[0]])",
    )?;
    let mut parts: Vec<&str> = Vec::new();
    for bar in bars.as_array().into_iter().flatten() {
        let (name, shown) = (bar[0].as_str().unwrap_or_default(), bar[1].as_str().unwrap_or_default());
        let (value, unit) = shown.split_once(' ').context("a figure has a unit")?;
        let scale = match unit {
            "s" => 1e6,
            "ms" => 1e3,
            _ => 1.0,
        };
        let mean = truth.parts_us.get(name).copied().unwrap_or(0) as f64 / truth.tokens as f64;
        let shown = value.parse::<f64>()? * scale;
        ensure!(
            (shown - mean).abs() <= 0.51_f64.max(mean * 0.006),
            "{name}: {shown} µs are shown, {mean} are right"
        );
        parts.extend(truth.parts_us.contains_key(name).then_some(name));
    }
    ensure!(parts.len() == truth.parts_us.len(), "bars of {parts:?}, parts are {:?}", truth.parts_us);
    Ok(truth)
}

fn selection_by_mouse(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "")?;
    let all = exhibit.truth((0, u64::MAX), (0, u64::MAX));
    let status = browser.text("status")?.replace('\u{202f}', "");
    ensure!(status.contains(&all.tokens.to_string()), "{status}: there are {} gaps", all.tokens);
    // The upper part of the middle of the recording: what waited for the lock.
    browser.drag("heatmap", (0.3, 0.02), (0.8, 0.55))?;
    browser.wait("location.hash.includes('time=')")?;
    let truth = compare(browser, exhibit)?;
    ensure!(0 < truth.tokens && truth.tokens < all.tokens, "{truth:?}");
    browser.screenshot("selection")?;
    let flame = browser.text("flame")?;
    ensure!(
        flame.contains("decode") && flame.contains("gpu_span") && flame.contains("<img src=x"),
        "{flame}"
    );
    browser.evaluate("document.querySelector('[data-id=difference]').click()")?;
    ensure!(browser.text("flame-status")?.contains("longer than usual"));
    browser.screenshot("difference")?;
    browser.click("slowest")?;
    browser.wait("location.hash.includes('4294967296')")?;
    let slowest = compare(browser, exhibit)?;
    ensure!(slowest.tokens >= all.tokens / 100 && slowest.tokens < all.tokens / 20, "{slowest:?}");
    ensure!(slowest.time_us / slowest.tokens > 2 * all.time_us / all.tokens);
    browser.click("clear")?;
    browser.wait("!location.hash.includes('time=')")?;
    ensure!(browser.text("status")?.starts_with("All "));
    browser.evaluate("document.querySelector('[data-id=ttft]').click()")?;
    browser.wait("location.hash.includes('kind=ttft')")?;
    let first =
        exhibit.material.tables.tokens.iter().filter(|token| token.index == 0 && token.latency_ns.is_some());
    let status = browser.text("status")?.replace('\u{202f}', "");
    ensure!(status.contains(&format!("All {} tokens", first.count())), "{status}");
    Ok(())
}

fn everything_by_keys(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "")?;
    // In order of the page, each control is reached by Tab.
    let mut reached = Vec::new();
    for _ in 0..10 {
        browser.press("Tab", false)?;
        let name = browser.evaluate("document.activeElement.id || document.activeElement.dataset.id")?;
        reached.push(name.as_str().unwrap_or_default().to_owned());
        if reached.last().is_some_and(|name| name == "heatmap") {
            break;
        }
    }
    ensure!(reached == ["search", "theme", "itl", "ttft", "slowest", "clear", "heatmap"], "{reached:?}");
    for (key, times) in [("ArrowRight", 20), ("ArrowUp", 3)] {
        (0..times).try_for_each(|_| browser.press(key, false))?;
    }
    ensure!(browser.evaluate("location.hash.includes('time=')")? == false, "moving selects nothing");
    for (key, times) in [("ArrowRight", 100), ("ArrowUp", 8)] {
        (0..times).try_for_each(|_| browser.press(key, true))?;
    }
    let truth = compare(browser, exhibit)?;
    ensure!(truth.tokens > 0, "{truth:?}");
    browser.screenshot("keys")?;
    // On: the two modes, then the flame graph.
    (0..3).try_for_each(|_| browser.press("Tab", false))?;
    let focused = "document.activeElement.getAttribute('aria-level')";
    ensure!(browser.evaluate(focused)? == "1", "the flame graph is next");
    browser.press("ArrowDown", false)?;
    browser.press("ArrowDown", false)?;
    ensure!(browser.evaluate(focused)? == "3", "arrows walk the frames");
    ensure!(browser.text("flame-status")?.contains("a token, "));
    browser.press("Enter", false)?;
    ensure!(browser.evaluate("document.activeElement.style.width")? == "100%", "Enter zooms");
    browser.press("Escape", false)?;
    ensure!(browser.evaluate(focused)? == "1", "Escape shows all again");
    browser.press("Tab", false)?;
    ensure!(
        browser.evaluate("document.activeElement.dataset.request !== undefined")? == true,
        "requests are next"
    );
    browser.press("Enter", false)?;
    browser.wait("!document.getElementById('timeline').hidden")?;
    browser.evaluate("document.getElementById('heatmap').focus()")?;
    browser.press("Escape", false)?;
    browser.wait("!location.hash.includes('time=')")
}

/// Latencies by column of the heatmap, in µs, of first tokens or of gaps.
fn by_column(exhibit: &Exhibit, first: bool) -> (u64, Vec<Vec<u64>>) {
    let meta = &exhibit.material.tables.meta;
    let width = ((meta.ended_ns - meta.started_ns) / 1000).div_ceil(COLUMNS);
    let mut columns = vec![Vec::new(); COLUMNS as usize];
    for token in exhibit.material.tables.tokens.iter().filter(|token| (token.index == 0) == first) {
        if let Some((at, latency)) = exhibit.times_us(token) {
            columns[(at / width).min(COLUMNS - 1) as usize].push(latency);
        }
    }
    (width, columns)
}

const COLUMNS: u64 = 200;

/// What the heatmap says of a column, to which the cursor walks from the first.
fn said_of(browser: &mut Browser, column: usize) -> Result<String> {
    browser.evaluate("document.getElementById('heatmap').focus()")?;
    browser.press("Home", false)?;
    (0..column).try_for_each(|_| browser.press("ArrowRight", false))?;
    browser.text("heat-cell")
}

fn lines_of_quantiles(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "")?;
    let legend = browser.text("heat-legend")?.replace('\u{202f}', "");
    ensure!(legend.contains("p50, n ≥ 20 each") && legend.contains("p99, n ≥ 1000 each"), "{legend}");
    let (_, columns) = by_column(exhibit, false);
    for (name, per_mille) in [("p50", 500), ("p99", 990)] {
        // The second window.
        let (mut window, mut windows, mut last) = (Vec::<u64>::new(), 0, 0);
        for (column, latencies) in columns.iter().enumerate() {
            window.extend(latencies);
            last = column;
            if window.len() * (1000 - per_mille) >= 10_000 {
                windows += 1;
                if windows == 2 {
                    break;
                }
                window.clear();
            }
        }
        window.sort_unstable();
        let value_us = window[(window.len() * per_mille).div_ceil(1000) - 1] as f64;
        let said = said_of(browser, last)?;
        let part = said.split(" · ").find_map(|part| part.strip_prefix(&format!("{name} ")));
        let (value, rest) = part.and_then(|part| part.split_once(" ms of ")).context(said.clone())?;
        ensure!(rest.replace('\u{202f}', "") == window.len().to_string(), "{name}: {said}, {}", window.len());
        let shown_us = value.parse::<f64>()? * 1e3;
        ensure!((shown_us - value_us).abs() <= 0.006 * value_us, "{name}: {said}, {value_us} µs are right");
    }
    Ok(())
}

/// How many pixels of a column have this colour, from the top down to `to`.
fn pixels(browser: &mut Browser, column: usize, to: u32, colour: &str) -> Result<u64> {
    let count = browser.evaluate(&format!(
        "(() => {{ const canvas = document.getElementById('heatmap'), ratio = canvas.width / canvas.clientWidth;
        const x = (64 + (canvas.clientWidth - 64) * ({column} + 0.5) / {COLUMNS}) * ratio;
        const data = canvas.getContext('2d').getImageData(x, 0, 1, {to} * ratio).data;
        const wanted = getComputedStyle(document.documentElement).getPropertyValue('--{colour}').trim();
        const name = (i) => '#' + [...data.slice(i, i + 3)].map((c) => c.toString(16).padStart(2, '0')).join('');
        let count = 0;
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255 && name(i) === wanted) count++;
        return count; }})()"
    ))?;
    count.as_u64().context("no count")
}

fn columns_that_hold_nothing_or_lost_events(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "")?;
    let legend = browser.text("heat-legend")?;
    ensure!(legend.contains("events lost"), "{legend}");
    let (width, columns) = by_column(exhibit, true);
    let last = (LOST_NS.end / 1000).div_ceil(width) as usize;
    for (column, is_lost) in
        [((LOST_NS.start / 1000 / width) as usize, true), (last - 1, true), (last, false)]
    {
        ensure!((pixels(browser, column, 5, "lost")? > 0) == is_lost, "column {column}");
        let said = said_of(browser, column)?;
        ensure!(said.contains("events lost: 7 dropped") == is_lost, "{said}");
    }
    browser.open(&exhibit.page(), "#kind=ttft")?;
    let empty = columns.iter().position(Vec::is_empty).context("no column is empty")?;
    let full = columns.iter().position(|column| !column.is_empty()).context("all are empty")?;
    ensure!(browser.text("heat-legend")?.contains("no tokens"));
    ensure!(pixels(browser, empty, 250, "line")? > pixels(browser, full, 250, "line")?);
    for (column, is_empty) in [(empty, true), (full, false)] {
        let said = said_of(browser, column)?;
        ensure!(said.contains("no tokens") == is_empty, "{said}");
    }
    browser.screenshot("columns")
}

fn search(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "")?;
    browser.evaluate("document.getElementById('search').focus()")?;
    browser.type_text("\u{fffd}17")?;
    browser.wait("location.hash.includes('search=')")?;
    let names = exhibit.material.tables.requests.iter().map(|request| shown_name(&request.request_id));
    let found = names.filter(|name| name.contains("\u{fffd}17")).count();
    ensure!(found > 1 && browser.evaluate("document.querySelectorAll('#requests tr').length")? == found);
    browser.evaluate("document.getElementById('search').select()")?;
    browser.type_text("LOCKED")?;
    browser.wait("document.querySelectorAll('#requests tr').length === 0")?;
    browser.evaluate("document.getElementById('search').select()")?;
    browser.type_text("HOST_blocked")?;
    browser.wait("document.querySelectorAll('.frame.hit').length > 0")?;
    ensure!(browser.text("flame-status")?.contains("of the time"));
    browser.screenshot("search")
}

fn the_url_carries_the_selection(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    let hash =
        "#kind=itl&time=100000-900000&latency=5000-90000&mode=difference&search=host&theme=dark&request=3";
    browser.open(&exhibit.page(), hash)?;
    ensure!(region(browser)? == ((100_000, 900_000), (5_000, 90_000)));
    ensure!(browser.evaluate("document.getElementById('search').value")? == "host");
    ensure!(browser.evaluate("document.documentElement.dataset.theme")? == "dark");
    ensure!(browser.evaluate("document.querySelector('[data-id=difference]').ariaPressed")? == "true");
    ensure!(browser.evaluate("document.getElementById('timeline').hidden")? == false);
    let status = browser.text("status")?;
    // Another one, as by the button back, and the same again.
    browser.evaluate("location.hash = '#kind=ttft'")?;
    browser.wait("document.getElementById('status').textContent.startsWith('All ')")?;
    browser.evaluate(&format!("location.hash = '{hash}'"))?;
    browser.wait(&format!("document.getElementById('status').textContent === {}", json!(status)))?;
    browser.evaluate("document.getElementById('search').value = ''; document.getElementById('search').dispatchEvent(new Event('input'))")?;
    compare(browser, exhibit)?;
    for nonsense in
        ["#time=9-x&latency=-1-5", "#kind=<img>&request=99999999&theme=blue", "#%ff&&=", "#request=__proto__"]
    {
        browser.open(&exhibit.page(), nonsense)?;
        ensure!(browser.text("status")?.starts_with("All "), "{nonsense}");
    }
    Ok(())
}

fn dark_and_light(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    let mut backgrounds = Vec::new();
    for scheme in ["light", "dark"] {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        browser.call("Emulation.setEmulatedMedia", &features)?;
        browser.open(&exhibit.page(), "")?;
        backgrounds.push(browser.evaluate("getComputedStyle(document.body).backgroundColor")?);
        browser.screenshot(scheme)?;
    }
    ensure!(backgrounds[0] != backgrounds[1], "{backgrounds:?}");
    browser.click("theme")?;
    ensure!(browser.evaluate("getComputedStyle(document.body).backgroundColor")? == backgrounds[0]);
    ensure!(browser.evaluate("location.hash.includes('theme=light')")? == true);
    Ok(())
}

fn a_request_in_time(browser: &mut Browser, exhibit: &Exhibit) -> Result<()> {
    browser.open(&exhibit.page(), "#time=0-4000000000&latency=9000-4000000000")?;
    browser.evaluate("document.querySelector('#requests button').click()")?;
    browser.wait("!document.getElementById('timeline').hidden")?;
    let title = browser.text("timeline-title")?;
    let name = title.strip_prefix("Request ").context(title.clone())?.to_owned();
    let named = |request: &&tracer::timeline::rows::Request| shown_name(&request.request_id) == name;
    let request = exhibit.material.tables.requests.iter().find(named).context("no such request")?;
    let tokens = exhibit.material.tables.tokens.iter().filter(|token| token.request == request.id);
    let slow = tokens.clone().filter(|token| token.index > 0);
    let slow = slow.filter(|token| exhibit.times_us(token).is_some_and(|(_, us)| us >= 9_000)).count();
    ensure!(browser.evaluate("document.querySelectorAll('#tokens tr').length")? == tokens.clone().count());
    ensure!(slow > 0 && browser.evaluate("document.querySelectorAll('#tokens tr.chosen').length")? == slow);
    // The strip of a token has a piece for each of its parts, in order.
    let token = tokens.clone().max_by_key(|token| token.latency_ns).context("no token")?;
    let parts = exhibit.material.budgets.segments(token);
    let parts = parts.iter().filter(|part| exhibit.us(part.end_ns) > exhibit.us(part.begin_ns));
    let expected: Vec<&str> = parts.map(|part| part.label.name()).collect();
    let row = tokens.clone().filter(|other| other.index < token.index).count();
    let pieces = browser.evaluate(&format!(
        "[...document.querySelectorAll('#tokens tr')[{row}].querySelectorAll('.strip span')].map((s) => s.title)"
    ))?;
    let shown: Vec<&str> = pieces
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|title| title.as_str()?.split([',', ':']).next())
        .collect();
    ensure!(shown == expected, "{shown:?} are shown, {expected:?} are right");
    browser.screenshot("request")?;
    browser.click("timeline-close")?;
    browser.wait("document.getElementById('timeline').hidden")
}

//! What a large capture takes: `cargo xtask bench --large`. Ten million events, a million tokens, of a server that never
//! ran.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use tracer_tests::browser::{self, Browser};
use tracer_tests::synthetic::{self, Recording};
use tracer_tests::table::Table;

use crate::part::Part;
use crate::{flames, progress};

/// Regions that are selected in turns: as the page's URL has them, µs.
const REGIONS: [&str; 4] = [
    "time=0-4000000000&latency=0-4294967296",
    "time=0-4000000000&latency=6000-4294967296",
    "time=20000000-90000000&latency=0-6000",
    "time=0-4000000000&latency=0-5000",
];
const SELECTIONS: usize = 5;

#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    schema: &'static str,
    quick: bool,
    events: u64,
    tokens: usize,
    finish: Cost,
    report: Cost,
    html: Cost,
    html_bytes: u64,
    perfetto: Cost,
    perfetto_bytes: u64,
    page: Part<InBrowser>,
    flames: flames::Outcome,
}

/// What a process took.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) seconds: f64,
    most_memory_bytes: u64,
}

#[derive(Debug, Serialize)]
struct InBrowser {
    /// From the navigation until the page can be used.
    open_ms: f64,
    /// Of [`REGIONS`], the median of each.
    select_ms: Vec<f64>,
}

/// Makes the recording, and prints how many events it holds.
pub(crate) fn record(folder: &Path, quick: bool) -> Result<()> {
    let recording = Recording {
        tokens: tokens(quick),
        tokens_per_request: 200,
        batch: 16,
        other_sleeps: 140,
        prefix: "request-".to_owned(),
    };
    println!("{}", synthetic::record(folder, &recording)?);
    Ok(())
}

const fn tokens(quick: bool) -> usize {
    if quick { 20_000 } else { 1_000_000 }
}

pub(crate) fn run(quick: bool, inferno: Option<&Path>, json: Option<&Path>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let capture = folder.path().join("capture");
    progress("recording");
    // In a process of its own: what a child has taken at most counts what its parent had when it began.
    let mut recorder = Command::new(std::env::current_exe()?);
    recorder.arg("--record-large").arg(&capture).args(quick.then_some("--quick"));
    let recorded = recorder.stderr(Stdio::inherit()).output()?;
    ensure!(recorded.status.success(), "no recording was made");
    let events = String::from_utf8(recorded.stdout)?.trim().parse()?;
    let tracer = std::env::current_exe()?.with_file_name("tracer");
    let page = folder.path().join("page.html");
    let trace = folder.path().join("trace.pftrace");
    let path = |path: &Path| path.display().to_string();
    let finish = cost(&tracer, &["recover", "--reclock", &path(&capture)]).context("recover")?;
    let report = cost(&tracer, &["report", &path(&capture)]).context("report")?;
    let html = cost(&tracer, &["export", &path(&capture), "--html", &path(&page)]).context("export")?;
    let perfetto =
        cost(&tracer, &["export", &path(&capture), "--perfetto", &path(&trace)]).context("export")?;
    let (html_bytes, perfetto_bytes) = (fs::metadata(&page)?.len(), fs::metadata(&trace)?.len());
    let in_browser = match browser::find() {
        Some(name) => Part::Measured(measure(name, &page).context("the page in a browser")?),
        None => Part::LeftOut("no Chromium is installed".to_owned()),
    };
    let flames = flames::run(folder.path(), &tracer, inferno, quick).context("flame graph of samples")?;
    progress("");
    let outcome = Outcome {
        schema: "tracer.bench.large/1",
        quick,
        events,
        tokens: tokens(quick),
        finish,
        report,
        html,
        html_bytes,
        perfetto,
        perfetto_bytes,
        page: in_browser,
        flames,
    };
    println!("{}\n{}", outcome.table(), outcome.flames.table());
    if let Some(file) = json {
        let text = serde_json::to_string_pretty(&outcome)?;
        fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// Runs a program to its end.
pub(crate) fn cost(program: &PathBuf, args: &[&str]) -> Result<Cost> {
    progress(&args.join(" "));
    let began = Instant::now();
    let child = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let pid = i32::try_from(child.id())?;
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: the child is ours and not waited for elsewhere; both places outlive the call.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
    ensure!(waited == pid && status == 0, "{} {args:?} failed", program.display());
    // SAFETY: all zeroes are a valid rusage, and wait4 has filled it in.
    let usage = unsafe { usage.assume_init() };
    Ok(Cost {
        seconds: began.elapsed().as_secs_f64(),
        most_memory_bytes: u64::try_from(usage.ru_maxrss)? * 1024,
    })
}

fn measure(name: &str, page: &Path) -> Result<InBrowser> {
    progress("page in a browser");
    let profile = tempfile::tempdir()?;
    let mut browser = Browser::start(name, profile.path())?;
    let began = Instant::now();
    browser.open(page, "")?;
    let open_ms = began.elapsed().as_secs_f64() * 1e3;
    let mut select_ms = Vec::new();
    for region in REGIONS {
        let mut times = Vec::new();
        for _ in 0..SELECTIONS {
            browser.evaluate(&format!("location.hash = '#kind=itl&{region}'"))?;
            browser.wait(&format!("location.hash.includes('{region}')"))?;
            // Selecting runs before the next task.
            browser.evaluate("new Promise((done) => setTimeout(done, 50))")?;
            let took = browser.evaluate("Number(document.getElementById('status').dataset.tookMs)")?;
            times.push(took.as_f64().context("the page does not say how long it took")?);
            browser.evaluate("location.hash = '#kind=ttft'")?;
            browser.wait("document.getElementById('status').textContent.startsWith('All ')")?;
        }
        times.sort_by(f64::total_cmp);
        select_ms.push(times[times.len() / 2]);
    }
    Ok(InBrowser { open_ms, select_ms })
}

impl Outcome {
    fn table(&self) -> Table {
        let title = format!(
            "A capture of {} events, {} tokens{}",
            self.events,
            self.tokens,
            if self.quick { " (QUICK: supports no claim)" } else { "" }
        );
        let mut table = Table::new(&title, &["what", "time", "memory", "file", "aim"]);
        let mut push = |what: &str, cost: Cost, bytes: Option<u64>, aim: &str| {
            table.rows.push(vec![
                what.to_owned(),
                format!("{:.2} s", cost.seconds),
                format!("{:.2} GiB", cost.most_memory_bytes as f64 / f64::from(1 << 30)),
                bytes.map_or(String::new(), |bytes| format!("{:.1} MB", bytes as f64 / 1e6)),
                aim.to_owned(),
            ]);
        };
        push("recover --reclock", self.finish, None, "");
        push("report", self.report, None, "≤ 5 s, ≤ 1 GiB");
        push("export --html", self.html, Some(self.html_bytes), "< 30 MB");
        push("export --perfetto", self.perfetto, Some(self.perfetto_bytes), "");
        match &self.page {
            Part::Measured(page) => {
                let mut push = |what: String, ms: f64, aim: &str| {
                    let blank = String::new;
                    table.rows.push(vec![what, format!("{ms:.0} ms"), blank(), blank(), aim.to_owned()]);
                };
                push("page: open".to_owned(), page.open_ms, "");
                for (region, ms) in REGIONS.iter().zip(&page.select_ms) {
                    push(format!("page: select {region}"), *ms, "< 200 ms");
                }
            }
            Part::LeftOut(why) => table.rows.push(vec![format!("page: left out: {why}")]),
        }
        table
    }
}

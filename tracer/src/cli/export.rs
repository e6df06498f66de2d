//! `tracer export`: a capture in forms for other tools, and for people without the tracer.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use super::picture;
use super::units::{count, date_time, duration};
use crate::capture::Capture;
use crate::export::{self, Caption, Format, Material, Redactor, perfetto};

/// Write a capture for other tools: a page to explore it, Perfetto, pprof, CSV, Parquet
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("form").required(true).multiple(true))]
#[command(after_help = "Examples:
  tracer export trace --html incident.html --redact
  tracer export trace --perfetto trace.pftrace     open it in ui.perfetto.dev
  tracer export trace --pprof time.pb.gz           `go tool pprof -http : time.pb.gz`, speedscope
  tracer export trace --csv tables/

--redact replaces ids of requests, traces, tenants and devices by hashes whose key is thrown away, so that equal ids
stay equal within one export; it drops the host's name and the command line, and all of a path but its last part.
Names of functions, threads and models stay.")]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// One page to explore the capture in a browser; needs no server and no network
    #[arg(long, value_name = "FILE", group = "form")]
    html: Option<PathBuf>,
    /// A Perfetto trace
    #[arg(long, value_name = "FILE", group = "form")]
    perfetto: Option<PathBuf>,
    /// Time of tokens by part and stack as a pprof profile
    #[arg(long, value_name = "FILE", group = "form")]
    pprof: Option<PathBuf>,
    /// The derived tables as CSV files in this folder
    #[arg(long, value_name = "DIR", group = "form")]
    csv: Option<PathBuf>,
    /// The derived tables as Parquet files in this folder
    #[arg(long, value_name = "DIR", group = "form")]
    parquet: Option<PathBuf>,
    /// For sharing: hash ids, drop host names and paths
    #[arg(long)]
    redact: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = picture::open(&args.capture)?;
    let redactor = args.redact.then(Redactor::new).transpose().context("no random numbers for --redact")?;
    let redactor = redactor.as_ref();
    if args.html.is_some() || args.perfetto.is_some() || args.pprof.is_some() {
        let material = Material::load(&capture, redactor)?;
        pictures(args, &capture, &material)?;
    }
    for (dir, format) in [(&args.csv, Format::Csv), (&args.parquet, Format::Parquet)] {
        if let Some(dir) = dir {
            export::tables(&capture, format, dir, redactor)?;
            eprintln!("tables: {}", dir.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn pictures(args: &Args, capture: &Capture, material: &Material) -> Result<()> {
    let caption = caption(capture, material)?;
    if let Some(path) = &args.html {
        let page = export::page(material, &caption)?;
        write(path, "page", |file| Ok(file.write_all(page.html.as_bytes())?))?;
    }
    if let Some(path) = &args.perfetto {
        let off_cpu = capture.offcpu()?;
        write(path, "Perfetto trace", |file| perfetto::trace(file, material, &caption, off_cpu))?;
    }
    if let Some(path) = &args.pprof {
        let profile = export::profile(material, &caption)?;
        write(path, "profile", |file| Ok(file.write_all(&profile)?))?;
    }
    Ok(())
}

fn write(path: &Path, what: &str, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let whole = || {
        let mut file = BufWriter::new(File::create(path)?);
        write(&mut file)?;
        Ok::<_, anyhow::Error>(file.flush()?)
    };
    whole().with_context(|| format!("cannot write the {what} to {}", path.display()))?;
    eprintln!("{what}: {}", path.display());
    Ok(())
}

/// What is said of a capture as a whole.
pub(super) fn caption(capture: &Capture, material: &Material) -> Result<Caption> {
    let tables = &material.tables;
    let meta = &tables.meta;
    let start = date_time(meta.started_realtime_ns);
    let named = |what: &str, text: &str| (!text.is_empty()).then(|| format!("{what} {text}"));
    let facts = [
        start.clone(),
        Some(duration(picture::span_ns(tables))),
        Some(format!(
            "{} tokens of {} requests",
            count(tables.tokens.len() as u64),
            count(tables.requests.len() as u64)
        )),
        named("host", &meta.host),
        named("target", &meta.target),
        Some(format!("tracer {}", meta.tracer_version)),
    ];
    let bound_ns = tables.budgets.iter().map(|budget| budget.bound_ns).max().unwrap_or(0);
    let notes = [
        meta.simulated.then(|| "GPU times are SIMULATED: a stand-in library ran".to_owned()),
        (bound_ns > 0).then(|| format!("GPU times are right within {}", duration(bound_ns))),
        (!meta.complete).then(|| "the recorder was killed: the end may be missing".to_owned()),
        Some(picture::missing(&tables.ledger)),
    ];
    Ok(Caption {
        title: start.map_or("capture".to_owned(), |start| format!("capture of {start}")),
        facts: facts.into_iter().flatten().collect(),
        notes: notes.into_iter().flatten().collect(),
        span_ns: picture::span_ns(tables),
        losses: picture::losses(capture, meta.started_ns)?,
    })
}

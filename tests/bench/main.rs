//! What tracing costs: `cargo xtask bench`. Prints ratios of figures that are measured in turns within one run.
//! And how right its clocks are: `cargo xtask bench --clock`; what large captures take: `cargo xtask bench --large`.

mod affinity;
mod alignment;
mod attach;
mod bpftrace;
mod clock;
mod driver;
mod empty;
mod flames;
mod inject;
mod laps;
mod large;
mod library;
mod marks;
#[path = "../../engines/tests/real/memory.rs"]
mod memory;
mod part;
mod perf;
mod probe;
mod recorder;
mod resolver;
mod server;
mod socket_server;
mod sockets;
mod stacks;
mod syscalls;
mod throughput;
mod worker;

use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use part::Part;
use serde::Serialize;
use throughput::Pace;

/// Says how much heap the resolver takes at most.
#[global_allocator]
static MEMORY: memory::Peak = memory::Peak::new();

/// Measures what probes and recordings cost. `cargo xtask bench` builds what it needs and runs it.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Be the traced process, on this CPU.
    #[arg(long, hide = true, value_name = "CPU")]
    worker: Option<usize>,
    /// As such a process: a library to load.
    #[arg(long, hide = true, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Be a program that makes marks, on this CPU, in Rust and by this library.
    #[arg(long, hide = true, value_name = "CPU", requires = "library")]
    marks: Option<usize>,
    /// Be the process whose calls of `enqueueV3` are measured.
    #[arg(long, hide = true)]
    enqueue: bool,
    /// Few short measurements: shows that everything works, supports no claim
    #[arg(long)]
    quick: bool,
    /// Where `cargo xtask test --real-libs` leaves libraries; without it what needs them is left out
    #[arg(long, value_name = "FOLDER")]
    real_libs: Option<PathBuf>,
    /// Instead: how right the clocks are on a simulated device
    #[arg(long)]
    clock: bool,
    /// Instead: what stacks cost only
    #[arg(long, conflicts_with = "clock")]
    stacks: bool,
    /// Instead: only what following sockets costs
    #[arg(long, conflicts_with = "clock")]
    sockets: bool,
    /// Make the capture for that in a folder.
    #[arg(long, hide = true, value_name = "FOLDER")]
    record_large: Option<PathBuf>,
    /// Print samples as `perf script` does.
    #[arg(long, hide = true)]
    perf_script: bool,
    /// Instead: what a capture of ten million events takes to report and to show, and a flame graph of a million samples
    #[arg(long)]
    large: bool,
    /// With that: the folder of inferno's programs; without it nothing is compared with them
    #[arg(long, value_name = "FOLDER", requires = "large")]
    inferno: Option<PathBuf>,
    /// Write everything that was measured, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Where it was measured.
#[derive(Debug, Serialize)]
struct Machine {
    cpus: usize,
    cpu: String,
    virtual_machine: bool,
    kernel: String,
    /// Load averages over the last minute, before and after.
    load_before: f64,
    load_after: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    simulated_gpu: bool,
    quick: bool,
    machine: &'a Machine,
    probes: &'a [probe::Cost],
    marks: &'a [marks::Cost],
    driver: &'a Part<driver::Outcome>,
    resolver: &'a Part<Vec<resolver::Cost>>,
    attach: &'a attach::Outcome,
    inject: &'a inject::Outcome,
    sockets: &'a Part<Vec<sockets::Cost>>,
    servers: &'a [throughput::Outcome],
    socket_servers: &'a [socket_server::Outcome],
    stacks: &'a stacks::Outcome,
}

fn run(options: &Options) -> Result<()> {
    if let Some(cpu) = options.worker {
        return worker::run(cpu, options.library.as_deref());
    }
    if let (Some(cpu), Some(library)) = (options.marks, options.library.as_deref()) {
        return marks::caller(cpu, library);
    }
    if options.clock {
        return alignment::run(options.quick, options.json.as_deref());
    }
    if let Some(folder) = &options.record_large {
        return large::record(folder, options.quick);
    }
    if options.perf_script {
        return flames::script(options.quick);
    }
    if options.large {
        return large::run(options.quick, options.inferno.as_deref(), options.json.as_deref());
    }
    if options.enqueue {
        return inject::enqueue();
    }
    // SAFETY: a plain system call.
    ensure!(unsafe { libc::geteuid() } == 0, "probes need root");
    let (probe_rounds, rounds, window) = if options.quick { (3, 2, 1) } else { (12, 10, 2) };
    if options.sockets {
        return only_sockets(options, probe_rounds, rounds, Duration::from_secs(window));
    }
    let attaching = if options.quick {
        attach::Extent { processes: 2, rounds: 1, time: Duration::ZERO }
    } else {
        attach::Extent { processes: 10, rounds: 12, time: Duration::from_secs(60) }
    };
    let real_libs = options.real_libs.as_deref();
    let mut machine = Machine::look()?;
    if options.stacks {
        let outcome =
            stacks::run(real_libs, rounds, Duration::from_secs(window)).context("cost of stacks")?;
        machine.load_after = load()?;
        progress("");
        println!("{}\n\n{}", machine.text(options.quick), outcome.text());
        return write_json(options.json.as_deref(), &outcome);
    }
    let probes = probe::run(probe_rounds).context("cost of a probe")?;
    let marks = marks::run(probe_rounds).context("cost of a mark")?;
    let driver = driver::run(real_libs, probe_rounds).context("cost of a probe in the driver")?;
    let resolver = resolver::run(real_libs, probe_rounds).context("cost of the resolver")?;
    let attach = attach::run(attaching).context("attaching")?;
    let injected = inject::run(probe_rounds).context("cost of the injected library")?;
    let sockets = sockets::run(probe_rounds).context("cost of following sockets")?;
    let window = Duration::from_secs(window);
    let stacks = stacks::run(real_libs, rounds, window).context("cost of stacks")?;
    let paces = [Pace::Gpu, Pace::Cpu].into_iter();
    let servers = paces.clone().map(|pace| throughput::run(pace, rounds, window));
    let servers = servers.collect::<Result<Vec<_>>>().context("cost for a server")?;
    let socket_servers = paces.map(|pace| socket_server::run(pace, rounds, window));
    let socket_servers = socket_servers.collect::<Result<Vec<_>>>().context("cost of a server's sockets")?;
    machine.load_after = load()?;
    progress("");

    println!("{}\n\n{}", machine.text(options.quick), probe::table(&probes));
    println!("{}", marks::table(&marks));
    println!("{}\n{}\n{}", driver::text(&driver), resolver::text(&resolver), attach.table());
    println!("{}", inject::table(&injected));
    println!("{}", sockets::text(&sockets));
    servers.iter().for_each(|outcome| println!("{}", outcome.table()));
    println!("{}\n{}", throughput::recorder_table(&servers), socket_server::table(&socket_servers));
    println!("{}", stacks.text());
    if options.json.is_some() {
        let report = Report {
            schema: "tracer.bench/1",
            simulated_gpu: true,
            quick: options.quick,
            machine: &machine,
            probes: &probes,
            marks: &marks,
            driver: &driver,
            resolver: &resolver,
            attach: &attach,
            inject: &injected,
            sockets: &sockets,
            servers: &servers,
            socket_servers: &socket_servers,
            stacks: &stacks,
        };
        write_json(options.json.as_deref(), &report)?;
    }
    Ok(())
}

/// Writes what was measured, where that is wanted.
fn write_json(file: Option<&std::path::Path>, measured: &impl Serialize) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let text = serde_json::to_string_pretty(measured)?;
    fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
}

/// What following sockets costs a system call, and a server.
fn only_sockets(options: &Options, probe_rounds: usize, rounds: usize, window: Duration) -> Result<()> {
    let mut machine = Machine::look()?;
    let sockets = sockets::run(probe_rounds).context("cost of following sockets")?;
    let servers = [Pace::Gpu, Pace::Cpu].into_iter().map(|pace| socket_server::run(pace, rounds, window));
    let servers = servers.collect::<Result<Vec<_>>>().context("cost of a server's sockets")?;
    machine.load_after = load()?;
    progress("");
    println!("{}\n\n{}", machine.text(options.quick), sockets::text(&sockets));
    println!("{}", socket_server::table(&servers));
    let measured = serde_json::json!({
        "schema": "tracer.bench/1",
        "simulated_gpu": true,
        "quick": options.quick,
        "machine": machine,
        "sockets": sockets,
        "socket_servers": servers,
    });
    write_json(options.json.as_deref(), &measured)
}

impl Machine {
    fn look() -> Result<Self> {
        let cpuinfo = read("/proc/cpuinfo")?;
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let load = load()?;
        Ok(Self {
            cpus: affinity::cpus()?.len(),
            cpu: field("model name").unwrap_or_else(|| "unknown".into()),
            virtual_machine: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            load_before: load,
            load_after: load,
        })
    }

    fn text(&self, quick: bool) -> String {
        format!(
            "{} × {}{}, Linux {}; simulated GPU; load average {:.2} before, {:.2} after{}",
            self.cpus,
            self.cpu,
            if self.virtual_machine { " (virtual machine)" } else { "" },
            self.kernel,
            self.load_before,
            self.load_after,
            if quick { "; QUICK: supports no claim" } else { "" }
        )
    }
}

fn load() -> Result<f64> {
    let text = read("/proc/loadavg")?;
    text.split(' ').next().and_then(|load| load.parse().ok()).context("/proc/loadavg has no load")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// Says on a terminal what is being done.
pub(crate) fn progress(text: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A terminal that went away is no reason to stop.
        let _ = write!(err, "\r\x1b[K{text}").and_then(|()| err.flush());
    }
}

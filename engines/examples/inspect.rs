//! Prints what the profiles know of a file: `cargo run -p engines --example inspect FILE…`.
use std::{fs::File, process::ExitCode, time::Instant};

fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args_os().skip(1) {
        if let Err(error) = inspect(path.as_ref()) {
            eprintln!("cannot inspect {}: {error}", path.display());
            failed = true;
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn inspect(path: &std::path::Path) -> std::io::Result<()> {
    // Links are resolved, as /proc/PID/maps does.
    let path = path.canonicalize()?;
    // SAFETY: the map is private and read only; should the file shrink meanwhile, this program dies, and nothing else.
    let data = unsafe { memmap2::Mmap::map(&File::open(&path)?)? };
    let profiles = engines::Profiles::builtin();
    let begin = Instant::now();
    let library = profiles.inspect(&path, &data);
    let took = begin.elapsed();
    let Some(library) = library else {
        println!("{}: no profile concerns it ({took:.1?})", path.display());
        return Ok(());
    };
    let version = library.version.as_deref().unwrap_or("version unknown");
    let simulated = if library.simulated { ", simulated GPU" } else { "" };
    println!("{}: {} {version}{simulated} ({took:.1?})", path.display(), library.title);
    for point in &library.points {
        let delta = point.offset - point.function_offset;
        let returns = if point.return_probe { "entry+return" } else { "entry" };
        let default = if point.default { "" } else { " off" };
        println!(
            "  {:<28} {:<12} {:#10x} +{delta:<3} {:<8} {returns:<12}{default:<4} {}",
            point.name,
            point.role.name(),
            point.offset,
            point.placement.name(),
            point.evidence
        );
    }
    for refusal in &library.refusals {
        println!("  {:<28} refused: {}", refusal.point, refusal.reason);
    }
    Ok(())
}

//! `standin-stage DIR`: puts the stand-in GPU libraries into a folder.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("usage: standin-stage DIR");
        return ExitCode::from(2);
    };
    match standin::stage(Path::new(&dir)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("standin-stage: {error}");
            ExitCode::FAILURE
        }
    }
}

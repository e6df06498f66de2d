//! The `tracer` command.

fn main() -> std::process::ExitCode {
    tracer::cli::run()
}

//! Stages the stand-in libraries by hand: `cargo run -p standin --example stage -- DIR`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args_os().nth(1).ok_or("usage: stage DIR")?;
    standin::stage(dir.as_ref())?;
    println!("LD_LIBRARY_PATH={}", std::path::absolute(dir)?.display());
    Ok(())
}

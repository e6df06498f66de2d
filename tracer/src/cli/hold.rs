//! `tracer hold FD -- CMD…` (hidden): waits until it is told to go, then becomes the command.
//!
//! `record -- CMD…` starts this, makes it a target, and lets it go: so nothing of the command's life is missed. Under
//! sudo the command runs as the invoking user.

use std::{
    ffi::OsString,
    fs::File,
    io::Read,
    os::{fd::FromRawFd, unix::process::CommandExt},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Descriptor to read the go from.
    fd: i32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    // SAFETY: the parent hands this descriptor over for this purpose; nothing else here uses it.
    let mut pipe = unsafe { File::from_raw_fd(args.fd) };
    let mut go = [0];
    let told = pipe.read(&mut go).context("waiting for the recorder")?;
    ensure!(told == 1, "the recorder gave up before the command was started");
    drop(pipe);
    become_invoking_user()?;
    let (program, arguments) = args.command.split_first().context("no command")?;
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("running {}", program.to_string_lossy()))
}

/// Under sudo: the user's groups, group and user, in this order; else nothing.
fn become_invoking_user() -> Result<()> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let (Some(uid), Some(gid)) = (number("SUDO_UID"), number("SUDO_GID")) else { return Ok(()) };
    // SAFETY: plain system calls.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(());
    }
    let user = std::ffi::CString::new(std::env::var("SUDO_USER").unwrap_or_default())?;
    // SAFETY: `user` is a valid C string, and this process has one thread.
    let done = unsafe {
        libc::initgroups(user.as_ptr(), gid) == 0 && libc::setgid(gid) == 0 && libc::setuid(uid) == 0
    };
    ensure!(done, "becoming user {uid}: {}", std::io::Error::last_os_error());
    Ok(())
}

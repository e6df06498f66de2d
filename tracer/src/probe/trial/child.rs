//! The process that is probed: a fork of this one that calls functions of known first instructions when it is told to.

use std::{
    io::{self, Read, Write},
    os::fd::{AsRawFd, RawFd},
    time::{Duration, Instant},
};

use engines::Placement;

use crate::probe::{
    ProbeError,
    process::{self, Found},
};

/// A function to probe, by what its first instruction is to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Site {
    Nop5,
    Emulated,
    Stepped,
}

impl Site {
    pub(super) const ALL: [Self; 3] = [Self::Nop5, Self::Emulated, Self::Stepped];

    pub(super) const fn placement(self) -> &'static str {
        match self {
            Self::Nop5 => Placement::Nop5.name(),
            Self::Emulated => Placement::Emulated.name(),
            Self::Stepped => Placement::Stepped.name(),
        }
    }

    /// Calls of a batch: stepping an instruction may take 40 times as long.
    pub(super) const fn calls(self) -> u32 {
        match self {
            Self::Nop5 | Self::Emulated => 10_000,
            Self::Stepped => 1_000,
        }
    }

    pub(super) fn address(self) -> u64 {
        self.function() as usize as u64
    }

    fn function(self) -> extern "C" fn() {
        match self {
            Self::Nop5 => code::nop5,
            Self::Emulated => code::emulated,
            Self::Stepped => code::stepped,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod code {
    use std::arch::naked_asm;

    #[unsafe(naked)]
    pub(super) extern "C" fn nop5() {
        naked_asm!(".byte 0x0f, 0x1f, 0x44, 0x00, 0x00", "ret")
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn emulated() {
        naked_asm!("push rbp", "pop rbp", "ret")
    }

    #[unsafe(naked)]
    pub(super) extern "C" fn stepped() {
        naked_asm!("sub rsp, 8", "add rsp, 8", "ret")
    }
}

/// Dropping it ends it.
pub(super) struct Child {
    pub(super) found: Found,
    tell: io::PipeWriter,
    hear: io::PipeReader,
}

impl Child {
    /// Forks; with `filtered`, the child allows itself nothing but what it needs from then on.
    pub(super) fn start(filtered: bool) -> Result<Self, ProbeError> {
        let error = |source| ProbeError::Process { pid: std::process::id(), source };
        let (commands, tell) = io::pipe().map_err(error)?;
        let (hear, answers) = io::pipe().map_err(error)?;
        // SAFETY: the child calls only what is safe after a fork of a program with threads: system calls.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above; this is the child's only thread.
            unsafe { obey(commands.as_raw_fd(), answers.as_raw_fd(), tell.as_raw_fd(), filtered) }
        }
        if pid < 0 {
            return Err(error(io::Error::last_os_error()));
        }
        match process::find(pid.cast_unsigned()) {
            Ok(found) => Ok(Self { found, tell, hear }),
            Err(error) => {
                end(pid);
                Err(error)
            }
        }
    }

    /// Has it call a function so often; returns ns of CPU time.
    pub(super) fn call(&mut self, site: Site, calls: u32, patience: Duration) -> Result<u64, ProbeError> {
        let error = |source| ProbeError::Process { pid: self.found.id.tgid, source };
        let command = [site as u32, calls];
        self.tell.write_all(bytemuck::cast_slice(&command)).map_err(error)?;
        wait_readable(self.hear.as_raw_fd(), patience).map_err(error)?;
        let mut ns = [0; 8];
        self.hear.read_exact(&mut ns).map_err(error)?;
        Ok(u64::from_ne_bytes(ns))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        end(self.found.id.tgid.cast_signed());
    }
}

fn end(pid: libc::pid_t) {
    // SAFETY: plain system calls on our own child, which nobody else waits for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

fn wait_readable(fd: RawFd, patience: Duration) -> io::Result<()> {
    let until = Instant::now() + patience;
    loop {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let left = until.saturating_duration_since(Instant::now());
        // SAFETY: one valid element.
        let ready =
            unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left.as_millis()).unwrap_or(i32::MAX)) };
        match ready {
            1.. => return Ok(()),
            0 => return Err(io::ErrorKind::TimedOut.into()),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
}

/// The child: obeys until its parent closes the pipe or dies.
///
/// # Safety
/// Runs in the only thread of a forked process; the descriptors are open.
unsafe fn obey(commands: RawFd, answers: RawFd, parents: RawFd, filtered: bool) -> ! {
    // SAFETY: system calls on our own descriptors and memory, and calls of functions that do nothing.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::close(parents);
        if filtered && !filter() {
            libc::_exit(1);
        }
        let mut command = [0u32; 2];
        while libc::read(commands, command.as_mut_ptr().cast(), size_of_val(&command)) == 8 {
            let Some(site) = Site::ALL.get(command[0] as usize) else { break };
            let call = std::hint::black_box(site.function());
            let begin_ns = cpu_ns();
            for _ in 0..command[1] {
                call();
            }
            let ns = cpu_ns() - begin_ns;
            if libc::write(answers, (&raw const ns).cast(), size_of_val(&ns)) != 8 {
                break;
            }
        }
        libc::_exit(0)
    }
}

fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Installs a filter that kills the process at any system call but those that [`obey`] makes.
fn filter() -> bool {
    const ALLOWED: [libc::c_long; 4] =
        [libc::SYS_read, libc::SYS_write, libc::SYS_clock_gettime, libc::SYS_exit_group];
    let statement = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let equal = |k: libc::c_long, skip: u8| libc::sock_filter { code: 0x15, jt: skip, jf: 0, k: k as u32 };
    // seccomp(2): load the number of the system call, compare, return.
    let program = [
        statement(0x20, 0),
        equal(ALLOWED[0], 4),
        equal(ALLOWED[1], 3),
        equal(ALLOWED[2], 2),
        equal(ALLOWED[3], 1),
        statement(0x06, libc::SECCOMP_RET_KILL_PROCESS),
        statement(0x06, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: the program is valid and as long as said; the kernel copies it.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obeys_and_survives_its_own_filter() {
        for filtered in [false, true] {
            let mut child = Child::start(filtered).unwrap();
            for site in Site::ALL {
                child.call(site, 10, Duration::from_secs(5)).unwrap();
            }
        }
    }
}

//! Reads the kernel log as it grows, without ever waiting for it.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::event::{Event, Xid};
use crate::host_clock::monotonic_ns;

/// Longest record that the kernel gives; a longer buffer is never needed.
const RECORD_BYTES: usize = 8192;
/// Records read in one go, so that a flood cannot keep the rings waiting.
const MAX_BURST: usize = 64;

/// The kernel log from when it was opened.
pub(super) struct KernelLog {
    file: File,
    /// Begin of a line whose end has not come.
    rest: Vec<u8>,
    overruns: u64,
}

impl KernelLog {
    /// Opens `/dev/kmsg`, or what takes its place, at its end.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        // A pipe cannot seek, and has nothing to skip.
        let _ = file.seek(SeekFrom::End(0));
        Ok(Self { file, rest: Vec::new(), overruns: 0 })
    }

    /// How often the kernel overwrote lines before they were read.
    pub(super) fn overruns(&self) -> u64 {
        self.overruns
    }

    /// The Xids among the lines that came since the last call.
    pub(super) fn read(&mut self, out: &mut Vec<Event>) {
        let mut buffer = [0; RECORD_BYTES];
        for _ in 0..MAX_BURST {
            match self.file.read(&mut buffer) {
                Ok(0) => return,
                Ok(bytes) => self.take(buffer.get(..bytes).unwrap_or_default(), monotonic_ns(), out),
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => self.overruns += 1,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Nothing there yet; on any other error, there may be at the next call.
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, bytes: &[u8], time_ns: u64, out: &mut Vec<Event>) {
        self.rest.extend_from_slice(bytes);
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        for line in self.rest.drain(..end).collect::<Vec<u8>>().split(|byte| *byte == b'\n') {
            out.extend(Xid::parse(&String::from_utf8_lossy(line), time_ns).map(Event::Xid));
        }
        if self.rest.len() > RECORD_BYTES {
            self.rest.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const XID: &str =
        "4,1,2000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n";

    fn xids(log: &mut KernelLog) -> Vec<u32> {
        let mut out = Vec::new();
        log.read(&mut out);
        out.iter().map(|event| if let Event::Xid(xid) = event { xid.xid } else { 0 }).collect()
    }

    #[test]
    fn only_what_comes_after_the_begin() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "{XID}").unwrap();
        let mut log = KernelLog::open(file.path()).unwrap();
        assert!(xids(&mut log).is_empty());
        write!(file, "6,2,2001,-;other\n{}", XID.replace("79", "31")).unwrap();
        assert_eq!(xids(&mut log), [31]);
        assert!(xids(&mut log).is_empty());
        assert_eq!(log.overruns(), 0);
    }

    #[test]
    fn a_pipe_gives_lines_in_pieces_and_never_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name is a string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let mut log = KernelLog::open(&path).unwrap();
        assert!(xids(&mut log).is_empty());
        let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
        let (first, second) = XID.split_at(20);
        writer.write_all(first.as_bytes()).unwrap();
        assert!(xids(&mut log).is_empty());
        writer.write_all(second.as_bytes()).unwrap();
        assert_eq!(xids(&mut log), [79]);
        // A line without an end is not kept for ever, and bytes that are no text harm nothing.
        for _ in 0..5 {
            writer.write_all(&[0xff; 4096]).unwrap();
            assert!(xids(&mut log).is_empty());
            assert!(log.rest.len() <= RECORD_BYTES);
        }
        writer.write_all(format!("\n{XID}").as_bytes()).unwrap();
        assert_eq!(xids(&mut log), [79]);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        assert!(KernelLog::open(Path::new("/nowhere/kmsg")).is_err());
    }
}

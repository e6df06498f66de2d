//! Keeps the files that targets map open: their names are looked up when a recording ends, and by then a process may be
//! gone, and with it the container that its files were in.

use std::{
    collections::HashMap,
    fs::File,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    sync::Arc,
};

use object::Object as _;

use super::{
    attach,
    process::{self, FileMapping},
};
use crate::{
    event::{Mapping, ProcessId},
    symbol::{HeldFiles, is_dump, perf_map},
};

/// As the kernel numbers files: good for as long as the file is kept open or mapped.
type Key = ((i32, i32), u64);

/// No more files are kept.
const MOST_FILES: usize = 1024;

/// A file that is kept open.
struct Kept {
    file: Arc<File>,
    build_id: Vec<u8>,
    changed: Option<(i64, i64)>,
}

/// Files that targets have mapped.
pub(super) struct Files {
    kept: HashMap<Key, Kept>,
    held: HeldFiles,
    /// Descriptors that this process may have.
    descriptors: u64,
    /// Mappings whose file is not kept, since there are too many.
    left_out: u64,
}

impl Files {
    pub(super) fn new() -> Self {
        let descriptors = process::descriptor_limit();
        Self { kept: HashMap::new(), held: HeldFiles::default(), descriptors, left_out: 0 }
    }

    /// A mapping that is new: its build-id is read, and its file kept open if it says what code is called.
    pub(super) fn mapped(&mut self, mapping: &mut Mapping, file: &FileMapping) {
        let key = (file.device, file.inode);
        if file.inode == 0 {
            return;
        }
        // Written anew where it lies, it has the same number.
        if self.kept.get(&key).is_none_or(|kept| kept.changed != changed(&kept.file)) {
            let Ok((opened, _)) = attach::open(mapping.process, file) else { return };
            let build_id = build_id_of(&opened);
            mapping.build_id = build_id.clone().unwrap_or_default();
            if build_id.is_none() && !is_dump(mapping) {
                return;
            }
            if !self.has_room_for(&opened) {
                self.left_out += 1;
                return;
            }
            let (changed, file) = (changed(&opened), Arc::new(opened));
            self.kept.insert(key, Kept { file, build_id: build_id.unwrap_or_default(), changed });
        }
        if let Some(kept) = self.kept.get(&key) {
            mapping.build_id.clone_from(&kept.build_id);
            self.held.mapped.insert(mapping.id, kept.file.clone());
        }
    }

    /// A process generates code: what it writes of that is kept open, once it is there.
    pub(super) fn generates(&mut self, process: ProcessId) {
        if !self.held.perf_maps.contains_key(&process)
            && let Some(file) = perf_map(process).filter(|file| self.has_room_for(file))
        {
            self.held.perf_maps.insert(process, file);
        }
    }

    /// The kernel gives the lowest number that is free: from half of them on, everything else could soon have none.
    fn has_room_for(&self, file: &File) -> bool {
        let number = u64::try_from(file.as_raw_fd()).unwrap_or(u64::MAX);
        self.kept.len() + self.held.perf_maps.len() < MOST_FILES && number < self.descriptors / 2
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }

    pub(super) fn take(&mut self) -> HeldFiles {
        std::mem::take(&mut self.held)
    }
}

fn changed(file: &File) -> Option<(i64, i64)> {
    file.metadata().ok().map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
}

/// `None` where it is no ELF file, empty where it has no build-id.
fn build_id_of(file: &File) -> Option<Vec<u8>> {
    // SAFETY: the map is private and only read; a file that is truncated meanwhile would raise SIGBUS, but then in the
    // process that runs it as code, too.
    let bytes = unsafe { memmap2::Mmap::map(file) }.ok()?;
    let elf = object::File::parse(&*bytes).ok()?;
    Some(elf.build_id().ok().flatten().unwrap_or_default().to_vec())
}

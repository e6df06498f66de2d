//! Attaches probe points to one process at a time: what it maps now, and again when its mappings change.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
};

use aya::programs::{
    UProbe,
    uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
};
use engines::{Library, Profiles, Role};
use object::Object as _;
use tracer_abi::{MAX_POINTS, call, programs};

use super::{
    ProbeError,
    kernel::Kernel,
    process::{self, FileMapping},
};
use crate::event::{Event, Mapping, Point, ProcessId, stack::MappingIndex};

/// File name of the library that takes GPU times. Its marks are ours: they do not make a program one that marks.
pub const INJECT_LIBRARY: &str = "libtracer_inject.so";

/// A file, as long as it is mapped somewhere.
type FileKey = ((i32, i32), u64);

/// Something that the user should know about a process: a point that cannot be probed, a library that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub process: ProcessId,
    pub library: String,
    pub text: String,
}

/// What is attached in one process. Dropping it takes the probes away.
#[derive(Default)]
pub(crate) struct Attached {
    mappings: Vec<Mapping>,
    pub(crate) index: MappingIndex,
    seen: HashSet<FileKey>,
    links: Vec<UProbeLink>,
    /// Points by role, to say what this process is.
    pub(crate) steps: usize,
    pub(crate) marks: usize,
    /// Should be looked at again.
    pub(crate) stale: bool,
    /// When the process began or changed its program, until its first scan after that.
    pub(crate) began_ns: Option<u64>,
}

impl Attached {
    /// Hands over its probes, to be taken away with [`detach`].
    pub(crate) fn take_links(&mut self) -> Vec<UProbeLink> {
        std::mem::take(&mut self.links)
    }
}

/// Takes probes away in the background: the kernel waits about 0.1 s for each, one after the other, until no CPU can be
/// inside it.
fn detach_later(links: Vec<UProbeLink>) {
    if !links.is_empty() {
        std::thread::spawn(move || drop(links));
    }
}

/// All processes of a recording.
pub(crate) struct Attacher {
    profiles: Profiles,
    libraries: HashMap<FileKey, Option<Arc<Library>>>,
    pub(crate) processes: BTreeMap<ProcessId, Attached>,
    next_mapping: u32,
    next_point: u32,
    pub(crate) notices: Vec<Notice>,
    /// Hits of a point are counted for its process under this name.
    pub(crate) points: Vec<(ProcessId, String)>,
}

impl Attacher {
    pub(crate) fn new(profiles: Profiles) -> Self {
        Self {
            profiles,
            libraries: HashMap::new(),
            processes: BTreeMap::new(),
            next_mapping: 0,
            next_point: 0,
            notices: Vec::new(),
            points: Vec::new(),
        }
    }

    /// The process is new or runs another program now: nothing that was known of it holds.
    pub(crate) fn begin_program(&mut self, process: ProcessId, time_ns: u64) {
        let attached = Attached { stale: true, began_ns: Some(time_ns), ..Attached::default() };
        if let Some(mut before) = self.processes.insert(process, attached) {
            detach_later(before.take_links());
        }
    }

    /// Looks at what the process maps; attaches what is new. `out` receives mappings and points.
    ///
    /// # Errors
    /// The process is gone or cannot be looked into. A point that cannot be attached is a notice, not an error.
    pub(crate) fn scan(
        &mut self,
        kernel: &mut Kernel,
        process: ProcessId,
        now_ns: u64,
        out: &mut Vec<Event>,
    ) -> Result<(), ProbeError> {
        let mut attached = self.processes.remove(&process).unwrap_or_default();
        attached.stale = false;
        let result = self.scan_into(kernel, process, &mut attached, now_ns, out);
        self.processes.insert(process, attached);
        result
    }

    fn scan_into(
        &mut self,
        kernel: &mut Kernel,
        process: ProcessId,
        attached: &mut Attached,
        now_ns: u64,
        out: &mut Vec<Event>,
    ) -> Result<(), ProbeError> {
        let files = process::mappings(process.tgid)?;
        let mut current = Vec::with_capacity(files.len());
        for file in &files {
            let library = self.library_of(process, file);
            let known = attached.mappings.iter().find(|mapping| same(mapping, file)).cloned();
            let mapping = known.unwrap_or_else(|| {
                let mapping = self.new_mapping(process, file, library.as_deref(), now_ns);
                out.push(Event::Mapping(mapping.clone()));
                mapping
            });
            current.push(mapping);
            if attached.seen.insert((file.device, file.inode))
                && let Some(library) = library
            {
                self.attach_library(kernel, process, file, &library, attached, now_ns, out);
            }
        }
        attached.index = MappingIndex::new(&current);
        attached.mappings = current;
        Ok(())
    }

    fn new_mapping(
        &mut self,
        process: ProcessId,
        file: &FileMapping,
        library: Option<&Library>,
        now_ns: u64,
    ) -> Mapping {
        let id = self.next_mapping;
        self.next_mapping += 1;
        let build_id = library.map(|library| library.build_id.clone());
        Mapping {
            id,
            time_ns: now_ns,
            process,
            begin: file.begin,
            end: file.end,
            offset: file.offset,
            inode: file.inode,
            path: file.path.clone(),
            build_id: build_id.unwrap_or_else(|| build_id_of(process, file)),
        }
    }

    /// What the profiles know about a mapped file; read once per file.
    fn library_of(&mut self, process: ProcessId, file: &FileMapping) -> Option<Arc<Library>> {
        if file.inode == 0 {
            return None;
        }
        let key = (file.device, file.inode);
        if let Some(known) = self.libraries.get(&key) {
            return known.clone();
        }
        let library = match read(process, file, |bytes| self.profiles.inspect(Path::new(&file.path), bytes)) {
            Ok(library) => library.map(Arc::new),
            Err(error) => {
                let text = format!("cannot be read ({error}): its probe points are not looked for");
                self.notice(process, file, text);
                None
            }
        };
        // What would not be probed anyway is for `tracer probes` to tell.
        let refusals = library.iter().flat_map(|library| &library.refusals);
        for refusal in refusals.filter(|refusal| refusal.default) {
            self.notice(process, file, format!("{}: {}", refusal.point, refusal.reason));
        }
        self.libraries.insert(key, library.clone());
        library
    }

    #[expect(clippy::too_many_arguments, reason = "one call site; a struct would only rename them")]
    fn attach_library(
        &mut self,
        kernel: &mut Kernel,
        process: ProcessId,
        file: &FileMapping,
        library: &Library,
        attached: &mut Attached,
        now_ns: u64,
        out: &mut Vec<Event>,
    ) {
        let Ok((_, path)) = open(process, file) else { return };
        for point in library.points.iter().filter(|point| point.default) {
            let id = self.next_point;
            if id >= MAX_POINTS {
                self.notice(process, file, format!("{}: more than {MAX_POINTS} probe points", point.name));
                return;
            }
            match attach_point(kernel, process, &path, id, point) {
                Ok(links) => attached.links.extend(links),
                Err(error) => {
                    self.notice(process, file, format!("{} not probed: {error}", point.name));
                    continue;
                }
            }
            self.next_point += 1;
            self.points.push((process, format!("{}:{}", point.engine, point.name)));
            attached.steps += usize::from(point.role == Role::Step);
            attached.marks += usize::from(point.role == Role::Mark && !file.path.ends_with(INJECT_LIBRARY));
            out.push(Event::Point(Point {
                id,
                time_ns: now_ns,
                process,
                engine: point.engine.clone(),
                name: point.name.clone(),
                role: point.role,
                library: file.path.clone(),
                build_id: library.build_id.clone(),
                offset: point.offset,
                placement: point.placement.name().to_owned(),
                has_return: point.return_probe,
                stream_arg: point.stream_arg(),
                simulated: library.simulated,
            }));
        }
    }

    fn notice(&mut self, process: ProcessId, file: &FileMapping, text: String) {
        self.notices.push(Notice { process, library: file.path.clone(), text });
    }
}

fn attach_point(
    kernel: &mut Kernel,
    process: ProcessId,
    path: &Path,
    id: u32,
    point: &engines::Point,
) -> Result<Vec<UProbeLink>, ProbeError> {
    let cookie = call::cookie(id, point.return_probe);
    if point.role == Role::Mark {
        return Ok(vec![attach_one(kernel.uprobe(programs::MARK)?, process, path, point.offset, cookie)?]);
    }
    let mut links = Vec::with_capacity(2);
    // The return probe first: an entry without its return would stay open.
    if point.return_probe {
        let program = kernel.uprobe(programs::CALL_RETURN)?;
        links.push(attach_one(program, process, path, point.offset, cookie)?);
    }
    links.push(attach_one(kernel.uprobe(programs::CALL_ENTRY)?, process, path, point.offset, cookie)?);
    Ok(links)
}

fn attach_one(
    program: &mut UProbe,
    process: ProcessId,
    path: &Path,
    offset: u64,
    cookie: u64,
) -> Result<UProbeLink, ProbeError> {
    let pid = NonZeroU32::new(process.tgid).ok_or(ProbeError::ProcessGone { pid: 0 })?;
    let point =
        UProbeAttachPoint { location: UProbeAttachLocation::AbsoluteOffset(offset), cookie: Some(cookie) };
    let what = || format!("attaching at {}+{offset:#x} in process {pid}", path.display());
    let link = program
        .attach(point, path, UProbeScope::OneProcess(pid))
        .map_err(|source| ProbeError::Program { what: what(), source })?;
    program.take_link(link).map_err(|source| ProbeError::Program { what: what(), source })
}

/// Opens the very file that is mapped: by path inside the process's root, or through the mapping when the path names
/// another file now (or none).
fn open(process: ProcessId, file: &FileMapping) -> std::io::Result<(File, PathBuf)> {
    let by_path = PathBuf::from(format!("/proc/{}/root{}", process.tgid, file.path));
    if !file.deleted
        && let Ok(opened) = File::open(&by_path)
        && opened.metadata().is_ok_and(|meta| {
            use std::os::unix::fs::MetadataExt;
            meta.ino() == file.inode
        })
    {
        return Ok((opened, by_path));
    }
    let by_mapping =
        PathBuf::from(format!("/proc/{}/map_files/{:x}-{:x}", process.tgid, file.begin, file.end));
    File::open(&by_mapping).map(|opened| (opened, by_mapping))
}

/// Runs `f` on the bytes of a mapped file.
///
/// # Errors
/// The file cannot be opened or mapped.
pub(crate) fn read<T>(
    process: ProcessId,
    file: &FileMapping,
    f: impl FnOnce(&[u8]) -> T,
) -> std::io::Result<T> {
    let (opened, _) = open(process, file)?;
    // SAFETY: the map is private and only read; a file that is truncated meanwhile would raise SIGBUS, but then in
    // the process that runs it as code, too.
    let bytes = unsafe { memmap2::Mmap::map(&opened) }?;
    Ok(f(&bytes))
}

fn build_id_of(process: ProcessId, file: &FileMapping) -> Vec<u8> {
    if file.inode == 0 {
        return Vec::new();
    }
    let build_id = |bytes: &[u8]| {
        let file = object::File::parse(bytes).ok()?;
        file.build_id().ok().flatten().map(<[u8]>::to_vec)
    };
    read(process, file, build_id).ok().flatten().unwrap_or_default()
}

fn same(mapping: &Mapping, file: &FileMapping) -> bool {
    (mapping.begin, mapping.end, mapping.offset, mapping.inode)
        == (file.begin, file.end, file.offset, file.inode)
        && mapping.path == file.path
}

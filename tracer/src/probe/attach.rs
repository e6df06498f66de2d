//! Attaches probe points to one process at a time: what it maps now, and again when its mappings change.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use engines::{Library, Placement, Profiles, Role};
use tracer_abi::{MAX_POINTS, call, open as file_open, programs, shape, tensor, tensor::Question};

use super::{
    ProbeError,
    files::Files,
    kernel::Kernel,
    process::{self, FileMapping},
    trial::{self, Seccomp},
    uprobe::{Links, Place},
};
use crate::event::{Event, Mapping, Point, ProcessId, stack::MappingIndex};

/// File name of the library that takes GPU times. Its marks are ours: they do not make a program one that marks.
pub const INJECT_LIBRARY: &str = "libtracer_inject.so";

const ALL: Seccomp = Seccomp { returns: true, nop5: true };
const NONE: Seccomp = Seccomp { returns: false, nop5: false };

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
    /// What it maps, as it was found last and as the capture calls it.
    files: Vec<FileMapping>,
    mappings: Vec<Mapping>,
    pub(crate) index: MappingIndex,
    seen: HashSet<FileKey>,
    links: Links,
    /// Points by role, to say what this process is.
    pub(crate) steps: usize,
    pub(crate) marks: usize,
    /// Should be looked at again.
    pub(crate) stale: bool,
    /// It has return probes, or probes on 5-byte nops, of which a seccomp filter may not know.
    fragile: bool,
    /// When the process began or changed its program, until its first scan after that.
    pub(crate) began_ns: Option<u64>,
}

impl Attached {
    pub(crate) fn take_links(&mut self) -> Links {
        std::mem::take(&mut self.links)
    }
}

/// What became of the probe points of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Wanted, and known where.
    pub(crate) found: u64,
    pub(crate) attached: u64,
    /// Attached without the return probe that they should have.
    pub(crate) returns_withheld: u64,
}

/// A point to attach.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    id: u32,
    point: &'a engines::Point,
    has_return: bool,
    /// Its library counts dimensions of tensors in 64 bits.
    is_wide: bool,
}

/// All processes of a recording.
pub(crate) struct Attacher {
    profiles: Profiles,
    libraries: HashMap<FileKey, Option<Arc<Library>>>,
    pub(crate) files: Files,
    pub(crate) processes: BTreeMap<ProcessId, Attached>,
    next_mapping: u32,
    next_point: u32,
    pub(crate) notices: Vec<Notice>,
    /// Hits of a point are counted for its process under this name.
    pub(crate) points: Vec<(ProcessId, String)>,
    pub(crate) counts: BTreeMap<ProcessId, Counts>,
    /// Return probes are wanted at all.
    returns: bool,
    /// What a process under seccomp survives, once it was tried out.
    seccomp: Option<Seccomp>,
}

impl Attacher {
    pub(crate) fn new(profiles: Profiles, returns: bool) -> Self {
        Self {
            profiles,
            libraries: HashMap::new(),
            files: Files::new(),
            processes: BTreeMap::new(),
            next_mapping: 0,
            next_point: 0,
            notices: Vec::new(),
            points: Vec::new(),
            counts: BTreeMap::new(),
            returns,
            seccomp: None,
        }
    }

    /// The process is new or runs another program now: nothing that was known of it holds.
    pub(crate) fn begin_program(&mut self, process: ProcessId, time_ns: u64) {
        let attached = Attached { stale: true, began_ns: Some(time_ns), ..Attached::default() };
        if let Some(mut before) = self.processes.insert(process, attached) {
            before.take_links().detach_in_background();
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
        let epoch = kernel.epoch(process);
        let files = process::mappings(process.tgid)?;
        if kernel.epoch(process) != epoch {
            // It has executed something meanwhile: whose these are is not known.
            attached.stale = true;
            return Ok(());
        }
        if let Some(epoch) = epoch
            && files != attached.files
        {
            kernel.unwinder.scan(process, epoch, files.clone());
        }
        let allowed = self.allowed(kernel, process);
        // Where return probes are not wanted there are none, and nops were probed only where that is allowed.
        let fewer = Seccomp { returns: allowed.returns || !self.returns, ..allowed } != ALL;
        if attached.fragile && fewer {
            self.notice_of(process, "seccomp", "the process has put itself under it: probed anew".into());
            attached.take_links().detach_in_background();
            attached.seen.clear();
            attached.fragile = false;
        }
        let mut current = Vec::with_capacity(files.len());
        for file in &files {
            let library = self.library_of(process, file);
            let known = attached.mappings.iter().find(|mapping| same(mapping, file)).cloned();
            let mapping = known.unwrap_or_else(|| {
                let mapping = self.new_mapping(process, file, now_ns);
                out.push(Event::Mapping(mapping.clone()));
                mapping
            });
            current.push(mapping);
            if attached.seen.insert((file.device, file.inode))
                && let Some(library) = library
            {
                self.attach_library(kernel, process, file, &library, allowed, attached, now_ns, out);
            }
        }
        if files.iter().any(|file| file.path.is_empty()) {
            self.files.generates(process);
        }
        attached.index = MappingIndex::new(&current);
        attached.mappings = current;
        attached.files = files;
        Ok(())
    }

    fn new_mapping(&mut self, process: ProcessId, file: &FileMapping, now_ns: u64) -> Mapping {
        let mut mapping = Mapping {
            id: self.next_mapping,
            time_ns: now_ns,
            process,
            begin: file.begin,
            end: file.end,
            offset: file.offset,
            inode: file.inode,
            path: file.path.clone(),
            build_id: Vec::new(),
        };
        self.next_mapping += 1;
        self.files.mapped(&mut mapping, file);
        mapping
    }

    /// What the profiles know about a mapped file; read once per file.
    fn library_of(&mut self, process: ProcessId, file: &FileMapping) -> Option<Arc<Library>> {
        if file.inode == 0 || !file.path.starts_with('/') {
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
        allowed: Seccomp,
        attached: &mut Attached,
        now_ns: u64,
        out: &mut Vec<Event>,
    ) {
        let Ok((_, path)) = open(process, file) else { return };
        let mut wanted = Vec::new();
        // TensorRT 10 made them so.
        let major =
            library.version.as_deref().and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        let is_wide = major.is_some_and(|major| major >= 10);
        let skips_nvtx = library.points.iter().any(|point| point.role == Role::Nvtx) && hears_nvtx(process);
        for point in library.points.iter().filter(|point| point.default) {
            if skips_nvtx && point.role == Role::Nvtx {
                continue;
            }
            if self.next_point >= MAX_POINTS {
                self.notice(process, file, format!("{}: more than {MAX_POINTS} probe points", point.name));
                break;
            }
            let counts = self.counts.entry(process).or_default();
            counts.found += 1;
            if point.placement == Placement::Nop5 && !allowed.nop5 {
                let why =
                    "the process is under seccomp, and this kernel's probes of 5-byte nops do not pass it";
                self.notice(process, file, format!("{} not probed: {why}", point.name));
                continue;
            }
            let has_return = point.return_probe && allowed.returns;
            counts.returns_withheld += u64::from(point.return_probe && !has_return);
            wanted.push(Wanted { id: self.next_point, point, has_return, is_wide });
            self.next_point += 1;
            self.points.push((process, format!("{}:{}", point.engine, point.name)));
        }
        let refused = |point: &engines::Point, error: ProbeError| {
            self.notice(process, file, format!("{} not probed: {error}", point.name));
        };
        let done = attach_points(kernel, process, &path, wanted, &mut attached.links, refused);
        self.counts.entry(process).or_default().attached += done.len() as u64;
        for Wanted { id, point, has_return, .. } in done {
            attached.fragile |= has_return || point.placement == Placement::Nop5;
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
                version: library.version.clone().unwrap_or_default(),
                build_id: library.build_id.clone(),
                offset: point.offset,
                placement: point.placement.name().to_owned(),
                has_return,
                stream_arg: point.stream_arg(),
                simulated: library.simulated,
            }));
        }
    }

    /// Which probes a process may have.
    fn allowed(&mut self, kernel: &mut Kernel, process: ProcessId) -> Seccomp {
        let wanted = Seccomp { returns: self.returns, ..ALL };
        if !process::is_under_seccomp(process.tgid) {
            return wanted;
        }
        let survives = match self.seccomp {
            Some(known) => known,
            None => {
                let tried = trial::seccomp(kernel).unwrap_or_else(|error| {
                    let text = format!("what is safe under seccomp could not be tried out ({error})");
                    self.notice_of(process, "seccomp", text);
                    NONE
                });
                if tried != ALL {
                    let text = "processes under seccomp get fewer probes: this kernel's return probes, or those of \
                                5-byte nops, would end them";
                    self.notice_of(process, "seccomp", text.into());
                }
                self.seccomp = Some(tried);
                tried
            }
        };
        Seccomp { returns: wanted.returns && survives.returns, nop5: survives.nop5 }
    }

    fn notice(&mut self, process: ProcessId, file: &FileMapping, text: String) {
        self.notice_of(process, &file.path, text);
    }

    fn notice_of(&mut self, process: ProcessId, library: &str, text: String) {
        self.notices.push(Notice { process, library: library.to_owned(), text });
    }
}

/// Attaches points of one file: all at once where the kernel can, and where one of them is refused, each by itself.
/// `refused` hears of those that cannot be probed.
fn attach_points<'a>(
    kernel: &mut Kernel,
    process: ProcessId,
    path: &Path,
    points: Vec<Wanted<'a>>,
    links: &mut Links,
    mut refused: impl FnMut(&engines::Point, ProbeError),
) -> Vec<Wanted<'a>> {
    if kernel.uprobes.in_batches() {
        match attach_group(kernel, process, path, &points) {
            Ok(group) => {
                links.append(group);
                return points;
            }
            Err(error) => tracing::debug!("{error}: trying each by itself"),
        }
    }
    let attach = |wanted: &Wanted| match attach_group(kernel, process, path, &[*wanted]) {
        Ok(group) => {
            links.append(group);
            true
        }
        Err(error) => {
            refused(wanted.point, error);
            false
        }
    };
    points.into_iter().filter(attach).collect()
}

fn attach_group(
    kernel: &mut Kernel,
    process: ProcessId,
    path: &Path,
    points: &[Wanted],
) -> Result<Links, ProbeError> {
    let places = |fits: fn(&Wanted) -> bool| -> Vec<Place> {
        let cookie = |one: &Wanted| match one.point.role {
            Role::Shape => shape::cookie(one.id, one.is_wide),
            Role::DataType => tensor::cookie(one.id, Question::DataType, one.is_wide),
            Role::AskedShape => tensor::cookie(one.id, Question::Shape, one.is_wide),
            Role::CreatesContext => tensor::cookie(one.id, Question::Context, one.is_wide),
            Role::Open => file_open::cookie(one.id, one.point.args.contains_key("folder")),
            Role::Nvtx => nvtx_function(one.point).cookie(one.id, one.has_return),
            // Hazards are about where these are called.
            Role::Step | Role::CaptureBegin => call::cookie(one.id, one.has_return) | call::WITH_STACK,
            _ => call::cookie(one.id, one.has_return),
        };
        let place = |one: &Wanted| Place { offset: one.point.offset, cookie: cookie(one) };
        points.iter().filter(|one| fits(one)).map(place).collect()
    };
    // The return probes first: an entry without its return would stay open.
    let returns = places(|one| is_call(one.point.role) && one.has_return);
    let mut links = kernel.attach(programs::CALL_RETURN, process, path, &returns)?;
    let entries = places(|one| is_call(one.point.role));
    links.append(kernel.attach(programs::CALL_ENTRY, process, path, &entries)?);
    let marks = places(|one| one.point.role == Role::Mark);
    links.append(kernel.attach(programs::MARK, process, path, &marks)?);
    let shapes = places(|one| one.point.role == Role::Shape);
    links.append(kernel.attach(programs::SHAPE, process, path, &shapes)?);
    // Without its answer a question says nothing.
    let questions = places(|one| is_question(one.point.role) && one.has_return);
    links.append(kernel.attach(programs::TENSOR_RETURN, process, path, &questions)?);
    links.append(kernel.attach(programs::TENSOR, process, path, &questions)?);
    let opens = places(|one| one.point.role == Role::Open);
    links.append(kernel.attach(programs::FILE_OPEN, process, path, &opens)?);
    let returns = places(|one| one.point.role == Role::Nvtx && one.has_return);
    links.append(kernel.attach(programs::NVTX_RETURN, process, path, &returns)?);
    let ranges = places(|one| one.point.role == Role::Nvtx);
    links.append(kernel.attach(programs::NVTX, process, path, &ranges)?);
    Ok(links)
}

fn is_call(role: Role) -> bool {
    !matches!(role, Role::Mark | Role::Open | Role::Shape | Role::Nvtx) && !is_question(role)
}

fn is_question(role: Role) -> bool {
    matches!(role, Role::DataType | Role::AskedShape | Role::CreatesContext)
}

/// What a probe of a function of NVTX reads: its name says what it does, the profile where its arguments are.
fn nvtx_function(point: &engines::Point) -> tracer_abi::nvtx::Function {
    use tracer_abi::mark::{NVTX_END, NVTX_MARK, NVTX_POP, NVTX_PUSH, NVTX_START};
    let actions = [
        ("RangePush", NVTX_PUSH),
        ("RangePop", NVTX_POP),
        ("RangeStart", NVTX_START),
        ("RangeEnd", NVTX_END),
        ("Mark", NVTX_MARK),
    ];
    let action = actions.into_iter().find(|(part, _)| point.name.contains(part));
    let argument = |name: &str| point.args.get(name).copied();
    tracer_abi::nvtx::Function {
        action: action.map_or(NVTX_MARK, |(_, action)| action),
        text: argument("text"),
        attributes: argument("attributes"),
        range: argument("range"),
        has_domain: argument("domain").is_some(),
    }
}

/// Whether the injected library is the process's tool of NVTX: what functions of NVTX do is then heard already.
fn hears_nvtx(process: ProcessId) -> bool {
    let environment = std::fs::read(format!("/proc/{}/environ", process.tgid)).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| {
        variable.starts_with(b"NVTX_INJECTION64_PATH=") && variable.ends_with(INJECT_LIBRARY.as_bytes())
    })
}

/// Opens the very file that is mapped: by path inside the process's root, or through the mapping when the path names
/// another file now (or none).
pub(crate) fn open(process: ProcessId, file: &FileMapping) -> std::io::Result<(File, PathBuf)> {
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

fn same(mapping: &Mapping, file: &FileMapping) -> bool {
    (mapping.begin, mapping.end, mapping.offset, mapping.inode)
        == (file.begin, file.end, file.offset, file.inode)
        && mapping.path == file.path
}

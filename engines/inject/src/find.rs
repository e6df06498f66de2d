//! The libraries that the program has mapped, and the vtable words among them that hold a step's function.

use std::{
    ffi::{CStr, CString, OsStr, c_int, c_void},
    fs::File,
    ops::Range,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use engines::{Point, Profiles, Role};

use crate::{
    hook::{self, Hook},
    start::with_loader,
};

/// How often a library is looked at that cannot be hooked.
const ATTEMPTS: u8 = 10;

/// A mapped library.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapped {
    /// What comes on top of the addresses in its file.
    base: usize,
    path: PathBuf,
    /// Addresses that the loader made read-only after relocation.
    read_only: Range<usize>,
}

/// Looks for engines in the process, and hooks them.
pub(crate) struct Finder {
    profiles: Profiles,
    /// Libraries that the loader had mapped and unmapped, ever, at the last look.
    changes: u64,
    /// What has been looked at.
    known: Vec<Mapped>,
    hooks: Vec<Hook>,
    /// Looks that have failed at a library, one after the other.
    attempts: u8,
    /// Why an engine could not be hooked.
    problem: Option<String>,
}

impl Finder {
    pub(crate) fn new() -> Self {
        Self {
            profiles: Profiles::builtin(),
            changes: 0,
            known: Vec::new(),
            hooks: Vec::new(),
            attempts: 0,
            problem: None,
        }
    }

    /// Whether an engine is hooked.
    pub(crate) fn is_hooked(&self) -> bool {
        !self.hooks.is_empty()
    }

    /// Why no engine is hooked although there is one.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref().filter(|_| !self.is_hooked())
    }

    /// Hooks engines that were mapped since the last look.
    pub(crate) fn look(&mut self) {
        let Some(mapped) = mapped(&self.profiles, &mut self.changes) else { return };
        // What was unmapped is forgotten; it may come back elsewhere.
        self.known.retain(|library| mapped.contains(library));
        for library in mapped {
            if self.known.contains(&library) {
                continue;
            }
            match self.hook(&library) {
                // The loader may still be at work on it.
                Err(problem) if self.attempts < ATTEMPTS => {
                    self.problem = Some(format!("{}: {problem}", library.path.display()));
                    self.attempts += 1;
                    self.changes = 0;
                    continue;
                }
                Err(problem) => self.problem = Some(format!("{}: {problem}", library.path.display())),
                Ok(()) => self.attempts = 0,
            }
            self.known.push(library);
        }
    }

    fn hook(&mut self, library: &Mapped) -> Result<(), String> {
        if !keep_mapped(&library.path) {
            return Err("it was unmapped meanwhile".to_owned());
        }
        let file = File::open(&library.path).map_err(|error| format!("cannot open it: {error}"))?;
        // SAFETY: the mapping is private and only read. Who truncates a library that is mapped breaks the program anyway.
        let data = unsafe { memmap2::Mmap::map(&file) }.map_err(|error| format!("cannot map it: {error}"))?;
        let Some(known) = self.profiles.inspect(&library.path, &data) else { return Ok(()) };
        for point in known.points.iter().filter(|point| is_step(point)) {
            let function = library.base.wrapping_add(point.address as usize);
            for word in &point.vtable_words {
                let word = library.base.wrapping_add(*word as usize);
                // SAFETY: the resolver says that this word of the library holds the step's function, whose arguments
                // are the object and the stream; the library stays mapped from now on.
                self.hooks.push(unsafe { hook::install(word, function, library.read_only.contains(&word)) }?);
            }
        }
        match known.refusals.first() {
            Some(refusal) if known.points.is_empty() => {
                Err(format!("{} not found: {}", refusal.point, refusal.reason))
            }
            _ => Ok(()),
        }
    }

    /// Puts all slots back.
    pub(crate) fn unhook(&mut self) {
        for hook in self.hooks.drain(..) {
            // SAFETY: libraries with hooks stay mapped.
            if let Err(problem) = unsafe { hook.remove() } {
                self.problem = Some(problem);
            }
        }
    }
}

/// Whether a point is a virtual method that a shim can stand for: (this, stream).
fn is_step(point: &Point) -> bool {
    point.role == Role::Step && point.stream_arg() == Some(1) && point.args.get("context") == Some(&0)
}

/// Takes a reference to a library that is mapped, so that it stays so; false when it is no more.
fn keep_mapped(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the name is a string; RTLD_NOLOAD runs no code of the library.
    !with_loader(|| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) }).is_null()
}

/// What the walk over the mapped libraries gathers.
struct Walk<'a> {
    profiles: &'a Profiles,
    changes: u64,
    changed: bool,
    found: Vec<Mapped>,
}

/// The mapped libraries that a profile concerns; `None` when none came or went since `changes`, which is updated.
fn mapped(profiles: &Profiles, changes: &mut u64) -> Option<Vec<Mapped>> {
    let mut walk = Walk { profiles, changes: *changes, changed: false, found: Vec::new() };
    // SAFETY: `visit` has the type that is expected, and gets `walk`, which outlives the call.
    with_loader(|| unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut walk).cast()) });
    *changes = walk.changes;
    walk.changed.then_some(walk.found)
}

/// Looks at one mapped library. A result other than 0 ends the walk.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _bytes: usize, walk: *mut c_void) -> c_int {
    // SAFETY: `mapped` passed this pointer.
    let walk = unsafe { &mut *walk.cast::<Walk>() };
    // SAFETY: the loader passes a valid description.
    let info = unsafe { &*info };
    let changes = info.dlpi_adds.wrapping_add(info.dlpi_subs);
    if !walk.changed && changes == walk.changes {
        return 1;
    }
    (walk.changed, walk.changes) = (true, changes);
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the name is a string of the loader's.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()));
    let is_concerned =
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| walk.profiles.engine_of(name).is_some());
    if !is_concerned || info.dlpi_phdr.is_null() {
        return 0;
    }
    // SAFETY: the loader passes its own table of program headers.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let base = info.dlpi_addr as usize;
    let range = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        start..start.wrapping_add(header.p_memsz as usize)
    };
    let read_only = headers.iter().find(|header| header.p_type == libc::PT_GNU_RELRO).map_or(0..0, range);
    walk.found.push(Mapped { base, path: path.to_owned(), read_only });
    0
}

//! Puts the uprobe programs into processes: many places with one link where the kernel can (Linux ≥ 6.6), else one by
//! one.
//!
//! One link for many places is more than convenience: the kernel takes the probes of a link away together, where it
//! waits about 0.1 s for each that was placed alone. aya 0.14 offers no such links; so the programs are loaded once
//! more, from aya's view of the object file, with the attach type that they need.

use std::{
    collections::{HashMap, HashSet},
    ffi::CString,
    io,
    num::NonZeroU32,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya::{
    Ebpf,
    maps::Map,
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeScope},
    },
};
use bytemuck::{Pod, Zeroable};
use tracer_abi::programs;

use super::{ProbeError, bpf, object};
use crate::event::ProcessId;

/// The uprobe programs.
pub(crate) const PROGRAMS: [&str; 9] = [
    programs::CALL_ENTRY,
    programs::CALL_RETURN,
    programs::MARK,
    programs::NVTX,
    programs::NVTX_RETURN,
    programs::FILE_OPEN,
    programs::SHAPE,
    programs::TENSOR,
    programs::TENSOR_RETURN,
];

/// A place to probe in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// File offset of the instruction.
    pub(crate) offset: u64,
    pub(crate) cookie: u64,
}

/// Probes that stay while this lives.
#[expect(dead_code, reason = "held for its drop only")]
enum Link {
    Many(OwnedFd),
    One(UProbeLink),
}

/// The probes of a process. Dropping them takes them away, too, one after the other.
#[derive(Default)]
pub(crate) struct Links {
    entries: Vec<Link>,
    returns: Vec<Link>,
}

impl Links {
    pub(crate) fn append(&mut self, mut other: Self) {
        self.entries.append(&mut other.entries);
        self.returns.append(&mut other.returns);
    }

    /// Takes the probes away, those of returns last: a call that was seen to begin is seen to end. For each link the
    /// kernel waits until no CPU can be inside a probe of it; these waits overlap.
    pub(crate) fn detach(self) {
        for links in [self.entries, self.returns] {
            std::thread::scope(|scope| {
                for link in links {
                    scope.spawn(move || drop(link));
                }
            });
        }
    }

    /// As [`Links::detach`], with nobody waiting for it.
    pub(crate) fn detach_in_background(self) {
        if !self.entries.is_empty() || !self.returns.is_empty() {
            std::thread::spawn(move || self.detach());
        }
    }
}

/// Loaded uprobe programs.
pub(crate) struct Uprobes {
    /// By name; empty where the kernel offers no links for many places.
    many: HashMap<&'static str, OwnedFd>,
}

impl Uprobes {
    /// Loads the programs, whose maps `ebpf` has created (and still holds).
    ///
    /// # Errors
    /// The kernel refuses a program, or the object file has none of its name.
    pub(crate) fn load(ebpf: &mut Ebpf) -> Result<Self, ProbeError> {
        match load_many(ebpf) {
            Ok(many) => Ok(Self { many }),
            Err(error) => {
                tracing::debug!("probes are placed one by one: {error}");
                for name in PROGRAMS {
                    let what = || format!("loading program `{name}`");
                    uprobe(ebpf, name)?
                        .load()
                        .map_err(|source| ProbeError::Program { what: what(), source })?;
                }
                Ok(Self { many: HashMap::new() })
            }
        }
    }

    /// Whether many places share a link: attaching and taking away is a matter of milliseconds then.
    pub(crate) fn in_batches(&self) -> bool {
        !self.many.is_empty()
    }

    /// Probes places of one file in one process, all or none.
    ///
    /// # Errors
    /// The kernel refuses one of them, or the process is gone.
    pub(crate) fn attach(
        &self,
        ebpf: &mut Ebpf,
        name: &'static str,
        process: ProcessId,
        path: &Path,
        places: &[Place],
    ) -> Result<Links, ProbeError> {
        let links = match self.many.get(name) {
            _ if places.is_empty() => Vec::new(),
            Some(program) => vec![attach_many(program, name, process, path, places)?],
            None => {
                let program = uprobe(ebpf, name)?;
                places
                    .iter()
                    .map(|place| attach_one(program, process, path, *place))
                    .collect::<Result<_, _>>()?
            }
        };
        Ok(if is_return(name) {
            Links { entries: Vec::new(), returns: links }
        } else {
            Links { entries: links, returns: Vec::new() }
        })
    }
}

/// Whether the program is for returns of functions.
fn is_return(name: &str) -> bool {
    matches!(name, programs::CALL_RETURN | programs::NVTX_RETURN | programs::TENSOR_RETURN)
}

fn uprobe<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut UProbe, ProbeError> {
    let program = ebpf.program_mut(name).ok_or(ProbeError::Absent { what: "program", name })?;
    program.try_into().map_err(|source| ProbeError::Program { what: name.into(), source })
}

fn what(process: ProcessId, path: &Path, place: Place) -> String {
    format!("attaching at {}+{:#x} in process {}", path.display(), place.offset, process.tgid)
}

fn attach_one(
    program: &mut UProbe,
    process: ProcessId,
    path: &Path,
    place: Place,
) -> Result<Link, ProbeError> {
    let pid = NonZeroU32::new(process.tgid).ok_or(ProbeError::ProcessGone { pid: 0 })?;
    let location = UProbeAttachLocation::AbsoluteOffset(place.offset);
    let point = UProbeAttachPoint { location, cookie: Some(place.cookie) };
    let error = |source| ProbeError::Program { what: what(process, path, place), source };
    let link = program.attach(point, path, UProbeScope::OneProcess(pid)).map_err(error)?;
    program.take_link(link).map(Link::One).map_err(error)
}

fn attach_many(
    program: &OwnedFd,
    name: &str,
    process: ProcessId,
    path: &Path,
    places: &[Place],
) -> Result<Link, ProbeError> {
    let path_text = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| ProbeError::Process { pid: process.tgid, source: io::ErrorKind::InvalidInput.into() })?;
    let offsets: Vec<u64> = places.iter().map(|place| place.offset).collect();
    let cookies: Vec<u64> = places.iter().map(|place| place.cookie).collect();
    let attributes = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        attach_type: BPF_TRACE_UPROBE_MULTI,
        path: path_text.as_ptr() as u64,
        offsets: offsets.as_ptr() as u64,
        cookies: cookies.as_ptr() as u64,
        count: u32::try_from(places.len()).unwrap_or(u32::MAX),
        multi_flags: if is_return(name) { BPF_F_UPROBE_MULTI_RETURN } else { 0 },
        pid: process.tgid,
        ..LinkCreate::zeroed()
    };
    // SAFETY: what the attributes point to is valid, and as long as they say, during the call.
    let link = unsafe { bpf::open(BPF_LINK_CREATE, &attributes) };
    link.map(Link::Many).map_err(|source| ProbeError::Attach {
        what: format!("attaching at {} places of {}", places.len(), path.display()),
        pid: process.tgid,
        source,
    })
}

fn load_many(ebpf: &Ebpf) -> Result<HashMap<&'static str, OwnedFd>, ProbeError> {
    let bad = |what: String| ProbeError::Object { what };
    let mut parsed = aya_obj::Object::parse(object::bytes()?).map_err(|error| bad(error.to_string()))?;
    let maps: HashMap<&str, RawFd> =
        ebpf.maps().filter_map(|(name, map)| Some((name, raw_fd(map)?))).collect();
    let text: HashSet<usize> = parsed.functions.keys().map(|(section, _)| *section).collect();
    let described = parsed.maps.clone();
    let fds =
        described.iter().filter_map(|(name, map)| Some((name.as_str(), *maps.get(name.as_str())?, map)));
    parsed.relocate_maps(fds, &text).map_err(|error| bad(error.to_string()))?;
    parsed.relocate_calls(&text).map_err(|error| bad(error.to_string()))?;
    let types = load_types(&mut parsed)?;
    PROGRAMS
        .into_iter()
        .map(|name| {
            let absent = ProbeError::Absent { what: "program", name };
            let program = parsed.programs.get(name);
            let function = program.and_then(|program| parsed.functions.get(&program.function_key()));
            let function = function.ok_or(absent)?;
            let (instructions, described) = (&function.instructions, &function.func_info.func_info);
            let license = parsed.license.clone();
            let attributes = ProgLoad {
                prog_type: BPF_PROG_TYPE_KPROBE,
                count: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
                instructions: instructions.as_ptr() as u64,
                license: license.as_ptr() as u64,
                name: prog_name(name),
                expected_attach_type: BPF_TRACE_UPROBE_MULTI,
                types: types.as_raw_fd().cast_unsigned(),
                function_bytes: u32::try_from(function.func_info_rec_size).unwrap_or(0),
                functions: described.as_ptr() as u64,
                function_count: u32::try_from(described.len()).unwrap_or(0),
                ..ProgLoad::zeroed()
            };
            // SAFETY: what the attributes point to is valid, and as long as they say, during the call.
            let loaded = unsafe { bpf::open(BPF_PROG_LOAD, &attributes) };
            let program = loaded.map_err(|error| bad(format!("program `{name}`: {error}")))?;
            Ok((name, program))
        })
        .collect()
}

/// Loads the types of the programs. By them the kernel knows which functions stand on their own: it verifies those once,
/// and not for each call.
fn load_types(parsed: &mut aya_obj::Object) -> Result<OwnedFd, ProbeError> {
    let bad = |what: String| ProbeError::Object { what };
    // A kernel that has links for many places knows all kinds of types, but perhaps no empty section of data.
    let known = aya_obj::btf::BtfFeatures::new(true, true, true, false, true, true, true, true);
    let types = parsed.fixup_and_sanitize_btf(&known).map_err(|error| bad(error.to_string()))?;
    let bytes = types.ok_or_else(|| bad("it has no types (BTF)".into()))?.to_bytes();
    let attributes = TypesLoad {
        types: bytes.as_ptr() as u64,
        bytes: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        ..TypesLoad::zeroed()
    };
    // SAFETY: what the attributes point to is valid, and as long as they say, during the call.
    unsafe { bpf::open(BPF_BTF_LOAD, &attributes) }.map_err(|error| bad(format!("its types (BTF): {error}")))
}

fn raw_fd(map: &Map) -> Option<RawFd> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::RingBuf(data)
        | Map::ArrayOfMaps(data)
        | Map::SkStorage(data)
        | Map::StackTraceMap(data) => Some(data.fd().as_fd().as_raw_fd()),
        _ => None,
    }
}

/// The kernel keeps 15 bytes and a zero.
fn prog_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    bytes
}

// include/uapi/linux/bpf.h
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_BTF_LOAD: libc::c_int = 18;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
const BPF_TRACE_UPROBE_MULTI: u32 = 48;
const BPF_F_UPROBE_MULTI_RETURN: u32 = 1;

/// `union bpf_attr` of BPF_PROG_LOAD, up to the last member that is used.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ProgLoad {
    prog_type: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    expected_attach_type: u32,
    /// BTF, and which of its types each function is (`bpf_func_info`).
    types: u32,
    function_bytes: u32,
    functions: u64,
    function_count: u32,
    _pad: u32,
}

/// `union bpf_attr` of BPF_BTF_LOAD.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TypesLoad {
    types: u64,
    log: u64,
    bytes: u32,
    log_bytes: u32,
    log_level: u32,
    _pad: u32,
}

/// `union bpf_attr` of BPF_LINK_CREATE for many uprobes.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    path: u64,
    offsets: u64,
    reference_counters: u64,
    cookies: u64,
    count: u32,
    multi_flags: u32,
    pid: u32,
    _pad: u32,
}

//! What is known about one mapped file: its probe points, and why some are missing.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    Placement, Profiles, Reason, Role,
    elf::{Image, Symbol},
    frames::Frames,
    placement,
    profile::{Find, PointRule, Profile, UsdtRule},
    rtti, usdt,
    version::{self, Version},
};

/// ELF number of the machine that is supported.
const EM_X86_64: u16 = 62;
/// Symbol that our stand-in libraries export: their GPU is simulated.
const STANDIN: &[u8] = b"tracer_standin";

/// Everything known about one file that a process maps.
#[derive(Clone, Debug)]
pub struct Library {
    /// The profile's short name.
    pub engine: String,
    /// The profile's title.
    pub title: String,
    pub path: PathBuf,
    /// GNU build id; empty when the file has none.
    pub build_id: Vec<u8>,
    pub version: Option<String>,
    /// A stand-in: its GPU is simulated.
    pub simulated: bool,
    pub points: Vec<Point>,
    /// Points that the profile names and that cannot be probed.
    pub refusals: Vec<Refusal>,
}

/// A place to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    pub name: String,
    pub role: Role,
    /// File offset of the instruction to probe.
    pub offset: u64,
    /// File offset of the function's (or site's) first instruction.
    pub function_offset: u64,
    pub placement: Placement,
    /// Whether a return probe is wanted and safe.
    pub return_probe: bool,
    /// What integer arguments (0 to 5) mean.
    pub args: BTreeMap<String, u8>,
    /// Probed unless the user says otherwise.
    pub default: bool,
    /// Address of the function (or site) in the file's own address space: in a process, the place where the library
    /// is mapped comes on top.
    pub address: u64,
    /// For a virtual method: addresses, in the file's own address space, of the vtable words that hold it.
    pub vtable_words: Vec<u64>,
    /// How the point was found.
    pub evidence: String,
}

impl Point {
    /// The argument that holds the CUDA stream.
    #[must_use]
    pub fn stream_arg(&self) -> Option<u8> {
        self.args.get("stream").copied()
    }
}

/// A point that a profile names and that is not probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub point: String,
    pub reason: Reason,
}

impl Profiles {
    /// Everything known about one mapped file; `None` when no profile concerns it.
    ///
    /// `path`: as the process maps it; only its last part counts. `data`: the file's bytes. Reads what it needs, not
    /// the whole file; never panics, whatever the bytes.
    #[must_use]
    pub fn inspect(&self, path: &Path, data: &[u8]) -> Option<Library> {
        let name = path.file_name()?.to_string_lossy();
        let name = name.trim_end_matches(" (deleted)");
        let image = Image::parse(data);
        let mut library: Option<Library> = None;
        for profile in &self.profiles {
            let Some(pattern) = profile.files.iter().find(|pattern| pattern.matches(name)) else { continue };
            let mut found = inspect(profile, path, name, image.as_ref().map_err(Clone::clone));
            if pattern.is_any() && !found.tells() {
                continue;
            }
            match &mut library {
                Some(library) => {
                    library.points.append(&mut found.points);
                    library.refusals.append(&mut found.refusals);
                }
                None => library = Some(found),
            }
        }
        library
    }
}

impl Library {
    /// Whether a profile that is offered every file found something in this one: a point, or one that it may not use.
    fn tells(&self) -> bool {
        let usual = |reason: &Reason| {
            matches!(reason, Reason::NotElf | Reason::Malformed(_) | Reason::Machine(_) | Reason::NoSymbol(_))
        };
        !self.points.is_empty() || self.refusals.iter().any(|refusal| !usual(&refusal.reason))
    }
}

fn inspect(profile: &Profile, path: &Path, name: &str, image: Result<&Image, Reason>) -> Library {
    let readable = image.clone().ok();
    let version = profile.version.as_ref().and_then(|rule| version::find(readable, name, rule));
    let mut library = Library {
        engine: profile.engine.clone(),
        title: profile.title.clone(),
        path: path.to_owned(),
        build_id: readable.map(Image::build_id).unwrap_or_default(),
        version: version.as_ref().map(ToString::to_string),
        simulated: readable.is_some_and(|image| image.exports().any(|symbol| symbol.name == STANDIN)),
        points: Vec::new(),
        refusals: Vec::new(),
    };
    let supported = image.and_then(|image| match image.machine() {
        EM_X86_64 => Ok(image),
        machine => Err(Reason::Machine(machine)),
    });
    let resolver = supported.map(|image| Resolver::new(image, profile, version));
    for rule in &profile.point {
        match &resolver {
            Ok(resolver) => resolver.resolve(rule, &mut library),
            Err(reason) => {
                let refuse = |point: &String| Refusal { point: point.clone(), reason: reason.clone() };
                match &rule.find {
                    Find::Symbols { symbols, .. } => library.refusals.extend(symbols.iter().map(refuse)),
                    Find::Rtti { name, .. } | Find::Usdt { name, .. } => library.refusals.push(refuse(name)),
                }
            }
        }
    }
    library
}

/// Finds the points of one profile in one image.
struct Resolver<'a, 'r> {
    image: &'r Image<'a>,
    profile: &'r Profile,
    version: Option<Version>,
    /// Exported functions and those of the symbol table, by name.
    symbols: BTreeMap<&'a [u8], Symbol<'a>>,
    frames: Option<Frames<'a>>,
}

impl<'a, 'r> Resolver<'a, 'r> {
    fn new(image: &'r Image<'a>, profile: &'r Profile, version: Option<Version>) -> Self {
        let wanted = |find: &Find| matches!(find, Find::Symbols { .. });
        let by_name = profile.point.iter().any(|rule| wanted(&rule.find));
        let mut symbols = BTreeMap::new();
        if by_name {
            // An exported symbol wins over one of the same name in the symbol table.
            for symbol in image.local_symbols().chain(image.exports()) {
                symbols.insert(symbol.name, symbol);
            }
        }
        Self { image, profile, version, symbols, frames: by_name.then(|| Frames::read(image)) }
    }

    fn resolve(&self, rule: &PointRule, library: &mut Library) {
        match &rule.find {
            Find::Symbols { symbols, twins, optional } => {
                for symbol in symbols {
                    let twins = twins.iter().map(|twin| (format!("{symbol}{twin}"), true));
                    for (name, optional) in std::iter::once((symbol.clone(), *optional)).chain(twins) {
                        self.symbol(rule, &name, optional, library);
                    }
                }
            }
            Find::Rtti { name, rule: rtti } => match self.method(rtti) {
                Ok(method) => {
                    let bytes = method.function.end - method.function.start;
                    if let Some(mut point) =
                        self.point(rule, name, method.function.start, bytes, method.evidence)
                    {
                        point.vtable_words = method.words;
                        library.points.push(point);
                    }
                }
                Err(reason) => library.refusals.push(Refusal { point: name.clone(), reason }),
            },
            Find::Usdt { name, rule: usdt } => self.sites(rule, name, usdt, library),
        }
    }

    fn symbol(&self, rule: &PointRule, name: &str, optional: bool, library: &mut Library) {
        let refuse = |reason| Refusal { point: name.to_owned(), reason };
        let Some(symbol) = self.symbols.get(name.as_bytes()) else {
            if !optional {
                library.refusals.push(refuse(Reason::NoSymbol(name.to_owned())));
            }
            return;
        };
        if symbol.indirect {
            return library.refusals.push(refuse(Reason::Indirect(name.to_owned())));
        }
        let bytes = match symbol.bytes {
            0 => {
                let function =
                    self.frames.as_ref().and_then(|frames| frames.find(self.image, symbol.address));
                function.filter(|f| f.start == symbol.address).map_or(0, |f| f.end - f.start)
            }
            bytes => bytes,
        };
        match self.point(rule, name, symbol.address, bytes, format!("exported function {name}")) {
            // Two names of one function: one probe, or each call would count twice.
            Some(point) => {
                match library.points.iter_mut().find(|p| p.function_offset == point.function_offset) {
                    Some(known) => known.evidence = format!("{}, also named {name}", known.evidence),
                    None => library.points.push(point),
                }
            }
            None => library.refusals.push(refuse(Reason::NotCode(name.to_owned()))),
        }
    }

    fn method(&self, rule: &crate::profile::RttiRule) -> Result<rtti::Method, Reason> {
        if !self.image.is_shared() {
            return Err(Reason::NotShared);
        }
        if let (Some(version), None) = (&self.profile.version, &self.version) {
            return Err(Reason::NoVersion(version.symbol.clone().unwrap_or_default()));
        }
        rtti::find(self.image, rule, self.version.as_ref())
    }

    fn sites(&self, rule: &PointRule, name: &str, usdt: &UsdtRule, library: &mut Library) {
        match usdt::find(self.image, usdt) {
            Ok(sites) => {
                let evidence = format!("USDT probe {}:{}", usdt.provider, usdt.probe);
                let points =
                    sites.into_iter().filter_map(|site| self.point(rule, name, site, 0, evidence.clone()));
                library.points.extend(points);
            }
            Err(reason) => library.refusals.push(Refusal { point: name.to_owned(), reason }),
        }
    }

    /// The point at a function of known extent, or (0 bytes) at exactly this address.
    fn point(
        &self,
        rule: &PointRule,
        name: &str,
        address: u64,
        bytes: u64,
        evidence: String,
    ) -> Option<Point> {
        let function_offset = self.image.offset_of(address).filter(|_| self.image.is_code(address))?;
        let max = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (delta, placement) = match self.image.bytes_at(address, max) {
            Some(code) if bytes > 0 => placement::place(code, address),
            _ => (0, placement::at(self.image.bytes_at(address, 16).unwrap_or_default(), address)),
        };
        Some(Point {
            name: name.to_owned(),
            role: rule.role,
            offset: function_offset + delta,
            function_offset,
            address,
            placement,
            return_probe: rule.returns.is_safe(),
            args: rule.args.clone(),
            default: rule.default,
            vtable_words: Vec::new(),
            evidence,
        })
    }
}

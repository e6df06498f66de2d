//! What is known about one mapped file: its probe points, and why some are missing.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use crate::{
    Machine, Placement, Profiles, Reason, Role, aarch64,
    elf::{Image, Symbol},
    frames::Frames,
    placement,
    profile::{Find, Place, PointRule, Profile, UsdtRule},
    rtti, usdt,
    version::{self, Version},
};

/// Symbol that our stand-in libraries export: their GPU is simulated.
const STANDIN: &[u8] = b"tracer_standin";

/// Everything known about one file that a process maps.
#[derive(Clone, Debug)]
pub struct Library {
    /// Short name of the first profile that concerns it.
    pub engine: String,
    /// Title of that profile.
    pub title: String,
    pub path: PathBuf,
    /// GNU build id; empty when the file has none.
    pub build_id: Vec<u8>,
    pub version: Option<String>,
    /// What its code runs on; `None` when it is not an ELF file or its machine is not known.
    pub machine: Option<Machine>,
    /// A stand-in: its GPU is simulated.
    pub simulated: bool,
    pub points: Vec<Point>,
    /// Points that the profile names and that cannot be probed.
    pub refusals: Vec<Refusal>,
}

/// How a point was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// An exported function.
    Export,
    /// A function of the symbol table that `strip` removes.
    Symbol,
    /// A slot of a vtable, found through the type information of its class.
    Vtable,
    /// The note of a USDT probe.
    Usdt,
}

impl Found {
    /// Name in tables and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Export => "export",
            Self::Symbol => "symbol",
            Self::Vtable => "vtable",
            Self::Usdt => "usdt",
        }
    }
}

/// A place to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// Short name of the profile that names the point.
    pub engine: String,
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
    pub found: Found,
    /// What speaks for it.
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
    /// Short name of the profile that names the point.
    pub engine: String,
    pub point: String,
    pub reason: Reason,
    /// It would be probed unless the user says otherwise.
    pub default: bool,
}

impl Profiles {
    /// Everything known about a file that a process of this machine maps; `None` when no profile concerns it. The points
    /// of a library for another machine are refused: a process may well map one (an emulator does), and a probe in it
    /// would write over code that means something else.
    ///
    /// `path`: as the process maps it; only its last part counts. `data`: the file's bytes. Reads what it needs, not
    /// the whole file; never panics, whatever the bytes.
    #[must_use]
    pub fn inspect(&self, path: &Path, data: &[u8]) -> Option<Library> {
        let mut library = self.examine(path, data)?;
        if let Some(machine) = library.machine.filter(|machine| Some(*machine) != Machine::HOST) {
            let points = library.points.drain(..);
            let refuse = |point: Point| Refusal {
                engine: point.engine,
                point: point.name,
                reason: Reason::OtherMachine(machine),
                default: point.default,
            };
            library.refusals.extend(points.map(refuse));
        }
        Some(library)
    }

    /// Like [`Self::inspect`], for a file of any known machine: to look at, not to probe.
    #[must_use]
    pub fn examine(&self, path: &Path, data: &[u8]) -> Option<Library> {
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
                    // The first profile decides what a function is: it is probed once.
                    found.points.retain(|point| {
                        library.points.iter().all(|known| known.function_offset != point.function_offset)
                    });
                    library.points.append(&mut found.points);
                    library.version = library.version.take().or(found.version);
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
        machine: readable.and_then(|image| Machine::from_elf(image.machine())),
        simulated: readable.is_some_and(|image| image.exports().any(|symbol| symbol.name == STANDIN)),
        points: Vec::new(),
        refusals: Vec::new(),
    };
    let resolver = image.and_then(|image| {
        let machine = Machine::from_elf(image.machine()).ok_or(Reason::Machine(image.machine()))?;
        Ok(Resolver::new(image, machine, profile, version))
    });
    for rule in &profile.point {
        match &resolver {
            Ok(resolver) => resolver.resolve(rule, &mut library),
            Err(reason) => {
                let refuse = |point: &String| profile.refusal(rule, point, reason.clone());
                match &rule.find {
                    Find::Symbols { symbols, .. } => library.refusals.extend(symbols.iter().map(refuse)),
                    Find::Rtti { name, .. } | Find::Usdt { name, .. } | Find::Refused { name, .. } => {
                        library.refusals.push(refuse(name));
                    }
                }
            }
        }
    }
    library
}

impl Profile {
    fn refusal(&self, rule: &PointRule, point: &str, reason: Reason) -> Refusal {
        // Nothing is lost where another library does the work.
        let default = rule.default && !matches!(reason, Reason::ForwardsOnly(_));
        Refusal { engine: self.engine.clone(), point: point.to_owned(), reason, default }
    }
}

/// Finds the points of one profile in one image.
struct Resolver<'a, 'r> {
    image: &'r Image<'a>,
    machine: Machine,
    profile: &'r Profile,
    version: Option<Version>,
    /// The functions that the profile names: exported ones, and those of the symbol table.
    symbols: BTreeMap<&'a [u8], (Symbol<'a>, Found)>,
    /// Read when a symbol does not state its size.
    frames: OnceCell<Frames<'a>>,
}

impl<'a, 'r> Resolver<'a, 'r> {
    fn new(image: &'r Image<'a>, machine: Machine, profile: &'r Profile, version: Option<Version>) -> Self {
        let wanted: BTreeSet<String> = profile.point.iter().flat_map(|rule| rule.find.symbols()).collect();
        let mut symbols = BTreeMap::new();
        let mut add = |symbol: Symbol<'a>, found| {
            if std::str::from_utf8(symbol.name).is_ok_and(|name| wanted.contains(name)) {
                symbols.insert(symbol.name, (symbol, found));
            }
        };
        if !wanted.is_empty() {
            // An exported symbol wins over one of the same name in the symbol table.
            image.local_symbols().for_each(|symbol| add(symbol, Found::Symbol));
            image.exports().for_each(|symbol| add(symbol, Found::Export));
        }
        Self { image, machine, profile, version, symbols, frames: OnceCell::new() }
    }

    fn resolve(&self, rule: &PointRule, library: &mut Library) {
        match &rule.find {
            Find::Symbols { symbols, twins, optional } => {
                for symbol in symbols {
                    self.symbol(rule, symbol, *optional, library);
                    for twin in twins {
                        self.symbol(rule, &format!("{symbol}{twin}"), true, library);
                    }
                }
            }
            Find::Refused { name, reason } => {
                library.refusals.push(self.profile.refusal(rule, name, Reason::Known(reason.clone())));
            }
            Find::Rtti { name, rule: rtti } => match self.method(rtti) {
                Ok(method) => {
                    let bytes = method.function.end - method.function.start;
                    let found = (Found::Vtable, method.evidence);
                    match self.point(rule, name, method.function.start, bytes, found) {
                        Some(point) => library.points.push(Point { vtable_words: method.words, ..point }),
                        None => {
                            let reason = Reason::NotCode(name.clone());
                            library.refusals.push(self.profile.refusal(rule, name, reason));
                        }
                    }
                }
                Err(reason) => library.refusals.push(self.profile.refusal(rule, name, reason)),
            },
            Find::Usdt { name, rule: usdt } => self.sites(rule, name, usdt, library),
        }
    }

    fn symbol(&self, rule: &PointRule, name: &str, optional: bool, library: &mut Library) {
        let refuse = |reason| self.profile.refusal(rule, name, reason);
        let Some((symbol, found)) = self.symbols.get(name.as_bytes()) else {
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
                let frames = self.frames.get_or_init(|| Frames::read(self.image));
                let function = frames.find(self.image, symbol.address);
                function.filter(|f| f.start == symbol.address).map_or(0, |f| f.end - f.start)
            }
            bytes => bytes,
        };
        let evidence = match found {
            Found::Export => format!("exported function {name}"),
            _ => format!("function {name} of the symbol table"),
        };
        match self.point(rule, name, symbol.address, bytes, (*found, evidence)) {
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
        rtti::find(self.image, self.machine, rule, self.version.as_ref())
    }

    fn sites(&self, rule: &PointRule, name: &str, usdt: &UsdtRule, library: &mut Library) {
        match usdt::find(self.image, usdt) {
            Ok(sites) => {
                let evidence = format!("USDT probe {}:{}", usdt.provider, usdt.probe);
                let point = |site| self.point(rule, name, site, 0, (Found::Usdt, evidence.clone()));
                let points = sites.into_iter().filter_map(point);
                library.points.extend(points);
            }
            Err(reason) => library.refusals.push(self.profile.refusal(rule, name, reason)),
        }
    }

    /// The point at a function of known extent, or (0 bytes) at exactly this address.
    fn point(
        &self,
        rule: &PointRule,
        name: &str,
        address: u64,
        bytes: u64,
        (found, evidence): (Found, String),
    ) -> Option<Point> {
        let function_offset = self.image.offset_of(address).filter(|_| self.image.is_code(address))?;
        let max = usize::try_from(bytes).unwrap_or(usize::MAX);
        let first = self.image.bytes_at(address, 16).unwrap_or_default();
        let (delta, placement) = match (self.machine, self.image.bytes_at(address, max)) {
            (Machine::X86_64, Some(code)) if bytes > 0 && rule.place == Place::Cheapest => {
                placement::place(code, address)
            }
            (Machine::X86_64, _) => (0, placement::at(first, address)),
            // At its entry always: after it the return address may be signed, and a return probe would replace it.
            (Machine::Aarch64, _) => (0, aarch64::at(first)),
        };
        Some(Point {
            engine: self.profile.engine.clone(),
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
            found,
            evidence,
        })
    }
}

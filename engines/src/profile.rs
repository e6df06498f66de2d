//! Profiles: what is known of one engine, as a TOML file (`engines/profiles/*.toml` are built in).
//!
//! ```toml
//! engine = "llama"                 # short name, in tables and reports
//! title = "llama.cpp"
//! files = ["libllama.so*"]         # names of mapped files; `*` stands for any characters
//!
//! [[point]]
//! symbols = ["llama_decode"]       # functions by name; or `rtti` (a C++ virtual method), `usdt`, `refuse` (a reason)
//! role = "step"                    # step, launch, graph_launch, wait, copy, event_record, sync, mark, open, …: see `Role`
//! returns = "c"                    # "c" or "noexcept": a return probe is safe; "throws", "never": entry only
//! args = { context = 0 }           # what the integer arguments 0..=5 mean
//! ```
use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;

use crate::{ProfileError, Role};

/// Integer arguments that travel in registers.
const REGISTER_ARGS: u8 = 6;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Profile {
    pub(crate) engine: String,
    pub(crate) title: String,
    pub(crate) files: Vec<Pattern>,
    pub(crate) version: Option<VersionRule>,
    #[serde(default)]
    pub(crate) point: Vec<PointRule>,
}

/// How a library says its version; tried in this order.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct VersionRule {
    /// Prefix of an exported symbol whose rest is the version: `name_10_13_3_9`.
    pub(crate) symbol: Option<String>,
    /// Exported functions that return its parts as constants.
    pub(crate) parts: Vec<String>,
    /// Exported function that returns major·1000 + minor·100 + patch, or from 10 on major·10000 + minor·100 + patch.
    pub(crate) packed: Option<String>,
    /// Prefix of the file's name whose rest is the version.
    pub(crate) file: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RawPoint")]
pub(crate) struct PointRule {
    pub(crate) find: Find,
    pub(crate) role: Role,
    pub(crate) returns: Returns,
    pub(crate) args: BTreeMap<String, u8>,
    pub(crate) default: bool,
    pub(crate) place: Place,
}

/// Where in a function the probe goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Place {
    /// To the cheapest instruction for which it makes no difference.
    #[default]
    Cheapest,
    /// To its first instruction.
    Entry,
}

/// How a point is found.
#[derive(Clone, Debug)]
pub(crate) enum Find {
    /// Functions by name; each with its twins. Missing twins are no defect; a missing name is, unless `optional`.
    Symbols {
        symbols: Vec<String>,
        twins: Vec<String>,
        optional: bool,
    },
    Rtti {
        name: String,
        rule: RttiRule,
    },
    Usdt {
        name: String,
        rule: UsdtRule,
    },
    /// Cannot be probed, and why.
    Refused {
        name: String,
        reason: String,
    },
}

impl Find {
    /// Name of a point that is no symbol.
    fn name(&self) -> Option<&str> {
        match self {
            Self::Symbols { .. } => None,
            Self::Rtti { name, .. } | Self::Usdt { name, .. } | Self::Refused { name, .. } => Some(name),
        }
    }

    /// The functions that are looked up by name, twins included.
    pub(crate) fn symbols(&self) -> Vec<String> {
        let Self::Symbols { symbols, twins, .. } = self else { return Vec::new() };
        let twins = twins.iter().flat_map(|twin| symbols.iter().map(move |symbol| format!("{symbol}{twin}")));
        twins.chain(symbols.iter().cloned()).collect()
    }
}

/// Whether a return probe is safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Returns {
    /// A C function of a library that no exception crosses.
    C,
    /// A C++ function that is declared `noexcept`.
    Noexcept,
    /// An exception may cross it: the program would abort on a return probe.
    Throws,
    /// Its return says nothing.
    Never,
}

impl Returns {
    pub(crate) const fn is_safe(self) -> bool {
        matches!(self, Self::C | Self::Noexcept)
    }
}

/// A virtual method, found through the type information of its class.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RttiRule {
    /// Mangled name of the abstract class that declares the method.
    pub(crate) base: String,
    /// The method's name: its implementation refers to that string (`__func__`).
    pub(crate) method: String,
    /// Slot of the method in the vtable from each version on.
    pub(crate) slots: Vec<SlotRule>,
    /// Names of the methods in the slots before and after.
    pub(crate) neighbours: [String; 2],
    /// Parts of the names of classes that only pass the call on to another library.
    #[serde(default)]
    pub(crate) forwarders: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SlotRule {
    pub(crate) from: crate::version::Version,
    pub(crate) slot: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UsdtRule {
    pub(crate) provider: String,
    pub(crate) probe: String,
    /// The argument string of the note must be this: the tracer reads argument registers only.
    pub(crate) arguments: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPoint {
    name: Option<String>,
    role: Role,
    returns: Returns,
    #[serde(default)]
    args: BTreeMap<String, u8>,
    #[serde(default = "yes")]
    default: bool,
    #[serde(default)]
    symbols: Vec<String>,
    #[serde(default)]
    twins: Vec<String>,
    #[serde(default)]
    optional: bool,
    rtti: Option<RttiRule>,
    usdt: Option<UsdtRule>,
    refuse: Option<String>,
    #[serde(default)]
    place: Place,
}

const fn yes() -> bool {
    true
}

impl TryFrom<RawPoint> for PointRule {
    type Error = String;

    fn try_from(raw: RawPoint) -> Result<Self, String> {
        if let Some((name, index)) = raw.args.iter().find(|(_, index)| **index >= REGISTER_ARGS) {
            return Err(format!("args.{name} = {index}: only the arguments 0 to 5 are in registers"));
        }
        let find = match (raw.symbols.is_empty(), raw.rtti, raw.usdt, raw.refuse) {
            (false, None, None, None) if raw.name.is_none() => {
                Find::Symbols { symbols: raw.symbols, twins: raw.twins, optional: raw.optional }
            }
            (false, None, None, None) => {
                return Err("`name` is for `rtti`, `usdt` and `refuse`: symbols name themselves".into());
            }
            (true, Some(rule), None, None) => {
                Find::Rtti { name: raw.name.unwrap_or(rule.method.clone()), rule }
            }
            (true, None, Some(rule), None) => {
                Find::Usdt { name: raw.name.unwrap_or(rule.probe.clone()), rule }
            }
            (true, None, None, Some(reason)) => {
                Find::Refused { name: raw.name.ok_or("`refuse` needs a `name`")?, reason }
            }
            _ => return Err("a point needs exactly one of `symbols`, `rtti`, `usdt`, `refuse`".into()),
        };
        let RawPoint { role, returns, args, default, place, .. } = raw;
        Ok(Self { find, role, returns, args, default, place })
    }
}

/// A file name in which `*` stands for any characters, none included.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub(crate) struct Pattern(String);

impl From<String> for Pattern {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl Pattern {
    /// Whether every file matches, so that a match says nothing about the file.
    pub(crate) fn is_any(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte == b'*')
    }

    pub(crate) fn matches(&self, name: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        true
    }
}

/// The profiles that are built in.
const BUILTIN: [&str; 11] = [
    include_str!("../profiles/tensorrt.toml"),
    include_str!("../profiles/tensorrt_rtx.toml"),
    include_str!("../profiles/tensorrt_python.toml"),
    include_str!("../profiles/llama.toml"),
    include_str!("../profiles/onnxruntime.toml"),
    include_str!("../profiles/cuda.toml"),
    include_str!("../profiles/cudart.toml"),
    include_str!("../profiles/files.toml"),
    include_str!("../profiles/loader.toml"),
    include_str!("../profiles/nvtx.toml"),
    include_str!("../profiles/marks.toml"),
];

/// Profiles that are built in and used only when asked for, by name.
const OPTIONAL: [(&str, &str); 3] = [
    ("cuda_graph", include_str!("../profiles/optional/cuda_graph.toml")),
    ("own_steps", include_str!("../profiles/optional/own_steps.toml")),
    ("shapes", include_str!("../profiles/optional/shapes.toml")),
];

/// A set of profiles: the built-in ones and those that the user added.
#[derive(Clone, Debug)]
pub struct Profiles {
    pub(crate) profiles: Vec<Profile>,
}

impl Profiles {
    /// The profiles that this program brings along.
    #[must_use]
    pub fn builtin() -> Self {
        // A test parses each of them, so that none is ever left out here.
        Self { profiles: BUILTIN.iter().filter_map(|text| toml::from_str(text).ok()).collect() }
    }

    /// Adds a profile of the user, or an optional one by its name (`cuda_graph`, `own_steps`); it replaces one that has the same
    /// `engine`, and comes before the others: what it says of a function holds.
    ///
    /// # Errors
    /// When the file cannot be read or is not a profile; the message names the file, line and key.
    pub fn load(&mut self, path: &Path) -> Result<(), ProfileError> {
        let text = match OPTIONAL.iter().find(|(name, _)| Path::new(name) == path) {
            Some((_, text)) => (*text).to_owned(),
            None => std::fs::read_to_string(path)
                .map_err(|source| ProfileError::Read { path: path.to_owned(), source })?,
        };
        let profile: Profile = toml::from_str(&text)
            .map_err(|source| ProfileError::Parse { path: path.to_owned(), source: Box::new(source) })?;
        self.profiles.retain(|known| known.engine != profile.engine);
        self.profiles.insert(0, profile);
        Ok(())
    }

    /// Has a function probed that is not unless asked for, by its name, or all of a role (`launch`). Returns whether any
    /// profile knows it.
    pub fn enable(&mut self, name: &str) -> bool {
        let mut known = false;
        for profile in &mut self.profiles {
            let mut split = Vec::new();
            for rule in &mut profile.point {
                if rule.role.name() == name || rule.find.name() == Some(name) {
                    rule.default = true;
                    known = true;
                    continue;
                }
                let Find::Symbols { symbols, twins, optional } = &mut rule.find else { continue };
                let Some(index) = symbols.iter().position(|symbol| symbol == name) else { continue };
                known = true;
                if !rule.default {
                    let symbols = vec![symbols.remove(index)];
                    let find = Find::Symbols { symbols, twins: twins.clone(), optional: *optional };
                    split.push(PointRule { find, default: true, ..rule.clone() });
                }
            }
            profile.point.append(&mut split);
        }
        known
    }

    /// Whether calls of the function of this name are steps.
    #[must_use]
    pub fn is_step(&self, symbol: &str) -> bool {
        let about = |rule: &&PointRule| rule.find.symbols().iter().any(|name| name == symbol);
        let first = self.profiles.iter().flat_map(|profile| &profile.point).find(about);
        first.is_some_and(|rule| rule.role == Role::Step)
    }

    /// Whether a profile concerns files of this name (the last part of a path); files that any profile may concern
    /// (marks) do not count. Costs a few string comparisons.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.profiles
            .iter()
            .any(|profile| profile.files.iter().any(|pattern| !pattern.is_any() && pattern.matches(name)))
    }

    /// The title of the engine or driver that files of this name belong to: what makes a process worth tracing.
    #[must_use]
    pub fn engine_of(&self, name: &str) -> Option<&str> {
        let work = |profile: &&Profile| {
            profile.point.iter().any(|point| {
                !matches!(
                    point.role,
                    Role::Loader | Role::Mark | Role::Open | Role::Shape | Role::Nvtx | Role::Other
                )
            })
        };
        self.profiles
            .iter()
            .filter(work)
            .find(|profile| profile.files.iter().any(|pattern| !pattern.is_any() && pattern.matches(name)))
            .map(|profile| profile.title.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Profile, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn builtin_profiles_parse() {
        for text in BUILTIN {
            parse(text).unwrap_or_else(|error| panic!("{error}\nin:\n{text}"));
        }
        let mut profiles = Profiles::builtin();
        assert_eq!(profiles.profiles.len(), BUILTIN.len());
        assert!(!profiles.is_step("cuGraphLaunch"));
        for (name, _) in OPTIONAL {
            profiles.load(Path::new(name)).unwrap();
            assert_eq!(profiles.profiles[0].engine, name);
        }
        assert!(profiles.is_step("cuGraphLaunch"));
    }

    #[test]
    fn patterns() {
        let matches = |pattern: &str, name: &str| Pattern(pattern.into()).matches(name);
        assert!(matches("libcuda.so*", "libcuda.so"));
        assert!(matches("libcuda.so*", "libcuda.so.550.163.01"));
        assert!(!matches("libcuda.so*", "libcudart.so.12"));
        assert!(matches("ld-linux*.so*", "ld-linux-x86-64.so.2"));
        assert!(!matches("ld-2.*.so", "ld-2.31.so.old"));
        assert!(matches("exact", "exact") && !matches("exact", "exact1"));
        assert!(matches("*", "") && matches("a*a", "aa") && !matches("a*a", "a"));
        assert!(
            Pattern("*".into()).is_any()
                && !Pattern("a*".into()).is_any()
                && !Pattern(String::new()).is_any()
        );
    }

    #[test]
    fn errors_name_line_and_key() {
        let head = "engine = \"x\"\ntitle = \"X\"\nfiles = [\"libx.so\"]\n[[point]]\n";
        let error = |tail: &str| parse(&format!("{head}{tail}")).unwrap_err().to_string();
        let text = error("symbols = [\"f\"]\nrole = \"stpe\"\nreturns = \"c\"\n");
        assert!(text.contains("line 6") && text.contains("stpe"), "{text}");
        let text = error("symbols = [\"f\"]\nrole = \"step\"\nreturns = \"c\"\nargs = { stream = 6 }\n");
        assert!(text.contains("args.stream = 6") && text.contains("line"), "{text}");
        let text = error("role = \"step\"\nreturns = \"c\"\n");
        assert!(text.contains("exactly one of"), "{text}");
        let text = error("role = \"step\"\nreturns = \"never\"\nrefuse = \"no symbol\"\n");
        assert!(text.contains("`refuse` needs a `name`"), "{text}");
        let text = error("symbol = [\"f\"]\nrole = \"step\"\nreturns = \"c\"\n");
        assert!(text.contains("unknown field `symbol`") && text.contains("line 5"), "{text}");
    }

    #[test]
    fn a_users_profile_replaces_the_builtin_one() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(
            &mut file,
            b"engine = \"cuda\"\ntitle = \"Mine\"\nfiles = [\"libmine.so\"]\n",
        )
        .unwrap();
        let mut profiles = Profiles::builtin();
        profiles.load(file.path()).unwrap();
        assert!(profiles.matches("libmine.so") && !profiles.matches("libcuda.so.1"));
        assert!(!profiles.matches("bash"));
        std::io::Write::write_all(&mut file, b"x = 1\n").unwrap();
        let error = profiles.load(file.path()).unwrap_err();
        assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("line 4") && source.contains("`x`"), "{source}");
    }
}

//! Versions of libraries, read from the file.

use std::{cmp::Ordering, fmt};

use serde::Deserialize;

use crate::{Machine, elf::Image, profile::VersionRule};

/// Most parts of a version that are looked at.
const MAX_PARTS: usize = 6;

/// A dotted version, as it was written; in comparisons missing parts count as 0.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Version {
    parts: Vec<u32>,
    text: String,
}

impl Version {
    /// Numbers separated by `separator`.
    fn parse(text: &str, separator: char) -> Option<Self> {
        let parts: Option<Vec<u32>> = text.split(separator).map(|part| part.parse().ok()).collect();
        let parts = parts.filter(|parts| parts.len() <= MAX_PARTS)?;
        Some(Self { parts, text: text.replace(separator, ".") })
    }

    fn new(parts: &[u32]) -> Self {
        let text: Vec<String> = parts.iter().map(u32::to_string).collect();
        Self { parts: parts.to_vec(), text: text.join(".") }
    }
}

impl TryFrom<String> for Version {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text, '.').ok_or_else(|| format!("`{text}` is not a version such as 10.3"))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let part = |version: &Self, index| version.parts.get(index).copied().unwrap_or(0);
        (0..MAX_PARTS)
            .map(|index| part(self, index).cmp(&part(other, index)))
            .fold(Ordering::Equal, Ordering::then)
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Version {}

/// The version of a library, by the first way of the rule that gives one.
pub(crate) fn find(image: Option<&Image>, file_name: &str, rule: &VersionRule) -> Option<Version> {
    let from_image = |image: &Image| {
        from_symbol(image, rule).or_else(|| from_parts(image, rule)).or_else(|| from_packed(image, rule))
    };
    image.and_then(from_image).or_else(|| {
        let rest = file_name.strip_prefix(rule.file.as_deref()?)?;
        // `libcuda.so.1` is a link's name, not a version.
        Version::parse(rest, '.').filter(|version| version.parts.len() > 1)
    })
}

fn from_symbol(image: &Image, rule: &VersionRule) -> Option<Version> {
    let prefix = rule.symbol.as_deref()?;
    image
        .exports()
        .find_map(|symbol| Version::parse(std::str::from_utf8(symbol.name).ok()?.strip_prefix(prefix)?, '_'))
}

fn from_parts(image: &Image, rule: &VersionRule) -> Option<Version> {
    let parts: Option<Vec<u32>> = rule.parts.iter().map(|name| constant(image, name)).collect();
    parts.filter(|parts| !parts.is_empty() && parts.len() <= MAX_PARTS).map(|parts| Version::new(&parts))
}

fn from_packed(image: &Image, rule: &VersionRule) -> Option<Version> {
    let packed = constant(image, rule.packed.as_deref()?)?;
    let major = if packed >= 100_000 { packed / 10_000 } else { packed / 1_000 };
    let (minor, patch) = if packed >= 100_000 {
        (packed / 100 % 100, packed % 100)
    } else {
        (packed / 100 % 10, packed % 100)
    };
    Some(Version::new(&[major, minor, patch]))
}

/// What an exported function returns, if it does nothing but return a constant.
fn constant(image: &Image, name: &str) -> Option<u32> {
    let address = image.exports().find(|symbol| symbol.name == name.as_bytes())?.address;
    let code = image.bytes_at(address, 32).filter(|_| image.is_code(address))?;
    Machine::from_elf(image.machine())?.constant(code, address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        Version::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn order_and_text() {
        assert!(version("10.13.3.9") >= version("10"));
        assert!(version("1.4.0.76") < version("1.5"));
        assert!(version("11") == version("11.0.0"));
        assert_eq!(version("10.13.3.9").to_string(), "10.13.3.9");
        assert!(Version::try_from("10.x".to_owned()).is_err());
        assert!(Version::try_from("1.2.3.4.5.6.7".to_owned()).is_err());
    }

    #[test]
    fn from_file_name() {
        let rule = VersionRule { file: Some("libcuda.so.".into()), ..VersionRule::default() };
        assert_eq!(find(None, "libcuda.so.550.163.01", &rule).unwrap().to_string(), "550.163.01");
        assert!(find(None, "libcuda.so.1", &rule).is_none());
        assert!(find(None, "libcuda.so", &rule).is_none());
    }
}

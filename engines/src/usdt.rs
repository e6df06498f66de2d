//! USDT probe sites: notes of the section `.note.stapsdt` that systemtap's `sdt.h` describes.

use crate::{
    Reason,
    elf::{Image, Section, half, word},
    profile::UsdtRule,
};

/// Type of the notes.
const NT_STAPSDT: u32 = 3;
const OWNER: &[u8] = b"stapsdt\0";
/// Most sites of one probe in one file that are reported.
const MAX_SITES: usize = 256;

/// Addresses of the sites of a probe. An empty list: the file does not have the probe.
pub(crate) fn find(image: &Image, rule: &UsdtRule) -> Result<Vec<u64>, Reason> {
    let mut sites = Vec::new();
    // A prelinked file has moved since the notes were written: by as much as this section has.
    let base = image.sections(".stapsdt.base").next().map(|section| section.address);
    for section in image.sections(".note.stapsdt") {
        for note in notes(section) {
            let Some(note) = Note::parse(note) else { continue };
            if note.provider != rule.provider.as_bytes() || note.probe != rule.probe.as_bytes() {
                continue;
            }
            let probe = || format!("{}:{}", rule.provider, rule.probe);
            if let Some(expected) =
                rule.arguments.as_ref().filter(|expected| expected.as_bytes() != note.arguments)
            {
                let found = String::from_utf8_lossy(note.arguments).into_owned();
                return Err(Reason::Arguments { probe: probe(), found, expected: expected.clone() });
            }
            if note.semaphore != 0 {
                return Err(Reason::Semaphore(probe()));
            }
            let moved = base.filter(|_| note.base != 0).map_or(0, |base| base.wrapping_sub(note.base));
            let address = note.address.wrapping_add(moved);
            if !image.is_code(address) {
                return Err(Reason::NotCode(probe()));
            }
            if !sites.contains(&address) && sites.len() < MAX_SITES {
                sites.push(address);
            }
        }
    }
    Ok(sites)
}

/// The descriptions of the probe notes in a section.
fn notes(section: Section<'_>) -> impl Iterator<Item = &[u8]> {
    let mut rest = section.data;
    std::iter::from_fn(move || {
        loop {
            let (name, length, kind) = (half(rest, 0)? as usize, half(rest, 4)? as usize, half(rest, 8)?);
            let description_at = name.checked_next_multiple_of(4)?.checked_add(12)?;
            let end = description_at.checked_add(length)?;
            let note = rest.get(..end)?;
            rest = rest.get(end.checked_next_multiple_of(4)?..).unwrap_or_default();
            if kind == NT_STAPSDT && note.get(12..12 + name) == Some(OWNER) {
                return note.get(description_at..);
            }
        }
    })
}

/// A note's description.
struct Note<'a> {
    address: u64,
    base: u64,
    semaphore: u64,
    provider: &'a [u8],
    probe: &'a [u8],
    arguments: &'a [u8],
}

impl<'a> Note<'a> {
    fn parse(description: &'a [u8]) -> Option<Self> {
        let mut strings = description.get(24..)?.split(|byte| *byte == 0);
        Some(Self {
            address: word(description, 0)?,
            base: word(description, 8)?,
            semaphore: word(description, 16)?,
            provider: strings.next()?,
            probe: strings.next()?,
            arguments: strings.next()?,
        })
    }
}

//! Extents of functions, from the unwind information that every C++ library carries (`.eh_frame`).

use std::ops::Range;

use crate::elf::{Image, half, word};

/// Pointer encodings of `.eh_frame`, the low four bits: the format of the value.
const FORMAT: u8 = 0x0f;
/// The value counts from the place where it is stored.
const PC_RELATIVE: u8 = 0x10;

/// Finds the function that an address lies in.
pub(crate) enum Frames<'a> {
    /// The sorted table of `.eh_frame_hdr`: pairs of i32 (function, entry), counted from the header's address.
    Table { header: u64, table: &'a [u8] },
    /// Functions sorted by begin; for files whose header has no table.
    List(Vec<Range<u64>>),
}

impl<'a> Frames<'a> {
    pub(crate) fn read(image: &Image<'a>) -> Self {
        Self::table(image).unwrap_or_else(|| Self::List(list(image).unwrap_or_default()))
    }

    fn table(image: &Image<'a>) -> Option<Self> {
        let header = image.eh_frame_header?;
        let bytes = image.bytes_at(header, usize::MAX)?;
        // Version 1; pc-relative i32 to the frames; u32 count; i32 pairs relative to the header.
        if bytes.get(..4)? != [1, 0x1b, 0x03, 0x3b] {
            return None;
        }
        let count = half(bytes, 8)? as usize;
        let table = bytes.get(12..count.checked_mul(8)?.checked_add(12)?)?;
        (count > 0).then_some(Self::Table { header, table })
    }

    /// The function that contains an address.
    pub(crate) fn find(&self, image: &Image, address: u64) -> Option<Range<u64>> {
        let range = match self {
            Self::Table { header, table } => {
                let start = |index: usize| Some(add(*header, half(table, 8 * index)? as i32));
                let (mut low, mut high) = (0, table.len() / 8);
                while low < high {
                    let middle = usize::midpoint(low, high);
                    if start(middle)? <= address { low = middle + 1 } else { high = middle }
                }
                let entry = add(*header, half(table, 8 * low.checked_sub(1)? + 4)? as i32);
                Entry::read(image, entry)?.function(image, None)?
            }
            Self::List(list) => {
                let after = list.partition_point(|range| range.start <= address);
                list.get(after.checked_sub(1)?)?.clone()
            }
        };
        range.contains(&address).then_some(range)
    }
}

/// All functions of `.eh_frame`, read from its begin to its end.
fn list(image: &Image) -> Option<Vec<Range<u64>>> {
    let header = image.eh_frame_header.and_then(|header| {
        let bytes = image.bytes_at(header, 8).filter(|bytes| bytes.get(1) == Some(&0x1b))?;
        Some(add(header.checked_add(4)?, half(bytes, 4)? as i32))
    });
    let section =
        image.sections(".eh_frame").next().filter(|section| header.is_none_or(|at| at == section.address));
    let begin = header.or(section.map(|section| section.address))?;
    let bytes =
        section.map_or_else(|| image.bytes_at(begin, usize::MAX).map_or(0, <[u8]>::len), |s| s.data.len());
    let end = begin.checked_add(bytes as u64)?;
    let (mut at, mut last, mut list) = (begin, None, Vec::new());
    while let Some(entry) = Entry::read(image, at) {
        if at >= end {
            break;
        }
        if entry.cie != 0 {
            let cie = at.wrapping_add(4).wrapping_sub(u64::from(entry.cie));
            let encoding = match last {
                Some((known, encoding)) if known == cie => Some(encoding),
                _ => encoding(image, cie),
            };
            last = encoding.map(|encoding| (cie, encoding));
            list.extend(encoding.and_then(|encoding| entry.function(image, Some(encoding))));
        }
        at = entry.next;
    }
    list.sort_by_key(|range| range.start);
    Some(list)
}

/// One entry of `.eh_frame`.
struct Entry {
    at: u64,
    /// Distance back from the field at `at + 4` to the common entry; 0 when this is a common entry.
    cie: u32,
    next: u64,
}

impl Entry {
    fn read(image: &Image, at: u64) -> Option<Self> {
        let bytes = image.bytes_at(at, 8)?;
        let length = half(bytes, 0)?;
        match length {
            // A terminator; linkers leave some between the parts.
            0 => Some(Self { at, cie: 0, next: at.checked_add(4)? }),
            // 64-bit entries: no compiler makes them.
            0xffff_fff0.. => None,
            _ => {
                Some(Self { at, cie: half(bytes, 4)?, next: at.checked_add(4)?.checked_add(length.into())? })
            }
        }
    }

    /// The function that a frame entry describes.
    fn function(&self, image: &Image, known: Option<u8>) -> Option<Range<u64>> {
        let field = self.at.checked_add(4)?;
        let encoding = match known {
            Some(encoding) => encoding,
            None => encoding(image, field.checked_sub(self.cie.into())?)?,
        };
        let place = self.at.checked_add(8)?;
        let bytes = image.bytes_at(place, 16)?;
        let (value, length) = match encoding & FORMAT {
            0x3 | 0xb => (half(bytes, 0)? as i32 as i64 as u64, u64::from(half(bytes, 4)?)),
            0x0 | 0x4 | 0xc => (word(bytes, 0)?, word(bytes, 8)?),
            _ => return None,
        };
        let start = if encoding & 0x70 == PC_RELATIVE { place.wrapping_add(value) } else { value };
        (start != 0).then_some(start..start.checked_add(length)?)
    }
}

/// How the frame entries of a common entry encode addresses.
fn encoding(image: &Image, cie: u64) -> Option<u8> {
    let bytes = image.bytes_at(cie, 64)?;
    let version = *bytes.get(8)?;
    let text = bytes.get(9..)?;
    let length = text.iter().position(|byte| *byte == 0)?;
    let augmentation = &text[..length];
    let mut at = 9 + length + 1;
    if augmentation.first() != Some(&b'z') {
        return Some(0);
    }
    skip_leb128(bytes, &mut at)?;
    skip_leb128(bytes, &mut at)?;
    if version == 1 {
        at += 1;
    } else {
        skip_leb128(bytes, &mut at)?;
    }
    skip_leb128(bytes, &mut at)?;
    for letter in &augmentation[1..] {
        match letter {
            b'R' => return bytes.get(at).copied(),
            b'L' => at += 1,
            b'P' => {
                let size = match bytes.get(at)? & FORMAT {
                    0x0 | 0x4 | 0xc => 8,
                    0x2 | 0xa => 2,
                    0x3 | 0xb => 4,
                    _ => return None,
                };
                at += 1 + size;
            }
            _ => {}
        }
    }
    Some(0)
}

fn skip_leb128(bytes: &[u8], at: &mut usize) -> Option<()> {
    while bytes.get(*at)? & 0x80 != 0 {
        *at += 1;
    }
    *at += 1;
    Some(())
}

fn add(base: u64, distance: i32) -> u64 {
    base.wrapping_add_signed(distance.into())
}

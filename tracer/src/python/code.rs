//! Code objects: what a function is called, and which line an instruction is of.

use std::io;

use super::{Memory, Offsets, word};

/// A function, as its code object describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// `Class.method`.
    pub name: String,
    pub file: String,
    pub first_line: u32,
    /// `co_linetable`.
    lines: Vec<u8>,
    /// Where in the code object its instructions begin, in bytes.
    instructions: u32,
}

/// Longer names are cut, longer line tables not read.
const MAX_NAME: u64 = 512;
const MAX_LINES: u64 = 1 << 20;

impl Code {
    /// Reads a code object, if it is (still) the one whose first line was seen.
    ///
    /// # Errors
    /// It cannot be read, or is another one by now.
    pub fn read(memory: &impl Memory, offsets: &Offsets, address: u64, first_line: u32) -> io::Result<Self> {
        let layout = &offsets.layout;
        let at = |offset: u32| address.wrapping_add(u64::from(offset));
        let is_same = || -> io::Result<bool> {
            let mut line = [0; 4];
            memory.read(at(layout.code_first_line), &mut line)?;
            Ok(u32::from_ne_bytes(line) == first_line)
        };
        let name = string(memory, offsets, word(memory, at(layout.code_name))?)?;
        let file = string(memory, offsets, word(memory, at(layout.code_file))?)?;
        let table = word(memory, at(layout.code_lines))?;
        let size = word(memory, table.wrapping_add(u64::from(layout.bytes_size)))?;
        let mut lines = vec![0; if size <= MAX_LINES { usize::try_from(size).unwrap_or(0) } else { 0 }];
        memory.read(table.wrapping_add(u64::from(layout.bytes_data)), &mut lines)?;
        // Last, so that nothing above was read of another one.
        if name.is_empty() || !is_same()? {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { name, file, first_line, lines, instructions: layout.code_instructions })
    }

    /// The line of an instruction, which is `bytes` behind the beginning of the code object.
    #[must_use]
    pub fn line(&self, bytes: u32) -> u32 {
        let instruction = bytes.wrapping_sub(self.instructions) / 2;
        line(&self.lines, self.first_line, instruction).unwrap_or(self.first_line)
    }
}

/// The text of a `str`.
fn string(memory: &impl Memory, offsets: &Offsets, address: u64) -> io::Result<String> {
    let layout = &offsets.layout;
    let at = |offset: u32| address.wrapping_add(u64::from(offset));
    let length = word(memory, at(layout.string_length))?;
    let mut state = [0; 4];
    memory.read(at(layout.string_state), &mut state)?;
    // PyASCIIObject.state: interned 2 bits, kind 3, compact 1, ascii 1.
    let state = u32::from_ne_bytes(state);
    let (kind, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1 == 1, state >> 6 & 1 == 1);
    let data = match (is_ascii, layout.string_compact) {
        (true, _) => layout.string_ascii,
        (false, Some(compact)) => compact,
        (false, None) => return Err(io::ErrorKind::InvalidData.into()),
    };
    if !is_compact || !matches!(kind, 1 | 2 | 4) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let kind = kind as usize;
    let characters = usize::try_from(length.min(MAX_NAME)).unwrap_or(0);
    let mut bytes = vec![0; characters * kind];
    memory.read(at(data), &mut bytes)?;
    let character = |unit: &[u8]| {
        let mut word = [0; 4];
        word[..kind].copy_from_slice(unit);
        char::from_u32(u32::from_le_bytes(word)).unwrap_or(char::REPLACEMENT_CHARACTER)
    };
    Ok(bytes.chunks_exact(kind).map(character).collect())
}

/// The line of an instruction, by a code object's line table (Objects/locations.md of CPython). `None` where the table
/// does not reach so far, or the instruction has no line.
#[must_use]
pub fn line(table: &[u8], first_line: u32, instruction: u32) -> Option<u32> {
    let mut bytes = table.iter().copied();
    let mut line = i64::from(first_line);
    let mut position = 0u32;
    while let Some(head) = bytes.next() {
        let code = head >> 3 & 15;
        let mut has_line = true;
        match code {
            // A short form, with columns: one byte.
            0..=9 => _ = bytes.next()?,
            10..=12 => {
                line = line.saturating_add(i64::from(code) - 10);
                _ = bytes.nth(1)?;
            }
            13 => line = line.saturating_add(signed(&mut bytes)?),
            14 => {
                line = line.saturating_add(signed(&mut bytes)?);
                for _ in 0..3 {
                    _ = unsigned(&mut bytes)?;
                }
            }
            _ => has_line = false,
        }
        position += u32::from(head & 7) + 1;
        if instruction < position {
            return has_line.then(|| u32::try_from(line).ok()).flatten();
        }
    }
    None
}

fn unsigned(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut value = 0;
    for shift in (0..60).step_by(6) {
        let byte = bytes.next()?;
        value |= u64::from(byte & 63) << shift;
        if byte & 64 == 0 {
            return Some(value);
        }
    }
    None
}

fn signed(bytes: &mut impl Iterator<Item = u8>) -> Option<i64> {
    let value = unsigned(bytes)?;
    let size = i64::try_from(value >> 1).ok()?;
    Some(if value & 1 == 1 { -size } else { size })
}

//! The pointers of a shared library: which word will hold which address once the loader has relocated it.

use crate::{
    Reason,
    elf::{Image, word},
    machine::Relocations,
};

/// Most pointers that are kept; about four times what the largest known library has.
const MAX_POINTERS: usize = 1 << 22;

/// Addresses of the words and of what they point at, in the file's own address space.
pub(crate) struct Pointers {
    /// (word, value), sorted by word.
    words: Vec<(u64, u64)>,
    /// (word, symbol index, addend) of words whose value a symbol decides, sorted by word.
    symbolic: Vec<(u64, u32, i64)>,
}

impl Pointers {
    /// Reads the relocations of an image.
    pub(crate) fn read(image: &Image, kinds: Relocations) -> Result<Self, Reason> {
        let mut pointers = Self { words: Vec::new(), symbolic: Vec::new() };
        pointers.read_rela(image, &kinds)?;
        pointers.read_relr(image)?;
        pointers.words.sort_by_key(|(word, _)| *word);
        pointers.symbolic.sort_by_key(|(word, ..)| *word);
        Ok(pointers)
    }

    fn read_rela(&mut self, image: &Image, kinds: &Relocations) -> Result<(), Reason> {
        let Some(table) = table(image, image.dynamic.rela, image.dynamic.rela_bytes)? else { return Ok(()) };
        for entry in table.chunks_exact(24) {
            let (Some(at), Some(info), Some(addend)) = (word(entry, 0), word(entry, 8), word(entry, 16))
            else {
                continue;
            };
            let (kind, symbol) = (info as u32, (info >> 32) as u32);
            // Without a symbol the addend is the value.
            if kind == kinds.relative || kind == kinds.absolute && symbol == 0 {
                self.push(at, addend)?;
            } else if kind == kinds.absolute || kind == kinds.global {
                let addend = if kind == kinds.absolute { addend } else { 0 };
                if let Some(address) = image.symbol_address(symbol as usize) {
                    self.push(at, address.wrapping_add(addend))?;
                }
                self.symbolic.push((at, symbol, addend as i64));
            }
        }
        Ok(())
    }

    /// DT_RELR: an even entry is an address, an odd one a map of the 63 words after the last.
    fn read_relr(&mut self, image: &Image) -> Result<(), Reason> {
        let Some(table) = table(image, image.dynamic.relr, image.dynamic.relr_bytes)? else { return Ok(()) };
        let mut next = 0u64;
        for entry in table.chunks_exact(8).filter_map(|entry| word(entry, 0)) {
            if entry & 1 == 0 {
                self.push_in_place(image, entry)?;
                next = entry.wrapping_add(8);
                continue;
            }
            let mut bits = entry >> 1;
            while bits != 0 {
                self.push_in_place(image, next.wrapping_add(8 * u64::from(bits.trailing_zeros())))?;
                bits &= bits - 1;
            }
            next = next.wrapping_add(63 * 8);
        }
        Ok(())
    }

    fn push_in_place(&mut self, image: &Image, at: u64) -> Result<(), Reason> {
        match image.u64_at(at) {
            Some(value) => self.push(at, value),
            None => Ok(()),
        }
    }

    fn push(&mut self, at: u64, value: u64) -> Result<(), Reason> {
        if self.words.len() == MAX_POINTERS {
            return Err(Reason::TooManyRelocations(MAX_POINTERS));
        }
        self.words.push((at, value));
        Ok(())
    }

    /// The value that a word will hold.
    pub(crate) fn at(&self, word: u64) -> Option<u64> {
        self.words.binary_search_by_key(&word, |(at, _)| *at).ok().map(|index| self.words[index].1)
    }

    /// The words that will hold one of these values.
    pub(crate) fn to<'b>(&'b self, value: u64) -> impl Iterator<Item = u64> + 'b {
        self.words.iter().filter(move |(_, to)| *to == value).map(|(at, _)| *at)
    }

    /// All words with the values they will hold.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.words.iter().copied()
    }

    /// Words whose value a symbol decides: (word, symbol index, addend).
    pub(crate) fn symbolic(&self) -> impl Iterator<Item = (u64, u32, i64)> {
        self.symbolic.iter().copied()
    }

    pub(crate) fn is_symbolic(&self, word: u64) -> bool {
        self.symbolic.binary_search_by_key(&word, |(at, ..)| *at).is_ok()
    }
}

/// A relocation table; an error when it does not lie in the file as a whole.
fn table<'a>(image: &Image<'a>, address: u64, bytes: u64) -> Result<Option<&'a [u8]>, Reason> {
    if address == 0 || bytes == 0 {
        return Ok(None);
    }
    let found = usize::try_from(bytes).ok().and_then(|bytes| image.bytes_at(address, bytes));
    found.filter(|table| table.len() as u64 == bytes).map(Some).ok_or(Reason::Malformed("relocations"))
}

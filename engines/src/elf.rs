//! ELF files, read without trusting them: every offset is checked, nothing is allocated by a size that the file states.

use object::{
    LittleEndian as LE, ReadRef as _, elf,
    read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _},
};

use crate::Reason;

/// More loadable segments than any linker makes.
const MAX_SEGMENTS: usize = 64;
/// Longest symbol or section name that is looked at, in bytes.
const MAX_NAME: usize = 1024;

/// A part of the file that is mapped.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    offset: u64,
    bytes: u64,
    executable: bool,
}

/// Addresses and sizes in bytes from the dynamic section; 0 when absent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dynamic {
    symbols: u64,
    strings: u64,
    string_bytes: u64,
    hash: u64,
    gnu_hash: u64,
    pub(crate) rela: u64,
    pub(crate) rela_bytes: u64,
    pub(crate) relr: u64,
    pub(crate) relr_bytes: u64,
}

/// A named symbol that the file defines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) address: u64,
    /// Size in bytes, 0 when not stated.
    pub(crate) bytes: u64,
    /// The symbol names a resolver that chooses the function at run time.
    pub(crate) indirect: bool,
}

/// A section that lies in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Section<'a> {
    pub(crate) address: u64,
    pub(crate) data: &'a [u8],
}

/// A 64-bit little-endian ELF file.
#[derive(Clone, Debug)]
pub(crate) struct Image<'a> {
    data: &'a [u8],
    header: &'a elf::FileHeader64<LE>,
    segments: Vec<Segment>,
    pub(crate) dynamic: Dynamic,
    symbols: &'a [elf::Sym64<LE>],
    /// Where the table of unwind information begins (PT_GNU_EH_FRAME).
    pub(crate) eh_frame_header: Option<u64>,
}

impl<'a> Image<'a> {
    /// Reads the headers.
    pub(crate) fn parse(data: &'a [u8]) -> Result<Self, Reason> {
        let header = elf::FileHeader64::<LE>::parse(data).map_err(|_| Reason::NotElf)?;
        if header.is_big_endian() {
            return Err(Reason::NotElf);
        }
        let mut image = Self {
            data,
            header,
            segments: Vec::new(),
            dynamic: Dynamic::default(),
            symbols: &[],
            eh_frame_header: None,
        };
        let headers = header.program_headers(LE, data).map_err(|_| Reason::Malformed("program headers"))?;
        let mut dynamic = None;
        for program in headers {
            match program.p_type(LE) {
                elf::PT_LOAD => image.add_segment(program)?,
                elf::PT_DYNAMIC => dynamic = Some(program.p_vaddr.get(LE)),
                elf::PT_GNU_EH_FRAME => image.eh_frame_header = Some(program.p_vaddr.get(LE)),
                _ => {}
            }
        }
        if let Some(address) = dynamic {
            image.dynamic = image.read_dynamic(address)?;
            image.symbols = image.read_symbols()?;
        }
        Ok(image)
    }

    fn add_segment(&mut self, program: &elf::ProgramHeader64<LE>) -> Result<(), Reason> {
        if self.segments.len() == MAX_SEGMENTS {
            return Err(Reason::Malformed("too many segments"));
        }
        let (offset, bytes) = (program.p_offset.get(LE), program.p_filesz.get(LE));
        let address = program.p_vaddr.get(LE);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.data.len() as u64);
        if !inside || address.checked_add(bytes).is_none() {
            return Err(Reason::Malformed("a segment lies outside the file"));
        }
        let executable = program.p_flags(LE).contains(elf::PF_X);
        self.segments.push(Segment { address, offset, bytes, executable });
        Ok(())
    }

    fn read_dynamic(&self, address: u64) -> Result<Dynamic, Reason> {
        let table = self.bytes_at(address, usize::MAX).ok_or(Reason::Malformed("dynamic section"))?;
        let mut dynamic = Dynamic::default();
        for entry in table.chunks_exact(16) {
            let (Some(tag), Some(value)) = (word(entry, 0), word(entry, 8)) else { break };
            match tag {
                0 => break,
                4 => dynamic.hash = value,
                5 => dynamic.strings = value,
                6 => dynamic.symbols = value,
                7 => dynamic.rela = value,
                8 => dynamic.rela_bytes = value,
                10 => dynamic.string_bytes = value,
                35 => dynamic.relr_bytes = value,
                36 => dynamic.relr = value,
                0x6fff_fef5 => dynamic.gnu_hash = value,
                _ => {}
            }
        }
        Ok(dynamic)
    }

    /// The dynamic symbol table. The file states its length only through its hash tables.
    fn read_symbols(&self) -> Result<&'a [elf::Sym64<LE>], Reason> {
        let malformed = Reason::Malformed("dynamic symbols");
        if self.dynamic.symbols == 0 {
            return Ok(&[]);
        }
        let count = if self.dynamic.gnu_hash != 0 {
            self.gnu_hash_symbols().ok_or(malformed.clone())?
        } else if self.dynamic.hash != 0 {
            let header = self.bytes_at(self.dynamic.hash, 8).ok_or(malformed.clone())?;
            half(header, 4).ok_or(malformed.clone())? as usize
        } else {
            0
        };
        let table = self.bytes_at(self.dynamic.symbols, usize::MAX).ok_or(malformed.clone())?;
        table.read_slice_at(0, count).map_err(|_| malformed)
    }

    /// Number of symbols by the GNU hash table: the end of the longest chain, or the symbols before the hashed ones.
    fn gnu_hash_symbols(&self) -> Option<usize> {
        let table = self.bytes_at(self.dynamic.gnu_hash, usize::MAX)?;
        let (buckets, first, bloom) =
            (half(table, 0)? as usize, half(table, 4)? as usize, half(table, 8)? as usize);
        let buckets_at = bloom.checked_mul(8)?.checked_add(16)?;
        let chains_at = buckets.checked_mul(4)?.checked_add(buckets_at)?;
        let mut last = 0;
        for bucket in table.get(buckets_at..chains_at)?.chunks_exact(4) {
            last = last.max(half(bucket, 0)? as usize);
        }
        if last < first {
            return Some(first);
        }
        while half(table, chains_at.checked_add((last - first).checked_mul(4)?)?)? & 1 == 0 {
            last += 1;
        }
        Some(last + 1)
    }

    pub(crate) fn machine(&self) -> u16 {
        self.header.e_machine.get(LE).0
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.header.e_type(LE) == elf::ET_DYN
    }

    /// File offset of a mapped address.
    pub(crate) fn offset_of(&self, address: u64) -> Option<u64> {
        self.segment(address).map(|segment| address - segment.address + segment.offset)
    }

    fn segment(&self, address: u64) -> Option<&Segment> {
        self.segments
            .iter()
            .find(|segment| address.checked_sub(segment.address).is_some_and(|at| at < segment.bytes))
    }

    /// Whether an address lies in executable code of the file.
    pub(crate) fn is_code(&self, address: u64) -> bool {
        self.segment(address).is_some_and(|segment| segment.executable)
    }

    /// The bytes from an address to the end of its segment in the file, at most `max`.
    pub(crate) fn bytes_at(&self, address: u64, max: usize) -> Option<&'a [u8]> {
        let segment = self.segment(address)?;
        let at = address - segment.address;
        let bytes = (segment.bytes - at).min(max as u64);
        self.data.read_bytes_at(segment.offset + at, bytes).ok()
    }

    pub(crate) fn u64_at(&self, address: u64) -> Option<u64> {
        word(self.bytes_at(address, 8)?, 0)
    }

    /// The string at an address, without its NUL, if that comes within [`MAX_NAME`] bytes.
    pub(crate) fn c_str(&self, address: u64) -> Option<&'a [u8]> {
        c_str(self.bytes_at(address, MAX_NAME)?)
    }

    /// Whether the string `text` (with its NUL) begins at an address.
    pub(crate) fn is_c_str(&self, address: u64, text: &[u8]) -> bool {
        let bytes = self.bytes_at(address, text.len() + 1);
        bytes.is_some_and(|bytes| bytes.strip_prefix(text) == Some(&[0]))
    }

    /// Dynamic symbols with their indices, undefined ones included: (index, name, defined address).
    pub(crate) fn dynamic_symbols(&self) -> impl Iterator<Item = (usize, &'a [u8], Option<u64>)> {
        self.symbols.iter().enumerate().filter_map(|(index, symbol)| {
            let address = (symbol.st_shndx.get(LE) != elf::SHN_UNDEF).then(|| symbol.st_value.get(LE));
            Some((index, self.dynamic_name(symbol.st_name.get(LE))?, address))
        })
    }

    fn dynamic_name(&self, at: u32) -> Option<&'a [u8]> {
        let address = self.dynamic.strings.checked_add(u64::from(at))?;
        (u64::from(at) < self.dynamic.string_bytes).then(|| self.c_str(address))?
    }

    /// Address of a dynamic symbol that the file defines.
    pub(crate) fn symbol_address(&self, index: usize) -> Option<u64> {
        let symbol = self.symbols.get(index)?;
        (symbol.st_shndx.get(LE) != elf::SHN_UNDEF).then(|| symbol.st_value.get(LE))
    }

    /// The symbols that the file exports.
    pub(crate) fn exports(&self) -> impl Iterator<Item = Symbol<'a>> {
        self.symbols.iter().filter_map(|symbol| defined(symbol, self.dynamic_name(symbol.st_name.get(LE))?))
    }

    /// The symbols of the table that `strip` removes.
    pub(crate) fn local_symbols(&self) -> impl Iterator<Item = Symbol<'a>> {
        let tables = self.header.sections(LE, self.data).ok().and_then(|sections| {
            let symbols = sections.iter().find(|section| section.sh_type(LE) == elf::SHT_SYMTAB)?;
            let strings = sections.iter().nth(symbols.sh_link(LE) as usize)?;
            Some((
                symbols.data_as_array::<elf::Sym64<LE>, _>(LE, self.data).ok()?,
                strings.data(LE, self.data).ok()?,
            ))
        });
        let (symbols, strings): (&[elf::Sym64<LE>], &[u8]) = tables.unwrap_or_default();
        symbols.iter().filter_map(|symbol| {
            let name = strings.get(symbol.st_name.get(LE) as usize..)?;
            defined(symbol, c_str(&name[..name.len().min(MAX_NAME)])?)
        })
    }

    /// The sections of this name.
    pub(crate) fn sections(&self, name: &str) -> impl Iterator<Item = Section<'a>> {
        let sections = self.header.sections(LE, self.data).unwrap_or_default();
        let wanted = name.as_bytes().to_vec();
        let data = self.data;
        let headers = self.header.section_headers(LE, data).unwrap_or_default();
        headers.iter().filter_map(move |section| {
            (sections.section_name(LE, section).ok()? == wanted).then_some(())?;
            let data = section.data(LE, data).unwrap_or_default();
            Some(Section { address: section.sh_addr.get(LE), data })
        })
    }

    /// The GNU build id; empty when there is none.
    pub(crate) fn build_id(&self) -> Vec<u8> {
        let Ok(headers) = self.header.program_headers(LE, self.data) else { return Vec::new() };
        for program in headers {
            let Ok(Some(mut notes)) = program.notes(LE, self.data) else { continue };
            while let Ok(Some(note)) = notes.next() {
                if note.name() == elf::ELF_NOTE_GNU && note.n_type(LE) == elf::NT_GNU_BUILD_ID {
                    // The kernel reads at most 20 bytes; longer ones are no build ids.
                    return note.desc().get(..note.desc().len().min(64)).unwrap_or_default().to_vec();
                }
            }
        }
        Vec::new()
    }
}

fn defined<'a>(symbol: &elf::Sym64<LE>, name: &'a [u8]) -> Option<Symbol<'a>> {
    let kind = symbol.st_type();
    let is_named = matches!(kind, elf::STT_NOTYPE | elf::STT_OBJECT | elf::STT_FUNC | elf::STT_GNU_IFUNC);
    (symbol.st_shndx.get(LE) != elf::SHN_UNDEF && is_named).then(|| Symbol {
        name,
        address: symbol.st_value.get(LE),
        bytes: symbol.st_size.get(LE),
        indirect: kind == elf::STT_GNU_IFUNC,
    })
}

fn c_str(bytes: &[u8]) -> Option<&[u8]> {
    bytes.iter().position(|byte| *byte == 0).map(|end| &bytes[..end])
}

/// The u64 at an offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
}

/// The u32 at an offset.
pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}

//! Where an ELF file keeps what its stacks need.

use gimli::{BaseAddresses, LittleEndian};
use object::elf::{FileHeader64, PF_X, PT_GNU_EH_FRAME, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _};
use object::{Architecture, LittleEndian as Little, Object as _};
use thiserror::Error;

use super::Table;

/// Page size of x86-64.
const PAGE_BYTES: u64 = 4096;

/// Why a file has no table.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ImageError {
    #[error("no ELF file: {0}")]
    NotElf(String),
    #[error("a program for another machine ({0:?})")]
    Machine(Architecture),
    #[error("no unwind information (.eh_frame): built with -fno-asynchronous-unwind-tables?")]
    NoTables,
    #[error("its code spans more than 4 GiB")]
    TooLong,
}

/// The executable segments of a file: where in the file, at which address, how many bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Segments(Vec<[u64; 3]>);

impl Segments {
    /// One segment that is the file, and is loaded at 0.
    #[must_use]
    pub fn flat(bytes: u64) -> Self {
        Self(vec![[0, 0, bytes]])
    }

    /// What to take from an address in a mapping for the file's own; `None` where the mapping is of no executable
    /// segment. Only those count: neighbours may share a page of the file and be loaded elsewhere.
    #[must_use]
    pub fn bias(&self, begin: u64, file_offset: u64) -> Option<u64> {
        let holds = |[offset, _, bytes]: &&[u64; 3]| {
            file_offset >= *offset & !(PAGE_BYTES - 1) && file_offset < offset.saturating_add(*bytes)
        };
        let [offset, address, _] = self.0.iter().find(holds)?;
        Some(begin.wrapping_sub(file_offset).wrapping_sub(address.wrapping_sub(*offset)))
    }
}

/// What of a file matters for walking stacks.
#[derive(Debug)]
pub struct Image<'data> {
    pub segments: Segments,
    eh_frame: &'data [u8],
    bases: BaseAddresses,
    pub build_id: Vec<u8>,
}

impl<'data> Image<'data> {
    /// Looks at a file.
    ///
    /// # Errors
    /// It is no ELF file for x86-64, or has no unwind information.
    pub fn parse(bytes: &'data [u8]) -> Result<Self, ImageError> {
        let bad = |error: object::Error| ImageError::NotElf(error.to_string());
        let file = object::File::parse(bytes).map_err(bad)?;
        if file.architecture() != Architecture::X86_64 || !file.is_64() {
            return Err(ImageError::Machine(file.architecture()));
        }
        let header = FileHeader64::<Little>::parse(bytes).map_err(bad)?;
        let headers = header.program_headers(Little, bytes).map_err(bad)?;
        let segments: Vec<[u64; 3]> = headers
            .iter()
            .filter(|segment| segment.p_type(Little) == PT_LOAD && segment.p_flags(Little).contains(PF_X))
            .map(|s| [s.p_offset(Little), s.p_vaddr(Little), s.p_filesz(Little)])
            .collect();
        let (mut eh_frame, mut bases) = (None, BaseAddresses::default());
        if let Ok(sections) = header.sections(Little, bytes) {
            for section in sections.iter() {
                let Ok(name) = sections.section_name(Little, section) else { continue };
                let address = section.sh_addr(Little);
                match name {
                    b".eh_frame" => {
                        bases = bases.set_eh_frame(address);
                        eh_frame = section.data(Little, bytes).ok();
                    }
                    b".text" => bases = bases.set_text(address),
                    b".got" => bases = bases.set_got(address),
                    _ => {}
                }
            }
        }
        if eh_frame.is_none() {
            // Without section headers the loader's own pointer is left.
            let index = headers.iter().find(|segment| segment.p_type(Little) == PT_GNU_EH_FRAME);
            if let Some(found) = index.and_then(|index| by_index(bytes, headers, index)) {
                bases = bases.set_eh_frame(found.0);
                eh_frame = Some(found.1);
            }
        }
        let eh_frame = eh_frame.filter(|section| !section.is_empty()).ok_or(ImageError::NoTables)?;
        let build_id = file.build_id().ok().flatten().unwrap_or_default().to_vec();
        Ok(Self { segments: Segments(segments), eh_frame, bases, build_id })
    }

    /// Builds the table.
    ///
    /// # Errors
    /// The addresses that it is about are too far apart.
    pub fn table(&self) -> Result<Table, ImageError> {
        let section = gimli::EhFrame::new(self.eh_frame, LittleEndian);
        Table::build(&section, &self.bases).ok_or(ImageError::TooLong)
    }

    /// What tells apart the tables of files with one build-id, which is but what a file says of itself.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.segments.hash(&mut hasher);
        self.bases.eh_frame.section.hash(&mut hasher);
        hasher.write(self.eh_frame);
        hasher.finish()
    }
}

/// `.eh_frame` by `.eh_frame_hdr`: its address, and from there to the end of its segment.
fn by_index<'data>(
    bytes: &'data [u8],
    headers: &[object::elf::ProgramHeader64<Little>],
    index: &object::elf::ProgramHeader64<Little>,
) -> Option<(u64, &'data [u8])> {
    let address = index.p_vaddr(Little);
    let hdr = gimli::EhFrameHdr::new(index.data(Little, bytes).ok()?, LittleEndian);
    let bases = BaseAddresses::default().set_eh_frame_hdr(address);
    let gimli::Pointer::Direct(start) = hdr.parse(&bases, 8).ok()?.eh_frame_ptr() else { return None };
    headers.iter().filter(|segment| segment.p_type(Little) == PT_LOAD).find_map(|segment| {
        let within = usize::try_from(start.checked_sub(segment.p_vaddr(Little))?).ok()?;
        Some((start, segment.data(Little, bytes).ok()?.get(within..)?))
    })
}

//! What the kernel side has of tables and mappings: where there is room, what is whose, and when it may go.
//!
//! The kernel side reads while this writes. So nothing is overwritten that could be in use: what goes is first made
//! unreachable, and its place is used again only after a time in which no walk lasts.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{ArrayOfMaps, HashMap as KernelMap, Map, MapData},
};
use tracer_abi::{
    maps,
    unwind::{
        CHUNK_ROWS, MAX_CHUNKS, MAX_MAPPINGS, MAX_PAGES, MAX_PYTHONS, MAX_RULES, Mapping, PythonOffsets,
        Rule, Space, cfa, page,
    },
};

use super::ranges::Ranges;
use crate::{
    probe::{ProbeError, bpf},
    unwind::Table,
};

/// No walk lasts so long, and no program is kept from the CPU so long in the middle of one.
const GRACE: Duration = Duration::from_secs(1);
const CHUNK_BYTES: u64 = 4 * CHUNK_ROWS as u64;
/// Rules that every table may refer to: code that no table describes, and what a rule cannot say.
const UNSUPPORTED: u16 = 1;

/// The maps that tables are in.
pub(super) struct Maps {
    rows: ArrayOfMaps<MapData, MapData>,
    pages: MapData,
    rules: MapData,
    mappings: MapData,
    spaces: KernelMap<MapData, u32, [u32; 5]>,
    pythons: MapData,
    python_threads: KernelMap<MapData, u32, [u64; 2]>,
}

impl Maps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, ProbeError> {
        let mut array = |name: &'static str| match ebpf.take_map(name) {
            Some(Map::Array(data)) => Ok(data),
            _ => Err(ProbeError::Absent { what: "map", name }),
        };
        let (pages, rules) = (array(maps::PAGES)?, array(maps::RULES)?);
        let (mappings, pythons) = (array(maps::MAPPINGS)?, array(maps::PYTHONS)?);
        let rows = ebpf.take_map(maps::ROWS).ok_or(ProbeError::Absent { what: "map", name: maps::ROWS })?;
        let rows =
            ArrayOfMaps::try_from(rows).map_err(|source| ProbeError::Map { name: maps::ROWS, source })?;
        Ok(Self {
            rows,
            pages,
            rules,
            mappings,
            spaces: hash(ebpf, maps::SPACES)?,
            pythons,
            python_threads: hash(ebpf, maps::PYTHON_THREADS)?,
        })
    }
}

fn hash<V: aya::Pod>(ebpf: &mut Ebpf, name: &'static str) -> Result<KernelMap<MapData, u32, V>, ProbeError> {
    let map = ebpf.take_map(name).ok_or(ProbeError::Absent { what: "map", name })?;
    KernelMap::try_from(map).map_err(|source| ProbeError::Map { name, source })
}

/// Number of a table in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TableId(u64);

struct Stored {
    base: u64,
    first_page: u32,
    pages: u32,
    /// The chunks that its rows are in.
    chunks: Vec<u32>,
    rows: u64,
    /// Spaces that refer to it.
    users: usize,
    /// When it last had one.
    used: Instant,
}

/// An inner map, and how much of it is taken.
struct Chunk {
    map: MapData,
    rows: u32,
    tables: usize,
}

/// What a process has in the map of mappings.
struct Range {
    first: u32,
    len: u32,
    tables: Vec<TableId>,
    entries: Vec<Mapping>,
}

/// What will be free when nobody can be reading it any more.
enum Freed {
    Mappings(u32, u32),
    Table(Stored),
}

/// Why a table is not in the kernel.
#[derive(Debug, thiserror::Error)]
pub(super) enum Full {
    #[error("the tables of other files take all {} MiB that are for them", (CHUNK_BYTES * MAX_CHUNKS as u64) >> 20)]
    Chunks,
    #[error("the tables of other files are about all the code that there is room for")]
    Pages,
    #[error("more mappings than there is room for")]
    Mappings,
    #[error("the kernel refuses: {0}")]
    Kernel(#[from] io::Error),
}

/// A mapping to be published.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) begin: u64,
    pub(super) end: u64,
    /// What to take from an address for the file's own.
    pub(super) bias: u64,
    pub(super) table: Option<TableId>,
    /// What it is without a table: one of `tracer_abi::unwind`.
    pub(super) kind: u32,
}

/// Everything that the kernel side has.
pub(super) struct Store {
    maps: Maps,
    rules: HashMap<Rule, u16>,
    chunks: Vec<Option<Chunk>>,
    /// The chunk that small tables are put into.
    filling: Option<u32>,
    pages: Ranges,
    mappings: Ranges,
    tables: HashMap<TableId, Stored>,
    next_table: u64,
    next_space: u32,
    spaces: HashMap<u32, Range>,
    freed: Vec<(Instant, Freed)>,
    pythons: Vec<PythonOffsets>,
    pub(super) evicted: u64,
}

impl Store {
    pub(super) fn new(maps: Maps) -> io::Result<Self> {
        let no_function = Rule { cfa: cfa::NONE, ..Rule::default() };
        let unsupported = Rule { cfa: cfa::UNSUPPORTED, ..Rule::default() };
        bpf::write(maps.rules.fd().as_fd(), 0, &[no_function, unsupported])?;
        Ok(Self {
            maps,
            rules: HashMap::from([(no_function, 0), (unsupported, UNSUPPORTED)]),
            chunks: (0..MAX_CHUNKS).map(|_| None).collect(),
            filling: None,
            pages: Ranges::new(MAX_PAGES),
            mappings: Ranges::new(MAX_MAPPINGS),
            tables: HashMap::new(),
            next_table: 0,
            next_space: 1,
            spaces: HashMap::new(),
            freed: Vec::new(),
            pythons: Vec::new(),
            evicted: 0,
        })
    }

    /// Bytes that tables take in the kernel: whole chunks.
    pub(super) fn table_bytes(&self) -> u64 {
        CHUNK_BYTES * self.chunks.iter().flatten().count() as u64
    }

    pub(super) fn rows(&self) -> u64 {
        self.tables.values().map(|table| table.rows).sum()
    }

    pub(super) fn holds(&self, table: TableId) -> bool {
        self.tables.contains_key(&table)
    }

    /// Puts a table into the kernel. Where there is no room, tables that nobody uses go.
    pub(super) fn add(&mut self, table: &Table) -> Result<TableId, Full> {
        let pages = u32::try_from(table.pages.len()).map_err(|_| Full::Pages)?;
        let (first_page, chunks) = loop {
            match self.place(table, pages) {
                Ok(placed) => break placed,
                Err(full) if !self.evict() => return Err(full),
                Err(_) => {}
            }
        };
        let id = TableId(self.next_table);
        self.next_table += 1;
        let rows = table.rows.len() as u64;
        let stored =
            Stored { base: table.base, first_page, pages, chunks, rows, users: 0, used: Instant::now() };
        self.tables.insert(id, stored);
        Ok(id)
    }

    /// Writes rules, rows and pages; returns the first page and the chunks, whose tables are counted.
    fn place(&mut self, table: &Table, pages: u32) -> Result<(u32, Vec<u32>), Full> {
        let numbers: Vec<u16> =
            table.rules.iter().map(|rule| self.number(*rule)).collect::<io::Result<_>>()?;
        let first_page = self.pages.take(pages).ok_or(Full::Pages)?;
        match self.write_rows(table, &numbers, first_page) {
            Ok(chunks) => Ok((first_page, chunks)),
            Err(full) => {
                self.pages.give(first_page, pages);
                Err(full)
            }
        }
    }

    fn write_rows(&mut self, table: &Table, numbers: &[u16], first_page: u32) -> Result<Vec<u32>, Full> {
        // What goes into one chunk: runs of pages.
        let mut used: Vec<u32> = Vec::new();
        let mut places: Vec<u64> = Vec::with_capacity(table.pages.len());
        let mut pending: Vec<u32> = Vec::new();
        let mut chunk = self.filling.filter(|chunk| self.chunks[*chunk as usize].is_some());
        let mut begin = chunk.map_or(0, |chunk| self.filled(chunk));
        let result = (|| {
            for page_of in &table.pages {
                if page_of.rows == 0 {
                    places.push(0);
                    continue;
                }
                let at = begin + u32::try_from(pending.len()).unwrap_or(u32::MAX);
                if chunk.is_none() || at.saturating_add(page_of.rows) > CHUNK_ROWS {
                    if let Some(chunk) = chunk {
                        self.append(chunk, begin, &pending, &mut used)?;
                    }
                    pending.clear();
                    chunk = Some(self.new_chunk()?);
                    begin = 0;
                }
                let number = chunk.unwrap_or_default();
                let at = begin + u32::try_from(pending.len()).unwrap_or(u32::MAX);
                places.push(page(number, at, page_of.rows));
                let rows = &table.rows[page_of.first as usize..][..page_of.rows as usize];
                pending.extend(rows.iter().map(|row| {
                    let number = numbers.get((row & 0xffff) as usize).copied().unwrap_or(UNSUPPORTED);
                    row & 0xffff_0000 | u32::from(number)
                }));
            }
            if let Some(chunk) = chunk {
                self.append(chunk, begin, &pending, &mut used)?;
                self.filling = Some(chunk);
            }
            bpf::write(self.maps.pages.fd().as_fd(), first_page, &places)?;
            Ok(())
        })();
        match result {
            Ok(()) => Ok(used),
            Err(full) => {
                used.into_iter().for_each(|chunk| self.release_chunk(chunk));
                self.drop_empty_chunks();
                Err(full)
            }
        }
    }

    fn filled(&self, chunk: u32) -> u32 {
        self.chunks[chunk as usize].as_ref().map_or(0, |chunk| chunk.rows)
    }

    fn append(&mut self, number: u32, at: u32, rows: &[u32], used: &mut Vec<u32>) -> Result<(), Full> {
        if let Some(chunk) = &mut self.chunks[number as usize]
            && !rows.is_empty()
        {
            bpf::write(chunk.map.fd().as_fd(), at, rows)?;
            chunk.rows = at + u32::try_from(rows.len()).unwrap_or(u32::MAX);
            chunk.tables += 1;
            used.push(number);
        }
        Ok(())
    }

    fn new_chunk(&mut self) -> Result<u32, Full> {
        let free = self.chunks.iter().position(Option::is_none).ok_or(Full::Chunks)?;
        let number = u32::try_from(free).map_err(|_| Full::Chunks)?;
        const ARRAY: u32 = 2;
        let described = aya_obj::Map::new_from_params(ARRAY, 4, 4, CHUNK_ROWS, 0);
        let map = MapData::create(described, "unwind_rows", None).map_err(io::Error::other)?;
        self.maps.rows.set(number, &map, 0).map_err(io::Error::other)?;
        self.chunks[free] = Some(Chunk { map, rows: 0, tables: 0 });
        Ok(number)
    }

    fn release_chunk(&mut self, number: u32) {
        if let Some(chunk) = &mut self.chunks[number as usize] {
            chunk.tables -= 1;
        }
    }

    fn drop_empty_chunks(&mut self) {
        for (number, chunk) in (0..).zip(&mut self.chunks) {
            if chunk.as_ref().is_some_and(|chunk| chunk.tables == 0) {
                *chunk = None;
                if self.filling == Some(number) {
                    self.filling = None;
                }
            }
        }
    }

    /// The number of a rule, which is in the kernel then.
    fn number(&mut self, rule: Rule) -> io::Result<u16> {
        if let Some(&number) = self.rules.get(&rule) {
            return Ok(number);
        }
        let next = u32::try_from(self.rules.len()).unwrap_or(u32::MAX);
        let Some(number) = u16::try_from(next).ok().filter(|_| next < MAX_RULES) else {
            return Ok(UNSUPPORTED);
        };
        bpf::write(self.maps.rules.fd().as_fd(), next, &[rule])?;
        self.rules.insert(rule, number);
        Ok(number)
    }

    /// Takes away the table that has been without users for longest; `false` if each has one. Its room is free after
    /// the grace.
    fn evict(&mut self) -> bool {
        let unused = self.tables.iter().filter(|(_, table)| table.users == 0);
        let Some(id) = unused.min_by_key(|(_, table)| table.used).map(|(id, _)| *id) else { return false };
        if let Some(stored) = self.tables.remove(&id) {
            self.evicted += 1;
            // Without users since when it was last used: readers are gone when that is a grace ago.
            let left = GRACE.saturating_sub(stored.used.elapsed());
            std::thread::sleep(left);
            self.free(Freed::Table(stored));
        }
        true
    }

    /// Tells the kernel side what a process maps. `wanted` is sorted and does not overlap.
    pub(super) fn publish(
        &mut self,
        tgid: u32,
        epoch: u32,
        python: u32,
        wanted: &[Wanted],
    ) -> Result<(), Full> {
        self.settle();
        let len = u32::try_from(wanted.len()).map_err(|_| Full::Mappings)?;
        if len > tracer_abi::unwind::MAX_SPACE {
            return Err(Full::Mappings);
        }
        let first = self.mappings.take(len).ok_or(Full::Mappings)?;
        let id = self.next_space;
        self.next_space = self.next_space.checked_add(1).unwrap_or(1);
        let entries: Vec<Mapping> = wanted.iter().map(|wanted| self.entry(wanted, id)).collect();
        let mut tables: Vec<TableId> = wanted.iter().filter_map(|wanted| wanted.table).collect();
        tables.sort_unstable();
        tables.dedup();
        let space = Space { first, len, id, python, epoch };
        let written = bpf::write(self.maps.mappings.fd().as_fd(), first, &entries).and_then(|()| {
            let words = bytemuck::cast::<Space, [u32; 5]>(space);
            self.maps.spaces.insert(tgid, words, 0).map_err(io::Error::other)
        });
        if let Err(error) = written {
            self.mappings.give(first, len);
            return Err(error.into());
        }
        for id in &tables {
            if let Some(table) = self.tables.get_mut(id) {
                table.users += 1;
            }
        }
        if let Some(before) = self.spaces.insert(tgid, Range { first, len, tables, entries }) {
            self.withdraw(before);
        }
        Ok(())
    }

    fn entry(&self, wanted: &Wanted, space: u32) -> Mapping {
        let bare =
            Mapping { begin: wanted.begin, end: wanted.end, space, kind: wanted.kind, ..Mapping::default() };
        match wanted.table.and_then(|id| self.tables.get(&id)) {
            Some(table) => Mapping {
                bias: wanted.bias.wrapping_add(table.base),
                first_page: table.first_page,
                pages: table.pages,
                kind: tracer_abi::unwind::WITH_TABLE,
                ..bare
            },
            None => bare,
        }
    }

    /// A process has ended.
    pub(super) fn remove(&mut self, tgid: u32) {
        // The kernel side has done so itself in most cases.
        let _gone = self.maps.spaces.remove(&tgid);
        if let Some(range) = self.spaces.remove(&tgid) {
            self.withdraw(range);
        }
        self.settle();
    }

    /// Makes a range unreachable: its entries are nobody's now. A child that was forked with it has none until its own
    /// is published.
    fn withdraw(&mut self, range: Range) {
        let Range { first, len, tables, mut entries } = range;
        entries.iter_mut().for_each(|entry| entry.space = 0);
        if let Err(error) = bpf::write(self.maps.mappings.fd().as_fd(), first, &entries) {
            // Then it stays reachable, and its place is never used again.
            tracing::warn!("mappings of an ended process stay in the kernel: {error}");
            return;
        }
        let now = Instant::now();
        for id in tables {
            if let Some(table) = self.tables.get_mut(&id) {
                table.users -= 1;
                table.used = now;
            }
        }
        self.freed.push((now, Freed::Mappings(first, len)));
    }

    /// Frees what nobody can be reading any more.
    fn settle(&mut self) {
        let now = Instant::now();
        let (free, wait) = self.freed.drain(..).partition(|(since, _)| now.duration_since(*since) > GRACE);
        self.freed = wait;
        Vec::into_iter(free).for_each(|(_, freed)| self.free(freed));
    }

    fn free(&mut self, freed: Freed) {
        match freed {
            Freed::Mappings(first, len) => self.mappings.give(first, len),
            Freed::Table(Stored { first_page, pages, chunks, .. }) => {
                self.pages.give(first_page, pages);
                chunks.into_iter().for_each(|chunk| self.release_chunk(chunk));
                self.drop_empty_chunks();
            }
        }
    }

    /// 1 + the index of an interpreter's offsets; 0 where there are too many versions.
    pub(super) fn python(&mut self, offsets: PythonOffsets) -> io::Result<u32> {
        let number = |index: usize| u32::try_from(index + 1).unwrap_or(0);
        if let Some(known) = self.pythons.iter().position(|known| *known == offsets) {
            return Ok(number(known));
        }
        if self.pythons.len() >= MAX_PYTHONS as usize {
            return Ok(0);
        }
        let index = u32::try_from(self.pythons.len()).unwrap_or(0);
        bpf::write(self.maps.pythons.fd().as_fd(), index, &[offsets])?;
        self.pythons.push(offsets);
        Ok(number(index as usize))
    }

    pub(super) fn set_python_thread(&mut self, tid: u32, tgid: u32, state: u64) {
        let value = tracer_abi::unwind::PythonThread { state, tgid, _pad: 0 };
        // A map that is full: its frames stay C frames, which is counted where they are seen.
        let _full = self.maps.python_threads.insert(tid, bytemuck::cast::<_, [u64; 2]>(value), 0);
    }
}

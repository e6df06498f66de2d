//! All rules of a file, in pages.

use std::collections::HashMap;

use gimli::{BaseAddresses, CieOrFde, EhFrame, UnwindContext, UnwindSection as _};
use tracer_abi::unwind::{PAGE_SHIFT, Rule, rbp};

use super::rules::{NO_FUNCTION, Reader, SIGNAL, UNSUPPORTED, leaves_for_handler, rule};

/// What could not be used of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// Functions that are described.
    pub functions: u64,
    /// Functions of which a part is described in a way that a [`Rule`] cannot say, or that cannot be read.
    pub unsupported: u64,
    /// Descriptions that cannot be read at all, or that contradict one that came before.
    pub refused: u64,
    /// The section ends in the middle, or in something else.
    pub torn: bool,
}

/// Rows of one page: the first, and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    pub first: u32,
    /// 0: nothing is known of this page.
    pub rows: u32,
}

/// The rules of a file, by address: `rows` are as the kernel side searches them, but with numbers of `rules`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Address (the file's own) of the first page.
    pub base: u64,
    pub pages: Vec<Page>,
    /// Upper half: lowest 16 bits of the address from which on it holds; lower half: index into `rules`.
    pub rows: Vec<u32>,
    pub rules: Vec<Rule>,
    pub notes: Notes,
}

/// A function's rows, while the table is built.
#[derive(Clone, Copy)]
struct Span {
    begin: u64,
    end: u64,
    first: u32,
    rows: u32,
}

/// Addresses of one function that are put into a file differ by less than this.
type Row = (u32, u16);

/// Numbers rules.
struct Rules {
    list: Vec<Rule>,
    numbers: HashMap<Rule, u16>,
    last: (Rule, u16),
}

impl Rules {
    /// The first two are always there.
    fn new() -> Self {
        let list = vec![NO_FUNCTION, UNSUPPORTED];
        let numbers = list.iter().copied().zip(0..).collect();
        Self { list, numbers, last: (NO_FUNCTION, 0) }
    }

    fn number(&mut self, rule: Rule) -> u16 {
        if self.last.0 == rule {
            return self.last.1;
        }
        let number = match self.numbers.get(&rule) {
            Some(&number) => number,
            None => match u16::try_from(self.list.len()) {
                Ok(number) => {
                    self.list.push(rule);
                    self.numbers.insert(rule, number);
                    number
                }
                // No compiler emits so many.
                Err(_) => 1,
            },
        };
        self.last = (rule, number);
        number
    }
}

impl Table {
    /// Builds a table; `None` where the functions lie more than 4 GiB apart.
    pub(super) fn build(section: &EhFrame<Reader<'_>>, bases: &BaseAddresses) -> Option<Self> {
        let mut notes = Notes::default();
        let mut rules = Rules::new();
        // Offsets from the beginning of their function.
        let mut rows: Vec<Row> = Vec::new();
        let mut spans = functions(section, bases, &mut rules, &mut rows, &mut notes);
        spans.sort_unstable_by_key(|span| (span.begin, span.end));
        let Some(base) = spans.first().map(|span| span.begin >> PAGE_SHIFT << PAGE_SHIFT) else {
            return Some(Self { notes, ..Self::default() });
        };
        let mut table = Self { base, ..Self::default() };
        let mut writer = Writer::new(&mut table);
        let mut before: Option<u64> = None;
        for span in spans {
            if before.is_some_and(|before| span.begin < before) {
                notes.refused += 1;
                continue;
            }
            if let Some(before) = before.filter(|before| !is_padding(*before, span.begin)) {
                writer.push(before, 0)?;
            }
            for &(offset, rule) in &rows[span.first as usize..][..span.rows as usize] {
                writer.push(span.begin + u64::from(offset), rule)?;
            }
            before = Some(span.end);
        }
        if let Some(before) = before {
            writer.push(before, 0)?;
        }
        table.notes = notes;
        table.rules = rules.list;
        Some(table)
    }

    /// The first address behind all pages.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.base + ((self.pages.len() as u64) << PAGE_SHIFT)
    }

    /// The rule that holds at an address (the file's own), found as the kernel side finds it.
    #[must_use]
    pub fn rule(&self, address: u64) -> Option<&Rule> {
        let at = address.checked_sub(self.base)?;
        let page = self.pages.get(usize::try_from(at >> PAGE_SHIFT).ok()?)?;
        let rows = self.rows.get(page.first as usize..)?.get(..page.rows as usize)?;
        let after = rows.partition_point(|row| u64::from(row >> 16) <= at & 0xffff);
        let row = rows.get(after.checked_sub(1)?)?;
        self.rules.get((row & 0xffff) as usize)
    }
}

/// Whether what lies between two functions is too short to hold another one, which would begin at a multiple of 16.
fn is_padding(end: u64, begin: u64) -> bool {
    end == begin || (begin - end < 16 && begin.is_multiple_of(16))
}

/// Writes rows in order of address, page by page.
pub(super) struct Writer<'a> {
    table: &'a mut Table,
    /// The rule that holds where the next page begins.
    carry: u16,
}

impl<'a> Writer<'a> {
    pub(super) fn new(table: &'a mut Table) -> Self {
        Self { table, carry: 0 }
    }

    /// From an address on a rule holds, which the table has or gets.
    pub(super) fn rule(&mut self, address: u64, rule: Rule) -> Option<()> {
        let rules = &mut self.table.rules;
        if rules.is_empty() {
            rules.push(NO_FUNCTION);
        }
        let known = rules.iter().position(|known| *known == rule);
        let number = known.unwrap_or_else(|| {
            rules.push(rule);
            rules.len() - 1
        });
        self.push(address, u16::try_from(number).ok()?)
    }

    /// From an address on nothing is known.
    pub(super) fn unknown(&mut self, address: u64) -> Option<()> {
        self.push(address, 0)
    }

    fn push(&mut self, address: u64, rule: u16) -> Option<()> {
        let at = u32::try_from(address - self.table.base).ok()?;
        let page = (at >> PAGE_SHIFT) as usize;
        while self.table.pages.len() <= page {
            let begins_here = self.table.pages.len() == page && at & 0xffff == 0;
            let first = u32::try_from(self.table.rows.len()).ok()?;
            let unknown = self.carry == 0;
            // A page begins with what holds there, so that a search never leaves it.
            if !begins_here && (!unknown || self.table.pages.len() == page) {
                self.table.rows.push(u32::from(self.carry));
                self.table.pages.push(Page { first, rows: 1 });
            } else {
                self.table.pages.push(Page { first, rows: 0 });
            }
        }
        let row = (at & 0xffff) << 16 | u32::from(rule);
        let last = self.table.pages.last_mut()?;
        match self.table.rows.last_mut() {
            Some(before) if last.rows > 0 && *before >> 16 == row >> 16 => *before = row,
            Some(_) if last.rows > 0 && self.carry == rule => {}
            _ => {
                self.table.rows.push(row);
                last.rows += 1;
            }
        }
        self.carry = rule;
        Some(())
    }
}

/// Reads the descriptions of all functions.
fn functions(
    section: &EhFrame<Reader<'_>>,
    bases: &BaseAddresses,
    rules: &mut Rules,
    rows: &mut Vec<Row>,
    notes: &mut Notes,
) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut cies = HashMap::new();
    let mut context = UnwindContext::new();
    let mut entries = section.entries(bases);
    loop {
        let partial = match entries.next() {
            Ok(Some(CieOrFde::Fde(partial))) => partial,
            Ok(Some(CieOrFde::Cie(_))) => continue,
            Ok(None) => break,
            Err(_) => {
                notes.torn = true;
                break;
            }
        };
        let fde = partial.parse(|section, bases, offset| match cies.get(&offset.0) {
            Some(cie) => Ok(Clone::clone(cie)),
            None => {
                let cie = section.cie_from_offset(bases, offset)?;
                cies.insert(offset.0, cie.clone());
                Ok(cie)
            }
        });
        let Ok(fde) = fde else {
            notes.refused += 1;
            continue;
        };
        let (begin, bytes) = (fde.initial_address(), fde.len());
        let (Some(end), Ok(_)) = (begin.checked_add(bytes), u32::try_from(bytes)) else {
            notes.refused += 1;
            continue;
        };
        // What the linker has thrown away is at 0, or empty.
        if bytes == 0 || begin == 0 {
            continue;
        }
        notes.functions += 1;
        let first = rows.len();
        if fde.is_signal_trampoline() {
            rows.push((0, rules.number(SIGNAL)));
        } else {
            let encoding = fde.cie().encoding();
            let (mut is_whole, mut leaves) = (true, false);
            match fde.rows(section, bases, &mut context) {
                Ok(mut table) => loop {
                    match table.next_row() {
                        Ok(Some(row)) => {
                            let at = row.start_address();
                            let mut rule = rule(row, section, encoding);
                            is_whole &= rule != UNSUPPORTED;
                            leaves |= leaves_for_handler(row);
                            if leaves {
                                rule.rbp |= rbp::LEAVES_FOR_HANDLER;
                            }
                            push(rows, first, at, begin, end, rules.number(rule));
                        }
                        Ok(None) => break,
                        Err(_) => {
                            is_whole = false;
                            // Up to here it was understood; where that ends is not known.
                            rows.truncate(first);
                            break;
                        }
                    }
                },
                Err(_) => is_whole = false,
            }
            notes.unsupported += u64::from(!is_whole);
            if rows.len() == first {
                rows.push((0, 1));
            }
        }
        let (Ok(first), Ok(count)) = (u32::try_from(first), u32::try_from(rows.len() - first)) else {
            notes.torn = true;
            break;
        };
        spans.push(Span { begin, end, first, rows: count });
    }
    spans
}

/// Adds a row to a function that begins at row `first`. Addresses that go back or leave the function are not followed.
fn push(rows: &mut Vec<Row>, first: usize, at: u64, begin: u64, end: u64, rule: u16) {
    let Some(offset) = at.checked_sub(begin).filter(|_| at < end) else { return };
    let Ok(offset) = u32::try_from(offset) else { return };
    match rows[first..].last() {
        // The function's beginning must be covered.
        None if offset != 0 => rows.extend([(0, 1), (offset, rule)]),
        Some(last) if last.0 > offset || last.1 == rule => {}
        _ => rows.push((offset, rule)),
    }
}

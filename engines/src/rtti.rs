//! Finds the implementation of a C++ virtual method in a stripped library, through the type information of its class.
//!
//! The abstract base class has a `type_info` with a known name; every class that derives from it has one that points
//! there, and a vtable that points at its own. In the vtable, the method's slot is known from the version, and its
//! function refers to its own name (`__func__`): two witnesses that must agree, or the slot's neighbours must.

use std::ops::Range;

use crate::{
    Machine, Reason, elf::Image, frames::Frames, pointers::Pointers, profile::RttiRule, version::Version,
};

/// Classes that derive from the base; NVIDIA's libraries have fewer than ten.
const MAX_CLASSES: usize = 64;
const MAX_SLOTS: usize = 1024;
/// Bases of one class that are looked at.
const MAX_BASES: u64 = 8;
/// Bytes of a function that are searched for a reference to a name.
const MAX_BODY: usize = 8192;
/// Vtables of the C++ runtime that the type_info of a class without bases, with one, and with several points at.
const KINDS: [&str; 3] = [
    "_ZTVN10__cxxabiv117__class_type_infoE",
    "_ZTVN10__cxxabiv120__si_class_type_infoE",
    "_ZTVN10__cxxabiv121__vmi_class_type_infoE",
];

/// The one implementation of a method.
#[derive(Debug)]
pub(crate) struct Method {
    /// Address of its function, in the file's address space.
    pub(crate) function: Range<u64>,
    /// Addresses of the vtable words that hold it.
    pub(crate) words: Vec<u64>,
    pub(crate) evidence: String,
}

/// Finds the method of `rule` in a library of that version.
pub(crate) fn find(
    image: &Image,
    machine: Machine,
    rule: &RttiRule,
    version: Option<&Version>,
) -> Result<Method, Reason> {
    let pointers = Pointers::read(image, machine.relocations())?;
    let search = Search { image, machine, rule, pointers, frames: Frames::read(image) };
    let types = search.types();
    let table_slot = version.and_then(|version| {
        rule.slots.iter().filter(|slot| slot.from <= *version).max_by_key(|slot| &slot.from)
    });
    let table_slot = table_slot.map(|slot| slot.slot);

    let (mut found, mut forwards): (Vec<(String, Candidate)>, bool) = (Vec::new(), false);
    for (class, offset) in search.derived(&types)? {
        for vtable in search.vtables(class.address, offset) {
            let name = || search.class_name(class);
            match search.candidate(vtable, &name, table_slot)? {
                Slot::Abstract => {}
                Slot::Forwarder => forwards = true,
                // At -O0 compilers emit the vtables of the bases too: the same function, one target.
                Slot::Implementation(candidate) => {
                    match found.iter_mut().find(|(_, f)| f.function == candidate.function) {
                        Some((_, known)) => known.words.extend(candidate.words),
                        None => found.push((name(), candidate)),
                    }
                }
            }
        }
    }
    if found.len() > 1 {
        let classes = found.into_iter().map(|(class, _)| class).collect();
        return Err(Reason::ManyImplementations { method: rule.method.clone(), classes });
    }
    match found.pop() {
        Some((class, candidate)) => Ok(Method {
            function: candidate.function,
            words: candidate.words,
            evidence: format!("{} of class {class}", candidate.evidence),
        }),
        None if forwards => Err(Reason::ForwardsOnly(rule.method.clone())),
        None => Err(Reason::NoVtable(rule.base.clone())),
    }
}

/// A type_info object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    address: u64,
    /// Index in [`KINDS`].
    kind: usize,
}

/// A vtable: the address of its first slot, and how many it has.
#[derive(Clone, Copy, Debug)]
struct Vtable {
    address: u64,
    slots: usize,
}

/// What a vtable has in the method's slot.
enum Slot {
    Abstract,
    /// The call goes on to another library.
    Forwarder,
    Implementation(Candidate),
}

struct Candidate {
    function: Range<u64>,
    words: Vec<u64>,
    evidence: String,
}

struct Search<'a, 'r> {
    image: &'r Image<'a>,
    machine: Machine,
    rule: &'r RttiRule,
    pointers: Pointers,
    frames: Frames<'a>,
}

impl Search<'_, '_> {
    /// All type_info objects, sorted by address.
    fn types(&self) -> Vec<Class> {
        let mut symbols = [const { Vec::new() }; KINDS.len()];
        let mut defined = [None; KINDS.len()];
        for (index, name, address) in self.image.dynamic_symbols() {
            if let Some(kind) = KINDS.iter().position(|known| known.as_bytes() == name) {
                symbols[kind].push(index);
                // The words point past the two words that precede a vtable's slots.
                defined[kind] = defined[kind].or(address.and_then(|address| address.checked_add(16)));
            }
        }
        let by_symbol = self.pointers.symbolic().filter_map(|(address, symbol, addend)| {
            let kind = symbols.iter().position(|indices| indices.contains(&(symbol as usize)))?;
            (addend == 16).then_some(Class { address, kind })
        });
        // A library that brings the C++ runtime along may refer to it by address.
        let by_value = self.pointers.iter().filter_map(|(address, value)| {
            let kind = defined.iter().position(|known| *known == Some(value))?;
            Some(Class { address, kind })
        });
        let mut types: Vec<Class> = by_symbol.chain(by_value).collect();
        types.sort_by_key(|class| class.address);
        types.dedup_by_key(|class| class.address);
        types
    }

    /// The base class and all classes that derive from it, each with the offset of the base in its objects.
    fn derived(&self, types: &[Class]) -> Result<Vec<(Class, u64)>, Reason> {
        let is_base = |class: &&Class| {
            let name = class.address.checked_add(8).and_then(|word| self.pointers.at(word));
            let star = |name: u64| self.image.is_c_str(name, format!("*{}", self.rule.base).as_bytes());
            name.is_some_and(|name| self.image.is_c_str(name, self.rule.base.as_bytes()) || star(name))
        };
        let bases: Vec<&Class> = types.iter().filter(is_base).collect();
        let [base] = bases[..] else {
            return Err(match bases.len() {
                0 => Reason::NoTypeInfo(self.rule.base.clone()),
                many => Reason::ManyTypeInfo(many),
            });
        };
        let mut classes = vec![(*base, 0u64)];
        let mut next = 0;
        while let Some(&(class, offset)) = classes.get(next) {
            next += 1;
            for word in self.pointers.to(class.address) {
                let Some((derived, distance)) = self.derives(types, word)? else { continue };
                let entry = (derived, offset.wrapping_add_signed(distance));
                if classes.contains(&entry) {
                    continue;
                }
                if classes.len() == MAX_CLASSES {
                    return Err(Reason::TooManyClasses(MAX_CLASSES));
                }
                classes.push(entry);
            }
        }
        Ok(classes)
    }

    /// The class whose type_info names a base in `word`, and the offset of that base in its objects.
    fn derives(&self, types: &[Class], word: u64) -> Result<Option<(Class, i64)>, Reason> {
        let class = |back: u64, kind: usize| {
            let address = word.checked_sub(back)?;
            let found = types.binary_search_by_key(&address, |class| class.address).ok()?;
            (types[found].kind == kind).then_some(types[found])
        };
        if let Some(single) = class(16, 1) {
            return Ok(Some((single, 0)));
        }
        for index in 0..MAX_BASES {
            let Some(several) = class(24 + 16 * index, 2) else { continue };
            let bases = self
                .image
                .u64_at(several.address.wrapping_add(16))
                .map_or(0, |flags_and_count| flags_and_count >> 32);
            if index < bases {
                let flags = self.image.u64_at(word.wrapping_add(8)).unwrap_or(0) as i64;
                return if flags & 1 == 1 {
                    Err(Reason::VirtualBase)
                } else {
                    Ok(Some((several, flags >> 8)))
                };
            }
        }
        Ok(None)
    }

    fn class_name(&self, class: Class) -> String {
        let name = self.pointers.at(class.address.wrapping_add(8)).and_then(|name| self.image.c_str(name));
        String::from_utf8_lossy(name.unwrap_or(b"?")).trim_start_matches('*').to_owned()
    }

    /// The vtables of a class for its base at `offset`.
    fn vtables(&self, class: u64, offset: u64) -> Vec<Vtable> {
        let mut vtables = Vec::new();
        for word in self.pointers.to(class) {
            let Some(before) = word.checked_sub(8) else { continue };
            let to_top = self.image.u64_at(before).filter(|_| self.pointers.at(before).is_none());
            if to_top != Some(offset.wrapping_neg()) {
                continue;
            }
            let address = word.wrapping_add(8);
            let slots = (0..MAX_SLOTS).take_while(|slot| self.is_slot(address, *slot)).count();
            if slots > 0 {
                vtables.push(Vtable { address, slots });
            }
        }
        vtables
    }

    fn is_slot(&self, vtable: u64, slot: usize) -> bool {
        let word = vtable.wrapping_add(8 * slot as u64);
        let is_code = |word| self.pointers.at(word).is_some_and(|to| self.image.is_code(to));
        // The destructors of an abstract class are null.
        let is_null = || self.image.u64_at(word) == Some(0) && is_code(word.wrapping_add(8));
        is_code(word) || self.pointers.is_symbolic(word) || is_null()
    }

    fn candidate(
        &self,
        vtable: Vtable,
        class: &dyn Fn() -> String,
        table_slot: Option<usize>,
    ) -> Result<Slot, Reason> {
        let method = &self.rule.method;
        let naming: Vec<usize> = (0..vtable.slots).filter(|slot| self.names(vtable, *slot, method)).collect();
        let (slot, self_named) = match naming[..] {
            [slot] => (slot, true),
            [] => match table_slot.filter(|slot| *slot < vtable.slots) {
                Some(slot) => (slot, false),
                None => return Ok(Slot::Abstract),
            },
            _ => return Err(Reason::ManySlots { class: class(), method: method.clone(), slots: naming }),
        };
        let word = vtable.address.wrapping_add(8 * slot as u64);
        let Some(entry) = self.pointers.at(word).filter(|entry| self.image.is_code(*entry)) else {
            return Ok(Slot::Abstract);
        };
        // A class that passes calls on may do more than that, and name itself.
        let is_forwarder = !self.rule.forwarders.is_empty() && {
            let name = class();
            self.rule.forwarders.iter().any(|part| name.contains(part.as_str()))
        };
        let code = self.image.bytes_at(entry, 32).unwrap_or_default();
        if is_forwarder || (!self_named && self.machine.forwards(code, entry)) {
            return Ok(Slot::Forwarder);
        }
        let unconfirmed =
            |why: &str| Reason::Unconfirmed { class: class(), method: method.clone(), why: why.into() };
        let function = self.frames.find(self.image, entry).filter(|function| function.start == entry);
        let function = function.ok_or_else(|| unconfirmed("no function begins where the slot points"))?;
        let neighbours = self.neighbours_agree(vtable, slot);
        if !self_named && !neighbours {
            return Err(unconfirmed("the neighbouring slots are not the expected methods"));
        }
        let mut evidence = match (self_named, table_slot) {
            (true, Some(table)) if table == slot => {
                format!("slot {slot} names itself and is the version's slot")
            }
            (true, Some(table)) => format!("slot {slot} names itself (the version's slot would be {table})"),
            (true, None) => format!("slot {slot} names itself"),
            (false, _) => format!("slot {slot} is the version's slot"),
        };
        evidence.push_str(if neighbours { ", its neighbours agree," } else { "" });
        Ok(Slot::Implementation(Candidate { function, words: vec![word], evidence }))
    }

    fn neighbours_agree(&self, vtable: Vtable, slot: usize) -> bool {
        let [before, after] = &self.rule.neighbours;
        slot.checked_sub(1).is_some_and(|slot| self.names(vtable, slot, before))
            && self.names(vtable, slot + 1, after)
    }

    /// Whether the function in a slot refers to the string `name`.
    fn names(&self, vtable: Vtable, slot: usize, name: &str) -> bool {
        if slot >= vtable.slots {
            return false;
        }
        let entry = self.pointers.at(vtable.address.wrapping_add(8 * slot as u64));
        let function =
            entry.and_then(|entry| self.frames.find(self.image, entry).filter(|f| f.start == entry));
        let Some(function) = function.filter(|function| self.image.is_code(function.start)) else {
            return false;
        };
        let bytes = usize::try_from(function.end - function.start).unwrap_or(usize::MAX).min(MAX_BODY);
        let code = self.image.bytes_at(function.start, bytes).unwrap_or_default();
        self.machine.forms(code, function.start, |address| self.image.is_c_str(address, name.as_bytes()))
    }
}

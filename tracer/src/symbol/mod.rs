//! Addresses → names.
//!
//! In: stacks and the mappings that their frames lie in. Out: one [`SymbolFrame`] per function on a stack, inlined
//! ones included. A name is given only when the file is the one that was mapped: the same build-id, or where it has
//! none, the same inode. Otherwise a frame keeps its module and offset, and is never dropped. This folder reads
//! files and /proc, and writes nothing.

mod held;
mod jit;
mod module;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::rc::Rc;

use blazesym::symbolize::source::{Elf, Kernel, Source};
use blazesym::symbolize::{self, Input, Sym};

use crate::event::{Code, Frame, Mapping, ProcessId, Stack, StackId};
pub use held::HeldFiles;
pub use jit::Generated;
pub(crate) use jit::{is_dump, perf_map};
use module::{Module, Places};

/// Whose code a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    Kernel,
    User,
    /// A function that CPython runs.
    Python,
}

/// One function on a stack: a row of the table `frames`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolFrame {
    pub stack: StackId,
    /// Place in the stack, the leaf being 0; an inlined function comes before the one that it is inlined into.
    pub position: u32,
    pub kind: FrameKind,
    /// Demangled; `None` when the name is not known.
    pub function: Option<String>,
    /// Path of the mapped file as its process saw it, or of a Python function's source; `[vdso]` and the like,
    /// `[kernel]`, `[anonymous]` for memory that is no file's, or `[unknown]` when no known mapping held the address.
    pub module: String,
    /// Offset in the module's file; without a file, the address; in a Python function's source, the line.
    pub offset: u64,
    /// The compiler put the function into the one at the next position.
    pub inlined: bool,
}

impl SymbolFrame {
    /// What a picture shows: the function, or else where the code lies.
    #[must_use]
    pub fn label(&self) -> String {
        let Self { function, module, offset, kind, .. } = self;
        let file = || module.rsplit('/').next().unwrap_or(module);
        match (function, kind) {
            (Some(function), FrameKind::Python) => format!("{function} ({})", file()),
            (Some(function), _) => function.clone(),
            (None, FrameKind::Kernel) => format!("[k] {offset:#x}"),
            (None, _) => format!("{}+{offset:#x}", file()),
        }
    }
}

/// Whether this is the function that CPython made for `perf` (`-X perf`) to stand for the Python function that it calls,
/// `py::qualname:file` in its perf map.
fn is_trampoline_of(called: Option<&SymbolFrame>, functions: &Functions) -> bool {
    let Some(SymbolFrame { kind: FrameKind::Python, function: Some(function), module, .. }) = called else {
        return false;
    };
    let [(name, false)] = functions.as_ref() else { return false };
    name.strip_prefix("py::")
        .and_then(|name| name.strip_prefix(function.as_str()))
        .and_then(|rest| rest.strip_prefix(':'))
        == Some(module)
}

/// What of the running system a [`Symbolizer`] may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The stacks are of this boot: kernel addresses and processes that still live mean the same.
    pub this_boot: bool,
}

/// The functions at one place, the innermost first: name, and whether it is inlined into the next.
type Functions = Rc<[(String, bool)]>;

/// Names what stacks went through; remembers every file and place that it has looked at.
pub struct Symbolizer {
    options: Options,
    files: HeldFiles,
    places: Places,
    /// Names from symbol tables.
    symbols: symbolize::Symbolizer,
    /// Names from debug information, which knows of inlined functions.
    debug: symbolize::Symbolizer,
    mappings: HashMap<u32, Mapped>,
    codes: HashMap<u32, Code>,
    /// Code that processes generate: what they tell of it, and where they do.
    generated: HashMap<ProcessId, Generated>,
    jitdumps: HashMap<ProcessId, Vec<Mapping>>,
    /// Modules by what names a file's content: its build-id, or else its descriptor, or else its inode and path.
    modules: Vec<Module>,
    known: HashMap<ModuleKey, usize>,
    user: HashMap<(usize, u64), Functions>,
    kernel: HashMap<u64, Functions>,
    kernel_source: Option<Source<'static>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ModuleKey {
    BuildId(Vec<u8>),
    Held(RawFd),
    Inode(u64, String),
}

/// A mapping whose file is looked for when a frame first needs it.
struct Mapped {
    mapping: Mapping,
    module: Option<usize>,
}

/// The farthest into a kernel function that an address is believed to be: kallsyms gives no sizes, and what comes
/// after its last symbol is no part of it.
const LONGEST_KERNEL_FUNCTION: usize = 1 << 16;

impl Symbolizer {
    #[must_use]
    pub fn new(options: Options) -> Self {
        let builder = || symbolize::Symbolizer::builder().enable_auto_reload(false);
        Self {
            options,
            files: HeldFiles::default(),
            places: Places::here(),
            symbols: builder().enable_code_info(false).enable_inlined_fns(false).build(),
            debug: builder().enable_code_info(true).enable_inlined_fns(true).build(),
            mappings: HashMap::new(),
            codes: HashMap::new(),
            generated: HashMap::new(),
            jitdumps: HashMap::new(),
            modules: Vec::new(),
            known: HashMap::new(),
            user: HashMap::new(),
            kernel: HashMap::new(),
            kernel_source: (options.this_boot && module::kallsyms_readable()).then(|| {
                // A vmlinux on disk need not be that of the running kernel; kallsyms is.
                Source::Kernel(Kernel { vmlinux: blazesym::MaybeDefault::None, ..Kernel::default() })
            }),
        }
    }

    /// Takes files over that were kept open while their processes ran.
    #[must_use]
    pub fn with_files(self, files: HeldFiles) -> Self {
        Self { files, ..self }
    }

    /// Learns a mapping; to be called before the stacks that refer to it.
    pub fn add_mapping(&mut self, mapping: Mapping) {
        if jit::is_dump(&mapping) {
            self.jitdumps.entry(mapping.process).or_default().push(mapping.clone());
        }
        self.mappings.insert(mapping.id, Mapped { mapping, module: None });
    }

    /// Learns a function that an interpreter runs; to be called before the stacks that refer to it.
    pub fn add_code(&mut self, code: Code) {
        self.codes.insert(code.id, code);
    }

    /// The functions on a stack, leaf first, kernel before user.
    pub fn frames(&mut self, stack: &Stack) -> Vec<SymbolFrame> {
        let mut frames = Vec::new();
        for (depth, &address) in stack.kernel.iter().enumerate() {
            let functions = self.kernel_functions(lookup(depth, address));
            add(&mut frames, stack.id, FrameKind::Kernel, "[kernel]", address, &functions);
        }
        for (depth, frame) in stack.user.iter().enumerate() {
            if let Some(code) = frame.code.and_then(|code| self.codes.get(&code)) {
                let functions = [(code.function.clone(), false)];
                add(&mut frames, stack.id, FrameKind::Python, &code.file, frame.offset, &functions);
                continue;
            }
            let functions = self.user_functions(frame.mapping, lookup(depth, frame.offset));
            if is_trampoline_of(frames.last(), &functions) {
                continue;
            }
            add(&mut frames, stack.id, FrameKind::User, self.module_name(frame), frame.offset, &functions);
        }
        frames
    }

    fn module_name(&self, frame: &Frame) -> &str {
        let mapped = frame.mapping.and_then(|id| self.mappings.get(&id));
        match mapped.map(|mapped| mapped.mapping.path.as_str()) {
            Some("") => "[anonymous]",
            Some(path) => path,
            None => "[unknown]",
        }
    }

    fn user_functions(&mut self, mapping: Option<u32>, offset: u64) -> Functions {
        if let Some(mapped) = mapping.and_then(|id| self.mappings.get(&id))
            && mapped.mapping.path.is_empty()
        {
            let process = mapped.mapping.process;
            return self.generated_function(process, offset);
        }
        let Some(module) = mapping.and_then(|id| self.module(id)) else { return Functions::default() };
        if let Some(functions) = self.user.get(&(module, offset)) {
            return functions.clone();
        }
        let functions = match self.modules.get(module) {
            Some(module) => self.look_up(module, offset),
            None => Functions::default(),
        };
        self.user.insert((module, offset), functions.clone());
        functions
    }

    /// The function at an address in code that a process has generated.
    fn generated_function(&mut self, process: ProcessId, address: u64) -> Functions {
        if !self.options.this_boot {
            return Functions::default();
        }
        let dumps = self.jitdumps.get(&process).map_or(&[][..], Vec::as_slice);
        let generated =
            self.generated.entry(process).or_insert_with(|| Generated::of(process, dumps, &self.files));
        generated.name(address).map(|name| [(name.to_owned(), false)].into()).unwrap_or_default()
    }

    fn look_up(&self, module: &Module, offset: u64) -> Functions {
        if let Some(name) = module.vdso_function(offset) {
            return [(name.to_owned(), false)].into();
        }
        let Some(path) = module.path() else { return Functions::default() };
        let find_in = |symbolizer: &symbolize::Symbolizer, debug_syms, path, place| {
            let mut elf = Elf::new(path);
            elf.debug_syms = debug_syms;
            let found = symbolizer.symbolize_single(&Source::Elf(elf), place).ok()?;
            let sym = found.into_sym()?.into_owned();
            (sym.size.is_some() || module.same_section(sym.addr, offset)).then_some(sym)
        };
        let find = |symbolizer: &symbolize::Symbolizer, debug_syms| {
            // What was split off knows all that was in the file.
            let separate = module.separate(offset).and_then(|(path, address)| {
                find_in(symbolizer, debug_syms, path, Input::VirtOffset(address))
            });
            separate.or_else(|| find_in(symbolizer, debug_syms, path, Input::FileOffset(offset)))
        };
        // Debug information may name a function without its path; the symbol table's name is whole.
        match (find(&self.symbols, false), find(&self.debug, true)) {
            (Some(symbol), Some(debug)) => functions(&debug, &symbol.name),
            (Some(only), None) | (None, Some(only)) => functions(&only, &only.name),
            (None, None) => module.plt(offset).map(|name| [(name.into(), false)].into()).unwrap_or_default(),
        }
    }

    fn kernel_functions(&mut self, address: u64) -> Functions {
        if let Some(functions) = self.kernel.get(&address) {
            return functions.clone();
        }
        let sym = self.kernel_source.as_ref().and_then(|source| {
            let found = self.symbols.symbolize_single(source, Input::AbsAddr(address)).ok()?;
            found.into_sym().filter(|sym| sym.size.is_some() || sym.offset < LONGEST_KERNEL_FUNCTION)
        });
        let functions = sym.map(|sym| functions(&sym, &sym.name)).unwrap_or_default();
        self.kernel.insert(address, functions.clone());
        functions
    }

    /// The module that a mapping is of; `None` for a mapping that was never learnt.
    fn module(&mut self, mapping: u32) -> Option<usize> {
        let mapped = self.mappings.get_mut(&mapping)?;
        if let Some(module) = mapped.module {
            return Some(module);
        }
        let Mapping { id, build_id, inode, path, .. } = &mapped.mapping;
        let held = self.files.descriptor(*id);
        let key = match (build_id.as_slice(), held) {
            ([], Some(held)) => ModuleKey::Held(held),
            ([], None) => ModuleKey::Inode(*inode, path.clone()),
            (build_id, _) => ModuleKey::BuildId(build_id.into()),
        };
        let module = match self.known.get(&key) {
            // A file that one process no longer reaches, another may.
            Some(&module) if self.modules.get(module).is_some_and(|module| module.path().is_some()) => module,
            _ => {
                self.modules.push(Module::find(&mapped.mapping, self.options.this_boot, held, &self.places));
                self.known.insert(key, self.modules.len() - 1);
                self.modules.len() - 1
            }
        };
        mapped.module = Some(module);
        Some(module)
    }
}

/// Where to look: a return address may be the first byte of the next function, so one before it; a leaf is exact.
fn lookup(depth: usize, address: u64) -> u64 {
    if depth == 0 { address } else { address.saturating_sub(1) }
}

/// What is inlined at a place, innermost first, and then the function that it is in.
fn functions(sym: &Sym<'_>, name: &str) -> Functions {
    let inlined = sym.inlined.iter().rev().map(|function| (function.name.clone().into_owned(), true));
    inlined.chain([(name.to_owned(), false)]).collect()
}

fn add(
    frames: &mut Vec<SymbolFrame>,
    stack: StackId,
    kind: FrameKind,
    module: &str,
    offset: u64,
    functions: &[(String, bool)],
) {
    let mut push = |function: Option<&String>, inlined| {
        let position = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        frames.push(SymbolFrame {
            stack,
            position,
            kind,
            function: function.cloned(),
            module: module.into(),
            offset,
            inlined,
        });
    };
    if functions.is_empty() {
        push(None, false);
    }
    for (function, inlined) in functions {
        push(Some(function), *inlined);
    }
}

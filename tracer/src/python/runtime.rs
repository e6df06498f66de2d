//! The interpreter in a process: its version, its offsets, its threads.

use std::io;

use object::{Object as _, ObjectSymbol as _};
use thiserror::Error;

use super::{Memory, Offsets, Versions, word};
use crate::event::stack::Runs;

/// Why the Python frames of a process are not read.
#[derive(Debug, Error)]
pub enum Refused {
    #[error(
        "CPython {found} is not known to this tracer (it knows {known}): its frames stay those of the interpreter"
    )]
    Version { found: String, known: String },
    #[error("free-threaded CPython {0} keeps its frames in another way: they stay those of the interpreter")]
    FreeThreaded(String),
    #[error("CPython {0} does not describe itself as it should: its frames stay those of the interpreter")]
    Undescribed(String),
    #[error("its interpreter cannot be read ({0}): its frames stay those of the interpreter")]
    Unreadable(#[from] io::Error),
}

/// An interpreter that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// `3.11.7`.
    pub version: String,
    pub offsets: Offsets,
    /// Address of `_PyRuntime`.
    address: u64,
    /// The C functions that run Python code and that throw into generators: addresses in the process, [begin, end).
    evaluates: Vec<(u64, u64)>,
    throws: Vec<(u64, u64)>,
}

/// Symbols of an interpreter's file, with their addresses there.
struct Symbols {
    /// Since 3.11.
    version: Option<u64>,
    runtime: u64,
    evaluates: Vec<(u64, u64)>,
    throws: Vec<(u64, u64)>,
}

/// The C functions, and the parts of them that the compiler has put elsewhere.
const EVALUATES: &str = "_PyEval_EvalFrameDefault";
/// It is no dynamic symbol: not known in a stripped interpreter.
const THROWS: &str = "_gen_throw";
/// More threads and interpreters than that are nonsense.
const MAX_INTERPRETERS: usize = 256;
const MAX_THREADS: usize = 8192;

impl Runtime {
    /// Finds the interpreter that a file holds; `None` where it holds none. `bias` is what to add to the file's addresses
    /// for those in the process.
    ///
    /// # Errors
    /// There is one, and its frames cannot be read.
    pub fn find(
        bytes: &[u8],
        bias: u64,
        memory: &impl Memory,
        versions: &Versions,
    ) -> Result<Option<Self>, Refused> {
        let Some(symbols) = Symbols::find(bytes) else { return Ok(None) };
        let unknown = |found: String| Refused::Version { found, known: versions.names() };
        let Some(version) = symbols.version else { return Err(unknown("before 3.11".into())) };
        let hex = word(memory, version.wrapping_add(bias))?.to_be_bytes();
        let [_, _, _, _, major, minor, micro, _] = hex;
        let name = format!("{major}.{minor}.{micro}");
        let Some(version) = versions.find(major, minor) else { return Err(unknown(name)) };
        let address = symbols.runtime.wrapping_add(bias);
        let offsets = match (&version.offsets, &version.described) {
            (Some(layout), _) => version.offsets(*layout),
            (None, Some(words)) => {
                const WORDS: usize = 96;
                let mut description = [0; 8 * WORDS];
                memory.read(address, &mut description)?;
                let (described, _) = description.as_chunks::<8>();
                let described: Vec<u64> = described.iter().map(|word| u64::from_ne_bytes(*word)).collect();
                let is_for = |version: u64| version >> 16 == u64::from(major) << 8 | u64::from(minor);
                if description[..8] != *b"xdebugpy" || !is_for(described[1]) {
                    return Err(Refused::Undescribed(name));
                }
                if described[2] != 0 {
                    return Err(Refused::FreeThreaded(name));
                }
                match words.described_by(&described) {
                    Some(layout) => version.offsets(layout),
                    None => return Err(Refused::Undescribed(name)),
                }
            }
            (None, None) => return Err(Refused::Undescribed(name)),
        };
        let here = |ranges: &[(u64, u64)]| -> Vec<(u64, u64)> {
            ranges.iter().map(|(begin, end)| (begin.wrapping_add(bias), end.wrapping_add(bias))).collect()
        };
        let (evaluates, throws) = (here(&symbols.evaluates), here(&symbols.throws));
        Ok(Some(Self { version: name, offsets, address, evaluates, throws }))
    }

    /// What code at an address in the process has to do with Python frames.
    #[must_use]
    pub fn runs(&self, address: u64) -> Runs {
        let holds =
            |ranges: &[(u64, u64)]| ranges.iter().any(|(begin, end)| (*begin..*end).contains(&address));
        match () {
            () if holds(&self.evaluates) => Runs::Code,
            () if holds(&self.throws) => Runs::Throw,
            () => Runs::Nothing,
        }
    }

    /// The states of all threads that have one: (thread id as the process sees it, address).
    ///
    /// # Errors
    /// The interpreter's memory cannot be read. A list that changes meanwhile is cut short.
    pub fn threads(&self, memory: &impl Memory) -> io::Result<Vec<(u32, u64)>> {
        let layout = &self.offsets.layout;
        let at = |address: u64, offset: u32| word(memory, address.wrapping_add(u64::from(offset)));
        let mut threads = Vec::new();
        let mut interpreter = at(self.address, layout.runtime_interpreters)?;
        for _ in 0..MAX_INTERPRETERS {
            if interpreter == 0 {
                break;
            }
            let mut thread = at(interpreter, layout.interpreter_threads)?;
            while thread != 0 && threads.len() < MAX_THREADS {
                let Ok(id) = at(thread, layout.thread_native_id) else { break };
                if let Ok(id) = u32::try_from(id) {
                    threads.push((id, thread));
                }
                let Ok(next) = at(thread, layout.thread_next) else { break };
                thread = next;
            }
            interpreter = at(interpreter, layout.interpreter_next)?;
        }
        Ok(threads)
    }
}

impl Symbols {
    fn find(bytes: &[u8]) -> Option<Self> {
        let file = object::File::parse(bytes).ok()?;
        let (mut version, mut runtime) = (None, None);
        let (mut evaluates, mut throws) = (Vec::new(), Vec::new());
        for symbol in file.dynamic_symbols().chain(file.symbols()).filter(|symbol| symbol.is_definition()) {
            match symbol.name() {
                Ok("Py_Version") => version = Some(symbol.address()),
                Ok("_PyRuntime") => runtime = Some(symbol.address()),
                Ok(name) => {
                    let ranges = match name.split('.').next() {
                        Some(EVALUATES) => &mut evaluates,
                        Some(THROWS) => &mut throws,
                        _ => continue,
                    };
                    ranges.push((symbol.address(), symbol.address().saturating_add(symbol.size())));
                }
                Err(_) => {}
            }
        }
        evaluates.sort_unstable();
        evaluates.dedup();
        Some(Self { version, runtime: runtime?, evaluates, throws })
    }
}

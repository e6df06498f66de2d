//! CPython: where a process keeps its Python frames, and what their code is called.
//!
//! In: the interpreter's file, and the memory of the process. Out: offsets for the kernel side, the threads' states,
//! names and lines of code objects. What lies where is data, one file per version in `versions`; from 3.13 on the
//! interpreter describes itself. A version that is not known is refused: guessing would make up frames. Everything that
//! is read of a process may change meanwhile or be nonsense: it is bounded, and never followed far. I/O is the caller's
//! ([`Memory`]).

mod code;
mod runtime;
#[cfg(test)]
mod tests;
mod versions;

use std::io;

pub use code::{Code, line};
pub use runtime::{Refused, Runtime};
pub use versions::{Offsets, Versions};

/// Memory of a process.
pub trait Memory {
    /// Fills `to` from an address.
    ///
    /// # Errors
    /// It is not there, or the process is gone.
    fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()>;
}

fn word(memory: &impl Memory, address: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    memory.read(address, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

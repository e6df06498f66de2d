//! Machines whose code is understood.

use crate::{aarch64, x86_64};

/// A machine: what a file's code runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Machine {
    X86_64,
    Aarch64,
}

/// Relocation types that make a pointer.
pub(crate) struct Relocations {
    /// The load address plus the addend.
    pub(crate) relative: u32,
    /// A symbol's address plus the addend.
    pub(crate) absolute: u32,
    /// A symbol's address.
    pub(crate) global: u32,
}

impl Machine {
    /// The machine that this program runs on; `None` when its code is not understood.
    pub const HOST: Option<Self> = if cfg!(target_arch = "x86_64") {
        Some(Self::X86_64)
    } else if cfg!(target_arch = "aarch64") {
        Some(Self::Aarch64)
    } else {
        None
    };

    /// The machine with this ELF number.
    pub(crate) const fn from_elf(number: u16) -> Option<Self> {
        match number {
            62 => Some(Self::X86_64),
            183 => Some(Self::Aarch64),
            _ => None,
        }
    }

    /// Name in tables and reports, as `uname -m` has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    pub(crate) const fn relocations(self) -> Relocations {
        match self {
            Self::X86_64 => Relocations { relative: 8, absolute: 1, global: 6 },
            Self::Aarch64 => Relocations { relative: 1027, absolute: 257, global: 1025 },
        }
    }

    /// Whether code that begins at `address` forms an address that `wanted` accepts.
    pub(crate) fn forms(self, code: &[u8], address: u64, wanted: impl Fn(u64) -> bool) -> bool {
        match self {
            Self::X86_64 => x86_64::forms(code, address, wanted),
            Self::Aarch64 => aarch64::forms(code, address, wanted),
        }
    }

    /// Whether a method only passes the call on: `this = this->inner; jump to this->vtable[slot]`.
    pub(crate) fn forwards(self, code: &[u8], address: u64) -> bool {
        match self {
            Self::X86_64 => x86_64::forwards(code, address),
            Self::Aarch64 => aarch64::forwards(code),
        }
    }

    /// What a function returns, if it does nothing but return a constant.
    pub(crate) fn constant(self, code: &[u8], address: u64) -> Option<u32> {
        match self {
            Self::X86_64 => x86_64::constant(code, address),
            Self::Aarch64 => aarch64::constant(code),
        }
    }
}

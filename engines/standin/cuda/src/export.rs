//! Exports that begin as the real library's do.
//!
//! 605 of the 636 exports of libcuda 550 begin `cmpl $imm32,[rip+x]; je +n; jmp *[rip+y]`: a gate that other tools
//! use to divert calls. Where a probe goes in those three instructions decides what it costs, so the stand-in has
//! them too. Its gate always equals the number: the `je` is taken and leads to the body. Each export jumps to a body
//! of its own, so that no two share an address.

use std::sync::atomic::AtomicU32;

/// What the gate is compared with.
pub(crate) const GATE_OPEN: u32 = 0x321c_ba00;
/// Not a constant for the compiler: the exports read it.
pub(crate) static GATE: AtomicU32 = AtomicU32::new(GATE_OPEN);
/// Where calls would go if the gate were closed; nothing closes it.
pub(crate) static DETOUR: extern "C" fn() = unreachable_detour;

extern "C" fn unreachable_detour() {
    std::process::abort();
}

/// An export's address, for `cuGetProcAddress`.
pub(crate) struct Export {
    pub(crate) name: &'static str,
    pub(crate) address: unsafe extern "C" fn(),
}

/// Defines exports: for each `fn name(args) { body }`, where the body is a [`crate::error::Result`], the export and
/// a hidden function with the body. Also a table `EXPORTS` of them.
macro_rules! exports {
    ($($(#[$attribute:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                $crate::export::prologue!(body::$name)
            }
        )*

        mod body {
            use super::*;

            $(pub(super) unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                $(#[$attribute])*
                fn run($($arg: $type),*) -> $crate::error::Result $body
                match run($($arg),*) {
                    Ok(()) => 0,
                    Err(error) => error.0,
                }
            })*
        }

        pub(crate) const EXPORTS: &[$crate::export::Export] = &[$($crate::export::Export {
            name: stringify!($name),
            // SAFETY: only handed out as an address; whoever calls it knows the real type from its name.
            address: unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn()>($name as *const ()) },
        }),*];
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! prologue {
    ($body:path) => {
        std::arch::naked_asm!(
            // What is written by hand has no unwind table unless it says so.
            ".cfi_startproc",
            "cmp dword ptr [rip + {gate}], {open}",
            "je 2f",
            "jmp qword ptr [rip + {detour}]",
            "2:",
            "jmp {body}",
            ".cfi_endproc",
            gate = sym $crate::export::GATE,
            open = const $crate::export::GATE_OPEN,
            detour = sym $crate::export::DETOUR,
            body = sym $body,
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! prologue {
    ($body:path) => {
        std::arch::naked_asm!("b {body}", body = sym $body)
    };
}

pub(crate) use {exports, prologue};

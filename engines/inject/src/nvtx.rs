//! NVTX: this library is an injection for it, too (`NVTX_INJECTION64_PATH`).
//!
//! NVTX version 3 is headers only: each library that uses it has its own table of function pointers. On the first call
//! it loads the library that the environment names and calls its [`InitializeInjectionNvtx2`], which asks for the
//! table and puts its functions in. The shared library of version 2 (libnvToolsExt) does the same. Places and layouts
//! are those of `nvtxDetail/nvtxTypes.h` and `nvToolsExt.h` (version 3.1, package `nvidia-nvtx-cu12`).
//!
//! While nobody listens each function looks at one byte and returns. Ranges inside a step are its layers ([`layers`]);
//! all others, and marks, are reported, but for floods of them.

use std::{
    cell::Cell,
    ffi::{c_char, c_int, c_void},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use tracer_abi::mark::{
    MAX_NVTX_BYTES, NVTX_END, NVTX_MARK, NVTX_PAYLOAD_F32, NVTX_PAYLOAD_NONE, NVTX_POP, NVTX_PUSH,
    NVTX_START, Nvtx,
};

use crate::{clock, driver, hook::guard, layers, names, report, start};

/// `NvtxExportTableID`
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// `NvtxCallbackModule`: functions of version 1, and those with domains, of version 2.
const CORE: c_int = 1;
const CORE2: c_int = 5;
/// `NVTX_VERSION` that this is written for, as tools say it.
const VERSION: u32 = 3;
/// `NVTX_NO_PUSH_POP_TRACKING`: the answer of a tool that does not count nested ranges.
const NO_TRACKING: c_int = -2;

/// `nvtxMessageType_t`
const ASCII: i32 = 1;
const UNICODE: i32 = 2;
const REGISTERED: i32 = 3;

/// Marks in one [`WINDOW_NS`] at most: a mark costs about a microsecond, which makes this a few percent of a CPU.
const MAX_MARKS: u64 = 2_000;
const WINDOW_NS: u64 = 100_000_000;

/// `const void* nvtxGetExportTable(uint32_t)`
type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    get_module_function_table:
        Option<unsafe extern "C" fn(c_int, *mut *mut *mut *const c_void, *mut u32) -> c_int>,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: Option<unsafe extern "C" fn(u32)>,
}

/// `nvtxEventAttributes_t`; versions 1 and later begin with this.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    reserved_message: i32,
    message: usize,
}

const _: () = assert!(size_of::<Attributes>() == 48);

static CLIENTS: AtomicU32 = AtomicU32::new(0);
static REFUSED: AtomicU32 = AtomicU32::new(0);
static NEXT_RANGE: AtomicU64 = AtomicU64::new(1);
pub(crate) static REPORTED: AtomicU64 = AtomicU64::new(0);
pub(crate) static LIMITED: AtomicU64 = AtomicU64::new(0);

/// Users of NVTX in this process.
pub(crate) fn clients() -> u32 {
    CLIENTS.load(Ordering::Relaxed)
}

/// Those whose tables were not understood.
pub(crate) fn refused() -> u32 {
    REFUSED.load(Ordering::Relaxed)
}

/// Called by each user of NVTX on its first call. 1: this library takes part; 0: NVTX unloads it (which does not
/// happen, see `build.rs`) and does nothing from then on.
///
/// # Safety
/// `get` must be null or the `nvtxGetExportTable` of a user of NVTX.
#[unsafe(no_mangle)]
unsafe extern "C" fn InitializeInjectionNvtx2(get: Option<GetExportTable>) -> c_int {
    guard(|| {
        start::ensure_thread();
        // SAFETY: by this function's contract.
        let attached = get.is_some_and(|get| unsafe { attach(get) });
        if attached { &CLIENTS } else { &REFUSED }.fetch_add(1, Ordering::Relaxed);
        c_int::from(attached)
    })
    .unwrap_or(0)
}

/// Puts our functions into a user's tables; false: they are none that this library understands.
///
/// # Safety
/// `get` must be the `nvtxGetExportTable` of a user of NVTX.
unsafe fn attach(get: GetExportTable) -> bool {
    // SAFETY: by this function's contract; null, or the table of this number.
    let callbacks = unsafe { get(CALLBACKS).cast::<Callbacks>().as_ref() };
    let Some(callbacks) = callbacks.filter(|table| table.struct_size >= size_of::<Callbacks>()) else {
        return false;
    };
    let Some(find) = callbacks.get_module_function_table else { return false };
    // SAFETY: as above.
    if let Some(info) = unsafe { get(VERSION_INFO).cast::<VersionInfo>().as_ref() }
        && info.struct_size >= size_of::<VersionInfo>()
        && let Some(set) = info.set_injection_version
    {
        // SAFETY: a function of the user's that takes a number.
        unsafe { set(VERSION) };
    }
    let mut attached = false;
    for (module, functions) in [(CORE, &CORE_FUNCTIONS[..]), (CORE2, &CORE2_FUNCTIONS[..])] {
        let (mut table, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: both are valid for writes.
        if unsafe { find(module, &raw mut table, &raw mut size) } == 0 || table.is_null() {
            continue;
        }
        for (id, function) in functions {
            if *id >= size as usize {
                continue;
            }
            // SAFETY: the table has `size` places, each null or the address of the user's pointer to this function.
            let place = unsafe { table.add(*id).read() };
            if !place.is_null() {
                // SAFETY: as above; NVTX holds its calls back until the initialisation is over.
                unsafe { place.write(function.0) };
                attached = true;
            }
        }
    }
    attached
}

/// A function, as an address that may lie in a static.
struct Function(*const c_void);

// SAFETY: the address of code.
unsafe impl Sync for Function {}

/// By their numbers in `NvtxCallbackIdCore`.
static CORE_FUNCTIONS: [(usize, Function); 11] = [
    (1, Function(mark_ex as *const c_void)),
    (2, Function(mark_a as *const c_void)),
    (3, Function(mark_w as *const c_void)),
    (4, Function(start_ex as *const c_void)),
    (5, Function(start_a as *const c_void)),
    (6, Function(start_w as *const c_void)),
    (7, Function(end as *const c_void)),
    (8, Function(push_ex as *const c_void)),
    (9, Function(push_a as *const c_void)),
    (10, Function(push_w as *const c_void)),
    (11, Function(pop as *const c_void)),
];

/// By their numbers in `NvtxCallbackIdCore2`.
static CORE2_FUNCTIONS: [(usize, Function); 9] = [
    (1, Function(domain_mark_ex as *const c_void)),
    (2, Function(domain_start_ex as *const c_void)),
    (3, Function(domain_end as *const c_void)),
    (4, Function(domain_push_ex as *const c_void)),
    (5, Function(domain_pop as *const c_void)),
    (10, Function(register_a as *const c_void)),
    (11, Function(register_w as *const c_void)),
    (12, Function(domain_create_a as *const c_void)),
    (13, Function(domain_create_w as *const c_void)),
];

/// Where a name is.
#[derive(Clone, Copy)]
enum Text {
    None,
    /// Address of a string; of one of 32-bit characters; a handle that we gave out.
    Ascii(usize),
    Wide(usize),
    Registered(usize),
}

impl Text {
    /// Copies the name, cut to the room that there is; its length.
    fn copy(self, out: &mut [u8]) -> usize {
        match self {
            Self::Ascii(address) if address != 0 => {
                let mut length = 0;
                for (index, place) in out.iter_mut().enumerate() {
                    // SAFETY: NVTX is given a string; nothing behind its end is read.
                    let byte = unsafe { (address as *const u8).add(index).read() };
                    if byte == 0 {
                        break;
                    }
                    (*place, length) = (byte, index + 1);
                }
                length
            }
            Self::Wide(address) if address != 0 => {
                let mut length = 0;
                for index in 0..out.len() {
                    // SAFETY: as above; characters are aligned as their type is.
                    let code = unsafe { (address as *const u32).add(index).read() };
                    let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                    if code == 0 || length + character.len_utf8() > out.len() {
                        break;
                    }
                    length += character.encode_utf8(&mut out[length..]).len();
                }
                length
            }
            Self::Registered(handle) => {
                let name = names::of(handle);
                let length = name.len().min(out.len());
                out[..length].copy_from_slice(&name[..length]);
                length
            }
            Self::None | Self::Ascii(_) | Self::Wide(_) => 0,
        }
    }
}

/// What a range or mark says of itself.
#[derive(Clone, Copy)]
struct Said {
    text: Text,
    payload: u64,
    payload_kind: u16,
}

impl Said {
    const NOTHING: Self = Self { text: Text::None, payload: 0, payload_kind: NVTX_PAYLOAD_NONE };

    fn text(text: Text) -> Self {
        Self { text, ..Self::NOTHING }
    }

    /// # Safety
    /// `attributes` must be null or a `nvtxEventAttributes_t`.
    unsafe fn of(attributes: *const Attributes) -> Self {
        if attributes.is_null() {
            return Self::NOTHING;
        }
        // SAFETY: by this function's contract; every version begins with its version and size.
        let size = unsafe { (&raw const (*attributes).size).read() };
        if usize::from(size) < size_of::<Attributes>() {
            return Self::NOTHING;
        }
        // SAFETY: as above; it is as long as it says.
        let said = unsafe { attributes.read() };
        let text = match said.message_type {
            ASCII => Text::Ascii(said.message),
            UNICODE => Text::Wide(said.message),
            REGISTERED => Text::Registered(said.message),
            _ => Text::None,
        };
        let kind = u16::try_from(said.payload_type).unwrap_or(0);
        let known = kind <= NVTX_PAYLOAD_F32;
        Self { text, payload: said.payload, payload_kind: if known { kind } else { NVTX_PAYLOAD_NONE } }
    }
}

/// The ranges that a thread is in, outside of steps.
#[derive(Clone, Copy)]
struct Thread {
    /// Which tracer listened; what was before does not count.
    session: u32,
    depth: u32,
    /// Whether the range of each depth was reported: then its end is, too.
    reported: u64,
}

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread { session: 0, depth: 0, reported: 0 }) };
}

/// The calling thread's ranges.
fn thread() -> Thread {
    let session = report::session();
    let thread = THREAD.get();
    if thread.session == session { thread } else { Thread { session, depth: 0, reported: 0 } }
}

/// Whether one more mark may be made now.
fn allowed() -> bool {
    static WINDOW: AtomicU64 = AtomicU64::new(0);
    static MARKS: AtomicU64 = AtomicU64::new(0);
    let window = clock::monotonic() / WINDOW_NS;
    if WINDOW.swap(window, Ordering::Relaxed) != window {
        MARKS.store(0, Ordering::Relaxed);
    }
    let allowed = MARKS.fetch_add(1, Ordering::Relaxed) < MAX_MARKS;
    report::count(if allowed { &REPORTED } else { &LIMITED });
    allowed
}

fn emit(action: u16, range: u64, domain: usize, said: Said) {
    let mut name = [0; MAX_NVTX_BYTES];
    let length = said.text.copy(&mut name);
    let nvtx =
        Nvtx { range, payload: said.payload, action, payload_kind: said.payload_kind, ..Nvtx::default() };
    report::emit_nvtx(nvtx, &name[..length], names::of(domain));
}

/// Does `work` while a tracer listens.
#[inline(always)]
fn listening<T>(idle: T, work: impl FnOnce() -> T) -> T {
    if report::listening() { active(work).unwrap_or(idle) } else { idle }
}

#[cold]
#[inline(never)]
fn active<T>(work: impl FnOnce() -> T) -> Option<T> {
    if report::is_disabled() { None } else { guard(work) }
}

fn push(domain: usize, said: impl FnOnce() -> Said) -> c_int {
    listening(NO_TRACKING, || {
        if layers::is_in_step() {
            if let Some(driver) = driver::get() {
                layers::begin_range(driver, domain, |name| said().text.copy(name));
            }
            return NO_TRACKING;
        }
        let mut thread = thread();
        let bit = 1u64.checked_shl(thread.depth).unwrap_or(0);
        thread.depth += 1;
        thread.reported &= !bit;
        if bit != 0 && allowed() {
            thread.reported |= bit;
            emit(NVTX_PUSH, 0, domain, said());
        }
        THREAD.set(thread);
        NO_TRACKING
    })
}

fn pop_of(domain: usize) -> c_int {
    listening(NO_TRACKING, || {
        if layers::is_in_step() {
            if let Some(driver) = driver::get() {
                layers::end_range(driver, domain);
            }
            return NO_TRACKING;
        }
        let mut thread = thread();
        if thread.depth > 0 {
            thread.depth -= 1;
            if thread.reported & 1u64.checked_shl(thread.depth).unwrap_or(0) != 0 {
                report::count(&REPORTED);
                emit(NVTX_POP, 0, domain, Said::NOTHING);
            }
        }
        THREAD.set(thread);
        NO_TRACKING
    })
}

/// The number of the range; 0: it was not reported, and its end will not be.
fn start_of(domain: usize, said: impl FnOnce() -> Said) -> u64 {
    listening(0, || {
        if !allowed() {
            return 0;
        }
        let range = NEXT_RANGE.fetch_add(1, Ordering::Relaxed);
        emit(NVTX_START, range, domain, said());
        range
    })
}

fn end_of(domain: usize, range: u64) {
    listening((), || {
        if range != 0 {
            report::count(&REPORTED);
            emit(NVTX_END, range, domain, Said::NOTHING);
        }
    });
}

fn mark_of(domain: usize, said: impl FnOnce() -> Said) {
    listening((), || {
        if !layers::is_in_step() && allowed() {
            emit(NVTX_MARK, 0, domain, said());
        }
    });
}

/// Keeps a name, whether a tracer listens or not: the program asks for its handle only once.
fn register(text: Text) -> usize {
    guard(|| {
        let mut name = [0; MAX_NVTX_BYTES];
        let length = text.copy(&mut name);
        names::keep(&name[..length])
    })
    .unwrap_or(0)
}

macro_rules! functions {
    ($($(#[$meta:meta])* $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As the function of NVTX: strings must be null or strings, attributes null or `nvtxEventAttributes_t`.
        unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? { $body }
    )*};
}

type Narrow = *const c_char;
type Wide = *const libc::wchar_t;

functions! {
    /// `nvtxMarkEx`
    // SAFETY: by the contract.
    mark_ex(said: *const Attributes) = mark_of(0, || unsafe { Said::of(said) });
    /// `nvtxMarkA`
    mark_a(text: Narrow) = mark_of(0, || Said::text(Text::Ascii(text as usize)));
    /// `nvtxMarkW`
    mark_w(text: Wide) = mark_of(0, || Said::text(Text::Wide(text as usize)));
    /// `nvtxRangeStartEx`
    // SAFETY: by the contract.
    start_ex(said: *const Attributes) -> u64 = start_of(0, || unsafe { Said::of(said) });
    /// `nvtxRangeStartA`
    start_a(text: Narrow) -> u64 = start_of(0, || Said::text(Text::Ascii(text as usize)));
    /// `nvtxRangeStartW`
    start_w(text: Wide) -> u64 = start_of(0, || Said::text(Text::Wide(text as usize)));
    /// `nvtxRangeEnd`
    end(range: u64) = end_of(0, range);
    /// `nvtxRangePushEx`
    // SAFETY: by the contract.
    push_ex(said: *const Attributes) -> c_int = push(0, || unsafe { Said::of(said) });
    /// `nvtxRangePushA`
    push_a(text: Narrow) -> c_int = push(0, || Said::text(Text::Ascii(text as usize)));
    /// `nvtxRangePushW`
    push_w(text: Wide) -> c_int = push(0, || Said::text(Text::Wide(text as usize)));
    /// `nvtxRangePop`
    pop() -> c_int = pop_of(0);
    /// `nvtxDomainMarkEx`
    // SAFETY: by the contract.
    domain_mark_ex(domain: usize, said: *const Attributes) = mark_of(domain, || unsafe { Said::of(said) });
    /// `nvtxDomainRangeStartEx`
    // SAFETY: by the contract.
    domain_start_ex(domain: usize, said: *const Attributes) -> u64 = start_of(domain, || unsafe { Said::of(said) });
    /// `nvtxDomainRangeEnd`
    domain_end(domain: usize, range: u64) = end_of(domain, range);
    /// `nvtxDomainRangePushEx`
    // SAFETY: by the contract.
    domain_push_ex(domain: usize, said: *const Attributes) -> c_int = push(domain, || unsafe { Said::of(said) });
    /// `nvtxDomainRangePop`
    domain_pop(domain: usize) -> c_int = pop_of(domain);
    /// `nvtxDomainRegisterStringA`
    register_a(_domain: usize, text: Narrow) -> usize = register(Text::Ascii(text as usize));
    /// `nvtxDomainRegisterStringW`
    register_w(_domain: usize, text: Wide) -> usize = register(Text::Wide(text as usize));
    /// `nvtxDomainCreateA`
    domain_create_a(text: Narrow) -> usize = register(Text::Ascii(text as usize));
    /// `nvtxDomainCreateW`
    domain_create_w(text: Wide) -> usize = register(Text::Wide(text as usize));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_up_to_their_end_or_the_room() {
        let mut out = [0; 4];
        let narrow = c"abcdef".as_ptr() as usize;
        assert_eq!((Text::Ascii(narrow).copy(&mut out), &out), (4, b"abcd"));
        assert_eq!(Text::Ascii(c"x".as_ptr() as usize).copy(&mut out), 1);
        let wide: Vec<u32> = "aé€".chars().map(u32::from).chain([0]).collect();
        assert_eq!(Text::Wide(wide.as_ptr() as usize).copy(&mut out), 3);
        assert_eq!(&out[..3], "aé".as_bytes());
        assert_eq!(
            [Text::None, Text::Ascii(0), Text::Wide(0), Text::Registered(8)].map(|t| t.copy(&mut out)),
            [0; 4]
        );
    }

    #[test]
    fn a_table_that_is_not_understood_is_refused_and_one_of_version_3_is_filled() {
        unsafe extern "C" fn nothing(_: u32) -> *const c_void {
            std::ptr::null()
        }
        // SAFETY: answers as a user of NVTX without tables would.
        assert!(!unsafe { attach(nothing) });

        static mut PUSH: *const c_void = std::ptr::null();
        unsafe extern "C" fn find(
            module: c_int,
            table: *mut *mut *mut *const c_void,
            size: *mut u32,
        ) -> c_int {
            // Only the first ten functions of the first module, and of those only one.
            let places: &'static mut [*mut *const c_void; 10] =
                Box::leak(Box::new([std::ptr::null_mut(); 10]));
            places[9] = &raw mut PUSH;
            // SAFETY: the caller passes valid pointers.
            unsafe {
                table.write(places.as_mut_ptr());
                size.write(10);
            }
            c_int::from(module == CORE)
        }
        unsafe extern "C" fn get(id: u32) -> *const c_void {
            static TABLE: Callbacks =
                Callbacks { struct_size: size_of::<Callbacks>(), get_module_function_table: Some(find) };
            if id == CALLBACKS { (&raw const TABLE).cast() } else { std::ptr::null() }
        }
        // SAFETY: answers as a user of NVTX does.
        assert!(unsafe { attach(get) });
        // SAFETY: nobody else touches it any more.
        assert_eq!(unsafe { PUSH }, push_a as *const c_void);
    }

    #[test]
    fn nothing_happens_while_nobody_listens() {
        // SAFETY: strings, and null.
        unsafe {
            assert_eq!(push_a(c"a".as_ptr()), NO_TRACKING);
            assert_eq!(start_ex(std::ptr::null()), 0);
            assert_eq!(pop(), NO_TRACKING);
            end(0);
            mark_w(std::ptr::null());
        }
        assert_eq!(thread().depth, 0);
    }

    #[test]
    fn attributes_that_are_too_short_say_nothing() {
        let mut said = Attributes {
            version: 3,
            size: 48,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: 1,
            reserved: 0,
            payload: 42,
            message_type: ASCII,
            reserved_message: 0,
            message: c"decode".as_ptr() as usize,
        };
        // SAFETY: valid attributes.
        let read = unsafe { Said::of(&raw const said) };
        assert!(matches!(read.text, Text::Ascii(_)));
        assert_eq!((read.payload, read.payload_kind), (42, 1));
        said.size = 40;
        // SAFETY: as above.
        assert!(matches!(unsafe { Said::of(&raw const said) }.text, Text::None));
    }
}

use std::fs;
use std::path::Path;
use std::process::Command;

use super::*;
use crate::event::ProcessId;

fn own_process() -> ProcessId {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start_ticks = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    ProcessId { tgid: std::process::id(), start_ticks }
}

fn build_id(path: &Path) -> Vec<u8> {
    use object::Object;
    let bytes = fs::read(path).unwrap();
    object::File::parse(&*bytes).unwrap().build_id().unwrap().unwrap_or_default().to_vec()
}

/// The mapping of this process that holds an address, and the address's offset in its file.
fn own_mapping(address: u64) -> (Mapping, u64) {
    for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let mut fields = line.split_whitespace();
        let (begin, end) = fields.next().unwrap().split_once('-').unwrap();
        let hex = |text| u64::from_str_radix(text, 16).unwrap();
        let (begin, end, offset) = (hex(begin), hex(end), hex(fields.nth(1).unwrap()));
        let inode = fields.nth(1).unwrap().parse().unwrap();
        let path = fields.next().unwrap_or("").to_owned();
        if (begin..end).contains(&address) {
            let build_id = if path.starts_with('/') { build_id(Path::new(&path)) } else { Vec::new() };
            let process = own_process();
            let mapping = Mapping { id: 0, time_ns: 0, process, begin, end, offset, inode, path, build_id };
            return (mapping, address - begin + offset);
        }
    }
    panic!("no mapping holds {address:#x}");
}

fn symbolizer(mappings: impl IntoIterator<Item = Mapping>) -> Symbolizer {
    let mut symbolizer = Symbolizer::new(Options { this_boot: true });
    mappings.into_iter().for_each(|mapping| symbolizer.add_mapping(mapping));
    symbolizer
}

fn stack(kernel: &[u64], user: &[(Option<u32>, u64)]) -> Stack {
    let user = user.iter().map(|&(mapping, offset)| Frame { mapping, code: None, offset }).collect();
    let process = own_process();
    Stack {
        id: StackId(9),
        time_ns: 0,
        process,
        kernel: kernel.into(),
        user,
        cut: None,
        frame_pointer_steps: 0,
    }
}

/// A small program to look names up in.
struct Program {
    dir: tempfile::TempDir,
}

impl Program {
    /// `None`, with a line that says so, where there is no C++ compiler.
    fn compile(source: &str, flags: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.cc"), source).unwrap();
        let status = Command::new("g++")
            .args(["-shared", "-fPIC", "-Wl,--build-id", "-o", "a.so", "a.cc"])
            .args(flags)
            .current_dir(dir.path())
            .status();
        match status {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIP: g++ is not installed");
                None
            }
            status => {
                assert!(status.unwrap().success());
                Some(Self { dir })
            }
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("a.so")
    }

    fn mapping(&self) -> Mapping {
        Mapping {
            id: 1,
            time_ns: 0,
            process: ProcessId { tgid: u32::MAX, start_ticks: 1 },
            begin: 0x1000,
            end: 0x9000,
            offset: 0,
            inode: 0,
            path: self.path().to_str().unwrap().into(),
            build_id: build_id(&self.path()),
        }
    }

    /// File range of a dynamic symbol. In these small libraries code lies at its own address.
    fn symbol(&self, name: &str) -> (u64, u64) {
        use object::{Object, ObjectSymbol};
        let bytes = fs::read(self.path()).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let symbol = file.dynamic_symbols().find(|s| s.name() == Ok(name)).unwrap();
        (symbol.address(), symbol.size())
    }
}

const CALLS: &str = r#"
namespace deep { struct Thing { int dig(int) const; }; }
volatile int sink;
static inline __attribute__((always_inline)) int inlined(int x) { sink = x; return sink * 3; }
int deep::Thing::dig(int x) const { return inlined(x) + 1; }
extern "C" __attribute__((noinline)) int plain(int x) { sink = x + 2; return sink; }
static __attribute__((noinline)) int hidden(int x) { sink = x + 5; return sink; }
extern "C" int calls_hidden(int x) { return hidden(x) + plain(x); }
"#;

#[test]
fn own_functions_are_named_and_demangled() {
    let address = own_functions_are_named_and_demangled as fn() as usize as u64;
    let (mapping, offset) = own_mapping(address);
    let frames = symbolizer([mapping.clone()]).frames(&stack(&[], &[(Some(0), offset)]));
    assert_eq!(
        frames.last().unwrap().function.as_deref(),
        Some(concat!(module_path!(), "::own_functions_are_named_and_demangled"))
    );
    assert_eq!(frames[0].module, mapping.path);
    assert_eq!((frames[0].stack, frames[0].position, frames[0].kind), (StackId(9), 0, FrameKind::User));
}

#[test]
fn inlined_functions_have_frames_of_their_own() {
    let Some(program) = Program::compile(CALLS, &["-O2", "-g"]) else { return };
    let (begin, size) = program.symbol("_ZNK4deep5Thing3digEi");
    let mut symbolizer = symbolizer([program.mapping()]);
    let seen: Vec<Vec<(String, bool)>> = (begin..begin + size)
        .map(|offset| symbolizer.frames(&stack(&[], &[(Some(1), offset)])))
        .map(|frames| frames.iter().map(|f| (f.label(), f.inlined)).collect())
        .collect();
    let dig = ("deep::Thing::dig(int) const".to_owned(), false);
    assert!(seen.iter().all(|frames| frames.last() == Some(&dig)), "{seen:?}");
    let inlined = ("inlined(int)".to_owned(), true);
    let plain = ("inlined".to_owned(), true);
    assert!(seen.iter().any(|f| f.len() == 2 && (f[0] == inlined || f[0] == plain)), "{seen:?}");
}

#[test]
fn return_addresses_belong_to_the_call_before_them() {
    let Some(program) = Program::compile(CALLS, &["-O2"]) else { return };
    let (begin, size) = program.symbol("plain");
    let end = begin + size;
    let mut symbolizer = symbolizer([program.mapping()]);
    let name = |frames: &[SymbolFrame], i: usize| frames[i].function.clone();
    // The end of a function is a return address of it, and never a leaf in it.
    let frames = symbolizer.frames(&stack(&[], &[(Some(1), begin), (Some(1), end), (Some(1), begin)]));
    assert_eq!(name(&frames, 0).as_deref(), Some("plain"));
    assert_eq!(name(&frames, 1).as_deref(), Some("plain"));
    assert_ne!(name(&frames, 2).as_deref(), Some("plain"));
    assert_eq!(frames.iter().map(|f| f.offset).collect::<Vec<_>>(), [begin, end, begin]);
}

#[test]
fn stripped_code_keeps_module_and_offset() {
    let Some(program) = Program::compile(CALLS, &["-O2", "-s"]) else { return };
    let (begin, size) = program.symbol("calls_hidden");
    let mut symbolizer = symbolizer([program.mapping()]);
    let label =
        |symbolizer: &mut Symbolizer, offset| symbolizer.frames(&stack(&[], &[(Some(1), offset)]))[0].label();
    // Exported functions keep their names; what lies between them has none.
    assert_eq!(label(&mut symbolizer, begin), "calls_hidden");
    let (dig, dig_size) = program.symbol("_ZNK4deep5Thing3digEi");
    let known = [(begin, size), (dig, dig_size), program.symbol("plain")];
    let mut unknown = 0;
    for offset in 0x1000..0x1400 {
        if !known.iter().any(|&(begin, size)| (begin..begin + size).contains(&offset)) {
            let label = label(&mut symbolizer, offset);
            assert!(label == format!("a.so+{offset:#x}") || label == "[plt]", "{offset:#x} is {label}");
            unknown += usize::from(label != "[plt]");
        }
    }
    assert!(unknown > 8);
}

#[test]
fn a_symbol_without_a_size_does_not_reach_beyond_its_section() {
    let Some(program) = Program::compile(CALLS, &["-O2", "-Wl,-z,norelro"]) else { return };
    let bytes = fs::read(program.path()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    use object::{Object, ObjectSection};
    let (plt, size) = file.section_by_name(".plt").unwrap().file_range().unwrap();
    let mut symbolizer = symbolizer([program.mapping()]);
    for offset in plt..plt + size {
        assert_eq!(symbolizer.frames(&stack(&[], &[(Some(1), offset)]))[0].label(), "[plt]");
    }
}

#[test]
fn another_file_at_the_path_gives_no_names() {
    let Some(program) = Program::compile(CALLS, &["-O2"]) else { return };
    let (begin, _) = program.symbol("plain");
    let label = |mapping: Mapping| symbolizer([mapping]).frames(&stack(&[], &[(Some(1), begin)]))[0].label();
    assert_eq!(label(program.mapping()), "plain");
    let unnamed = format!("a.so+{begin:#x}");
    assert_eq!(label(Mapping { build_id: vec![1; 20], ..program.mapping() }), unnamed);
    // Without a build-id the inode decides.
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(program.path()).unwrap());
    assert_eq!(label(Mapping { build_id: vec![], inode, ..program.mapping() }), "plain");
    assert_eq!(label(Mapping { build_id: vec![], inode: inode + 1, ..program.mapping() }), unnamed);
    assert_eq!(label(Mapping { build_id: vec![], inode: 0, ..program.mapping() }), unnamed);
    // Neither a missing file nor one that is no ELF file is an error.
    let mapping = program.mapping();
    fs::write(program.path(), "not a library").unwrap();
    assert_eq!(label(mapping.clone()), unnamed);
    fs::remove_file(program.path()).unwrap();
    assert_eq!(label(mapping), unnamed);
}

#[test]
fn frames_without_a_file_are_kept() {
    let anonymous = Mapping { path: String::new(), ..own_mapping(own_mapping as *const () as u64).0 };
    let vdso = Mapping { id: 1, path: "[vdso]".into(), ..anonymous.clone() };
    let frames = symbolizer([anonymous, vdso])
        .frames(&stack(&[], &[(Some(1), 0x7f0), (Some(0), 1), (None, 0xdead), (Some(77), 5)]));
    let labels: Vec<_> = frames.iter().map(SymbolFrame::label).collect();
    assert_eq!(labels, ["[vdso]+0x7f0", "[anonymous]+0x1", "[unknown]+0xdead", "[unknown]+0x5"]);
}

#[test]
fn kernel_frames_are_named_only_when_kallsyms_tells() {
    let text = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let symbols = text.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let address = u64::from_str_radix(fields.next()?, 16).ok().filter(|&a| a != 0)?;
        Some((address, fields.nth(1)?.to_owned()))
    });
    let found = symbols.into_iter().find(|(_, name)| name == "schedule");
    let address = found.as_ref().map_or(0xffff_ffff_8100_0000, |(address, _)| *address);
    let label = |this_boot, address| {
        Symbolizer::new(Options { this_boot }).frames(&stack(&[address], &[]))[0].label()
    };
    if found.is_some() {
        assert_eq!(label(true, address), "schedule");
    }
    assert_eq!(label(false, address), format!("[k] {address:#x}"));
    assert_eq!(label(true, u64::MAX), format!("[k] {:#x}", u64::MAX));
}

/// Held open, a file needs no name.
#[test]
fn a_file_that_is_held_open_is_read_though_it_is_gone() {
    let Some(program) = Program::compile(CALLS, &["-O2"]) else { return };
    let (begin, _) = program.symbol("plain");
    let mapping = Mapping { path: "/in/a/container/a.so".into(), ..program.mapping() };
    let file = std::sync::Arc::new(fs::File::open(program.path()).unwrap());
    fs::remove_file(program.path()).unwrap();
    let label = |mapping: &Mapping| {
        let files = HeldFiles { mapped: HashMap::from([(1, file.clone())]), ..HeldFiles::default() };
        let mut symbolizer = symbolizer([mapping.clone()]).with_files(files);
        symbolizer.frames(&stack(&[], &[(Some(1), begin)]))[0].label()
    };
    assert_eq!(label(&mapping), "plain");
    let other = Mapping { build_id: vec![1; 20], ..mapping };
    assert_eq!(label(&other), format!("a.so+{begin:#x}"));
}

/// Two files that have neither a build-id nor another path and number than each other, in two containers.
#[test]
fn files_that_are_held_open_are_not_taken_for_each_other() {
    let flags = ["-O2", "-Wl,--build-id=none"];
    let Some(one) = Program::compile(CALLS, &flags) else { return };
    let Some(other) = Program::compile(&CALLS.replace("plain", "other"), &flags) else { return };
    let (begin, _) = one.symbol("plain");
    assert_eq!(other.symbol("other").0, begin);
    let mapping = |id, program: &Program| {
        let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(program.path()).unwrap());
        Mapping { id, inode, path: "/a.so".into(), ..program.mapping() }
    };
    let open = |program: &Program| std::sync::Arc::new(fs::File::open(program.path()).unwrap());
    let mapped = HashMap::from([(1, open(&one)), (2, open(&other))]);
    let files = HeldFiles { mapped, ..HeldFiles::default() };
    let mut symbolizer = symbolizer([mapping(1, &one), mapping(2, &other)]).with_files(files);
    let frames = symbolizer.frames(&stack(&[], &[(Some(1), begin), (Some(2), begin + 1)]));
    assert_eq!([frames[0].label(), frames[1].label()], ["plain", "other"]);
}

/// By its build-id, what was split off a file is found, and a copy of the file.
#[test]
fn files_are_found_by_build_id() {
    let Some(program) = Program::compile(CALLS, &["-O2", "-g"]) else { return };
    let mapping = program.mapping();
    let names = |places: Places| {
        let mut symbolizer = symbolizer([mapping.clone()]);
        symbolizer.places = places;
        let label = |offset| symbolizer.frames(&stack(&[], &[(Some(1), offset)]))[0].label();
        (0x1000..0x1400).map(label).collect::<std::collections::BTreeSet<_>>()
    };
    let whole = names(Places::here());
    assert!(whole.iter().any(|name| name.starts_with("hidden")), "{whole:?}");
    let folder = program.dir.path();
    let (first, rest) = mapping.build_id.split_at(1);
    let [first, rest] = [first, rest].map(crate::hex::hex);
    let places = || Places { separate: folder.join("debug"), copies: Some(folder.join("copies")) };
    let run = |arguments: &[&str]| {
        let done = Command::new("objcopy").args(arguments).current_dir(folder).status().unwrap();
        assert!(done.success());
    };
    fs::create_dir_all(folder.join("debug").join(&first)).unwrap();
    fs::create_dir_all(folder.join("copies").join(&first).join(&rest)).unwrap();
    fs::copy(program.path(), folder.join("copies").join(&first).join(&rest).join("elf")).unwrap();
    run(&["--only-keep-debug", "a.so", &format!("debug/{first}/{rest}.debug")]);
    run(&["--strip-all", "a.so"]);
    let stripped = names(Places::here());
    assert!(!stripped.iter().any(|name| name.starts_with("hidden")), "{stripped:?}");
    assert_eq!(names(places()), whole);
    fs::remove_file(program.path()).unwrap();
    assert_eq!(names(places()), whole);
}

#[test]
fn what_python_makes_for_perf_stands_for_the_function_that_it_names() {
    let called = |kind, function: &str, module: &str| SymbolFrame {
        stack: StackId(1),
        position: 0,
        kind,
        function: Some(function.to_owned()),
        module: module.to_owned(),
        offset: 7,
        inlined: false,
    };
    let python = called(FrameKind::Python, "A.run.<locals>.<lambda>", "/srv/a:b.py");
    let stands = |called, name: &str| is_trampoline_of(called, &[(name.to_owned(), false)].into());
    assert!(stands(Some(&python), "py::A.run.<locals>.<lambda>:/srv/a:b.py"));
    for other in [
        "py::A.run:/srv/a:b.py",
        "py::A.run.<locals>.<lambda>:b.py",
        "A.run.<locals>.<lambda>:/srv/a:b.py",
        "py::",
    ] {
        assert!(!stands(Some(&python), other), "{other}");
    }
    let native = called(FrameKind::User, "A.run.<locals>.<lambda>", "/srv/a:b.py");
    assert!(!stands(Some(&native), "py::A.run.<locals>.<lambda>:/srv/a:b.py"));
    assert!(!stands(None, "py::A.run.<locals>.<lambda>:/srv/a:b.py"));
    assert!(!is_trampoline_of(Some(&python), &Functions::default()));
}

//! What tools see of the library's file.

mod common;

use std::collections::HashMap;

use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};

#[test]
fn exports_begin_as_the_real_ones_and_share_no_address() {
    let data = std::fs::read(common::library()).unwrap();
    let file = object::File::parse(&*data).unwrap();
    let mut at: HashMap<u64, String> = HashMap::new();
    for symbol in file.dynamic_symbols().filter(|s| s.is_definition() && s.kind() == SymbolKind::Text) {
        let name = symbol.name().unwrap().to_owned();
        let section = file.section_by_index(symbol.section_index().unwrap()).unwrap();
        let code = section.data_range(symbol.address(), 23).unwrap().unwrap();
        // cmpl $imm32,[rip+x]
        assert_eq!((&code[..2], &code[6..10]), (&[0x81, 0x3d][..], &[0x00, 0xba, 0x1c, 0x32][..]), "{name}");
        // je +6, over jmp *[rip+y], to jmp body
        assert_eq!(
            (&code[10..12], &code[12..14], code[18]),
            (&[0x74, 6][..], &[0xff, 0x25][..], 0xe9),
            "{name}"
        );
        if let Some(other) = at.insert(symbol.address(), name.clone()) {
            panic!("{name} and {other} are one");
        }
    }
    assert!(at.len() > 70, "{}", at.len());
    assert!(at.values().any(|name| name == "cuEventRecord_ptsz"));
    assert!(file.dynamic_symbols().any(|s| s.name() == Ok("tracer_standin")));
}

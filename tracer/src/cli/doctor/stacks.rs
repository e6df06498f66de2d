//! How the stacks of a process will be walked: file by file.

use std::collections::BTreeSet;

use super::Check;
use crate::{
    event::ProcessId,
    probe::{
        process::{self, FileMapping},
        unwind::{self, Way},
    },
};

pub(super) fn check(pid: u32, checks: &mut Vec<Check>) {
    let mapped = process::find(pid).and_then(|found| Ok((found.id, process::mappings(pid)?)));
    let (process, files) = match mapped {
        Ok(mapped) => mapped,
        Err(error) => {
            let consequence = "how its stacks would be walked is not known";
            checks.push(Check::fail("stacks", error.to_string(), consequence, "name a process that runs"));
            return;
        }
    };
    let mut seen = BTreeSet::new();
    let mut generated = 0;
    for file in &files {
        match file.path.as_str() {
            "" | "[heap]" | "[stack]" => generated += 1,
            "[uprobes]" => {}
            _ if !seen.insert((file.device, file.inode, &file.path)) => {}
            _ => checks.push(of_file(process, file)),
        }
    }
    if generated > 0 {
        let pieces = if generated == 1 { "1 piece".to_owned() } else { format!("{generated} pieces") };
        checks.push(Check::warn(
            "stacks",
            format!("generated code, {pieces}: by frame pointers"),
            "where it keeps none, stacks through it end there and say so",
            "let the program's compiler keep frame pointers (node --perf-basic-prof, java -XX:+PreserveFramePointer)",
        ));
    }
    for file in &files {
        match unwind::python(process, file) {
            Some(Ok(version)) => {
                checks.push(Check::ok("stacks", format!("CPython {version}: its functions are named")));
                break;
            }
            Some(Err(why)) => {
                let consequence = "Python functions are not seen, only the C functions of the interpreter";
                checks.push(Check::warn("stacks", why, consequence, "use CPython 3.11, 3.12 or 3.13"));
                break;
            }
            None => {}
        }
    }
}

fn of_file(process: ProcessId, file: &FileMapping) -> Check {
    let name = &file.path;
    match unwind::way(process, file) {
        Way::Table { rows, notes } => {
            let without = notes.unsupported + notes.refused;
            let but = match without {
                0 => String::new(),
                _ => format!("; stacks end at {without} of them and say so"),
            };
            let found = format!("{name}: by table ({} functions, {rows} rows{but})", notes.functions);
            // A few are described in ways of their own by every compiler.
            if notes.torn || without * 50 > notes.functions {
                let consequence = "its unwind information is damaged: stacks through it may end there";
                Check::warn("stacks", found, consequence, "build it anew")
            } else {
                Check::ok("stacks", found)
            }
        }
        Way::FramePointers(why) => Check::warn(
            "stacks",
            format!("{name}: by frame pointers ({why})"),
            "where it keeps none, stacks through it end there and say so",
            "build it with -fasynchronous-unwind-tables (most compilers' default) or -fno-omit-frame-pointer",
        ),
    }
}

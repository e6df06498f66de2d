//! `tracer flamegraph`: CPU time by request, phase and function, as SVG.

mod attribution;

use super::picture::{open, subtitle, write};
use crate::event::{Event, StackCut, StackId};
use crate::symbol::{FrameKind, SymbolFrame};
use anyhow::{Context, Result};
use attribution::{Attribution, Rooted};
use flamegraphs::{FlameOptions, Header};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Draw CPU time as a flame graph: requests, their phases, the functions that ran for them
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  tracer flamegraph trace/ -o cpu.svg\n  tracer flamegraph trace/ --folded cpu.folded"
)]
pub(crate) struct Args {
    /// Folder of the capture
    capture: PathBuf,
    /// File to write; `-` is stdout
    #[arg(long, short, default_value = "flamegraph.svg")]
    output: PathBuf,
    /// Also write the stacks in the folded format, for other tools
    #[arg(long, value_name = "FILE")]
    folded: Option<PathBuf>,
    /// How many requests are shown by name, those with most CPU time
    #[arg(long, default_value_t = 12, value_name = "N")]
    requests: usize,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let capture = open(&args.capture)?;
    let tables = capture.tables()?;
    let mut attribution = Attribution::default();
    let mut cuts = HashMap::new();
    for event in capture.events()? {
        let event = event?;
        if let Event::Stack(stack) = &event
            && let Some(cut) = stack.cut
        {
            cuts.insert(stack.id, cut);
        }
        attribution.feed(&event);
    }
    let rooted = attribution.finish(args.requests);
    let stacks = Stacks::new(capture.frames()?.collect::<Result<_, _>>()?, cuts);

    let truncated = rooted.samples_of(|stack| stacks.cuts.contains_key(&stack));
    let facts = [format!("{} samples", rooted.samples()), format!("{truncated} truncated")];
    let options = FlameOptions {
        header: Header {
            title: "CPU time by request, phase and function".to_owned(),
            subtitle: subtitle(&tables, &facts),
            simulated: tables.meta.simulated,
        },
        count_name: "µs on CPU".to_owned(),
        factor: 1e-3,
        groups: 2,
        ..FlameOptions::default()
    };
    let drawn = flamegraphs::flamegraph(stacks.named(rooted), &options).with_context(|| {
        format!(
            "cannot draw the flame graph of {} (was it recorded with --sample-hz 0?)",
            args.capture.display()
        )
    })?;
    write(&args.output, "flame graph", &drawn.svg)?;
    if let Some(path) = &args.folded {
        write(path, "folded stacks", &drawn.folded)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Rust's runtime marks by this function where a thread's own code begins; below it there is only how threads start.
const RUST_PROGRAM_BEGINS: &str = "__rust_begin_short_backtrace";

/// Names of the frames of each stack, root first, from where the program's own code begins.
struct Stacks {
    names: HashMap<StackId, Vec<String>>,
    cuts: HashMap<StackId, StackCut>,
}

impl Stacks {
    fn new(mut frames: Vec<SymbolFrame>, cuts: HashMap<StackId, StackCut>) -> Self {
        // Positions count from the leaf.
        frames.sort_by_key(|frame| (frame.stack, std::cmp::Reverse(frame.position)));
        let mut names: HashMap<StackId, Vec<String>> = HashMap::new();
        for frame in frames {
            let label = match frame.kind {
                FrameKind::Kernel => format!("{}_[k]", frame.label()),
                FrameKind::User if frame.inlined => format!("{}_[i]", frame.label()),
                FrameKind::User | FrameKind::Python => frame.label(),
            };
            let names = names.entry(frame.stack).or_default();
            if label.contains(RUST_PROGRAM_BEGINS) {
                names.clear();
            } else {
                names.push(label);
            }
        }
        Self { names, cuts }
    }

    /// Full stacks under their roots. What is missing at the root of a stack has a frame that says why.
    fn named(&self, rooted: Rooted) -> impl Iterator<Item = (Vec<String>, u64)> {
        rooted.weights.into_iter().map(|(root, stack, weight)| {
            let mut frames = Vec::from(root);
            match stack {
                Some(stack) => {
                    frames.extend(self.cuts.get(&stack).map(|cut| format!("[truncated: {}]", cut.text())));
                    frames.extend(self.names.get(&stack).cloned().unwrap_or_default());
                }
                None => frames.push("[no stack]".to_owned()),
            }
            (frames, weight)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(stack: u64, position: u32, kind: FrameKind, function: &str) -> SymbolFrame {
        SymbolFrame {
            stack: StackId(stack),
            position,
            kind,
            function: Some(function.to_owned()),
            module: String::new(),
            offset: 0,
            inlined: false,
        }
    }

    #[test]
    fn stacks_read_from_the_root_and_say_what_is_missing() {
        let frames = vec![
            frame(1, 0, FrameKind::Kernel, "tcp_sendmsg"),
            frame(1, 1, FrameKind::User, "write"),
            frame(1, 2, FrameKind::User, "main"),
            frame(2, 0, FrameKind::User, "leaf"),
            frame(3, 0, FrameKind::User, "work"),
            frame(3, 1, FrameKind::User, "std::sys::backtrace::__rust_begin_short_backtrace"),
            frame(3, 2, FrameKind::User, "start_thread"),
        ];
        let stacks = Stacks::new(frames, HashMap::from([(StackId(2), StackCut::FramePointers)]));
        let root = || ["req".to_owned(), "decode".to_owned()];
        let weights = vec![
            (root(), Some(StackId(1)), 1),
            (root(), Some(StackId(2)), 2),
            (root(), None, 3),
            (root(), Some(StackId(3)), 4),
        ];
        let named: Vec<String> = stacks
            .named(Rooted { weights, ..Rooted::default() })
            .map(|(stack, weight)| format!("{} {weight}", stack.join(";")))
            .collect();
        assert_eq!(
            named,
            [
                "req;decode;main;write;tcp_sendmsg_[k] 1",
                "req;decode;[truncated: no frame pointer];leaf 2",
                "req;decode;[no stack] 3",
                "req;decode;work 4",
            ]
        );
    }
}

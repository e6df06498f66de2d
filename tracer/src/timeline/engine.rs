//! What a step ran: its engine's file, known where its process has opened one only, and the shapes of its inputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rows::Engine;
use crate::event::mark::Shape;
use crate::event::{EngineFile, ProcessId};

/// Engine files of a process that are told apart.
const MAX_FILES: usize = 256;

/// The engine files of each process, in the order in which they were seen.
#[derive(Default)]
pub(super) struct Engines(BTreeMap<ProcessId, Vec<(u64, Arc<Engine>)>>);

impl Engines {
    pub(super) fn opened(&mut self, file: &EngineFile) {
        let engine = Engine {
            path: file.path.clone(),
            bytes: file.bytes,
            modified_ns: file.modified_ns,
            fingerprint: file.fingerprint.clone(),
        };
        let files = self.0.entry(file.process).or_default();
        if let Some((seen_ns, _)) = files.iter_mut().find(|(_, known)| is_same(known, &engine)) {
            *seen_ns = file.time_ns.min(*seen_ns);
        } else if files.len() < MAX_FILES {
            files.push((file.time_ns, Arc::new(engine)));
        }
    }

    /// The one engine that the process had opened by then; `None` where there was none, or there were several.
    pub(super) fn at(&self, process: ProcessId, time_ns: u64) -> Option<Arc<Engine>> {
        let files = self.0.get(&process)?;
        let mut before = files.iter().filter(|(seen_ns, _)| *seen_ns <= time_ns);
        match (before.next(), before.next()) {
            (Some((_, only)), None) => Some(Arc::clone(only)),
            _ => None,
        }
    }
}

/// Whether two files are the same engine: a file may have several paths (links), and several files one content. What could
/// not be read is told apart by its path.
fn is_same(one: &Engine, other: &Engine) -> bool {
    if one.fingerprint.is_empty() || other.fingerprint.is_empty() {
        return one == other;
    }
    one.fingerprint == other.fingerprint
}

/// Execution contexts, and inputs of one, whose shapes are kept.
const MAX_CONTEXTS: usize = 4096;
const MAX_INPUTS: usize = 64;

/// The shapes that programs have set, by execution context and input.
#[derive(Default)]
pub(super) struct Shapes(BTreeMap<(ProcessId, u64), BTreeMap<String, String>>);

impl Shapes {
    pub(super) fn set(&mut self, process: ProcessId, shape: Shape) {
        if self.0.len() >= MAX_CONTEXTS && !self.0.contains_key(&(process, shape.object)) {
            self.0.pop_first();
        }
        let inputs = self.0.entry((process, shape.object)).or_default();
        if inputs.len() < MAX_INPUTS || inputs.contains_key(&shape.name) {
            inputs.insert(shape.name, shape.dims);
        }
    }

    /// `name:4x128` of each input, by name.
    pub(super) fn of(&self, process: ProcessId, context: u64) -> String {
        let inputs = self.0.get(&(process, context)).into_iter().flatten();
        inputs.map(|(name, dims)| format!("{name}:{dims}")).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(time_ns: u64, path: &str, fingerprint: u8) -> EngineFile {
        EngineFile { time_ns, path: path.into(), fingerprint: vec![fingerprint; 32], ..EngineFile::default() }
    }

    #[test]
    fn a_step_has_the_only_engine_that_was_opened_before_it() {
        let mut engines = Engines::default();
        let process = ProcessId::default();
        let at = |engines: &Engines, time_ns| engines.at(process, time_ns).map(|engine| engine.path.clone());
        assert_eq!(at(&engines, 100), None);
        engines.opened(&file(10, "a.plan", 1));
        // Opened again, and found in the process's descriptors later.
        engines.opened(&file(30, "a.plan", 1));
        engines.opened(&file(20, "b.plan", 2));
        assert_eq!([5, 15, 25].map(|time_ns| at(&engines, time_ns)), [None, Some("a.plan".into()), None]);
        // The same file by another path, and the same path with another file.
        let mut engines = Engines::default();
        engines.opened(&file(10, "link.plan", 1));
        engines.opened(&file(10, "a.plan", 1));
        assert_eq!(at(&engines, 20).as_deref(), Some("link.plan"));
        let mut engines = Engines::default();
        engines.opened(&file(10, "a.plan", 1));
        engines.opened(&file(10, "a.plan", 2));
        assert_eq!(at(&engines, 20), None);
    }
    #[test]
    fn a_step_has_the_shapes_that_its_context_was_given_last() {
        let mut shapes = Shapes::default();
        let process = ProcessId::default();
        let mut set = |object, name: &str, dims: &str| {
            shapes.set(process, Shape { object, name: name.into(), dims: dims.into() });
        };
        set(7, "input_ids", "1x128");
        set(7, "attention_mask", "1x128");
        set(8, "input_ids", "9x9");
        set(7, "input_ids", "4x1");
        assert_eq!(shapes.of(process, 7), "attention_mask:1x128 input_ids:4x1");
        assert_eq!(shapes.of(process, 9), "");
        assert_eq!(shapes.of(ProcessId { tgid: 1, ..process }, 7), "");
    }
}

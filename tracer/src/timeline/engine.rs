//! What a step ran: its engine's file, known where its process has opened one only, and shapes and data types of its
//! tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rows::Engine;
use crate::event::mark::{DataType, Made, Shape};
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

/// Execution contexts and engines, and tensors of one, that are kept.
const MAX_OBJECTS: usize = 4096;
const MAX_TENSORS: usize = 64;

type Facts = BTreeMap<String, String>;

/// What programs have set and asked of tensors.
#[derive(Default)]
pub(super) struct Tensors {
    contexts: BTreeMap<(ProcessId, u64), Context>,
    /// Data types, by engine and tensor.
    engines: BTreeMap<(ProcessId, u64), Facts>,
}

#[derive(Default)]
struct Context {
    /// Who made it, where that was seen.
    engine: Option<u64>,
    set: Facts,
    asked: Facts,
}

/// What is known of the tensors of a step: `name:4x128` and the like, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StepTensors {
    pub(super) input_shapes: String,
    pub(super) output_shapes: String,
    pub(super) data_types: String,
}

/// The objects of a map, of which the one that is asked for has room.
fn object<T: Default>(objects: &mut BTreeMap<(ProcessId, u64), T>, key: (ProcessId, u64)) -> &mut T {
    if objects.len() >= MAX_OBJECTS && !objects.contains_key(&key) {
        objects.pop_first();
    }
    objects.entry(key).or_default()
}

fn learn(facts: &mut Facts, name: String, fact: String) {
    if facts.len() < MAX_TENSORS || facts.contains_key(&name) {
        facts.insert(name, fact);
    }
}

fn joined<'a>(facts: impl Iterator<Item = (&'a String, &'a String)>) -> String {
    facts.map(|(name, fact)| format!("{name}:{fact}")).collect::<Vec<_>>().join(" ")
}

impl Tensors {
    pub(super) fn shape(&mut self, process: ProcessId, shape: Shape) {
        let context = object(&mut self.contexts, (process, shape.object));
        let facts = if shape.asked { &mut context.asked } else { &mut context.set };
        learn(facts, shape.name, shape.dims);
    }

    pub(super) fn data_type(&mut self, process: ProcessId, mark: DataType) {
        learn(object(&mut self.engines, (process, mark.object)), mark.name, mark.data_type);
    }

    /// A new context is where an old one may have been.
    pub(super) fn made(&mut self, process: ProcessId, made: Made) {
        object(&mut self.engines, (process, made.maker));
        *object(&mut self.contexts, (process, made.made)) =
            Context { engine: Some(made.maker), ..Context::default() };
    }

    /// Data types are those that the context's own engine told, or the only engine of the process that was seen.
    pub(super) fn of(&self, process: ProcessId, context: u64) -> StepTensors {
        let known = self.contexts.get(&(process, context));
        let mut engines = self.engines.range((process, 0)..=(process, u64::MAX));
        let engine = match known.and_then(|context| context.engine) {
            Some(engine) => self.engines.get(&(process, engine)),
            None => engines.next().filter(|_| engines.next().is_none()).map(|(_, types)| types),
        };
        let data_types = joined(engine.into_iter().flatten());
        let Some(Context { set, asked, .. }) = known else {
            return StepTensors { data_types, ..StepTensors::default() };
        };
        StepTensors {
            input_shapes: joined(set.iter()),
            output_shapes: joined(asked.iter().filter(|(name, _)| !set.contains_key(*name))),
            data_types,
        }
    }
}

impl StepTensors {
    /// What the data types of inputs and outputs imply: the narrowest that is for computing with. Whole numbers of 32 and 64
    /// bits, bytes and truth values are indices and masks.
    pub(super) fn quantization(&self) -> &'static str {
        const NARROWEST_FIRST: [&str; 8] = ["fp4", "int4", "fp8", "int8", "bf16", "fp16", "fp32", "unknown"];
        let has = |mode: &str| {
            let types = self.data_types.split(' ').filter_map(|fact| fact.rsplit_once(':'));
            types.into_iter().any(|(_, data_type)| data_type == mode)
        };
        NARROWEST_FIRST.into_iter().find(|mode| has(mode)).unwrap_or("unknown")
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
    fn a_step_has_the_shapes_that_its_context_was_given_last_and_those_it_was_asked_for() {
        let mut tensors = Tensors::default();
        let process = ProcessId::default();
        let mut shape = |object, name: &str, dims: &str, asked| {
            tensors.shape(process, Shape { object, name: name.into(), dims: dims.into(), asked });
        };
        shape(7, "input_ids", "1x128", false);
        shape(7, "attention_mask", "1x128", false);
        shape(8, "input_ids", "9x9", false);
        shape(7, "input_ids", "4x1", false);
        shape(7, "input_ids", "4x1", true);
        shape(7, "logits", "4x32000", true);
        let of = tensors.of(process, 7);
        assert_eq!(of.input_shapes, "attention_mask:1x128 input_ids:4x1");
        assert_eq!(of.output_shapes, "logits:4x32000");
        assert_eq!(tensors.of(process, 9), StepTensors::default());
        assert_eq!(tensors.of(ProcessId { tgid: 1, ..process }, 7), StepTensors::default());
        // Another context at its address.
        tensors.made(process, Made { maker: 1, made: 7 });
        assert_eq!(tensors.of(process, 7), StepTensors::default());
    }

    #[test]
    fn data_types_are_those_of_the_context_s_engine() {
        let mut tensors = Tensors::default();
        let process = ProcessId::default();
        let told = |tensors: &mut Tensors, object, name: &str, data_type: &str| {
            tensors.data_type(process, DataType { object, name: name.into(), data_type: data_type.into() });
        };
        told(&mut tensors, 1, "input_ids", "int64");
        let types = |tensors: &Tensors, context| {
            let of = tensors.of(process, context);
            (of.data_types.clone(), of.quantization())
        };
        assert_eq!(types(&tensors, 7), ("input_ids:int64".into(), "unknown"));
        told(&mut tensors, 1, "logits", "fp32");
        told(&mut tensors, 1, "kv:cache", "fp8");
        // The only engine, whoever made the context.
        assert_eq!(types(&tensors, 7), ("input_ids:int64 kv:cache:fp8 logits:fp32".into(), "fp8"));
        told(&mut tensors, 2, "image", "bf16");
        assert_eq!(types(&tensors, 7), (String::new(), "unknown"));
        tensors.made(process, Made { maker: 2, made: 7 });
        assert_eq!(types(&tensors, 7), ("image:bf16".into(), "bf16"));
        // An engine that was not asked.
        tensors.made(process, Made { maker: 3, made: 8 });
        assert_eq!(types(&tensors, 8), (String::new(), "unknown"));
    }
}

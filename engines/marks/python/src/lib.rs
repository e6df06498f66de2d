//! `tracer_marks._native`: marks for Python. `_native.pyi` has the types, `docs/marks.md` the vocabulary.

mod arguments;

use arguments::{Count, Identifier, Number, Text, Value, type_name};
use marks::{AttrValue, FinishReason, RequestBegin};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// Whether a tracer listens now. Worth asking before gathering what a mark would say.
#[pyfunction]
fn listening() -> bool {
    marks::listening()
}

/// The program took a request in.
///
/// What becomes known later is told by attr(), with the argument's name as key.
#[pyfunction]
#[pyo3(signature = (
    request, *, request_id = Text::default(), received_ns = Count::default(), trace_id = Identifier::default(),
    span_id = Identifier::default(), trace_flags = Count::default(), prompt_tokens = Count::default(),
    tenant_id = Text::default(), model = Text::default(), model_version = Text::default(),
    engine_hash = Text::default(), adapters = Text::default(), kv_cache_strategy = Text::default(),
), text_signature = "(request, *, request_id=None, received_ns=0, trace_id=None, span_id=None, trace_flags=0, \
    prompt_tokens=0, tenant_id=None, model=None, model_version=None, engine_hash=None, adapters=None, \
    kv_cache_strategy=None)")]
#[expect(clippy::too_many_arguments, reason = "keyword arguments: what is known of a request")]
fn request_begin(
    request: Number,
    request_id: Text<'_, '_>,
    received_ns: Count,
    trace_id: Identifier<16>,
    span_id: Identifier<8>,
    trace_flags: Count,
    prompt_tokens: Count,
    tenant_id: Text<'_, '_>,
    model: Text<'_, '_>,
    model_version: Text<'_, '_>,
    engine_hash: Text<'_, '_>,
    adapters: Text<'_, '_>,
    kv_cache_strategy: Text<'_, '_>,
) {
    if marks::listening() {
        marks::request_begin(&RequestBegin {
            request: request.0,
            received_ns: Some(received_ns.u64()).filter(|&ns| ns != 0),
            trace_id: trace_id.0,
            span_id: span_id.0,
            trace_flags: trace_flags.u32(),
            prompt_tokens: prompt_tokens.u32(),
            request_id: &request_id.get(),
            tenant_id: &tenant_id.get(),
            model: &model.get(),
            model_version: &model_version.get(),
            engine_hash: &engine_hash.get(),
            adapters: &adapters.get(),
            kv_cache_strategy: &kv_cache_strategy.get(),
        });
    }
}

/// The program is done with a request; output_tokens counts the tokens of all choices.
#[pyfunction]
#[pyo3(signature = (request, output_tokens, finish_reason))]
fn request_end(request: Number, output_tokens: Count, finish_reason: Count) {
    let reason = match finish_reason.u32() {
        1 => FinishReason::Stop,
        2 => FinishReason::Length,
        3 => FinishReason::Cancelled,
        4 => FinishReason::Error,
        _ => FinishReason::Unknown,
    };
    marks::request_end(request.0, output_tokens.u32(), reason);
}

/// The next step of this thread serves these requests.
///
/// batch_id numbers the iteration, unique in the process: the steps of several ranks of one iteration share it.
#[pyfunction]
#[pyo3(signature = (batch_id, rank, slots))]
fn batch(batch_id: Number, rank: Count, slots: &Bound<'_, PyAny>) -> PyResult<()> {
    let listening = marks::listening();
    let mut gathered = Vec::new();
    // The class has no subclasses: while nobody listens, a comparison says all.
    let class = slots.py().get_type::<Slot>().as_type_ptr();
    let mut gather = |slot: Bound<'_, PyAny>| {
        if slot.get_type_ptr() != class {
            let message = format!("slots must be Slot, one is {}", type_name(slot.as_borrowed()));
            return Err(PyTypeError::new_err(message));
        }
        if listening {
            gathered.push(slot.cast::<Slot>()?.get().0);
        }
        Ok(())
    };
    // The quick way, which nobody notices otherwise.
    match slots.cast_exact::<PyList>() {
        Ok(list) => list.iter().try_for_each(gather)?,
        Err(_) => slots.try_iter()?.try_for_each(|slot| gather(slot?))?,
    }
    if listening {
        marks::batch(batch_id.0, rank.u32(), &gathered);
    }
    Ok(())
}

/// The program hands token `index` (from 0) of a choice to its client.
#[pyfunction]
#[pyo3(signature = (request, choice, index))]
fn token(request: Number, choice: Count, index: Count) {
    marks::token(request.0, choice.u32(), index.u32());
}

/// A named part of a request's life begins.
#[pyfunction]
#[pyo3(signature = (request, name))]
fn phase_begin(request: Number, name: Text<'_, '_>) {
    if marks::listening() {
        marks::phase_begin(request.0, &name.get());
    }
}

/// A named part of a request's life ends.
#[pyfunction]
#[pyo3(signature = (request, name))]
fn phase_end(request: Number, name: Text<'_, '_>) {
    if marks::listening() {
        marks::phase_end(request.0, &name.get());
    }
}

/// A fact about one choice of a request: a number or a str.
#[pyfunction]
#[pyo3(signature = (request, choice, key, value))]
fn attr(request: Number, choice: Count, key: Text<'_, '_>, value: Value<'_, '_>) {
    if marks::listening() {
        let (choice, key) = (choice.u32(), key.get());
        match value {
            Value::Number(number) => marks::attr(request.0, choice, &key, AttrValue::Number(number)),
            Value::Text(text) => marks::attr(request.0, choice, &key, AttrValue::String(&text.get())),
        }
    }
}

/// One request in a batch.
#[pyclass(frozen, module = "tracer_marks")]
struct Slot(marks::Slot);

#[pymethods]
impl Slot {
    #[new]
    #[pyo3(signature = (
        request, *, sample_offset, generation_step, tokens = Count::from(1), choice = Count::default(),
        phase = Count::from(u32::from(marks::DECODE)), flags = Count::default(),
    ), text_signature = "(request, *, sample_offset, generation_step, tokens=1, choice=0, phase=DECODE, flags=0)")]
    fn new(
        request: Number,
        sample_offset: Count,
        generation_step: Count,
        tokens: Count,
        choice: Count,
        phase: Count,
        flags: Count,
    ) -> Self {
        Self(marks::Slot {
            request: request.0,
            sample_offset: sample_offset.u32(),
            generation_step: generation_step.u32(),
            tokens: tokens.u32(),
            choice: choice.u16(),
            phase: phase.u8(),
            flags: flags.u8(),
        })
    }

    #[getter]
    fn request(&self) -> u64 {
        self.0.request
    }

    /// Position of the request in the batch's tensors (never to be confused with batch_id).
    #[getter]
    fn sample_offset(&self) -> u32 {
        self.0.sample_offset
    }

    /// Index of the token that this step generates (0 for the prefill).
    #[getter]
    fn generation_step(&self) -> u32 {
        self.0.generation_step
    }

    /// Tokens that the step processes for this request.
    #[getter]
    fn tokens(&self) -> u32 {
        self.0.tokens
    }

    #[getter]
    fn choice(&self) -> u16 {
        self.0.choice
    }

    /// PREFILL or DECODE.
    #[getter]
    fn phase(&self) -> u8 {
        self.0.phase
    }

    /// SLOT_NO_TOKEN, or 0.
    #[getter]
    fn flags(&self) -> u8 {
        self.0.flags
    }

    fn __repr__(&self) -> String {
        let marks::Slot { request, sample_offset, generation_step, tokens, choice, phase, flags } = self.0;
        format!(
            "Slot({request}, sample_offset={sample_offset}, generation_step={generation_step}, tokens={tokens}, \
             choice={choice}, phase={phase}, flags={flags})"
        )
    }
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PREFILL", marks::PREFILL)?;
    module.add("DECODE", marks::DECODE)?;
    module.add("SLOT_NO_TOKEN", marks::SLOT_NO_TOKEN)?;
    module.add("REQUEST_KEYS", marks::REQUEST_KEYS)?;
    module.add_class::<Slot>()?;
    module.add_function(wrap_pyfunction!(listening, module)?)?;
    module.add_function(wrap_pyfunction!(request_begin, module)?)?;
    module.add_function(wrap_pyfunction!(request_end, module)?)?;
    module.add_function(wrap_pyfunction!(batch, module)?)?;
    module.add_function(wrap_pyfunction!(token, module)?)?;
    module.add_function(wrap_pyfunction!(phase_begin, module)?)?;
    module.add_function(wrap_pyfunction!(phase_end, module)?)?;
    module.add_function(wrap_pyfunction!(attr, module)?)
}

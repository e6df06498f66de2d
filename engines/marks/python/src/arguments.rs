//! Arguments from Python. A wrong type is a TypeError, whether or not somebody listens; a value of the right type is
//! never refused: numbers are brought into range, text that is no UTF-8 is replaced.

use std::borrow::Cow;
use std::ffi::c_int;

use marks::MAX_STRING_BYTES;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use pyo3::{Borrowed, PyErr, ffi};

/// A number that names something: any int, modulo 2^64, so that `uuid.int` and `hash()` will do.
#[derive(Clone, Copy, Default)]
pub(crate) struct Number(pub(crate) u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        // SAFETY: an object, and the interpreter is attached.
        let value = unsafe { ffi::PyLong_AsUnsignedLongLongMask(object.as_ptr()) };
        if value == u64::MAX && PyErr::occurred(object.py()) {
            return Err(fetch(object));
        }
        Ok(Self(value))
    }
}

/// The error that the interpreter has just set.
fn fetch(object: Borrowed<'_, '_, PyAny>) -> PyErr {
    PyErr::fetch(object.py())
}

/// A number of things or an index: an int, brought into 0 … 2^63 − 1.
#[derive(Clone, Copy, Default)]
pub(crate) struct Count(u64);

impl Count {
    pub(crate) fn u64(self) -> u64 {
        self.0
    }

    pub(crate) fn u32(self) -> u32 {
        u32::try_from(self.0).unwrap_or(u32::MAX)
    }

    pub(crate) fn u16(self) -> u16 {
        u16::try_from(self.0).unwrap_or(u16::MAX)
    }

    pub(crate) fn u8(self) -> u8 {
        u8::try_from(self.0).unwrap_or(u8::MAX)
    }
}

impl From<u32> for Count {
    fn from(value: u32) -> Self {
        Self(value.into())
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Count {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let mut overflow: c_int = 0;
        // SAFETY: an object, and the interpreter is attached.
        let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(object.as_ptr(), &raw mut overflow) };
        if value == -1 && overflow == 0 && PyErr::occurred(object.py()) {
            return Err(fetch(object));
        }
        Ok(Self(if overflow > 0 { i64::MAX as u64 } else { u64::try_from(value).unwrap_or(0) }))
    }
}

/// A str, or None: nothing is known. Its characters are looked at only when somebody listens.
#[derive(Default)]
pub(crate) struct Text<'a, 'py>(Option<Borrowed<'a, 'py, PyString>>);

impl<'a, 'py> FromPyObject<'a, 'py> for Text<'a, 'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_none() {
            return Ok(Self(None));
        }
        match object.cast::<PyString>() {
            Ok(text) => Ok(Self(Some(text))),
            Err(_) => Err(wrong_type(object, "str or None")),
        }
    }
}

impl Text<'_, '_> {
    /// Lone surrogates are replaced.
    pub(crate) fn get(&self) -> Cow<'_, str> {
        self.0.as_ref().map_or(Cow::Borrowed(""), |text| lossy(text))
    }
}

/// The text, or as much of it as a mark can hold.
fn lossy<'a>(text: &'a Borrowed<'_, '_, PyString>) -> Cow<'a, str> {
    if let Ok(text) = text.to_str() {
        return Cow::Borrowed(text);
    }
    // Of a text that cannot be borrowed only the beginning is made anew, however long it is.
    match text.as_any().get_item(pyo3::types::PySlice::new(text.py(), 0, MAX_STRING_BYTES as isize, 1)) {
        Ok(beginning) => {
            let beginning = beginning.cast_into::<PyString>();
            Cow::Owned(beginning.map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned()))
        }
        Err(_) => Cow::Borrowed(""),
    }
}

/// An identifier of `N` bytes: bytes, or a str of hexadecimal digits; None or another length: unknown.
pub(crate) struct Identifier<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Default for Identifier<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<'a, 'py, const N: usize> FromPyObject<'a, 'py> for Identifier<N> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if object.is_none() {
            return Ok(Self::default());
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(bytes.as_bytes().try_into().map_or_else(|_| Self::default(), Self));
        }
        let Ok(text) = object.cast::<PyString>() else {
            return Err(wrong_type(object, "str, bytes or None"));
        };
        Ok(text.to_str().ok().and_then(hex).map_or_else(Self::default, Self))
    }
}

/// Exactly `N` bytes in hexadecimal.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Value of an attribute: a str, or anything that is a number.
pub(crate) enum Value<'a, 'py> {
    Number(f64),
    Text(Text<'a, 'py>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Value<'a, 'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self::Text(Text(Some(text))));
        }
        // SAFETY: an object, and the interpreter is attached.
        let number = unsafe { ffi::PyFloat_AsDouble(object.as_ptr()) };
        if number == -1.0 && PyErr::occurred(object.py()) {
            let error = fetch(object);
            // An int beyond what a float can hold.
            return match error.is_instance_of::<pyo3::exceptions::PyOverflowError>(object.py()) {
                true => Ok(Self::Number(f64::INFINITY)),
                false => Err(wrong_type(object, "str, int or float")),
            };
        }
        Ok(Self::Number(number))
    }
}

fn wrong_type(object: Borrowed<'_, '_, PyAny>, expected: &str) -> PyErr {
    PyTypeError::new_err(format!("must be {expected}, not {}", type_name(object)))
}

pub(crate) fn type_name(object: Borrowed<'_, '_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}

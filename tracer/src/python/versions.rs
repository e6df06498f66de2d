//! What lies where, by version.

use serde::Deserialize;
use tracer_abi::unwind::PythonOffsets;

/// Byte offsets in the structures of an interpreter; in [`Version::described`], numbers of the words that hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layout {
    pub(super) runtime_interpreters: u32,
    pub(super) interpreter_next: u32,
    pub(super) interpreter_threads: u32,
    pub(super) thread_next: u32,
    pub(super) thread_native_id: u32,
    pub(super) thread_frame: u32,
    pub(super) inner_frame: Option<u32>,
    pub(super) frame_code: u32,
    pub(super) frame_instruction: u32,
    pub(super) frame_previous: u32,
    pub(super) frame_entry: u32,
    pub(super) code_first_line: u32,
    pub(super) code_file: u32,
    pub(super) code_name: u32,
    pub(super) code_lines: u32,
    pub(super) code_instructions: u32,
    pub(super) bytes_size: u32,
    pub(super) bytes_data: u32,
    pub(super) string_length: u32,
    pub(super) string_state: u32,
    pub(super) string_ascii: u32,
    pub(super) string_compact: Option<u32>,
}

/// A file of `versions`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Version {
    pub(super) version: String,
    pub(super) entry_value: u32,
    pub(super) entry_is_function: bool,
    pub(super) offsets: Option<Layout>,
    pub(super) described: Option<Layout>,
}

/// What is known of one interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    pub(super) layout: Layout,
    entry_value: u32,
    /// The frame at which the C function was entered is a function's, too.
    pub entry_is_function: bool,
}

/// The versions that are known.
pub struct Versions(Vec<Version>);

impl Versions {
    /// Those that this program brings.
    ///
    /// # Panics
    /// Never: the files are part of the program, and a test reads them.
    #[must_use]
    #[expect(clippy::expect_used, reason = "the files are part of the program")]
    pub fn builtin() -> Self {
        let files = [
            include_str!("versions/3.11.toml"),
            include_str!("versions/3.12.toml"),
            include_str!("versions/3.13.toml"),
        ];
        Self(files.iter().map(|text| toml::from_str(text).expect("a file of versions/ is wrong")).collect())
    }

    /// For people: `3.11, 3.12, 3.13`.
    #[must_use]
    pub fn names(&self) -> String {
        self.0.iter().map(|version| version.version.as_str()).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn find(&self, major: u8, minor: u8) -> Option<&Version> {
        self.0.iter().find(|version| version.version == format!("{major}.{minor}"))
    }
}

impl Version {
    pub(super) fn offsets(&self, layout: Layout) -> Offsets {
        Offsets { layout, entry_value: self.entry_value, entry_is_function: self.entry_is_function }
    }
}

impl Layout {
    /// The offsets that words of `_Py_DebugOffsets` hold; `None` where one cannot be.
    pub(super) fn described_by(&self, words: &[u64]) -> Option<Self> {
        /// No structure that is read is longer.
        const MOST: u64 = 1 << 20;
        let at = |index: u32| {
            let offset = words.get(index as usize).copied().filter(|offset| *offset < MOST)?;
            u32::try_from(offset).ok()
        };
        let string_ascii = at(self.string_ascii)?;
        Some(Self {
            runtime_interpreters: at(self.runtime_interpreters)?,
            interpreter_next: at(self.interpreter_next)?,
            interpreter_threads: at(self.interpreter_threads)?,
            thread_next: at(self.thread_next)?,
            thread_native_id: at(self.thread_native_id)?,
            thread_frame: at(self.thread_frame)?,
            inner_frame: None,
            frame_code: at(self.frame_code)?,
            frame_instruction: at(self.frame_instruction)?,
            frame_previous: at(self.frame_previous)?,
            frame_entry: at(self.frame_entry)?,
            code_first_line: at(self.code_first_line)?,
            code_file: at(self.code_file)?,
            code_name: at(self.code_name)?,
            code_lines: at(self.code_lines)?,
            code_instructions: at(self.code_instructions)?,
            bytes_size: at(self.bytes_size)?,
            bytes_data: at(self.bytes_data)?,
            string_length: at(self.string_length)?,
            string_state: at(self.string_state)?,
            string_ascii,
            string_compact: Some(string_ascii + 16),
        })
    }
}

impl Offsets {
    /// What the kernel side needs of them.
    #[must_use]
    pub fn for_kernel(&self) -> PythonOffsets {
        let Layout { thread_frame, inner_frame, .. } = self.layout;
        PythonOffsets {
            thread_frame,
            frame_is_inner: u32::from(inner_frame.is_some()),
            inner_frame: inner_frame.unwrap_or(0),
            frame_code: self.layout.frame_code,
            frame_instruction: self.layout.frame_instruction,
            frame_previous: self.layout.frame_previous,
            frame_entry: self.layout.frame_entry,
            entry_value: self.entry_value,
            code_first_line: self.layout.code_first_line,
        }
    }
}

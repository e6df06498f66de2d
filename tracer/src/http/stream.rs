//! Pieces of a streamed response: which are tokens, of which choice.
//!
//! A piece is a server-sent event (HTML standard, section 9.2) or a line of JSON. What a piece says is looked at and
//! forgotten.

use serde::Deserialize;

use super::{framing::Piece, head::Format};

/// Most bytes of one line that are gathered: what is longer is judged by its beginning.
const MAX_LINE: usize = 1 << 14;
/// Choices that are counted separately; more are counted with the last.
pub(super) const MAX_CHOICES: u32 = 64;

/// The pieces of a response, as they come.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    format: Format,
    line: Vec<u8>,
    /// The line goes on beyond what was gathered.
    cut: bool,
    /// An event has a data line already: further ones belong to it.
    in_event: bool,
}

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// A token of this choice.
    Token(u32),
    /// Something else: a role, a usage record, a keep-alive.
    Event,
    /// The program says that nothing else comes.
    End,
}

impl Stream {
    pub(super) fn new(format: Format) -> Self {
        Self { format, line: Vec::new(), cut: false, in_event: false }
    }

    /// Takes content; `seen` hears of each piece that is complete.
    pub(super) fn feed(&mut self, piece: Piece<'_>, seen: &mut impl FnMut(Seen)) {
        if self.format == Format::Whole {
            return;
        }
        for part in piece.bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match part.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (part, false),
            };
            let room = MAX_LINE.saturating_sub(self.line.len());
            self.cut |= text.len() > room;
            self.line.extend_from_slice(text.get(..room).unwrap_or(text));
            if ends {
                self.end_line(seen);
            }
        }
        if piece.gap > 0 {
            // How many lines were in it is not known: the one that began is counted, none is invented, and what comes
            // next begins anew.
            self.cut = true;
            self.end_line(seen);
            self.in_event = false;
        }
    }

    fn end_line(&mut self, seen: &mut impl FnMut(Seen)) {
        let line = std::mem::take(&mut self.line);
        let cut = std::mem::take(&mut self.cut);
        let text = line.strip_suffix(b"\r").unwrap_or(&line);
        match self.format {
            Format::Events => {
                if text.is_empty() {
                    self.in_event = false;
                } else if let Some(data) = text.strip_prefix(b"data:") {
                    if !self.in_event {
                        classify(data.trim_ascii(), cut, seen);
                    }
                    self.in_event = true;
                }
            }
            Format::Lines if !text.trim_ascii().is_empty() => classify(text, cut, seen),
            Format::Lines | Format::Whole => {}
        }
        // Its memory is used again.
        self.line = line;
        self.line.clear();
    }
}

/// A chunk of a completion, in the forms that servers use: OpenAI's (chat and plain), Ollama's, TGI's, TensorRT-LLM's.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow)]
    message: Option<Delta<'a>>,
    done: Option<bool>,
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    index: Option<u32>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    text: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Text<'a>>,
    #[serde(borrow)]
    reasoning_content: Option<Text<'a>>,
    #[serde(borrow)]
    reasoning: Option<Text<'a>>,
    tool_calls: Option<serde::de::IgnoredAny>,
}

/// A JSON string of which only matters whether it is empty.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] &'a serde_json::value::RawValue);

impl Text<'_> {
    fn says_something(&self) -> bool {
        !matches!(self.0.get(), "\"\"" | "null")
    }
}

impl Delta<'_> {
    fn says_something(&self) -> bool {
        let texts = [&self.content, &self.reasoning_content, &self.reasoning];
        self.tool_calls.is_some() || texts.into_iter().flatten().any(Text::says_something)
    }
}

fn classify(data: &[u8], cut: bool, seen: &mut impl FnMut(Seen)) {
    if data == b"[DONE]" {
        return seen(Seen::End);
    }
    if data.is_empty() {
        return seen(Seen::Event);
    }
    let Ok(chunk) = serde_json::from_slice::<Chunk<'_>>(data) else {
        // No JSON object: the server's own text. Cut short: it was long enough to say something.
        let is_other_json = !cut && serde_json::from_slice::<serde::de::IgnoredAny>(data).is_ok();
        return seen(if is_other_json { Seen::Event } else { Seen::Token(0) });
    };
    if let Some(choices) = &chunk.choices {
        let mut any = false;
        for choice in choices {
            let delta = choice.delta.as_ref().is_some_and(Delta::says_something);
            if delta || choice.text.as_ref().is_some_and(Text::says_something) {
                any = true;
                seen(Seen::Token(choice.index.unwrap_or(0).min(MAX_CHOICES - 1)));
            }
        }
        if !any {
            seen(Seen::Event);
        }
        return;
    }
    let is_end = chunk.done == Some(true) || chunk.error.is_some();
    let is_empty = chunk.message.as_ref().is_some_and(|message| !message.says_something());
    seen(if is_end || is_empty { Seen::Event } else { Seen::Token(0) });
}

//! How long a body is, and which of its bytes are its content (RFC 9112, section 6).

/// Longest line with the size of a chunk.
const MAX_SIZE_LINE: usize = 256;

/// What of a body is still to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// Nothing.
    None,
    Length(u64),
    Chunked(Chunk),
    /// Everything until the connection ends.
    UntilClose,
}

/// Where in a chunked body the next byte is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// In the line that gives a size.
    Size(Vec<u8>),
    /// So many bytes of content, then CRLF, are left.
    Data(u64),
    /// In the CRLF behind the content: so many bytes are left.
    DataEnd(u8),
    /// In the lines behind the last chunk; whether the current one is empty so far.
    Trailer { line_is_empty: bool },
}

/// Bytes that were moved: those that were captured, then so many that were not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) gap: u64,
}

impl<'a> Piece<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.gap == 0
    }

    /// Splits off the first `length` bytes, captured or not.
    fn take(&mut self, length: u64) -> Piece<'a> {
        let captured = usize::try_from(length).unwrap_or(usize::MAX).min(self.bytes.len());
        let (head, rest) = self.bytes.split_at(captured);
        let gap = (length - captured as u64).min(self.gap);
        self.bytes = rest;
        self.gap -= gap;
        Piece { bytes: head, gap }
    }

    /// The next byte, if it was captured.
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }
}

/// The bytes are not what the framing says, or those that would tell were not captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lost;

impl Framing {
    pub(super) fn chunked() -> Self {
        Self::Chunked(Chunk::Size(Vec::new()))
    }

    /// Takes this body's part of `piece` and passes its content on; true when the body is over.
    pub(super) fn feed(
        &mut self,
        piece: &mut Piece<'_>,
        mut content: impl FnMut(Piece<'_>),
    ) -> Result<bool, Lost> {
        match self {
            Self::None => Ok(true),
            Self::Length(left) => {
                let part = piece.take(*left);
                *left -= part.bytes.len() as u64 + part.gap;
                content(part);
                Ok(*left == 0)
            }
            Self::UntilClose => {
                content(piece.take(u64::MAX));
                Ok(false)
            }
            Self::Chunked(chunk) => {
                while !piece.is_empty() {
                    if chunk.feed(piece, &mut content)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

impl Chunk {
    /// One step; true when the body is over.
    fn feed(&mut self, piece: &mut Piece<'_>, content: &mut impl FnMut(Piece<'_>)) -> Result<bool, Lost> {
        match self {
            Self::Size(line) => {
                let byte = piece.next().ok_or(Lost)?;
                line.push(byte);
                if byte == b'\n' {
                    *self = match size_of_chunk(line)? {
                        0 => Self::Trailer { line_is_empty: true },
                        size => Self::Data(size),
                    };
                } else if line.len() > MAX_SIZE_LINE {
                    return Err(Lost);
                }
            }
            Self::Data(left) => {
                let part = piece.take(*left);
                *left -= part.bytes.len() as u64 + part.gap;
                let is_over = *left == 0;
                content(part);
                if is_over {
                    *self = Self::DataEnd(2);
                }
            }
            Self::DataEnd(left) => {
                // CRLF, which may be among the bytes that were not captured.
                let part = piece.take(u64::from(*left));
                if part.bytes.iter().any(|byte| !matches!(byte, b'\r' | b'\n')) {
                    return Err(Lost);
                }
                *left = left.saturating_sub(part.bytes.len() as u8 + part.gap as u8);
                if *left == 0 {
                    *self = Self::Size(Vec::new());
                }
            }
            Self::Trailer { line_is_empty } => match piece.next().ok_or(Lost)? {
                b'\n' if *line_is_empty => return Ok(true),
                b'\n' => *line_is_empty = true,
                b'\r' => {}
                _ => *line_is_empty = false,
            },
        }
        Ok(false)
    }
}

fn size_of_chunk(line: &[u8]) -> Result<u64, Lost> {
    match httparse::parse_chunk_size(line) {
        Ok(httparse::Status::Complete((_, size))) => Ok(size),
        _ => Err(Lost),
    }
}

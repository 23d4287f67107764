//! [`FrameReader`]: cuts the input into commands without interpreting them; [`FrameHeader`]: the head of a command; its
//! method `verify` verifies the command's checksum. The messages of all refusals are in `error.rs`.
//!
//! The reader appends the bytes of each command to a buffer of the caller. So a thread can read many commands into one
//! buffer, and pass the buffer to another thread, which verifies and parses the commands.

use std::io::{self, Read};

use ubtrfs_format::hash::crc32c_raw;

use crate::command::{CommandKind, StreamVersion};
use crate::error::{Position, StreamError, StreamProblem};
use crate::{MAGIC, MAX_COMMAND_BYTES, STREAM_HEADER_BYTES};

/// Bytes of a command before its attributes.
pub const HEADER_BYTES: usize = 10;

/// The head of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The stream's version.
    pub version: StreamVersion,
    /// The place of the command in the input.
    pub position: Position,
    /// Length of the command's attributes, which follow the 10 bytes of its head.
    pub len: u32,
    /// The command's number; see [`CommandKind`].
    pub number: u16,
    /// The checksum stated in the command.
    pub crc: u32,
}

impl FrameHeader {
    /// Length of the command, head included.
    pub fn whole_len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX).saturating_add(HEADER_BYTES)
    }

    /// Verifies the checksum over the whole command, head included.
    pub fn verify(&self, command: &[u8]) -> Result<(), StreamError> {
        let computed = command_crc(command);
        if computed == self.crc { Ok(()) } else { Err(self.problem(StreamProblem::Crc { found: self.crc, computed })) }
    }

    pub(crate) fn problem(&self, problem: StreamProblem) -> StreamError {
        StreamError { position: self.position, problem }
    }
}

/// The checksum of a whole command, regardless of the content of its crc field.
pub(crate) fn command_crc(command: &[u8]) -> u32 {
    let before = crc32c_raw(0, command.get(..6).unwrap_or_default());
    let field = crc32c_raw(before, &[0; 4]);
    crc32c_raw(field, command.get(HEADER_BYTES..).unwrap_or_default())
}

/// Reads an input, which can hold several streams one after the other.
///
/// Reads exactly the bytes of each command, so the bytes after an `END` stay in the input. The input should be
/// buffered.
#[derive(Debug)]
pub struct FrameReader<R> {
    input: R,
    offset: u64,
    index: u64,
    version: Option<StreamVersion>,
}

impl<R: Read> FrameReader<R> {
    /// Makes a reader of an input that starts with the header of a stream.
    pub fn new(input: R) -> Self {
        Self { input, offset: 0, index: 0, version: None }
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads the header of the next stream. Returns `None` at the end of the input.
    pub fn stream(&mut self) -> Result<Option<StreamVersion>, StreamError> {
        let position = Position { index: 0, offset: self.offset, kind: None };
        let fail = |problem| StreamError { position, problem };
        let mut header = [0; STREAM_HEADER_BYTES];
        match self.fill(&mut header).map_err(fail)? {
            0 => return Ok(None),
            STREAM_HEADER_BYTES => {}
            found if header.get(..found.min(MAGIC.len())) != MAGIC.get(..found.min(MAGIC.len())) => {
                return Err(fail(StreamProblem::NotAStream));
            }
            found => return Err(fail(truncated(STREAM_HEADER_BYTES, found))),
        }
        let (magic, number) = header.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(fail(StreamProblem::NotAStream));
        }
        let number = u32::from_le_bytes(number.try_into().unwrap_or_default());
        let version = StreamVersion::from_number(number).ok_or_else(|| fail(StreamProblem::Version(number)))?;
        self.version = Some(version);
        Ok(Some(version))
    }

    /// Appends the next command, head included, to `out`. Returns `None` at the end of the input.
    ///
    /// After the command `END`, the next call must be [`stream`](Self::stream).
    pub fn command(&mut self, out: &mut Vec<u8>) -> Result<Option<FrameHeader>, StreamError> {
        let Some(header) = self.head()? else { return Ok(None) };
        self.body(&header, out)?;
        Ok(Some(header))
    }

    /// Reads the head of the next command. Returns `None` at the end of the input. The next call must be
    /// [`body`](Self::body).
    pub fn head(&mut self) -> Result<Option<FrameHeader>, StreamError> {
        let mut position = Position { index: self.index.saturating_add(1), offset: self.offset, kind: None };
        let version = self
            .version
            .ok_or(StreamError { position: Position { index: 0, ..position }, problem: StreamProblem::Empty })?;
        let mut header = [0; HEADER_BYTES];
        let fail = |problem| StreamError { position, problem };
        match self.fill(&mut header).map_err(fail)? {
            0 => return Ok(None),
            HEADER_BYTES => {}
            found => return Err(fail(truncated(HEADER_BYTES, found))),
        }
        let [l0, l1, l2, l3, n0, n1, c0, c1, c2, c3] = header;
        let (len, number) = (u32::from_le_bytes([l0, l1, l2, l3]), u16::from_le_bytes([n0, n1]));
        position.kind = CommandKind::from_number(number);
        let header = FrameHeader { version, position, len, number, crc: u32::from_le_bytes([c0, c1, c2, c3]) };
        if position.kind.is_none() {
            return Err(header.problem(StreamProblem::UnknownCommand(number)));
        }
        if header.whole_len() > MAX_COMMAND_BYTES {
            return Err(header.problem(StreamProblem::TooLong(u64::from(len))));
        }
        Ok(Some(header))
    }

    /// Appends to `out` the command whose head was read last: its head, and the attributes that follow in the input.
    pub fn body(&mut self, header: &FrameHeader, out: &mut Vec<u8>) -> Result<(), StreamError> {
        out.extend_from_slice(&header.len.to_le_bytes());
        out.extend_from_slice(&header.number.to_le_bytes());
        out.extend_from_slice(&header.crc.to_le_bytes());
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        self.append(len, out).map_err(|problem| header.problem(problem))?;
        self.index = header.position.index;
        if header.position.kind == Some(CommandKind::End) {
            self.version = None;
        }
        Ok(())
    }

    /// Appends `len` bytes of the input. Grows the buffer by at most `STEP` bytes before reading these bytes.
    fn append(&mut self, len: usize, out: &mut Vec<u8>) -> Result<(), StreamProblem> {
        const STEP: usize = 256 << 10;
        let mut missing = len;
        while missing > 0 {
            let (before, step) = (out.len(), missing.min(STEP));
            out.resize(before.saturating_add(step), 0);
            let found = self.fill(out.get_mut(before..).unwrap_or_default())?;
            if found < step {
                return Err(truncated(missing, found));
            }
            missing = missing.saturating_sub(step);
        }
        Ok(())
    }

    /// Reads until `out` is full or the input ends. Returns the number of bytes read.
    fn fill(&mut self, out: &mut [u8]) -> Result<usize, StreamProblem> {
        let mut filled = 0_usize;
        while let Some(rest) = out.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest) {
                Ok(0) => break,
                Ok(read) => filled = filled.saturating_add(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StreamProblem::Io(error)),
            }
        }
        self.offset = self.offset.saturating_add(u64::try_from(filled).unwrap_or(u64::MAX));
        Ok(filled)
    }
}

fn truncated(expected: usize, found: usize) -> StreamProblem {
    StreamProblem::Truncated { missing: u64::try_from(expected.saturating_sub(found)).unwrap_or(u64::MAX) }
}

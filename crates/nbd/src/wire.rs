//! Numbers of the protocol, requests as bytes, and the headers of replies.
//!
//! ```text
//! request           magic u32  flags u16  type u16  cookie u64  offset u64  length u32   28 bytes
//! simple reply      magic u32  error u32  cookie u64                                     16 bytes, then a read's data
//! structured reply  magic u32  flags u16  type u16  cookie u64  length u32               20 bytes, then the payload
//! ```
//!
//! All numbers are big-endian.

/// `NBDMAGIC`, the first bytes of a server.
pub(crate) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the magic number of the newstyle handshake and of each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The magic number of the oldstyle handshake.
pub(crate) const OLD_MAGIC: u64 = 0x0000_4202_8186_1253;
/// The magic number of a reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// `NBD_FLAG_FIXED_NEWSTYLE`, of the server and of the client.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
/// `NBD_FLAG_NO_ZEROES`, of the server and of the client.
pub(crate) const NO_ZEROES: u16 = 1 << 1;

/// `NBD_FLAG_HAS_FLAGS`, of an export.
pub(crate) const HAS_FLAGS: u16 = 1;
/// `NBD_FLAG_READ_ONLY`, of an export.
pub(crate) const READ_ONLY: u16 = 1 << 1;

/// Options of the handshake.
pub(crate) mod option {
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub(crate) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    /// Set in all errors.
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR | 1;
    pub(crate) const ERR_POLICY: u32 = ERROR | 2;
    pub(crate) const ERR_TLS_REQD: u32 = ERROR | 5;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR | 6;
    pub(crate) const ERR_SHUTDOWN: u32 = ERROR | 7;
    pub(crate) const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
}

/// Types of information about an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandCode {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
    BlockStatus,
}

impl CommandCode {
    fn of_number(number: u16) -> Option<Self> {
        use CommandCode::{BlockStatus, Disconnect, Flush, Read, Trim, Write, WriteZeroes};
        [Read, Write, Disconnect, Flush, Trim, WriteZeroes, BlockStatus]
            .into_iter()
            .find(|command| command.number() == number)
    }

    fn number(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
        }
    }
}

/// Types of the chunks of a structured reply.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    /// Set in all errors.
    pub(crate) const ERROR: u16 = 1 << 15;
    /// The flag of the last chunk.
    pub(crate) const DONE: u16 = 1;
}

/// The name of the context in which a server tells which ranges are holes, and which read as zeros.
pub(crate) const ALLOCATION: &[u8] = b"base:allocation";
/// `NBD_STATE_ZERO`, of a range in the context [`ALLOCATION`].
pub(crate) const STATE_ZERO: u32 = 1 << 1;

/// `NBD_CMD_FLAG_FUA`: the reply means that the written bytes are durable.
const FUA: u16 = 1;

/// `NBD_EPERM`.
pub(crate) const EPERM: u32 = 1;
/// `NBD_EIO`.
pub(crate) const EIO: u32 = 5;
/// `NBD_EINVAL`.
pub(crate) const EINVAL: u32 = 22;
/// `NBD_ESHUTDOWN`: the server ends.
pub(crate) const ESHUTDOWN: u32 = 108;

/// Bytes of a request.
pub(crate) const REQUEST_LEN: usize = 28;

/// Makes a request. A write with `is_durable` is answered when its bytes are durable.
pub(crate) fn request(command: CommandCode, is_durable: bool, cookie: u64, offset: u64, len: u32) -> [u8; REQUEST_LEN] {
    joined(&[
        &REQUEST_MAGIC.to_be_bytes(),
        &(if is_durable { FUA } else { 0 }).to_be_bytes(),
        &command.number().to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset.to_be_bytes(),
        &len.to_be_bytes(),
    ])
}

/// Puts fields one after another, which have `N` bytes in all.
fn joined<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut bytes = [0; N];
    let mut rest = &mut bytes[..];
    for field in fields {
        let (head, tail) = rest.split_at_mut(field.len());
        head.copy_from_slice(field);
        rest = tail;
    }
    bytes
}

/// A request that arrived at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrivedRequest {
    /// `None` for a command that this crate does not know.
    pub(crate) command: Option<CommandCode>,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// Parses a request. `None` if the bytes are none.
pub(crate) fn parse_request(bytes: &[u8; REQUEST_LEN]) -> Option<ArrivedRequest> {
    let mut fields = BigEndianFields(bytes);
    let (magic, _flags, command) = (fields.u32()?, fields.u16()?, fields.u16()?);
    let command = CommandCode::of_number(command);
    let request = ArrivedRequest { command, cookie: fields.u64()?, offset: fields.u64()?, len: fields.u32()? };
    (magic == REQUEST_MAGIC).then_some(request)
}

/// Makes the header of the only chunk of a structured reply.
pub(crate) fn chunk_header(kind: u16, cookie: u64, len: usize) -> [u8; HEADER_LEN_MAX] {
    joined(&[
        &CHUNK_MAGIC.to_be_bytes(),
        &chunk::DONE.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes(),
    ])
}

/// Makes a reply to an option.
pub(crate) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let magic = OPTION_REPLY_MAGIC.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyHeader {
    /// A simple reply; the data of a read follows if `error` is 0.
    Simple { error: u32, cookie: u64 },
    /// A chunk of a structured reply, with a payload of `len` bytes.
    Chunk { is_last: bool, kind: u16, cookie: u64, len: u32 },
}

/// Takes numbers from the start of bytes.
pub(crate) struct BigEndianFields<'b>(pub(crate) &'b [u8]);

impl<'b> BigEndianFields<'b> {
    /// The next `N` bytes.
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The next `len` bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'b [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
}

/// Bytes of the longest header of a reply.
pub(crate) const HEADER_LEN_MAX: usize = 20;

/// Parses the header of a reply, and returns it with its length. `Ok(None)` means that more bytes are needed.
///
/// # Errors
/// The magic number, if the bytes are no header.
pub(crate) fn reply_header(bytes: &[u8]) -> Result<Option<(ReplyHeader, usize)>, u32> {
    let mut fields = BigEndianFields(bytes);
    let header = match fields.u32() {
        None => None,
        Some(SIMPLE_MAGIC) => simple(&mut fields),
        Some(CHUNK_MAGIC) => structured(&mut fields),
        Some(other) => return Err(other),
    };
    Ok(header.map(|header| (header, bytes.len().saturating_sub(fields.0.len()))))
}

fn simple(fields: &mut BigEndianFields<'_>) -> Option<ReplyHeader> {
    Some(ReplyHeader::Simple { error: fields.u32()?, cookie: fields.u64()? })
}

fn structured(fields: &mut BigEndianFields<'_>) -> Option<ReplyHeader> {
    let (flags, kind) = (fields.u16()?, fields.u16()?);
    Some(ReplyHeader::Chunk { is_last: flags & chunk::DONE != 0, kind, cookie: fields.u64()?, len: fields.u32()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_documented_bytes() {
        let bytes = request(CommandCode::Trim, false, 0x0102_0304_0506_0708, 0x1000, 0x20);
        let wanted =
            [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 4, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0x20];
        assert_eq!(bytes, wanted);
        let durable = request(CommandCode::Write, true, 0, 0, 0);
        assert_eq!(durable[4..8], [0, 1, 0, 1]);
    }

    #[test]
    fn headers_of_replies_are_parsed_when_they_are_complete() {
        let simple = [&SIMPLE_MAGIC.to_be_bytes()[..], &5u32.to_be_bytes(), &9u64.to_be_bytes(), b"data"].concat();
        for len in 0..16 {
            assert_eq!(reply_header(&simple[..len]), Ok(None), "{len}");
        }
        assert_eq!(reply_header(&simple), Ok(Some((ReplyHeader::Simple { error: 5, cookie: 9 }, 16))));
        let mut chunk = CHUNK_MAGIC.to_be_bytes().to_vec();
        chunk.extend([0, 1, 0, 2]);
        chunk.extend(7u64.to_be_bytes());
        assert_eq!(reply_header(&chunk), Ok(None));
        chunk.extend(12u32.to_be_bytes());
        let header = ReplyHeader::Chunk { is_last: true, kind: chunk::OFFSET_HOLE, cookie: 7, len: 12 };
        assert_eq!(reply_header(&chunk), Ok(Some((header, 20))));
        assert_eq!(reply_header(b"HTTP"), Err(0x4854_5450));
    }
}

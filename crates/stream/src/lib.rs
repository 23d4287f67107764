//! The send stream of btrfs: [`StreamCommand`], an encoder ([`StreamWriter`], [`encode`]) and a parser
//! ([`FrameReader`], [`parse`]).
//!
//! Like `format`, this crate only encodes, decodes and checks, and makes no policy decisions. The crate does I/O only
//! through `Read` and `Write`. A stream is untrusted input. The facts come from the page "Send stream format" of
//! btrfs's documentation, and from streams that Linux wrote.
//!
//! ```text
//! stream    "btrfs-stream\0"  u32 version  command*
//! command   u32 length of the attributes  u16 number  u32 crc  attribute*
//! attribute u16 number  u16 length  bytes      (version 2 and later: DATA comes last and has no length)
//! ```
//!
//! The crc is crc32c with seed 0 and without inversion, over the command with 0 in its crc field. A stream ends with
//! `END` or at the end of the input. If another stream follows in the input, it starts with its own header.
//!
//! - I1. No function panics, whatever bytes the input contains.
//! - I2. The buffer for a command grows in steps of at most 256 KiB, each after the bytes of the previous step have
//!   arrived, up to [`MAX_COMMAND_BYTES`].
//! - I3. `encode(parse(bytes)) == bytes` for every command that Linux writes.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::as_conversions,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

mod command;
mod decode;
mod encode;
mod error;
mod frame;
mod path;

pub use command::{Attribute, CommandKind, EncodedCompression, StreamCommand, StreamVersion};
pub use decode::parse;
pub use encode::{EncodeError, StreamWriter, encode, encode_header, encode_with};
pub use error::{Position, StreamError, StreamProblem};
pub use frame::{FrameHeader, FrameReader, HEADER_BYTES};
pub use path::{PathProblem, StreamPath};

/// First bytes of a stream.
pub const MAGIC: &[u8; 13] = b"btrfs-stream\0";
/// Bytes of a stream's header: the magic and the version.
pub const STREAM_HEADER_BYTES: usize = 17;
/// Maximum length of a command, header included. Linux writes at most about 150 KiB; the bound leaves room for other
/// writers.
pub const MAX_COMMAND_BYTES: usize = 16 << 20;
/// Maximum length of a command of version 1 that other receivers accept, header included.
pub const MAX_COMMAND_BYTES_V1: usize = 64 << 10;
/// Maximum number of bytes of data that Linux puts into one `WRITE` of version 1.
pub const WRITE_BYTES_V1: usize = 48 << 10;
/// Maximum number of bytes of data that Linux puts into one `WRITE` of version 2.
pub const WRITE_BYTES_V2: usize = 128 << 10;

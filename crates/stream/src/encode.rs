//! [`encode`]: the bytes of a command; [`StreamWriter`]: writes a whole stream to an output.

use std::io::{self, Write};

use ubtrfs_format::codec::Field;

use crate::command::{Attribute, CommandKind, StreamCommand, StreamVersion};
use crate::frame::{HEADER_BYTES, command_crc};
use crate::path::PATH_BYTES_MAX;
use crate::{MAGIC, MAX_COMMAND_BYTES, MAX_COMMAND_BYTES_V1};

/// The reason why a command or a header cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The version of the stream lacks the command.
    #[error("version {version} of the send stream has no command {kind}")]
    NotInVersion {
        /// The command.
        kind: CommandKind,
        /// The stream's version.
        version: StreamVersion,
    },
    /// An attribute or the whole command is too long.
    #[error("{kind}: {len} bytes are more than the send stream can carry")]
    TooLong {
        /// The command.
        kind: CommandKind,
        /// The length of the command or of the attribute.
        len: usize,
    },
    /// A path is longer than any receiver accepts.
    #[error("{kind}: a path of {len} bytes is longer than the 4095 bytes that a receiver accepts")]
    PathTooLong {
        /// The command.
        kind: CommandKind,
        /// The length of the path.
        len: usize,
    },
    /// The output failed.
    #[error("cannot write the stream: {0}")]
    Io(#[from] io::Error),
}

/// Appends the header of a stream.
pub fn encode_header(version: StreamVersion, out: &mut Vec<u8>) {
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&version.number().to_le_bytes());
}

/// Appends a command. On an error, `out` is unchanged.
pub fn encode(version: StreamVersion, command: &StreamCommand<'_>, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let data = data(command);
    encode_with(version, command, data.len(), out, |room| {
        room.copy_from_slice(data);
        Ok(())
    })
}

/// Appends a command. For a `Write` or `EncodedWrite`, `fill` writes `data_len` bytes of data into a slice of `out`,
/// and the command's own `data` is not used. On an error, `out` is unchanged.
///
/// With `encode_with`, a sender reads from its disk straight into the stream's buffer.
pub fn encode_with<E: From<EncodeError>>(
    version: StreamVersion,
    command: &StreamCommand<'_>,
    data_len: usize,
    out: &mut Vec<u8>,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let start = out.len();
    let mut encoder = Encoder { kind: command.kind(), version, start, out };
    let result = encoder.all(command, data_len, fill);
    if result.is_err() {
        out.truncate(start);
    }
    result
}

/// Writes a stream. The output should be buffered, because each command is a separate write.
#[derive(Debug)]
pub struct StreamWriter<W> {
    output: W,
    version: StreamVersion,
    buffer: Vec<u8>,
}

impl<W: Write> StreamWriter<W> {
    /// Writes the header.
    pub fn new(mut output: W, version: StreamVersion) -> io::Result<Self> {
        let mut buffer = Vec::new();
        encode_header(version, &mut buffer);
        output.write_all(&buffer)?;
        Ok(Self { output, version, buffer })
    }

    /// The stream's version.
    pub fn version(&self) -> StreamVersion {
        self.version
    }

    /// Writes a command.
    pub fn command(&mut self, command: &StreamCommand<'_>) -> Result<(), EncodeError> {
        self.buffer.clear();
        encode(self.version, command, &mut self.buffer)?;
        Ok(self.output.write_all(&self.buffer)?)
    }

    /// The output.
    pub fn into_inner(self) -> W {
        self.output
    }
}

fn data<'a>(command: &StreamCommand<'a>) -> &'a [u8] {
    match *command {
        StreamCommand::Write { data, .. } | StreamCommand::EncodedWrite { data, .. } => data,
        _ => &[],
    }
}

struct Encoder<'o> {
    kind: CommandKind,
    version: StreamVersion,
    start: usize,
    out: &'o mut Vec<u8>,
}

impl Encoder<'_> {
    fn all<E: From<EncodeError>>(
        &mut self,
        command: &StreamCommand<'_>,
        data_len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (kind, version) = (self.kind, self.version);
        if kind.since() > version {
            return Err(EncodeError::NotInVersion { kind, version }.into());
        }
        self.out.resize(self.start.saturating_add(HEADER_BYTES), 0);
        self.attributes(command)?;
        if matches!(kind, CommandKind::Write | CommandKind::EncodedWrite) {
            fill(self.data(data_len)?)?;
        }
        Ok(self.finish()?)
    }

    /// The attributes except `DATA`, in the order in which Linux writes them.
    fn attributes(&mut self, command: &StreamCommand<'_>) -> Result<(), EncodeError> {
        use Attribute as A;
        match *command {
            StreamCommand::Subvol { path, uuid, ctransid } => {
                self.bytes(A::Path, path)?.field(A::Uuid, uuid)?.field(A::Ctransid, ctransid)?
            }
            StreamCommand::Snapshot { path, uuid, ctransid, clone_uuid, clone_ctransid } => self
                .bytes(A::Path, path)?
                .field(A::Uuid, uuid)?
                .field(A::Ctransid, ctransid)?
                .field(A::CloneUuid, clone_uuid)?
                .field(A::CloneCtransid, clone_ctransid)?,
            StreamCommand::Mkfile { path, ino } | StreamCommand::Mkdir { path, ino } => {
                self.bytes(A::Path, path)?.field(A::Ino, ino)?
            }
            StreamCommand::Mknod { path, ino, rdev, mode }
            | StreamCommand::Mkfifo { path, ino, rdev, mode }
            | StreamCommand::Mksock { path, ino, rdev, mode } => {
                self.bytes(A::Path, path)?.field(A::Ino, ino)?.field(A::Rdev, rdev)?.field(A::Mode, mode)?
            }
            StreamCommand::Symlink { path, ino, target } => {
                self.bytes(A::Path, path)?.field(A::Ino, ino)?.bytes(A::PathLink, target)?
            }
            StreamCommand::Rename { path, to } => self.bytes(A::Path, path)?.bytes(A::PathTo, to)?,
            StreamCommand::Link { path, target } => self.bytes(A::Path, path)?.bytes(A::PathLink, target)?,
            StreamCommand::Unlink { path } | StreamCommand::Rmdir { path } => self.bytes(A::Path, path)?,
            StreamCommand::SetXattr { path, name, data } => {
                self.bytes(A::Path, path)?.bytes(A::XattrName, name)?.bytes(A::XattrData, data)?
            }
            StreamCommand::RemoveXattr { path, name } => self.bytes(A::Path, path)?.bytes(A::XattrName, name)?,
            StreamCommand::Write { path, offset, .. } => self.bytes(A::Path, path)?.field(A::FileOffset, offset)?,
            StreamCommand::Clone { offset, len, path, clone_uuid, clone_ctransid, clone_path, clone_offset } => self
                .field(A::FileOffset, offset)?
                .field(A::CloneLen, len)?
                .bytes(A::Path, path)?
                .field(A::CloneUuid, clone_uuid)?
                .field(A::CloneCtransid, clone_ctransid)?
                .bytes(A::ClonePath, clone_path)?
                .field(A::CloneOffset, clone_offset)?,
            StreamCommand::Truncate { path, size } => self.bytes(A::Path, path)?.field(A::Size, size)?,
            StreamCommand::Chmod { path, mode } => self.bytes(A::Path, path)?.field(A::Mode, mode)?,
            StreamCommand::Chown { path, uid, gid } => {
                self.bytes(A::Path, path)?.field(A::Uid, uid)?.field(A::Gid, gid)?
            }
            StreamCommand::Utimes { path, atime, mtime, ctime, otime } => {
                self.bytes(A::Path, path)?.field(A::Atime, atime)?.field(A::Mtime, mtime)?.field(A::Ctime, ctime)?;
                match otime {
                    Some(otime) if self.version >= StreamVersion::V2 => self.field(A::Otime, otime)?,
                    _ => self,
                }
            }
            StreamCommand::End => self,
            StreamCommand::UpdateExtent { path, offset, size } => {
                self.bytes(A::Path, path)?.field(A::FileOffset, offset)?.field(A::Size, size)?
            }
            StreamCommand::Fallocate { path, mode, offset, size } => self
                .bytes(A::Path, path)?
                .field(A::FallocateMode, mode)?
                .field(A::FileOffset, offset)?
                .field(A::Size, size)?,
            StreamCommand::Fileattr { path, attr } => self.bytes(A::Path, path)?.field(A::Fileattr, attr)?,
            StreamCommand::EncodedWrite {
                path,
                offset,
                unencoded_file_len,
                unencoded_len,
                unencoded_offset,
                compression,
                encryption,
                data: _,
            } => self
                .bytes(A::Path, path)?
                .field(A::FileOffset, offset)?
                .field(A::UnencodedFileLen, unencoded_file_len)?
                .field(A::UnencodedLen, unencoded_len)?
                .field(A::UnencodedOffset, unencoded_offset)?
                .optional(A::Compression, compression)?
                .optional(A::Encryption, encryption)?,
            StreamCommand::EnableVerity { path, algorithm, block_size, salt, signature } => self
                .bytes(A::Path, path)?
                .field(A::VerityAlgorithm, algorithm)?
                .field(A::VerityBlockSize, block_size)?
                .bytes(A::VeritySalt, salt)?
                .bytes(A::VeritySignature, signature)?,
        };
        Ok(())
    }

    fn bytes(&mut self, attribute: Attribute, value: &[u8]) -> Result<&mut Self, EncodeError> {
        use Attribute as A;
        if matches!(attribute, A::Path | A::PathTo | A::PathLink | A::ClonePath) && value.len() > PATH_BYTES_MAX {
            return Err(EncodeError::PathTooLong { kind: self.kind, len: value.len() });
        }
        self.head(attribute, value.len())?;
        self.out.extend_from_slice(value);
        Ok(self)
    }

    fn field<T: Field>(&mut self, attribute: Attribute, value: T) -> Result<&mut Self, EncodeError> {
        self.head(attribute, T::SIZE)?;
        value.write(self.out);
        Ok(self)
    }

    fn optional<T: Field>(&mut self, attribute: Attribute, value: Option<T>) -> Result<&mut Self, EncodeError> {
        match value {
            Some(value) => self.field(attribute, value),
            None => Ok(self),
        }
    }

    /// Appends the attribute `DATA`, and returns the slice of the output into which the caller must write `len` bytes.
    /// Since version 2 the length of `DATA` is not written: the data extends to the end of the command.
    fn data(&mut self, len: usize) -> Result<&mut [u8], EncodeError> {
        if self.version >= StreamVersion::V2 {
            if len > MAX_COMMAND_BYTES {
                return Err(EncodeError::TooLong { kind: self.kind, len });
            }
            self.out.extend_from_slice(&Attribute::Data.number().to_le_bytes());
        } else {
            self.head(Attribute::Data, len)?;
        }
        let at = self.out.len();
        self.out.resize(at.saturating_add(len), 0);
        Ok(self.out.get_mut(at..).unwrap_or_default())
    }

    fn head(&mut self, attribute: Attribute, len: usize) -> Result<(), EncodeError> {
        let short = u16::try_from(len).map_err(|_| EncodeError::TooLong { kind: self.kind, len })?;
        self.out.extend_from_slice(&attribute.number().to_le_bytes());
        self.out.extend_from_slice(&short.to_le_bytes());
        Ok(())
    }

    /// Fills in the head of the command.
    fn finish(&mut self) -> Result<(), EncodeError> {
        let max = if self.version == StreamVersion::V1 { MAX_COMMAND_BYTES_V1 } else { MAX_COMMAND_BYTES };
        let command = self.out.get_mut(self.start..).unwrap_or_default();
        let too_long = EncodeError::TooLong { kind: self.kind, len: command.len() };
        if command.len() > max {
            return Err(too_long);
        }
        let len = command.len().saturating_sub(HEADER_BYTES);
        let Ok(len) = u32::try_from(len) else { return Err(too_long) };
        let crc_place = 6..HEADER_BYTES;
        command.get_mut(..4).unwrap_or_default().copy_from_slice(&len.to_le_bytes());
        command.get_mut(4..6).unwrap_or_default().copy_from_slice(&self.kind.number().to_le_bytes());
        let crc = command_crc(command);
        command.get_mut(crc_place).unwrap_or_default().copy_from_slice(&crc.to_le_bytes());
        Ok(())
    }
}

//! [`parse`]: decodes a command from its bytes.

use ubtrfs_format::codec::{Field, Reader};
use ubtrfs_format::item::Timespec;
use uuid::Uuid;

use crate::command::{Attribute, CommandKind, StreamCommand, StreamVersion};
use crate::error::{StreamError, StreamProblem};
use crate::frame::{FrameHeader, HEADER_BYTES};

/// Parses a whole command, head included. The caller has verified the checksum of the command
/// ([`FrameHeader::verify`]).
///
/// Attributes with unknown numbers are ignored, as the format requires.
pub fn parse<'a>(header: &FrameHeader, command: &'a [u8]) -> Result<StreamCommand<'a>, StreamError> {
    let kind = CommandKind::from_number(header.number)
        .ok_or_else(|| header.problem(StreamProblem::UnknownCommand(header.number)))?;
    if kind.since() > header.version {
        return Err(header.problem(StreamProblem::NotInVersion { version: header.version }));
    }
    CommandAttributes::split(header.version, command.get(HEADER_BYTES..).unwrap_or_default())
        .and_then(|attributes| attributes.command(kind))
        .map_err(|problem| header.problem(problem))
}

/// The attributes of a command, by number.
struct CommandAttributes<'a>([Option<&'a [u8]>; SLOTS]);

/// One more than the highest attribute number.
const SLOTS: usize = 36;

impl<'a> CommandAttributes<'a> {
    fn split(version: StreamVersion, mut rest: &'a [u8]) -> Result<Self, StreamProblem> {
        let mut slots = [None; SLOTS];
        while !rest.is_empty() {
            let Some((number, after)) = rest.split_first_chunk::<2>() else {
                return Err(StreamProblem::AttributeBounds { number: 0 });
            };
            let number = u16::from_le_bytes(*number);
            let attribute = Attribute::from_number(number);
            let value;
            if version >= StreamVersion::V2 && attribute == Some(Attribute::Data) {
                (value, rest) = (after, &[]);
            } else {
                let bounds = || StreamProblem::AttributeBounds { number };
                let (len, after) = after.split_first_chunk::<2>().ok_or_else(bounds)?;
                let len = usize::from(u16::from_le_bytes(*len));
                (value, rest) = after.split_at_checked(len).ok_or_else(bounds)?;
            }
            let Some(attribute) = attribute else { continue };
            if slots.get_mut(usize::from(number)).is_some_and(|slot| slot.replace(value).is_some()) {
                return Err(StreamProblem::Twice(attribute));
            }
        }
        Ok(Self(slots))
    }

    fn command(&self, kind: CommandKind) -> Result<StreamCommand<'a>, StreamProblem> {
        use Attribute as A;
        if kind == CommandKind::End {
            return Ok(StreamCommand::End);
        }
        let path = self.bytes(A::Path)?;
        Ok(match kind {
            CommandKind::End => StreamCommand::End,
            CommandKind::Subvol => {
                StreamCommand::Subvol { path, uuid: self.uuid(A::Uuid)?, ctransid: self.number(A::Ctransid)? }
            }
            CommandKind::Snapshot => StreamCommand::Snapshot {
                path,
                uuid: self.uuid(A::Uuid)?,
                ctransid: self.number(A::Ctransid)?,
                clone_uuid: self.uuid(A::CloneUuid)?,
                clone_ctransid: self.number(A::CloneCtransid)?,
            },
            CommandKind::Mkfile => StreamCommand::Mkfile { path, ino: self.ino()? },
            CommandKind::Mkdir => StreamCommand::Mkdir { path, ino: self.ino()? },
            CommandKind::Mknod => StreamCommand::Mknod {
                path,
                ino: self.ino()?,
                rdev: self.number(A::Rdev)?,
                mode: self.number(A::Mode)?,
            },
            // The documentation of the format lists no rdev and mode for mkfifo and mksock, but Linux sends
            // them.
            CommandKind::Mkfifo => StreamCommand::Mkfifo {
                path,
                ino: self.ino()?,
                rdev: self.optional(A::Rdev)?.unwrap_or(0),
                mode: self.optional(A::Mode)?.unwrap_or(0),
            },
            CommandKind::Mksock => StreamCommand::Mksock {
                path,
                ino: self.ino()?,
                rdev: self.optional(A::Rdev)?.unwrap_or(0),
                mode: self.optional(A::Mode)?.unwrap_or(0),
            },
            CommandKind::Symlink => StreamCommand::Symlink { path, ino: self.ino()?, target: self.bytes(A::PathLink)? },
            CommandKind::Rename => StreamCommand::Rename { path, to: self.bytes(A::PathTo)? },
            CommandKind::Link => StreamCommand::Link { path, target: self.bytes(A::PathLink)? },
            CommandKind::Unlink => StreamCommand::Unlink { path },
            CommandKind::Rmdir => StreamCommand::Rmdir { path },
            CommandKind::SetXattr => {
                StreamCommand::SetXattr { path, name: self.bytes(A::XattrName)?, data: self.bytes(A::XattrData)? }
            }
            CommandKind::RemoveXattr => StreamCommand::RemoveXattr { path, name: self.bytes(A::XattrName)? },
            CommandKind::Write => {
                StreamCommand::Write { path, offset: self.number(A::FileOffset)?, data: self.bytes(A::Data)? }
            }
            CommandKind::Clone => StreamCommand::Clone {
                offset: self.number(A::FileOffset)?,
                len: self.number(A::CloneLen)?,
                path,
                clone_uuid: self.uuid(A::CloneUuid)?,
                clone_ctransid: self.number(A::CloneCtransid)?,
                clone_path: self.bytes(A::ClonePath)?,
                clone_offset: self.number(A::CloneOffset)?,
            },
            CommandKind::Truncate => StreamCommand::Truncate { path, size: self.number(A::Size)? },
            CommandKind::Chmod => StreamCommand::Chmod { path, mode: self.number(A::Mode)? },
            CommandKind::Chown => StreamCommand::Chown { path, uid: self.number(A::Uid)?, gid: self.number(A::Gid)? },
            CommandKind::Utimes => StreamCommand::Utimes {
                path,
                atime: self.time(A::Atime)?,
                mtime: self.time(A::Mtime)?,
                ctime: self.time(A::Ctime)?,
                otime: if self.get(A::Otime).is_some() { Some(self.time(A::Otime)?) } else { None },
            },
            CommandKind::UpdateExtent => {
                StreamCommand::UpdateExtent { path, offset: self.number(A::FileOffset)?, size: self.number(A::Size)? }
            }
            CommandKind::Fallocate => StreamCommand::Fallocate {
                path,
                mode: self.number(A::FallocateMode)?,
                offset: self.number(A::FileOffset)?,
                size: self.number(A::Size)?,
            },
            CommandKind::Fileattr => StreamCommand::Fileattr { path, attr: self.number(A::Fileattr)? },
            CommandKind::EncodedWrite => StreamCommand::EncodedWrite {
                path,
                offset: self.number(A::FileOffset)?,
                unencoded_file_len: self.number(A::UnencodedFileLen)?,
                unencoded_len: self.number(A::UnencodedLen)?,
                unencoded_offset: self.number(A::UnencodedOffset)?,
                compression: self.optional(A::Compression)?,
                encryption: self.optional(A::Encryption)?,
                data: self.bytes(A::Data)?,
            },
            CommandKind::EnableVerity => StreamCommand::EnableVerity {
                path,
                algorithm: self.number(A::VerityAlgorithm)?,
                block_size: self.number(A::VerityBlockSize)?,
                salt: self.get(A::VeritySalt).unwrap_or_default(),
                signature: self.get(A::VeritySignature).unwrap_or_default(),
            },
        })
    }

    fn get(&self, attribute: Attribute) -> Option<&'a [u8]> {
        self.0.get(usize::from(attribute.number())).copied().flatten()
    }

    fn bytes(&self, attribute: Attribute) -> Result<&'a [u8], StreamProblem> {
        self.get(attribute).ok_or(StreamProblem::Missing(attribute))
    }

    fn number<T: Field>(&self, attribute: Attribute) -> Result<T, StreamProblem> {
        let bytes = self.bytes(attribute)?;
        let wrong = StreamProblem::Length { attribute, found: bytes.len(), expected: T::SIZE };
        if bytes.len() != T::SIZE {
            return Err(wrong);
        }
        T::read(&mut Reader::new(attribute.name(), bytes)).map_err(|_| wrong)
    }

    fn optional<T: Field>(&self, attribute: Attribute) -> Result<Option<T>, StreamProblem> {
        if self.get(attribute).is_none() { Ok(None) } else { self.number(attribute).map(Some) }
    }

    fn uuid(&self, attribute: Attribute) -> Result<Uuid, StreamProblem> {
        self.number(attribute)
    }

    /// The inode number at the sender, or 0 if the stream has none: receivers do not need it, so some writers
    /// may omit it.
    fn ino(&self) -> Result<u64, StreamProblem> {
        Ok(self.optional(Attribute::Ino)?.unwrap_or(0))
    }

    fn time(&self, attribute: Attribute) -> Result<Timespec, StreamProblem> {
        let time: Timespec = self.number(attribute)?;
        if time.nsec >= 1_000_000_000 {
            let expected = "expected less than 1,000,000,000 nanoseconds";
            return Err(StreamProblem::Value { attribute, value: u64::from(time.nsec), expected });
        }
        Ok(time)
    }
}

//! Requests from the kernel.
//!
//! A request is a header, a struct of fixed size that depends on the opcode, and then names or data. In a read from
//! /dev/fuse, these parts follow each other; in a ring, the struct has a separate buffer.
//!
//! - P1. Decoding never panics, for any bytes. If needed bytes are missing, decoding returns `None`.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::wire::{InHeader, Setattr, opcode};

/// A request and its caller.
#[derive(Debug)]
pub struct FuseRequest<'a> {
    /// The number of the request.
    pub unique: u64,
    /// The inode that the request is about.
    pub node: u64,
    /// The caller's user.
    pub uid: u32,
    /// The caller's primary group.
    pub gid: u32,
    /// The calling thread.
    pub pid: u32,
    /// The requested operation.
    pub operation: Operation<'a>,
}

/// A requested operation. Names have no terminator; flags and modes have the values of the system calls.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the arguments of the system calls that they come from")]
pub enum Operation<'a> {
    Lookup {
        name: &'a [u8],
    },
    Getattr,
    /// Like `Getattr`, but the answer also contains the inode's birth time and flags.
    Statx,
    Setattr(Setattr),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod {
        name: &'a [u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: &'a [u8],
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    Rmdir {
        name: &'a [u8],
    },
    Rename {
        name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    Link {
        node: u64,
        name: &'a [u8],
    },
    Open {
        flags: i32,
    },
    Read {
        offset: u64,
        size: u32,
    },
    Write {
        handle: u64,
        /// Current flags of the open file, which `F_SETFL` may have changed since the open.
        flags: i32,
        offset: u64,
        data: &'a [u8],
        /// The data comes from the kernel's page cache, not directly from the writing program.
        from_cache: bool,
        clear_suid_sgid: bool,
    },
    Statfs,
    Release {
        handle: u64,
        flags: i32,
    },
    Fsync {
        handle: u64,
        datasync: bool,
    },
    Fsyncdir {
        datasync: bool,
    },
    /// Write out everything, for sync(2) and syncfs(2). The kernel sends this request only to servers of `fuseblk`
    /// mounts.
    Syncfs,
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a [u8],
    },
    Readdir {
        offset: u64,
        size: u32,
    },
    Readdirplus {
        offset: u64,
        size: u32,
    },
    Create {
        name: &'a [u8],
        flags: i32,
        mode: u32,
        umask: u32,
    },
    /// Makes and opens a file that has no name (`O_TMPFILE`). The request's inode is a directory.
    Tmpfile {
        flags: i32,
        mode: u32,
        umask: u32,
    },
    Ioctl {
        cmd: u32,
        data: &'a [u8],
        out_size: u32,
    },
    Fallocate {
        offset: u64,
        length: u64,
        mode: u32,
    },
    Lseek {
        offset: u64,
        whence: u32,
    },
    CopyFileRange {
        offset: u64,
        to_node: u64,
        to_offset: u64,
        len: u64,
        /// Whether the answer states the number of copied bytes in 64 bits, not in 32.
        is_long: bool,
    },
    /// The process that made the request `unique` got a signal.
    Interrupt {
        unique: u64,
    },
    /// Any other operation, by its opcode.
    Other(u32),
}

/// Length of the fixed part of a request in bytes.
pub(crate) fn fixed_len(number: u32) -> usize {
    match number {
        opcode::SETATTR => size_of::<Setattr>(),
        opcode::MKNOD | opcode::GETATTR | opcode::FSYNC | opcode::FSYNCDIR | opcode::RENAME2 => 16,
        opcode::CREATE | opcode::TMPFILE => 16,
        opcode::MKDIR | opcode::RENAME | opcode::LINK | opcode::OPEN | opcode::SYNCFS | opcode::INTERRUPT => 8,
        opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR => 8,
        opcode::READ | opcode::WRITE | opcode::READDIR | opcode::READDIRPLUS => 40,
        opcode::RELEASE | opcode::LSEEK | opcode::STATX => 24,
        opcode::IOCTL | opcode::FALLOCATE => 32,
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => 56,
        _ => 0,
    }
}

impl<'a> FuseRequest<'a> {
    /// Reads a request from its three parts. `None` if a part is too short (P1).
    pub(crate) fn decode(header: &InHeader, fixed: &[u8], rest: &'a [u8]) -> Option<Self> {
        let operation = Operation::decode(header.opcode, fixed, rest)?;
        let InHeader { unique, node, uid, gid, pid, .. } = *header;
        Some(Self { unique, node, uid, gid, pid, operation })
    }
}

impl<'a> Operation<'a> {
    fn decode(number: u32, fixed: &[u8], rest: &'a [u8]) -> Option<Self> {
        let mut names = RequestStrings(rest);
        Some(match number {
            opcode::LOOKUP => Self::Lookup { name: names.take()? },
            opcode::GETATTR => Self::Getattr,
            opcode::STATX => Self::Statx,
            opcode::SETATTR => Self::Setattr(take(fixed)?),
            opcode::READLINK => Self::Readlink,
            opcode::SYMLINK => Self::Symlink { name: names.take()?, target: names.take()? },
            opcode::MKNOD => {
                let [mode, rdev, umask, _]: [u32; 4] = take(fixed)?;
                Self::Mknod { name: names.take()?, mode, rdev, umask }
            }
            opcode::MKDIR => {
                let [mode, umask]: [u32; 2] = take(fixed)?;
                Self::Mkdir { name: names.take()?, mode, umask }
            }
            opcode::UNLINK => Self::Unlink { name: names.take()? },
            opcode::RMDIR => Self::Rmdir { name: names.take()? },
            opcode::RENAME => {
                let new_parent: u64 = take(fixed)?;
                Self::Rename { name: names.take()?, new_parent, new_name: names.take()?, flags: 0 }
            }
            opcode::RENAME2 => {
                let (new_parent, flags): (u64, u32) = (take(fixed)?, take(fixed.get(8..)?)?);
                Self::Rename { name: names.take()?, new_parent, new_name: names.take()?, flags }
            }
            opcode::LINK => Self::Link { node: take(fixed)?, name: names.take()? },
            opcode::OPEN => Self::Open { flags: take(fixed)? },
            opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
                let (offset, size): (u64, u32) = (take(fixed.get(8..)?)?, take(fixed.get(16..)?)?);
                match number {
                    opcode::READ => Self::Read { offset, size },
                    opcode::READDIR => Self::Readdir { offset, size },
                    _ => Self::Readdirplus { offset, size },
                }
            }
            opcode::WRITE => {
                let offset: u64 = take(fixed.get(8..)?)?;
                let [size, flags]: [u32; 2] = take(fixed.get(16..)?)?;
                let data = rest.get(..usize::try_from(size).ok()?)?;
                let (from_cache, clear_suid_sgid) = (flags & WRITE_CACHE != 0, flags & WRITE_KILL_SUIDGID != 0);
                let (handle, flags) = (take(fixed)?, take(fixed.get(32..)?)?);
                Self::Write { handle, flags, offset, data, from_cache, clear_suid_sgid }
            }
            opcode::STATFS => Self::Statfs,
            opcode::SYNCFS => Self::Syncfs,
            opcode::RELEASE => Self::Release { handle: take(fixed)?, flags: take(fixed.get(8..)?)? },
            opcode::FSYNC | opcode::FSYNCDIR => {
                let flags: u32 = take(fixed.get(8..)?)?;
                let datasync = flags & FSYNC_DATA != 0;
                match number {
                    opcode::FSYNC => Self::Fsync { handle: take(fixed)?, datasync },
                    _ => Self::Fsyncdir { datasync },
                }
            }
            opcode::SETXATTR => {
                let [size, flags]: [u32; 2] = take(fixed)?;
                let name = names.take()?;
                Self::Setxattr { name, value: names.0.get(..usize::try_from(size).ok()?)?, flags }
            }
            opcode::GETXATTR => Self::Getxattr { size: take(fixed)?, name: names.take()? },
            opcode::LISTXATTR => Self::Listxattr { size: take(fixed)? },
            opcode::REMOVEXATTR => Self::Removexattr { name: names.take()? },
            opcode::CREATE => {
                let flags: i32 = take(fixed)?;
                let [mode, umask]: [u32; 2] = take(fixed.get(4..)?)?;
                Self::Create { name: names.take()?, flags, mode, umask }
            }
            // TMPFILE has the struct of CREATE, and a name that the kernel made up.
            opcode::TMPFILE => {
                let flags: i32 = take(fixed)?;
                let [mode, umask]: [u32; 2] = take(fixed.get(4..)?)?;
                Self::Tmpfile { flags, mode, umask }
            }
            opcode::IOCTL => {
                let cmd: u32 = take(fixed.get(12..)?)?;
                let [in_size, out_size]: [u32; 2] = take(fixed.get(24..)?)?;
                Self::Ioctl { cmd, data: rest.get(..usize::try_from(in_size).ok()?)?, out_size }
            }
            opcode::FALLOCATE => {
                let [offset, length]: [u64; 2] = take(fixed.get(8..)?)?;
                Self::Fallocate { offset, length, mode: take(fixed.get(24..)?)? }
            }
            opcode::LSEEK => Self::Lseek { offset: take(fixed.get(8..)?)?, whence: take(fixed.get(16..)?)? },
            opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => {
                let [offset, to_node, _, to_offset, len]: [u64; 5] = take(fixed.get(8..)?)?;
                let is_long = number == opcode::COPY_FILE_RANGE_64;
                Self::CopyFileRange { offset, to_node, to_offset, len, is_long }
            }
            opcode::INTERRUPT => Self::Interrupt { unique: take(fixed)? },
            other => Self::Other(other),
        })
    }
}

/// The nodes to which FORGET or BATCH_FORGET gives back references, each with the number of these references.
pub(crate) fn forgotten(header: &InHeader, body: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let one = (header.opcode == opcode::FORGET).then(|| take(body)).flatten().map(|count: u64| (header.node, count));
    let nr = if header.opcode == opcode::BATCH_FORGET { take::<u32>(body).unwrap_or(0) } else { 0 };
    let rest = body.get(8..).unwrap_or_default();
    let many = rest.chunks_exact(16).take(nr as usize).filter_map(take::<[u64; 2]>).map(<(u64, u64)>::from);
    one.into_iter().chain(many)
}

fn take<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(value, _)| value)
}

/// Strings that follow each other, each ending in a zero byte.
struct RequestStrings<'a>(&'a [u8]);

impl<'a> RequestStrings<'a> {
    fn take(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        let (name, rest) = self.0.split_at(end);
        self.0 = rest.get(1..)?;
        Some(name)
    }
}

const WRITE_CACHE: u32 = 1;
const WRITE_KILL_SUIDGID: u32 = 1 << 2;
const FSYNC_DATA: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_requests_are_none() {
        for number in 0..60 {
            let header = InHeader { opcode: number, ..InHeader::default() };
            let bytes = [1; 200];
            for len in 0..bytes.len() {
                let fixed = &bytes[..len.min(fixed_len(number))];
                let _ = FuseRequest::decode(&header, fixed, &bytes[fixed.len()..len]);
                let _ = forgotten(&header, &bytes[..len]).count();
            }
            let needs_more = !matches!(Operation::decode(number, &[], &[]), None | Some(Operation::Other(_)));
            let nothing = [opcode::GETATTR, opcode::STATX, opcode::READLINK, opcode::STATFS, opcode::SYNCFS];
            assert_eq!(needs_more, nothing.contains(&number), "{number}");
        }
    }

    #[test]
    fn names_and_values_are_found() {
        let decoded = Operation::decode(opcode::SYMLINK, &[], b"name\0target\0").unwrap();
        assert!(matches!(decoded, Operation::Symlink { name: b"name", target: b"target" }));
        let fixed = [[3, 0, 0, 0], [1, 0, 0, 0]].concat();
        let decoded = Operation::decode(opcode::SETXATTR, &fixed, b"user.x\0abc").unwrap();
        assert!(matches!(decoded, Operation::Setxattr { name: b"user.x", value: b"abc", flags: 1 }));
        assert!(Operation::decode(opcode::SETXATTR, &fixed, b"user.x\0ab").is_none());
        let header = InHeader { opcode: opcode::BATCH_FORGET, ..InHeader::default() };
        let body: Vec<u8> = [2u64, 300, 1, 301, 5].iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(forgotten(&header, &body).collect::<Vec<_>>(), [(300, 1), (301, 5)]);
    }
}

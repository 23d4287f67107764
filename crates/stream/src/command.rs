//! [`StreamCommand`]: a command of a stream, with borrowed names and data. [`CommandKind`] and [`Attribute`] define the
//! numbers of commands and attributes.

use std::fmt;

use ubtrfs_format::item::Timespec;
use uuid::Uuid;

/// The version of a stream, which its header states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StreamVersion {
    /// Understood by all receivers.
    V1,
    /// Since Linux 6.0: large and encoded writes, fallocate, file attributes, creation times.
    V2,
    /// Experimental in Linux: fs-verity.
    V3,
}

impl StreamVersion {
    /// The version with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::V1,
            2 => Self::V2,
            3 => Self::V3,
            _ => return None,
        })
    }

    /// The number of the version.
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }
}

impl fmt::Display for StreamVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident: $($(#[$item_doc:meta])* $item:ident = $number:literal, $text:literal;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$item_doc])* $item,)* }

        impl $name {
            /// All values, in ascending order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$item),*];

            /// The value with this number.
            pub fn from_number(number: u16) -> Option<Self> {
                Some(match number { $($number => Self::$item,)* _ => return None })
            }

            /// The number that stands for this value in a stream.
            pub fn number(self) -> u16 {
                match self { $(Self::$item => $number,)* }
            }

            /// The name of the value.
            pub fn name(self) -> &'static str {
                match self { $(Self::$item => $text,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

numbered! {
    /// The kinds of commands, with the numbers that streams use for them. The names are those of `btrfs receive
    /// --dump`.
    CommandKind:
    /// Starts a subvolume.
    Subvol = 1, "subvol";
    /// Starts a subvolume as a snapshot of another.
    Snapshot = 2, "snapshot";
    /// Creates a regular file.
    Mkfile = 3, "mkfile";
    /// Creates a directory.
    Mkdir = 4, "mkdir";
    /// Creates a device node.
    Mknod = 5, "mknod";
    /// Creates a FIFO.
    Mkfifo = 6, "mkfifo";
    /// Creates a socket.
    Mksock = 7, "mksock";
    /// Creates a symbolic link.
    Symlink = 8, "symlink";
    /// Renames or moves an inode.
    Rename = 9, "rename";
    /// Adds a name to an inode.
    Link = 10, "link";
    /// Removes a name of a file.
    Unlink = 11, "unlink";
    /// Removes an empty directory.
    Rmdir = 12, "rmdir";
    /// Sets an extended attribute.
    SetXattr = 13, "set_xattr";
    /// Removes an extended attribute.
    RemoveXattr = 14, "remove_xattr";
    /// Writes data.
    Write = 15, "write";
    /// Makes a range of a file share the data of a range of the same or another file.
    Clone = 16, "clone";
    /// Sets the size of a file.
    Truncate = 17, "truncate";
    /// Sets the mode.
    Chmod = 18, "chmod";
    /// Sets owner and group.
    Chown = 19, "chown";
    /// Sets the times.
    Utimes = 20, "utimes";
    /// Ends the stream.
    End = 21, "end";
    /// States the range of a file that changed, without the data.
    UpdateExtent = 22, "update_extent";
    /// Preallocates space, or punches a hole; version 2.
    Fallocate = 23, "fallocate";
    /// Sets the flags of an inode; version 2.
    Fileattr = 24, "fileattr";
    /// Writes data in its compressed form; version 2.
    EncodedWrite = 25, "encoded_write";
    /// Enables fs-verity; version 3.
    EnableVerity = 26, "enable_verity";
}

impl CommandKind {
    /// The first version of the stream that has this command.
    pub fn since(self) -> StreamVersion {
        match self.number() {
            0..=22 => StreamVersion::V1,
            23..=25 => StreamVersion::V2,
            _ => StreamVersion::V3,
        }
    }
}

numbered! {
    /// The number of an attribute.
    Attribute:
    /// UUID of the sent subvolume.
    Uuid = 1, "uuid";
    /// Ctransid of the sent subvolume.
    Ctransid = 2, "ctransid";
    /// Inode number at the sender.
    Ino = 3, "ino";
    /// A size in bytes.
    Size = 4, "size";
    /// Mode of an inode.
    Mode = 5, "mode";
    /// Owner.
    Uid = 6, "uid";
    /// Group.
    Gid = 7, "gid";
    /// Device number.
    Rdev = 8, "rdev";
    /// Time of the last change of the inode.
    Ctime = 9, "ctime";
    /// Time of the last change of the data.
    Mtime = 10, "mtime";
    /// Time of the last access.
    Atime = 11, "atime";
    /// Time of the creation.
    Otime = 12, "otime";
    /// Name of an extended attribute.
    XattrName = 13, "xattr_name";
    /// Value of an extended attribute.
    XattrData = 14, "xattr_data";
    /// The path that the command is about.
    Path = 15, "path";
    /// New path.
    PathTo = 16, "path_to";
    /// Existing path of a link; target of a symbolic link.
    PathLink = 17, "path_link";
    /// Offset in the file.
    FileOffset = 18, "file_offset";
    /// Data.
    Data = 19, "data";
    /// UUID of the subvolume to clone from.
    CloneUuid = 20, "clone_uuid";
    /// Ctransid of the subvolume to clone from.
    CloneCtransid = 21, "clone_ctransid";
    /// Path of the file to clone from.
    ClonePath = 22, "clone_path";
    /// Offset in the file to clone from.
    CloneOffset = 23, "clone_offset";
    /// Bytes to clone.
    CloneLen = 24, "clone_len";
    /// Mode bits of `fallocate(2)`.
    FallocateMode = 25, "fallocate_mode";
    /// Flags of the inode, as the inode item has them.
    Fileattr = 26, "fileattr";
    /// Number of the file's bytes that the encoded data represents.
    UnencodedFileLen = 27, "unencoded_file_len";
    /// Length of the decoded data.
    UnencodedLen = 28, "unencoded_len";
    /// Offset in the decoded data at which the file's bytes start.
    UnencodedOffset = 29, "unencoded_offset";
    /// How the data is compressed.
    Compression = 30, "compression";
    /// How the data is encrypted.
    Encryption = 31, "encryption";
    /// Hash algorithm of fs-verity.
    VerityAlgorithm = 32, "verity_algorithm";
    /// Block size of fs-verity.
    VerityBlockSize = 33, "verity_block_size";
    /// Salt of fs-verity.
    VeritySalt = 34, "verity_salt_data";
    /// Signature of fs-verity.
    VeritySignature = 35, "verity_sig_data";
}

/// One command of a stream. Names and data are borrowed.
///
/// Paths are relative to the subvolume, except those of [`Subvol`](Self::Subvol) and [`Snapshot`](Self::Snapshot),
/// which are relative to the directory of the receive. Paths are untrusted: resolve them with
/// [`StreamPath`](crate::StreamPath).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the attributes of the same names")]
pub enum StreamCommand<'a> {
    Subvol {
        path: &'a [u8],
        uuid: Uuid,
        ctransid: u64,
    },
    Snapshot {
        path: &'a [u8],
        uuid: Uuid,
        ctransid: u64,
        clone_uuid: Uuid,
        clone_ctransid: u64,
    },
    Mkfile {
        path: &'a [u8],
        ino: u64,
    },
    Mkdir {
        path: &'a [u8],
        ino: u64,
    },
    Mknod {
        path: &'a [u8],
        ino: u64,
        rdev: u64,
        mode: u64,
    },
    Mkfifo {
        path: &'a [u8],
        ino: u64,
        rdev: u64,
        mode: u64,
    },
    Mksock {
        path: &'a [u8],
        ino: u64,
        rdev: u64,
        mode: u64,
    },
    Symlink {
        path: &'a [u8],
        ino: u64,
        target: &'a [u8],
    },
    Rename {
        path: &'a [u8],
        to: &'a [u8],
    },
    /// Makes `path` another name of `target`.
    Link {
        path: &'a [u8],
        target: &'a [u8],
    },
    Unlink {
        path: &'a [u8],
    },
    Rmdir {
        path: &'a [u8],
    },
    SetXattr {
        path: &'a [u8],
        name: &'a [u8],
        data: &'a [u8],
    },
    RemoveXattr {
        path: &'a [u8],
        name: &'a [u8],
    },
    Write {
        path: &'a [u8],
        offset: u64,
        data: &'a [u8],
    },
    /// Makes `len` bytes of `path` at `offset` share the extents of the source file: `clone_path` in the subvolume
    /// `clone_uuid`, at `clone_offset`.
    Clone {
        offset: u64,
        len: u64,
        path: &'a [u8],
        clone_uuid: Uuid,
        clone_ctransid: u64,
        clone_path: &'a [u8],
        clone_offset: u64,
    },
    Truncate {
        path: &'a [u8],
        size: u64,
    },
    Chmod {
        path: &'a [u8],
        mode: u64,
    },
    Chown {
        path: &'a [u8],
        uid: u64,
        gid: u64,
    },
    /// Sets times. `otime` is part of the command since version 2.
    Utimes {
        path: &'a [u8],
        atime: Timespec,
        mtime: Timespec,
        ctime: Timespec,
        otime: Option<Timespec>,
    },
    End,
    UpdateExtent {
        path: &'a [u8],
        offset: u64,
        size: u64,
    },
    /// `mode` has the bits of `fallocate(2)`.
    Fallocate {
        path: &'a [u8],
        mode: u32,
        offset: u64,
        size: u64,
    },
    /// Sets the flags of an inode: `attr` has the bits of the inode item's flags.
    Fileattr {
        path: &'a [u8],
        attr: u64,
    },
    /// Without `compression` or `encryption`, the data is not compressed or not encrypted. Linux leaves `encryption`
    /// out for inline extents.
    EncodedWrite {
        path: &'a [u8],
        offset: u64,
        unencoded_file_len: u64,
        unencoded_len: u64,
        unencoded_offset: u64,
        compression: Option<u32>,
        encryption: Option<u32>,
        data: &'a [u8],
    },
    EnableVerity {
        path: &'a [u8],
        algorithm: u8,
        block_size: u32,
        salt: &'a [u8],
        signature: &'a [u8],
    },
}

impl<'a> StreamCommand<'a> {
    /// The number of the command.
    pub fn kind(&self) -> CommandKind {
        match self {
            Self::Subvol { .. } => CommandKind::Subvol,
            Self::Snapshot { .. } => CommandKind::Snapshot,
            Self::Mkfile { .. } => CommandKind::Mkfile,
            Self::Mkdir { .. } => CommandKind::Mkdir,
            Self::Mknod { .. } => CommandKind::Mknod,
            Self::Mkfifo { .. } => CommandKind::Mkfifo,
            Self::Mksock { .. } => CommandKind::Mksock,
            Self::Symlink { .. } => CommandKind::Symlink,
            Self::Rename { .. } => CommandKind::Rename,
            Self::Link { .. } => CommandKind::Link,
            Self::Unlink { .. } => CommandKind::Unlink,
            Self::Rmdir { .. } => CommandKind::Rmdir,
            Self::SetXattr { .. } => CommandKind::SetXattr,
            Self::RemoveXattr { .. } => CommandKind::RemoveXattr,
            Self::Write { .. } => CommandKind::Write,
            Self::Clone { .. } => CommandKind::Clone,
            Self::Truncate { .. } => CommandKind::Truncate,
            Self::Chmod { .. } => CommandKind::Chmod,
            Self::Chown { .. } => CommandKind::Chown,
            Self::Utimes { .. } => CommandKind::Utimes,
            Self::End => CommandKind::End,
            Self::UpdateExtent { .. } => CommandKind::UpdateExtent,
            Self::Fallocate { .. } => CommandKind::Fallocate,
            Self::Fileattr { .. } => CommandKind::Fileattr,
            Self::EncodedWrite { .. } => CommandKind::EncodedWrite,
            Self::EnableVerity { .. } => CommandKind::EnableVerity,
        }
    }

    /// The path that the command is about; none for [`End`](Self::End).
    pub fn path(&self) -> Option<&'a [u8]> {
        match *self {
            Self::End => None,
            Self::Subvol { path, .. }
            | Self::Snapshot { path, .. }
            | Self::Mkfile { path, .. }
            | Self::Mkdir { path, .. }
            | Self::Mknod { path, .. }
            | Self::Mkfifo { path, .. }
            | Self::Mksock { path, .. }
            | Self::Symlink { path, .. }
            | Self::Rename { path, .. }
            | Self::Link { path, .. }
            | Self::Unlink { path }
            | Self::Rmdir { path }
            | Self::SetXattr { path, .. }
            | Self::RemoveXattr { path, .. }
            | Self::Write { path, .. }
            | Self::Clone { path, .. }
            | Self::Truncate { path, .. }
            | Self::Chmod { path, .. }
            | Self::Chown { path, .. }
            | Self::Utimes { path, .. }
            | Self::UpdateExtent { path, .. }
            | Self::Fallocate { path, .. }
            | Self::Fileattr { path, .. }
            | Self::EncodedWrite { path, .. }
            | Self::EnableVerity { path, .. } => Some(path),
        }
    }
}

/// The values of [`StreamCommand::EncodedWrite`]'s `compression`, as Linux's ioctl for encoded I/O numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodedCompression {
    /// Not compressed.
    None,
    /// zlib.
    Zlib,
    /// zstd.
    Zstd,
    /// LZO, compressed in units of the sender's sector size.
    Lzo {
        /// The sector size in bytes: a power of two from 4096 to 65536.
        sectorsize: u32,
    },
}

impl EncodedCompression {
    /// The method with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::None,
            1 => Self::Zlib,
            2 => Self::Zstd,
            3 => Self::Lzo { sectorsize: 4 << 10 },
            4 => Self::Lzo { sectorsize: 8 << 10 },
            5 => Self::Lzo { sectorsize: 16 << 10 },
            6 => Self::Lzo { sectorsize: 32 << 10 },
            7 => Self::Lzo { sectorsize: 64 << 10 },
            _ => return None,
        })
    }

    /// The number of the method; `None` for LZO with a sector size that the ioctl does not know.
    pub fn number(self) -> Option<u32> {
        Some(match self {
            Self::None => 0,
            Self::Zlib => 1,
            Self::Zstd => 2,
            Self::Lzo { sectorsize: 0x1000 } => 3,
            Self::Lzo { sectorsize: 0x2000 } => 4,
            Self::Lzo { sectorsize: 0x4000 } => 5,
            Self::Lzo { sectorsize: 0x8000 } => 6,
            Self::Lzo { sectorsize: 0x1_0000 } => 7,
            Self::Lzo { .. } => return None,
        })
    }
}

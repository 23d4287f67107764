//! Arguments and results of the methods of [`Fs`](crate::Fs).

use ubtrfs_format::item::{FileType, InodeItem, RootFlags, RootItem, Timespec};
use ubtrfs_format::{Generation, Ino, RootId};
use uuid::Uuid;

/// An inode: its subvolume and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId {
    /// The subvolume's tree.
    pub root: RootId,
    /// The inode number in the subvolume.
    pub ino: Ino,
}

impl InodeId {
    /// The root directory of a subvolume.
    pub fn root_of(root: RootId) -> Self {
        Self { root, ino: Ino::ROOT_DIR }
    }

    /// The empty directory that `root` shows under the name of a subvolume that lies elsewhere: a snapshot copies the
    /// name of a nested subvolume, but not the subvolume. The directory has no inode on disk. The directory's number is
    /// the subvolume's id plus a bit that no inode on disk has.
    pub fn stub(root: RootId, subvolume: RootId) -> Self {
        Self { root, ino: Ino(STUBS | subvolume.0) }
    }

    /// Whether this is a directory made by `InodeId::stub`.
    pub(crate) fn is_stub(self) -> bool {
        self.ino.0 & STUBS != 0
    }

    /// The subvolume that this stub directory stands for; `None` for every other inode.
    pub fn stub_of(self) -> Option<RootId> {
        self.is_stub().then_some(RootId(self.ino.0 & !STUBS))
    }
}

/// Bit set in the numbers of [`InodeId::stub`]. Inodes on disk have numbers from 256 on, which stay below this bit.
const STUBS: u64 = 1 << 63;
/// The largest size of a file, in bytes.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;
/// The highest number that an inode gets.
pub(crate) const LAST_INO: u64 = STUBS - 1;

/// The attributes of an inode that `stat` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// The inode.
    pub id: InodeId,
    /// `st_size`.
    pub size: u64,
    /// `st_blocks`, units of 512 bytes.
    pub blocks: u64,
    /// Whether `blocks` stays as it is until the next change. Otherwise writeback of pending data may change it.
    pub blocks_are_final: bool,
    /// `st_mode` with its type bits.
    pub mode: u32,
    /// Hard links; 1 for every directory.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number as FUSE encodes it; see [`rdev_parts`].
    pub rdev: u32,
    /// Last access.
    pub atime: Timespec,
    /// Last change of content.
    pub mtime: Timespec,
    /// Last change of attributes.
    pub ctime: Timespec,
    /// Creation.
    pub otime: Timespec,
    /// Bits of [`InodeFlags`](ubtrfs_format::item::InodeFlags) as on disk.
    pub flags: u64,
    /// Transaction that created the inode.
    pub generation: Generation,
    /// `st_blksize`.
    pub blksize: u32,
}

impl Attr {
    /// The type of file, if the mode holds a valid one.
    pub fn file_type(&self) -> Option<FileType> {
        FileType::from_mode(self.mode)
    }

    /// Whether the inode is a directory.
    pub fn is_dir(&self) -> bool {
        self.mode & mode::TYPE == mode::DIRECTORY
    }
}

/// Bits of `st_mode`.
pub mod mode {
    /// All type bits.
    pub const TYPE: u32 = 0o170_000;
    /// Socket.
    pub const SOCKET: u32 = 0o140_000;
    /// Symbolic link.
    pub const SYMLINK: u32 = 0o120_000;
    /// Regular file.
    pub const REGULAR: u32 = 0o100_000;
    /// Block device.
    pub const BLOCK: u32 = 0o060_000;
    /// Directory.
    pub const DIRECTORY: u32 = 0o040_000;
    /// Character device.
    pub const CHAR: u32 = 0o020_000;
    /// FIFO.
    pub const FIFO: u32 = 0o010_000;
    /// Set user id.
    pub const SETUID: u32 = 0o4_000;
    /// Set group id.
    pub const SETGID: u32 = 0o2_000;
    /// All mode bits below the type bits.
    pub const PERMISSIONS: u32 = 0o7_777;
}

/// Joins major (12 bits) and minor (20 bits) into the 32-bit device number of FUSE and `st_rdev`.
pub fn rdev_from_parts(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12)
}

/// Splits a device number into major and minor.
pub fn rdev_parts(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00))
}

/// The device number of an inode item, which stores `major << 20 | minor`.
pub(crate) fn rdev_of_item(item: &InodeItem) -> u32 {
    let low = u32::try_from(item.rdev & u64::from(u32::MAX)).unwrap_or_default();
    rdev_from_parts(low >> 20, low & 0xf_ffff)
}

/// Converts a device number to the value in an inode item.
pub(crate) fn rdev_to_item(rdev: u32) -> u64 {
    let (major, minor) = rdev_parts(rdev);
    u64::from(major) << 20 | u64::from(minor)
}

/// The user that makes a call. This crate checks only the right to change `trusted` attributes and inode flags; FUSE
/// checks access permissions (`default_permissions`). The caller also determines the owner and the mode of new inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// User; 0 is privileged.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bits removed from the mode of new inodes, unless the directory has a default ACL.
    pub umask: u32,
}

impl Caller {
    /// The superuser with no umask.
    pub const ROOT: Self = Self { uid: 0, gid: 0, umask: 0 };

    /// The rights to change inode flags that the caller's user id gives: all for the superuser, none for other users.
    pub fn flag_rights(&self) -> FlagRights {
        FlagRights { as_owner: self.is_privileged(), immutable: self.is_privileged() }
    }

    /// Whether the caller has every capability.
    pub fn is_privileged(&self) -> bool {
        self.uid == 0
    }
}

/// The rights to change inode flags that a caller's capabilities give. A caller without these rights can change the
/// flags of its own inodes only, and not +i and +a.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlagRights {
    /// May act as the owner of any inode (CAP_FOWNER).
    pub as_owner: bool,
    /// May set and clear +i and +a (CAP_LINUX_IMMUTABLE).
    pub immutable: bool,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The current time.
    Now,
    /// This time.
    At(Timespec),
}

/// The changes that [`Fs::setattr`](crate::Fs::setattr) makes. `None` leaves an attribute unchanged, except `ctime`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits (type bits are ignored).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Change time; `None` sets the current time.
    pub ctime: Option<Timespec>,
    /// Creation time, which archives and receive set.
    pub otime: Option<Timespec>,
}

/// A new inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewInode<'a> {
    /// Type and permission bits; no type bits mean a regular file.
    pub mode: u32,
    /// Device number of a device node, as [`rdev_from_parts`] makes it.
    pub rdev: u32,
    /// Target of a symbolic link.
    pub symlink_target: Option<&'a [u8]>,
    /// Whether the inode takes nothing from its directory: no group, ACL, flag or property. This is for receive, which
    /// gets the attributes of each inode from the stream.
    pub inherits_nothing: bool,
}

impl NewInode<'_> {
    /// A regular file.
    pub fn file(permissions: u32) -> Self {
        Self { mode: mode::REGULAR | permissions & mode::PERMISSIONS, ..Self::default() }
    }

    /// A directory.
    pub fn dir(permissions: u32) -> Self {
        Self { mode: mode::DIRECTORY | permissions & mode::PERMISSIONS, ..Self::default() }
    }
}

impl<'a> NewInode<'a> {
    /// A symbolic link.
    pub fn symlink(target: &'a [u8]) -> Self {
        Self { mode: mode::SYMLINK | 0o777, symlink_target: Some(target), ..Self::default() }
    }
}

bitflags::bitflags! {
    /// `renameat2` flags, with Linux's values.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RenameFlags: u32 {
        /// Fail if the target exists.
        const NOREPLACE = 1;
        /// Swap source and target.
        const EXCHANGE = 2;
        /// Leave a whiteout (character device 0:0) in place of the source.
        const WHITEOUT = 4;
    }
}

bitflags::bitflags! {
    /// `fallocate` mode, with Linux's values.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct FallocateMode: u32 {
        /// Do not change the file's size.
        const KEEP_SIZE = 1;
        /// Make a hole.
        const PUNCH_HOLE = 2;
        /// Remove the range and close the gap.
        const COLLAPSE_RANGE = 8;
        /// Make the range read as zeros.
        const ZERO_RANGE = 16;
        /// Insert a gap.
        const INSERT_RANGE = 32;
        /// Unshare extents.
        const UNSHARE_RANGE = 64;
    }
}

/// The target of [`Fs::seek`](crate::Fs::seek).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekWhence {
    /// The next byte that is data.
    Data,
    /// The next byte in a hole; the end of the file counts as a hole.
    Hole,
}

bitflags::bitflags! {
    /// `setxattr` flags, with Linux's values.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct XattrFlags: u32 {
        /// Fail if the attribute exists.
        const CREATE = 1;
        /// Fail if the attribute does not exist.
        const REPLACE = 2;
    }
}

/// An entry that [`Fs::readdir`](crate::Fs::readdir) passes to its callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntryOut<'a> {
    /// The inode; for a subvolume its root directory.
    pub id: InodeId,
    /// The name.
    pub name: &'a [u8],
    /// The type of the inode.
    pub file_type: FileType,
    /// The cookie for the call that continues after this entry.
    pub next_cookie: u64,
}

/// The numbers that `statfs` shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Size of a block in bytes, which is the sector size.
    pub bsize: u32,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub bfree: u64,
    /// Blocks available to data.
    pub bavail: u64,
    /// Number of inodes: always 0, because btrfs makes inodes as needed.
    pub files: u64,
    /// Free inodes: 0.
    pub ffree: u64,
    /// Longest name in bytes.
    pub namelen: u32,
    /// Filesystem id of the mounted subvolume, as the kernel derives it.
    pub fsid: [u32; 2],
}

/// A subvolume, as [`Fs::subvolumes`](crate::Fs::subvolumes) lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubvolumeInfo {
    /// Its tree.
    pub id: RootId,
    /// Path from the top level, without a leading slash; empty for the top level itself.
    pub path: Vec<u8>,
    /// Id of the subvolume that holds this subvolume's name; `None` for the top level.
    pub parent: Option<RootId>,
    /// Inode number of the directory that holds the subvolume's name.
    pub dirid: Ino,
    /// Flags.
    pub flags: RootFlags,
    /// UUID; nil if the subvolume has none.
    pub uuid: Uuid,
    /// UUID of the subvolume that this is a snapshot of; nil if it is no snapshot.
    pub parent_uuid: Uuid,
    /// UUID of the sent subvolume that this subvolume was received from.
    pub received_uuid: Uuid,
    /// Generation of the root item: the last transaction that wrote the subvolume's root node.
    pub generation: Generation,
    /// Transaction that created the subvolume.
    pub otransid: Generation,
    /// Last transaction that changed the subvolume's content.
    pub ctransid: Generation,
    /// The `ctransid` of the sent subvolume, on the sender's side.
    pub stransid: Generation,
    /// Transaction in which the subvolume was received.
    pub rtransid: Generation,
    /// Creation time of the subvolume.
    pub otime: Timespec,
    /// Time of the last change to the subvolume's content.
    pub ctime: Timespec,
    /// Time of sending, on the sender's side; receive leaves it 0.
    pub stime: Timespec,
    /// Time of receiving.
    pub rtime: Timespec,
}

impl SubvolumeInfo {
    /// The last name of its path; empty for the top level.
    pub fn name(&self) -> &[u8] {
        self.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// Describes a subvolume by its root item, which does not tell its path and its parent.
    pub fn without_name(id: RootId, item: &RootItem) -> Self {
        Self {
            id,
            path: Vec::new(),
            parent: None,
            dirid: Ino(0),
            flags: RootFlags::from_bits_retain(item.flags),
            uuid: item.uuid,
            parent_uuid: item.parent_uuid,
            received_uuid: item.received_uuid,
            generation: item.generation,
            otransid: item.otransid,
            ctransid: item.ctransid,
            stransid: item.stransid,
            rtransid: item.rtransid,
            otime: item.otime,
            ctime: item.ctime,
            stime: item.stime,
            rtime: item.rtime,
        }
    }
}

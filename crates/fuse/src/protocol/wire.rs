//! The protocol's structs, in the machine's byte order. Unused fields are kept, because they determine the offsets of
//! the fields after them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Numbers of requests.
pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const ACCESS: u32 = 34;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const SYNCFS: u32 = 50;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
    pub(crate) const COPY_FILE_RANGE_64: u32 = 53;

    /// The name of an operation in statistics.
    pub(crate) fn name(opcode: u32) -> &'static str {
        match opcode {
            LOOKUP => "lookup",
            FORGET => "forget",
            GETATTR => "getattr",
            SETATTR => "setattr",
            READLINK => "readlink",
            SYMLINK => "symlink",
            MKNOD => "mknod",
            MKDIR => "mkdir",
            UNLINK => "unlink",
            RMDIR => "rmdir",
            RENAME => "rename",
            LINK => "link",
            OPEN => "open",
            READ => "read",
            WRITE => "write",
            STATFS => "statfs",
            RELEASE => "release",
            FSYNC => "fsync",
            SETXATTR => "setxattr",
            GETXATTR => "getxattr",
            LISTXATTR => "listxattr",
            REMOVEXATTR => "removexattr",
            FLUSH => "flush",
            INIT => "init",
            OPENDIR => "opendir",
            READDIR => "readdir",
            RELEASEDIR => "releasedir",
            FSYNCDIR => "fsyncdir",
            ACCESS => "access",
            CREATE => "create",
            INTERRUPT => "interrupt",
            DESTROY => "destroy",
            IOCTL => "ioctl",
            BATCH_FORGET => "batch_forget",
            FALLOCATE => "fallocate",
            READDIRPLUS => "readdirplus",
            RENAME2 => "rename2",
            LSEEK => "lseek",
            COPY_FILE_RANGE => "copy_file_range",
            SYNCFS => "syncfs",
            TMPFILE => "tmpfile",
            STATX => "statx",
            COPY_FILE_RANGE_64 => "copy_file_range_64",
            _ => "other",
        }
    }
}

/// `struct fuse_in_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) total_extlen: u16,
    pub(crate) padding: u16,
}

/// `struct fuse_out_header`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OutHeader {
    pub(crate) len: u32,
    pub(crate) error: i32,
    pub(crate) unique: u64,
}

/// A point in time. Nanoseconds count forward, also before 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds, below 10^9.
    pub nsec: u32,
}

/// `struct fuse_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs, reason = "the fields of stat(2)")]
pub struct FuseAttr {
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    pub atime: i64,
    pub mtime: i64,
    pub ctime: i64,
    pub atimensec: u32,
    pub mtimensec: u32,
    pub ctimensec: u32,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub blksize: u32,
    pub flags: u32,
}

impl FuseAttr {
    /// Sets the time of the last read.
    pub fn set_atime(&mut self, time: Time) {
        (self.atime, self.atimensec) = (time.sec, time.nsec);
    }

    /// Sets the time of the last change of content.
    pub fn set_mtime(&mut self, time: Time) {
        (self.mtime, self.mtimensec) = (time.sec, time.nsec);
    }

    /// Sets the time of the last change of content or attributes.
    pub fn set_ctime(&mut self, time: Time) {
        (self.ctime, self.ctimensec) = (time.sec, time.nsec);
    }
}

/// `struct fuse_setattr_in`: the attributes to change.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Setattr {
    valid: u32,
    padding: u32,
    fh: u64,
    size: u64,
    lock_owner: u64,
    atime: i64,
    mtime: i64,
    ctime: i64,
    atimensec: u32,
    mtimensec: u32,
    ctimensec: u32,
    mode: u32,
    unused4: u32,
    uid: u32,
    gid: u32,
    unused5: u32,
}

impl Setattr {
    fn has(&self, bit: u32) -> bool {
        self.valid & 1 << bit != 0
    }

    /// Whether the request sets no attribute.
    pub fn is_empty(&self) -> bool {
        const SETS: u32 = 0b101_1011_1111;
        self.valid & SETS == 0
    }

    /// Whether the kernel wants set-user-id and set-group-id cleared: the request changes the size, and the caller is
    /// not allowed to keep these bits.
    pub fn kills_suid_sgid(&self) -> bool {
        self.has(11)
    }

    /// The new mode, with the file's type.
    pub fn mode(&self) -> Option<u32> {
        self.has(0).then_some(self.mode)
    }

    /// The new owner.
    pub fn uid(&self) -> Option<u32> {
        self.has(1).then_some(self.uid)
    }

    /// The new group.
    pub fn gid(&self) -> Option<u32> {
        self.has(2).then_some(self.gid)
    }

    /// Whether the change was requested on an open file, as by ftruncate, not on a path.
    pub fn is_by_handle(&self) -> bool {
        self.has(6)
    }

    /// The new size in bytes.
    pub fn size(&self) -> Option<u64> {
        self.has(3).then_some(self.size)
    }

    /// The new access time; the inner `None` means the server's current time.
    pub fn atime(&self) -> Option<Option<Time>> {
        let given = Time { sec: self.atime, nsec: self.atimensec };
        self.has(4).then_some((!self.has(7)).then_some(given))
    }

    /// The new modification time; the inner `None` means the server's current time.
    pub fn mtime(&self) -> Option<Option<Time>> {
        let given = Time { sec: self.mtime, nsec: self.mtimensec };
        self.has(5).then_some((!self.has(8)).then_some(given))
    }

    /// The new ctime.
    pub fn ctime(&self) -> Option<Time> {
        self.has(10).then_some(Time { sec: self.ctime, nsec: self.ctimensec })
    }
}

/// `struct fuse_kstatfs`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs, reason = "the fields of statfs(2)")]
pub struct Statfs {
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub bsize: u32,
    pub namelen: u32,
    pub frsize: u32,
    pub padding: u32,
    pub spare: [u32; 6],
}

/// `struct fuse_entry_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct EntryOut {
    pub(crate) node: u64,
    pub(crate) generation: u64,
    pub(crate) entry_valid: u64,
    pub(crate) attr_valid: u64,
    pub(crate) entry_valid_nsec: u32,
    pub(crate) attr_valid_nsec: u32,
    pub(crate) attr: FuseAttr,
}

/// `struct fuse_attr_out`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct AttrOut {
    pub(crate) valid: u64,
    pub(crate) valid_nsec: u32,
    pub(crate) padding: u32,
    pub(crate) attr: FuseAttr,
}

/// `struct fuse_sx_time`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatxTime {
    pub(crate) sec: i64,
    pub(crate) nsec: u32,
    pub(crate) reserved: i32,
}

impl From<Time> for StatxTime {
    fn from(time: Time) -> Self {
        Self { sec: time.sec, nsec: time.nsec, reserved: 0 }
    }
}

/// `struct fuse_statx_out` with its `struct fuse_statx`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatxOut {
    pub(crate) valid: u64,
    pub(crate) valid_nsec: u32,
    pub(crate) out_flags: u32,
    pub(crate) spare: [u64; 2],
    pub(crate) mask: u32,
    pub(crate) blksize: u32,
    pub(crate) attributes: u64,
    pub(crate) nlink: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u16,
    pub(crate) spare0: u16,
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    pub(crate) attributes_mask: u64,
    pub(crate) atime: StatxTime,
    pub(crate) btime: StatxTime,
    pub(crate) ctime: StatxTime,
    pub(crate) mtime: StatxTime,
    pub(crate) rdev: [u32; 2],
    pub(crate) dev: [u32; 2],
    pub(crate) spare2: [u64; 14],
}

/// `struct fuse_open_out`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OpenOut {
    pub(crate) fh: u64,
    pub(crate) flags: u32,
    pub(crate) backing_id: i32,
}

/// `struct fuse_dirent` without its name.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Dirent {
    pub(crate) ino: u64,
    pub(crate) cookie: u64,
    pub(crate) name_len: u32,
    pub(crate) kind: u32,
}

/// `struct fuse_ioctl_out`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct IoctlOut {
    pub(crate) result: i32,
    pub(crate) flags: u32,
    pub(crate) in_iovs: u32,
    pub(crate) out_iovs: u32,
}

/// `struct fuse_notify_inval_inode_out`, preceded by the header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InvalInode {
    pub(crate) header: OutHeader,
    pub(crate) node: u64,
    pub(crate) offset: i64,
    pub(crate) len: i64,
}

/// `struct fuse_notify_inval_entry_out`, preceded by the header; the name and a zero byte follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InvalEntry {
    pub(crate) header: OutHeader,
    pub(crate) parent: u64,
    pub(crate) namelen: u32,
    pub(crate) flags: u32,
}

/// `struct fuse_init_in` of protocol 7.36.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitIn {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    pub(crate) flags2: u32,
    pub(crate) unused: [u32; 11],
}

/// `struct fuse_init_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitOut {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    pub(crate) max_background: u16,
    pub(crate) congestion_threshold: u16,
    pub(crate) max_write: u32,
    pub(crate) time_gran: u32,
    pub(crate) max_pages: u16,
    pub(crate) map_alignment: u16,
    pub(crate) flags2: u32,
    pub(crate) max_stack_depth: u32,
    pub(crate) request_timeout: u16,
    pub(crate) unused: [u16; 11],
}

const _: () = {
    assert!(size_of::<InHeader>() == 40 && size_of::<OutHeader>() == 16);
    assert!(size_of::<FuseAttr>() == 88 && size_of::<Setattr>() == 88 && size_of::<Statfs>() == 80);
    assert!(size_of::<EntryOut>() == 128 && size_of::<AttrOut>() == 104 && size_of::<OpenOut>() == 16);
    assert!(size_of::<Dirent>() == 24 && size_of::<IoctlOut>() == 16 && size_of::<InvalInode>() == 40);
    assert!(size_of::<InvalEntry>() == 32 && size_of::<StatxOut>() == 32 + 256);
    assert!(size_of::<InitIn>() == 64 && size_of::<InitOut>() == 64);
};

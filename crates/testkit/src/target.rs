//! The operations on a filesystem under test, through a mount or in-process.
//!
//! I1. Paths are relative to the root, without a leading slash; the empty path is the root. Errors are errno values.

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names of the POSIX file types")]
pub enum NodeKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// The way in which a rename treats an existing target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameOp {
    /// Replaces the target.
    Replace,
    /// Fails with EEXIST.
    NoReplace,
    /// Swaps source and target.
    Exchange,
}

/// The mode of a fallocate call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallocateOp {
    /// Allocates, and may grow the file.
    Allocate,
    /// Allocates without changing the size.
    KeepSize,
    /// Punches a hole.
    PunchHole,
    /// Zeros a range, and may grow the file.
    ZeroRange,
}

/// An errno value.
pub type Errno = i32;

/// The error number of a full filesystem.
pub(crate) const NOSPC: Errno = rustix::io::Errno::NOSPC.raw_os_error();

/// A filesystem under test.
pub trait Target {
    /// Creates a file, directory, fifo, socket or device with exactly this mode.
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno>;
    /// Creates a symbolic link.
    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno>;
    /// Adds a name to a file.
    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno>;
    /// Removes a name of anything but a directory.
    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno>;
    /// Removes an empty directory.
    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno>;
    /// Renames a file or directory.
    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno>;
    /// Writes into a file.
    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno>;
    /// Reads up to `len` bytes.
    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno>;
    /// Changes a file's size.
    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno>;
    /// Allocates, punches or zeros.
    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno>;
    /// Copies a whole range between files, as a reflink where possible.
    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno>;
    /// Changes permission bits.
    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno>;
    /// Changes owner and group of a file, or of a symlink itself and not of its target.
    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno>;
    /// Sets the modification time of a file, or of a symlink itself and not of its target.
    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno>;
    /// Sets the access time of a file, or of a symlink itself and not of its target. Fails with EOPNOTSUPP on targets
    /// without access times.
    fn set_atime(&mut self, _path: &[u8], _atime: (i64, u32)) -> Result<(), Errno> {
        Err(rustix::io::Errno::OPNOTSUPP.raw_os_error())
    }
    /// Sets the inode flags of chattr(1), as FS_IOC_SETFLAGS numbers them. Fails with EOPNOTSUPP on targets without
    /// flags.
    fn set_flags(&mut self, _path: &[u8], _flags: u32) -> Result<(), Errno> {
        Err(rustix::io::Errno::OPNOTSUPP.raw_os_error())
    }
    /// Sets an extended attribute.
    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno>;
    /// Removes an extended attribute.
    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno>;
    /// Makes a file durable.
    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno>;
    /// Makes everything durable.
    fn sync(&mut self) -> Result<(), Errno>;
}

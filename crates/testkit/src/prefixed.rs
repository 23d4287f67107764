//! [`Prefixed`]: a target that works in one directory of another target, so that each of several threads can work in a
//! separate directory.

use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
use crate::tree_entry::join;

/// A target whose paths are relative to a directory of the inner target.
#[derive(Clone, Debug)]
pub(crate) struct Prefixed<T> {
    pub(crate) inner: T,
    prefix: Vec<u8>,
    /// The syncs (`None`) and the fsyncs (`Some`, with the path) since this list was last emptied.
    pub(crate) fresh: Vec<Option<Vec<u8>>>,
}

impl<T> Prefixed<T> {
    pub(crate) fn new(inner: T, prefix: &str) -> Self {
        Self { inner, prefix: prefix.as_bytes().to_vec(), fresh: Vec::new() }
    }

    fn at(&self, path: &[u8]) -> Vec<u8> {
        if path.is_empty() { self.prefix.clone() } else { join(&self.prefix, path) }
    }
}

impl<T: Target> Target for Prefixed<T> {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        self.inner.create(&self.at(path), kind, mode, rdev)
    }
    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        self.inner.symlink(&self.at(path), content)
    }
    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        self.inner.link(&self.at(old), &self.at(new))
    }
    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.unlink(&self.at(path))
    }
    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.rmdir(&self.at(path))
    }
    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        self.inner.rename(&self.at(old), &self.at(new), op)
    }
    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.inner.write(&self.at(path), offset, data)
    }
    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.inner.read(&self.at(path), offset, len)
    }
    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        self.inner.truncate(&self.at(path), len_bytes)
    }
    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        self.inner.fallocate(&self.at(path), offset, len_bytes, op)
    }
    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        self.inner.copy_range(&self.at(from), from_at, &self.at(to), to_at, len_bytes)
    }
    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        self.inner.chmod(&self.at(path), mode)
    }
    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        self.inner.chown(&self.at(path), uid, gid)
    }
    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno> {
        self.inner.set_mtime(&self.at(path), mtime)
    }
    fn set_atime(&mut self, path: &[u8], atime: (i64, u32)) -> Result<(), Errno> {
        self.inner.set_atime(&self.at(path), atime)
    }
    fn set_flags(&mut self, path: &[u8], flags: u32) -> Result<(), Errno> {
        self.inner.set_flags(&self.at(path), flags)
    }
    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.inner.set_xattr(&self.at(path), name, value)
    }
    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        self.inner.remove_xattr(&self.at(path), name)
    }
    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.fsync(&self.at(path))?;
        self.fresh.push(Some(path.to_vec()));
        Ok(())
    }
    fn sync(&mut self) -> Result<(), Errno> {
        self.inner.sync()?;
        self.fresh.push(None);
        Ok(())
    }
}

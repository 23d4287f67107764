//! A target that records a [`History`]: it passes operations on, records promises in the history, and notes on the
//! recording device after which write each promise was made.

use std::sync::Arc;

use ubtrfs_format::Generation;

use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
use crate::{FsTarget, History, Model, RecordingDevice};

/// An open filesystem on a recording device.
#[derive(Debug)]
pub(crate) struct RecordingTarget {
    pub(crate) inner: FsTarget,
    device: Arc<RecordingDevice>,
    /// The syncs (`None`) and the fsyncs (`Some`, with the path) since the last [`RecordingTarget::after`].
    fresh: Vec<Option<Vec<u8>>>,
    generation: Generation,
}

impl RecordingTarget {
    pub(crate) fn new(inner: FsTarget, device: Arc<RecordingDevice>) -> Self {
        let generation = inner.fs().superblock().generation;
        Self { inner, device, fresh: Vec::new(), generation }
    }

    /// Tells the history if a background commit has happened since the last step.
    pub(crate) fn before(&mut self, history: &mut History) {
        let generation = self.inner.fs().superblock().generation;
        if generation != std::mem::replace(&mut self.generation, generation) {
            history.may_commit();
        }
    }

    /// Records a step: the model's state after it, and the promises made.
    pub(crate) fn after(&mut self, history: &mut History, model: &Model) {
        let generation = self.inner.fs().superblock().generation;
        let committed = generation != std::mem::replace(&mut self.generation, generation);
        if committed && self.fresh.is_empty() {
            // The step contains no sync or fsync, so the commit happened at an unknown time within the step.
            history.may_commit();
            history.may_commit_within();
        }
        history.push(model.clone());
        if committed {
            history.may_commit();
        }
        for promise in std::mem::take(&mut self.fresh) {
            let made = match promise {
                None => history.sync(),
                Some(path) => history.fsync(&path),
            };
            self.device.mark(made as u64);
        }
    }
}

impl Target for RecordingTarget {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        self.inner.create(path, kind, mode, rdev)
    }
    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        self.inner.symlink(path, content)
    }
    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        self.inner.link(old, new)
    }
    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.unlink(path)
    }
    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.rmdir(path)
    }
    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        self.inner.rename(old, new, op)
    }
    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.inner.write(path, offset, data)
    }
    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.inner.read(path, offset, len)
    }
    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        self.inner.truncate(path, len_bytes)
    }
    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        self.inner.fallocate(path, offset, len_bytes, op)
    }
    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        self.inner.copy_range(from, from_at, to, to_at, len_bytes)
    }
    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        self.inner.chmod(path, mode)
    }
    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        self.inner.chown(path, uid, gid)
    }
    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno> {
        self.inner.set_mtime(path, mtime)
    }
    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.inner.set_xattr(path, name, value)
    }
    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        self.inner.remove_xattr(path, name)
    }
    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.fsync(path)?;
        self.fresh.push(Some(path.to_vec()));
        Ok(())
    }
    fn sync(&mut self) -> Result<(), Errno> {
        self.inner.sync()?;
        self.fresh.push(None);
        Ok(())
    }
}

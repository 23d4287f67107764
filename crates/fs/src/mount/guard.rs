//! Checks that a FUSE server makes before it acts, and the abort when it must stop.

use crate::Fs;
use crate::error::{Error, Result};
use crate::types::{Attr, InodeId};

impl Fs {
    /// Turns the filesystem read-only for good: no further commits, so the disk keeps the last one.
    pub fn abort(&self, reason: String) {
        self.engine.abort(reason);
    }

    /// Fails if the mount or the inode's subvolume is read-only. Meant for open: once a writer's data is in the
    /// kernel's page cache, the writer only learns that something failed.
    pub fn check_writable(&self, id: InodeId) -> Result<()> {
        if self.read_only().is_some() {
            return Err(Error::ReadOnlyMount);
        }
        self.inode_to_change(id).map(drop)
    }

    /// The attributes of an inode that a directory entry named, counted as a lookup. Fails with `NotFound` if the entry
    /// was removed in between.
    pub fn getattr_counted(&self, id: InodeId) -> Result<Attr> {
        let inode = self.inode(id).map_err(|error| match error {
            Error::Stale => Error::NotFound,
            other => other,
        })?;
        let state = inode.read()?;
        if state.item.nlink == 0 {
            return Err(Error::NotFound);
        }
        self.count_lookup(id);
        Ok(self.attr_of(&inode, &state))
    }
}

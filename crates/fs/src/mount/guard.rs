//! Calls that only a FUSE server needs: checks at open and lookup, and making the filesystem read-only if the server
//! fails.

use crate::Fs;
use crate::error::{Error, Result};
use crate::types::{Attr, InodeId};

impl Fs {
    /// Makes the filesystem read-only until it is closed. The disk keeps the last commit.
    pub fn abort(&self, reason: String) {
        self.engine.abort(reason);
    }

    /// Fails if the mount or the inode's subvolume is read-only. FUSE calls this at open: data in the kernel's page
    /// cache is written later, and the writer would then get only a general error.
    pub fn check_writable(&self, id: InodeId) -> Result<()> {
        if self.read_only().is_some() {
            return Err(Error::ReadOnlyMount);
        }
        self.inode_to_change(id).map(drop)
    }

    /// Returns the attributes of an inode that was found through a directory entry, and counts a lookup of it by the
    /// kernel. Fails with `NotFound` if the entry was removed in between.
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

//! What a server of the filesystem asks before, and does when it must stop.

use crate::Fs;
use crate::error::{Error, Result};
use crate::types::{Attr, InodeId};

impl Fs {
    /// Turns the filesystem read-only for good: nothing is committed any more, the disk keeps its last commit.
    pub fn abort(&self, reason: String) {
        self.engine.abort(reason);
    }

    /// Whether an inode may be changed at all: the mount and its subvolume are writable. For open, because a writer whose
    /// data waits in the kernel's page cache can be told later only that something failed.
    pub fn check_writable(&self, id: InodeId) -> Result<()> {
        if self.read_only().is_some() {
            return Err(Error::ReadOnlyMount);
        }
        self.inode_to_change(id).map(drop)
    }

    /// The attributes of an inode that a directory entry named, counted as a lookup. An entry that was removed in between
    /// is not found.
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

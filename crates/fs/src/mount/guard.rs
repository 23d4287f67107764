//! Calls that only a FUSE server needs: checks at open and lookup, and making the filesystem read-only if the server
//! fails.

use ubtrfs_format::Ino;

use crate::Fs;
use crate::error::{Error, Result};
use crate::file::write::check_not_read_only;
use crate::inode::cache::FoundInode;
use crate::inode::handle::load_item;
use crate::inode::state::attr_of_item;
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
        let inode = self.inode_to_change(id)?;
        check_not_read_only(&*inode.read()?)
    }

    /// Returns the attributes of an inode that was found through a directory entry, and counts a lookup of it by the
    /// kernel. Fails with `NotFound` if the entry was removed in between. Does not load the inode, because a reader of
    /// a directory seldom uses all files in it.
    pub fn getattr_counted(&self, id: InodeId) -> Result<Attr> {
        self.attr_of_entry(id).map_err(|error| match error {
            Error::Stale => Error::NotFound,
            other => other,
        })
    }

    fn attr_of_entry(&self, id: InodeId) -> Result<Attr> {
        self.engine.enter();
        // First, for the same reason as in `Fs::inode`.
        let subvolume = self.subvolume(id.root)?;
        // The root directory of a subvolume and a stub are more than their items.
        let has_own_item = id.ino != Ino::ROOT_DIR && !id.is_stub();
        let inode = match has_own_item.then(|| self.inodes.find_or_block(id)) {
            None => self.inode(id)?,
            Some(FoundInode::InMemory(inode)) if inode.home.is_gone() => return Err(Error::Stale),
            Some(FoundInode::InMemory(inode)) => inode,
            Some(FoundInode::Absent(_loading)) => {
                // A file that is not in memory has no pending data. While `_loading` exists, no thread changes the inode
                // or deletes it.
                let item = load_item(&subvolume.tree, id.ino)?;
                if item.nlink == 0 {
                    return Err(Error::NotFound);
                }
                self.count_lookup(id);
                return Ok(attr_of_item(id, &item, self.geometry.sectorsize, 0));
            }
        };
        let state = inode.read()?;
        if state.item.nlink == 0 {
            return Err(Error::NotFound);
        }
        self.count_lookup(id);
        Ok(self.attr_of(&inode, &state))
    }
}

//! Uses of inodes: opens, and lookups that the kernel remembers. The last use of an unlinked inode deletes the inode, and
//! the last use of a deleted subvolume ends the deletion of the subvolume.

use crate::Fs;
use crate::error::{Error, Result};
use crate::types::InodeId;
use ubtrfs_format::RootId;

impl Fs {
    /// Keeps the inode until [`Fs::release_inode`], even if it is unlinked.
    pub fn open_inode(&self, id: InodeId) -> Result<()> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        self.inodes.add_open(id);
        drop(state);
        if inode.home.is_gone() {
            self.release_inode(id);
            return Err(Error::Stale);
        }
        Ok(())
    }

    /// Releases a use of the inode that began with [`Fs::open_inode`]. Deletes the inode if it is unlinked and has no
    /// other users.
    pub fn release_inode(&self, id: InodeId) {
        if let Some(_deleting) = self.inodes.release(id) {
            self.delete_if_unlinked(id);
        }
        self.end_deletion(id);
    }

    /// Releases `n` lookups of the inode. Lookups are counted only with
    /// [`MountOptions::track_lookups`](crate::MountOptions::track_lookups).
    pub fn forget(&self, id: InodeId, n: u64) {
        if let Some(_deleting) = self.inodes.forget(id, n) {
            self.delete_if_unlinked(id);
        }
        self.end_deletion(id);
    }

    /// Releases all lookups of the inodes of a subvolume, because the kernel has forgotten all of them at once. No lookup
    /// may be added meanwhile.
    pub fn forget_all_of(&self, root: RootId) {
        for id in self.inodes.used_of(root) {
            self.forget(id, u64::MAX);
        }
    }
}

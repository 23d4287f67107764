//! Waits for threads that may still use old addresses of data.
//!
//! Invariants:
//! - I1. A thread that reads an extent looks it up and reads it under the file's state lock. A thread that replaces an
//!   extent looks it up and replaces it under the file's state lock or writeback lock. So when a thread has taken both
//!   locks of every inode in memory, one inode after the other, no other thread still uses an address that it looked up
//!   before.

use crate::inode::cache::InodeCache;

/// Waits until all threads that looked up addresses of data before this call have finished using them (I1), and drops
/// data cached by address.
pub(crate) fn wait_for_extent_users(inodes: &InodeCache) {
    for inode in inodes.all() {
        let _writeback = inode.writeback.lock();
        inode.state.write().data.extents_changed();
    }
}

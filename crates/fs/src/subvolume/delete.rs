//! Deleting subvolumes. Deletion removes the subvolume's name at once. The inodes are removed from memory when none of
//! them is in use any more, and later commits free the space ([`ubtrfs_transaction::Engine::drop_subvolume`]).
//!
//! ```text
//! [named] --remove_subvolume--> [deleted] --end_deletion, with its last user--> [gone] --commits--> nothing left
//! ```
//!
//! - I1. After [`Deletions::add`], no lookup finds the subvolume, and its root directory is empty and takes no names.
//!   Users that hold inodes by lookups or opens can still read, write, and make files in other directories.
//! - I2. Before the engine drops a tree, all of its inodes are out of memory and dead. Earlier work, such as deleting
//!   the items of an unlinked inode, may still be running, but the engine discards changes that are put into the tree
//!   afterwards.
//! - I3. A subvolume without a name has an `ORPHAN_ITEM` in the root tree until all of it is dropped, so the next mount
//!   after a crash continues the deletion.
//! - I4. Lock order: `Deletions::used` -> shards of the inode cache.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use ubtrfs_format::item::Timespec;
use ubtrfs_format::{Ino, Key, KeyType, RootId, objectid};

use crate::Fs;
use crate::error::{Error, Result};
use crate::file::truncate::forget_dirty_past;
use crate::inode::cache::InodeCache;
use crate::inode::xattr::check_may_change;
use crate::items::dir_item;
use crate::namei::create::entry_changed;
use crate::namei::link::{Locked, check_empty, check_may_remove};
use crate::subvolume::list::{root_ref, root_ref_keys, root_tree};
use crate::types::InodeId;

/// Subvolumes that were deleted since the filesystem was opened.
#[derive(Debug, Default)]
pub(crate) struct Deletions {
    deleted: Mutex<HashSet<RootId>>,
    /// Deleted subvolumes whose inodes may still be used, each with the inodes that the last search found in use. The
    /// next search waits until all of these inodes are unused.
    used: Mutex<HashMap<RootId, HashSet<InodeId>>>,
    nr_used: AtomicUsize,
}

impl Deletions {
    /// Whether this subvolume was deleted.
    pub(crate) fn has(&self, id: RootId) -> bool {
        self.deleted.lock().contains(&id)
    }

    fn add(&self, id: RootId) {
        self.deleted.lock().insert(id);
        self.used.lock().insert(id, HashSet::new());
        self.nr_used.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a use of an inode ended. Returns true if the inode's subvolume is deleted and none of its inodes is
    /// used; only one call for a subvolume returns true.
    fn was_last(&self, given_back: InodeId, inodes: &InodeCache) -> bool {
        let mut used = self.used.lock();
        let Some(known) = used.get_mut(&given_back.root) else { return false };
        if !inodes.is_used(given_back) {
            known.remove(&given_back);
        }
        if !known.is_empty() {
            return false;
        }
        *known = inodes.used_of(given_back.root);
        let is_last = known.is_empty();
        if is_last {
            used.remove(&given_back.root);
            self.nr_used.fetch_sub(1, Ordering::SeqCst);
        }
        is_last
    }
}

impl Fs {
    /// Deletes the subvolume with this name. If `expected` is given, the subvolume must have that id: a caller that
    /// checked the owner of `expected` must not delete another subvolume. The space is freed in the background, or by
    /// [`Fs::finish_deletions`].
    ///
    /// Fails with `InvalidArgument` if the name is not that of a subvolume, `NotEmpty` if the subvolume holds other
    /// subvolumes, `Busy` if it is the mount's root, `InProgress` if a send uses it, and `NotPermitted` if it is the
    /// default subvolume, or if its root directory or `dir` is immutable or append-only.
    pub fn delete_subvolume(&self, dir: InodeId, name: &[u8], expected: Option<RootId>) -> Result<()> {
        self.remove_subvolume(dir, name, expected, false)
    }

    /// Deletes a subvolume like `Fs::delete_subvolume`; with `only_empty`, only if it has no entries.
    pub(crate) fn remove_subvolume(
        &self,
        dir: InodeId,
        name: &[u8],
        expected: Option<RootId>,
        only_empty: bool,
    ) -> Result<()> {
        let _subvolumes = self.subvolumes.lock();
        let dir_inode = self.inode_to_change(dir)?;
        let roots = root_tree(&self.engine)?;
        loop {
            let (id, sequence) = self.find_subvolume(dir, name)?;
            if expected.is_some_and(|expected| expected != id) {
                return Err(Error::NotFound);
            }
            let reservation = self.reserve_for_subvolume_deletion()?;
            self.check_may_delete(id)?;
            let subvolume = self.subvolume(id)?;
            let root_dir = self.inode(InodeId { root: id, ino: Ino::ROOT_DIR })?;
            // Lock the root directory of the deleted subvolume too, so that the names in it do not change.
            let mut locked = Locked::new(&mut [&dir_inode, &root_dir])?;
            if locked.of(&dir_inode).item.sequence != sequence {
                continue;
            }
            check_may_remove(locked.of(&dir_inode))?;
            check_may_change(locked.of(&root_dir))?;
            if only_empty {
                check_empty(&root_dir, locked.of(&root_dir))?;
            }
            let root_ref = root_ref(&roots, dir.root, id)?.ok_or(Error::NotFound)?;
            let mut changes = Vec::with_capacity(2);
            dir_item::plan_remove(&mut changes, &dir_inode.home.tree, dir.ino, name, root_ref.sequence)?;

            let (down, up) = root_ref_keys(dir.root, id);
            let op = self.engine.begin(reservation);
            dir_item::put_changes(&op, &dir_inode.home.tree, changes);
            let state = locked.of(&dir_inode);
            entry_changed(state, Timespec::now(), None, Some(name));
            dir_inode.put_item(&op, state);
            op.delete(&roots, down);
            op.delete(&roots, up);
            op.put(&roots, Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, id.0), []);
            op.delete_subvolume(id);
            // A tree log does not record the deletion. So later fsyncs in this transaction commit, instead of writing a
            // log.
            op.note_directory_moved();
            drop(op);
            locked.of(&root_dir).removed = true;
            subvolume.mark_deleted();
            self.subvolumes.deletions.add(id);
            drop(locked);
            self.end_deletion(root_dir.id);
            return Ok(());
        }
    }

    fn check_may_delete(&self, id: RootId) -> Result<()> {
        if id == self.root().root {
            return Err(Error::Busy("it is the mount's root"));
        }
        self.subvolumes.sends.check_not_kept(id)?;
        if id == self.default_subvolume()? {
            return Err(Error::NotPermitted("the subvolume is the default subvolume; set another default first"));
        }
        let start = Key::new(id.0, KeyType::ROOT_REF, 0);
        let end = Key::new(id.0, KeyType::ROOT_REF, u64::MAX);
        if root_tree(&self.engine)?.first_ge(&start, &end)?.is_some() {
            return Err(Error::NotEmpty);
        }
        Ok(())
    }

    /// Ends the deletion of a subvolume if `given_back` was its last used inode.
    pub(crate) fn end_deletion(&self, given_back: InodeId) {
        if self.subvolumes.deletions.nr_used.load(Ordering::SeqCst) > 0
            && self.subvolumes.deletions.was_last(given_back, &self.inodes)
        {
            self.let_go(given_back.root);
        }
    }

    /// The inodes in use of a deleted subvolume, without its root directory and inodes that have no name: for each, its
    /// directory and one of its names.
    pub fn used_names_of_deleted(&self, id: RootId) -> Vec<(InodeId, Vec<u8>)> {
        match self.subvolumes.get(id) {
            Some(found) if found.is_deleted() => self.used_names_of(id),
            _ => Vec::new(),
        }
    }

    /// The inodes in use of a subvolume, without its root directory and inodes that have no name: for each, its
    /// directory and one of its names.
    pub fn used_names_of(&self, id: RootId) -> Vec<(InodeId, Vec<u8>)> {
        let Some(tree) = self.subvolumes.get(id).map(|found| found.tree.clone()) else { return Vec::new() };
        let inodes = self.inodes.used_of(id).into_iter().filter(|inode| inode.ino != Ino::ROOT_DIR);
        let first_name = |inode: InodeId| dir_item::first_link(&tree, inode.ino).ok().flatten();
        inodes.filter_map(first_name).map(|(dir, name)| (InodeId { root: id, ino: dir }, name)).collect()
    }

    /// The inodes in use of a subvolume.
    pub fn used_inodes_of(&self, id: RootId) -> Vec<InodeId> {
        self.inodes.used_of(id).into_iter().collect()
    }

    /// Ends the deletion of all deleted subvolumes, even with inodes in use: the filesystem is being closed.
    pub(crate) fn end_all_deletions(&self) {
        let used = std::mem::take(&mut *self.subvolumes.deletions.used.lock());
        self.subvolumes.deletions.nr_used.store(0, Ordering::SeqCst);
        if self.read_only().is_none() {
            used.into_keys().for_each(|id| self.let_go(id));
        }
    }

    /// Drops a deleted subvolume: first its inodes (I2), then its tree.
    fn let_go(&self, id: RootId) {
        if let Some(subvolume) = self.subvolumes.forget(id) {
            subvolume.mark_gone();
        }
        // Inodes are made under the lock of a directory, so new inodes may appear until all directories are dead.
        loop {
            let inodes = self.inodes.all_of(id);
            if inodes.is_empty() {
                break;
            }
            for inode in inodes {
                let _writeback = inode.writeback.lock();
                let mut state = inode.state.write();
                state.dead = true;
                forget_dirty_past(self, &mut state, 0);
                drop(state);
                self.inodes.remove(inode.id);
            }
        }
        self.engine.drop_subvolume(id);
        self.commit_thread.note_change();
    }

    /// Frees the space of deleted subvolumes now. Calls `progress` with the number of subvolumes left. An error from
    /// `progress` ends the call, and the work continues in the background. Fails if the tree of a subvolume cannot be
    /// read; the rest of that tree stays allocated.
    pub fn finish_deletions(&self, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        loop {
            let nr_left = self.engine.nr_dead_roots();
            progress(nr_left)?;
            if nr_left == 0 {
                return self.engine.take_drop_failure().map_or(Ok(()), |error| Err(error.into()));
            }
            self.engine.commit()?;
        }
    }
}

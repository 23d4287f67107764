//! Deleting subvolumes. Deletion removes the subvolume's name at once. The inodes are removed from memory when no inode
//! of the subvolume is in use any more, and later commits free the space
//! ([`ubtrfs_transaction::Engine::drop_subvolume`]).
//!
//! ```text
//! [named] --remove_subvolume--> [deleted] --end_deletion, with its last user--> [gone] --commits--> nothing left
//! ```
//!
//! - I1. After `EnteredSubvolumes::note_deleted`, no lookup finds the subvolume, and its root directory is empty and
//!   takes no names. Users that hold inodes by lookups or opens can still read, write, and make files in other
//!   directories.
//! - I2. A subvolume without a name has an `ORPHAN_ITEM` in the root tree until all of it is dropped, so the next mount
//!   after a crash continues the deletion.

use ubtrfs_format::item::Timespec;
use ubtrfs_format::{Ino, Key, KeyType, RootId, objectid};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::location::{root_ref, root_ref_keys, root_tree};
use crate::inode::xattr::check_may_change;
use crate::items::dir_item;
use crate::namei::create::entry_changed;
use crate::namei::link::{Locked, check_empty, check_may_remove};
use crate::session::context::MetadataPurpose;
use crate::types::InodeId;

impl Fs {
    /// Removes a name of an inode that is not a directory.
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        self.remove_inode(dir, name, false).map(drop)
    }

    /// Removes an empty directory or an empty subvolume.
    pub fn rmdir(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        match name {
            b"." => return Err(Error::InvalidArgument("'.' cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        match self.remove_inode(dir, name, true)? {
            true => Ok(()),
            false => self.remove_subvolume(dir, name, None, true),
        }
    }

    /// Deletes the subvolume with this name. If `expected` is given, the subvolume must have that id: a caller that
    /// checked the owner of `expected` must not delete another subvolume. The space is freed in the background, or by
    /// [`Fs::finish_deletions`].
    ///
    /// Fails with `InvalidArgument` if the name does not belong to a subvolume, `NotEmpty` if the subvolume holds other
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
            let reservation = self.context.reserve(MetadataPurpose::SubvolumeDeletion)?;
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
            self.entered.note_deleted(id);
            self.names.deletions.add(id);
            drop(locked);
            self.end_deletion(root_dir.id);
            return Ok(());
        }
    }

    fn check_may_delete(&self, id: RootId) -> Result<()> {
        if id == self.context.root().root {
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

    /// The inodes in use of a deleted subvolume, without its root directory and inodes that have no name: for each, its
    /// directory and one of its names.
    pub fn used_names_of_deleted(&self, id: RootId) -> Vec<(InodeId, Vec<u8>)> {
        match self.entered.get(id) {
            Some(found) if found.is_deleted() => self.used_names_of(id),
            _ => Vec::new(),
        }
    }

    /// The inodes in use of a subvolume, without its root directory and inodes that have no name: for each, its
    /// directory and one of its names.
    pub fn used_names_of(&self, id: RootId) -> Vec<(InodeId, Vec<u8>)> {
        let Some(tree) = self.entered.get(id).map(|found| found.tree.clone()) else { return Vec::new() };
        let inodes = self.inodes.used_of(id).into_iter().filter(|inode| inode.ino != Ino::ROOT_DIR);
        let first_name = |inode: InodeId| dir_item::first_link(&tree, inode.ino).ok().flatten();
        inodes.filter_map(first_name).map(|(dir, name)| (InodeId { root: id, ino: dir }, name)).collect()
    }

    /// The inodes in use of a subvolume.
    pub fn used_inodes_of(&self, id: RootId) -> Vec<InodeId> {
        self.inodes.used_of(id).into_iter().collect()
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

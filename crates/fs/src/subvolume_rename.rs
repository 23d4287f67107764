//! A subvolume gets another name, in whatever directory of its filesystem.
//!
//! - I1. The subvolume lock is held: which subvolume lies in which does not change meanwhile.

use std::sync::Arc;

use ubtrfs_format::RootId;
use ubtrfs_format::item::{FileType, RootRef};

use crate::Fs;
use crate::create::{check_dir_takes_names, entry_changed, next_index};
use crate::dir_item::{self, HashedName, NameSlot};
use crate::error::{Error, Result};
use crate::fs::now;
use crate::inode::Inode;
use crate::link::{Locked, check_may_remove};
use crate::subvolume_list::{root_ref, root_ref_keys, root_tree};
use crate::types::RenameFlags;

impl Fs {
    /// Renames the subvolume `id`, found at the first name, to the second one, which must not exist.
    pub(crate) fn rename_subvolume(
        &self,
        id: RootId,
        (dir, name): (&Arc<Inode>, &[u8]),
        (new_dir, new_name): (&Arc<Inode>, &[u8]),
        flags: RenameFlags,
    ) -> Result<()> {
        if flags.intersects(RenameFlags::EXCHANGE | RenameFlags::WHITEOUT) {
            return Err(Error::NotPermitted("subvolumes are not exchanged, and leave no whiteouts"));
        }
        let _subvolumes = self.subvolume_lock.lock();
        let roots = root_tree(&self.engine)?;
        loop {
            let reservation = self.reserve(RENAME_ITEMS)?;
            let (found, sequence) = self.find_subvolume(dir.id, name)?;
            if found != id {
                return Err(Error::NotFound);
            }
            if (&dir.id, name) == (&new_dir.id, new_name) {
                return Ok(());
            }
            if self.is_inside_subvolume(new_dir.id.root, id)? {
                return Err(Error::InvalidArgument("a subvolume cannot be moved into itself"));
            }
            let mut locked = Locked::new(&mut [dir, new_dir])?;
            if locked.of(dir).item.sequence != sequence {
                continue;
            }
            check_may_remove(locked.of(dir))?;
            check_dir_takes_names(locked.of(new_dir))?;
            let slot = NameSlot::read(&new_dir.home.tree, new_dir.id.ino, new_name)?;
            slot.check_free()?;
            let index = next_index(new_dir, locked.of(new_dir))?;
            let old_index = root_ref(&roots, dir.id.root, id)?.ok_or(Error::NotFound)?.sequence;
            let new_ref = RootRef { dirid: new_dir.id.ino.0, sequence: index, name: new_name.to_vec() }.encode();
            let target = (dir_item::subvolume_location(id), FileType::Directory as u8);

            // In one list where both names are in one tree: their hashes may be the same.
            let (mut changes, mut others) = (Vec::with_capacity(4), Vec::new());
            let is_one_tree = dir.id.root == new_dir.id.root;
            dir_item::plan_remove(&mut changes, &dir.home.tree, dir.id.ino, name, old_index)?;
            let additions = if is_one_tree { &mut changes } else { &mut others };
            let tree = &new_dir.home.tree;
            dir_item::plan_add(additions, tree, &self.geometry, new_dir.id.ino, new_name, target, index)?;

            let time = now();
            let op = self.engine.begin(reservation);
            dir_item::put_changes(&op, &dir.home.tree, changes);
            dir_item::put_changes(&op, tree, others);
            locked.of(new_dir).next_index = Some(index + 1);
            entry_changed(locked.of(dir), time, None, Some(name));
            entry_changed(locked.of(new_dir), time, Some(HashedName::from(new_name)), None);
            dir.put_item(&op, locked.of(dir));
            new_dir.put_item(&op, locked.of(new_dir));
            let ((down, up), (new_down, new_up)) = (root_ref_keys(dir.id.root, id), root_ref_keys(new_dir.id.root, id));
            op.delete(&roots, down);
            op.delete(&roots, up);
            op.put(&roots, new_down, &new_ref);
            op.put(&roots, new_up, &new_ref);
            // What is below it is found by another path.
            op.note_directory_moved();
            return Ok(());
        }
    }

    /// Whether a subvolume is `ancestor`, or lies below it.
    fn is_inside_subvolume(&self, mut id: RootId, ancestor: RootId) -> Result<bool> {
        for _ in 0..MAX_NESTING {
            if id == ancestor {
                return Ok(true);
            }
            match self.place_of(id)? {
                Some(place) => id = place.parent,
                None => return Ok(false),
            }
        }
        Err(dir_item::corrupt("parent", id.0, "expected subvolumes that lead up to the top level"))
    }
}

/// Two names out and in, both directories, both references twice.
const RENAME_ITEMS: usize = 16;
/// Damaged references that form a loop end here.
const MAX_NESTING: usize = 4096;

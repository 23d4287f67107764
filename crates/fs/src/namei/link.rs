//! Adding and removing names of existing inodes.

use std::sync::Arc;

use ubtrfs_format::Ino;
use ubtrfs_format::item::{FileType, InodeFlags, InodeItem, Timespec};
use ubtrfs_transaction::TransHandle;
use ubtrfs_transaction::lock_rank::WriteGuard;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::state::{Inode, InodeState};
use crate::inode::xattr::check_may_change;
use crate::items::dir_item::{self, NameSlot, PlannedChange};
use crate::items::quota_blocks;
use crate::namei::create::{check_dir_takes_names, entry_changed, next_index, orphan_key};
use crate::namei::orphan::{LastItems, UnloadedItems};
use crate::session::context::MetadataPurpose;
use crate::types::{Attr, InodeId};

/// Locked states of several inodes, locked in the order of their ids.
pub(crate) struct Locked<'i> {
    states: Vec<(InodeId, WriteGuard<'i, InodeState>)>,
}

impl<'i> Locked<'i> {
    /// Locks the inodes; duplicates are locked once.
    pub(crate) fn new(inodes: &mut [&'i Arc<Inode>]) -> Result<Self> {
        inodes.sort_unstable_by_key(|inode| inode.id);
        let mut states: Vec<(InodeId, _)> = Vec::with_capacity(inodes.len());
        for inode in inodes {
            if states.last().is_none_or(|(last, _)| *last != inode.id) {
                states.push((inode.id, inode.write()?));
            }
        }
        Ok(Self { states })
    }

    /// The state of one of the inodes.
    pub(crate) fn of(&mut self, inode: &Inode) -> &mut InodeState {
        let at = self.states.iter().position(|(id, _)| *id == inode.id);
        let at = at.expect("the caller locked this inode");
        &mut self.states[at].1
    }
}

/// A name that will be removed.
struct Victim<'n> {
    slot: NameSlot<'n>,
    /// The inode that the name leads to.
    id: InodeId,
    /// The directory's sequence number when the name was found.
    sequence: u64,
}

impl Fs {
    /// Adds a name to an inode, in the inode's own subvolume.
    pub fn link(&self, id: InodeId, dir: InodeId, name: &[u8]) -> Result<Attr> {
        dir_item::check_new_name(name)?;
        if id.root != dir.root {
            return Err(Error::CrossDevice);
        }
        let (inode, dir_inode) = (self.inode_to_change(id)?, self.inode_to_change(dir)?);
        if inode.read()?.is_dir() {
            // As on Linux, an existing name is reported before other errors.
            NameSlot::read(&dir_inode.home.tree, dir.ino, name)?.check_free()?;
            return Err(Error::NotPermitted("a directory can have only one name"));
        }
        let quota = self.engine.reserve_metadata_quota(dir.root, quota_blocks::LINK)?;
        let reservation = self.context.reserve(MetadataPurpose::Change(LINK_ITEMS))?;
        let mut locked = Locked::new(&mut [&inode, &dir_inode])?;
        check_dir_takes_names(locked.of(&dir_inode))?;
        check_linkable(locked.of(&inode), self.inodes.is_linkable(id))?;
        let tree = &inode.home.tree;
        let slot = NameSlot::read(tree, dir.ino, name)?;
        slot.check_free()?;
        let index = next_index(&dir_inode, locked.of(&dir_inode))?;
        let file_type = FileType::from_mode(locked.of(&inode).item.mode).unwrap_or(FileType::Regular) as u8;
        let mut changes = Vec::with_capacity(4);
        let target = (dir_item::inode_location(id.ino), file_type);
        slot.plan_add(&mut changes, tree, &self.geometry, target, index)?;
        dir_item::plan_add_ref(&mut changes, tree, &self.geometry, id.ino, dir.ino, name, index)?;

        let time = Timespec::now();
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, tree, changes);
        let dir_state = locked.of(&dir_inode);
        dir_state.next_index = index.checked_add(1);
        entry_changed(dir_state, time, Some(name.into()), None);
        dir_inode.put_item(&op, dir_state);
        let state = locked.of(&inode);
        if state.item.nlink == 0 {
            op.delete(tree, orphan_key(id.ino));
        }
        state.item.nlink = state.item.nlink.saturating_add(1);
        self.inodes.mark_linked(id);
        inode_changed(&mut state.item, time);
        inode.put_item(&op, state);
        quota.spend();
        drop(op);
        self.count_lookup(id);
        Ok(self.attr_of(&inode, state))
    }

    /// Removes a name of a directory, or of another inode. Returns false, without a change, if the name leads to a
    /// subvolume.
    pub(crate) fn remove_inode(&self, dir: InodeId, name: &[u8], directory: bool) -> Result<bool> {
        dir_item::check_name(name)?;
        let dir_inode = self.inode_to_change(dir)?;
        let mut may_be_unloaded = !directory;
        loop {
            let mut victim = self.find_victim(&dir_inode, name)?;
            let child = victim.id;
            if child.root != dir.root {
                return if directory { Ok(false) } else { Err(Error::IsDirectory) };
            }
            if child.is_stub() {
                return if directory {
                    self.remove_stub(&dir_inode, name).map(|()| true)
                } else {
                    Err(Error::IsDirectory)
                };
            }
            let in_memory = self.inodes.peek(child);
            if in_memory.is_none() && std::mem::take(&mut may_be_unloaded) {
                match self.remove_unloaded(&dir_inode, victim, name)? {
                    true => return Ok(true),
                    false => continue,
                }
            }
            let inode = in_memory.map_or_else(|| self.inode(child), Ok)?;
            match (inode.read()?.is_dir(), directory) {
                (true, false) => return Err(Error::IsDirectory),
                (false, true) => return Err(Error::NotDirectory),
                _ => {}
            }
            let reservation = self
                .context
                .reserve(MetadataPurpose::RemovalSteps { most: LINK_ITEMS + LAST_ITEMS, least: LINK_ITEMS })?;
            let mut locked = Locked::new(&mut [&dir_inode, &inode])?;
            // Every change of a directory's names changes the directory's sequence number. If the number changed, only
            // this name is looked up again: in a busy directory, most changes are of other names.
            if locked.of(&dir_inode).item.sequence != victim.sequence {
                let slot = NameSlot::read(&dir_inode.home.tree, dir.ino, name)?;
                if slot.location() != victim.slot.location() {
                    continue;
                }
                victim.slot = slot;
            }
            check_may_remove(locked.of(&dir_inode))?;
            check_may_change(locked.of(&inode))?;
            let limit = reservation.nr_items().saturating_sub(LINK_ITEMS);
            let last_items = self.last_items(&inode, locked.of(&inode), (dir.ino, name), limit)?;
            if directory {
                match &last_items {
                    Some(items) => items.check_no_entries(locked.of(&inode))?,
                    None => check_empty(&inode, locked.of(&inode))?,
                }
            }
            let mut changes = Vec::with_capacity(4);
            let told = last_items.as_ref().and_then(LastItems::index);
            let index = told.map_or_else(|| plan_remove_ref(&mut changes, &inode, dir.ino, name), Ok)?;
            victim.slot.plan_remove(&mut changes, &dir_inode.home.tree, index)?;

            let time = Timespec::now();
            let op = self.engine.begin(reservation);
            dir_item::put_changes(&op, &dir_inode.home.tree, changes);
            let dir_state = locked.of(&dir_inode);
            entry_changed(dir_state, time, None, Some(name));
            dir_inode.put_item(&op, dir_state);
            if let Some(items) = last_items {
                items.delete(self, &op, locked.of(&inode));
                drop(op);
                drop(locked);
                self.inodes.remove(child);
                return Ok(true);
            }
            let unlinked = drop_link(&op, &inode, locked.of(&inode), time);
            drop(op);
            drop(locked);
            if unlinked && !self.inodes.mark_unlinked(child) {
                self.delete_if_unlinked(child);
            }
            return Ok(true);
        }
    }

    /// Removes the only name of a file that is not in memory, without loading it. If the file is in use, it becomes an
    /// orphan; otherwise it is deleted. Returns false and changes nothing if the directory has changed, or if the file
    /// must be loaded.
    fn remove_unloaded(&self, dir: &Arc<Inode>, victim: Victim<'_>, name: &[u8]) -> Result<bool> {
        let reservation =
            self.context.reserve(MetadataPurpose::RemovalSteps { most: LINK_ITEMS + LAST_ITEMS, least: LINK_ITEMS })?;
        let mut dir_state = dir.write()?;
        if dir_state.item.sequence != victim.sequence {
            return Ok(false);
        }
        check_may_remove(&dir_state)?;
        let (tree, child) = (&dir.home.tree, victim.id);
        let Some(kept_out) = self.inodes.block_load(child) else { return Ok(false) };
        let limit = reservation.nr_items().saturating_sub(LINK_ITEMS);
        let Some((items, index)) = UnloadedItems::of_only_name(tree, child.ino, (dir.id.ino, name), limit)? else {
            return Ok(false);
        };
        let mut changes = Vec::with_capacity(2);
        victim.slot.plan_remove(&mut changes, tree, index)?;
        let time = Timespec::now();
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, tree, changes);
        entry_changed(&mut dir_state, time, None, Some(name));
        dir.put_item(&op, &mut dir_state);
        let is_used = kept_out.is_used();
        if is_used {
            items.make_orphan(&op, tree, (child.ino, dir.id.ino), time);
        } else {
            items.delete(&op, tree);
        }
        drop(op);
        drop(kept_out);
        drop(dir_state);
        if is_used && !self.inodes.mark_unlinked(child) {
            self.delete_if_unlinked(child);
        }
        Ok(true)
    }

    fn find_victim<'n>(&self, dir: &Inode, name: &'n [u8]) -> Result<Victim<'n>> {
        let state = dir.read()?;
        if !state.is_dir() {
            return Err(Error::NotDirectory);
        }
        let slot = NameSlot::read(&dir.home.tree, dir.id.ino, name)?;
        let id = self.target_id(dir.id, &slot.location().ok_or(Error::NotFound)?, name)?;
        Ok(Victim { slot, id, sequence: state.item.sequence })
    }

    /// Removes the name of an empty directory that stands for a subvolume ([`InodeId::stub`]).
    fn remove_stub(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
        let reservation = self.context.reserve(MetadataPurpose::Removal(LINK_ITEMS))?;
        let mut state = dir.write()?;
        check_may_remove(&state)?;
        let entry = dir_item::find_entry(&dir.home.tree, dir.id.ino, name)?.ok_or(Error::NotFound)?;
        if !self.target_id(dir.id, &entry.location, name)?.is_stub() {
            return Err(Error::Busy("the directory changed"));
        }
        let index = dir_item::find_index(&dir.home.tree, dir.id.ino, name)?.ok_or(Error::NotFound)?;
        let mut changes = Vec::with_capacity(2);
        dir_item::plan_remove(&mut changes, &dir.home.tree, dir.id.ino, name, index)?;
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &dir.home.tree, changes);
        entry_changed(&mut state, Timespec::now(), None, Some(name));
        dir.put_item(&op, &mut state);
        Ok(())
    }
}

/// Plans the changes that remove an inode's name: reference, entry and index.
pub(crate) fn plan_unlink(changes: &mut Vec<PlannedChange>, inode: &Inode, dir: Ino, name: &[u8]) -> Result<()> {
    let index = plan_remove_ref(changes, inode, dir, name)?;
    dir_item::plan_remove(changes, &inode.home.tree, dir, name, index)
}

/// Plans the change that removes an inode's reference to a name. Returns the name's index.
fn plan_remove_ref(changes: &mut Vec<PlannedChange>, inode: &Inode, dir: Ino, name: &[u8]) -> Result<u64> {
    match dir_item::plan_remove_ref(changes, &inode.home.tree, inode.id.ino, dir, name)? {
        Some(index) => Ok(index),
        None => dir_item::find_index(&inode.home.tree, dir, name)?.ok_or(Error::NotFound),
    }
}

/// Removes one link. If no link is left, the inode becomes an orphan, and the function returns true.
pub(crate) fn drop_link(op: &TransHandle<'_>, inode: &Inode, state: &mut InodeState, time: Timespec) -> bool {
    state.item.nlink = state.item.nlink.saturating_sub(1);
    inode_changed(&mut state.item, time);
    let unlinked = state.item.nlink == 0;
    if unlinked {
        op.put(&inode.home.tree, orphan_key(inode.id.ino), Vec::new());
    }
    inode.put_item(op, state);
    unlinked
}

/// Updates an inode after a change of its names.
pub(crate) fn inode_changed(item: &mut InodeItem, time: Timespec) {
    item.ctime = time;
    item.sequence = item.sequence.wrapping_add(1);
}

fn check_linkable(state: &InodeState, made_without_name: bool) -> Result<()> {
    if state.item.nlink == 0 && !made_without_name {
        return Err(Error::NotFound);
    }
    if state.item.nlink >= LINK_MAX {
        return Err(Error::TooManyLinks);
    }
    check_may_change(state)
}

/// Fails if a directory was removed, or if its flags forbid removing names.
pub(crate) fn check_may_remove(dir: &InodeState) -> Result<()> {
    if dir.removed {
        return Err(Error::NotFound);
    }
    if dir.has_flags(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
        return Err(Error::NotPermitted("the directory is immutable or append-only"));
    }
    Ok(())
}

/// Fails if a directory has entries.
pub(crate) fn check_empty(dir: &Inode, state: &InodeState) -> Result<()> {
    if state.item.size != 0 || dir_item::has_entries(&dir.home.tree, dir.id.ino)? {
        return Err(Error::NotEmpty);
    }
    Ok(())
}

/// Maximum number of links of an inode.
const LINK_MAX: u32 = 65_535;
/// Number of items to reserve for a link or unlink, which changes at most six: entry, index, reference, both inodes,
/// orphan item.
const LINK_ITEMS: usize = 8;
/// Maximum number of an inode's items that are deleted in one operation with its last name.
const LAST_ITEMS: usize = 16;
